"""Rows of a study: what was run, how, and what it gave."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import fields
from datetime import date
from pathlib import Path

from .arguments import DecoTrainingArguments, own_options

# Where a run writes and how it talks do not change what it gives.
_INCIDENTAL = {"output_dir", "logging_dir", "results_file", "resume_from_checkpoint", "disable_tqdm", "run_name"}
_INCIDENTAL |= {"hub_token"}  # and a secret never stands in a file of results
# What an untrained floor, and the slices it is judged on, depend on.
_FLOOR_OPTIONS = ("max_history_length", "cold_targets", "drop_duplicates", "collapse_repeats", "k_core")


def make_rows(args: DecoTrainingArguments, metrics: dict, trainer, seconds: float, resumed: bool) -> list[dict]:
    """Rows of a run: the model's, and the floors' with what they depend on.

    Args:
        args ([`DecoTrainingArguments`]): Options of the run.
        metrics (`dict`): Test metrics of every system.
        trainer ([`DecoTrainer`]): The trainer after training.
        seconds (`float`): Wall-clock time since the run was started, or last gone on with.
        resumed (`bool`): Whether it was gone on with.
    """
    options = changed_arguments(args)
    common = {"dataset": Path(args.interactions).resolve().parent.name, "protocol": args.protocol}
    rows = []
    for system, values in metrics.items():
        row = {"system": system, **common, "seed": None, "metrics": values}
        row["config"] = {name: options[name] for name in _FLOOR_OPTIONS}
        if system == args.system:
            row |= {
                "seed": args.seed,
                "validation_ndcg@10": trainer.state.best_metric,
                "steps": trainer.state.global_step,
                "best_step": trainer.state.best_global_step,
                "num_parameters": trainer.model.num_parameters(),
                "config": options,
                "command": shlex.join(["python", *sys.argv]),
                "wall_s": round(seconds),
                "resumed": resumed,
            }
        rows.append(row | {"date": date.today().isoformat()})
    return rows


def add_rows(path: str | Path, rows: list[dict]) -> None:
    """Put rows into a study's file, in place of earlier rows of the same runs."""
    kept = [old for old in read_rows(path) if not any(_same_run(old, row) for row in rows)]
    write_json(Path(path), kept + rows)


def _same_run(first: dict, second: dict) -> bool:
    return all(first.get(name) == second.get(name) for name in ("system", "dataset", "protocol", "seed", "config"))


def read_rows(path: str | Path) -> list[dict]:
    """Rows of a study's file, none where there is no file yet; a `ValueError` names one that holds something else."""
    path = Path(path)
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"`results_file` {str(path)!r} is no JSON ({error}): repair it, or name another.") from error
    if not isinstance(rows, list):
        raise ValueError(f"`results_file` {str(path)!r} must hold a list of rows, got {type(rows).__name__}.")
    return rows


def changed_arguments(args: DecoTrainingArguments) -> dict:
    """Options of this project, and those of the parent class that differ from their defaults, as JSON values."""
    defaults, own = type(args)(), own_options(type(args))
    values = {}
    for item in fields(args):
        value, default = (getattr(source, item.name) for source in (args, defaults))
        value, default = (getattr(entry, "value", entry) for entry in (value, default))  # enumerations
        if item.name not in _INCIDENTAL and (item.name in own or value != default):
            values[item.name] = value if isinstance(value, str | int | float | bool | list | None) else str(value)
    return values


def write_json(path: Path, content) -> None:
    """Write JSON to a temporary file, then put it in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
