"""Millions of strings without a Python object for each, and the row of a string among them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

# 64-bit FNV-1a.
_OFFSET_BASIS, _PRIME, _MASK = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1
_BLOCK = 1 << 14  # strings that are worked on at a time


class PackedStrings(Sequence):
    """A sequence of strings, kept as one block of UTF-8 and made into `str` where it is read.

    Looking a string up takes an index of sorted hashes, 16 bytes a string, which is made when first needed.

    Args:
        data (`np.ndarray` of shape `(bytes,)`): UTF-8 of all strings, one behind the other, `uint8`.
        offsets (`np.ndarray` of shape `(N + 1,)`): Where each begins, and the end of the last, `int64`.

    Raises:
        ValueError: If the offsets are no ascending positions in the data.

    Example:
        ```python
        >>> names = PackedStrings.pack(["apple", "pear"])
        >>> names[1], len(names), names.find(["pear", "plum"])
        ('pear', 2, [1, -1])

        ```
    """

    def __init__(self, data: np.ndarray, offsets: np.ndarray):
        whole = offsets.size > 0 and offsets[0] == 0 and offsets[-1] <= len(data)
        if not whole or (offsets[1:] < offsets[:-1]).any():
            raise ValueError("`offsets` must ascend from 0 to at most the length of `data`.")
        self.data, self.offsets = data, offsets
        self._index: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def pack(cls, strings: Iterable) -> "PackedStrings":
        """Pack strings, or anything that `str` makes into one."""
        encoded = [str(string).encode("utf-8") for string in strings]
        offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
        offsets[1:] = np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
        return cls(np.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int | slice) -> "str | list[str]":
        if isinstance(row, slice):
            return [self._bytes(number).decode("utf-8") for number in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"There are {len(self)} strings, none at {row}.")
        return self._bytes(row % len(self)).decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _BLOCK):
            yield from self[start : start + _BLOCK]

    def __contains__(self, string: object) -> bool:
        return isinstance(string, str) and self.find([string]) != [-1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3])) + (", ..." if len(self) > 3 else "")
        return f"PackedStrings([{shown}], length={len(self)})"

    def find(self, strings: Iterable[str]) -> list[int]:
        """Row of every string, the first where it stands in several; -1 where there is none."""
        encoded = [string.encode("utf-8") for string in strings]
        hashes, rows = self._sorted_hashes()
        wanted = np.array([_hash(piece) for piece in encoded], dtype=np.uint64)
        first, last = (np.searchsorted(hashes, wanted, side).tolist() for side in ("left", "right"))
        return [
            min((row for row in rows[start:end].tolist() if self._bytes(row) == piece), default=-1)
            for piece, start, end in zip(encoded, first, last, strict=True)
        ]

    def repeated(self) -> list[str]:
        """Strings that stand in more than one row, once for every row too many."""
        hashes, rows = self._sorted_hashes()
        ends = np.flatnonzero(np.append(hashes[1:] != hashes[:-1], True)) + 1
        starts = np.append(0, ends[:-1])
        again = []
        for start, end in zip(*(border[ends - starts > 1].tolist() for border in (starts, ends)), strict=True):
            seen = set()
            for string in map(self.__getitem__, rows[start:end].tolist()):
                again += [string] if string in seen else []
                seen.add(string)
        return again

    def _bytes(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def _sorted_hashes(self) -> tuple[np.ndarray, np.ndarray]:
        """Ascending hashes of all strings, and the row of each."""
        if self._index is None:
            hashes = _hash_all(self.data, self.offsets)
            rows = np.argsort(hashes)
            self._index = hashes[rows], rows
        return self._index


def _hash(string: bytes) -> int:
    value = _OFFSET_BASIS
    for byte in string:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def _hash_all(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """`_hash` of every string, a byte position of a block of strings at a time; blocks stay in the processor's
    cache."""
    hashes = np.full(len(offsets) - 1, _OFFSET_BASIS, dtype=np.uint64)
    for first in range(0, len(hashes), _BLOCK):
        block, borders = hashes[first : first + _BLOCK], offsets[first : first + _BLOCK + 1]
        starts, lengths = borders[:-1], np.diff(borders)
        longer, position = np.flatnonzero(lengths > 0), 0
        while longer.size:
            block[longer] = (block[longer] ^ data[starts[longer] + position]) * np.uint64(_PRIME)
            position += 1
            longer = longer[lengths[longer] > position]
    return hashes
