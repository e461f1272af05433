"""One run, from log and item table to a tested checkpoint folder; and the test of a checkpoint that is there."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import EarlyStoppingCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint

from ..data.collators import SequenceWindows, SIDCollator
from ..data.sequences import Examples
from ..evaluation.evaluator import Evaluator
from ..evaluation.floors import floor_metrics
from ..evaluation.plots import plot_training
from ..models.modeling_deco import DecoForSIDRetrieval
from ..models.processing_deco import DecoProcessor
from .arguments import DecoTrainingArguments
from .preparation import build_model, prepare_data, prepare_sids
from .results import add_result_rows, write_json
from .trainer import DecoTrainer


def train(args: DecoTrainingArguments) -> dict[str, dict[str, float]]:
    """Train Deco-CE, test it beside the untrained floors, and write the run's folder.

    `output_dir` ends with `model/` (the checkpoint that `AutoModel` and `AutoProcessor` open), `sids/`, `metrics.json`
    (one object per system), `training.png` and the resumable `checkpoint-*`. Set `resume_from_checkpoint` to `"last"`
    to go on where a run of this folder stopped, or to begin where there is nothing yet.

    Args:
        args ([`DecoTrainingArguments`]): All options.

    Returns:
        `dict`: test metrics of `deco_ce` and, on the main process, of the floors.
    """
    started = time.time()
    set_seed(args.seed)
    data = prepare_data(args)
    sids = prepare_sids(args, data)
    split = data.split
    model, processor = build_model(args, sids, split.catalog)
    trainer = DecoTrainer(
        model=model,
        args=args,
        train_dataset=SequenceWindows(split.train, args.max_history_length),
        data_collator=SIDCollator(sids.codes),
        evaluator=make_evaluator(args, _sample(split.validation, args), split, ks=(10,)),
        catalog=split.catalog,
        num_beams=args.validation_beams,
        callbacks=[EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else [],
    )
    checkpoint = args.resume_from_checkpoint
    if checkpoint == "last":
        checkpoint = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = {"deco_ce": trainer.test(make_evaluator(args, split.test, split, ks=args.cutoffs), args.num_beams)}
    if trainer.is_world_process_zero():
        metrics |= floor_metrics(split, split.test, data.embeddings, **_evaluation_options(args, args.cutoffs))
        folder = Path(args.output_dir)
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
        plot_training(trainer.state.log_history, folder / "training.png")
        write_json(folder / "metrics.json", metrics)
        if args.results_file:
            add_result_rows(args, metrics, trainer, time.time() - started)
    return metrics


def evaluate(args: DecoTrainingArguments, checkpoint: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Test a checkpoint on a log, beside the untrained floors over the same catalog.

    Args:
        args ([`DecoTrainingArguments`]): The log, its split, and how to judge.
        checkpoint (`str` or path): Folder or Hub repository of model and processor.

    Returns:
        `dict`: test metrics of `deco_ce` and of the floors.

    Raises:
        ValueError: If the item table holds items that the checkpoint does not know, or lacks items of its catalog.
    """
    data = prepare_data(args)
    model, processor = DecoForSIDRetrieval.from_pretrained(checkpoint), DecoProcessor.from_pretrained(checkpoint)
    rows = np.asarray(processor.rows_of(data.items.item_ids.tolist()))
    item_of_row = np.full(len(processor.item_ids), -1)
    item_of_row[rows] = np.arange(len(rows))
    catalog = item_of_row[: processor.num_items]
    if (catalog < 0).any():
        missing = processor.item_ids[int(np.argmax(catalog < 0))]
        raise ValueError(
            f"`items` lacks {int((catalog < 0).sum())} items of the checkpoint's catalog, such as {missing!r}: "
            "give the table that it was trained with."
        )
    args.max_history_length = model.config.max_history_length
    split = replace(data.split, catalog=np.sort(catalog))
    evaluator = make_evaluator(args, split.test, split, ks=args.cutoffs)
    trainer = DecoTrainer(
        model=model,
        args=args,
        data_collator=SIDCollator(processor.item_codes.numpy()[rows]),
        evaluator=evaluator,
        catalog=catalog,
    )
    metrics = {"deco_ce": trainer.test(evaluator, args.num_beams)}
    return metrics | floor_metrics(split, split.test, data.embeddings, **_evaluation_options(args, args.cutoffs))


def make_evaluator(args: DecoTrainingArguments, examples: Examples, split, ks) -> Evaluator:
    """Evaluator of examples of a split, as the arguments say."""
    return Evaluator(examples, split.item_counts, split.catalog, **_evaluation_options(args, ks))


def _evaluation_options(args: DecoTrainingArguments, ks) -> dict:
    return {"ks": tuple(ks), "max_history_length": args.max_history_length, "cold_targets": args.cold_targets}


def _sample(examples: Examples, args: DecoTrainingArguments) -> Examples:
    """Validation users, drawn once for a whole run."""
    if not args.validation_examples or len(examples) <= args.validation_examples:
        return examples
    chosen = np.random.default_rng(args.seed).choice(len(examples), args.validation_examples, replace=False)
    return examples.select(np.sort(chosen))
