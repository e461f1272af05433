"""Popularity-based collision resolution: every item ends with a semantic ID of its own, the popular ones unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from .embedding import check_embeddings
from .reconstruction import Reconstruction, as_reconstruction
from .rq_kmeans import CHUNK_ROWS, check_codes


def resolve_collisions(
    codes, embeddings, codebooks: Sequence[np.ndarray] | Reconstruction, popularity, item_ids=None
) -> tuple[np.ndarray, np.ndarray]:
    """Gives items that share a semantic ID different ones, at the least cost to the popular and to the meaning.

    Of the items that share an ID the most popular keeps it (ties: the smaller item id, then the earlier row). The
    others move, by falling popularity, to the nearest free code of the last level. Those whose prefix has none left
    move to the nearest code of the level above that has room beneath it and to the nearest free code there, and so on
    up. No item moves to an ID that another keeps, and items that find room under their own prefix are placed before
    those that have to leave it.

    Args:
        codes (array-like of shape `(N, K)`): codes before, from `RQKMeans.encode`; not changed.
        embeddings (array-like of shape `(N, d)`): the embeddings behind them.
        codebooks (sequence of K arrays of shape `(V_k, d)`, or a [`Reconstruction`]): the centroids of each level, or
            a quantiser whose codes mean something else after other prefixes; what is near is judged by it.
        popularity (array-like of shape `(N,)`): training interactions of each item.
        item_ids (array-like of shape `(N,)`, *optional*): what ties are broken by; the row when left out.

    Returns:
        The codes after, `(N, K)` int32 with all rows distinct, and which items moved, `(N,)` bool.

    Raises:
        ValueError: an argument is malformed, or there are more items than IDs.
    """
    books = as_reconstruction(codebooks)
    sizes = books.codebook_sizes
    codes = np.asarray(codes)
    check_codes(codes, sizes)
    check_capacity(len(codes), sizes)
    embeddings = check_embeddings(embeddings, len(codes))
    priority = _priority(popularity, item_ids, len(codes))
    codes = codes.astype(np.int32)

    keeps = np.zeros(len(codes), dtype=bool)
    keeps[priority[np.unique(prefix_ids(codes)[-1][priority], return_index=True)[1]]] = True
    moved = ~keeps
    homeless = priority[moved[priority]]
    for level in reversed(range(len(sizes))):
        if not homeless.size:
            break
        homeless = _place(homeless, level, codes, embeddings, books)
    return codes, moved


def prefix_ids(codes: np.ndarray) -> list[np.ndarray]:
    """For each length `1..K`, the rank `(N,)` of every item's prefix among the distinct prefixes of that length."""
    ids, node = [], np.zeros(len(codes), dtype=np.int64)
    for column in codes.T:
        # Ranks stay below N, so the product cannot overflow, as the number of possible IDs well may.
        _, node = np.unique(node * (int(column.max()) + 1) + column, return_inverse=True)
        ids.append(node)
    return ids


def check_capacity(num_items: int, codebook_sizes: Sequence[int]) -> None:
    """Raises `ValueError` where `num_items` items cannot all have an ID of their own."""
    if num_items > math.prod(codebook_sizes):
        raise ValueError(
            f"`codebook_sizes` {tuple(codebook_sizes)} allow {math.prod(codebook_sizes)} semantic IDs for {num_items} "
            "items; give larger sizes or one more level, or keep collisions."
        )


def check_popularity(popularity, num_items: int) -> np.ndarray:
    """Returns popularity as `(N,)` float64, or raises `ValueError`."""
    popularity = np.asarray(popularity, dtype=np.float64)
    if popularity.shape != (num_items,):
        raise ValueError(
            f"`popularity` must have shape ({num_items},), one number an item, got shape {popularity.shape}."
        )
    if not np.isfinite(popularity).all():
        raise ValueError(
            f"`popularity` holds {np.count_nonzero(~np.isfinite(popularity))} NaN or infinite values; use 0 for an "
            "item without interactions."
        )
    return popularity


def _priority(popularity, item_ids, num_items: int) -> np.ndarray:
    """Rows by falling popularity, then rising item id, then row."""
    keys = [-check_popularity(popularity, num_items)]
    if item_ids is not None:
        item_ids = np.asarray(item_ids)
        if item_ids.shape != (num_items,):
            raise ValueError(f"`item_ids` must have shape ({num_items},), got shape {item_ids.shape}.")
        # Ranks, because sorting strings once is cheaper than comparing them again for every tie.
        keys.insert(0, np.unique(item_ids, return_inverse=True)[1])
    return np.lexsort(keys)


def _place(homeless, level: int, codes, embeddings, books: Reconstruction) -> np.ndarray:
    """Places items below their prefix of `level` codes, in the order given; returns those that found no room there.

    Prefixes are independent of each other, so items are taken prefix by prefix, which needs the occupancy of one
    subtree at a time.
    """
    # Homeless items count where they came from, which changes nothing: that ID, or all below that prefix, is taken.
    occupancy = _Occupancy(codes, books.codebook_sizes)
    prefix = prefix_ids(codes[homeless])[level - 1] if level else np.zeros(len(homeless), dtype=np.int64)
    by_prefix = homeless[np.argsort(prefix, kind="stable")]
    turned_away = np.zeros(len(codes), dtype=bool)
    steps = _distances(by_prefix, level, codes, embeddings, books)
    for start, members in groupby(steps, key=lambda step: tuple(codes[step[0], :level].tolist())):
        occupancy.forget()
        for item, distances in members:
            path = occupancy.claim_nearest(start, embeddings[item], distances, books)
            if path is None:
                turned_away[item] = True
            else:
                codes[item] = path
    return homeless[turned_away[homeless]]


def _distances(items, level: int, codes, embeddings, books: Reconstruction) -> Iterator[tuple]:
    """Yields each item with its distances `(V,)` to the codes of a level, computed for a chunk at once."""
    for start in range(0, len(items), CHUNK_ROWS):
        chunk = items[start : start + CHUNK_ROWS]
        prefixes = codes[chunk, :level]
        *_, residual = books.residuals(embeddings[chunk], prefixes)
        yield from zip(chunk, books.distances(residual, prefixes), strict=True)


class _Occupancy:
    """How many items live below each child of a prefix.

    IDs are kept sorted, so a prefix is one contiguous range, found by bisection. Counts of a prefix are made when first
    asked for and kept up to date until `forget`; every ID claimed below it since has passed through it.
    """

    def __init__(self, codes: np.ndarray, sizes: Sequence[int]):
        order = np.lexsort(codes.T[::-1])
        # int64, because bisection with Python integers would convert a narrower column as a whole each time.
        self.columns = [column.astype(np.int64) for column in codes[order].T]
        self.sizes = sizes
        # IDs below one child of a prefix of length 0..K-1; no count exceeds the number of items, so clipping is safe.
        self.room = [min(math.prod(sizes[length + 1 :]), 2**62) for length in range(len(sizes))]
        self.counts: dict[tuple[int, ...], np.ndarray] = {}

    def forget(self) -> None:
        self.counts.clear()

    def claim_nearest(self, prefix: tuple[int, ...], embedding, distances, books) -> tuple[int, ...] | None:
        """Walks down from a prefix, each time to the nearest child with room, and takes the ID it ends at."""
        claimed = []
        while len(prefix) < len(self.sizes):
            if claimed:  # at the start the caller has computed them
                codes = np.array([prefix])
                *_, residual = books.residuals(embedding[None], codes)
                distances = books.distances(residual, codes)[0]
            counts = self._counts(prefix)
            has_room = counts < self.room[len(prefix)]
            if not has_room.any():  # at the first step only: a child with room has a child with room
                return None
            code = int(np.where(has_room, distances, np.inf).argmin())
            claimed.append((counts, code))
            prefix = (*prefix, code)
        for counts, code in claimed:
            counts[code] += 1
        return prefix

    def _counts(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self.counts:
            low, high = 0, len(self.columns[0])
            for column, code in zip(self.columns, prefix, strict=False):
                low, high = low + np.searchsorted(column[low:high], (code, code + 1))
            column = self.columns[len(prefix)][low:high]
            self.counts[prefix] = np.bincount(column, minlength=self.sizes[len(prefix)])
        return self.counts[prefix]
