"""Requests in the order of time as a data set that is read once, and goes on at the request where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np
from torch.utils.data import IterableDataset

from ..data.events import EventLog
from ..data.requests import Request, Requests


class RequestStream(IterableDataset):
    """Batches of requests, oldest first; every request once.

    A batch never spans two periods, so that a period can be evaluated before anything of it is trained on. The last
    batches of a period are smaller. Every process of a distributed run reads all batches and trains on its share, as
    Accelerate deals them out in turn: the number of a period's batches is a multiple of that of processes.

    What has been trained on is told by `advance`, not by what has been read: loaders read ahead.

    Args:
        requests ([`Requests`]): All requests.
        batch_size (`int`): Requests of a batch.
        num_processes (`int`): Processes that share the stream.

    Attributes:
        step (`int`): Steps taken; the next one begins with the batch `step * num_processes`.
        num_steps (`int`): Steps of the whole stream.
        period_ends (`dict[int, int]`): Number of steps after which a period is over -> the period.

    Raises:
        ValueError: a period has fewer requests than there are processes.
    """

    def __init__(self, requests: Requests, batch_size: int, num_processes: int = 1):
        self.requests, self.num_processes, self.step = requests, num_processes, 0
        self.period_ends: dict[int, int] = {}
        bounds = [np.zeros(1, dtype=np.int64)]
        for period in np.unique(requests.periods):
            first, last = np.searchsorted(requests.periods, [period, period + 1])
            if last - first < num_processes:
                raise ValueError(
                    f"period {period} has {last - first} requests for {num_processes} processes: make periods longer, "
                    "or take fewer processes."
                )
            bounds.append(_cut(int(first), int(last), batch_size, num_processes))
            self.period_ends[sum(map(len, bounds[1:])) // num_processes] = int(period)
        self._bounds = np.concatenate(bounds)
        self.num_steps = (len(self._bounds) - 1) // num_processes

    def __iter__(self) -> Iterator[list[Request]]:
        """Batches from the present step on: none where the stream is over."""
        first = self.step * self.num_processes
        for start, end in zip(self._bounds[first:-1].tolist(), self._bounds[first + 1 :].tolist(), strict=True):
            yield [self.requests[number] for number in range(start, end)]

    def advance(self) -> None:
        """A step was taken."""
        self.step += 1

    @property
    def log(self) -> EventLog:
        """The log of the requests."""
        return self.requests.log

    def period_at(self, step: int) -> int:
        """The period that a step, counted from 0, trains on."""
        return int(self.requests.periods[self._bounds[step * self.num_processes]])

    def next_period(self, step: int) -> int | None:
        """The period that begins after a step that ends one, `None` after the last."""
        return next((period for end, period in self.period_ends.items() if end > step), None)

    def state_dict(self) -> dict:
        """Where the stream stands, and of what stream."""
        return {"step": self.step, "request": int(self._bounds[self.step * self.num_processes]), "stream": self._name()}

    def load_state_dict(self, state: dict) -> None:
        """Go on where another one stood.

        Raises:
            ValueError: it was of another log, batch size, number of processes, seed or choice of candidates.
        """
        if state["stream"] != self._name():
            raise ValueError(
                "the checkpoint was trained on another stream: go on with the log, the batch size, the processes, the "
                "seed and the candidates that it was started with."
            )
        self.step = state["step"]

    def _name(self) -> str:
        """Fingerprint of all that decides what comes when."""
        requests, log = self.requests, self.requests.log
        options = (requests.seed, requests.lengths, requests.num_positives, requests.num_negatives)
        options += (requests.num_popular, self.num_processes)
        digest = sha256(repr(options).encode())
        for array in (self._bounds, log.users, log.items, log.times, log.grades, log.weights, log.shown_items):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def _cut(first: int, last: int, batch_size: int, num_processes: int) -> np.ndarray:
    """Ends of the batches of requests `first .. last - 1`: full ones, then the rest in equal parts."""
    whole = batch_size * num_processes
    full = (last - first) // whole
    rest = last - first - full * whole
    if 0 < rest < num_processes:  # too few to share: they join the last full batches
        full, rest = full - 1, rest + whole
    ends = first + batch_size * np.arange(1, full * num_processes + 1)
    sizes = [len(part) for part in np.array_split(np.arange(rest), num_processes)] if rest else []
    return np.concatenate([ends, last - rest + np.cumsum(sizes)]).astype(np.int64)
