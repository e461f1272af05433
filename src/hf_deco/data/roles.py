"""Which table and which column plays which part in a log of events: the configuration that a reader follows."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path

from .tables import read_mapping

WEEK = 7 * 24 * 3600


@dataclass(frozen=True)
class ItemRoles:
    """Item table: `id`, the `text` columns that content embeddings are made of, and categorical `features`."""

    path: str
    id: str = "item_id"
    text: tuple[str, ...] = ("text",)
    features: dict = field(default_factory=dict)


@dataclass(frozen=True)
class UserRoles:
    """User table: `id` and categorical `features`. Users need not be in it."""

    path: str
    id: str = "user_id"
    features: dict = field(default_factory=dict)


@dataclass(frozen=True)
class EventRoles:
    """Events: who did what, when.

    `behaviors` maps the name of each behaviour to the column of 0 and 1 that tells its events, or to null for all
    events; a later one counts for more than those before it. Events of one user with one `request` are answers to one
    list; without it, events of one user at one time. `weight` is their business value, 1 without it. `period` numbers
    the pieces that the stream is evaluated by; without it they are `period_seconds` long.
    """

    path: str
    user: str = "user_id"
    item: str = "item_id"
    timestamp: str = "timestamp"
    behaviors: dict = field(default_factory=lambda: {"clicks": None})
    request: str | None = None
    weight: str | None = None
    period: str | None = None
    period_seconds: int = WEEK


@dataclass(frozen=True)
class ImpressionRoles:
    """What was shown: `item`, to `user` (without it to all), in the `period` of events or at a `timestamp`."""

    path: str
    item: str = "item_id"
    user: str | None = None
    period: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class LogRoles:
    """Tables of a log and their roles; see [`read_roles`]."""

    items: ItemRoles
    events: EventRoles
    users: UserRoles | None = None
    impressions: ImpressionRoles | None = None


_TABLES = {"items": ItemRoles, "events": EventRoles, "users": UserRoles, "impressions": ImpressionRoles}


def read_roles(source: str | Path | dict) -> LogRoles:
    """Roles from a YAML file, or from the mapping that such a file holds.

    ```yaml
    items: {path: items.parquet, text: [title, text], features: {brand: 1000, department: null}}
    users: {path: users.csv, features: {age: null, income: [low, high]}}
    events: {path: events.parquet, request: session, weight: price, behaviors: {clicks: null, purchases: bought}}
    impressions: {path: shown.parquet, user: user_id, timestamp: timestamp}
    ```

    `users` and `impressions` may be left out. A feature is a number of hash buckets where its values are open-ended, a
    list of values, or null for the values that its column holds. Paths are relative to the YAML file's folder.

    Args:
        source (`str`, `Path` or `dict`): the file or the mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a table or a role is missing, unknown or malformed.
    """
    folder = Path()
    if not isinstance(source, dict):
        folder, source = Path(source).parent, read_mapping(source, "log")
    _check_names("tables", source, _TABLES, required=("items", "events"))
    tables = {name: _read_table(name, _TABLES[name], roles, folder) for name, roles in source.items()}
    _check_impressions(tables)
    return LogRoles(**tables)


def _read_table(name: str, kind: type, roles: dict, folder: Path):
    if not isinstance(roles, dict):
        raise ValueError(f"`{name}` must be a mapping of roles, got {roles!r}.")
    _check_names(f"roles of `{name}`", roles, {item.name for item in fields(kind)}, required=("path",))
    _check_values(name, kind, roles)
    roles = roles | {"path": str(folder / roles["path"])}
    if "text" in roles:
        roles["text"] = (roles["text"],) if isinstance(roles["text"], str) else tuple(roles["text"])
    table = kind(**roles)
    if kind is EventRoles and (not table.behaviors or table.period_seconds < 1):
        raise ValueError(
            f"`events` needs one of `behaviors` at least and a positive `period_seconds`, got {table.behaviors} and "
            f"{table.period_seconds}."
        )
    return table


def _check_values(table: str, kind: type, roles: dict) -> None:
    """Raise a `ValueError` where a role is not what it should be; a YAML file may hold anything."""
    unset = {item.name for item in fields(kind) if item.default is None}
    for role, value in roles.items():
        what, good = _VALUES.get(role, ("a column", _is_text))
        if not good(value) and not (value is None and role in unset):
            raise ValueError(f"`{role}` of `{table}` must be {what}, got {value!r}.")


def _is_text(value) -> bool:
    return isinstance(value, str)


def _are_columns(value) -> bool:
    return _is_text(value) or isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))


def _is_mapping(value) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value))


def _are_behaviors(value) -> bool:
    return _is_mapping(value) and all(column is None or _is_text(column) for column in value.values())


# What a role other than a column must be.
_VALUES = {
    "path": ("a path", lambda value: isinstance(value, str | Path)),
    "text": ("a column, or a list of columns", _are_columns),
    "features": ("a mapping from columns to what they hold", _is_mapping),
    "behaviors": ("a mapping from names to columns, or to null", _are_behaviors),
    "period_seconds": ("a whole number", lambda value: type(value) is int),
}


def _check_names(what: str, given, known, required: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), known, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(sorted(known))}."
        raise ValueError(f"`log` holds unknown {what}: {', '.join(map(str, unknown))}{hint}")
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"`log` lacks {what}: {', '.join(missing)}.")


def _check_impressions(tables: dict) -> None:
    shown = tables.get("impressions")
    if shown is not None and (shown.period is None) == (shown.timestamp is None):
        raise ValueError("`impressions` needs one of `period` and `timestamp`.")
    if shown is not None and (shown.period is None) != (tables["events"].period is None):
        raise ValueError("`impressions` and `events` must tell their periods alike: by `period`, or by `timestamp`.")
