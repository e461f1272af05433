"""Item ids to the tensors that a model reads, and retrieved SIDs back to item ids."""

import operator
from functools import cached_property

import torch
from transformers import BatchFeature

from .processor_sid import ItemProcessor, one_of, packed, read_strings, string_tensors
from .trie import SIDTrie, check_codes

PADDING_SIDES = ("left", "right")


class DecoProcessor(ItemProcessor):
    """Knows items: their ids, SIDs and titles.

    The first `num_items` are the model's catalog, row `i` here being item row `i` there. Items behind them, such as new
    ones that the model was not trained to retrieve, can stand in a history all the same.

    Args:
        item_ids (`list[str]` of length `N`): Item ids, all different. Kept as [`PackedStrings`], a sequence of `str`.
        item_codes (`torch.Tensor` of shape `(N, K)`): SID of every item.
        codebook_sizes (`tuple[int, ...]` of length `K`): Codes per level.
        max_history_length (`int`, *optional*, defaults to 20): Items of a history that are read, the latest `T`.
        titles (`list[str]` of length `N`, *optional*): Titles to show.
        num_items (`int`, *optional*): Items of the model's catalog; all `N` by default.
        padding_side (`str`, *optional*, defaults to `"left"`): Where shorter histories are padded, or `"right"`.
        unknown_items (`str`, *optional*, defaults to `"error"`): What becomes of items that are not known: `"error"`
            names them, `"drop"` leaves them out.

    Raises:
        ValueError: If an id appears twice, lengths differ, codes do not fit `codebook_sizes`, or an option is unknown.

    Example:
        ```python
        >>> import torch
        >>> from hf_deco import DecoProcessor
        >>> codes = torch.tensor([[0, 1], [0, 2], [7, 3]])
        >>> processor = DecoProcessor(["apple", "pear", "soap"], codes, codebook_sizes=(16, 16))
        >>> inputs = processor([["pear"], ["apple", "soap"]], return_tensors="pt")
        >>> inputs["attention_mask"].tolist()
        [[0, 1], [1, 1]]
        >>> processor.batch_decode(torch.tensor([[7, 3], [-1, -1]]))
        ['soap', None]

        ```
    """

    model_input_names = ["item_codes", "attention_mask"]
    _settable = ("max_history_length", "padding_side", "unknown_items")

    def __init__(
        self,
        item_ids: list[str],
        item_codes: torch.Tensor,
        codebook_sizes: tuple[int, ...],
        max_history_length: int = 20,
        titles: list[str] | None = None,
        num_items: int | None = None,
        padding_side: str = "left",
        unknown_items: str = "error",
    ):
        self._know_items(item_ids, unknown_items)
        self.titles = None if titles is None else packed(titles)
        item_codes = torch.as_tensor(item_codes)
        self.codebook_sizes = tuple(int(size) for size in codebook_sizes)
        self.max_history_length = int(max_history_length)
        if self.max_history_length < 1:
            raise ValueError(f"`max_history_length` must be at least 1, got {max_history_length}.")
        self.padding_side = one_of("padding_side", padding_side, PADDING_SIDES)
        check_codes(item_codes, self.codebook_sizes)
        self.item_codes = item_codes.to(torch.int32)
        for name, values in (("item_codes", self.item_codes), ("titles", self.titles)):
            if values is not None and len(values) != len(self.item_ids):
                raise ValueError(f"`{name}` has {len(values)} rows for {len(self.item_ids)} `item_ids`.")
        self.num_items = len(self.item_ids) if num_items is None else int(num_items)
        if not 0 < self.num_items <= len(self.item_ids):
            raise ValueError(
                f"`num_items` must lie in 1..{len(self.item_ids)}, the number of `item_ids`, got {num_items}."
            )

    @cached_property
    def _trie(self) -> SIDTrie:
        return SIDTrie(self.item_codes[: self.num_items], self.codebook_sizes)

    def __repr__(self) -> str:
        return (
            f"DecoProcessor(items={self.num_items}, codebook_sizes={self.codebook_sizes}, "
            f"max_history_length={self.max_history_length})"
        )

    def __call__(
        self,
        histories: list[list[str]] | None = None,
        return_tensors: str = "pt",
        *,
        item_rows: list[list[int]] | None = None,
        padding_side: str | None = None,
        unknown_items: str | None = None,
    ) -> BatchFeature:
        """Turn histories into model inputs.

        Args:
            histories (`list[list[str]]`): Item ids of every user, oldest first. Of more than `max_history_length` the
                latest count; an empty history is allowed and answered with what users start with.
            return_tensors (`str`, *optional*, defaults to `"pt"`): Only PyTorch tensors are made.
            item_rows (`list[list[int]]`, *optional*): The histories as rows of `item_ids` instead; also an array
                or tensor `(B, T)`.
            padding_side (`str`, *optional*): `"left"` or `"right"`; the processor's own by default.
            unknown_items (`str`, *optional*): `"error"` or `"drop"`; the processor's own by default.

        Returns:
            `item_codes (B, T, K)` and `attention_mask (B, T)`.

        Raises:
            ValueError: If an item is not known and unknown ones are not dropped, `histories` is not a list of lists, or
                an option is unknown.
        """
        if return_tensors != "pt":
            raise ValueError(f"`return_tensors` must be 'pt', got {return_tensors!r}.")
        if (histories is None) == (item_rows is None):
            raise ValueError("Give either `histories` of item ids, or the same as `item_rows`.")
        side = one_of("padding_side", padding_side or self.padding_side, PADDING_SIDES)
        if item_rows is None:
            if isinstance(histories, str) or any(isinstance(history, str) for history in histories):
                raise ValueError(
                    "`histories` must be a list with one list of item ids per user, got a string in place of a list."
                )
            rows = [self.rows_of(history, unknown_items) for history in histories]
        else:
            item_rows = item_rows.tolist() if hasattr(item_rows, "tolist") else item_rows
            rows = [self._known_rows(history, unknown_items) for history in item_rows]
        return self._pad([history[-self.max_history_length :] for history in rows], side)

    def _pad(self, rows: list[list[int]], side: str) -> BatchFeature:
        lengths = torch.tensor([len(history) for history in rows], dtype=torch.long).unsqueeze(1)
        width = max(1, max((len(history) for history in rows), default=0))
        columns = torch.arange(width)
        mask = columns >= width - lengths if side == "left" else columns < lengths
        codes = torch.zeros((len(rows), width, len(self.codebook_sizes)), dtype=torch.long)
        codes[mask] = self.item_codes[[row for history in rows for row in history]].long()
        return BatchFeature({"item_codes": codes, "attention_mask": mask.long()})

    def _known_rows(self, rows: list[int], unknown_items: str | None) -> list[int]:
        """The rows, without those that are no item's where these are to be dropped."""
        rows = [operator.index(row) for row in rows]
        known = [row for row in rows if 0 <= row < len(self.item_ids)]
        unknown = [str(row) for row in rows if not 0 <= row < len(self.item_ids)]
        return known if self._drops("item_rows", unknown, unknown_items) else rows

    def batch_decode(self, sequences: torch.LongTensor) -> list:
        """Item id of every SID.

        Args:
            sequences (`torch.LongTensor` of shape `(R, K)` or `(B, R, K)`): SIDs, as `generate` returns them, or by
                user.

        Returns:
            `list` of length `R`: item ids, None where a row is no item (fillers of -1). A list of such lists for
            `(B, R, K)`. Where items share a SID, the first of them: what a reranking head chose is told by
            `item_rows` of the search's output.
        """
        rows = self._trie.rows(torch.as_tensor(sequences).cpu())
        if rows.dim() > 1:
            return [self._names(user) for user in rows.tolist()]
        return self._names(rows.tolist())

    def _names(self, rows: list[int]) -> list[str | None]:
        return [None if row < 0 else self.item_ids[row] for row in rows]

    def decode(self, sequence: torch.LongTensor) -> str | None:
        """Item id of one SID `(K,)`."""
        return self.batch_decode(torch.as_tensor(sequence).unsqueeze(0))[0]

    def title(self, item: str) -> str | None:
        """Title of an item; None where the catalog has no titles."""
        return None if self.titles is None else self.titles[self.rows_of([item], "error")[0]]

    def check_catalog(self, codes: torch.Tensor) -> None:
        """Raise a `ValueError` where the catalog of a model, `(N, K)`, is not that of the processor."""
        known = self.item_codes[: self.num_items]
        if known.shape != codes.shape or not torch.equal(known, codes.cpu()):
            raise ValueError(
                f"The processor's {self.num_items} items are not the catalog of the model ({codes.shape[0]} items): "
                "load both from one checkpoint, or give both the same new catalog."
            )

    def _saved(self) -> tuple[dict, dict[str, torch.Tensor]]:
        tensors = {"item_codes": self.item_codes.contiguous()}
        if self.titles is not None:
            tensors |= string_tensors("titles", self.titles)
        names = ("max_history_length", "codebook_sizes", "num_items", "padding_side", "unknown_items")
        return {name: getattr(self, name) for name in names}, tensors

    @classmethod
    def _from_saved(cls, config: dict, tensors: dict[str, torch.Tensor]) -> "DecoProcessor":
        return cls(
            item_ids=read_strings("item_ids", tensors),
            item_codes=tensors["item_codes"],
            codebook_sizes=config["codebook_sizes"],
            max_history_length=config["max_history_length"],
            titles=read_strings("titles", tensors) if "titles.bytes" in tensors else None,
            num_items=config["num_items"],
            **{name: config[name] for name in cls._settable[1:] if name in config},  # older checkpoints lack them
        )


def check_pair(model, processor: DecoProcessor) -> None:
    """Raise a `ValueError` where a processor names other items than the model retrieves."""
    if not hasattr(processor, "check_catalog"):
        raise ValueError(
            f"A {type(processor).__name__} does not turn histories of item ids into items by itself: the card of its "
            "checkpoint tells how to retrieve with it."
        )
    processor.check_catalog(model.catalog_codes)


__all__ = ["DecoProcessor"]
