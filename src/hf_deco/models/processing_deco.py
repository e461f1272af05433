"""Item ids to the tensors that a model reads, and retrieved SIDs back to item ids."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import BatchFeature, ProcessorMixin
from transformers.utils import PROCESSOR_NAME, cached_file

from .trie import SIDTrie, check_codes

CATALOG_FILE = "catalog.safetensors"


class DecoProcessor(ProcessorMixin):
    """Knows items: their ids, SIDs and titles.

    The first `num_items` are the model's catalog, row `i` here being item row `i` there. Items behind them, such as new
    ones that the model was not trained to retrieve, can stand in a history all the same.

    Args:
        item_ids (`list[str]` of length `N`): Item ids, all different.
        item_codes (`torch.Tensor` of shape `(N, K)`): SID of every item.
        codebook_sizes (`tuple[int, ...]` of length `K`): Codes per level.
        max_history_length (`int`, *optional*, defaults to 20): Items of a history that are read, the latest `T`.
        titles (`list[str]` of length `N`, *optional*): Titles to show.
        num_items (`int`, *optional*): Items of the model's catalog; all `N` by default.

    Raises:
        ValueError: If an id appears twice, lengths differ, or codes do not fit `codebook_sizes`.

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

    def __init__(
        self,
        item_ids: list[str],
        item_codes: torch.Tensor,
        codebook_sizes: tuple[int, ...],
        max_history_length: int = 20,
        titles: list[str] | None = None,
        num_items: int | None = None,
    ):
        self.item_ids = [str(item) for item in item_ids]
        self.titles = None if titles is None else [str(title) for title in titles]
        item_codes = torch.as_tensor(item_codes)
        self.codebook_sizes = tuple(int(size) for size in codebook_sizes)
        self.max_history_length = int(max_history_length)
        if self.max_history_length < 1:
            raise ValueError(f"`max_history_length` must be at least 1, got {max_history_length}.")
        check_codes(item_codes, self.codebook_sizes)
        self.item_codes = item_codes.to(torch.int32)
        for name, values in (("item_codes", self.item_codes), ("titles", self.titles)):
            if values is not None and len(values) != len(self.item_ids):
                raise ValueError(f"`{name}` has {len(values)} rows for {len(self.item_ids)} `item_ids`.")
        self._rows = {item: row for row, item in enumerate(self.item_ids)}
        if len(self._rows) != len(self.item_ids):
            twice = next(item for row, item in enumerate(self.item_ids) if self._rows[item] != row)
            raise ValueError(
                f"`item_ids` must be unique; {len(self.item_ids) - len(self._rows)} are repeated, such as {twice!r}."
            )
        self.num_items = len(self.item_ids) if num_items is None else int(num_items)
        if not 0 < self.num_items <= len(self.item_ids):
            raise ValueError(
                f"`num_items` must lie in 1..{len(self.item_ids)}, the number of `item_ids`, got {num_items}."
            )
        self._trie = SIDTrie(self.item_codes[: self.num_items], self.codebook_sizes)

    def __repr__(self) -> str:
        return (
            f"DecoProcessor(items={self.num_items}, codebook_sizes={self.codebook_sizes}, "
            f"max_history_length={self.max_history_length})"
        )

    def __call__(self, histories: list[list[str]], return_tensors: str = "pt") -> BatchFeature:
        """Turn histories into model inputs.

        Args:
            histories (`list[list[str]]`): Item ids of every user, oldest first. Of more than `max_history_length` the
                latest count; an empty history is allowed and answered with what users start with.
            return_tensors (`str`, *optional*, defaults to `"pt"`): Only PyTorch tensors are made.

        Returns:
            `item_codes (B, T, K)` and `attention_mask (B, T)`, padded on the left.

        Raises:
            ValueError: If an item is not in the catalog, or `histories` is not a list of lists.
        """
        if return_tensors != "pt":
            raise ValueError(f"`return_tensors` must be 'pt', got {return_tensors!r}.")
        if isinstance(histories, str) or any(isinstance(history, str) for history in histories):
            raise ValueError(
                "`histories` must be a list with one list of item ids per user, got a string in place of a list."
            )
        rows = [self.rows_of(history)[-self.max_history_length :] for history in histories]
        width = max(1, max((len(row) for row in rows), default=0))
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        codes = torch.zeros((len(rows), width, len(self.codebook_sizes)), dtype=torch.long)
        for user, history in enumerate(rows):
            if history:
                mask[user, -len(history) :] = 1
                codes[user, -len(history) :] = self.item_codes[history].long()
        return BatchFeature({"item_codes": codes, "attention_mask": mask})

    def rows_of(self, items: list[str]) -> list[int]:
        """Rows of item ids; a `ValueError` names those that are unknown."""
        items = [str(item) for item in items]
        unknown = [item for item in items if item not in self._rows]
        if unknown:
            shown = ", ".join(repr(item) for item in unknown[:5])
            raise ValueError(
                f"`items` holds {len(unknown)} ids that are none of the {len(self.item_ids)} known items: {shown}. "
                "Leave them out, or use a checkpoint whose item table has them."
            )
        return [self._rows[item] for item in items]

    def batch_decode(self, sequences: torch.LongTensor) -> list[str | None]:
        """Item id of every SID.

        Args:
            sequences (`torch.LongTensor` of shape `(R, K)`): SIDs, as returned by `generate`.

        Returns:
            `list` of length `R`: item ids, None where a row is no item (fillers of -1).
        """
        rows = self._trie.rows(torch.as_tensor(sequences).cpu())
        return [None if row < 0 else self.item_ids[row] for row in rows.tolist()]

    def decode(self, sequence: torch.LongTensor) -> str | None:
        """Item id of one SID `(K,)`."""
        return self.batch_decode(torch.as_tensor(sequence).unsqueeze(0))[0]

    def title(self, item: str) -> str | None:
        """Title of an item; None where the catalog has no titles."""
        return None if self.titles is None else self.titles[self.rows_of([item])[0]]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> list[str]:
        """Write `processor_config.json` and `catalog.safetensors`; each replaces its old version whole or not."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"item_codes": self.item_codes.contiguous(), **_pack("item_ids", self.item_ids)}
        if self.titles is not None:
            tensors |= _pack("titles", self.titles)
        config = {
            "processor_class": type(self).__name__,
            "max_history_length": self.max_history_length,
            "codebook_sizes": list(self.codebook_sizes),
            "num_items": self.num_items,
        }
        written = []
        for name, write in (
            (CATALOG_FILE, lambda path: save_file(tensors, path)),
            (PROCESSOR_NAME, lambda path: path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")),
        ):
            temporary = folder / f".{name}.{os.getpid()}"
            try:
                write(temporary)
                os.replace(temporary, folder / name)
            finally:
                temporary.unlink(missing_ok=True)
            written.append(str(folder / name))
        return written

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> "DecoProcessor":
        """Load a processor from a folder or a repository of the Hub.

        Args:
            pretrained_model_name_or_path (`str` or path): Where from.
            kwargs: Hub options, and `max_history_length` to read another number of items than the checkpoint says.

        Raises:
            OSError: If a file is missing or damaged.
        """
        names = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")
        loading = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        files = [
            cached_file(str(pretrained_model_name_or_path), name, **loading) for name in (PROCESSOR_NAME, CATALOG_FILE)
        ]
        try:
            config = json.loads(Path(files[0]).read_text(encoding="utf-8"))
            tensors = load_file(files[1])
            return cls(
                item_ids=_unpack("item_ids", tensors),
                item_codes=tensors["item_codes"],
                codebook_sizes=config["codebook_sizes"],
                max_history_length=kwargs.get("max_history_length", config["max_history_length"]),
                titles=_unpack("titles", tensors) if "titles.bytes" in tensors else None,
                num_items=config["num_items"],
            )
        except (SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise OSError(
                f"The processor files of {str(pretrained_model_name_or_path)!r} are damaged or incomplete ({error!r})."
            ) from error


def check_pair(model, processor: DecoProcessor) -> None:
    """Raise a `ValueError` where a processor names other items than the model retrieves."""
    known = processor.item_codes[: processor.num_items]
    if known.shape != model.catalog_codes.shape or not torch.equal(known, model.catalog_codes.cpu()):
        raise ValueError(
            f"The processor's {processor.num_items} items are not the catalog of the model ({model.config.num_items} "
            f"items): "
            "load both from one checkpoint, or give both the same new catalog."
        )


def _pack(name: str, strings: list[str]) -> dict[str, torch.Tensor]:
    """Strings as two tensors: their UTF-8 bytes, one behind the other, and where each begins."""
    encoded = [string.encode("utf-8") for string in strings]
    offsets = torch.zeros(len(encoded) + 1, dtype=torch.long)
    offsets[1:] = torch.tensor([len(piece) for piece in encoded]).cumsum(0)
    data = torch.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=torch.uint8)
    return {f"{name}.bytes": data, f"{name}.offsets": offsets}


def _unpack(name: str, tensors: dict[str, torch.Tensor]) -> list[str]:
    data = tensors[f"{name}.bytes"].numpy().tobytes()
    offsets = tensors[f"{name}.offsets"].tolist()
    return [data[start:end].decode("utf-8") for start, end in zip(offsets, offsets[1:], strict=False)]


__all__ = ["DecoProcessor"]
