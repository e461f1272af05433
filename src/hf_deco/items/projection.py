"""Principal components: embeddings centred and cut to the directions in which they differ most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .embedding import check_embeddings

CHUNK_ROWS = 8192


@dataclass(frozen=True, eq=False)
class Projection:
    """A centred projection onto principal directions, `(x - mean) @ components`.

    Args:
        mean (`np.ndarray` of shape `(d,)`): what is subtracted.
        components (`np.ndarray` of shape `(d, w)`): orthonormal columns, the direction of largest variance first.
        explained_variance (`float`): share of the variance that the `w` directions hold.
    """

    mean: np.ndarray
    components: np.ndarray
    explained_variance: float

    @classmethod
    def fit(cls, embeddings, width: int) -> Projection:
        """The projection of embeddings `(N, d)` onto their first `width` principal directions.

        Raises:
            ValueError: the embeddings are malformed or all alike, or `width` is not between 1 and `d`.
        """
        embeddings = check_embeddings(embeddings)
        check_width(width, embeddings.shape[1])
        check_variance(embeddings)
        mean = embeddings.mean(axis=0, dtype=np.float64)
        scatter = np.zeros((len(mean), len(mean)))
        for start in range(0, len(embeddings), CHUNK_ROWS):
            centred = embeddings[start : start + CHUNK_ROWS] - mean
            scatter += centred.T @ centred
        variances, directions = np.linalg.eigh(scatter)
        variances, directions = variances[::-1][:width], directions[:, ::-1][:, :width]
        # An eigenvector has no sign of its own: its largest entry is made positive.
        largest = directions[np.abs(directions).argmax(axis=0), np.arange(width)]
        share = float(variances.sum() / np.trace(scatter))
        return cls(mean.astype(np.float32), (directions * np.sign(largest)).astype(np.float32), min(share, 1.0))

    def __call__(self, embeddings: np.ndarray) -> np.ndarray:
        """Embeddings `(n, d)` to `(n, w)`, float32."""
        projected = np.empty((len(embeddings), self.components.shape[1]), dtype=np.float32)
        # In float64, so that an item comes out the same to the last bit alone and in a batch.
        mean, components = self.mean.astype(np.float64), self.components.astype(np.float64)
        for start in range(0, len(embeddings), CHUNK_ROWS):
            projected[start : start + CHUNK_ROWS] = (embeddings[start : start + CHUNK_ROWS] - mean) @ components
        return projected


def check_width(width: int, embedding_width: int) -> None:
    """Raises `ValueError` unless embeddings of `embedding_width` columns can be projected onto `width` directions."""
    if not 1 <= width <= embedding_width:
        raise ValueError(f"`width` must be between 1 and the embeddings' {embedding_width} columns, got {width}.")


def check_variance(embeddings: np.ndarray) -> None:
    """Raises `ValueError` where all embeddings `(N, d)` are the same, so that nothing can tell items apart."""
    if (embeddings == embeddings[0]).all():
        raise ValueError(
            f"`embeddings` has {len(embeddings)} rows that are all the same: they have no variance to quantise; embed "
            "something that tells the items apart."
        )
