"""The item table: one row an item, with the text that its semantic ID will be made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .tables import read_columns, read_ids

if TYPE_CHECKING:
    import datasets
    import pandas as pd

_DEFAULT_TITLE = "title"


@dataclass(frozen=True, eq=False)
class ItemTable:
    """The items that can be recommended. Row `i` here is item `i` everywhere: in logs, embeddings, codes and metrics.

    Args:
        item_ids (`np.ndarray` of shape `(N,)`): unique ids, `str`.
        texts (`np.ndarray` of shape `(N,)`): what is known of each item in words, never empty, `str`.
        titles (`np.ndarray` of shape `(N,)`, *optional*): a short name to show people, `str`; empty where unknown.
    """

    item_ids: np.ndarray
    texts: np.ndarray
    titles: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.item_ids)


def read_items(
    source: str | Path | datasets.Dataset | pd.DataFrame,
    *,
    item_column: str = "item_id",
    text_columns: Sequence[str] = ("text",),
    title_column: str = _DEFAULT_TITLE,
) -> ItemTable:
    """Read an item table.

    Args:
        source (`str`, `Path`, `datasets.Dataset` or `pandas.DataFrame`):
            A `.csv`, `.parquet`, `.jsonl` or `.json` (one object a line) file, or a table in memory.
        item_column (`str`, *optional*, defaults to `"item_id"`):
            Column of ids. They are read as strings whatever their type.
        text_columns (`Sequence[str]`, *optional*, defaults to `("text",)`):
            Columns whose contents, joined into sentences, make the text of an item. Empty ones are skipped.
        title_column (`str`, *optional*, defaults to `"title"`):
            Column of titles. A table without a column of the default name has no titles; any other name must exist.

    Returns:
        [`ItemTable`] in the order of the source.

    Raises:
        FileNotFoundError: `source` is a path to nothing.
        ValueError: a column is missing, an id is null or occurs twice, or an item has no text.
    """
    if isinstance(text_columns, str) or not text_columns:
        raise ValueError(
            f"`text_columns` is {text_columns!r}; pass a sequence of column names, such as ('title', 'text')."
        )
    required = {item_column: "item_column", **dict.fromkeys(text_columns, "text_columns")}
    if title_column != _DEFAULT_TITLE:
        required[title_column] = "title_column"
    columns = (*required, title_column)
    table = read_columns(source, required, optional=(title_column,), as_text=columns)
    if len(table) == 0:
        raise ValueError("`source` has no rows; an item table needs at least one item.")

    item_ids = read_ids(table, item_column)
    _refuse_duplicates(item_ids, item_column)
    parts = [_read_text(table, column) for column in text_columns]
    texts = np.array([_join_sentences(row) for row in zip(*parts, strict=True)], dtype=object)
    _refuse_empty(texts, item_ids, text_columns)
    titles = _read_text(table, title_column) if title_column in table.columns else None
    return ItemTable(item_ids, texts, titles)


def _read_text(table: pd.DataFrame, column: str) -> np.ndarray:
    values = table[column]
    nested = values.map(lambda value: isinstance(value, (list, tuple, dict, np.ndarray))).to_numpy(dtype=bool)
    if nested.any():
        row = int(np.argmax(nested))
        raise ValueError(
            f"column `{column}` holds lists, first in row {row}: {values.iloc[row]!r}; join them into a string."
        )
    return values.astype(object).where(values.notna(), "").map(lambda value: str(value).strip()).to_numpy(dtype=object)


def _join_sentences(parts: Sequence[str]) -> str:
    """Join what is not empty with ". ", without a second full stop after a part that already ends a sentence."""
    parts = [part for part in parts if part]
    ends = ["" if part[-1] in ".!?" else "." for part in parts[:-1]]
    return " ".join([part + end for part, end in zip(parts, ends, strict=False)] + parts[-1:])


def _refuse_duplicates(item_ids: np.ndarray, column: str) -> None:
    unique, counts = np.unique(item_ids, return_counts=True)
    if len(unique) < len(item_ids):
        first = ", ".join(repr(item) for item in unique[counts > 1][:5])
        raise ValueError(
            f"column `{column}` names {int((counts > 1).sum()):,} items more than once (first few: {first}); "
            "keep one row an item."
        )


def _refuse_empty(texts: np.ndarray, item_ids: np.ndarray, columns: Sequence[str]) -> None:
    empty = texts == ""
    if empty.any():
        first = ", ".join(repr(item) for item in item_ids[empty][:5])
        raise ValueError(
            f"{int(empty.sum()):,} of {len(texts):,} items have no text in `text_columns`={tuple(columns)} (first few: "
            f"{first}); name more columns or remove these items."
        )
