"""The log: who interacted with what, when. Read once, held as sorted integer arrays, filtered without Python loops."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .items import ItemTable
from .tables import read_columns, read_ids
from .timestamps import to_unix_seconds

if TYPE_CHECKING:
    import datasets
    import pandas as pd

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Interactions:
    """A log, its rows sorted by user and then by time. Events of one user at one time keep the order they were read in.

    Args:
        users (`np.ndarray` of shape `(U,)`): user ids, `str`, in order of first appearance in the source.
        items (`np.ndarray` of shape `(N,)`): ids of the whole catalog, `str`, also of items nobody touched.
        user_index (`np.ndarray` of shape `(n,)`): row of `users` of each event, int64, ascending.
        item_index (`np.ndarray` of shape `(n,)`): row of `items` of each event, int64.
        timestamp (`np.ndarray` of shape `(n,)`): unix seconds of each event, int64, ascending within a user.
    """

    users: np.ndarray
    items: np.ndarray
    user_index: np.ndarray
    item_index: np.ndarray
    timestamp: np.ndarray

    def __len__(self) -> int:
        return len(self.item_index)

    @property
    def num_users(self) -> int:
        return len(self.users)

    @property
    def num_items(self) -> int:
        """Size of the catalog, `N`."""
        return len(self.items)

    def summary(self) -> dict[str, float]:
        """Users, items with at least one interaction, interactions, and interactions per user."""
        return {
            "users": self.num_users,
            "items": int(len(np.unique(self.item_index))),
            "interactions": len(self),
            "avg_length": len(self) / self.num_users,
        }

    def drop_duplicates(self) -> Interactions:
        """Keep the first of all events that agree in user, item and time."""
        order = np.lexsort((self.timestamp, self.item_index, self.user_index))
        keep = np.ones(len(self), dtype=bool)
        keep[order[1:]] = ~(
            _same_as_previous(self.user_index[order])
            & _same_as_previous(self.item_index[order])
            & _same_as_previous(self.timestamp[order])
        )
        return self._keep(keep, "drop_duplicates()")

    def collapse_repeats(self) -> Interactions:
        """Keep the first of each run of events in which a user stays with one item."""
        keep = np.ones(len(self), dtype=bool)
        keep[1:] = ~(_same_as_previous(self.user_index) & _same_as_previous(self.item_index))
        return self._keep(keep, "collapse_repeats()")

    def k_core(self, user: int = 5, item: int = 5) -> Interactions:
        """Drop users and items with few interactions, again and again until all that are left have enough.

        Args:
            user (`int`, *optional*, defaults to 5): fewest interactions of a user that stays.
            item (`int`, *optional*, defaults to 5): fewest interactions of an item whose events stay. The catalog keeps
                its rows.

        Raises:
            ValueError: a threshold is below 1, or nothing is left.
        """
        for name, value in (("user", user), ("item", item)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}; a k-core needs thresholds of at least 1.")
        rows = np.arange(len(self))
        while True:
            per_user = np.bincount(self.user_index[rows], minlength=self.num_users)
            per_item = np.bincount(self.item_index[rows], minlength=self.num_items)
            enough = (per_user[self.user_index[rows]] >= user) & (per_item[self.item_index[rows]] >= item)
            if enough.all():
                break
            rows = rows[enough]
        keep = np.zeros(len(self), dtype=bool)
        keep[rows] = True
        return self._keep(keep, f"k_core(user={user}, item={item})")

    def _keep(self, keep: np.ndarray, step: str) -> Interactions:
        if not keep.any():
            raise ValueError(f"`{step}` leaves none of {len(self):,} interactions; ask for less.")
        left, user_index = np.unique(self.user_index[keep], return_inverse=True)
        return Interactions(
            self.users[left], self.items, user_index.astype(np.int64), self.item_index[keep], self.timestamp[keep]
        )


def read_interactions(
    source: str | Path | datasets.Dataset | pd.DataFrame,
    *,
    items: ItemTable | None = None,
    user_column: str = "user_id",
    item_column: str = "item_id",
    timestamp_column: str = "timestamp",
    unknown_items: str = "error",
) -> Interactions:
    """Read a log of interactions.

    Args:
        source (`str`, `Path`, `datasets.Dataset` or `pandas.DataFrame`):
            A `.csv`, `.parquet`, `.jsonl` or `.json` (one object a line) file, or a table in memory. Where events of a
            user share a timestamp, the order of the rows is taken for the order of the events.
        items ([`ItemTable`], *optional*):
            The catalog. Without it the catalog is the items of the log in order of first appearance.
        user_column (`str`, *optional*, defaults to `"user_id"`):
            Column of user ids. They are read as strings whatever their type.
        item_column (`str`, *optional*, defaults to `"item_id"`):
            Column of item ids, likewise.
        timestamp_column (`str`, *optional*, defaults to `"timestamp"`):
            Column of times: unix seconds, milli-, micro- or nanoseconds (told apart by size), datetimes, or ISO 8601
            strings. Times without a zone are UTC.
        unknown_items (`str`, *optional*, defaults to `"error"`):
            What to do with events of items that `items` lacks: `"error"`, or `"drop"` with a warning.

    Returns:
        [`Interactions`].

    Raises:
        FileNotFoundError: `source` is a path to nothing.
        ValueError: a column is missing, a value null, a time unreadable, negative or of another unit than the rest, an
            item unknown, or the log empty.
    """
    if unknown_items not in ("error", "drop"):
        raise ValueError(f"`unknown_items` is {unknown_items!r}; choose 'error' or 'drop'.")
    required = {user_column: "user_column", item_column: "item_column", timestamp_column: "timestamp_column"}
    table = read_columns(source, required, as_text=(user_column, item_column))
    if len(table) == 0:
        raise ValueError("`source` has no rows; a log needs at least one interaction.")
    user_ids, item_ids = read_ids(table, user_column), read_ids(table, item_column)
    timestamp = to_unix_seconds(table[timestamp_column], timestamp_column)

    catalog, item_index = _number_items(item_ids, items, item_column, unknown_items)
    known = item_index >= 0
    users, user_index = _number(user_ids[known])
    item_index, timestamp = item_index[known], timestamp[known]
    order = np.lexsort((timestamp, user_index))  # stable: equal keys keep the order of the source
    return Interactions(users, catalog, user_index[order], item_index[order], timestamp[order])


def _number_items(
    item_ids: np.ndarray, items: ItemTable | None, column: str, unknown_items: str
) -> tuple[np.ndarray, np.ndarray]:
    """The catalog, and each event's row in it or -1."""
    if items is None:
        return _number(item_ids)
    import pandas as pd

    item_index = pd.Index(items.item_ids).get_indexer(item_ids).astype(np.int64)
    unknown = item_index < 0
    if unknown.all():
        raise ValueError(
            f"no id of column `{column}` (first: {item_ids[0]!r}) is in `items` (first: {items.item_ids[0]!r}); "
            "check that both tables write ids the same way."
        )
    if unknown.any():
        missing = np.unique(item_ids[unknown])
        first = ", ".join(repr(item) for item in missing[:5])
        message = (
            f"{unknown.sum():,} of {len(item_ids):,} interactions name {len(missing):,} items in column `{column}` "
            f"that `items` lacks (first few: {first})"
        )
        if unknown_items == "error":
            raise ValueError(f"{message}; add these items or pass `unknown_items='drop'`.")
        logger.warning("%s; they are dropped.", message)
    return items.item_ids, item_index


def _number(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids in order of first appearance, and each row's place among them."""
    import pandas as pd

    index, distinct = pd.factorize(ids)
    return np.asarray(distinct, dtype=object), index.astype(np.int64)


def _same_as_previous(values: np.ndarray) -> np.ndarray:
    return values[1:] == values[:-1]
