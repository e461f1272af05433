"""Reading logs, and the filters on them against plain dictionaries."""

import json
import logging
from collections import Counter

import datasets
import numpy as np
import pandas as pd
import pytest

from hf_deco.data import Interactions, ItemTable, read_interactions

#       user, item, time: two users interleaved, ties within a day, one late row
LOG = [("u2", "b", 20), ("u1", "a", 30), ("u2", "c", 10), ("u1", "b", 30), ("u2", "a", 20), ("u1", "a", 5)]


def _frame(rows):
    return pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])


def _rows(log: Interactions):
    return list(zip(log.users[log.user_index], log.items[log.item_index], log.timestamp.tolist(), strict=True))


def _random_log(seed, users=12, items=9, events=150, times=40):
    draw = np.random.default_rng(seed)
    rows = zip(draw.integers(users, size=events), draw.integers(items, size=events), draw.integers(times, size=events))  # noqa: B905
    return [(f"u{user}", f"i{item}", int(time)) for user, item, time in rows]


def _items(*ids):
    return ItemTable(np.array(ids, dtype=object), np.array(["text"] * len(ids), dtype=object))


def _source(kind, tmp_path):
    table = _frame(LOG)
    if kind == "frame":
        return table
    if kind == "dataset":
        return datasets.Dataset.from_pandas(table)
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "parquet":
        table.to_parquet(path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in table.to_dict("records")))
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "json", "frame", "dataset"])
def test_handmade_log_from_every_source(kind, tmp_path):
    log = read_interactions(_source(kind, tmp_path))

    assert log.users.tolist() == ["u2", "u1"]  # order of first appearance
    assert log.items.tolist() == ["b", "a", "c"]
    assert log.user_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert log.item_index.tolist() == [2, 0, 1, 1, 1, 0]  # ties keep the order of the file
    assert log.timestamp.tolist() == [10, 20, 20, 5, 30, 30]
    assert {array.dtype for array in (log.user_index, log.item_index, log.timestamp)} == {np.dtype(np.int64)}
    assert (len(log), log.num_users, log.num_items) == (6, 2, 3)


def test_column_names_and_iso_times_and_zeros_in_csv(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("\ufeffwhen,sku,who,rest\n2014-05-13,007,01,x\n2014-05-12,7,01,y\n", encoding="utf-8")
    log = read_interactions(path, user_column="who", item_column="sku", timestamp_column="when")
    assert _rows(log) == [("01", "7", 1399852800), ("01", "007", 1399939200)]


def test_items_of_the_log_are_rows_of_the_item_table():
    log = read_interactions(_frame(LOG), items=_items("c", "x", "b", "a"))
    assert log.items.tolist() == ["c", "x", "b", "a"]
    assert log.item_index.tolist() == [0, 2, 3, 3, 3, 2]
    assert log.summary() == {"users": 2, "items": 3, "interactions": 6, "avg_length": 3.0}


def test_integer_ids_match_string_ids():
    rows = pd.DataFrame({"user_id": [9, 9], "item_id": [45, 123], "timestamp": [1, 2]})
    log = read_interactions(rows, items=_items("123", "45"))
    assert _rows(log) == [("9", "45", 1), ("9", "123", 2)]


def test_unknown_items_are_refused_or_dropped_with_a_warning(caplog):
    items = _items("a", "zzz")
    message = r"3 of 6 interactions name 2 items in column `item_id` that `items` lacks \(first few: 'b', 'c'\)"
    with pytest.raises(ValueError, match=message + ".*`unknown_items='drop'`"):
        read_interactions(_frame(LOG), items=items)
    with caplog.at_level(logging.WARNING, logger="hf_deco.data.interactions"):
        log = read_interactions(_frame(LOG), items=items, unknown_items="drop")
    assert "3 of 6 interactions name 2 items" in caplog.text
    # u2 now appears first with "a" at 20, after u1's row in the file: users are numbered by what is left.
    assert log.users.tolist() == ["u1", "u2"]
    assert _rows(log) == [("u1", "a", 5), ("u1", "a", 30), ("u2", "a", 20)]


@pytest.mark.parametrize("unknown_items", ["error", "drop"])
def test_a_log_that_shares_no_item_with_the_table_is_refused(unknown_items):
    with pytest.raises(ValueError, match=r"no id of column `item_id` \(first: 'b'\) is in `items` \(first: 'B'\)"):
        read_interactions(_frame(LOG), items=_items("B", "A"), unknown_items=unknown_items)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (LOG, {"user_column": "uid"}, r"column `uid` is not in .*'user_id', 'item_id', 'timestamp'.*`user_column`"),
        (LOG, {"item_column": "sku"}, r"column `sku` is not in .*`item_column`"),
        (LOG, {"timestamp_column": "ts"}, r"column `ts` is not in .*`timestamp_column`"),
        (LOG, {"unknown_items": "keep"}, r"`unknown_items` is 'keep'; choose 'error' or 'drop'"),
        ([], {}, r"`source` has no rows"),
        ([*LOG, (None, "a", 1)], {}, r"`user_id` has null or empty ids in 1 of 7 rows, first in row 6"),
        ([("u", None, 1), *LOG, ("u", "", 1)], {}, r"`item_id` has null or empty ids in 2 of 8 rows, first in row 0"),
        ([("u", "a", 1), ("u", "a", None)], {}, r"`timestamp` has null timestamps in 1 of 2 rows, first in row 1"),
        ([("u", "a", "soon")], {}, r"`timestamp` has unreadable timestamps in 1 of 1 rows, first in row 0 \('soon'\)"),
        ([(1.5, "a", 1)], {}, r"`user_id` holds floats"),
    ],
)
def test_bad_logs_are_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        read_interactions(_frame(rows), **options)


def test_empty_cells_of_a_csv_are_null(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp\nu,a,1\nu,,2\n")
    with pytest.raises(ValueError, match=r"`item_id` has null or empty ids in 1 of 2 rows, first in row 1"):
        read_interactions(path)
    path.write_text("user_id,item_id,timestamp\nu,a,1\nu,b,\n")
    with pytest.raises(ValueError, match=r"`timestamp` has null timestamps in 1 of 2 rows, first in row 1"):
        read_interactions(path)


@pytest.mark.parametrize("seed", range(5))
def test_reading_equals_a_plain_sort(seed):
    rows = _random_log(seed)
    first_seen = {user: place for place, user in enumerate(dict.fromkeys(user for user, _, _ in rows))}
    expected = sorted(rows, key=lambda row: (first_seen[row[0]], row[2]))  # sorted() is stable
    assert _rows(read_interactions(_frame(rows))) == expected


@pytest.mark.parametrize("seed", range(5))
def test_drop_duplicates_equals_a_dictionary(seed):
    log = read_interactions(_frame(_random_log(seed, users=3, items=3, times=8)))
    shorter = log.drop_duplicates()
    assert _rows(shorter) == list(dict.fromkeys(_rows(log)))
    assert len(shorter) < len(log)


@pytest.mark.parametrize("seed", range(5))
def test_collapse_repeats_equals_a_loop(seed):
    log = read_interactions(_frame(_random_log(seed, users=4, items=2)))
    expected = []
    for row in _rows(log):
        if not expected or expected[-1][:2] != row[:2]:
            expected.append(row)
    assert _rows(log.collapse_repeats()) == expected


def test_collapse_repeats_keeps_the_first_time_and_does_not_cross_users():
    rows = [("u", "a", 1), ("u", "b", 2), ("u", "b", 3), ("u", "a", 4), ("v", "a", 5), ("v", "a", 6)]
    log = read_interactions(_frame(rows)).collapse_repeats()
    assert _rows(log) == [("u", "a", 1), ("u", "b", 2), ("u", "a", 4), ("v", "a", 5)]


def _plain_k_core(rows, user, item):
    while True:
        users, items = Counter(row[0] for row in rows), Counter(row[1] for row in rows)
        left = [row for row in rows if users[row[0]] >= user and items[row[1]] >= item]
        if len(left) == len(rows):
            return rows
        rows = left


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("user", "item"), [(1, 1), (2, 3), (4, 5)])
def test_k_core_equals_counters_in_a_loop(seed, user, item):
    log = read_interactions(_frame(_random_log(seed, users=30, items=25, events=180)))
    core = log.k_core(user=user, item=item)
    expected = _plain_k_core(_rows(log), user, item)
    assert _rows(core) == expected
    assert core.items is log.items
    assert core.users.tolist() == list(dict.fromkeys(row[0] for row in expected))
    assert core.summary()["avg_length"] == len(expected) / len({row[0] for row in expected})


def test_k_core_needs_more_than_one_round():
    # Dropping u3 leaves item c with one event, dropping c leaves u2 with one: only a second and third round see it.
    rows = [
        ("u1", "a", 1),
        ("u1", "b", 2),
        ("u2", "a", 3),
        ("u2", "c", 4),
        ("u3", "c", 5),
        ("u4", "a", 6),
        ("u4", "b", 7),
    ]
    core = read_interactions(_frame(rows)).k_core(user=2, item=2)
    assert _rows(core) == [("u1", "a", 1), ("u1", "b", 2), ("u4", "a", 6), ("u4", "b", 7)]
    assert core.user_index.tolist() == [0, 0, 1, 1]


def test_filters_leave_the_log_as_it_was():
    log = read_interactions(_frame(LOG))
    before = _rows(log)
    log.drop_duplicates(), log.collapse_repeats(), log.k_core(2, 2)
    assert _rows(log) == before


def test_filters_refuse_bad_arguments_and_empty_results():
    log = read_interactions(_frame(LOG))
    with pytest.raises(ValueError, match=r"`user` is 0; a k-core needs thresholds of at least 1"):
        log.k_core(user=0)
    with pytest.raises(ValueError, match=r"`item` is -1"):
        log.k_core(item=-1)
    with pytest.raises(ValueError, match=r"`k_core\(user=5, item=5\)` leaves none of 6 interactions"):
        log.k_core()
