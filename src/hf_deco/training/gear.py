"""A GEAR run: from a log with roles to a model, its index, and its curve over the periods of the stream."""

from __future__ import annotations

import copy
import json
import shlex
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from transformers import set_seed

from ..card_facts import count_parameters
from ..data.events import EventLog, read_event_log, read_item_texts
from ..data.gear_batches import GearCollator
from ..data.grocery import prepare_grocery_stream
from ..data.requests import Requests
from ..data.roles import read_roles
from ..evaluation.next_period import NextPeriodEvaluator
from ..model_card import CARD, write_model_card
from ..models.configuration_gear import LOSS_WEIGHTS, GearConfig
from ..models.modeling_gear import GearForSIDRetrieval
from .checkpoints import RUN_FILE, find_checkpoint, finished_run
from .gear_arguments import GROCERY, GearTrainingArguments
from .gear_checkpoint import make_processor, save_gear
from .gear_index import IndexPublisher
from .gear_stream import RequestStream
from .gear_trainer import FROZEN_FILE, STREAM_FILE, GearTrainer
from .preparation import prepare_embeddings
from .results import add_rows, changed_arguments, read_rows, write_json

PREFIX = "eval_"
# Root mean square of content embeddings as the model reads them. Rows of length 1, as embedders give them, are so
# small that the signal of a user dies in the tower, and all users get the same items; much larger ones drown the
# categories beside them.
CONTENT_RMS = 0.3
# What an untrained floor depends on.
_FLOOR_OPTIONS = ("log", "min_purchases", "eval_users", "cutoffs", "ltr_steps", "rq_steps", "max_steps")
_FLOOR_OPTIONS += ("per_device_train_batch_size",)


def train_gear(args: GearTrainingArguments) -> dict[str, dict[str, float]]:
    """Train on a stream, evaluate every period before it is trained on, and write the run's folder.

    `output_dir` ends with `model/` (the checkpoint that `AutoModel` and `AutoProcessor` open, with the last generation
    of the index as `index/` and a card), `index/` (the generations), `run.json`, and the resumable `checkpoint-*`. Set
    `resume_from_checkpoint` to `"last"` to go on where a run of this folder stopped, or to begin where there is nothing
    yet; a finished one is left as it is.

    Args:
        args ([`GearTrainingArguments`]): All options.

    Returns:
        `dict`: metrics of the run, under `args.system`, and of the floors: means over the periods, see `summarise`.

    Raises:
        FileNotFoundError, ValueError: For options, files or data that no run could use; before training begins.
    """
    started, folder, options = time.time(), Path(args.output_dir), changed_arguments(args)
    finished = finished_run(args)
    if finished is None:
        checkpoint = find_checkpoint(args)
        if args.results_file:
            read_rows(args.results_file)  # what could not be added to is refused before a long run
        trainer = make_trainer(args, checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)
        model, log = trainer.accelerator.unwrap_model(trainer.model), trainer.stream.log
        num_items = log.num_known(_last_period(trainer))
        trainer.publisher.publish(model, num_items, trainer.frozen_codes)
        if not trainer.is_world_process_zero():
            return {}
        embedder = args.embedding_model if args.embeddings is None else None
        processor = make_processor(log, model.config, num_items, embedder)
        save_gear(folder / "model", model, processor, trainer.publisher.folder)
        rows = _make_rows(args, options, trainer)
        rows[0] |= {"wall_s": round(time.time() - started), "resumed": checkpoint is not None}
        if not write_model_card(folder / "model", rows):
            print(f"{folder / 'model' / CARD} was edited: it stays as it is.", flush=True)
        finished = {"options": options, "metrics": {row["system"]: row["metrics"] for row in rows}, "rows": rows}
        write_json(folder / RUN_FILE, finished)
    if args.results_file and args.process_index == 0:
        add_rows(args.results_file, finished["rows"])
    return finished["metrics"]


def make_trainer(args: GearTrainingArguments, checkpoint: str | None = None) -> GearTrainer:
    """All parts of a run, at the state of a checkpoint where one is given."""
    set_seed(args.seed)
    log = prepare_stream(args)
    drawn = args.num_positives, args.num_negatives, args.num_popular
    requests = Requests(log, tuple(args.history_lengths), *drawn, seed=args.seed)
    stream = RequestStream(requests, args.per_device_train_batch_size, args.world_size)
    args = copy.copy(args)
    args.max_steps = _count_steps(args, stream)
    if checkpoint is None:
        model = start_scores_at_zero(GearForSIDRetrieval(make_config(args, log)))
    else:  # its catalog has a size of its own
        model = GearForSIDRetrieval.from_pretrained(checkpoint)
        stream.load_state_dict(json.loads((Path(checkpoint) / STREAM_FILE).read_text(encoding="utf-8")))
    collator = GearCollator(log, args.min_grade, args.weighted, args.num_same_sid, args.seed)
    evaluator = NextPeriodEvaluator(
        log,
        requests,
        collator,
        num_users=args.eval_users,
        ks=args.cutoffs,
        num_beams=args.num_beams,
        per_sid_limit=args.per_sid_limit,
        rerank=args.reranker,
    )
    publisher = IndexPublisher(Path(args.output_dir) / "index", collator, args.precision, write=args.process_index == 0)
    trainer = GearTrainer(
        model=model, args=args, stream=stream, collator=collator, evaluator=evaluator, publisher=publisher
    )
    if checkpoint is not None and (frozen := Path(checkpoint) / FROZEN_FILE).exists():
        trainer.frozen_codes = np.load(frozen, allow_pickle=False)
    return trainer


def prepare_stream(args: GearTrainingArguments) -> EventLog:
    """The log that the arguments name, with the embeddings of its items; made on the first call, and kept."""
    if args.log == GROCERY:
        with args.main_process_first(desc="preparing the grocery log"):
            roles = read_roles(prepare_grocery_stream(Path(args.data_dir), args.min_purchases))
    else:
        roles = read_roles(args.log)
    items, shared = read_item_texts(roles.items), copy.copy(args)
    # A table is embedded once for all runs; another cut of it has a folder of its own.
    shared.output_dir = str(Path(args.data_dir) / f"items{len(items)}")
    embeddings = prepare_embeddings(shared, items, resume=True)
    return read_event_log(roles, items, embeddings)


def make_config(args: GearTrainingArguments, log: EventLog) -> GearConfig:
    """Configuration of the model for a log.

    Raises:
        ValueError: If `history_lengths` does not fit the log's behaviours.
    """
    if len(args.history_lengths) != len(log.behaviors):
        raise ValueError(
            f"`history_lengths` {args.history_lengths} must have a length for each of {', '.join(log.behaviors)}."
        )
    weights = dict(zip(LOSS_WEIGHTS, args.loss_weights, strict=True))
    return GearConfig(
        content_size=log.content.shape[1],
        content_scale=CONTENT_RMS / float(np.sqrt(np.square(log.content, dtype=np.float64).mean())),
        item_features=[feature.entry for feature in log.item_features],
        user_features=[feature.entry for feature in log.user_features],
        behaviors=[
            {"name": name, "length": length} for name, length in zip(log.behaviors, args.history_lengths, strict=True)
        ],
        feature_size=args.feature_size,
        tower_hidden_size=args.tower_hidden_size,
        tower_size=args.tower_size,
        codebook_size=args.codebook_sizes,
        code_size=args.code_size,
        quantizer=args.quantizer_method,
        num_decoder_layers=args.decoder_layers,
        num_attention_heads=args.num_heads,
        head_dim=args.head_dim,
        intermediate_size=args.intermediate_size,
        loss_weights=weights if args.reranker else weights | {"rerank": 0.0},
        gain=args.gain,
        initializer_range=args.initializer_range,
    )


def start_scores_at_zero(model: GearForSIDRetrieval) -> GearForSIDRetrieval:
    """A fresh model whose users' vectors are zeros.

    The ranking losses of random scores are lowest where all scores are alike. Their first gradients would make all
    items alike, and with them what is quantised; so users learn first what tells items apart.
    """
    for layer in (model.user_tower.out_proj, model.decoder.rerank_head.down_proj):
        torch.nn.init.zeros_(layer.weight)
    return model


def _count_steps(args: GearTrainingArguments, stream: RequestStream) -> int:
    """Steps of the run, after the schedule is checked.

    Raises:
        ValueError: If the stream or the items that are known in time are too few for it.
    """
    steps = stream.num_steps if args.max_steps < 0 else args.max_steps
    if steps > stream.num_steps:
        raise ValueError(f"`max_steps` is {steps}, but the stream is over after {stream.num_steps}: it is read once.")
    if args.ltr_steps + args.rq_steps >= steps:
        raise ValueError(
            f"`ltr_steps` ({args.ltr_steps}) and `rq_steps` ({args.rq_steps}) leave the generator none of {steps} "
            "steps: shorten them."
        )
    known, needed = stream.log.num_known(stream.period_at(args.ltr_steps)), max(args.codebook_sizes)
    if known < needed:
        raise ValueError(
            f"`codebook_sizes` {args.codebook_sizes} need {needed} items when the quantizer begins, but after "
            f"`ltr_steps` ({args.ltr_steps}) {known} are known: lengthen it, or take smaller codebooks."
        )
    return steps


def _last_period(trainer: GearTrainer) -> int:
    return trainer.stream.period_at(trainer.state.global_step - 1)


def curve(log_history: list[dict]) -> list[dict]:
    """What evaluations found, one object a period."""
    found = [entry for entry in log_history if f"{PREFIX}period" in entry]
    return [
        {"step": entry["step"]} | {name[len(PREFIX) :]: entry[name] for name in entry if name.startswith(PREFIX)}
        for entry in found
    ]


def summarise(points: list[dict]) -> dict[str, float]:
    """Means over the periods of a curve; of cold items, over all their targets."""
    names = [name for name in dict.fromkeys(name for point in points for name in point)]
    cold = "cold/num_targets"
    metrics = {}
    for name in names:
        if name in ("step", "period") or not any(name in point for point in points):
            continue
        there = [point for point in points if name in point]
        if name == cold:
            metrics[name] = sum(point[cold] for point in there)
        elif name.startswith("cold/"):
            metrics[name] = sum(point[name] * point[cold] for point in there) / sum(point[cold] for point in there)
        else:
            metrics[name] = sum(point[name] for point in there) / len(there)
    return metrics | {"num_periods": len(points)}


def _make_rows(args: GearTrainingArguments, options: dict, trainer: GearTrainer) -> list[dict]:
    """The run's row and those of the floors, over the same periods and users."""
    common = {"dataset": args.log if args.log == GROCERY else Path(args.log).stem, "protocol": "stream"}
    points = curve(trainer.state.log_history)
    systems = {args.system: points}
    for point in points:
        for name, metrics in trainer.evaluator.floors(point["period"]).items():
            systems.setdefault(name, []).append({"period": point["period"]} | metrics)
    rows = []
    for system, found in systems.items():
        row = {"system": system, **common, "seed": None, "metrics": summarise(found), "curve": found}
        row["config"] = {name: options[name] for name in _FLOOR_OPTIONS if name in options}
        if system == args.system:
            row |= {
                "seed": args.seed,
                "steps": trainer.state.global_step,
                "num_parameters": trainer.model.num_parameters(),
                "parameters": count_parameters(trainer.accelerator.unwrap_model(trainer.model)),
                "data": trainer.stream.log.summary(),
                "config": options,
                "command": shlex.join(["python", *sys.argv]),
            }
        rows.append(row | {"date": date.today().isoformat()})
    return rows
