"""The table of semantic IDs: which item has which codes, the codebooks behind them, and how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .collisions import check_capacity, check_popularity, resolve_collisions
from .embedding import check_embeddings
from .quality import check_categories
from .quantizer_training import QuantizerTraining
from .rq_kmeans import check_codebook_sizes, check_codes
from .tokenizer import ItemTokenizer


@dataclass(frozen=True, eq=False)
class SIDTable:
    """Items and their semantic IDs, row by row.

    Args:
        item_ids (array-like of shape `(N,)`): distinct item ids; kept as a NumPy array of `str`.
        codes (array-like of shape `(N, K)`): one semantic ID a row; kept as int32.
        codebook_sizes (sequence of K `int`): number of codes of each level.
        codebooks (list of K arrays of shape `(V_k, d)`): centroids, empty where the IDs come from elsewhere.
        report (`dict`): what `ItemTokenizer.report` measured when the table was built, or empty.
        titles (array-like of shape `(N,)`, *optional*): titles to show; a missing one becomes the empty string.
        seed (`int`, *optional*): seed the table was built with.
        tokenizer_version (`str`, *optional*): `version_id` of the tokenizer that chose the codes.

    Raises:
        ValueError: the parts do not fit together, or an item id appears twice.
    """

    item_ids: np.ndarray
    codes: np.ndarray
    codebook_sizes: tuple[int, ...]
    codebooks: list[np.ndarray] = field(default_factory=list)
    report: dict = field(default_factory=dict)
    titles: np.ndarray | None = None
    seed: int | None = None
    tokenizer_version: str | None = None

    def __post_init__(self):
        item_ids = check_item_ids(self.item_ids)
        sizes = check_codebook_sizes(self.codebook_sizes)
        codes = np.asarray(self.codes)
        check_codes(codes, sizes)
        if len(codes) != len(item_ids):
            raise ValueError(f"`codes` has {len(codes)} rows for {len(item_ids)} `item_ids`.")
        codebooks = [np.asarray(codebook, dtype=np.float32) for codebook in self.codebooks]
        shapes = [codebook.shape for codebook in codebooks]
        if codebooks and shapes != [(size, codebooks[0].shape[-1]) for size in sizes]:
            raise ValueError(f"`codebooks` of shapes {shapes} do not fit `codebook_sizes` {sizes}.")
        normalised = {"item_ids": item_ids, "codes": codes.astype(np.int32), "codebook_sizes": sizes}
        normalised |= {"codebooks": codebooks, "titles": _check_titles(self.titles, len(item_ids))}
        for name, value in normalised.items():
            object.__setattr__(self, name, value)  # the one way to set a field of a frozen dataclass

    def __len__(self) -> int:
        return len(self.item_ids)

    @classmethod
    def build(
        cls,
        item_ids,
        embeddings,
        codebook_sizes: Sequence[int] = (2048,) * 4,
        *,
        method: str = "rq-kmeans",
        width: int | None = None,
        training: QuantizerTraining | None = None,
        popularity=None,
        titles=None,
        categories=None,
        collisions: str = "resolve",
        seed: int = 0,
        num_iterations: int = 25,
        verbose: bool = False,
    ) -> SIDTable:
        """Makes semantic IDs from embeddings: trains a tokenizer on them, then does as `from_tokenizer` does.

        Args:
            item_ids (array-like of shape `(N,)`): distinct item ids.
            embeddings (array-like of shape `(N, d)`): one row an item, for instance from `embed_texts`.
            codebook_sizes (sequence of `int`): codes per level, at least 2 each.
            method (`str`): `"rq-kmeans"`, or one that is trained by gradient; see [`ItemTokenizer`].
            width (`int`, *optional*): principal directions to project the embeddings onto first.
            training ([`QuantizerTraining`], *optional*): how a gradient method is trained.
            popularity, titles, categories, collisions: see `from_tokenizer`.
            seed (`int`): seed of the training.
            num_iterations (`int`): k-means iterations a level, for `"rq-kmeans"`.
            verbose (`bool`): show progress.

        Returns:
            `SIDTable`, with its report.

        Raises:
            ValueError: an argument is malformed, or the catalog is too small or too large for `codebook_sizes`.
        """
        checked = _check_items(item_ids, embeddings, popularity, titles, categories)
        _check_collisions(collisions, len(checked[0]), check_codebook_sizes(codebook_sizes))
        options = {"width": width, "training": training, "num_iterations": num_iterations, "seed": seed}
        tokenizer = ItemTokenizer(codebook_sizes, method, **options, verbose=verbose).fit(checked[1])
        return cls.from_tokenizer(
            tokenizer,
            item_ids,
            checked[1],
            popularity=popularity,
            titles=titles,
            categories=categories,
            collisions=collisions,
        )

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: ItemTokenizer,
        item_ids,
        embeddings,
        *,
        popularity=None,
        titles=None,
        categories=None,
        collisions: str = "resolve",
    ) -> SIDTable:
        """Gives items semantic IDs by a tokenizer that has learned already.

        Args:
            tokenizer ([`ItemTokenizer`]): chooses the codes.
            item_ids (array-like of shape `(N,)`): distinct item ids.
            embeddings (array-like of shape `(N, d)`): one row an item.
            popularity (array-like of shape `(N,)`, *optional*): training interactions of each item, by which colliding
                items are ranked; item ids alone rank them when left out.
            titles (array-like of shape `(N,)`, *optional*): titles to keep in the table.
            categories (sequence of N `str`, *optional*): what items are, for the report's `prefix_purity`.
            collisions (`str`): `"resolve"` gives every item an ID of its own, `"keep"` lets items share one.

        Returns:
            `SIDTable`, with its report. Its codebooks add up to what the codes stand for (of `"prefix-basis-rq"`, on
            average), in the space that the tokenizer projects to.

        Raises:
            ValueError: an argument is malformed, or there are more items than IDs.
        """
        checked = _check_items(item_ids, embeddings, popularity, titles, categories)
        item_ids, embeddings, popularity, titles = checked
        _check_collisions(collisions, len(item_ids), tokenizer.codebook_sizes)
        points = tokenizer.project(embeddings)
        before = tokenizer.quantizer.encode(points)
        codes, moved = before, np.zeros(len(before), dtype=bool)
        if collisions == "resolve":
            codes, moved = resolve_collisions(before, points, tokenizer.reconstruction, popularity, item_ids)
        report = tokenizer.report(before, codes, points, moved, categories)
        codebooks, version = tokenizer.codebooks(codes), tokenizer.version_id
        return cls(item_ids, codes, tokenizer.codebook_sizes, codebooks, report, titles, tokenizer.seed, version)

    def select(self, item_ids) -> SIDTable:
        """The table of some items, in the order given, with the same codebooks.

        The report is left out, because it measured the whole table.

        Raises:
            ValueError: an item is not in the table, or is given twice.
        """
        item_ids = check_item_ids(item_ids)
        row_of = {item_id: row for row, item_id in enumerate(self.item_ids.tolist())}
        unknown = [item_id for item_id in item_ids.tolist() if item_id not in row_of]
        if unknown:
            raise ValueError(f"`item_ids` names {_some(unknown)} not in this table of {len(self)} items.")
        rows = np.array([row_of[item_id] for item_id in item_ids.tolist()])
        titles = None if self.titles is None else self.titles[rows]
        return SIDTable(
            self.item_ids[rows],
            self.codes[rows],
            self.codebook_sizes,
            self.codebooks,
            titles=titles,
            seed=self.seed,
            tokenizer_version=self.tokenizer_version,
        )

    def save(self, folder: str | Path) -> None:
        """Writes the table to a folder of its own, replacing a table that is there; see `storage.save_table`."""
        from .storage import save_table

        save_table(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> SIDTable:
        """Reads a table that `save` wrote; see `storage.load_table`."""
        from .storage import load_table

        return load_table(Path(folder))


def check_item_ids(item_ids) -> np.ndarray:
    """Returns item ids, strings or integers, as an array of `str`; raises `ValueError` for others and repeated ones."""
    item_ids = np.asarray(item_ids)
    if item_ids.ndim != 1 or not item_ids.size:
        raise ValueError(f"`item_ids` must be a non-empty one-dimensional array, got shape {item_ids.shape}.")
    if item_ids.dtype.kind not in "iuU":
        wrong = [row for row, item_id in enumerate(item_ids.tolist()) if not isinstance(item_id, str)]
        if wrong:
            raise ValueError(
                f"`item_ids` must be strings or integers, got {item_ids[wrong[0]]!r} in row {wrong[0]} "
                f"({len(wrong)} such values)."
            )
    item_ids = item_ids.astype(str)
    unique, counts = np.unique(item_ids, return_counts=True)
    if len(unique) < len(item_ids):
        repeated = _some(unique[counts > 1].tolist())
        raise ValueError(f"`item_ids` names {repeated} more than once; give each item one row.")
    return item_ids


def _check_items(item_ids, embeddings, popularity, titles, categories) -> tuple:
    """Item ids, embeddings, popularity and titles that fit together, or `ValueError`."""
    item_ids = check_item_ids(item_ids)
    embeddings = check_embeddings(embeddings, len(item_ids))
    titles = _check_titles(titles, len(item_ids))
    popularity = check_popularity(np.zeros(len(item_ids)) if popularity is None else popularity, len(item_ids))
    if categories is not None:
        check_categories(categories, len(item_ids))
    return item_ids, embeddings, popularity, titles


def _check_collisions(collisions: str, num_items: int, codebook_sizes: tuple[int, ...]) -> None:
    if collisions not in ("resolve", "keep"):
        raise ValueError(f'`collisions` must be "resolve" or "keep", got {collisions!r}.')
    if collisions == "resolve":
        check_capacity(num_items, codebook_sizes)


def _check_titles(titles, num_items: int) -> np.ndarray | None:
    if titles is None:
        return None
    # Objects, because a fixed-width array would give every title the room of the longest one.
    titles = np.array([title if isinstance(title, str) else "" for title in titles], dtype=object)
    if len(titles) != num_items:
        raise ValueError(f"`titles` has {len(titles)} entries for {num_items} items.")
    return titles


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
