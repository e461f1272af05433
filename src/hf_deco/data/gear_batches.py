"""Requests to the batches that GEAR trains on: one table of distinct items, and everything else points into it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .events import EventLog
from .requests import Request


class GearCollator:
    """Makes batches of requests, and of users who only ask.

    Args:
        log ([`EventLog`]): The log.
        min_grade (`int`): Lowest grade of a candidate that the generator learns to spell; 0 for all that were shown.
        weighted (`bool`): Whether the business value weighs in the generator's loss.
        num_same_sid (`int`): Candidates more per request, at most, that share the SID of one with an event: what
            teaches the reranker to tell them apart. None as long as there is no catalog.
        seed (`int`): What their draw depends on, together with the number of the request.
    """

    def __init__(self, log: EventLog, min_grade: int = 1, weighted: bool = True, num_same_sid: int = 2, seed: int = 0):
        self.log, self.min_grade, self.weighted = log, min_grade, weighted
        self.num_same_sid, self.seed = num_same_sid, seed
        self._sids = self._order = self._offsets = None

    def set_catalog(self, codes: np.ndarray) -> None:
        """SIDs `(n, K)` of the first `n` items of the log, from which same-SID negatives are drawn from now on."""
        self._sids = np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1)
        self._order = np.argsort(self._sids, kind="stable")
        self._offsets = np.append(0, np.cumsum(np.bincount(self._sids)))

    def __call__(self, requests: Sequence[Request], item_codes: np.ndarray | None = None) -> dict:
        """A batch, as [`GearForSIDRetrieval`] takes it.

        Args:
            requests (sequence of `B` [`Request`]): Requests.
            item_codes (`np.ndarray` of shape `(N, K)`, *optional*): SIDs of all items of the log that stand in the
                place of the model's own.
        """
        extra = [self._same_sid(request) for request in requests]
        candidates = _pad([np.concatenate(pair) for pair in zip((r.candidates for r in requests), extra, strict=True)])
        batch, items = self._users([(request.user, request.behaviors) for request in requests], candidates)
        labels, weights, shown = (
            _pad([getattr(request, name) for request in requests], candidates.shape[1], fill)
            for name, fill in (("labels", 0), ("weights", 0), ("shown", False))
        )
        batch |= {
            "labels": torch.from_numpy(labels),
            "impressed": torch.from_numpy(shown & (labels >= self.min_grade)),
        }
        if self.weighted:
            batch["weights"] = torch.from_numpy(weights)
        if item_codes is not None:
            batch["item_codes"] = torch.from_numpy(item_codes[items]).long()
        return batch

    def users(self, users: Sequence[int], histories: Sequence[tuple[np.ndarray, ...]]) -> dict:
        """Users who ask, without candidates: what `generate` and `encode_memory` take."""
        batch, _ = self._users(list(zip(users, histories, strict=True)), np.empty((len(users), 0), dtype=np.int64))
        del batch["candidates"]
        return batch

    def items(self, number: int) -> dict:
        """Content and categories of the first `number` items of the log: what `encode_items` takes."""
        return {
            "content": torch.from_numpy(self.log.content[:number]),
            "item_ids": torch.from_numpy(self.log.item_categories[:number]),
        }

    def _users(self, users: list, candidates: np.ndarray) -> tuple[dict, np.ndarray]:
        """The part of a batch that says who asks, with candidates, and the items of its table `(N,)`."""
        number = len(self.log.behaviors)
        behaviors = [_pad([history[kind] for _, history in users]) for kind in range(number)]
        parts = [*behaviors, candidates]
        flat = np.concatenate([part.reshape(-1) for part in parts])
        items, rows = np.unique(flat, return_inverse=True)
        padded = len(items) > 0 and items[0] < 0
        rows = rows.reshape(-1) - padded  # padding, the lowest value, becomes row -1
        items = items[1:] if padded else items
        pieces = np.split(rows, np.cumsum([part.size for part in parts])[:-1])
        tables = [torch.from_numpy(piece.reshape(part.shape)) for piece, part in zip(pieces, parts, strict=True)]
        batch = {
            "content": torch.from_numpy(self.log.content[items]),
            "item_ids": torch.from_numpy(self.log.item_categories[items]),
            "user_ids": torch.from_numpy(self.log.user_categories[[user for user, _ in users]]),
            "behaviors": tables[:-1],
            "candidates": tables[-1],
        }
        return batch, items

    def _same_sid(self, request: Request) -> np.ndarray:
        """Items that share the SID of a candidate with an event, and are no candidates."""
        if self._sids is None or not self.num_same_sid:
            return np.empty(0, dtype=np.int64)
        positive = request.candidates[request.labels > 0]
        sids = np.unique(self._sids[positive[positive < len(self._sids)]])
        mates = [self._order[self._offsets[sid] : self._offsets[sid + 1]] for sid in sids]
        mates = np.concatenate([np.empty(0, dtype=np.int64), *mates])
        mates = mates[~np.isin(mates, request.candidates)]
        if len(mates) <= self.num_same_sid:
            return mates
        random = np.random.default_rng((self.seed, request.number, 1))
        return random.choice(mates, self.num_same_sid, replace=False)


def _pad(rows: Sequence[np.ndarray], width: int | None = None, fill=-1) -> np.ndarray:
    """Arrays of different lengths as one `(B, T)`, filled up on the right."""
    width = max(map(len, rows), default=0) if width is None else width
    padded = np.full((len(rows), width), fill, dtype=rows[0].dtype if len(rows) else np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
