"""Three recommenders that learn nothing: what a trained model has to beat.

Each is a scorer for [`Evaluator.evaluate`]: histories in, a score for each catalog item out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..data.sequences import Examples, Sequences
from ..data.splits import Split
from .evaluator import Evaluator

_WINDOW = 3
_LAST = 5
_TIE_BREAK = 1e-6


class PopularityFloor:
    """Scores an item by its training interactions, whatever the history.

    Args:
        split ([`Split`]): gives the catalog of `C` items and the counts.
    """

    def __init__(self, split: Split) -> None:
        self.popularity = split.item_counts[split.catalog].astype(np.float32)

    def __call__(self, histories: Sequences) -> np.ndarray:
        """Scores of shape `(B, C)`."""
        return np.broadcast_to(self.popularity, (len(histories), len(self.popularity)))


class TextNeighborFloor:
    """Scores an item by the cosine of its text embedding to that of the last item, which itself is left out.

    An empty history has no last item and gets the popularity scores.

    Args:
        split ([`Split`]): gives the catalog of `C` items.
        embeddings (`np.ndarray` of shape `(N, d)`): an embedding of each item, of any length.

    Raises:
        ValueError: there is not one embedding an item.
    """

    def __init__(self, split: Split, embeddings: np.ndarray) -> None:
        if embeddings.ndim != 2 or len(embeddings) != len(split.item_counts):
            raise ValueError(
                f"`embeddings` has shape {embeddings.shape}; pass one row for each of {len(split.item_counts):,} items."
            )
        embeddings = embeddings.astype(np.float32)
        norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
        self.embeddings = embeddings / np.where(norms == 0, 1, norms)
        self.catalog = split.catalog
        self.columns = np.full(len(embeddings), -1)
        self.columns[self.catalog] = np.arange(len(self.catalog))
        self.candidates = self.embeddings[self.catalog].T
        self.popularity = PopularityFloor(split)

    def __call__(self, histories: Sequences) -> np.ndarray:
        """Scores of shape `(B, C)`."""
        scores = self.popularity(histories).copy()
        rows = np.flatnonzero(histories.lengths)
        last = histories.items[histories.offsets[1:][rows] - 1]
        scores[rows] = self.embeddings[last] @ self.candidates
        in_catalog = self.columns[last] >= 0
        scores[rows[in_catalog], self.columns[last[in_catalog]]] = -np.inf
        return scores


class CooccurrenceFloor:
    """Scores an item by how often training users had it near the last items of the history.

    Two events of a training sequence at most 3 places apart make a pair, counted in both directions. An item's score is
    the sum, over the last 5 items of the history, of its pairs with that item divided by the recency rank (1 for the
    latest), plus a millionth of its popularity to order what was never seen together. An empty history therefore ranks
    by popularity.

    Args:
        split ([`Split`]): gives the training sequences and the catalog of `C` items.
    """

    def __init__(self, split: Split) -> None:
        from scipy.sparse import csr_array

        train, num_items = split.train, len(split.item_counts)
        owner = np.repeat(np.arange(len(train)), train.lengths)
        pairs = []
        for distance in range(1, _WINDOW + 1):
            together = owner[distance:] == owner[:-distance]
            pairs.append((train.items[:-distance][together], train.items[distance:][together]))
        first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
        counts = csr_array((np.ones(len(first)), (first, second)), shape=(num_items, num_items))
        self.counts = (counts + counts.T).tocsr()[:, split.catalog]
        self.tie_break = _TIE_BREAK * split.item_counts[split.catalog]

    def __call__(self, histories: Sequences) -> np.ndarray:
        """Scores of shape `(B, C)`."""
        from scipy.sparse import csr_array

        recent = histories.truncate(_LAST)
        ends = np.repeat(recent.offsets[1:], recent.lengths)
        weights = 1 / (ends - np.arange(len(recent.items)))
        shape = (len(recent), self.counts.shape[0])
        # Repeated items of a history stand twice in the row, and the product sums them.
        weighted = csr_array((weights, recent.items, recent.offsets), shape=shape)
        return (weighted @ self.counts).toarray() + self.tie_break


def floor_metrics(
    split: Split, examples: Examples, embeddings: np.ndarray | None = None, **evaluator_options: Any
) -> dict[str, dict[str, float]]:
    """Metrics of the three floors.

    Args:
        split ([`Split`]): what the floors may know.
        examples ([`Examples`]): what they are asked, `split.validation` or `split.test`.
        embeddings (`np.ndarray` of shape `(N, d)`, *optional*): text embeddings of the items. Without them there is no
            `"text_neighbors"`.
        **evaluator_options: options of [`Evaluator`].

    Returns:
        `dict[str, dict[str, float]]`: metrics under `"popularity"`, `"text_neighbors"` and `"cooccurrence"`.
    """
    evaluator = Evaluator(examples, split.item_counts, split.catalog, **evaluator_options)
    floors = {"popularity": PopularityFloor(split)}
    if embeddings is not None:
        floors["text_neighbors"] = TextNeighborFloor(split, embeddings)
    floors["cooccurrence"] = CooccurrenceFloor(split)
    return {name: evaluator.evaluate(floor) for name, floor in floors.items()}
