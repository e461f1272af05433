"""Requests of a log in the order of time: who asks, what they had done until then, and what they made of the list."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .events import EVERYONE, EventLog

RECENT = 20_000  # events before a request that tell what is popular


@dataclass(frozen=True, eq=False)
class Request:
    """One list and its answers.

    Args:
        number (`int`): place in the order of time.
        user, period (`int`): who asks, and when.
        behaviors (`tuple` of `np.ndarray` of shape `(T_s,)`): items of every sequence before the request, oldest first.
        candidates (`np.ndarray` of shape `(C,)`): distinct items: those of the request's events, then shown ones, then
            popular ones.
        labels (`np.ndarray` of shape `(C,)`): the highest grade of their events; 0 for the others.
        weights (`np.ndarray` of shape `(C,)`): the sum of their events' business value, float32.
        shown (`np.ndarray` of shape `(C,)`): whether they were seen: events and impressions are, popular items are not.
    """

    number: int
    user: int
    period: int
    behaviors: tuple[np.ndarray, ...]
    candidates: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    shown: np.ndarray


class Requests:
    """All requests of a log.

    A request is made of the log alone and of its number, never of what was made before it: a stream may start anywhere.

    Args:
        log ([`EventLog`]): The log.
        lengths (`tuple[int, ...]`): Items of every behaviour's sequence that are kept, the latest.
        num_positives (`int`): Items of a request with an event that are candidates at most; which, is drawn.
        num_negatives (`int`): Candidates without an event that were shown in the period, drawn; where there are too
            few, popular ones.
        num_popular (`int`): Candidates without an event that are drawn from the latest events of all users: what makes
            a list a question of taste, where bought against shown may be one of popularity alone.
        seed (`int`): What the draws depend on, together with the number of the request.
    """

    def __init__(
        self,
        log: EventLog,
        lengths: tuple[int, ...],
        num_positives: int = 8,
        num_negatives: int = 8,
        num_popular: int = 0,
        seed: int = 0,
    ):
        self.log, self.lengths, self.seed = log, tuple(lengths), seed
        self.num_positives, self.num_negatives, self.num_popular = num_positives, num_negatives, num_popular
        self._events = np.argsort(log.requests, kind="stable")
        first = np.flatnonzero(np.diff(log.requests[self._events], prepend=-1))
        self.offsets = np.append(first, len(self._events))
        first_events = self._events[first]
        # A request's first event is its earliest: what the user did before it is its history.
        self.users, self.times, self.periods = (column[first_events] for column in (log.users, log.times, log.periods))
        self._sequences = [self._sequence(grade) for grade in range(1, len(log.behaviors) + 1)]
        order = np.lexsort((log.shown_users, log.shown_periods))
        self._shown = log.shown_items[order]
        self._shown_keys = self._impression_keys(log.shown_periods[order], log.shown_users[order])

    def __len__(self) -> int:
        return len(self.users)

    def _sequence(self, grade: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Offsets `(U + 1,)` of users, items and times of their events of a grade or above, oldest first."""
        log = self.log
        rows = np.flatnonzero(log.grades >= grade)
        rows = rows[np.argsort(log.users[rows], kind="stable")]
        counts = np.bincount(log.users[rows], minlength=len(log.user_ids))
        return np.append(0, np.cumsum(counts)), log.items[rows], log.times[rows]

    def history(self, user: int, time: int) -> tuple[np.ndarray, ...]:
        """The latest items of every behaviour of a user before a time, oldest first."""
        found = []
        for (offsets, items, times), length in zip(self._sequences, self.lengths, strict=True):
            start = offsets[user]
            end = start + np.searchsorted(times[start : offsets[user + 1]], time, side="left")
            found.append(items[max(start, end - length) : end])
        return tuple(found)

    def __getitem__(self, number: int) -> Request:
        if not 0 <= number < len(self):
            raise IndexError(f"request {number} of {len(self)}")
        random = np.random.default_rng((self.seed, number))
        user, period = int(self.users[number]), int(self.periods[number])
        items, labels, weights = self._answers(number)
        bought = items
        if len(items) > self.num_positives:
            kept = np.sort(random.choice(len(items), self.num_positives, replace=False))
            items, labels, weights = items[kept], labels[kept], weights[kept]
        others, shown = self._draw_negatives(number, bought, random)
        nothing = np.zeros(len(others))
        return Request(
            number,
            user,
            period,
            self.history(user, self.times[number]),
            np.concatenate([items, others]),
            np.concatenate([labels, nothing]).astype(np.float32),
            np.concatenate([weights, nothing]).astype(np.float32),
            np.concatenate([np.ones(len(items), dtype=bool), shown]),
        )

    def _answers(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct items of a request's events, ascending, their highest grades and the sums of their weights."""
        rows = self._events[self.offsets[number] : self.offsets[number + 1]]
        items, place = np.unique(self.log.items[rows], return_inverse=True)
        grades = np.zeros(len(items), dtype=np.int64)
        np.maximum.at(grades, place, self.log.grades[rows])
        return items, grades, np.bincount(place, self.log.weights[rows], minlength=len(items))

    def _draw_negatives(self, number: int, bought: np.ndarray, random) -> tuple[np.ndarray, np.ndarray]:
        """Items without an event, and which of them were shown."""
        user, period = int(self.users[number]), int(self.periods[number])
        pool = np.concatenate([self._impressions(period, EVERYONE), self._impressions(period, user)])
        shown = _draw(pool, self.num_negatives, bought, random)
        end = np.searchsorted(self.log.times, self.times[number], side="left")
        recent = self.log.items[max(0, end - RECENT) : end]
        wanted = self.num_popular + self.num_negatives - len(shown)
        popular = _draw(recent, wanted, np.concatenate([bought, shown]), random)
        return np.concatenate([shown, popular]), np.arange(len(shown) + len(popular)) < len(shown)

    def _impressions(self, period: int, user: int) -> np.ndarray:
        key = self._impression_keys(np.array(period), np.array(user))
        first, last = np.searchsorted(self._shown_keys, [key, key + 1])
        return self._shown[first:last]

    def _impression_keys(self, periods: np.ndarray, users: np.ndarray) -> np.ndarray:
        """Ascending with period and user; everyone comes first."""
        return periods * (len(self.log.user_ids) + 1) + users + 1


def _draw(pool: np.ndarray, number: int, without: np.ndarray, random) -> np.ndarray:
    """Up to `number` distinct items of a pool that are not among `without`."""
    if not len(pool):
        return pool
    # Twice as many as asked for, and those to be left out: a pool of thousands need not be shuffled.
    places = random.permutation(len(pool)) if len(pool) < 4 * number else random.integers(len(pool), size=4 * number)
    drawn = pool[places]
    drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
    return drawn[~np.isin(drawn, without)][:number]
