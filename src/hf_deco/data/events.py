"""A log whose events have roles: behaviours of several grades, impressions, business value, and features of both sides.

Where [`Interactions`] holds what was interacted with, in the order of users, this holds a stream: in the order of time,
with items numbered as they enter it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..models.categories_gear import Category
from ..models.features_gear import MISSING
from .categories import encode_table
from .items import ItemTable, read_items
from .roles import EventRoles, ItemRoles, LogRoles, UserRoles
from .tables import read_columns, read_ids, refuse_rows
from .timestamps import to_unix_seconds

if TYPE_CHECKING:
    import pandas as pd

EVERYONE = -1  # user of an impression that all users had


@dataclass(frozen=True, eq=False)
class EventLog:
    """A log in the order of time.

    Items are numbered in the order in which they enter: by the period of their first event or impression, then by the
    time of their first event, then by their row in the item table. The items known in a period are therefore the first
    so many. Items of the table that never appear are left out.

    Args:
        item_ids (`np.ndarray` of shape `(N,)`): ids, `str`.
        content (`np.ndarray` of shape `(N, d)`): content embeddings, float32.
        item_categories (`np.ndarray` of shape `(N, F)`): categorical features, int64; see [`Category`].
        entered (`np.ndarray` of shape `(N,)`): period in which each item enters, ascending.
        user_ids (`np.ndarray` of shape `(U,)`): ids of the users with events or impressions, `str`.
        user_categories (`np.ndarray` of shape `(U, G)`): their categorical features; -1 for users without.
        users, items, times, periods, requests, grades (`np.ndarray` of shape `(n,)`): user, item, unix seconds, period,
            request and grade of every event, by time. A grade is 1 for the first behaviour, 2 for the second, and so
            on; an event of several has the last.
        weights (`np.ndarray` of shape `(n,)`): business value, float64, not negative.
        shown_items, shown_users, shown_periods (`np.ndarray` of shape `(m,)`): impressions, by period; user -1 where
            everyone had them.
        item_features, user_features (`tuple[Category, ...]`): what the columns of both hold.
        behaviors (`tuple[str, ...]`): names of the behaviours.
        text_columns (`tuple[str, ...]`): columns of the item table that its texts are joined from.
    """

    item_ids: np.ndarray
    content: np.ndarray
    item_categories: np.ndarray
    entered: np.ndarray
    user_ids: np.ndarray
    user_categories: np.ndarray
    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    periods: np.ndarray
    requests: np.ndarray
    grades: np.ndarray
    weights: np.ndarray
    shown_items: np.ndarray
    shown_users: np.ndarray
    shown_periods: np.ndarray
    item_features: tuple[Category, ...]
    user_features: tuple[Category, ...]
    behaviors: tuple[str, ...]
    text_columns: tuple[str, ...]

    def summary(self) -> dict[str, int]:
        """Numbers of users, items, events, impressions and periods."""
        periods = int(self.periods[-1] - self.periods[0]) + 1
        counts = {"users": self.user_ids, "items": self.item_ids, "events": self.items, "impressions": self.shown_items}
        return {name: len(column) for name, column in counts.items()} | {"periods": periods}

    def num_known(self, period: int) -> int:
        """How many items have entered in a period or before."""
        return int(np.searchsorted(self.entered, period, side="right"))

    def events_of(self, period: int) -> slice:
        """The events of a period."""
        first, last = np.searchsorted(self.periods, [period, period + 1])
        return slice(int(first), int(last))


def read_item_texts(roles: ItemRoles) -> ItemTable:
    """The item table, for its texts; row `i` of the embeddings belongs to its row `i`."""
    return read_items(roles.path, item_column=roles.id, text_columns=roles.text)


def read_event_log(roles: LogRoles, items: ItemTable, embeddings: np.ndarray) -> EventLog:
    """Reads a log.

    Args:
        roles ([`LogRoles`]): tables and columns.
        items ([`ItemTable`]): what `read_item_texts` gave.
        embeddings (`np.ndarray` of shape `(M, d)`): content embedding of every row of it.

    Raises:
        FileNotFoundError: a table is missing.
        ValueError: a column is missing or holds what it must not, an event names an unknown item, periods do not follow
            time, or there is not one finite embedding a row of the item table.
    """
    if np.ndim(embeddings) != 2 or len(embeddings) != len(items):
        raise ValueError(f"`embeddings` must have shape ({len(items)}, width), got {np.shape(embeddings)}.")
    if not np.isfinite(embeddings).all():
        raise ValueError("`embeddings` holds NaN or infinite values; repair or remove such rows.")
    events = _read_events(roles.events, items)
    shown = _read_impressions(roles, items, events)
    entered, order = _entry_order(len(items), events, shown)
    number_of = np.full(len(items), -1)
    number_of[order] = np.arange(len(order))
    user_ids, (users, shown_users) = _number_users(events["user"], shown["user"])
    item_features, item_categories = _read_item_features(roles.items, len(items))
    user_features, user_categories = _read_user_features(roles.users, user_ids)
    return EventLog(
        item_ids=items.item_ids[order],
        content=np.ascontiguousarray(embeddings[order], dtype=np.float32),
        item_categories=item_categories[order],
        entered=entered,
        user_ids=user_ids,
        user_categories=user_categories,
        users=users,
        items=number_of[events["item"]],
        times=events["time"],
        periods=events["period"],
        requests=_number_requests(events, users),
        grades=events["grade"],
        weights=events["weight"],
        shown_items=number_of[shown["item"]],
        shown_users=shown_users,
        shown_periods=shown["period"],
        item_features=item_features,
        user_features=user_features,
        behaviors=tuple(roles.events.behaviors),
        text_columns=roles.items.text,
    )


def _read_events(roles: EventRoles, items: ItemTable) -> dict[str, np.ndarray]:
    """Columns of the events, by time; events of one time as they were read."""
    flags = {name: column for name, column in roles.behaviors.items() if column is not None}
    required = {roles.user: "user", roles.item: "item", roles.timestamp: "timestamp"}
    for argument in ("request", "weight", "period"):
        if getattr(roles, argument) is not None:
            required[getattr(roles, argument)] = argument
    required |= dict.fromkeys(flags.values(), "behaviors")
    table = read_columns(roles.path, required, as_text=(roles.user, roles.item))
    if not len(table):
        raise ValueError(f"`events` {roles.path!r} has no rows; a log needs at least one event.")
    times = to_unix_seconds(table[roles.timestamp], roles.timestamp)
    columns = {
        "user": read_ids(table, roles.user),
        "item": _find_items(read_ids(table, roles.item), items, "events"),
        "time": times,
        "period": (times - times.min()) // roles.period_seconds,
        "request": times if roles.request is None else read_ids(table, roles.request),
        "grade": _read_grades(table, roles.behaviors),
        "weight": np.ones(len(table)) if roles.weight is None else _read_weights(table, roles.weight),
    }
    if roles.period is not None:
        columns["period"] = _read_periods(table, roles.period)
    kept = columns["grade"] > 0  # what is no behaviour is no event
    order = np.argsort(times, kind="stable")
    columns = {name: column[order[kept[order]]] for name, column in columns.items()}
    if not kept.any() or (np.diff(columns["period"]) < 0).any():
        raise ValueError(
            f"`events` {roles.path!r} must hold events of `behaviors`, whose `period` never falls as time goes on."
        )
    return columns


def _read_grades(table: pd.DataFrame, behaviors: dict) -> np.ndarray:
    grades = np.zeros(len(table), dtype=np.int64)
    for grade, column in enumerate(behaviors.values(), start=1):
        if column is None:
            grades[:] = grade
            continue
        wrong = ~table[column].isin([0, 1]).to_numpy(dtype=bool)
        refuse_rows(column, "values other than 0 and 1", wrong, table[column])
        grades[table[column].to_numpy(dtype=bool)] = grade
    return grades


def _read_weights(table: pd.DataFrame, column: str) -> np.ndarray:
    import pandas as pd

    weights = pd.to_numeric(table[column], errors="coerce").to_numpy(dtype=np.float64)
    with np.errstate(over="ignore"):  # the model reads float32
        bad = ~(np.isfinite(weights.astype(np.float32)) & (weights >= 0))
    refuse_rows(column, "weights that are negative, infinite or no numbers", bad, table[column])
    return weights


def _read_periods(table: pd.DataFrame, column: str) -> np.ndarray:
    values = table[column].to_numpy()
    if values.dtype.kind not in "iu":
        raise ValueError(f"column `{column}` must hold integers, the numbers of periods, got {values.dtype}.")
    return values.astype(np.int64)


def _read_impressions(roles: LogRoles, items: ItemTable, events: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of the impressions, by period; each of user, item and period once."""
    import pandas as pd

    shown, empty = roles.impressions, np.empty(0, dtype=np.int64)
    nothing = {"item": empty, "period": empty, "user": empty.astype(object)}
    if shown is None:
        return nothing
    when = shown.timestamp if shown.period is None else shown.period
    required = {shown.item: "item", when: "timestamp" if shown.period is None else "period"}
    if shown.user is not None:
        required[shown.user] = "user"
    table = read_columns(shown.path, required, as_text=(shown.item, *([] if shown.user is None else [shown.user])))
    if not len(table):
        return nothing
    if shown.period is None:
        periods = (to_unix_seconds(table[when], when) - events["time"][0]) // roles.events.period_seconds
    else:
        periods = _read_periods(table, when)
    found = _find_items(read_ids(table, shown.item), items, "impressions")
    users = np.full(len(table), None, dtype=object) if shown.user is None else read_ids(table, shown.user)
    # By period, not by time: what was shown twice in a period is not drawn twice as often.
    once = pd.DataFrame({"item": found, "period": periods, "user": users}).drop_duplicates()
    once = once.sort_values("period", kind="stable")
    return {name: once[name].to_numpy() for name in once}


def _find_items(item_ids: np.ndarray, items: ItemTable, table: str) -> np.ndarray:
    import pandas as pd

    found = pd.Index(items.item_ids).get_indexer(item_ids)
    if (found < 0).any():
        missing = np.unique(item_ids[found < 0])
        raise ValueError(
            f"`{table}` names {len(missing):,} items that the item table lacks, such as {missing[0]!r}; add them or "
            "leave these rows out."
        )
    return found.astype(np.int64)


def _entry_order(num_items: int, events: dict, shown: dict) -> tuple[np.ndarray, np.ndarray]:
    """Period in which every item enters, ascending, and the rows of the item table in that order."""
    never = np.iinfo(np.int64).max
    period, time = np.full(num_items, never), np.full(num_items, never)
    np.minimum.at(period, events["item"], events["period"])
    np.minimum.at(period, shown["item"], shown["period"])
    np.minimum.at(time, events["item"], events["time"])
    order = np.lexsort((time, period))
    order = order[period[order] < never]
    return period[order], order


def _number_users(users: np.ndarray, shown_users: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Distinct users in order of first appearance, and the numbers of both columns."""
    import pandas as pd

    numbers, distinct = pd.factorize(np.concatenate([users, shown_users]))  # None is -1, everyone
    numbers = numbers.astype(np.int64)
    return np.asarray(distinct, dtype=object), (numbers[: len(users)], numbers[len(users) :])


def _number_requests(events: dict[str, np.ndarray], users: np.ndarray) -> np.ndarray:
    """Number of the request of every event, by the time of its first event. A request ends with its period: what is
    evaluated must not be trained on before."""
    import pandas as pd

    key = pd.DataFrame({"user": users, "request": events["request"], "period": events["period"]})
    return key.groupby(list(key), sort=False).ngroup().to_numpy(dtype=np.int64)


def _read_item_features(roles: ItemRoles, num_items: int) -> tuple[tuple[Category, ...], np.ndarray]:
    if not roles.features:
        return (), np.empty((num_items, 0), dtype=np.int64)
    return encode_table(read_columns(roles.path, dict.fromkeys(roles.features, "features")), roles.features)


def _read_user_features(roles: UserRoles | None, user_ids: np.ndarray) -> tuple[tuple[Category, ...], np.ndarray]:
    """The features of users, and their values for every user of the log; -1 for those not in the table."""
    import pandas as pd

    if roles is None or not roles.features:
        return (), np.empty((len(user_ids), 0), dtype=np.int64)
    required = {roles.id: "id", **dict.fromkeys(roles.features, "features")}
    table = read_columns(roles.path, required, as_text=(roles.id,))
    ids = pd.Index(read_ids(table, roles.id))
    refuse_rows(roles.id, "users that stand there before", ids.duplicated(), table[roles.id])
    features, encoded = encode_table(table, roles.features)
    nobody = np.full((1, encoded.shape[1]), MISSING)
    return features, np.concatenate([encoded, nobody])[ids.get_indexer(user_ids)]  # -1, the last row, for others
