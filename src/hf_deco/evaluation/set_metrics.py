"""Metrics of rankings with several relevant items: what a household buys in a week is a set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .metrics import check_cutoffs


def set_metrics(ranked: np.ndarray, relevant: Sequence[np.ndarray], ks: Sequence[int]) -> dict[str, float]:
    """Recall and NDCG, means over examples.

    With `h_r` 1 where the item at rank `r` (from 0) is relevant, and `n` relevant items,
    `recall@k = sum_{r < k} h_r / n` and `ndcg@k = sum_{r < k} h_r / log2(r + 2) / sum_{r < min(k, n)} 1 / log2(r + 2)`.

    Args:
        ranked (`np.ndarray` of shape `(E, R)`): distinct items of every example, best first; -1 for none.
        relevant (sequence of `E` `np.ndarray` of shape `(n,)`): distinct items, at least one of each example.
        ks (sequence of `int`): cutoffs; beyond `R` nothing is found.

    Raises:
        ValueError: a cutoff is malformed, numbers of examples differ, there is none, or one has nothing relevant.
    """
    check_cutoffs(ks)
    hits = find_hits(ranked, relevant)
    sizes = np.array([len(items) for items in relevant])
    if not len(sizes) or not sizes.all():
        raise ValueError("`relevant` needs at least one example, and an item in each; leave the others out.")
    worth = 1 / np.log2(np.arange(max(max(ks), ranked.shape[1])) + 2)
    ideal = np.append(0, np.cumsum(worth))
    metrics = {}
    for k in ks:
        found = hits[:, :k]
        metrics[f"recall@{k}"] = float((found.sum(1) / sizes).mean())
        metrics[f"ndcg@{k}"] = float((found @ worth[: found.shape[1]] / ideal[np.minimum(k, sizes)]).mean())
    return metrics


def share_found(ranked: np.ndarray, relevant: Sequence[np.ndarray], ks: Sequence[int]) -> dict[str, float]:
    """`recall@k` over all pairs of an example and a relevant item, for targets so few that most examples have none.

    Args:
        ranked, relevant, ks: As for `set_metrics`, but examples may have nothing relevant.

    Returns:
        `dict`: `recall@k`, without them where nothing is relevant, and `num_targets`.
    """
    hits, number = find_hits(ranked, relevant), sum(len(items) for items in relevant)
    shares = {f"recall@{k}": float(hits[:, :k].sum() / number) for k in ks} if number else {}
    return shares | {"num_targets": number}


def find_hits(ranked: np.ndarray, relevant: Sequence[np.ndarray]) -> np.ndarray:
    """Where the items of a ranking `(E, R)` are relevant, bool of the same shape."""
    if ranked.ndim != 2 or len(ranked) != len(relevant):
        raise ValueError(f"`ranked` must have a row for each of {len(relevant)} examples, got shape {ranked.shape}.")
    found = [np.isin(row, items) for row, items in zip(ranked, relevant, strict=True)]
    return np.stack(found) & (ranked >= 0) if found else np.zeros(ranked.shape, dtype=bool)
