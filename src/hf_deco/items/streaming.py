"""A tokenizer that goes on learning from a stream, and publishes what it learned as numbered versions."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .folders import check_files, read_arrays, read_file, read_meta, replace_folder
from .gradient_rq import GradientRQ
from .quantizer_training import QuantizerTrainer, QuantizerTraining
from .sid_table import SIDTable, check_item_ids
from .tokenizer import ItemTokenizer

FORMAT_VERSION = 1
ARRAYS, META, ITEMS = "stream.safetensors", "stream.json", "items.parquet"


@dataclass(frozen=True, eq=False)
class SIDUpdate:
    """What a new version means for the items.

    Args:
        version (`int`): its number.
        version_id (`str`): names the tokenizer by its content.
        added (`np.ndarray` of `str`): items that had no SID in the version before.
        changed (`np.ndarray` of `str`): items that had another SID in the version before.
    """

    version: int
    version_id: str
    added: np.ndarray
    changed: np.ndarray


class StreamingTokenizer:
    """A gradient tokenizer on a stream of items, in versions.

    Learning and serving are apart: `partial_fit` takes an Adam step on every batch that arrives, while `encode` and
    `table` stay at the version that was published last, so that models and indexes which were made with it stay right.
    `publish` makes the next version and tells which items have another SID in it. Items may share SIDs.

    The tokenizer keeps the last embedding of every item, as projected, in memory. Its projection stays what it was.

    Args:
        tokenizer ([`ItemTokenizer`]): a tokenizer of a gradient method that has been fitted: version 1. Not changed.
        item_ids (array-like of shape `(N,)`): the items known so far.
        embeddings (array-like of shape `(N, d)`): one row an item.
        learning_rate (`float`): of every step. A higher one follows a drift faster, and changes more SIDs for nothing.
        batch_size (`int`): longer batches are taken in several steps.
        weight_decay (`float`): see [`QuantizerTraining`].

    Attributes:
        tokenizer ([`ItemTokenizer`]): the one published last.
        version (`int`): its number.
        version_id (`str`): its name, by content.
        table ([`SIDTable`]): the items that were known when it was published, with their SIDs.

    Raises:
        ValueError: an argument is malformed, or the tokenizer cannot learn from a stream.
    """

    def __init__(
        self,
        tokenizer: ItemTokenizer,
        item_ids,
        embeddings,
        *,
        learning_rate: float = 1e-3,
        batch_size: int = 2048,
        weight_decay: float = 0.0,
    ):
        if not isinstance(tokenizer.quantizer, GradientRQ):
            raise ValueError(
                f"`tokenizer` has the method {tokenizer.method!r}, which cannot learn from a stream; choose a method "
                "that is trained by gradient, such as 'basis-rq'."
            )
        self._options = {"learning_rate": learning_rate, "batch_size": batch_size, "weight_decay": weight_decay}
        training = QuantizerTraining(**self._options)
        item_ids, points = self._check(tokenizer, item_ids, embeddings)
        self._trainer = QuantizerTrainer(copy.deepcopy(tokenizer.quantizer.quantizer), training, tokenizer.seed)
        self._item_ids: list[str] = item_ids.tolist()
        self._row_of = {item_id: row for row, item_id in enumerate(self._item_ids)}
        self._points = points.copy()  # without a projection they are the caller's own, and rows are written later
        self._publish(tokenizer, tokenizer.quantizer.encode(points), 1)

    @staticmethod
    def _check(tokenizer: ItemTokenizer, item_ids, embeddings) -> tuple[np.ndarray, np.ndarray]:
        """Item ids and projected embeddings of a batch."""
        item_ids, points = check_item_ids(item_ids), tokenizer.project(embeddings)
        if len(item_ids) != len(points):
            raise ValueError(f"`embeddings` has {len(points)} rows for {len(item_ids)} items; give one row an item.")
        return item_ids, points

    def _publish(self, tokenizer: ItemTokenizer, codes: np.ndarray, version: int, report: dict | None = None) -> None:
        if report is None:
            points, moved = self._points[: len(codes)], np.zeros(len(codes), dtype=bool)
            report = tokenizer.report(codes, codes, points, moved)
        parts = self._item_ids[: len(codes)], codes, tokenizer.codebook_sizes, tokenizer.codebooks(codes), report
        version_id = tokenizer.version_id
        self.table = SIDTable(*parts, seed=tokenizer.seed, tokenizer_version=version_id)
        self.tokenizer, self.version, self.version_id = tokenizer, version, version_id

    def partial_fit(self, item_ids, embeddings) -> float:
        """Learns from a batch: new items, and known ones with the embeddings they have now.

        Args:
            item_ids (array-like of shape `(b,)`): distinct item ids.
            embeddings (array-like of shape `(b, d)`): one row an item.

        Returns:
            `float`: the loss, averaged over steps.

        Raises:
            ValueError: the batch is empty or malformed, its embeddings are NaN, infinite or of another width, or the
                loss is not finite. Nothing has changed then.
        """
        item_ids, points = self._check(self.tokenizer, item_ids, embeddings)
        batches = torch.from_numpy(points / np.float32(self._scale)).split(self._options["batch_size"])
        before = self._trainer.state()
        try:
            losses = [self._trainer.step(batch, self._options["learning_rate"]) for batch in batches]
        except BaseException:
            self._trainer.load_state(before)
            raise
        self._store(item_ids.tolist(), points)
        return sum(losses) / len(losses)

    @property
    def _scale(self) -> float:
        return self.tokenizer.quantizer.scale

    def _store(self, item_ids: list[str], points: np.ndarray) -> None:
        new = [item_id for item_id in item_ids if item_id not in self._row_of]
        wanted = len(self._item_ids) + len(new)
        if wanted > len(self._points):  # room for as many again, so that a batch does not copy all every time
            grown = np.zeros((2 * wanted, points.shape[1]), dtype=np.float32)
            grown[: len(self._item_ids)] = self._points[: len(self._item_ids)]
            self._points = grown
        self._row_of |= {item_id: row for row, item_id in enumerate(new, len(self._item_ids))}
        self._item_ids += new
        self._points[[self._row_of[item_id] for item_id in item_ids]] = points

    def encode(self, embeddings) -> np.ndarray:
        """Codes `(n, K)` int32 of embeddings `(n, d)` in the version published last: one forward pass.

        Raises:
            ValueError: the embeddings are malformed or of another width.
        """
        return self.tokenizer.encode(embeddings)

    def publish(self) -> SIDUpdate:
        """Makes what was learned the next version, encodes all items anew, and returns what that changed."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.quantizer = copy.copy(tokenizer.quantizer)
        tokenizer.quantizer.quantizer = copy.deepcopy(self._trainer.quantizer).cpu().eval()
        codes = tokenizer.quantizer.encode(self._points[: len(self._item_ids)])
        before = self.table
        changed = (codes[: len(before)] != before.codes).any(axis=1)
        self._publish(tokenizer, codes, self.version + 1)
        added = self.table.item_ids[len(before) :]
        return SIDUpdate(self.version, self.version_id, added, before.item_ids[changed])

    def save(self, folder: str | Path) -> None:
        """Writes all, with what is not published yet, to a folder of its own, whole or not at all."""
        replace_folder(Path(folder), self._write_files, {ARRAYS, META, ITEMS})

    def _write_files(self, folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from safetensors.numpy import save_file

        arrays = {f"tokenizer.{name}": array for name, array in self.tokenizer.arrays().items()}
        arrays |= {f"learning.{name}": value.numpy() for name, value in self._trainer.state().items()}
        arrays |= {"points": np.ascontiguousarray(self._points[: len(self._item_ids)]), "codes": self.table.codes}
        save_file(arrays, str(folder / ARRAYS))
        pq.write_table(pa.table({"item_id": pa.array(self._item_ids, pa.string())}), folder / ITEMS)
        meta = {"format_version": FORMAT_VERSION, "version": self.version, "options": self._options}
        meta |= {"tokenizer": self.tokenizer.meta(), "report": self.table.report}
        (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> StreamingTokenizer:
        """Reads a tokenizer that `save` wrote; it goes on exactly where that one was.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or they do not belong together.
        """
        folder = Path(folder)
        check_files(folder, (META, ARRAYS, ITEMS), "StreamingTokenizer.save")
        meta, arrays = read_meta(folder / META, FORMAT_VERSION), read_file(folder / ARRAYS, read_arrays)
        item_ids = read_file(folder / ITEMS, _read_item_ids)
        try:
            tokenizer = ItemTokenizer.from_parts(meta["tokenizer"], _below(arrays, "tokenizer."))
            self = cls.__new__(cls)
            self._options = meta["options"]
            quantizer = copy.deepcopy(tokenizer.quantizer.quantizer)
            self._trainer = QuantizerTrainer(quantizer, QuantizerTraining(**self._options), tokenizer.seed)
            learning = _below(arrays, "learning.")
            self._trainer.load_state({name: torch.from_numpy(value) for name, value in learning.items()})
            self._item_ids, self._points = item_ids, arrays["points"]
            self._row_of = {item_id: row for row, item_id in enumerate(item_ids)}
            if len(self._row_of) != len(self._points):
                raise ValueError(f"{len(self._row_of)} items, but embeddings of {len(self._points)}")
            self._publish(tokenizer, arrays["codes"], meta["version"], meta["report"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            files = f"{META}, {ARRAYS} and {ITEMS}"
            raise ValueError(f"{files} in {str(folder)!r} do not belong together: {error}") from error
        return self


def _below(arrays: dict[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def _read_item_ids(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_table(path, columns=["item_id"])["item_id"].to_pylist()
