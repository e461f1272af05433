"""Residual k-means: the codes of an item are the nearest centroids of what the levels before left over."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from .embedding import check_embeddings
from .reconstruction import distances_to_codes

# Rows handled at once, so that the (rows, codes) distances stay small whatever the size of the catalog.
CHUNK_ROWS = 8192
# Each round of re-seeding lowers the error, so it ends by itself; this bounds it where float rounding would not.
MAX_RESEED_ROUNDS = 100


class RQKMeans:
    """Residual quantisation with one k-means a level.

    Level 1 clusters the embeddings, level `k` what is left of them after levels `1..k-1`:

        r_1 = x,    c_k = argmin_c |r_k - C_k[c]|^2,    r_{k+1} = r_k - C_k[c_k],    x ~ sum_k C_k[c_k]

    faiss trains each codebook. Codes that no item chooses are then re-seeded from the items with the largest residual,
    so every code of a level is used as long as there are enough distinct residuals; where there are not, the surplus
    codes repeat others and serve as spare codes for colliding items. The same seed, data and number of threads give the
    same codebooks.

    Args:
        codebook_sizes (sequence of `int`, length K): codes per level, coarse to fine; levels may differ.
        num_iterations (`int`): k-means iterations a level.
        seed (`int`): seed of the initial centroids and of the sample that k-means is trained on.
        max_points_per_centroid (`int`): k-means trains on a random sample of at most this many items a code.
        verbose (`bool`): print faiss' progress and the error after each level.

    Attributes:
        codebooks (list of K `np.ndarray` of shape `(V_k, d)`, float32): empty before `fit`.

    Raises:
        ValueError: an argument is not a positive integer (`seed`: a non-negative one).
    """

    def __init__(
        self,
        codebook_sizes: Sequence[int],
        *,
        num_iterations: int = 25,
        seed: int = 0,
        max_points_per_centroid: int = 256,
        verbose: bool = False,
    ):
        self.codebook_sizes = check_codebook_sizes(codebook_sizes)
        for name, value in (("num_iterations", num_iterations), ("max_points_per_centroid", max_points_per_centroid)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if seed < 0:
            raise ValueError(f"`seed` must not be negative, got {seed}.")
        self.num_iterations = num_iterations
        self.seed = seed
        self.max_points_per_centroid = max_points_per_centroid
        self.verbose = verbose
        self.codebooks: list[np.ndarray] = []

    def fit(self, embeddings) -> RQKMeans:
        """Trains the codebooks on embeddings `(N, d)` and returns itself; see `fit_encode`."""
        self.fit_encode(embeddings)
        return self

    def fit_encode(self, embeddings) -> np.ndarray:
        """Trains the codebooks and returns the codes of the same embeddings, for the cost of `fit` alone.

        Args:
            embeddings (array-like of shape `(N, d)`): the catalog; not changed.

        Returns:
            `np.ndarray` of shape `(N, K)`, int32, equal to `encode(embeddings)`.

        Raises:
            ValueError: the embeddings are malformed, or fewer of them are distinct than the first level has codes.
        """
        embeddings = check_embeddings(embeddings)
        check_enough_items(embeddings, self.codebook_sizes)
        residual = embeddings.copy()
        codes = np.empty((len(residual), len(self.codebook_sizes)), dtype=np.int32)
        codebooks = []
        for level, size in enumerate(self.codebook_sizes):
            codebook = self._train_level(residual, size, self.seed + level)
            codebook, codes[:, level] = _reseed_unused(residual, codebook)
            for rows in _chunks(len(residual)):
                residual[rows] -= codebook[codes[rows, level]]
            codebooks.append(codebook)
            if self.verbose:
                print(f"level {level + 1}: {size} codes, mean squared residual {np.square(residual).mean():.6g}")
        self.codebooks = codebooks
        return codes

    def encode(self, embeddings) -> np.ndarray:
        """Codes of embeddings: `(N, d)` to `(N, K)` int32, in chunks, without faiss."""
        self._check_fitted()
        embeddings = self._check_width(check_embeddings(embeddings))
        codes = np.empty((len(embeddings), len(self.codebooks)), dtype=np.int32)
        for rows in _chunks(len(embeddings)):
            residual = embeddings[rows].copy()
            for level, codebook in enumerate(self.codebooks):
                codes[rows, level] = _nearest(residual, codebook)
                residual -= codebook[codes[rows, level]]
        return codes

    def decode(self, codes) -> np.ndarray:
        """Embeddings that codes stand for: `(N, K)` to `(N, d)` float32, the sum of the chosen centroids."""
        self._check_fitted()
        codes = np.asarray(codes)
        check_codes(codes, self.codebook_sizes)
        embeddings = np.zeros((len(codes), self.codebooks[0].shape[1]), dtype=np.float32)
        for level, codebook in enumerate(self.codebooks):
            embeddings += codebook[codes[:, level]]
        return embeddings

    def _train_level(self, points: np.ndarray, size: int, seed: int) -> np.ndarray:
        import faiss

        # faiss wants at least as many points as centroids; repeated points become repeated (spare) centroids.
        sample = points if len(points) >= size else np.resize(points, (size, points.shape[1]))
        kmeans = faiss.Kmeans(
            points.shape[1],
            size,
            niter=self.num_iterations,
            seed=seed,
            verbose=self.verbose,
            min_points_per_centroid=1,  # a small catalog is no reason for a warning
            max_points_per_centroid=self.max_points_per_centroid,
        )
        kmeans.train(sample)
        return np.array(kmeans.centroids, dtype=np.float32).reshape(size, -1)

    def _check_fitted(self) -> None:
        if not self.codebooks:
            raise ValueError("this RQKMeans has no codebooks yet; call `fit` first or set `codebooks`.")

    def _check_width(self, embeddings: np.ndarray) -> np.ndarray:
        width = self.codebooks[0].shape[1]
        if embeddings.shape[1] != width:
            raise ValueError(f"`embeddings` must have width {width} like the codebooks, got {embeddings.shape[1]}.")
        return embeddings


def check_codebook_sizes(codebook_sizes) -> tuple[int, ...]:
    """Returns the sizes as a tuple of `int`, or raises `ValueError` for anything but positive integers."""
    try:
        sizes = tuple(operator.index(size) for size in codebook_sizes)
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"`codebook_sizes` must be a sequence of positive integers, one a level, got {codebook_sizes!r}."
        )
    return sizes


def check_codes(codes: np.ndarray, codebook_sizes: Sequence[int]) -> None:
    """Raises `ValueError` unless codes are integers of shape `(N, K)`, each below the size of its level."""
    if codes.ndim != 2 or codes.shape[1] != len(codebook_sizes) or codes.dtype.kind not in "iu":
        raise ValueError(
            f"`codes` must be integers of shape (num_items, {len(codebook_sizes)}), "
            f"got {codes.dtype} of shape {codes.shape}."
        )
    bad = np.flatnonzero(((codes < 0) | (codes >= np.asarray(codebook_sizes))).any(axis=1))
    if bad.size:
        raise ValueError(
            f"`codes` has {bad.size} rows outside `codebook_sizes` {tuple(codebook_sizes)}, "
            f"first row {bad[0]}: {codes[bad[0]].tolist()}."
        )


def check_enough_items(embeddings: np.ndarray, codebook_sizes: tuple[int, ...]) -> None:
    wanted = codebook_sizes[0]
    distinct: set[bytes] = set()
    for row in embeddings:  # stops after about `wanted` rows on an ordinary catalog
        distinct.add(row.tobytes())
        if len(distinct) == wanted:
            return
    raise ValueError(
        f"`codebook_sizes` {codebook_sizes} asks for {wanted} codes at the first level, but the {len(embeddings)} "
        f"items have only {len(distinct)} distinct embeddings; give at most {len(distinct)} there."
    )


def _reseed_unused(points: np.ndarray, codebook: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moves codes that no point chooses onto the points with the largest residual, until every code is used.

    faiss fills a code that empties during training by splitting a large cluster, which leaves codes unused where a
    cluster is many copies of one point. A round here is a k-means step (assign, move used codes to their means) that
    re-seeds the unused codes; a last one without re-seeding settles the others, unless it would empty a code again.
    """
    # Distances computed in float32 cannot tell points apart that are closer than this.
    resolution = np.finfo(np.float32).eps * np.square(points, dtype=np.float32).sum(axis=1).mean()
    codes, settled = _assign(points, codebook), True
    for _ in range(MAX_RESEED_ROUNDS):
        unused = _unused(codes, codebook)
        if not unused.size:
            break
        seeds = _farthest_points(points, codebook, codes, unused.size, resolution)
        if not len(seeds):  # fewer distinct points than codes: the rest stay spare
            break
        codebook = _cluster_means(points, codebook, codes)
        codebook[unused[: len(seeds)]] = seeds
        codes, settled = _assign(points, codebook), False
    if not settled:
        means = _cluster_means(points, codebook, codes)
        means_codes = _assign(points, means)
        if _unused(means_codes, means).size <= _unused(codes, codebook).size:
            return means, means_codes
    return codebook, codes


def _unused(codes: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.bincount(codes, minlength=len(codebook)) == 0)


def _farthest_points(points, codebook, codes, count: int, resolution: float) -> np.ndarray:
    """At most `count` distinct points, those farthest from their centroids, none nearer than `resolution`."""
    errors = np.concatenate([np.square(points[r] - codebook[codes[r]]).sum(axis=1) for r in _chunks(len(points))])
    # Copies of one point have the same error and would seed the same code; looking further than `count` skips them.
    farthest = np.argsort(-errors, kind="stable")[: 4 * count]
    farthest = farthest[errors[farthest] > resolution]
    _, first = np.unique(points[farthest], axis=0, return_index=True)
    return points[farthest[np.sort(first)[:count]]]


def _cluster_means(points: np.ndarray, codebook: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The mean of the points of each code; a code without points keeps its centroid."""
    sums = np.zeros(codebook.shape, dtype=np.float64)
    for rows in _chunks(len(points)):
        order = np.argsort(codes[rows], kind="stable")
        present, starts = np.unique(codes[rows][order], return_index=True)
        sums[present] += np.add.reduceat(points[rows][order], starts, axis=0)
    counts = np.bincount(codes, minlength=len(codebook))
    used = counts > 0
    means = codebook.copy()
    means[used] = sums[used] / counts[used, None]
    return means


def _assign(points: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return np.concatenate([_nearest(points[rows], codebook) for rows in _chunks(len(points))])


def _nearest(points: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return distances_to_codes(points, codebook).argmin(axis=1).astype(np.int32)


def _chunks(length: int) -> list[slice]:
    return [slice(start, start + CHUNK_ROWS) for start in range(0, length, CHUNK_ROWS)]
