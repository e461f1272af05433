"""Slices, cold targets and truncation, on handmade examples and against plain loops."""

import math

import numpy as np
import pytest

from hf_deco.data import Examples, Sequences
from hf_deco.evaluation import MISS, Evaluator


def _examples(pairs):
    """Examples from (history, target) pairs."""
    histories = [history for history, _ in pairs]
    offsets = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    users = np.arange(len(pairs))
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    return Examples(Sequences(offsets, items, users), np.array([target for _, target in pairs]), users)


# Items 0..7; item 3 is not in the catalog. By count: 5 (9), 1 (7), 0 (4), 4 (4), 6 (2), 7 (1), 2 (0): thirds of seven
# items are places 0-2, 3-4, 5-6.
COUNTS = np.array([4, 7, 0, 0, 4, 9, 2, 1])
CATALOG = np.array([0, 1, 2, 4, 5, 6, 7])
PAIRS = [
    ([0, 1, 2], 0),  # repeat, head
    ([4, 4], 5),  # new, head
    ([], 4),  # new, torso
    ([3, 6], 3),  # repeat, cold
    ([2, 7, 0, 1], 7),  # repeat, tail
]
RANKS = np.array([0, 2, MISS, 0, 1])


def test_handmade_slices():
    metrics = Evaluator(_examples(PAIRS), COUNTS, CATALOG, ks=(1, 2)).metrics(RANKS)

    second = 1 / math.log2(3)
    expected = {
        "": (5, 1 / 5, 2 / 5, (1 + second) / 5),  # the cold target's rank 0 does not count
        "repeat/": (3, 1 / 3, 2 / 3, (1 + second) / 3),
        "new/": (2, 0, 0, 0),
        "warm/": (4, 1 / 4, 2 / 4, (1 + second) / 4),
        "head/": (2, 1 / 2, 1 / 2, 1 / 2),
        "torso/": (1, 0, 0, 0),
        "tail/": (1, 0, 1, second),
    }
    flat = {"num_cold_targets": 1}
    for name, (num_examples, at_1, recall_at_2, ndcg_at_2) in expected.items():
        flat |= {f"{name}num_examples": num_examples, f"{name}ndcg@1": at_1, f"{name}recall@1": at_1}
        flat |= {f"{name}ndcg@2": ndcg_at_2, f"{name}recall@2": recall_at_2}
    assert metrics == pytest.approx(flat)


def test_dropped_cold_targets_are_still_counted():
    evaluator = Evaluator(_examples(PAIRS), COUNTS, CATALOG, ks=(1,), cold_targets="drop")
    assert evaluator.examples.targets.tolist() == [0, 5, 4, 7]
    metrics = evaluator.metrics(RANKS[[0, 1, 2, 4]])
    assert (metrics["num_examples"], metrics["num_cold_targets"]) == (4, 1)
    assert metrics["recall@1"] == metrics["warm/recall@1"] == 1 / 4
    assert metrics["repeat/num_examples"] == 2


def test_truncation_makes_a_repeat_new():
    evaluator = Evaluator(_examples(PAIRS), COUNTS, CATALOG, ks=(1,), max_history_length=2)
    assert [history.tolist() for history in evaluator.examples.histories] == [[1, 2], [4, 4], [], [3, 6], [0, 1]]
    metrics = evaluator.metrics(RANKS)
    assert (metrics["repeat/num_examples"], metrics["new/num_examples"]) == (1, 4)


def test_empty_slices_are_left_out():
    metrics = Evaluator(_examples([([1], 5)]), COUNTS, CATALOG, ks=(1,)).metrics(np.array([0]))
    assert set(metrics) == {"num_examples", "num_cold_targets"} | {
        f"{name}{key}" for name in ("", "new/", "warm/", "head/") for key in ("ndcg@1", "recall@1", "num_examples")
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10])
def test_thirds_of_a_catalog_hold_a_third_each(size):
    counts = np.random.default_rng(size).integers(5, size=size)
    examples = _examples([([], item) for item in range(size)])
    metrics = Evaluator(examples, counts, np.arange(size), ks=(1,)).metrics(np.zeros(size))
    order = sorted(range(size), key=lambda item: (-counts[item], item))
    expected = [sum(3 * place // size == third for place in range(len(order))) for third in range(3)]
    assert [metrics.get(f"{name}/num_examples", 0) for name in ("head", "torso", "tail")] == expected


@pytest.mark.parametrize("seed", range(4))
def test_random_slices_equal_a_loop(seed):
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 6, size=20)
    catalog = np.flatnonzero(counts)
    pairs = [(draw.integers(20, size=draw.integers(0, 9)).tolist(), int(draw.integers(20))) for _ in range(80)]
    ranks = draw.integers(0, 30, size=80)
    metrics = Evaluator(_examples(pairs), counts, catalog, ks=(10,), max_history_length=5).metrics(ranks)

    order = sorted(catalog.tolist(), key=lambda item: (-counts[item], item))
    slices = {}
    for (history, target), rank in zip(pairs, ranks.tolist(), strict=True):
        warm = target in order
        gain = 1 / math.log2(rank + 2) if warm and rank < 10 else 0.0
        names = ["repeat" if target in history[-5:] else "new"]
        if warm:
            names += ["warm", ("head", "torso", "tail")[3 * order.index(target) // len(order)]]
        for name in names:
            slices.setdefault(name, []).append(gain)
    assert len(slices) == 6
    for name, gains in slices.items():
        assert metrics[f"{name}/num_examples"] == len(gains)
        assert metrics[f"{name}/ndcg@10"] == pytest.approx(sum(gains) / len(gains))
    assert metrics["num_cold_targets"] == 80 - len(slices["warm"])


def test_retrieved_items_and_scores_give_the_same_metrics():
    draw = np.random.default_rng(0)
    evaluator = Evaluator(_examples(PAIRS), COUNTS, CATALOG, ks=(1, 3))
    table = draw.permutation(np.arange(35.0)).reshape(5, 7)  # no ties
    retrieved = CATALOG[np.argsort(-table, axis=1)]
    by_scores = evaluator.evaluate(lambda histories: table[histories.user_index])
    assert by_scores == evaluator.evaluate_retrieved(retrieved) == evaluator.evaluate_retrieved(retrieved[:, :3])
    assert 0 < by_scores["recall@3"] < 1


def test_a_retrieved_cold_target_is_still_a_miss():
    evaluator = Evaluator(_examples([([0], 3), ([0], 1)]), COUNTS, CATALOG, ks=(1,))
    assert evaluator.evaluate_retrieved(np.array([[3], [1]]))["recall@1"] == 1 / 2


def test_scoring_in_batches_changes_nothing(monkeypatch):
    evaluator = Evaluator(_examples(PAIRS * 3), COUNTS, CATALOG, ks=(1, 3))
    sizes = []

    def scorer(histories):
        sizes.append(len(histories))
        return np.cos(histories.user_index[:, None] * 7.0 + CATALOG)

    whole = evaluator.evaluate(scorer)
    monkeypatch.setattr("hf_deco.evaluation.evaluator._SCORES_AT_ONCE", 4 * len(CATALOG))
    assert evaluator.evaluate(scorer) == whole
    assert sizes == [15, 4, 4, 4, 3]


def test_bad_arguments_are_refused():
    examples = _examples(PAIRS)
    with pytest.raises(ValueError, match=r"`cold_targets` is 'keep'; choose 'miss' or 'drop'"):
        Evaluator(examples, COUNTS, CATALOG, cold_targets="keep")
    with pytest.raises(ValueError, match=r"`ks` is \(0,\)"):
        Evaluator(examples, COUNTS, CATALOG, ks=(0,))
    with pytest.raises(ValueError, match=r"`max_length` is 0"):
        Evaluator(examples, COUNTS, CATALOG, max_history_length=0)
    with pytest.raises(ValueError, match=r"no example is left to evaluate; 1 had a target outside `catalog`"):
        Evaluator(_examples([([1], 3)]), COUNTS, CATALOG, cold_targets="drop")
    evaluator = Evaluator(examples, COUNTS, CATALOG, ks=(1, 5))
    with pytest.raises(ValueError, match=r"`ranks` has shape \(4,\); `self.examples` asks for \(5,\)"):
        evaluator.metrics(RANKS[:4])
    with pytest.raises(ValueError, match=r"`item_indices` has shape \(5, 4\); `ks`=\(1, 5\) needs 5 items"):
        evaluator.evaluate_retrieved(np.zeros((5, 4), dtype=int))


def test_a_small_catalog_needs_no_more_items_than_it_has():
    evaluator = Evaluator(_examples(PAIRS), COUNTS, CATALOG, ks=(100,))
    assert evaluator.evaluate_retrieved(np.tile(CATALOG, (5, 1)))["recall@100"] == 4 / 5
