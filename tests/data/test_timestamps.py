"""Times of every form come out as the same unix seconds, and unreadable ones are named."""

import datetime as dt

import numpy as np
import pandas as pd
import pytest

from hf_deco.data.timestamps import to_unix_seconds

NOON = 1399982400  # 2014-05-13 12:00:00 UTC


@pytest.mark.parametrize(
    "values",
    [
        [NOON],
        [NOON + 0.75],
        [NOON * 10**3 + 999],
        [NOON * 10**6 + 1],
        [NOON * 10**9 + 999_999_999],
        [str(NOON)],
        ["2014-05-13T12:00:00"],
        ["2014-05-13 12:00:00.9"],
        ["2014-05-13T14:00:00+02:00"],
        ["2014-05-13T12:00:00Z"],
        [dt.datetime(2014, 5, 13, 12)],
        [dt.datetime(2014, 5, 13, 14, tzinfo=dt.timezone(dt.timedelta(hours=2)))],
        pd.to_datetime(["2014-05-13 21:00"]).tz_localize("Asia/Tokyo"),
        np.array(["2014-05-13T12:00:00.5"], dtype="datetime64[ms]"),
        np.array(["2014-05-13T12"], dtype="datetime64[ns]"),
        pd.array([NOON], dtype="Int64"),
    ],
    ids=str,
)
def test_every_form_of_one_moment(values):
    seconds = to_unix_seconds(pd.Series(values), "time")
    assert seconds.dtype == np.int64
    assert seconds.tolist() == [NOON]


def test_dates_are_midnight_utc_and_rows_keep_their_order():
    values = pd.Series([dt.date(2014, 5, 13), dt.date(1970, 1, 1), dt.date(2014, 5, 12)])
    assert to_unix_seconds(values, "time").tolist() == [NOON - 43200, 0, NOON - 129600]


def test_strings_with_and_without_zone_may_stand_together():
    values = pd.Series(["2014-05-13", "2014-05-13T02:00:00+02:00", "2014-05-13T00:00:00.123Z"])
    assert to_unix_seconds(values, "time").tolist() == [NOON - 43200] * 3


@pytest.mark.parametrize(
    ("largest", "unit"), [(10**11 - 1, 1), (10**14 - 1, 10**3), (10**17 - 1, 10**6), (10**18, 10**9)]
)
def test_unit_follows_from_size(largest, unit):
    assert to_unix_seconds(pd.Series([largest]), "time").tolist() == [largest // unit]
    if unit > 1:
        smallest = unit * 10**8  # 1973 in this unit is the first number too large for the unit before
        assert to_unix_seconds(pd.Series([smallest]), "time").tolist() == [10**8]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, None, None], r"`time` has null timestamps in 2 of 3 rows, first in row 1"),
        (["2014-05-13", None], r"`time` has null timestamps in 1 of 2 rows, first in row 1"),
        ([dt.datetime(2014, 5, 13), pd.NaT], r"`time` has null timestamps in 1 of 2 rows, first in row 1"),
        (
            ["2014-05-13", "yesterday", "x"],
            r"`time` has unreadable timestamps in 2 of 3 rows, first in row 1 \('yesterday'",
        ),
        (["1399982400", "yesterday"], r"`time` has unreadable timestamps in 1 of 2 rows, first in row 1 \('yesterday'"),
        ([NOON, "2014-05-13"], r"`time` has unreadable timestamps in 1 of 2 rows, first in row 1 \('2014-05-13'"),
        ([1.0, np.inf], r"`time` has unreadable timestamps in 1 of 2 rows, first in row 1 \(inf"),
        ([True, False], r"`time` has unreadable timestamps in 2 of 2 rows"),
        ([5, -1, -2], r"`time` has negative timestamps in 2 of 3 rows, first in row 1 \(-1\)"),
        (["1969-12-31"], r"`time` has timestamps before 1970 in 1 of 1 rows, first in row 0 \('1969-12-31'"),
        (
            [NOON, NOON * 1000, NOON],
            r"`time` has timestamps not in seconds as row 0 is in 1 of 3 rows, first in row 1 \(1399982400000\)",
        ),
        ([NOON * 1000, NOON * 10**6], r"not in milliseconds as row 0 is"),
        ([NOON * 10**9, NOON * 10**6], r"not in nanoseconds as row 0 is"),
    ],
)
def test_bad_times_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        to_unix_seconds(pd.Series(values), "time")
