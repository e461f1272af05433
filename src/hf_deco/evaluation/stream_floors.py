"""What a stream's models have to beat: recommenders that know what has happened and learn nothing."""

from __future__ import annotations

import numpy as np

from ..data.events import EventLog


def popular_items(log: EventLog, period: int) -> np.ndarray:
    """Items with events before a period, those with most first, ties by number, `(n,)`."""
    counts = np.bincount(log.items[: log.events_of(period).start], minlength=len(log.item_ids))
    order = np.argsort(-counts, kind="stable")
    return order[counts[order] > 0]


def rank_popular(log: EventLog, users: np.ndarray, period: int, k: int) -> np.ndarray:
    """The `k` items with most events before a period, the same for all users, `(E, k)`; -1 where there are fewer."""
    return np.repeat(_fill(np.empty(0, dtype=np.int64), popular_items(log, period), k)[None], len(users), axis=0)


def rank_last(log: EventLog, users: np.ndarray, period: int, k: int) -> np.ndarray:
    """The `k` distinct items that each user dealt with last before a period, the latest first, then popular ones,
    `(E, k)`; -1 where there are fewer."""
    end, popular = log.events_of(period).start, popular_items(log, period)
    rows = np.flatnonzero(np.isin(log.users[:end], users))[::-1]
    rows = rows[np.argsort(log.users[rows], kind="stable")]
    first, last = np.searchsorted(log.users[rows], [users, users + 1])
    return np.stack([_fill(log.items[rows[a:b]], popular, k) for a, b in zip(first, last, strict=True)])


def _fill(items: np.ndarray, others: np.ndarray, k: int) -> np.ndarray:
    """The first `k` distinct items of two lists, -1 behind them."""
    both = np.concatenate([items, others])
    distinct = both[np.sort(np.unique(both, return_index=True)[1])][:k]
    return np.concatenate([distinct, np.full(k - len(distinct), -1)]).astype(np.int64)
