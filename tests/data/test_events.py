"""Logs with roles: what is read, in what order, and what is refused."""

import shutil

import numpy as np
import pandas as pd
import pytest
import yaml

from hf_deco.data.categories import encode_table
from hf_deco.data.events import read_event_log, read_item_texts
from hf_deco.data.roles import read_roles
from hf_deco.models.categories_gear import Category


def read(roles, embeddings=None):
    roles = read_roles(roles)
    items = read_item_texts(roles.items)
    known = np.arange(len(items))[:, None] * np.ones((1, 2))
    return read_event_log(roles, items, known if embeddings is None else embeddings)


@pytest.fixture
def tables():
    """Five events of three users on four items, out of order, in periods of 100 seconds; item d is only shown."""
    events = pd.DataFrame(
        {
            "user_id": ["u2", "u1", "u1", "u3", "u1"],
            "item_id": ["c", "a", "b", "a", "a"],
            "timestamp": [250, 100, 100, 120, 260],
            "sold": [1, 0, 1, 0, 0],
            "price": [2.5, 1.0, 0.0, 3.0, 4.0],
        }
    )
    items = pd.DataFrame({"item_id": list("dcbae"), "text": list("dcbae"), "kind": ["x", "y", None, "x", "z"]})
    users = pd.DataFrame({"user_id": ["u1", "u9"], "age": ["45", "20"]})
    shown = pd.DataFrame({"item_id": ["d", "b", "d"], "timestamp": [130, 255, 140], "user_id": ["u1", "u2", "u1"]})
    return {"events": events, "items": items, "users": users, "shown": shown}


@pytest.fixture
def write(tmp_path):
    def write(tables, **changes):
        for name, table in tables.items():
            table.to_parquet(tmp_path / f"{name}.parquet")
        roles = {
            "items": {"path": str(tmp_path / "items.parquet"), "features": {"kind": None}},
            "users": {"path": str(tmp_path / "users.parquet"), "features": {"age": ["20", "30"]}},
            "events": {
                "path": str(tmp_path / "events.parquet"),
                "weight": "price",
                "period_seconds": 100,
                "behaviors": {"views": None, "sales": "sold"},
            },
            "impressions": {"path": str(tmp_path / "shown.parquet"), "user": "user_id", "timestamp": "timestamp"},
        }
        return {name: value | changes.get(name, {}) for name, value in roles.items()}

    return write


def test_a_log_is_in_the_order_of_time_and_items_are_numbered_as_they_enter(tables, write):
    log = read(write(tables))
    assert log.item_ids.tolist() == ["b", "a", "d", "c"]  # a and b at one time by their rows; d by its impression
    assert log.entered.tolist() == [0, 0, 0, 1] and log.num_known(-1) == 0 and log.num_known(0) == 3
    assert log.content[:, 0].tolist() == [2, 3, 0, 1]
    assert log.user_ids.tolist() == ["u1", "u3", "u2"]
    assert log.users.tolist() == [0, 0, 1, 2, 0]
    assert log.items.tolist() == [1, 0, 1, 3, 1]
    assert log.times.tolist() == [100, 100, 120, 250, 260] and log.periods.tolist() == [0, 0, 0, 1, 1]
    assert log.requests.tolist() == [0, 0, 1, 2, 3]  # one user at one time
    assert log.grades.tolist() == [1, 2, 1, 2, 1]
    assert log.weights.tolist() == [1.0, 0.0, 3.0, 2.5, 4.0]
    assert log.events_of(1) == slice(3, 5)
    shown = zip(log.shown_items.tolist(), log.shown_users.tolist(), log.shown_periods.tolist(), strict=True)
    assert list(shown) == [(2, 0, 0), (0, 2, 1)]  # d to u1 twice in one period


def test_categories_are_numbered_and_missing_ones_are_told_from_unseen_ones(tables, write):
    log = read(write(tables))
    assert log.item_features == (Category("kind", ("x", "y", "z")),)
    assert log.user_features == (Category("age", ("20", "30")),)
    assert log.item_categories.tolist() == [[-1], [0], [0], [1]]
    # u1's age is none of the values, u2 and u3 are not in the table
    assert log.user_categories.tolist() == [[2], [-1], [-1]]


def test_an_open_ended_feature_is_hashed_alike_everywhere():
    table = pd.DataFrame({"brand": ["acme", None, "acme", "ACME"], "size": [2.0, np.nan, 7.0, 1.0]})
    features, codes = encode_table(table, {"brand": 10, "size": [1, 2]})
    assert codes[:, 0].tolist() == [117741463367263792, -1, 117741463367263792, codes[3, 0]]
    assert codes[3, 0] != codes[0, 0] >= 0 and codes[:, 1].tolist() == [1, -1, 2, 0]
    assert features == (Category("brand", buckets=10), Category("size", ("1", "2")))
    assert [feature.entry for feature in features] == [
        {"name": "brand", "size": 10, "hashed": True},
        {"name": "size", "size": 2},
    ]


def test_a_request_ends_with_its_period(tables, write):
    tables["events"]["session"] = "s"
    log = read(write(tables, events={"request": "session"}))
    assert log.requests.tolist() == [0, 0, 1, 2, 3]


def test_without_roles_that_may_be_left_out(tables, write):
    roles = write(tables)
    roles = {"items": {"path": roles["items"]["path"]}, "events": {"path": roles["events"]["path"]}}
    log = read(roles)
    assert log.grades.tolist() == [1] * 5 and log.weights.tolist() == [1.0] * 5 and log.periods.tolist() == [0] * 5
    assert log.item_categories.shape == (3, 0) and log.user_categories.shape == (3, 0) and not len(log.shown_items)


@pytest.mark.parametrize(
    "table, column, value, message",
    [
        ("events", "price", -1.0, "column `price` has weights that are negative, infinite or no numbers in 1 of 5"),
        ("events", "price", np.inf, "column `price` has weights that are negative, infinite"),
        ("events", "price", np.nan, "column `price` has weights that are negative, infinite"),
        ("events", "price", 1e39, "column `price` has weights that are negative, infinite"),  # in float32
        ("events", "sold", 2, "column `sold` has values other than 0 and 1 in 1 of 5 rows, first in row 2"),
        ("events", "item_id", "zz", "`events` names 1 items that the item table lacks, such as 'zz'"),
        ("shown", "item_id", "zz", "`impressions` names 1 items that the item table lacks, such as 'zz'"),
        ("users", "user_id", "u1", "column `user_id` has users that stand there before in 1 of 2"),
    ],
)
def test_what_a_log_must_not_hold(tables, write, table, column, value, message):
    tables[table].loc[min(2, len(tables[table]) - 1), column] = value
    with pytest.raises(ValueError, match=message):
        read(write(tables))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"clicks": {}}, "unknown tables: clicks"),
        (
            {"events": {"path": "x", "behaviours": {}}},
            "unknown roles of `events`: behaviours; did you mean `behaviors`",
        ),
        ({"events": {"user": "x"}}, "lacks roles of `events`: path"),
        ({"events": {"path": "x", "behaviors": ["a"]}}, "`behaviors` of `events` must be a mapping"),
        (
            {"events": {"path": "x", "behaviors": {"a": 1}}},
            "`behaviors` of `events` must be a mapping from names to col",
        ),
        ({"events": {"path": 3}}, "`path` of `events` must be a path, got 3"),
        ({"events": {"path": "x", "weight": ["price"]}}, r"`weight` of `events` must be a column, got \['price'\]"),
        ({"events": {"path": "x", "user": None}}, "`user` of `events` must be a column, got None"),
        ({"events": {"path": "x", "period_seconds": "week"}}, "`period_seconds` of `events` must be a whole number"),
        ({"items": {"path": "x", "text": []}}, r"`text` of `items` must be a column, or a list of columns, got \[\]"),
        ({"items": {"path": "x", "features": ["kind"]}}, "`features` of `items` must be a mapping"),
        ({"events": ["x"]}, r"`events` must be a mapping of roles, got \['x'\]"),
        ({"events": {"path": "x", "behaviors": {}}}, "`events` needs one of `behaviors`"),
        ({"impressions": {"path": "x"}}, "`impressions` needs one of `period` and `timestamp`"),
        ({"impressions": {"path": "x", "period": "w"}}, "must tell their periods alike"),
    ],
)
def test_roles_that_cannot_be_followed(tables, write, change, message):
    with pytest.raises(ValueError, match=message):
        read_roles(write(tables) | change)


def test_features_and_periods_that_cannot_be_read(tables, write):
    roles = write(tables)
    with pytest.raises(ValueError, match="feature `kind` must be null, a positive number .* got 0"):
        read(roles | {"items": roles["items"] | {"features": {"kind": 0}}})
    tables["events"]["week"] = [0, 1, 1, 1, 1]
    roles = write(tables, events={"period": "week"})
    del roles["impressions"]
    with pytest.raises(ValueError, match="whose `period` never falls as time goes on"):
        read(roles)
    tables["events"]["week"] = 0.5
    with pytest.raises(ValueError, match="column `week` must hold integers"):
        read({name: table for name, table in write(tables, events={"period": "week"}).items() if name != "impressions"})


def test_roles_that_need_not_be_given_may_be_null(tables, write):
    plain = read(write(tables))
    roles = write(tables, events={"request": None, "period": None}, impressions={"user": None})
    log = read(roles)
    assert np.array_equal(log.requests, plain.requests) and log.shown_users.tolist() == [-1] * 2


def test_an_empty_table_of_impressions_or_users_is_as_none(tables, write):
    tables["shown"], tables["users"] = tables["shown"].iloc[:0], tables["users"].iloc[:0]
    log = read(write(tables, users={"features": {"age": 5}}))
    assert log.item_ids.tolist() == ["b", "a", "c"] and not len(log.shown_items)
    assert log.user_categories.tolist() == [[-1]] * 3 and log.user_features == (Category("age", buckets=5),)


def test_a_feature_of_lists_is_refused(tables, write):
    tables["items"]["kind"] = [["x", "y"], ["y"], None, ["x"], ["z"]]
    with pytest.raises(ValueError, match="column `kind` has lists in 4 of 5 rows, first in row 0"):
        read(write(tables))


@pytest.mark.parametrize(
    "embeddings, message",
    [
        (np.ones((4, 2)), r"`embeddings` must have shape \(5, width\), got \(4, 2\)"),
        (np.ones(5), r"`embeddings` must have shape \(5, width\), got \(5,\)"),
        (np.full((5, 2), np.inf), "`embeddings` holds NaN or infinite values"),
    ],
)
def test_embeddings_that_are_not_one_a_row_are_refused(tables, write, embeddings, message):
    with pytest.raises(ValueError, match=message):
        read(write(tables), embeddings)


def test_a_log_is_summed_up(tables, write):
    counts = {"users": 3, "items": 4, "events": 5, "impressions": 2, "periods": 2}
    assert read(write(tables)).summary() == counts


def test_roles_come_from_a_file_and_paths_are_relative_to_it(stream_folder, tmp_path):
    shutil.copytree(stream_folder, tmp_path / "there")
    log = read(tmp_path / "there/log.yaml")
    assert len(log.item_ids) == 28 and log.behaviors == ("clicks", "conversions")
    assert yaml.safe_load((stream_folder / "log.yaml").read_text())["items"]["path"] == "items.csv"
    with pytest.raises(FileNotFoundError, match="`log` is 'nowhere.yaml'"):
        read_roles("nowhere.yaml")
