"""Metrics against hand-counted values and plain loops."""

import math

import numpy as np
import pytest

from hf_deco.evaluation import MISS, ranking_metrics, ranks_of_scores, ranks_of_targets
from hf_deco.evaluation.metrics import ranks_in_lists


def test_hand_counted_metrics():
    metrics = ranking_metrics(np.array([0, 2, 9, 10, MISS]), ks=(1, 10, 11))
    assert metrics == pytest.approx(
        {
            "ndcg@1": 1 / 5,
            "recall@1": 1 / 5,
            "ndcg@10": (1 + 1 / 2 + 1 / math.log2(11)) / 5,  # ranks 0, 2, 9 are places 1, 3, 10
            "recall@10": 3 / 5,
            "ndcg@11": (1 + 1 / 2 + 1 / math.log2(11) + 1 / math.log2(12)) / 5,
            "recall@11": 4 / 5,
        }
    )


def test_default_cutoffs_and_plain_floats():
    metrics = ranking_metrics(np.array([MISS]))
    assert metrics == dict.fromkeys(["ndcg@10", "recall@10", "ndcg@50", "recall@50", "ndcg@100", "recall@100"], 0.0)
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize(
    ("ranks", "ks", "message"),
    [
        ([], (10,), r"`ranks` has shape \(0,\)"),
        ([[1]], (10,), r"`ranks` has shape \(1, 1\)"),
        ([3, -1], (10,), r"`ranks` contains -1; ranks count from 0, and a miss is `MISS`"),
        ([3], (), r"`ks` is \(\); pass at least one cutoff"),
        ([3], (10, 0), r"`ks` is \(10, 0\); .* at least 1"),
    ],
)
def test_bad_ranks_and_cutoffs(ranks, ks, message):
    with pytest.raises(ValueError, match=message):
        ranking_metrics(np.array(ranks), ks)


def test_ranks_of_targets():
    retrieved = np.array([[5, 3, 7], [3, 5, -1], [9, -1, -1], [-1, -1, -1], [4, 4, 4]])
    assert ranks_of_targets(retrieved, np.array([5, 5, 5, 5, 4])).tolist() == [0, 1, MISS, MISS, 0]
    assert ranks_of_targets(np.empty((2, 0), dtype=int), np.array([1, 2])).tolist() == [MISS, MISS]
    with pytest.raises(ValueError, match=r"`retrieved` has shape \(5, 3\) and `targets` \(4,\)"):
        ranks_of_targets(retrieved, np.arange(4))
    with pytest.raises(ValueError, match=r"`retrieved` has shape \(5,\)"):
        ranks_of_targets(retrieved[:, 0], np.arange(5))


@pytest.mark.parametrize("seed", range(5))
def test_random_ranks_equal_list_index(seed):
    draw = np.random.default_rng(seed)
    retrieved = np.array([draw.permutation(30)[:12] for _ in range(40)])
    targets = draw.integers(30, size=40)
    expected = [row.index(t) if t in row else MISS for row, t in zip(retrieved.tolist(), targets.tolist(), strict=True)]
    assert ranks_of_targets(retrieved, targets).tolist() == expected


def test_ranks_in_ragged_lists_of_ids():
    retrieved = [["a", "b", "b"], [], [None, "c"], ["d"], np.array([4, -1, 7]), [-1, -1], [None]]
    targets = ["b", "a", "c", "x", 7, -1, None]
    assert ranks_in_lists(retrieved, targets).tolist() == [1, MISS, 1, MISS, 2, MISS, MISS]
    with pytest.raises(ValueError, match="`retrieved` has 1 lists for 2 `targets`"):
        ranks_in_lists([["a"]], ["a", "b"])


def test_ranks_of_scores_favour_the_target_in_ties():
    scores = np.array([[3.0, 5.0, 5.0, -np.inf], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, -np.inf]])
    assert ranks_of_scores(scores, np.array([0, 3, -1, 3])).tolist() == [2, 0, MISS, 3]


def test_nan_scores_are_refused():
    with pytest.raises(ValueError, match=r"`scores` contains 2 NaN"):
        ranks_of_scores(np.array([[1.0, np.nan], [np.nan, 2.0]]), np.array([0, 0]))
