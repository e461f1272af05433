"""Times of any usual form to unix seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .tables import refuse_rows

if TYPE_CHECKING:
    import pandas as pd

_YEAR_10000 = 253_402_300_800  # unix seconds
# A count of seconds stays below 1e11 until the year 5138, and 1e11 milliseconds were up in 1973: size tells the unit.
_UNIT_LIMITS = np.array([10**11, 10**14, 10**17])
_UNIT_NAMES = ("seconds", "milliseconds", "microseconds", "nanoseconds")
_UNITS_PER_SECOND = (1, 10**3, 10**6, 10**9)


def to_unix_seconds(values: pd.Series, column: str) -> np.ndarray:
    """Convert a column of times, fractions of a second cut off.

    Args:
        values (`pandas.Series` of length `n`):
            Numbers since 1970 in one unit, told by their size (below 1e11 seconds, below 1e14 milliseconds, below 1e17
            microseconds, else nanoseconds), datetimes, or strings of such numbers or in ISO 8601. Times without a zone
            are UTC.
        column (`str`): name of the column, for messages.

    Returns:
        `np.ndarray` of shape `(n,)`, int64.

    Raises:
        ValueError: a value is null, unreadable or negative, or the numbers are not all of one unit.
    """
    import pandas as pd

    refuse_rows(column, "null timestamps", values.isna().to_numpy(), values)
    values = values.infer_objects()
    if pd.api.types.is_bool_dtype(values.dtype):
        refuse_rows(column, "unreadable timestamps", np.ones(len(values), dtype=bool), values)
    if pd.api.types.is_datetime64_any_dtype(values.dtype):
        seconds = _from_datetimes(values)
    elif pd.api.types.is_numeric_dtype(values.dtype):
        return _from_numbers(values, values, column)
    else:
        numbers = pd.to_numeric(values, errors="coerce")
        if numbers.notna().any():
            return _from_numbers(numbers, values, column)
        parsed = pd.to_datetime(values, errors="coerce", utc=True, format="ISO8601")
        advice = "write unix times, datetimes or ISO 8601 strings such as '2014-05-13T08:00:00Z'"
        refuse_rows(column, "unreadable timestamps", parsed.isna().to_numpy(), values, advice)
        seconds = _from_datetimes(parsed)
    refuse_rows(column, "timestamps before 1970", seconds < 0, values)
    return seconds


def _from_datetimes(values: pd.Series) -> np.ndarray:
    if values.dt.tz is not None:
        values = values.dt.tz_convert("UTC").dt.tz_localize(None)
    return values.to_numpy().astype("datetime64[s]").astype(np.int64)


def _from_numbers(numbers: pd.Series, values: pd.Series, column: str) -> np.ndarray:
    numbers = numbers.to_numpy()
    unreadable = ~np.isfinite(numbers.astype(np.float64))
    refuse_rows(column, "unreadable timestamps", unreadable, values, "write every time in the same form")
    refuse_rows(column, "negative timestamps", numbers < 0, values)
    units = np.searchsorted(_UNIT_LIMITS, numbers, side="right")
    unit = units[0]
    refuse_rows(
        column, f"timestamps not in {_UNIT_NAMES[unit]} as row 0 is", units != unit, values,
        "write every time in the same unit",
    )  # fmt: skip
    seconds = numbers // _UNITS_PER_SECOND[unit]
    refuse_rows(column, "timestamps after the year 9999", seconds >= _YEAR_10000, values)
    return seconds.astype(np.int64)
