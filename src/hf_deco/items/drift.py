"""Streams whose distribution moves: real embeddings, and what happens to them over time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .embedding import check_embeddings
from .projection import check_variance
from .rq_kmeans import RQKMeans

# What happens, and how much of it by default; see `EmbeddingDrift`.
DRIFTS = {"none": 0.0, "rotation": 1.0, "new_topics": 0.5, "shifted_mean": 1.0}
NUM_TOPICS = 20


class EmbeddingDrift:
    """Embeddings as a function of a time that runs from 0 to 1; at time 0 they are as given.

    - `"none"`: nothing; what a tokenizer changes on such a stream, it changes for no reason.
    - `"rotation"`: an encoder that turns. In a random orthonormal basis every pair of coordinates turns by `strength`
      radians until time 1. Distances between items stay.
    - `"new_topics"`: a catalog that grows. Of 20 k-means clusters a share `strength`, drawn at random, is absent at
      time 0; these topics appear one after the other, evenly over time.
    - `"shifted_mean"`: an encoder whose mean leaves. All items move together, in a random direction, by `strength`
      times the root mean square distance of an item from the mean.

    Args:
        embeddings (array-like of shape `(N, d)`): one row an item.
        kind (`str`): one of the four.
        strength (`float`, *optional*): how much happens until time 1; the values of `DRIFTS` when left out.
        seed (`int`): seed of what is drawn.

    Raises:
        ValueError: an argument is malformed.
    """

    def __init__(self, embeddings, kind: str, *, strength: float | None = None, seed: int = 0):
        if kind not in DRIFTS:
            raise ValueError(f"`kind` must be one of {', '.join(DRIFTS)}, got {kind!r}.")
        self.embeddings = check_embeddings(embeddings)
        check_variance(self.embeddings)
        self.kind = kind
        self.strength = DRIFTS[kind] if strength is None else strength
        self.seed = seed
        rng = np.random.default_rng((seed, 0))
        width = self.embeddings.shape[1]
        self._appears = np.zeros(len(self.embeddings))
        if kind == "rotation":
            self._basis = np.linalg.qr(rng.standard_normal((width, width)))[0]
        elif kind == "shifted_mean":
            direction = rng.standard_normal(width)
            centred = self.embeddings - self.embeddings.mean(axis=0)
            distance = float(np.sqrt(np.square(centred).sum(axis=1).mean()))
            self._shift = (self.strength * distance / np.linalg.norm(direction) * direction).astype(np.float32)
        elif kind == "new_topics":
            self._appears = self._topic_times(rng)

    def at(self, time: float, rows: np.ndarray | None = None) -> np.ndarray:
        """Embeddings `(n, d)` of some items, all when left out, at a time between 0 and 1."""
        embeddings = self.embeddings if rows is None else self.embeddings[rows]
        if self.kind == "rotation":
            return self._rotate(embeddings, time * self.strength)
        return embeddings + np.float32(time) * self._shift if self.kind == "shifted_mean" else embeddings

    def present(self, time: float) -> np.ndarray:
        """Which items `(N,)` bool there are at a time."""
        return self._appears <= time

    def batches(self, num_batches: int, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields rows `(b,)` and their embeddings `(b, d)` at evenly spaced times, the last at time 1.

        Each batch is drawn without replacement from the items that there are at its time.
        """
        rng = np.random.default_rng((self.seed, 1))
        for step in range(1, num_batches + 1):
            present = np.flatnonzero(self.present(step / num_batches))
            rows = rng.choice(present, min(batch_size, len(present)), replace=False)
            yield rows, self.at(step / num_batches, rows)

    def _rotate(self, embeddings: np.ndarray, angle: float) -> np.ndarray:
        turned = embeddings @ self._basis
        even = turned[:, 0 : turned.shape[1] // 2 * 2 : 2].copy()  # of an odd width the last axis stays
        odd = turned[:, 1::2].copy()
        turned[:, 0 : 2 * even.shape[1] : 2] = np.cos(angle) * even - np.sin(angle) * odd
        turned[:, 1::2] = np.sin(angle) * even + np.cos(angle) * odd
        return (turned @ self._basis.T).astype(np.float32)

    def _topic_times(self, rng: np.random.Generator) -> np.ndarray:
        """Time at which each item appears."""
        num_topics = min(NUM_TOPICS, len(np.unique(self.embeddings, axis=0)))
        topics = RQKMeans((num_topics,), seed=self.seed).fit_encode(self.embeddings)[:, 0]
        late = rng.permutation(num_topics)[: round(self.strength * num_topics)]
        times = np.zeros(num_topics)
        times[late] = np.arange(1, len(late) + 1) / (len(late) + 1)
        return times[topics]
