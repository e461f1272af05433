"""The floors on two public logs come within 3 % of an independent computation."""

import os
from pathlib import Path

import numpy as np
import pytest

from hf_deco.data import leave_one_out_split, read_interactions, read_items, temporal_split
from hf_deco.evaluation import CooccurrenceFloor, Evaluator, floor_metrics

DATA = Path(os.environ.get("HF_DECO_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

# recall@10, ndcg@10, recall@100
BEAUTY = {
    leave_one_out_split: {
        "popularity": (0.0120, 0.0055, 0.0551),
        "text_neighbors": (0.0639, 0.0387, 0.1526),
        "cooccurrence": (0.0678, 0.0373, 0.1874),
    },
    temporal_split: {
        "popularity": (0.0071, 0.0032, 0.0364),
        "text_neighbors": (0.0486, 0.0290, 0.1084),
        "cooccurrence": (0.0307, 0.0179, 0.0937),
    },
}
SPORTS_COOCCURRENCE = (0.0309, 0.0177, 0.0895)


def _read(name):
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"no real logs under {DATA}; set HF_DECO_DATA to their folder")
    log = read_interactions(folder / "interactions.parquet", items=read_items(folder / "items.parquet"))
    return log, np.load(folder / "item_embeddings.npy")


def _figures(metrics):
    return metrics["recall@10"], metrics["ndcg@10"], metrics["recall@100"]


@pytest.mark.parametrize("protocol", BEAUTY, ids=lambda protocol: protocol.__name__)
def test_beauty(protocol):
    log, embeddings = _read("amazon14_beauty")
    split = protocol(log)
    metrics = floor_metrics(split, split.test, embeddings)
    for name, expected in BEAUTY[protocol].items():
        assert _figures(metrics[name]) == pytest.approx(expected, rel=0.03), name


def test_sports_temporal_cooccurrence():
    log, _ = _read("amazon14_sports")
    split = temporal_split(log)
    evaluator = Evaluator(split.test, split.item_counts, split.catalog)
    assert _figures(evaluator.evaluate(CooccurrenceFloor(split))) == pytest.approx(SPORTS_COOCCURRENCE, rel=0.03)
