"""Categorical columns to the integers that a model embeds."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

MISSING = -1
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Category:
    """A categorical feature: a closed one has a list of values, an open-ended one a number of hash buckets.

    Args:
        name (`str`): name of the column.
        values (`tuple[str, ...]`, *optional*): values of a closed feature; value `i` is the integer `i`.
        buckets (`int`, *optional*): rows of the table that an open-ended feature is hashed into, by the model.
    """

    name: str
    values: tuple[str, ...] | None = None
    buckets: int | None = None

    @classmethod
    def fit(cls, name: str, kind: None | int | list, column: pd.Series) -> Category:
        """A feature as the roles describe it.

        Args:
            name (`str`): name of the column.
            kind (`None`, `int` or `list`): `None` for the values that the column holds, in sorted order; a number of
                buckets; or the values.
            column (`pandas.Series`): the column.

        Raises:
            ValueError: `kind` is none of these, or there is no value.
        """
        if type(kind) is int and kind > 0:
            return cls(name, buckets=kind)
        if kind is None:
            values = tuple(sorted({_text(value) for value in column[column.notna()]}))
        elif isinstance(kind, list) and len(set(map(_text, kind))) == len(kind):
            values = tuple(map(_text, kind))
        else:
            raise ValueError(
                f"feature `{name}` must be null, a positive number of hash buckets or a list of values, got {kind!r}."
            )
        if not values:
            raise ValueError(f"feature `{name}` has no values; leave the column out.")
        return cls(name, values=values)

    def encode(self, column: pd.Series) -> np.ndarray:
        """Integers `(n,)` of a column: -1 where a value is null; in a closed feature the place of the value, and
        `len(values)` where it is none of them; in an open-ended one a hash of its text of 63 bits, the same on every
        machine."""
        known = {} if self.values is None else {value: place for place, value in enumerate(self.values)}
        null = column.isna().to_numpy(dtype=bool)
        codes: dict = {}
        for value in column[~null].unique():
            text = _text(value)
            codes[value] = _hash(text) if self.values is None else known.get(text, len(known))
        encoded = np.full(len(column), MISSING, dtype=np.int64)
        encoded[~null] = [codes[value] for value in column[~null]]
        return encoded

    @property
    def entry(self) -> dict:
        """The entry of `item_features` or `user_features` of [`GearConfig`]."""
        if self.values is None:
            return {"name": self.name, "size": self.buckets, "hashed": True}
        return {"name": self.name, "size": len(self.values)}


def encode_table(table: pd.DataFrame, features: dict) -> tuple[list[dict], np.ndarray]:
    """Entries of a configuration and integers `(n, F)` of the columns of a table that `features` names."""
    fitted = [Category.fit(name, kind, table[name]) for name, kind in features.items()]
    columns = [feature.encode(table[feature.name]) for feature in fitted]
    encoded = np.stack(columns, axis=1) if columns else np.empty((len(table), 0), dtype=np.int64)
    return [feature.entry for feature in fitted], encoded


def _text(value) -> str:
    """A value as it reads; a whole number that a null made a float reads as the integer it is."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & _LARGEST
