"""The best of many scored candidates that come in groups: sorted, cut to a number per group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..models.scoring_sid import segment_log_softmax


@dataclass(frozen=True)
class Reranked:
    """Items of every user, best first.

    Attributes:
        rows (`np.ndarray` of shape `(B, k)`): rows of the index, int64; -1 where there are no more items.
        scores (`np.ndarray` of shape `(B, k)`): dot products, float32, or log-probabilities of items where those of
            the SIDs were given; `-inf` where there are no more items.
        sids (`np.ndarray` of shape `(B, k)`): which of the user's SIDs the item came from, int64; -1 there.
        generation (`int`, *optional*): the generation of the index that answered; `None` where it was not published.
    """

    rows: np.ndarray
    scores: np.ndarray
    sids: np.ndarray
    generation: int | None

    @classmethod
    def empty(cls, num_users: int, k: int, generation: int | None) -> Reranked:
        """Results to be written into."""
        nothing = np.full((num_users, k), -1, dtype=np.int64)
        return cls(nothing, np.full((num_users, k), -np.inf, dtype=np.float32), nothing.copy(), generation)


def spread(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges `starts .. ends - 1`, `(R,)` each, one behind the other: the range of every integer, and the integer,
    `(C,)` each."""
    counts = ends - starts
    before = np.cumsum(counts) - counts
    ranges = np.repeat(np.arange(len(counts)), counts)
    return ranges, np.arange(len(ranges)) + (starts - before)[ranges]


def drop_repeated(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """`ends`, where a range that came before, `(R,)`, is made empty."""
    order = np.argsort(starts, kind="stable")
    filled = order[ends[order] > starts[order]]
    again = filled[1:][starts[filled[1:]] == starts[filled[:-1]]]
    if not again.size:
        return ends
    ends = ends.copy()
    ends[again] = starts[again]
    return ends


def log_softmax(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Log-softmax `(C,)` of scores `(C,)` within every group; `groups` `(C,)` ascend."""
    number = int(groups[-1]) + 1 if len(groups) else 0
    return segment_log_softmax(torch.from_numpy(scores), torch.from_numpy(groups), number).numpy()


def best_first(scores: np.ndarray, groups: np.ndarray, limit: int | None, k: int) -> np.ndarray:
    """Positions of the `k` best candidates with at most `limit` of a group, best first; equal scores in their order.
    Candidates at `-inf` are impossible, and none of them.

    Args:
        scores (`np.ndarray` of shape `(C,)`): float32 without NaN.
        groups (`np.ndarray` of shape `(C,)`): group of every candidate, ascending.
        limit (`int`, *optional*): candidates of a group.
        k (`int`): candidates in all.

    Returns:
        `np.ndarray` of shape `(min(k, what the limit and `-inf` leave),)`, int64.
    """
    order = _descending(scores)
    if limit is not None and len(order):
        sizes = np.bincount(groups)
        if sizes.max() > limit:
            ordered = groups[order]
            # NumPy sorts 16-bit integers by their digits, many times faster than others.
            small = ordered.astype(np.uint16) if len(sizes) <= 2**16 else ordered
            ranks = np.empty(len(order), dtype=np.int64)
            ranks[np.argsort(small, kind="stable")] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            order = order[ranks < limit]
    order = order[:k]
    return order[scores[order] > -np.inf]


def _descending(scores: np.ndarray) -> np.ndarray:
    """Order of float32 scores from large to small, equal ones as they stand.

    One sort of integers, score in the upper half and position in the lower, takes a tenth of a stable sort by score.
    """
    bits = (scores + np.float32(0)).view(np.uint32)  # adding 0 makes -0 equal to 0
    keys = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF)).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(len(scores), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
