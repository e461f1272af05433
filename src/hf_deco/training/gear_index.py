"""The index of a model that is being trained: encoded by one forward pass, published as a generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.gear_batches import GearCollator
from ..items.generations import IndexWriter, open_index
from ..items.index import ItemIndex
from ..models.configuration_gear import GearConfig
from ..models.modeling_gear import GearForSIDRetrieval

MODEL_ID = GearConfig.model_type


@dataclass(frozen=True, eq=False)
class Publication:
    """A generation and what it changed.

    Args:
        index ([`ItemIndex`]): The index.
        vectors (`np.ndarray` of shape `(n, d)`): Vectors of the first `n` items of the log, as they were packed.
        changed (`float`, *optional*): Share of the items of the catalog before that have another SID now.
        added (`int`): Items that the catalog before had not.
    """

    index: ItemIndex
    vectors: np.ndarray
    changed: float | None
    added: int


class IndexPublisher:
    """Keeps a model's catalog and an index folder up with the model and with the items that enter.

    Args:
        folder (`str` or `Path`): Folder of the generations.
        collator ([`GearCollator`]): Knows the items; gets the catalog, for same-SID negatives.
        precision (`str`): Of the index.
        write (`bool`): Whether this process writes. The others only give their model the catalog.
    """

    def __init__(self, folder: str | Path, collator: GearCollator, precision: str = "int8", write: bool = True):
        self.folder, self.collator, self.precision, self.write = Path(folder), collator, precision, write

    @torch.no_grad()
    def publish(
        self, model: GearForSIDRetrieval, num_items: int, item_codes: np.ndarray | None = None
    ) -> Publication | None:
        """Encodes items, gives the model their catalog, and publishes the index.

        Where the weights of tokenizer and item tower are those of the current generation, it is updated with the items
        that are new; else all vectors have moved, and it is built anew.

        Args:
            model ([`GearForSIDRetrieval`]): The model.
            num_items (`int`): The first so many items of the log are known.
            item_codes (`np.ndarray` of shape `(N, K)`, *optional*): SIDs in the place of those of the model.

        Returns:
            [`Publication`], on the process that writes.
        """
        training = model.training
        items = self.collator.items(num_items)
        encoding = model.eval().encode_items(*(part.to(model.device) for part in items.values()))
        model.train(training)
        codes = encoding.codes.cpu().numpy() if item_codes is None else item_codes[:num_items]
        before = model.catalog_codes.cpu().numpy() if model.config.num_items else None
        model.set_catalog(torch.as_tensor(codes))
        self.collator.set_catalog(codes)
        if not self.write:
            return None
        vectors = encoding.vectors.cpu().numpy()
        index = self._next_index(model, codes, vectors)
        with IndexWriter(self.folder) as writer:
            index = writer.publish(index, keep=2)
        if before is None:
            return Publication(index, vectors, None, num_items)
        shared = min(len(before), num_items)
        changed = float((before[:shared] != codes[:shared]).any(axis=1).mean())
        return Publication(index, vectors, changed, num_items - shared)

    def _next_index(self, model: GearForSIDRetrieval, codes: np.ndarray, vectors: np.ndarray) -> ItemIndex:
        ids, version = self.collator.log.item_ids[: len(codes)], model.tokenizer_version
        current = open_index(self.folder) if (self.folder / "CURRENT").exists() else None
        if current is None or current.tokenizer_version != version or current.embeddings.precision != self.precision:
            names = {"tokenizer_version": version, "model_id": MODEL_ID, "precision": self.precision}
            return ItemIndex.build(ids, codes, vectors, model.config.codebook_sizes, **names)
        new = np.array(current.item_ids.find(ids.tolist())) < 0
        known = {current.item_ids[row] for row in range(len(current))}
        return current.update(ids[new], codes[new], vectors[new], removed=sorted(known - set(ids.tolist())))
