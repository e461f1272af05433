"""Columns out of files, `datasets.Dataset`s and data frames: the one way in for logs and item tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_READABLE = (".csv", ".parquet", ".jsonl", ".json")


def read_mapping(path: str | Path, name: str) -> dict:
    """The mapping that a YAML file holds.

    Args:
        path (`str` or `Path`): The file.
        name (`str`): The caller's argument that names it, for messages.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no YAML, or holds something else.
    """
    import yaml

    if not Path(path).is_file():
        raise FileNotFoundError(f"`{name}` is {str(path)!r}, and there is no such file.")
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"`{name}` {str(path)!r} is no YAML ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"`{name}` {str(path)!r} must hold a mapping, got {type(found).__name__}.")
    return found


def read_columns(
    source: Any, required: Mapping[str, str], *, optional: tuple[str, ...] = (), as_text: tuple[str, ...] = ()
) -> pd.DataFrame:
    """Read the named columns of a table and nothing else of it.

    Args:
        source (`str`, `Path`, `datasets.Dataset` or `pandas.DataFrame`):
            Where the rows are. Files are told apart by their extension: `.csv`, `.parquet`, `.jsonl` or `.json` (both
            one JSON object a line).
        required (`dict[str, str]`):
            Column name -> the caller's argument that names it, for the message when it is missing.
        optional (`tuple[str, ...]`):
            Columns to read where they are present.
        as_text (`tuple[str, ...]`):
            Columns of a CSV file that must not be parsed as numbers, so that the id "00123" keeps its zeros.

    Returns:
        `pandas.DataFrame` with a fresh row index, in the order of the source.

    Raises:
        FileNotFoundError: `source` is a path to nothing.
        TypeError: `source` is of no known kind.
        ValueError: the extension is unknown, a required column is missing, or a line is not a JSON object.
    """
    import pandas as pd

    if isinstance(source, (str, Path)):
        return _read_file(Path(source), required, optional, as_text)
    if isinstance(source, pd.DataFrame):
        return source[_select(source.columns, required, optional, "the data frame")].reset_index(drop=True)
    # A Dataset can only have been made by a program that has imported the library: no need to import it here.
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(source, datasets.Dataset):
        columns = _select(source.column_names, required, optional, "the dataset")
        return source.select_columns(columns).to_pandas()
    raise TypeError(
        f"`source` is a {type(source).__name__}; pass a path to a {', '.join(_READABLE)} file, one split of a "
        "`datasets.Dataset`, or a `pandas.DataFrame`."
    )


def read_ids(table: pd.DataFrame, column: str) -> np.ndarray:
    """A column of identifiers as an object array of `str`.

    Args:
        table (`pandas.DataFrame`): what `read_columns` returned, `n` rows.
        column (`str`): the column to read; integers become their decimal digits.

    Returns:
        `np.ndarray` of shape `(n,)`.

    Raises:
        ValueError: a value is null, empty or a float (a float id reads "123.0" and matches nothing).
    """
    import pandas as pd

    values = table[column]
    refuse_rows(column, "null or empty ids", (values.isna() | values.eq("")).to_numpy(dtype=bool), values)
    if pd.api.types.is_float_dtype(values.dtype):
        raise ValueError(
            f"column `{column}` holds floats (first value {values.iloc[0]}); make ids strings or integers."
        )
    return values.astype(str).to_numpy(dtype=object)


def refuse_rows(
    column: str, problem: str, bad: np.ndarray, values: pd.Series, advice: str = "remove or repair them"
) -> None:
    """Raise a `ValueError` that counts the bad rows of a column and shows the first of them.

    Args:
        column (`str`): the column at fault.
        problem (`str`): what is wrong, as a plural noun.
        bad (`np.ndarray` of shape `(n,)`): True where a row is bad; nothing happens when none is.
        values (`pandas.Series` of length `n`): the column as it was read.
        advice (`str`): what to do about it.

    Raises:
        ValueError: any row is bad.
    """
    if not bad.any():
        return
    row = int(np.argmax(bad))
    value = values.iloc[row]
    value = value.item() if isinstance(value, np.generic) else value
    count = f"{bad.sum():,} of {len(bad):,} rows"
    raise ValueError(f"column `{column}` has {problem} in {count}, first in row {row} ({value!r}); {advice}.")


def _read_file(path: Path, required: Mapping[str, str], optional: tuple, as_text: tuple) -> pd.DataFrame:
    import pandas as pd

    kind = path.suffix.lower()
    if kind not in _READABLE:
        raise ValueError(f"`source` is {str(path)!r}; only {', '.join(_READABLE)} files can be read.")
    if not path.is_file():
        raise FileNotFoundError(f"`source` is {str(path)!r}, and there is no such file.")
    where = repr(str(path))
    if kind == ".parquet":
        import pyarrow as pa
        from pyarrow.parquet import read_schema

        try:
            names = read_schema(path).names
        except pa.ArrowException as error:
            raise ValueError(f"`source` {where} is no readable Parquet file ({error}).") from error
        return pd.read_parquet(path, columns=_select(names, required, optional, where)).reset_index(drop=True)
    if kind == ".csv":
        # Only an empty cell is null: an item may well be called "NA" or "null".
        options = {"dtype": dict.fromkeys(as_text, str), "keep_default_na": False, "na_values": [""]}
        try:
            columns = _select(pd.read_csv(path, nrows=0).columns, required, optional, where)
            return pd.read_csv(path, usecols=columns, **options)[columns]
        except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise ValueError(f"`source` {where} is no readable CSV file in UTF-8 ({error}).") from error
    table = pd.DataFrame(_read_json_lines(path))
    return table[_select(table.columns, required, optional, where)]


def _read_json_lines(path: Path) -> list[dict]:
    # Not pandas.read_json: it guesses at dates from the names of columns, how and when depends on its version.
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of {str(path)!r} is not a JSON object; write one object a line.")
            rows.append(row)
    return rows


def _select(present: Any, required: Mapping[str, str], optional: tuple[str, ...], where: str) -> list[str]:
    present = list(present)
    for column, argument in required.items():
        if column not in present:
            raise ValueError(
                f"column `{column}` is not in {where}, which has {present}; say which column to read with `{argument}`."
            )
    return list(dict.fromkeys([*required, *(column for column in optional if column in present)]))
