"""Ranks of target items, and what they are worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MISS = int(np.iinfo(np.int64).max)
"""The rank of a target that was not retrieved: beyond every cutoff."""


def ranking_metrics(ranks: np.ndarray, ks: Sequence[int] = (10, 50, 100)) -> dict[str, float]:
    """NDCG and recall with one relevant item an example.

    A target at rank `r < k`, counted from 0, is worth `1 / log2(r + 2)` to NDCG@k and 1 to Recall@k. The ideal ranking
    is worth 1 to both, so no normaliser is needed.

    Args:
        ranks (`np.ndarray` of shape `(E,)`): rank of each target from 0 on; a miss is any rank of `k` or more.
        ks (`Sequence[int]`, *optional*, defaults to `(10, 50, 100)`): cutoffs.

    Returns:
        `dict[str, float]`: `"ndcg@k"` and `"recall@k"` for each cutoff, means over the examples.

    Raises:
        ValueError: there are no ranks, a rank is negative, or a cutoff is below 1.
    """
    ranks = np.asarray(ranks)
    if ranks.ndim != 1 or len(ranks) == 0:
        raise ValueError(f"`ranks` has shape {ranks.shape}; pass one rank for each of at least 1 example.")
    if ranks.min() < 0:
        raise ValueError(f"`ranks` contains {ranks.min()}; ranks count from 0, and a miss is `MISS`.")
    check_cutoffs(ks)
    gains = 1 / np.log2(ranks.astype(np.float64) + 2)
    metrics = {}
    for k in ks:
        hit = ranks < k
        metrics[f"ndcg@{k}"] = float(np.where(hit, gains, 0.0).mean())
        metrics[f"recall@{k}"] = float(hit.mean())
    return metrics


def ranks_of_targets(retrieved: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Find each target in its list of retrieved items.

    Args:
        retrieved (`np.ndarray` of shape `(E, R)`): item indices, best first, -1 where fewer than `R` were found.
        targets (`np.ndarray` of shape `(E,)`): item indices.

    Returns:
        `np.ndarray` of shape `(E,)`, int64: first place of the target, or [`MISS`].

    Raises:
        ValueError: the shapes do not go together.
    """
    retrieved, targets = np.asarray(retrieved), np.asarray(targets)
    if retrieved.ndim != 2 or targets.shape != retrieved.shape[:1]:
        raise ValueError(
            f"`retrieved` has shape {retrieved.shape} and `targets` {targets.shape}; need (E, R) and (E,)."
        )
    # A further column that always matches spares the special case of a row without a match.
    hit = np.pad(retrieved == targets[:, None], ((0, 0), (0, 1)), constant_values=True)
    place = hit.argmax(axis=1)
    return np.where(place < retrieved.shape[1], place, MISS)


def ranks_in_lists(retrieved: Sequence[Sequence], targets: Sequence) -> np.ndarray:
    """Find each target in its list of retrieved items, where lists differ in length or items are ids.

    Args:
        retrieved (`Sequence` of `E` sequences): items, best first, as integers or strings; -1 or None where nothing was
            found.
        targets (`Sequence` of length `E`): items; -1 or None is found nowhere.

    Returns:
        `np.ndarray` of shape `(E,)`, int64: first place of the target, or [`MISS`].

    Raises:
        ValueError: the lengths differ.
    """
    if len(retrieved) != len(targets):
        raise ValueError(f"`retrieved` has {len(retrieved)} lists for {len(targets)} `targets`; need one for each.")
    ranks = np.full(len(targets), MISS)
    for row, (items, target) in enumerate(zip(retrieved, targets, strict=True)):
        if target is not None and target != -1 and target in items:
            ranks[row] = list(items).index(target)
    return ranks


def ranks_of_scores(scores: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Count the items that score strictly higher than the target, so that ties favour the target.

    Args:
        scores (`np.ndarray` of shape `(B, C)`): a score for each catalog item.
        columns (`np.ndarray` of shape `(B,)`): column of the target, or -1 where the target is not in the catalog.

    Returns:
        `np.ndarray` of shape `(B,)`, int64: ranks from 0 on, [`MISS`] for targets outside the catalog.

    Raises:
        ValueError: a score is NaN, which would pass for the best of ranks.
    """
    if np.isnan(scores).any():
        raise ValueError(f"`scores` contains {int(np.isnan(scores).sum()):,} NaN; every catalog item needs a score.")
    target_scores = np.take_along_axis(scores, columns[:, None].clip(0), axis=1)
    return np.where(columns >= 0, (scores > target_scores).sum(axis=1), MISS)


def check_cutoffs(ks: Sequence[int]) -> None:
    """Raise a `ValueError` unless there are cutoffs and all are positive."""
    if len(ks) == 0 or min(ks) < 1:
        raise ValueError(f"`ks` is {tuple(ks)}; pass at least one cutoff, each of at least 1.")
