"""The floors against brute force on random logs, and by hand where a rule could be read in two ways."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from hf_deco.data import Sequences, leave_one_out_split, read_interactions, temporal_split
from hf_deco.evaluation import (
    CooccurrenceFloor,
    Evaluator,
    PopularityFloor,
    TextNeighborFloor,
    floor_metrics,
)


def _log(rows):
    return read_interactions(pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"]))


def _histories(lists):
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])])
    flat = np.array([item for items in lists for item in items], dtype=np.int64)
    return Sequences(offsets, flat, np.arange(len(lists)))


@pytest.fixture(params=range(3))
def split(request):
    draw = np.random.default_rng(request.param)
    columns = (draw.integers(high, size=400).tolist() for high in (30, 25, 200))
    rows = [(f"u{user}", f"i{item}", time) for user, item, time in zip(*columns, strict=True)]
    # Items that training never sees make the catalog smaller than the item table.
    rows += [(f"u{user}", f"late{user}", 300 + user) for user in range(8)]
    return temporal_split(_log(rows))


@pytest.fixture
def embeddings(split):
    return np.random.default_rng(9).normal(size=(len(split.item_counts), 6)).astype(np.float16)


def test_popularity(split):
    popular = Counter(item for items in split.train for item in items.tolist())
    scores = PopularityFloor(split)(_histories([[], [1, 2]]))
    assert scores.tolist() == [[popular[item] for item in split.catalog.tolist()]] * 2


def test_text_neighbors_equal_brute_force(split, embeddings):
    outside = next(item for item in range(len(embeddings)) if item not in split.catalog)
    lists = [[3, 1], [4, outside], [], [int(split.catalog[0])]]
    scores = TextNeighborFloor(split, embeddings * 5)(_histories(lists))

    vectors = embeddings.astype(np.float64)
    for row, items in enumerate(lists):
        for column, item in enumerate(split.catalog.tolist()):
            if not items:
                expected = split.item_counts[item]  # no last item: popularity
            elif item == items[-1]:
                expected = -np.inf
            else:
                a, b = vectors[items[-1]], vectors[item]
                expected = a @ b / np.sqrt((a @ a) * (b @ b))
            assert scores[row, column] == pytest.approx(expected, abs=1e-3)
    assert np.isneginf(scores).sum() == 2  # the last item of the second history is not in the catalog


def test_cooccurrence_equals_brute_force(split):
    pairs = Counter()
    for items in split.train:
        for i, first in enumerate(items.tolist()):
            for second in items[i + 1 : i + 4].tolist():
                pairs[first, second] += 1
                pairs[second, first] += 1
    lists = [[], [3], [1, 1], [0, 1, 2, 3, 4, 5, 6, 7], list(range(len(split.item_counts)))]
    scores = CooccurrenceFloor(split)(_histories(lists))
    for row, items in enumerate(lists):
        for column, item in enumerate(split.catalog.tolist()):
            expected = split.item_counts[item] * 1e-6
            for recency, seen in enumerate(reversed(items[-5:]), start=1):
                expected += pairs[seen, item] / recency
            assert scores[row, column] == pytest.approx(expected, rel=1e-9)


def test_cooccurrence_by_hand():
    # Training: u sees a b c d e (then x y held out), v sees c alone.
    rows = [("u", item, time) for time, item in enumerate("abcdexy")] + [("v", "c", 0)]
    split = leave_one_out_split(_log(rows))
    a, b, e = 0, 1, 4
    scores = CooccurrenceFloor(split)(_histories([[a], [e, a]]))
    popularity = np.array([1, 1, 2, 1, 1, 0, 0]) * 1e-6
    assert scores[0] == pytest.approx([0, 1, 1, 1, 0, 0, 0] + popularity)  # e is four places from a
    assert scores[1] == pytest.approx([0, 1.5, 1.5, 1.5, 0, 0, 0] + popularity)  # e is the second latest: halves
    assert scores[0, b] == 1 + 1e-6


def test_cooccurrence_without_any_pair_is_popularity():
    rows = [(user, item, time) for user in "uvw" for time, item in enumerate("abc")]
    split = leave_one_out_split(_log(rows))  # one training event a user
    assert CooccurrenceFloor(split)(_histories([[0, 1]])).tolist() == [[3e-6, 0, 0]]


def test_floor_metrics_ranks_the_catalog_by_brute_force(split, embeddings):
    options = {"ks": (3, 10), "max_history_length": 4, "cold_targets": "drop"}
    metrics = floor_metrics(split, split.test, embeddings, **options)
    assert list(metrics) == ["popularity", "text_neighbors", "cooccurrence"]
    evaluator = Evaluator(split.test, split.item_counts, split.catalog, **options)
    floors = (PopularityFloor(split), TextNeighborFloor(split, embeddings), CooccurrenceFloor(split))
    for name, floor in zip(metrics, floors, strict=True):
        ranks = []
        for history, target in zip(evaluator.examples.histories, evaluator.examples.targets, strict=True):
            scores = dict(zip(split.catalog.tolist(), floor(_histories([history.tolist()]))[0].tolist(), strict=True))
            ranks.append(sum(score > scores[target] for score in scores.values()))
        assert metrics[name] == evaluator.metrics(np.array(ranks))
        assert metrics[name]["recall@10"] > 0


def test_without_embeddings_there_are_two_floors(split):
    assert list(floor_metrics(split, split.validation)) == ["popularity", "cooccurrence"]


def test_zero_embeddings_are_no_nan(split, embeddings):
    scores = TextNeighborFloor(split, embeddings * 0)(_histories([[3]]))
    assert not np.isnan(scores).any()


def test_embeddings_of_another_catalog_are_refused(split, embeddings):
    with pytest.raises(ValueError, match=rf"`embeddings` has shape \(5, 6\); .* {len(embeddings)} items"):
        floor_metrics(split, split.test, embeddings[:5])
    with pytest.raises(ValueError, match=r"`embeddings` has shape"):
        floor_metrics(split, split.test, embeddings[:, 0])
