"""From files to what a run needs: a split log, embeddings, SIDs, a fresh model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from ..data.interactions import Interactions, read_interactions
from ..data.items import ItemTable, read_items
from ..data.splits import Split, leave_one_out_split, temporal_split
from ..items.embedding import check_embeddings, embed_texts
from ..items.sid_table import SIDTable
from ..models.configuration_deco import BackboneConfig, DecoConfig, SIDRetrievalConfig, qwen2_shape
from ..models.modeling_backbone import BackboneForSIDRetrieval
from ..models.modeling_deco import DecoForSIDRetrieval
from ..models.modeling_sid import SIDRetrievalModel
from ..models.processing_deco import DecoProcessor
from .arguments import DecoTrainingArguments

SPLITS = {"temporal": temporal_split, "leave_one_out": leave_one_out_split}


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
    split = SPLITS[args.protocol](log)
    if not (split.train.lengths > 1).any():
        raise ValueError(
            f"the log is too short: under the {args.protocol} split no user has two training events, so there is "
            "nothing to learn from; give a longer log."
        )
    return items, log, split


def read_embeddings(path: str | Path, num_items: int) -> np.ndarray:
    """Embeddings `(N, d)` of a NumPy file, one row per row of the item table.

    Raises:
        ValueError: If the file is no NumPy array, or does not fit the item table.
        FileNotFoundError: If there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"`embeddings` is {str(path)!r}, and there is no such file.")
    try:
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("an archive of arrays")
    except (ValueError, EOFError) as error:
        raise ValueError(f"`embeddings` {str(path)!r} is no .npy file of one array ({error}).") from error
    return check_embeddings(array, num_items)


def prepare_embeddings(args: DecoTrainingArguments, items: ItemTable, resume: bool = False) -> np.ndarray:
    """Content embeddings `(N, d)`: read, or made of the texts by the main process and kept with the run."""
    if args.embeddings is not None:
        return read_embeddings(args.embeddings, len(items))
    path = Path(args.output_dir) / "item_embeddings.npy"
    with args.main_process_first(desc="embedding item texts"):
        if args.process_index == 0 and not (resume and path.exists()):
            embeddings = embed_texts(items.texts, args.embedding_model)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            with open(temporary, "wb") as file:
                np.save(file, embeddings)
            temporary.replace(path)
        return read_embeddings(path, len(items))


def check_capacity(codebook_sizes: list[int], num_items: int, collisions: str = "resolve") -> None:
    """Raise a `ValueError` where items cannot have SIDs in these codebooks, of their own unless collisions are kept."""
    too_few = collisions == "resolve" and math.prod(codebook_sizes) < num_items
    if codebook_sizes[0] > num_items or too_few:
        raise ValueError(
            f"`codebook_sizes` {codebook_sizes} do not suit {num_items} items: the first level must have at most as "
            "many codes as there are items, and all levels together at least as many SIDs, unless `collisions` is keep."
        )


def prepare_sids(
    args: DecoTrainingArguments, items: ItemTable, split: Split, embeddings: np.ndarray, resume: bool = False
) -> SIDTable:
    """SIDs in the order of the item table: loaded if a folder is named, else built and kept with the run."""
    if args.sids is not None:
        return SIDTable.load(args.sids).select(items.item_ids)
    folder = Path(args.output_dir) / "sids"
    with args.main_process_first(desc="building SIDs"):
        if args.process_index == 0 and not (resume and folder.exists()):
            table = SIDTable.build(
                items.item_ids,
                embeddings,
                tuple(args.codebook_sizes),
                popularity=split.item_counts,
                titles=items.titles,
                collisions=args.collisions,
                seed=args.seed,
            )
            table.save(folder)
        return SIDTable.load(folder).select(items.item_ids)


def model_class(args: DecoTrainingArguments) -> type[SIDRetrievalModel]:
    """Class of the model that the arguments describe."""
    return BackboneForSIDRetrieval if args.search_in == "backbone" else DecoForSIDRetrieval


def make_config(
    args: DecoTrainingArguments, codebook_sizes: tuple[int, ...], content_size: int = 0
) -> SIDRetrievalConfig:
    """Configuration of the model that the arguments describe, with a scratch backbone; `content_size` is that of its
    reranking head."""
    if args.search_in == "backbone":
        return BackboneConfig.from_preset(args.backbone, **model_options(args, codebook_sizes))
    options = model_options(args, codebook_sizes)
    return DecoConfig.from_preset(args.backbone, content_size=content_size, rerank_size=args.rerank_size, **options)


def model_options(args: DecoTrainingArguments, codebook_sizes: tuple[int, ...]) -> dict:
    """Arguments of the model's configuration, all but the backbone's own."""
    shared = {
        "num_codebooks": len(codebook_sizes),
        "codebook_size": list(codebook_sizes),
        "history_format": args.history_format,
        "max_history_length": args.max_history_length,
        "copy_pointer": args.copy_pointer,
        "tie_code_tables": args.tie_code_tables,
        "normalize_over": args.normalize_over,
        "dropout": args.dropout,
    }
    if args.search_in == "backbone":
        return shared
    return shared | {
        "decoder_config": qwen2_shape(args.decoder_width, args.decoder_layers, args.decoder_width // 64),
        "num_concepts": args.num_concepts,
        "decoder_input": args.decoder_input,
        "decoder_dropout": args.decoder_dropout,
    }


def check_table(args: DecoTrainingArguments, sids: SIDTable) -> None:
    """Raise a `ValueError` where a SID table lacks what the arguments ask of it."""
    if args.init_code_tables == "content" and not sids.codebooks:
        raise ValueError(
            "`init_code_tables` is 'content', but the SID table has no codebooks: rebuild it, or choose 'random'."
        )
    if args.reranker and len(np.unique(sids.codes, axis=0)) == len(sids):
        raise ValueError(
            "`reranker` tells items of one SID apart, but in the SID table every item has its own: build one with "
            "`collisions` keep, or leave the reranker out."
        )


def build_model(
    args: DecoTrainingArguments, sids: SIDTable, catalog: np.ndarray, embeddings: np.ndarray
) -> tuple[SIDRetrievalModel, DecoProcessor]:
    """A fresh model that retrieves the catalog's items, and a processor that knows all.

    Args:
        args ([`DecoTrainingArguments`]): Sizes and options.
        sids ([`SIDTable`]): SIDs of all items.
        catalog (`np.ndarray` of shape `(C,)`): Row in `sids` of every item that can be retrieved.
        embeddings (`np.ndarray` of shape `(N, d)`): Content of all items, which a reranker reads.
    """
    content_size = embeddings.shape[1] if args.reranker else 0
    config = make_config(args, sids.codebook_sizes, content_size)
    model = model_class(args)._from_config(config, dtype=torch.float32)
    return model, fit_to_items(args, model, sids, catalog, embeddings[catalog] if args.reranker else None)


class ScratchModels:
    """How a run comes by its model: built from scratch; and how it hands the model over.

    Args:
        args ([`DecoTrainingArguments`]): Sizes and options.
    """

    def __init__(self, args: DecoTrainingArguments):
        self.args = args

    def config(self, codebook_sizes: tuple[int, ...]) -> SIDRetrievalConfig:
        """The model's configuration, before anything is built; errors tell what no run could use."""
        return make_config(self.args, codebook_sizes)

    def begun(self) -> bool:
        """Whether a run that is gone on with has done something of its own before the first checkpoint."""
        return False

    def build(
        self, items: ItemTable, sids: SIDTable, catalog: np.ndarray, embeddings: np.ndarray
    ) -> tuple[SIDRetrievalModel, DecoProcessor]:
        """The model to train and its processor, see [`build_model`]."""
        return build_model(self.args, sids, catalog, embeddings)

    def save(self, trainer, folder: Path) -> SIDRetrievalModel:
        """Write the trained model; called on every process. Returns it as it was written, on the main process."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if trainer.is_world_process_zero():
            model.save_pretrained(folder)
        return model


def fit_to_items(
    args: DecoTrainingArguments,
    model: SIDRetrievalModel,
    sids: SIDTable,
    catalog: np.ndarray,
    content: np.ndarray | None = None,
) -> DecoProcessor:
    """Give a model its catalog, with the items' content for a reranking head, and its code tables their start; make the
    processor that knows all items."""
    check_table(args, sids)
    if args.init_code_tables == "content":
        model.init_code_tables(sids.codebooks)
    codes = torch.as_tensor(sids.codes[catalog])
    if content is None:
        model.set_catalog(codes)
    else:
        model.set_catalog(codes, torch.as_tensor(content))
    others = np.setdiff1d(np.arange(len(sids)), catalog)  # never retrieved, but a history may hold them
    order = np.concatenate([catalog, others])
    return DecoProcessor(
        sids.item_ids[order].tolist(),
        torch.as_tensor(sids.codes[order]),
        sids.codebook_sizes,
        args.max_history_length,
        titles=None if sids.titles is None else sids.titles[order].tolist(),
        num_items=len(catalog),
    )
