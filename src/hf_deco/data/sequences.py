"""Ragged sequences of item indices in two flat arrays, and prediction examples made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of item indices, one behind the other.

    Args:
        offsets (`np.ndarray` of shape `(S + 1,)`): sequence `i` is `items[offsets[i]:offsets[i + 1]]`, int64.
        items (`np.ndarray` of shape `(offsets[-1],)`): item indices, oldest first, int64.
        user_index (`np.ndarray` of shape `(S,)`): whose sequence it is, int64.
    """

    offsets: np.ndarray
    items: np.ndarray
    user_index: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        # A plain slice of `offsets` would answer index len(self) with garbage and so never end a for loop.
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        return self.items[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sequence, shape `(S,)`."""
        return np.diff(self.offsets)

    def truncate(self, max_length: int) -> Sequences:
        """Keep the last `max_length` items of each sequence."""
        if max_length < 1:
            raise ValueError(f"`max_length` is {max_length}; keep at least 1 item.")
        lengths = np.minimum(self.lengths, max_length)
        return cut(self.items, self.offsets[1:] - lengths, lengths, self.user_index)

    def select(self, index: np.ndarray) -> Sequences:
        """Keep the sequences at `index` (integers, or one boolean a sequence), in that order."""
        return cut(self.items, self.offsets[:-1][index], self.lengths[index], self.user_index[index])


@dataclass(frozen=True, eq=False)
class Examples:
    """What to predict from what: one target item for each history.

    Args:
        histories ([`Sequences`] of `E` sequences): what the model may see.
        targets (`np.ndarray` of shape `(E,)`): index of the item that came next, int64.
        user_index (`np.ndarray` of shape `(E,)`): whose example it is, int64.
    """

    histories: Sequences
    targets: np.ndarray
    user_index: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    def truncate(self, max_length: int) -> Examples:
        """Keep the last `max_length` items of each history."""
        return replace(self, histories=self.histories.truncate(max_length))

    def select(self, index: np.ndarray) -> Examples:
        """Keep the examples at `index` (integers, or one boolean an example), in that order."""
        return Examples(self.histories.select(index), self.targets[index], self.user_index[index])


def cut(items: np.ndarray, starts: np.ndarray, lengths: np.ndarray, user_index: np.ndarray) -> Sequences:
    """Cut runs out of a flat array.

    Args:
        items (`np.ndarray` of shape `(n,)`): the array to cut from.
        starts (`np.ndarray` of shape `(S,)`): where the runs begin; they may overlap.
        lengths (`np.ndarray` of shape `(S,)`): how long they are.
        user_index (`np.ndarray` of shape `(S,)`): whose run it is.

    Returns:
        [`Sequences`] that own their items.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Sequences(offsets, items[positions], user_index)
