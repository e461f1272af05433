"""What a GEAR run leaves for others to serve: model, processor and index in one folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from ..cards import without_folders
from ..data.events import EventLog
from ..items.generations import INDEX_FOLDER, IndexWriter
from ..items.index import ItemIndex
from ..models.configuration_gear import GearConfig
from ..models.modeling_gear import GearForSIDRetrieval
from ..models.processing_gear import GearProcessor


def save_gear(folder: Path, model: GearForSIDRetrieval, processor: GearProcessor, published: str | Path) -> ItemIndex:
    """Write a folder that is whole: `AutoModel` and `AutoProcessor` open it, `open_index` its `index/`.

    The model's catalog is put in the order of the index, so that rows of one are rows of the other. All is written
    aside first: what fails, or is stopped, before it is whole leaves the folder as it was.

    Args:
        folder (`Path`): Where to. What is there of these gives way; other files, such as a card, stay.
        model ([`GearForSIDRetrieval`]): The model; gets the catalog.
        processor ([`GearProcessor`]): What encodes its items and users.
        published (`str` or `Path`): Folder of the generations, of which the current one goes along.

    Raises:
        FileNotFoundError, ValueError: If nothing whole was published there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, because names change at once only within a disk.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}", dir=folder.parent) as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        with IndexWriter(new / INDEX_FOLDER) as writer:
            index = writer.adopt(published)
        model.set_catalog(torch.from_numpy(index.item_codes()), index.tokenizer_version)
        model.save_pretrained(new)
        processor.save_pretrained(new)
        if folder.exists():
            _copy_others(folder, new)
            os.rename(folder, old)
        os.rename(new, folder)
    return index


def _copy_others(source: Path, target: Path) -> None:
    """Copy what lies in a folder under names that the other does not have."""
    for path in source.iterdir():
        if not (target / path.name).exists():
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, target / path.name)


def make_processor(log: EventLog, config: GearConfig, num_items: int, embedding_model: str | None) -> GearProcessor:
    """The processor of the first `num_items` items of a log.

    Args:
        log ([`EventLog`]): The log.
        config ([`GearConfig`]): Configuration of its model.
        num_items (`int`): Items that are known.
        embedding_model (`str`, *optional*): What made the content embeddings, where a text embedder did.
    """
    return GearProcessor(
        log.item_ids[:num_items],
        torch.from_numpy(log.content[:num_items]),
        torch.from_numpy(log.item_categories[:num_items]),
        log.item_features,
        log.user_features,
        config.behaviors,
        embedding_model=without_folders(embedding_model),
        text_columns=log.text_columns,
    )
