"""Train a list of models under one protocol, their teachers first, and put them side by side.

    OMP_NUM_THREADS=1 python recipes/compare.py recipes/configs/compare_beauty_temporal.yaml

The YAML file names the study, options that all runs share, and the runs: a `system`, its own `options`, the `teacher`
it is distilled from, and `seeds` where they differ from the study's. All runs use one SID table. A study can be stopped
at any time: the same command goes on where it was. It writes one row per run and floor to
`recipes/results/<study>.json`, the speed of every system, timed in turn on the same users, to `<study>_speed.json`, a
Markdown table to `<study>.md`, and the plot of accuracy against throughput to `<study>.png`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import yaml
from transformers import AutoModel, set_seed

from hf_deco.data.collators import ExampleDataset, SIDCollator
from hf_deco.evaluation.plots import plot_tradeoff
from hf_deco.items.sid_table import SIDTable
from hf_deco.training import DecoTrainingArguments, train
from hf_deco.training.preparation import prepare_embeddings, prepare_log, prepare_sids
from hf_deco.training.results import read_rows, write_json

RESULTS = Path(__file__).parent / "results"
STUDY_KEYS = {"study", "output_dir", "seeds", "options", "runs", "paper", "speed"}
RUN_KEYS = {"system", "options", "teacher", "seeds"}
COLUMNS = ("ndcg@10", "recall@50", "recall@100", "repeat/ndcg@10", "new/ndcg@10", "head/ndcg@10", "tail/ndcg@10")
COLUMNS += ("gate/mean", "gate/repeat", "gate/new", "gate/auc")


def read_study(path: Path) -> dict:
    """A study's YAML file, its keys and teachers checked."""
    study = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(study, dict) or {"study", "output_dir", "seeds", "options", "runs"} - set(study):
        raise ValueError(f"{str(path)!r} must name `study`, `output_dir`, `seeds`, `options` and `runs`.")
    unknown = set(study) - STUDY_KEYS | {key for run in study["runs"] for key in set(run) - RUN_KEYS}
    if unknown:
        raise ValueError(f"{str(path)!r} holds unknown keys: {', '.join(sorted(unknown))}.")
    known: dict[str, list[int]] = {}
    for run in study["runs"]:
        name, seeds, teacher = run.get("system"), run.get("seeds", study["seeds"]), run.get("teacher")
        if name is None or name in known:
            raise ValueError(f"every entry of `runs` needs a `system` of its own, got {name!r} in {run}.")
        if teacher is not None and not set(seeds) <= set(known.get(teacher, ())):
            raise ValueError(
                f"the teacher of {name!r}, {teacher!r}, must stand before it in `runs`, with its seeds {seeds}."
            )
        options = study["options"] | run.get("options", {})
        DecoTrainingArguments(**options, output_dir=study["output_dir"])  # what no run could use is refused here
        known[name] = seeds
    return study


def shared_options(study: dict) -> dict:
    """What all runs use: the SID table and the item embeddings, made on the first call."""
    folder = Path(study["output_dir"])
    if "sids" not in study["options"] and not (folder / "sids").exists():
        args = DecoTrainingArguments(**study["options"], output_dir=study["output_dir"], seed=study["seeds"][0])
        set_seed(args.seed)
        items, _, split = prepare_log(args)
        prepare_sids(args, items, split, prepare_embeddings(args, items, resume=True))
    shared = {"sids": str(folder / "sids"), "embeddings": str(folder / "item_embeddings.npy")}
    return shared | study["options"]


def run_folder(study: dict, system: str, seed: int) -> Path:
    return Path(study["output_dir"]) / f"{system.replace('/', '_')}-seed{seed}"


def train_all(study: dict, results_file: Path) -> None:
    """Every run of every seed that is not finished yet, teachers before students."""
    shared = shared_options(study)
    for run in study["runs"]:
        for seed in run.get("seeds", study["seeds"]):
            folder = run_folder(study, run["system"], seed)
            options = shared | run.get("options", {}) | {"seed": seed, "system": run["system"]}
            if run.get("teacher") is not None:
                options["teacher"] = str(run_folder(study, run["teacher"], seed) / "model")
            print(f"== {run['system']}, seed {seed}: {folder}", flush=True)
            train(
                DecoTrainingArguments(
                    **options,
                    output_dir=str(folder),
                    results_file=str(results_file),
                    resume_from_checkpoint="last",
                )
            )


def measure_speed(study: dict, batch_size: int = 32, num_beams: int = 100, rounds: int = 7) -> list[dict]:
    """Whole retrieval of the same test users by every system, one batch each in turn, in a new order every round."""
    args = DecoTrainingArguments(**study["options"], output_dir=study["output_dir"])
    _, _, split = prepare_log(args)
    shared = shared_options(study)
    batch_size = min(batch_size, len(split.test))
    models, batches = {}, {}
    for run in study["runs"]:
        folder = run_folder(study, run["system"], run.get("seeds", study["seeds"])[0])
        model = AutoModel.from_pretrained(folder / "model").eval()
        examples = ExampleDataset(split.test.truncate(model.config.max_history_length))
        codes = SIDTable.load((shared | run.get("options", {}))["sids"]).codes
        batch = SIDCollator(codes)([examples[index] for index in range(batch_size)])
        batch.pop("target_items")
        models[run["system"]], batches[run["system"]] = model, batch
    laps: dict[str, list[float]] = {system: [] for system in models}
    order = list(models)
    # The whole output: with sequences alone, no reranking head would be asked.
    search = {"num_beams": num_beams, "num_return_sequences": num_beams, "return_dict_in_generate": True}
    for turn in range(rounds + 1):  # the first round warms up
        random.Random(turn).shuffle(order)
        for system in order:
            start = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
                models[system].generate(**batches[system], **search)
            if turn:
                laps[system].append(time.perf_counter() - start)
    rows = []
    for system, seconds in laps.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "system": system,
                "catalog": Path(args.interactions).parent.name,
                "num_items": models[system].config.num_items,
                "history_length": models[system].config.max_history_length,
                "batch_size": batch_size,
                "num_beams": num_beams,
                "skip_forced": True,
                "dtype": "bfloat16 autocast" if args.bf16 else "float32",
                "compiled": False,
                "threads": torch.get_num_threads(),
                "total_ms_per_user": 1000 * median / batch_size,
                "p95_ms": 1000 * sorted(seconds)[int(0.95 * (len(seconds) - 1))],
                "users_per_s": batch_size / median,
                "date": date.today().isoformat(),
            }
        )
    return rows


def summarise(study: dict, rows: list[dict], speeds: list[dict]) -> str:
    """The table of a study: mean and deviation over seeds, the paper's figures where they are given, the floors."""
    by_system: dict[str, list[dict]] = {}
    length = DecoTrainingArguments(**study["options"]).max_history_length
    for row in rows:
        if row["seed"] is not None or row.get("config", {}).get("max_history_length", length) == length:
            by_system.setdefault(row["system"], []).append(row["metrics"])
    columns = [name for name in COLUMNS if any(name in metrics for found in by_system.values() for metrics in found)]
    speed = {row["system"]: row["users_per_s"] for row in speeds}
    paper = study.get("paper", {})
    head = ["system", "seeds", *columns, "users/s"] + (["paper ndcg@10 / recall@100"] if paper else [])
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for system, found in by_system.items():
        cells = [system, str(len(found)) if system in speed else "", *(_cell(found, name) for name in columns)]
        cells.append(f"{speed[system]:.0f}" if system in speed else "")
        if paper:
            given = paper.get(system)
            cells.append("" if given is None else f"{given['ndcg@10']:.4f} / {given['recall@100']:.4f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: list[dict], name: str) -> str:
    values = [metrics[name] for metrics in found if name in metrics]
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def draw_plane(rows: list[dict], speeds: list[dict], path: Path) -> None:
    """Accuracy of every timed system, the mean over its seeds, against its throughput."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row["metrics"]["ndcg@10"])
    points = {row["system"]: (row["users_per_s"], statistics.mean(found[row["system"]])) for row in speeds}
    plot_tradeoff(points, path)


def main(path: Path, results: Path) -> None:
    study = read_study(path)
    results_file = results / f"{study['study']}.json"
    train_all(study, results_file)
    speeds = measure_speed(study, **study.get("speed", {}))
    write_json(results / f"{study['study']}_speed.json", speeds)
    rows = read_rows(results_file)
    table = summarise(study, rows, speeds)
    (results / f"{study['study']}.md").write_text(table + "\n", encoding="utf-8")
    draw_plane(rows, speeds, results / f"{study['study']}.png")
    print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the results (default: recipes/results)"
    )
    arguments = parser.parse_args()
    main(arguments.study, arguments.results)
