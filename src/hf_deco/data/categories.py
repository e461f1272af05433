"""Categorical columns of tables: what their features are, and the integers of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..models.categories_gear import Category, text_of
from .tables import refuse_rows

if TYPE_CHECKING:
    import pandas as pd


def fit_category(name: str, kind: None | int | list, column: pd.Series) -> Category:
    """A feature as the roles describe it.

    Args:
        name (`str`): name of the column.
        kind (`None`, `int` or `list`): `None` for the values that the column holds, in sorted order; a number of
            buckets; or the values.
        column (`pandas.Series`): the column.

    Raises:
        ValueError: `kind` is none of these, there is no value, or the column holds lists.
    """
    if type(kind) is int and kind > 0:
        return Category(name, buckets=kind)
    if kind is None:
        values = tuple(sorted({text_of(value) for value in _values(column) if value is not None}))
    elif isinstance(kind, list) and len(set(map(text_of, kind))) == len(kind):
        values = tuple(map(text_of, kind))
    else:
        raise ValueError(
            f"feature `{name}` must be null, a positive number of hash buckets or a list of values, got {kind!r}."
        )
    if not values:
        raise ValueError(f"feature `{name}` has no values; leave the column out.")
    return Category(name, values=values)


def encode_table(table: pd.DataFrame, features: dict) -> tuple[tuple[Category, ...], np.ndarray]:
    """Features of the columns of a table that `features` names, and the integers `(n, F)` of their values."""
    fitted = tuple(fit_category(name, kind, table[name]) for name, kind in features.items())
    columns = [np.array(feature.encode(_values(table[feature.name])), dtype=np.int64) for feature in fitted]
    return fitted, np.stack(columns, axis=1) if columns else np.empty((len(table), 0), dtype=np.int64)


def _values(column: pd.Series) -> list:
    """Values of a column as Python has them, None for nulls of any kind."""
    nested = column.map(lambda value: isinstance(value, list | dict | np.ndarray)).to_numpy(dtype=bool)
    refuse_rows(column.name, "lists", nested, column, "a feature has one value a row")
    return column.astype(object).where(column.notna(), None).tolist()
