"""Rows of embeddings in few bytes, and their dot products with a user: fp16, INT8 and signed packed INT4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .embedding import check_embeddings

try:
    import numkong
except ImportError:  # an optional extra; the reference below gives the same integers
    numkong = None

PRECISIONS = ("fp16", "int8", "int4")
_LARGEST = {"int8": 127, "int4": 7}
_DTYPES = {"fp16": np.float16, "int8": np.int8, "int4": np.uint8}
_BLOCK = 1 << 14  # rows that are worked on at a time: bounds the memory, and fits the processor's cache
# Sums of integer products stay below 2**24 up to this width, where float32 adds them without rounding in any order.
_FLOAT32_WIDTH = 2**24 // 127**2


def pack_int4(values: np.ndarray) -> np.ndarray:
    """Packs integers of -8 to 7, two a byte.

    Byte `j` of a row holds value `2j` in its low and value `2j + 1` in its high four bits, both in two's complement; a
    row of odd width ends with four zero bits.

    Args:
        values (`np.ndarray` of shape `(n, d)`): integers.

    Returns:
        `np.ndarray` of shape `(n, ceil(d / 2))`, uint8.

    Raises:
        ValueError: a value does not fit into four bits.
    """
    if values.ndim != 2 or values.dtype.kind not in "iu":
        raise ValueError(f"`values` must be integers of shape (n, d), got {values.dtype} of shape {values.shape}.")
    if values.size and not -8 <= values.min() <= values.max() <= 7:
        raise ValueError(f"`values` must lie in -8..7 to fit four bits, got {values.min()}..{values.max()}.")
    nibbles = values.astype(np.uint8) & 15
    packed = nibbles[:, ::2].copy()
    packed[:, : values.shape[1] // 2] |= nibbles[:, 1::2] << 4
    return packed


def unpack_int4(packed: np.ndarray, width: int) -> np.ndarray:
    """The integers that `pack_int4` packed: `(n, ceil(width / 2))` uint8 to `(n, width)` int8."""
    values = np.empty((len(packed), 2 * packed.shape[1]), dtype=np.int8)
    # Flipping the sign bit and taking 8 away extends it to eight bits.
    values[:, ::2] = ((packed & 15) ^ 8).astype(np.int8) - 8
    values[:, 1::2] = ((packed >> 4) ^ 8).astype(np.int8) - 8
    return values[:, :width]


def int8_dots(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Exact dot products of int8 rows `(n, d)` with an int8 query `(d,)`, as floats `(n,)`."""
    exact = np.float32 if rows.shape[1] <= _FLOAT32_WIDTH else np.float64
    return rows.astype(exact) @ query.astype(exact)


def int4_dots(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Exact dot products of packed INT4 rows `(n, ceil(d / 2))` with a packed query, as floats `(n,)`; by NumKong where
    it is installed."""
    if numkong is not None and len(rows):
        return np.asarray(numkong.dot(query, rows, "int4"))
    return int4_dots_reference(rows, query)


def int4_dots_reference(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """`int4_dots` by NumPy alone."""
    exact = np.float32 if 2 * rows.shape[1] <= _FLOAT32_WIDTH else np.float64
    values = unpack_int4(query[None], 2 * len(query))[0].astype(exact)
    # Rows are left 8 too large, which is taken away once from the sum instead of from every value.
    low, high = ((rows & 15) ^ 8).astype(exact), ((rows >> 4) ^ 8).astype(exact)
    return low @ values[::2] + high @ values[1::2] - 8 * values.sum()


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Embeddings of items, packed row by row.

    INT8 and INT4 rows are symmetric: a value is its integer times the row's scale, which is the largest magnitude of
    the row by 127 or 7. Packing a row depends on that row alone. INT4 takes half the room of INT8, and is the first to
    lose the order of near-identical items.

    Args:
        data (`np.ndarray`): `(N, d)` float16 or int8; or `(N, ceil(d / 2))` uint8, laid out as `pack_int4` does.
        scales (`np.ndarray` of shape `(N,)`, *optional*): float32, for INT8 and INT4; 0 for a row of zeros.
        width (`int`): `d`.
        precision (`str`): `"fp16"`, `"int8"` or `"int4"`.

    Raises:
        ValueError: the parts do not fit together.
    """

    data: np.ndarray
    scales: np.ndarray | None
    width: int
    precision: str

    def __post_init__(self):
        check_precision(self.precision)
        columns = (self.width + 1) // 2 if self.precision == "int4" else self.width
        wanted = np.dtype(_DTYPES[self.precision])
        if self.data.dtype != wanted or self.data.ndim != 2 or self.data.shape[1] != columns:
            raise ValueError(
                f"`data` of {self.precision} rows of width {self.width} must be {wanted} of shape (N, {columns}), got "
                f"{self.data.dtype} of shape {self.data.shape}."
            )
        if (self.scales is None) != (self.precision == "fp16"):
            raise ValueError(f"`scales` must be given for int8 and int4, and only there; this is {self.precision}.")
        if self.scales is not None and (self.scales.dtype, self.scales.shape) != (np.float32, (len(self.data),)):
            raise ValueError(
                f"`scales` must be float32 of shape ({len(self.data)},), got {self.scales.dtype} of shape "
                f"{self.scales.shape}."
            )

    @classmethod
    def pack(cls, embeddings, precision: str = "int8") -> PackedRows:
        """Packs embeddings `(N, d)` of any real dtype.

        Raises:
            ValueError: they are malformed, not finite, or too large for fp16.
        """
        check_precision(precision)
        embeddings = check_embeddings(embeddings)
        rows, width = embeddings.shape
        data = np.empty((rows, (width + 1) // 2 if precision == "int4" else width), dtype=_DTYPES[precision])
        scales = None if precision == "fp16" else np.empty(rows, dtype=np.float32)
        for first in range(0, rows, _BLOCK):
            block = slice(first, first + _BLOCK)
            if precision == "fp16":
                with np.errstate(over="ignore"):  # reported below
                    data[block] = embeddings[block]
            else:
                integers, scales[block] = _quantize(embeddings[block], _LARGEST[precision])
                data[block] = pack_int4(integers) if precision == "int4" else integers
        if (
            precision == "fp16" and (largest := np.abs(embeddings).max()) >= 65520
        ):  # rounds to an infinity from there on
            raise ValueError(
                f"`embeddings` reach {largest:g}, but fp16 ends at 65504; normalise them, or take `precision='int8'`."
            )
        return cls(data, scales, width, precision)

    def __len__(self) -> int:
        return len(self.data)

    def check_finite(self) -> None:
        """Raises `ValueError` where rows that come from elsewhere than `pack` hold NaN or infinities."""
        if self.scales is None:
            exponents = self.data.view(np.uint16) & 0x7C00  # all ones in NaN and infinities; NumPy's test is far slower
            finite, name = not (exponents == 0x7C00).any(), "data"
        else:
            finite, name = np.isfinite(self.scales).all(), "scales"
        if not finite:
            raise ValueError(f"`{name}` holds NaN or infinite values.")

    def take(self, rows: np.ndarray) -> PackedRows:
        """Some rows, in the order given."""
        scales = None if self.scales is None else self.scales[rows]
        return PackedRows(np.take(self.data, rows, axis=0), scales, self.width, self.precision)

    def merge(self, other: PackedRows, order: np.ndarray) -> PackedRows:
        """Some of these rows and of others of the same width and precision, which are numbered on from these: row
        `len(self)` is the other's first. In the order given, `(n,)`."""
        new = np.flatnonzero(order >= len(self))
        data = np.take(self.data, order, axis=0, mode="clip")
        data[new] = other.data[order[new] - len(self)]
        scales = None
        if self.scales is not None:
            scales = np.take(self.scales, order, mode="clip")
            scales[new] = other.scales[order[new] - len(self)]
        return PackedRows(data, scales, self.width, self.precision)

    def integers(self) -> np.ndarray:
        """The integers `(N, d)`, int8, of INT8 and INT4 rows."""
        return unpack_int4(self.data, self.width) if self.precision == "int4" else self.data

    def unpack(self) -> np.ndarray:
        """The embeddings that the rows stand for, `(N, d)` float32."""
        if self.scales is None:
            return self.data.astype(np.float32)
        return self.integers() * self.scales[:, None]

    def scores(self, rows: np.ndarray, user: np.ndarray) -> np.ndarray:
        """Dot products of rows with a user.

        The user is packed like the rows. INT8 and INT4 products are exact integers, multiplied by the product of the
        two scales; fp16 rows meet the user in float32. A row's score does not depend on the other rows.

        Args:
            rows (`np.ndarray` of shape `(n,)`): row numbers.
            user (`np.ndarray` of shape `(d,)`): finite, float32.

        Returns:
            `np.ndarray` of shape `(n,)`, float32.
        """
        scores = np.empty(len(rows), dtype=np.float32)
        query = None if self.scales is None else PackedRows.pack(user[None], self.precision)
        dots = int4_dots if self.precision == "int4" else int8_dots
        with np.errstate(over="ignore", invalid="ignore"):  # the caller sees what is not finite
            for first in range(0, len(rows), _BLOCK):
                block = rows[first : first + _BLOCK]
                data = np.take(self.data, block, axis=0)
                if query is None:
                    # A BLAS product would add up in an order that depends on the number of rows. NumPy converts float16
                    # ten times more slowly than torch.
                    vectors = torch.from_numpy(data).float().numpy()
                    scores[first : first + _BLOCK] = np.einsum("nd,d->n", vectors, user)
                else:
                    products = dots(data, query.data[0]).astype(np.float32)
                    scores[first : first + _BLOCK] = products * (self.scales[block] * query.scales[0])
        return scores

    def pair_scores(self, rows: np.ndarray, users: np.ndarray, which: np.ndarray) -> np.ndarray:
        """As `scores`, where every row meets a user of its own: row `rows[i]` meets `users[which[i]]`.

        Args:
            rows (`np.ndarray` of shape `(n,)`): row numbers.
            users (`np.ndarray` of shape `(U, d)`): finite, float32.
            which (`np.ndarray` of shape `(n,)`): rows of `users`.

        Returns:
            `np.ndarray` of shape `(n,)`, float32.
        """
        scores = np.empty(len(rows), dtype=np.float32)
        queries = None if self.scales is None else PackedRows.pack(users, self.precision)
        exact = np.float32 if self.width <= _FLOAT32_WIDTH else np.float64
        with np.errstate(over="ignore", invalid="ignore"):  # the caller sees what is not finite
            for first in range(0, len(rows), _BLOCK):
                here = slice(first, first + _BLOCK)
                block = self.take(rows[here])
                if queries is None:
                    vectors = torch.from_numpy(block.data).float().numpy()
                    scores[here] = np.einsum("nd,nd->n", vectors, users[which[here]])
                else:
                    integers = block.integers().astype(exact), queries.integers().astype(exact)[which[here]]
                    products = np.einsum("nd,nd->n", *integers).astype(np.float32)
                    scores[here] = products * (block.scales * queries.scales[which[here]])
        return scores

    def reference_scores(self, user: np.ndarray) -> np.ndarray:
        """`scores` of all rows by plain 64-bit arithmetic, `(N,)` float32: what the fast way is tested against."""
        if self.scales is None:
            return (self.data.astype(np.float64) @ user.astype(np.float64)).astype(np.float32)
        query = PackedRows.pack(user[None], self.precision)
        products = self.integers().astype(np.int64) @ query.integers()[0].astype(np.int64)
        return products.astype(np.float32) * (self.scales * query.scales[0])


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"`precision` must be one of {', '.join(PRECISIONS)}, got {precision!r}.")


def _quantize(embeddings: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers `(n, d)`, int8, and scales `(n,)`, float32, of rows `(n, d)`, float32."""
    scales = np.abs(embeddings).max(axis=1) / np.float32(largest)
    divisors = np.where(scales > 0, scales, np.float32(np.inf))  # rows of zeros, and such that no scale can hold
    # A subnormal scale is coarse, and its quotients may pass the largest integer.
    integers = np.clip(np.rint(embeddings / divisors[:, None]), -largest, largest)
    return integers.astype(np.int8), scales
