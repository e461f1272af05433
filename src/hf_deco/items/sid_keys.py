"""Semantic IDs as 64-bit integers that sort as the SIDs do."""

from __future__ import annotations

from math import prod

import numpy as np


def check_key_space(codebook_sizes: tuple[int, ...]) -> None:
    """Raises `ValueError` where there are more SIDs than 64 bits tell apart."""
    if prod(codebook_sizes) > 2**64:
        raise ValueError(
            f"`codebook_sizes` {codebook_sizes} span {prod(codebook_sizes):.3g} SIDs, but an index tells 2**64 apart; "
            "take fewer or smaller codebooks."
        )


def sid_keys(codes: np.ndarray, codebook_sizes: tuple[int, ...]) -> np.ndarray:
    """Keys of codes `(..., L)` that lie in their levels, `(...)` uint64: the codes as digits of one number.

    A prefix, `L < K`, gets the key of the first SID under it.
    """
    keys = np.zeros(codes.shape[:-1], dtype=np.uint64)
    for level in range(codes.shape[-1]):
        keys = keys * np.uint64(codebook_sizes[level]) + codes[..., level].astype(np.uint64)
    # A span of 2**64 multiplies keys that are 0.
    return keys * np.uint64(_span(codebook_sizes, codes.shape[-1]) % 2**64)


def last_keys(keys: np.ndarray, length: int, codebook_sizes: tuple[int, ...]) -> np.ndarray:
    """Key of the last SID under prefixes of `length` codes, from that of the first."""
    return keys + np.uint64(_span(codebook_sizes, length) - 1)


def key_codes(keys: np.ndarray, codebook_sizes: tuple[int, ...]) -> np.ndarray:
    """Codes `(..., K)`, int64, of keys `(...)`."""
    codes = np.empty((*keys.shape, len(codebook_sizes)), dtype=np.int64)
    for level in reversed(range(len(codebook_sizes))):
        size = np.uint64(codebook_sizes[level])
        codes[..., level] = keys % size
        keys = keys // size
    return codes


def _span(codebook_sizes: tuple[int, ...], length: int) -> int:
    """SIDs under a prefix of `length` codes."""
    return prod(codebook_sizes[length:])
