"""Train GEAR on a log that moves in time, and judge it on every week before it is trained on.

    OMP_NUM_THREADS=1 python recipes/train_gear.py recipes/configs/gear_grocery.yaml
    OMP_NUM_THREADS=1 python recipes/train_gear.py recipes/configs/gear_grocery.yaml --ablation no_reranker --seed 1
    ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 \\
        recipes/train_gear.py recipes/configs/gear_grocery.yaml

Every option of `hf_deco.training.gear_arguments.GearTrainingArguments` and of `transformers.TrainingArguments` can
stand in the file or on the command line; `--help` lists them. `--ablation` names what is left out: rq, basis_rq (the
tokenizer), no_reranker, no_weight, frozen_sids, no_refresh. A run has a folder of its own below `output_dir`, named
after its system and seed; the same command goes on where it stopped. Its row, and those of the floors, go to
`results_file`; beside it are written the table of all rows (`.md`) and the curve over the weeks (`.png`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from accelerate import PartialState

from hf_deco.evaluation.plots import plot_lines
from hf_deco.training.gear import train_gear
from hf_deco.training.gear_arguments import ABLATIONS, GearTrainingArguments
from hf_deco.training.parser import make_parser, parse_arguments
from hf_deco.training.results import read_rows

# Metrics of the table, whose cutoffs are those of the rows, and their headings.
COLUMNS = {
    "recall@{low}": "Recall@{low}",
    "ndcg@{low}": "NDCG@{low}",
    "dot/ndcg@{low}": "NDCG@{low} by u . v alone",
    "recall@{high}": "Recall@{high}",
    "ndcg@{high}": "NDCG@{high}",
    "sid/recall@{high}": "SID Recall@{high}",
    "sid/ndcg@{high}": "SID NDCG@{high}",
    "cold/recall@{high}": "cold Recall@{high}",
    "colliding": "colliding",
    "sids_changed": "SIDs changed",
    "int8/kept@{low}": "INT8 keeps @{low}",
    "int4/kept@{low}": "INT4 keeps @{low}",
}
BASE = "gear"


def read_arguments(argv: list[str]) -> GearTrainingArguments:
    """Options of the command line, with those of the ablation it names."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--ablation", choices=list(ABLATIONS))
    chosen, rest = first.parse_known_args(argv)
    options = {} if chosen.ablation is None else ABLATIONS[chosen.ablation]
    rest += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return parse_arguments(rest, make_parser(options=GearTrainingArguments, description=__doc__))


def summarise(rows: list[dict]) -> str:
    """The table of a study: means over seeds with their deviation, and the distance to GEAR in percent."""
    cutoffs = sorted(int(name.split("@")[1]) for name in rows[0]["metrics"] if name.startswith("recall@"))
    names = {
        name.format(low=cutoffs[0], high=cutoffs[-1]): heading.format(low=cutoffs[0], high=cutoffs[-1])
        for name, heading in COLUMNS.items()
    }
    systems: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["seed"] is None, row["system"])):
        systems.setdefault(row["system"], []).append(row["metrics"])
    lines = ["| system | seeds | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 2) + "|"]
    for system, found in systems.items():
        cells = [_cell(found, systems.get(BASE), name, system != BASE) for name in names]
        lines.append(f"| {system} | {len(found)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: list[dict], base: list[dict] | None, name: str, compare: bool) -> str:
    values = [metrics[name] for metrics in found if name in metrics]
    if not values:
        return ""
    cell = f"{statistics.mean(values):.4f}"
    if len(values) > 1:
        cell += f" ± {statistics.stdev(values):.4f}"
    against = [metrics[name] for metrics in base or [] if name in metrics]
    if compare and against and statistics.mean(against) > 0:
        cell += f" ({100 * (statistics.mean(values) / statistics.mean(against) - 1):+.0f} %)"
    return cell


def draw(rows: list[dict], path: Path) -> None:
    """NDCG at the first cutoff over the periods, the mean of the seeds of every system."""
    name = next(name for name in rows[0]["metrics"] if name.startswith("ndcg@"))
    values: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for point in row["curve"]:
            values.setdefault(row["system"], {}).setdefault(point["period"], []).append(point[name])
    lines = {
        system: [(period, statistics.mean(found)) for period, found in periods.items()]
        for system, periods in values.items()
    }
    plot_lines(lines, "period", f"NDCG@{name.split('@')[1]} before training on it", path, scale="linear")


def main(argv: list[str]) -> None:
    args = read_arguments(argv)
    args.output_dir = str(Path(args.output_dir) / f"{args.system.replace('/', '_')}-seed{args.seed}")
    train_gear(args)
    if args.results_file and args.process_index == 0:
        rows, path = read_rows(args.results_file), Path(args.results_file)
        table = summarise(rows)
        path.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
        draw(rows, path.with_suffix(".png"))
        print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
    # Threads of a process group that is left to the interpreter can abort it on its way out.
    PartialState().destroy_process_group()
