"""One run, from log and item table to a tested checkpoint folder."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

import numpy as np
import torch
from transformers import EarlyStoppingCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..data.collators import SequenceWindows, SIDCollator
from ..data.interactions import Interactions, read_interactions
from ..data.items import ItemTable, read_items
from ..data.splits import Split, leave_one_out_split, temporal_split
from ..evaluation.evaluator import Evaluator
from ..evaluation.floors import floor_metrics
from ..evaluation.plots import plot_training
from ..items.embedding import check_embeddings, embed_texts
from ..items.sid_table import SIDTable
from ..models.configuration_deco import DecoConfig
from ..models.modeling_deco import DecoForSIDRetrieval
from ..models.processing_deco import DecoProcessor
from .arguments import DecoTrainingArguments
from .trainer import DecoTrainer

logger = logging.get_logger(__name__)

SPLITS = {"temporal": temporal_split, "leave_one_out": leave_one_out_split}


@dataclass
class PreparedData:
    """A log that is read, filtered and split, with the content embedding of every item `(N, d)`."""

    items: ItemTable
    interactions: Interactions
    split: Split
    embeddings: np.ndarray


def prepare_data(args: DecoTrainingArguments) -> PreparedData:
    """Read, filter, split and embed, as the arguments say."""
    for name in ("interactions", "items"):
        if getattr(args, name) is None:
            raise ValueError(f"`{name}` is not set: name the file to read.")
    items = read_items(args.items, item_column=args.item_column, text_columns=args.text_columns, title_column=args.title_column)
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
    if args.embeddings is None:
        embeddings = embed_texts(items.texts, args.embedding_model)
    else:
        embeddings = check_embeddings(np.load(args.embeddings, allow_pickle=False), len(items))
    return PreparedData(items, log, split, embeddings)


def prepare_sids(args: DecoTrainingArguments, data: PreparedData) -> SIDTable:
    """SIDs of all items in the order of the item table: loaded where a folder is named, else built and kept with the run."""
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


def build_model(args: DecoTrainingArguments, sids: SIDTable, catalog: np.ndarray) -> tuple[DecoForSIDRetrieval, DecoProcessor]:
    """A fresh model and its processor, for the catalog's items."""
    config = DecoConfig.from_preset(
        args.backbone,
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
            raise ValueError("`init_code_tables` is 'content', but the SID table has no codebooks: rebuild it, or choose 'random'.")
        model.init_code_tables(sids.codebooks)
    codes = torch.as_tensor(sids.codes[catalog])
    model.set_catalog(codes)
    titles = None if sids.titles is None else sids.titles[catalog].tolist()
    processor = DecoProcessor(sids.item_ids[catalog].tolist(), codes, sids.codebook_sizes, args.max_history_length, titles)
    return model, processor


def train(args: DecoTrainingArguments) -> dict[str, dict[str, float]]:
    """Train Deco-CE, test it beside the untrained floors, and write the run's folder.

    `output_dir` ends with `model/` (the checkpoint that `AutoModel` and `AutoProcessor` open), `sids/`, `metrics.json` (one object
    per system), `training.png` and the resumable `checkpoint-*`. Set `resume_from_checkpoint` to `"last"` to go on where a run
    of this folder stopped, or to begin where there is nothing yet.

    Returns:
        `dict`: test metrics of `deco_ce` and of the floors.
    """
    started = time.time()
    set_seed(args.seed)
    data = prepare_data(args)
    sids = prepare_sids(args, data)
    split = data.split
    model, processor = build_model(args, sids, split.catalog)
    evaluation = {"max_history_length": args.max_history_length, "cold_targets": args.cold_targets}
    trainer = DecoTrainer(
        model=model,
        args=args,
        train_dataset=SequenceWindows(split.train, args.max_history_length),
        data_collator=SIDCollator(sids.codes),
        evaluator=Evaluator(_sample(split.validation, args), split.item_counts, split.catalog, ks=(10,), **evaluation),
        catalog=split.catalog,
        num_beams=args.validation_beams,
        callbacks=[EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else [],
    )
    checkpoint = args.resume_from_checkpoint
    if checkpoint == "last":
        checkpoint = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=checkpoint)
    test = Evaluator(split.test, split.item_counts, split.catalog, ks=tuple(args.cutoffs), **evaluation)
    metrics = {"deco_ce": trainer.test(test, args.num_beams)}
    if trainer.is_world_process_zero():
        metrics |= floor_metrics(split, split.test, data.embeddings, ks=tuple(args.cutoffs), **evaluation)
        _write_run(args, trainer, processor, metrics, time.time() - started)
    return metrics


def _sample(examples, args):
    """Validation users drawn once for a whole run."""
    if not args.validation_examples or len(examples) <= args.validation_examples:
        return examples
    chosen = np.random.default_rng(args.seed).choice(len(examples), args.validation_examples, replace=False)
    return examples.select(np.sort(chosen))


def _write_run(args, trainer: DecoTrainer, processor: DecoProcessor, metrics: dict, seconds: float) -> None:
    folder = Path(args.output_dir)
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    write_json(folder / "metrics.json", metrics)
    plot_training(trainer.state.log_history, folder / "training.png")
    if args.results_file:
        add_result_row(args, metrics, trainer, seconds)


def add_result_row(args: DecoTrainingArguments, metrics: dict, trainer: DecoTrainer, seconds: float) -> None:
    """Put this run's row (and the floors') into the study's file, in place of an earlier row of the same run."""
    path = Path(args.results_file)
    rows = json.loads(path.read_text()) if path.exists() else []
    dataset = Path(args.interactions).parent.name
    for system, values in metrics.items():
        row = {"system": system, "dataset": dataset, "protocol": args.protocol, "seed": None, "metrics": values}
        if system == "deco_ce":
            row |= {
                "seed": args.seed,
                "validation_ndcg@10": trainer.state.best_metric,
                "steps": trainer.state.global_step,
                "best_step": trainer.state.best_global_step,
                "num_parameters": trainer.model.num_parameters(),
                "config": changed_arguments(args),
                "command": shlex.join(["python", *sys.argv]),
                "wall_s": round(seconds),
            }
        row["date"] = date.today().isoformat()
        same = ("system", "dataset", "protocol", "seed", "config")
        rows = [old for old in rows if any(old.get(name) != row.get(name) for name in same)] + [row]
    write_json(path, rows)


def changed_arguments(args: DecoTrainingArguments) -> dict:
    """Arguments of this project's own and those of the parent that differ from their defaults, as JSON values."""
    defaults, own = DecoTrainingArguments(), DecoTrainingArguments.__annotations__
    skipped = {"output_dir", "logging_dir", "results_file", "resume_from_checkpoint", "disable_tqdm", "run_name"}
    values = {}
    for item in fields(args):
        value = getattr(args, item.name)
        value = getattr(value, "value", value)  # enumerations
        default = getattr(defaults, item.name)
        if item.name not in skipped and (item.name in own or value != getattr(default, "value", default)):
            values[item.name] = value if isinstance(value, str | int | float | bool | list | None) else str(value)
    return values


def write_json(path: Path, content) -> None:
    """Write JSON to a temporary file, then put it in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
