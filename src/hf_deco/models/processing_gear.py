"""What GEAR reads of items and users, from item ids, behaviours and features by name."""

import difflib
from collections.abc import Iterable, Mapping

import torch
from transformers import BatchFeature

from .categories_gear import Category
from .configuration_gear import check_entries
from .features_gear import MISSING
from .processor_sid import ItemProcessor, read_strings
from .vector_quantization import check_input

# Arguments that are no tensors: what `processor_config.json` holds.
_OPTIONS = ("item_features", "user_features", "behaviors", "embedding_model", "text_columns", "unknown_items")


class GearProcessor(ItemProcessor):
    """Knows items: their ids, content embeddings and categories; and the values that categories of users may have.

    It makes users' histories into what [`GearForSIDRetrieval`] reads. Which items there are to be found is the index's
    to say, and rows here are not its rows. Of users nothing is kept.

    Args:
        item_ids (`list[str]` of length `N`): Item ids, all different. Kept as [`PackedStrings`], a sequence of `str`.
        content (`torch.Tensor` of shape `(N, d)`): Content embedding of every item.
        item_categories (`torch.LongTensor` of shape `(N, F)`): Values of its categorical features, as [`Category`]
            encodes them.
        item_features, user_features (`list[Category]`): Categorical features of items and of users, in the order of
            their columns; or mappings of their arguments.
        behaviors (`list[dict]`): Sequences of items that users have dealt with, each `{"name": ..., "length": T}`.
        embedding_model (`str`, *optional*): What made the content embeddings of texts, for whoever embeds new items.
        text_columns (`list[str]`, *optional*): Columns that the texts were joined from.
        unknown_items (`str`, *optional*, defaults to `"error"`): What becomes of items in histories that are not known:
            `"error"` names them, `"drop"` leaves them out.

    Raises:
        ValueError: If an id appears twice, shapes do not fit, a category is no value of its feature, a behaviour has
            no length, or an option is unknown.

    Example:
        ```python
        >>> import torch
        >>> from hf_deco import GearProcessor
        >>> kind = {"name": "kind", "values": ["fruit", "soap"]}
        >>> age = {"name": "age", "values": ["old", "young"]}
        >>> clicks, bought = {"name": "clicks", "length": 5}, {"name": "bought", "length": 5}
        >>> processor = GearProcessor(
        ...     ["apple", "bar"], torch.eye(2), torch.tensor([[0], [1]]), [kind], [age], [clicks, bought]
        ... )
        >>> inputs = processor([{"clicks": ["bar", "bar"]}, {}], users=[{"age": "young"}, None])
        >>> inputs["item_ids"].tolist(), inputs["user_ids"].tolist()
        ([[1]], [[1], [-1]])
        >>> [rows.tolist() for rows in inputs["behaviors"]]
        [[[0, 0], [-1, -1]], [[], []]]

        ```
    """

    model_input_names = ["content", "item_ids", "user_ids", "behaviors"]

    def __init__(
        self,
        item_ids: list[str],
        content: torch.Tensor,
        item_categories: torch.LongTensor,
        item_features: list[Category],
        user_features: list[Category],
        behaviors: list[dict],
        embedding_model: str | None = None,
        text_columns: list[str] | None = None,
        unknown_items: str = "error",
    ):
        self._know_items(item_ids, unknown_items)
        self.item_features, self.user_features = _features(item_features), _features(user_features)
        self.behaviors = [dict(behavior) for behavior in behaviors]
        check_entries("behaviors", self.behaviors, "length", {})
        self.embedding_model = embedding_model
        self.text_columns = None if text_columns is None else list(text_columns)
        self.content = torch.as_tensor(content).float().contiguous()
        self.item_categories = torch.as_tensor(item_categories).contiguous()
        check_input(self.content, self.content.shape[-1], name="content")
        shapes = [tuple(tensor.shape) for tensor in (self.content, self.item_categories)]
        expected = [(len(self.item_ids), shapes[0][1]), (len(self.item_ids), len(self.item_features))]
        if shapes != expected:
            raise ValueError(
                f"`content` and `item_categories` of {len(self.item_ids)} items with {len(self.item_features)} features"
                f" must have shapes {expected[0]} and {expected[1]}, got {shapes[0]} and {shapes[1]}."
            )
        _check_categories(self.item_categories, self.item_features)
        self.item_categories = self.item_categories.long()

    def __repr__(self) -> str:
        behaviors = [behavior["name"] for behavior in self.behaviors]
        items, users = ([feature.name for feature in features] for features in (self.item_features, self.user_features))
        return (
            f"GearProcessor(items={len(self.item_ids)}, behaviors={behaviors}, item_features={items}, "
            f"user_features={users})"
        )

    def __call__(
        self,
        histories: list[Mapping[str, list[str]]],
        users: list[Mapping | None] | None = None,
        return_tensors: str = "pt",
        *,
        unknown_items: str | None = None,
    ) -> BatchFeature:
        """Turn users into model inputs.

        Args:
            histories (`list[Mapping[str, list[str]]]`): Item ids of every behaviour of every user, oldest first. Of
                more than its length the latest count; a behaviour that is not named is empty. As in training, an event
                of a later behaviour stands in the sequences of those before it, too.
            users (`list[Mapping]`, *optional*): Values of every user's features by name; what is not named, or None in
                place of a user, is missing.
            return_tensors (`str`, *optional*, defaults to `"pt"`): Only PyTorch tensors are made.
            unknown_items (`str`, *optional*): `"error"` or `"drop"`; the processor's own by default.

        Returns:
            `content (n, d)` and `item_ids (n, F)` of the distinct items, `user_ids (B, G)`, and `behaviors`, a list of
            rows `(B, T_s)` of those items.

        Raises:
            ValueError: If an item, behaviour or feature is not known, a behaviour's items are no list, or lengths
                differ.
        """
        if return_tensors != "pt":
            raise ValueError(f"`return_tensors` must be 'pt', got {return_tensors!r}.")
        names = [behavior["name"] for behavior in self.behaviors]
        for history in histories:
            if not isinstance(history, Mapping):
                raise ValueError(
                    f"`histories` must hold a mapping from {', '.join(names)} to item ids for every user, got "
                    f"{history!r}."
                )
            _check_names("histories", history, names)
            for name, items in history.items():
                if isinstance(items, str) or not isinstance(items, Iterable):
                    raise ValueError(f"`histories` must hold a list of item ids for {name!r}, got {items!r}.")
        sequences = [
            [self.rows_of(history.get(name, []), unknown_items)[-length:] for history in histories]
            for name, length in ((behavior["name"], behavior["length"]) for behavior in self.behaviors)
        ]
        flat = torch.tensor([row for rows in sequences for some in rows for row in some], dtype=torch.long)
        items, places = flat.unique(return_inverse=True)
        padded = [_pad(rows) for rows in sequences]
        pieces = places.split([int((rows >= 0).sum()) for rows in padded])
        for rows, piece in zip(padded, pieces, strict=True):
            rows[rows >= 0] = piece
        return BatchFeature(
            {
                "content": self.content[items],
                "item_ids": self.item_categories[items],
                "user_ids": self._encode_users(users, len(histories)),
                "behaviors": padded,
            }
        )

    def _encode_users(self, users: list[Mapping | None] | None, number: int) -> torch.LongTensor:
        users = [None] * number if users is None else users
        if len(users) != number:
            raise ValueError(f"`users` must hold features, or None, for each of {number} users, got {len(users)}.")
        return _encode("users", self.user_features, users)

    def item_inputs(self, items: list[str] | None = None) -> BatchFeature:
        """What `encode_items` reads of items: `content (n, d)` and `item_ids (n, F)`, of all by default.

        Raises:
            ValueError: If an item is not known.
        """
        rows = slice(None) if items is None else self.rows_of(items, "error")
        return BatchFeature({"content": self.content[rows], "item_ids": self.item_categories[rows]})

    def update(
        self, items: list[str], content: torch.Tensor, features: list[Mapping | None] | None = None
    ) -> "GearProcessor":
        """The next processor, which knows new items, and known ones as they are now; this one stays as it is.

        Args:
            items (`list[str]` of length `n`): Their ids, all different.
            content (`torch.Tensor` of shape `(n, d)`): Their content embeddings, by what made all others.
            features (`list[Mapping]`, *optional*): Values of every item's features by name; what is not named is
                missing.

        Raises:
            ValueError: If an id appears twice, a feature is not known, or content has another shape.
        """
        items, content = [str(item) for item in items], torch.as_tensor(content)
        check_input(content, self.content.shape[1], name="content")
        features = [None] * len(items) if features is None else features
        if len(set(items)) < len(items) or not len(content) == len(features) == len(items):
            raise ValueError(
                f"`items` must be distinct, with a row of `content` and an entry of `features` each, got {len(items)} "
                f"({len(set(items))} distinct), {len(content)} and {len(features)}."
            )
        rows = self.item_ids.find(items)
        new = [place for place, row in enumerate(rows) if row < 0]
        places = torch.tensor(rows, dtype=torch.long)
        places[new] = torch.arange(len(self.item_ids), len(self.item_ids) + len(new))
        tables = []
        for old, values in (
            (self.content, content.float()),
            (self.item_categories, _encode("features", self.item_features, features)),
        ):
            table = torch.cat([old, old.new_empty((len(new), old.shape[1]))])
            table[places] = values
            tables.append(table)
        ids = [*self.item_ids, *(items[place] for place in new)] if new else self.item_ids
        return type(self)(ids, *tables, **self._options())

    def check_config(self, config) -> None:
        """Raise a `ValueError` where a model's configuration, a [`GearConfig`], reads other features than these."""
        own = {
            "content_size": self.content.shape[1],
            "item_features": [feature.entry for feature in self.item_features],
            "user_features": [feature.entry for feature in self.user_features],
            "behaviors": self.behaviors,
        }
        for name, value in own.items():
            if getattr(config, name) != value:
                raise ValueError(
                    f"The processor's `{name}` are not those of the model ({value}, not {getattr(config, name)}): load "
                    "both from one checkpoint."
                )

    def _options(self) -> dict:
        return {name: getattr(self, name) for name in _OPTIONS}

    def _saved(self) -> tuple[dict, dict[str, torch.Tensor]]:
        options = self._options()
        for name in ("item_features", "user_features"):
            options[name] = [feature.to_dict() for feature in options[name]]
        return options, {"content": self.content, "item_categories": self.item_categories}

    @classmethod
    def _from_saved(cls, config: dict, tensors: dict[str, torch.Tensor]) -> "GearProcessor":
        options = {name: config[name] for name in _OPTIONS}
        return cls(read_strings("item_ids", tensors), tensors["content"], tensors["item_categories"], **options)


def _features(features: Iterable) -> list[Category]:
    return [feature if isinstance(feature, Category) else Category(**feature) for feature in features]


def _check_categories(values: torch.Tensor, features: list[Category]) -> None:
    """Raise a `ValueError` unless values `(N, F)` are such integers as [`Category`] encodes to."""
    if values.is_floating_point() and values.numel():  # of no features, an empty tensor may be of any type
        raise ValueError(f"`item_categories` must be integers, as `Category.encode` gives them, got {values.dtype}.")
    for feature, column in zip(features, values.T, strict=True):
        bad = column < MISSING
        if feature.values is not None:
            bad |= column > len(feature.values)  # one past the last stands for all that are none of them
        if bad.any():
            most = "" if feature.values is None else f", and at most {len(feature.values)}"
            raise ValueError(
                f"`item_categories` of feature `{feature.name}` must be at least {MISSING} (missing){most}, got "
                f"{int(column[bad][0])}: encode them by `Category.encode`."
            )


def _encode(argument: str, features: list[Category], rows: list[Mapping | None]) -> torch.LongTensor:
    """Integers `(n, F)` of the values that mappings hold by name."""
    rows = [{} if row is None else row for row in rows]
    for row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"`{argument}` must hold mappings from names of features to values, or None, got {row!r}.")
        _check_names(argument, row, [feature.name for feature in features])
    columns = [feature.encode(row.get(feature.name) for row in rows) for feature in features]
    return torch.tensor(columns, dtype=torch.long).reshape(len(features), len(rows)).T.contiguous()


def _check_names(argument: str, given: Mapping, known: list[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known) or 'none'}."
        raise ValueError(f"`{argument}` names {unknown[0]!r}, which this model does not read; {hint}")


def _pad(rows: list[list[int]]) -> torch.LongTensor:
    """Lists of different lengths as one tensor `(B, T)`, filled up by -1 on the right."""
    padded = torch.full((len(rows), max(map(len, rows), default=0)), -1)
    for place, some in enumerate(rows):
        padded[place, : len(some)] = torch.tensor(some, dtype=torch.long)
    return padded


__all__ = ["GearProcessor"]
