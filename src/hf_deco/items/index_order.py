"""The canonical order of an index, by SID and then by item id: sorted anew, or merged."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ..models.strings_sid import PackedStrings

_BLOCK = 1 << 16  # strings that are copied at a time, which bounds the memory


def sorted_order(keys: np.ndarray, item_ids: np.ndarray) -> np.ndarray:
    """Order of rows with keys `(N,)` and item ids `(N,)`."""
    return np.lexsort((item_ids, keys))


def merged_order(
    old_keys: np.ndarray, old_ids: PackedStrings, kept: np.ndarray, new_keys: np.ndarray, new_ids: np.ndarray
) -> np.ndarray:
    """Order of old and new rows together, without sorting the old ones again.

    Args:
        old_keys (`np.ndarray` of shape `(N,)`): keys of the old rows, which stand in order.
        old_ids ([`PackedStrings`] of length N): their item ids.
        kept (`np.ndarray` of shape `(m,)`): the old rows to keep, ascending.
        new_keys (`np.ndarray` of shape `(n,)`): keys of the new rows, in any order.
        new_ids (`np.ndarray` of shape `(n,)`): their item ids.

    Returns:
        `np.ndarray` of shape `(m + n,)`: row `i` is old, row `N + i` is new row `i`.
    """
    kept_keys, order = old_keys[kept], sorted_order(new_keys, new_ids)
    first, last = (np.searchsorted(kept_keys, new_keys[order], side) for side in ("left", "right"))
    data, offsets = old_ids.data, old_ids.offsets

    def old_id(place: int) -> bytes:
        row = kept[place]
        return data[offsets[row] : offsets[row + 1]].tobytes()

    # UTF-8 sorts as the text does.
    names = [item_id.encode() for item_id in new_ids[order].tolist()]
    bounds = zip(first.tolist(), last.tolist(), names, strict=True)
    places = [bisect_left(range(end), name, lo=start, key=old_id) for start, end, name in bounds]
    return np.insert(kept, np.array(places, dtype=np.int64), len(old_keys) + order)


def take_strings(strings: PackedStrings, rows: np.ndarray) -> PackedStrings:
    """Some of many strings, in the order given, without making them."""
    lengths = np.diff(strings.offsets)[rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = np.empty(offsets[-1], dtype=np.uint8)
    shifts = strings.offsets[rows] - offsets[:-1]
    for first in range(0, len(rows), _BLOCK):
        block = slice(first, first + _BLOCK)
        start, end = offsets[first], offsets[min(first + _BLOCK, len(rows))]
        data[start:end] = strings.data[np.arange(start, end) + np.repeat(shifts[block], lengths[block])]
    return PackedStrings(data, offsets)


def join_strings(first: PackedStrings, second: PackedStrings) -> PackedStrings:
    """The strings of both, one behind the other."""
    end = first.offsets[-1]
    data = np.concatenate([first.data[:end], second.data])
    return PackedStrings(data, np.concatenate([first.offsets, end + second.offsets[1:]]))
