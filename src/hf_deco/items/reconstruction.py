"""What codes leave of an embedding: the one view of a quantiser that collision resolution and the report need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np


class Reconstruction(Protocol):
    """How codes approximate embeddings of shape `(n, d)`, one level after the other.

    Attributes:
        codebook_sizes (tuple of K `int`): codes of each level.
    """

    codebook_sizes: tuple[int, ...]

    def residuals(self, embeddings: np.ndarray, codes: np.ndarray) -> Iterator[np.ndarray]:
        """Yields what is left `(n, d)` of embeddings before the first and after each column of codes `(n, l)`."""

    def distances(self, residual: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Squared distances `(n, V)` of a residual to the next level's codes, up to a constant a row."""


class AdditiveCodebooks:
    """Codebooks whose chosen rows add up, whatever the codes before.

    Args:
        codebooks (sequence of K arrays of shape `(V_k, d)`): the centroids of each level.
    """

    def __init__(self, codebooks: Sequence[np.ndarray]):
        self.codebooks = codebooks
        self.codebook_sizes = tuple(len(codebook) for codebook in codebooks)

    def residuals(self, embeddings: np.ndarray, codes: np.ndarray) -> Iterator[np.ndarray]:
        residual = embeddings
        yield residual
        for codebook, column in zip(self.codebooks, codes.T, strict=False):
            residual = residual - codebook[column]
            yield residual

    def distances(self, residual: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return distances_to_codes(residual, self.codebooks[codes.shape[1]])


def as_reconstruction(codebooks: Sequence[np.ndarray] | Reconstruction) -> Reconstruction:
    """A list of codebooks as [`AdditiveCodebooks`]; anything else is taken to be a [`Reconstruction`] already."""
    return AdditiveCodebooks(codebooks) if isinstance(codebooks, list | tuple) else codebooks


def distances_to_codes(points: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Squared distances `(n, V)` up to a constant a row: `|c|^2 - 2 <x, c>` ranks codes as `|x - c|^2` does."""
    distances = points @ codebook.T
    distances *= -2
    distances += np.square(codebook).sum(axis=1)
    return distances
