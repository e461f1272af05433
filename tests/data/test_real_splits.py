"""The splits of two public logs have the sizes that an independent computation gave."""

import os
from pathlib import Path

import numpy as np
import pytest

from hf_deco.data import leave_one_out_split, read_interactions, read_items, temporal_split

DATA = Path(os.environ.get("HF_DECO_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

# name: users, items, interactions; borders; train / validation / test interactions; test users, targets in the train
# catalog, train catalog
EXPECTED = {
    "amazon14_beauty": (
        (22_363, 12_101, 198_502),
        ("2014-03-14", "2014-05-13"),
        (160_760, 17_595, 20_147),
        (6_188, 4_811, 11_802),
    ),
    "amazon14_sports": (
        (35_598, 18_357, 296_337),
        ("2014-02-17", "2014-04-26"),
        (239_882, 26_779, 29_676),
        (10_261, 9_252, 18_102),
    ),
}


@pytest.fixture(scope="module", params=EXPECTED)
def real(request):
    folder = DATA / request.param
    if not folder.is_dir():
        pytest.skip(f"no real logs under {DATA}; set HF_DECO_DATA to their folder")
    log = read_interactions(folder / "interactions.parquet", items=read_items(folder / "items.parquet"))
    return log, EXPECTED[request.param]


def test_log(real):
    log, (sizes, *_) = real
    summary = log.summary()
    assert (summary["users"], summary["items"], summary["interactions"]) == sizes
    assert len(log.k_core(user=5, item=5)) == len(log)  # both logs are published as 5-cores


def test_temporal_split(real):
    log, (_, days, num_interactions, (test_users, warm_targets, catalog)) = real
    split = temporal_split(log)
    assert tuple(str(np.datetime64(border, "s").astype("datetime64[D]")) for border in split.borders) == days
    assert split.num_interactions == num_interactions
    assert len(split.test) == test_users
    assert np.isin(split.test.targets, split.catalog).sum() == warm_targets
    assert len(split.catalog) == catalog


def test_leave_one_out_split(real):
    log, ((users, items, interactions), *_) = real
    split = leave_one_out_split(log)
    assert len(split.train) == len(split.validation) == len(split.test) == users
    assert split.num_interactions == (interactions - 2 * users, users, users)
    assert len(split.catalog) == items
