"""One run, from log and item table to a tested checkpoint folder; and the test of a checkpoint that is there."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import AutoModel, EarlyStoppingCallback, set_seed

from ..card_facts import describe_run
from ..data.collators import SequenceWindows, SIDCollator
from ..data.sequences import Examples
from ..data.splits import Split
from ..dataset_card import write_sid_card
from ..evaluation.evaluator import Evaluator
from ..evaluation.floors import floor_metrics
from ..evaluation.plots import plot_training
from ..items.quality import format_report
from ..items.sid_table import SIDTable
from ..model_card import write_model_card
from ..models.modeling_sid import SIDRetrievalModel
from ..models.processing_deco import DecoProcessor, check_pair
from .arguments import DecoTrainingArguments
from .checkpoints import (
    RUN_FILE,
    check_data_options,
    check_same_catalog,
    find_checkpoint,
    finished_run,
    save_data_options,
)
from .distillation import DistillationTrainer, check_teacher, init_from_teacher, load_teacher
from .preparation import (
    ScratchModels,
    check_capacity,
    check_table,
    prepare_embeddings,
    prepare_log,
    prepare_sids,
    read_embeddings,
)
from .results import add_rows, changed_arguments, make_rows, read_rows, write_json
from .trainer import DecoTrainer


def train(args: DecoTrainingArguments, models: type[ScratchModels] = ScratchModels) -> dict[str, dict[str, float]]:
    """Train a model, test it beside the untrained floors, and write the run's folder.

    `output_dir` ends with `model/` (the checkpoint that `AutoModel` and `AutoProcessor` open), `metrics.json` (one
    object per system), `training.png`, the resumable `checkpoint-*`, and what was made of the items:
    `item_embeddings.npy` and `sids/`, unless they were given. `model/` and `sids/` hold their cards as `README.md`. Set
    `resume_from_checkpoint` to `"last"` to go on where a run of this folder stopped, or to begin where there is nothing
    yet; a finished one is left as it is.

    Args:
        args ([`DecoTrainingArguments`]): All options.
        models (`type`, *optional*): Where the model comes from; [`ScratchModels`] by default.

    Returns:
        `dict`: test metrics of the model, under `args.system`, and, on the main process, of the floors.

    Raises:
        ValueError: For options, files or data that no run could use; before anything is written.
    """
    started, folder = time.time(), Path(args.output_dir)
    finished = finished_run(args)
    if finished is not None:
        return _report_finished(args, finished)
    set_seed(args.seed)
    checkpoint, models = find_checkpoint(args), models(args)
    going_on = checkpoint is not None or models.begun()
    items, log, split = prepare_log(args)
    _say(args, "Log: {users:,} users, {items:,} items, {interactions:,} interactions".format(**log.summary()))
    validation = make_evaluator(args, _sample(split.validation, args), split, ks=(10,))
    test = make_evaluator(args, split.test, split, ks=args.cutoffs)
    check_ahead(args, len(items), models)
    embeddings = prepare_embeddings(args, items, resume=going_on)
    sids = prepare_sids(args, items, split, embeddings, resume=going_on)
    if checkpoint is not None:
        check_same_catalog(checkpoint, sids, split.catalog)
    if sids.report:
        _say(args, format_report(sids.report))
    model, processor = models.build(items, sids, split.catalog, embeddings)
    _say(args, f"Model: {args.system}, {model.num_parameters() / 1e6:.1f} million parameters, {model.trie}")
    trainer = _make_trainer(args, model, sids, split, validation)
    trainer.train(resume_from_checkpoint=checkpoint)
    model = models.save(trainer, folder / "model")
    if trainer.is_world_process_zero():
        processor.save_pretrained(folder / "model")
        save_data_options(folder / "model", args, split)
        plot_training(trainer.state.log_history, folder / "training.png")
    metrics = {args.system: trainer.test(test, args.num_beams)}
    if trainer.is_world_process_zero():
        metrics |= floor_metrics(split, split.test, embeddings, **_evaluation_options(args, args.cutoffs))
        rows = make_rows(args, metrics, trainer, time.time() - started, checkpoint is not None)
        rows[0] |= describe_run(args, log, split, SIDTable.load(args.sids or folder / "sids"), model)
        _write_results(args, metrics, rows)
    return metrics


def _report_finished(args: DecoTrainingArguments, finished: dict) -> dict[str, dict[str, float]]:
    """Metrics of a run that is there already; its rows go where they are asked for."""
    _say(args, f"{args.output_dir} holds this run, finished: nothing is trained.")
    if args.results_file and args.process_index == 0:
        add_rows(args.results_file, finished["rows"])
    return finished["metrics"]


def _write_results(args: DecoTrainingArguments, metrics: dict[str, dict[str, float]], rows: list[dict]) -> None:
    """What a run found: its metrics, its cards, its rows, and last the mark that it is finished."""
    folder = Path(args.output_dir)
    write_json(folder / "metrics.json", metrics)
    _write_cards(args, folder, rows)
    if args.results_file:
        add_rows(args.results_file, rows)
    write_json(folder / RUN_FILE, {"options": changed_arguments(args), "metrics": metrics, "rows": rows})


def evaluate(args: DecoTrainingArguments, checkpoint: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Test a checkpoint on a log, beside the untrained floors over the same catalog.

    Args:
        args ([`DecoTrainingArguments`]): The log, its split, and how to judge. The text floor is computed where
            `embeddings` are given.
        checkpoint (`str` or path): Folder or Hub repository of model and processor.

    Returns:
        `dict`: test metrics of the checkpoint, under the name it was trained as, and of the floors.

    Raises:
        ValueError: If the item table holds items that the checkpoint does not know, or lacks items of its catalog; if
        the
            log is split otherwise than for its training.
    """
    model, processor = AutoModel.from_pretrained(checkpoint), DecoProcessor.from_pretrained(checkpoint)
    check_pair(model, processor)
    items, _, split = prepare_log(args)
    system = check_data_options(checkpoint, args, split)
    embeddings = None if args.embeddings is None else read_embeddings(args.embeddings, len(items))
    rows = np.asarray(processor.rows_of(items.item_ids.tolist()))
    item_of_row = np.full(len(processor.item_ids), -1)
    item_of_row[rows] = np.arange(len(rows))
    catalog = item_of_row[: processor.num_items]
    if (catalog < 0).any():
        missing = processor.item_ids[int(np.argmax(catalog < 0))]
        raise ValueError(
            f"`items` lacks {int((catalog < 0).sum())} items of the checkpoint's catalog, such as {missing!r}: "
            "give the table that it was trained with."
        )
    args = copy.copy(args)  # the checkpoint decides how much of a history is read
    args.max_history_length = model.config.max_history_length
    split = replace(split, catalog=np.sort(catalog))
    evaluator = make_evaluator(args, split.test, split, ks=args.cutoffs)
    with tempfile.TemporaryDirectory() as args.output_dir:  # a trainer makes its folder; nothing is kept in it
        trainer = DecoTrainer(
            model=model,
            args=args,
            data_collator=SIDCollator(processor.item_codes.numpy()[rows]),
            evaluator=evaluator,
            catalog=catalog,
        )
        metrics = {system: trainer.test(evaluator, args.num_beams)}
    return metrics | floor_metrics(split, split.test, embeddings, **_evaluation_options(args, args.cutoffs))


def make_evaluator(args: DecoTrainingArguments, examples: Examples, split: Split, ks) -> Evaluator:
    """Evaluator of examples of a split, as the arguments say."""
    return Evaluator(examples, split.item_counts, split.catalog, **_evaluation_options(args, ks))


def _evaluation_options(args: DecoTrainingArguments, ks) -> dict:
    return {"ks": tuple(ks), "max_history_length": args.max_history_length, "cold_targets": args.cold_targets}


def check_ahead(args: DecoTrainingArguments, num_items: int, models: ScratchModels) -> None:
    """What can be told of the options before the first long step."""
    if args.sids is None:
        check_capacity(args.codebook_sizes, num_items, args.collisions)
        config = models.config(tuple(args.codebook_sizes))
    else:
        table = SIDTable.load(args.sids)
        check_table(args, table)
        config = models.config(table.codebook_sizes)
    if args.teacher is not None:
        check_teacher(args.teacher, config)
    if args.results_file:
        read_rows(args.results_file)


def _make_trainer(
    args: DecoTrainingArguments, model: SIDRetrievalModel, sids: SIDTable, split: Split, validation: Evaluator
) -> DecoTrainer:
    """The trainer of a run: with cross-entropy alone, or with a teacher."""
    catalog_rows = None
    if args.reranker:
        catalog_rows = np.full(len(sids), -1)
        catalog_rows[split.catalog] = np.arange(len(split.catalog))
    options = {
        "model": model,
        "args": args,
        "train_dataset": SequenceWindows(split.train, args.max_history_length),
        "data_collator": SIDCollator(sids.codes, catalog_rows),
        "evaluator": validation,
        "catalog": split.catalog,
        "num_beams": args.validation_beams,
        "callbacks": [EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else [],
    }
    if args.teacher is None:
        return DecoTrainer(**options)
    teacher = load_teacher(args.teacher, model)
    if args.init_from_teacher:
        init_from_teacher(model, teacher)
    return DistillationTrainer(**options, teacher=teacher, temperature=args.temperature, objective=args.objective)


def _write_cards(args: DecoTrainingArguments, folder: Path, rows: list[dict]) -> None:
    """A card beside the model and, where the run made it, one in the SID table; a user's own ones stay."""
    if not write_model_card(folder / "model", rows):
        _say(args, f"{folder / 'model' / 'README.md'} was edited: it stays as it is.")
    if args.sids is None:
        texts = args.embedding_model if args.embeddings is None else None
        write_sid_card(folder / "sids", name=rows[0]["dataset"], method="residual k-means", embedding_model=texts)


def _say(args: DecoTrainingArguments, text: str) -> None:
    if args.process_index == 0:
        print(text, flush=True)


def _sample(examples: Examples, args: DecoTrainingArguments) -> Examples:
    """Validation users, drawn once for a whole run."""
    if not args.validation_examples or len(examples) <= args.validation_examples:
        return examples
    chosen = np.random.default_rng(args.seed).choice(len(examples), args.validation_examples, replace=False)
    return examples.select(np.sort(chosen))
