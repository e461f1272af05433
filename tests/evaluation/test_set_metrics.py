"""Metrics over sets and floors of a stream, against naive formulas."""

from math import log2

import numpy as np
import pytest

from hf_deco.data.events import read_event_log, read_item_texts
from hf_deco.data.roles import read_roles
from hf_deco.evaluation.set_metrics import set_metrics, share_found
from hf_deco.evaluation.stream_floors import rank_last, rank_popular


def test_recall_and_ndcg_of_several_relevant_items():
    random = np.random.default_rng(0)
    ranked = np.stack([random.permutation(20)[:8] for _ in range(30)])
    ranked[3, 5:] = -1
    relevant = [random.choice(20, size, replace=False) for size in random.integers(1, 9, size=30)]
    metrics = set_metrics(ranked, relevant, (3, 8, 12))
    for k in (3, 8, 12):
        recalls, gains = [], []
        for row, items in zip(ranked.tolist(), relevant, strict=True):
            found = [item in items.tolist() for item in row[:k]]
            recalls.append(sum(found) / len(items))
            best = sum(1 / log2(rank + 2) for rank in range(min(k, len(items))))
            gains.append(sum(hit / log2(rank + 2) for rank, hit in enumerate(found)) / best)
        assert metrics[f"recall@{k}"] == pytest.approx(np.mean(recalls))
        assert metrics[f"ndcg@{k}"] == pytest.approx(np.mean(gains))


def test_a_perfect_ranking_is_worth_one():
    metrics = set_metrics(np.array([[4, 2, 9, 1]]), [np.array([2, 4])], (2, 4))
    assert metrics == {"recall@2": 1.0, "ndcg@2": 1.0, "recall@4": 1.0, "ndcg@4": 1.0}


def test_the_share_found_counts_targets_not_examples():
    ranked, relevant = np.array([[1, 2], [3, -1], [5, 6]]), [np.array([2, 9]), np.array([], dtype=int), np.array([5])]
    assert share_found(ranked, relevant, (1, 2)) == {"recall@1": 1 / 3, "recall@2": 2 / 3, "num_targets": 3}
    assert share_found(ranked[:1], [np.array([], dtype=int)], (1,)) == {"num_targets": 0}


@pytest.mark.parametrize(
    "ranked, relevant, ks, message",
    [
        (np.ones((1, 2)), [np.array([])], (1,), "`relevant` needs at least one example, and an item in each"),
        (np.ones((0, 2)), [], (1,), "`relevant` needs at least one example"),
        (np.ones((2, 2)), [np.array([1])], (1,), "`ranked` must have a row for each of 1 examples"),
        (np.ones((1, 2)), [np.array([1])], (0,), "ks"),
    ],
)
def test_metrics_of_nothing_are_refused(ranked, relevant, ks, message):
    with pytest.raises(ValueError, match=message):
        set_metrics(ranked, relevant, ks)


def test_floors_know_what_happened_before_the_period(stream_folder):
    roles = read_roles(stream_folder / "log.yaml")
    log = read_event_log(roles, read_item_texts(roles.items), np.load(stream_folder / "embeddings.npy"))
    before = log.items[log.periods < 3].tolist()
    popular = sorted(set(before), key=lambda item: (-before.count(item), item))
    users = np.array([2, 11])
    assert rank_popular(log, users, 3, 7).tolist() == [popular[:7]] * 2
    for user, row in zip(users, rank_last(log, users, 3, 30).tolist(), strict=True):
        own = list(dict.fromkeys(log.items[(log.users == user) & (log.periods < 3)][::-1].tolist()))
        rest = [item for item in popular if item not in own]
        wanted = (own + rest)[:30]
        assert row == wanted + [-1] * (30 - len(wanted)) and row[-1] == -1
    assert rank_popular(log, users, 0, 2).tolist() == [[-1, -1]] * 2
