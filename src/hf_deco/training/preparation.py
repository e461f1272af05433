"""From files to what a run needs: a split log, embeddings, SIDs, a fresh model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.interactions import Interactions, read_interactions
from ..data.items import ItemTable, read_items
from ..data.splits import Split, leave_one_out_split, temporal_split
from ..items.embedding import check_embeddings, embed_texts
from ..items.sid_table import SIDTable
from ..models.configuration_deco import DecoConfig, qwen2_shape
from ..models.modeling_deco import DecoForSIDRetrieval
from ..models.processing_deco import DecoProcessor
from .arguments import DecoTrainingArguments

SPLITS = {"temporal": temporal_split, "leave_one_out": leave_one_out_split}


@dataclass
class PreparedData:
    """A log that is read, filtered and split, with the content embedding of every item `(N, d)`."""

    items: ItemTable
    split: Split
    embeddings: np.ndarray


def prepare_log(args: DecoTrainingArguments) -> tuple[ItemTable, Interactions, Split]:
    """Read, filter and split the log, as the arguments say.

    Raises:
        ValueError: If a file is not named, or what it holds cannot be used.
    """
    for name in ("interactions", "items"):
        if getattr(args, name) is None:
            raise ValueError(f"`{name}` is not set: name the file to read.")
    items = read_items(
        args.items, item_column=args.item_column, text_columns=args.text_columns, title_column=args.title_column
    )
    log = read_interactions(
        args.interactions,
        items=items,
        user_column=args.user_column,
        item_column=args.item_column,
        timestamp_column=args.timestamp_column,
        unknown_items=args.unknown_items,
    )
    if args.drop_duplicates:
        log = log.drop_duplicates()
    if args.collapse_repeats:
        log = log.collapse_repeats()
    if args.k_core:
        log = log.k_core(user=args.k_core, item=args.k_core)
    return items, log, SPLITS[args.protocol](log)


def prepare_data(args: DecoTrainingArguments) -> PreparedData:
    """Read, filter, split and embed, as the arguments say."""
    items, _, split = prepare_log(args)
    if args.embeddings is not None:
        embeddings = check_embeddings(np.load(args.embeddings, allow_pickle=False), len(items))
    else:
        embeddings = _embed_once(args, items)
    return PreparedData(items, split, embeddings)


def _embed_once(args: DecoTrainingArguments, items: ItemTable) -> np.ndarray:
    """Embeddings of the texts: computed by the main process, kept with the run, read by the others."""
    path = Path(args.output_dir) / "item_embeddings.npy"
    with args.main_process_first(desc="embedding item texts"):
        if args.process_index == 0:
            embeddings = embed_texts(items.texts, args.embedding_model)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            with open(temporary, "wb") as file:
                np.save(file, embeddings)
            temporary.replace(path)
        return np.load(path, allow_pickle=False)


def prepare_sids(args: DecoTrainingArguments, data: PreparedData) -> SIDTable:
    """SIDs in the order of the item table: loaded if a folder is named, else built and kept with the run."""
    if args.sids is not None:
        return SIDTable.load(args.sids).select(data.items.item_ids)
    folder = Path(args.output_dir) / "sids"
    with args.main_process_first(desc="building SIDs"):
        if args.process_index == 0:
            table = SIDTable.build(
                data.items.item_ids,
                data.embeddings,
                tuple(args.codebook_sizes),
                popularity=data.split.item_counts,
                titles=data.items.titles,
                seed=args.seed,
            )
            table.save(folder)
        return SIDTable.load(folder)


def build_model(
    args: DecoTrainingArguments, sids: SIDTable, catalog: np.ndarray
) -> tuple[DecoForSIDRetrieval, DecoProcessor]:
    """A fresh model that retrieves the catalog's items, and a processor that knows all.

    Args:
        args ([`DecoTrainingArguments`]): Sizes and options.
        sids ([`SIDTable`]): SIDs of all items.
        catalog (`np.ndarray` of shape `(C,)`): Row in `sids` of every item that can be retrieved.
    """
    config = DecoConfig.from_preset(
        args.backbone,
        decoder_config=qwen2_shape(args.decoder_width, args.decoder_layers, args.decoder_width // 64),
        num_codebooks=len(sids.codebook_sizes),
        codebook_size=list(sids.codebook_sizes),
        num_concepts=args.num_concepts,
        max_history_length=args.max_history_length,
        normalize_over=args.normalize_over,
        dropout=args.dropout,
        decoder_dropout=args.decoder_dropout,
    )
    model = DecoForSIDRetrieval._from_config(config, dtype=torch.float32)
    if args.init_code_tables == "content":
        if not sids.codebooks:
            raise ValueError(
                "`init_code_tables` is 'content', but the SID table has no codebooks: rebuild it, or choose 'random'."
            )
        model.init_code_tables(sids.codebooks)
    model.set_catalog(torch.as_tensor(sids.codes[catalog]))
    others = np.setdiff1d(np.arange(len(sids)), catalog)  # never retrieved, but a history may hold them
    order = np.concatenate([catalog, others])
    processor = DecoProcessor(
        sids.item_ids[order].tolist(),
        torch.as_tensor(sids.codes[order]),
        sids.codebook_sizes,
        args.max_history_length,
        titles=None if sids.titles is None else sids.titles[order].tolist(),
        num_items=len(catalog),
    )
    return model, processor
