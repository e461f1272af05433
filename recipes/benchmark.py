"""What retrieval costs: Deco, the full backbones and what others do with the same weights, side by side.

    OMP_NUM_THREADS=1 python recipes/benchmark.py --quick
    OMP_NUM_THREADS=1 python recipes/benchmark.py --json recipes/results/benchmark_cpu.json
    OMP_NUM_THREADS=1 python recipes/benchmark.py --catalogs --cpu-time --json recipes/results/benchmark_catalog.json

Weights are random: time does not depend on them, except where a bound lets the search stop early (`num_results` below
`num_beams`), which trained weights make likelier. Every point of the grid differs from the base point (backbone L, 32
users, 100 beams, histories of 20, 4 levels, a catalog of 12,101 items) in one thing. At a point all systems take turns,
in a new order every round, on the same users; medians are over rounds. Each system is given compiled kernels and
forced levels to skip; `/unskipped` goes without the skipping. Prefill is all up to the first code, search the rest;
`deco/stored` searches from concepts that were computed before and has no prefill. With `--catalogs` the points differ
in the number of items, and all take turns. `--cpu-time` counts what one thread spends of its processor, where others
use the machine.

The floor of a row is what the machine, measured on the spot, needs for its matrix products at the rate of the best
product, or for reading the weights, whichever takes longer. Plots are written beside the JSON file; with
`--accuracies`, the rows of a study of `recipes/compare.py`, also the plane of accuracy and throughput, at the study's
backbone.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from benchmark_grid import BEST, QWEN_05B, Point, catalogs, grid, read_point
from benchmark_trie import peak_mib
from compare import draw_plane
from transformers import set_seed

from hf_deco import BackboneConfig, BackboneForSIDRetrieval, DecoConfig, DecoForSIDRetrieval
from hf_deco.evaluation.baselines.dense_masking import dense_beam_search
from hf_deco.evaluation.baselines.stock_generate import StockGenerate
from hf_deco.evaluation.plots import plot_lines
from hf_deco.models.beam_search_sid import BeamSearch
from hf_deco.models.inference_sid import EAGER, Kernels
from hf_deco.serving.engine import has_compiler, preferred_dtype
from hf_deco.training.results import read_rows, write_json

UNSKIPPED = ("/unskipped", "/dense_mask")


def synthetic_codes(num_items: int, num_codebooks: int, size: int, seed: int) -> torch.Tensor:
    """Different SIDs `(N, K)` whose trie thins out as a real catalog's does: codes of a level follow a power law that
    its prefix shifts."""
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, size + 1) ** 0.6
    popularity /= popularity.sum()
    drawn, wanted = np.zeros((0, num_codebooks), dtype=np.int32), num_items
    while len(drawn) < num_items:
        codes, prefix = np.empty((wanted, num_codebooks), dtype=np.int32), np.zeros(wanted, dtype=np.int64)
        for level in range(num_codebooks):
            rank = rng.choice(size, wanted, p=popularity)
            codes[:, level] = (rank + prefix * 7919) % size
            prefix = (prefix * size + codes[:, level] + 1) % 1_000_003
        drawn = np.unique(np.concatenate([drawn, codes]), axis=0)
        wanted = max(1000, 2 * (num_items - len(drawn)))
    return torch.from_numpy(rng.permutation(drawn)[:num_items])


class Machine:
    """What this machine does at best, in one data type."""

    def __init__(self, dtype: torch.dtype, clock: Callable[[], float]):
        rates = []
        for rows, width, columns in ((640, 640, 2560), (3200, 256, 1024), (4096, 1024, 1024)):
            left, right = torch.randn(rows, width, dtype=dtype), torch.randn(columns, width, dtype=dtype)
            seconds = min(_lap(lambda left=left, right=right: F.linear(left, right), clock) for _ in range(12))
            rates.append(2 * rows * width * columns / seconds)
        self.flops_per_s = max(rates)
        source = torch.zeros(2**28, dtype=torch.uint8)
        target = torch.empty_like(source)
        self.bytes_per_s = 2 * source.numel() / min(_lap(lambda: target.copy_(source), clock) for _ in range(5))

    def floor_s(self, multiplications: float, weight_bytes: float) -> float:
        """Seconds that so many multiply-adds and bytes of weights take at least."""
        return max(2 * multiplications / self.flops_per_s, weight_bytes / self.bytes_per_s)


def _lap(function: Callable, clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start


def clock_of(args) -> Callable[[], float]:
    """What tells the time: of the wall, or what the process has spent of its processor's."""
    return time.process_time if args.cpu_time else time.perf_counter


def build(system: str, point: Point, codes: torch.Tensor, args) -> torch.nn.Module:
    """A model of random weights that carries the catalog."""
    set_seed(args.seed)
    shape = {"codebook_size": args.codebook_size, "num_codebooks": point.num_codebooks}
    shape["history_format"] = "flat" if system == "flat_gr" else "fused"
    kind = DecoConfig if system == "deco" else BackboneConfig
    if point.backbone in ("S", "M", "L"):
        config = kind.from_preset(point.backbone, **shape)
    else:
        config = kind(text_config=QWEN_05B, **shape)
    model = (DecoForSIDRetrieval if system == "deco" else BackboneForSIDRetrieval)(config)
    model.kernels = Kernels.compiled() if args.compile else EAGER
    model = model.eval().to(args.dtype)
    model.set_catalog(codes)
    return model


class Work:
    """Counts the multiply-adds of one search, and the prefixes that it reads."""

    def __init__(self, scorer, model, point: Point):
        self.scorer, self.rows, self.candidates = scorer, 0, 0
        self.trie, self.point, self.model = model.trie, point, model

    def start(self):
        return self.scorer.start()

    def head(self, level: int):
        return self.scorer.head(level)

    def advance(self, states, rows, codes, level):
        self.rows += rows.shape[0]
        return self.scorer.advance(states, rows, codes, level)

    def multiplications(self) -> float:
        """Of the whole search: prefixes read, and first codes scored; what else is scored is little."""
        light = isinstance(self.model, DecoForSIDRetrieval)
        transformer = self.model.decoder.transformer if light else self.model.backbone
        first = self.model.config.num_concepts * self.point.batch_size if light else 0
        scored = self.point.batch_size * self.scorer.head(0).numel()
        return (self.rows + first) * _matrix_elements(transformer) + scored


def _matrix_elements(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)


def prefill_multiplications(model, point: Point) -> float:
    """Of reading histories: in the last layer, only keys and values of all tokens, and the rest at the last."""
    tokens = point.history_length * model.config.tokens_per_item
    layers = model.backbone.layers
    last = _matrix_elements(layers[-1])
    kept = sum(getattr(layers[-1].self_attn, name).weight.numel() for name in ("k_proj", "v_proj"))
    per_user = tokens * (_matrix_elements(layers) - last + kept) + last - kept
    if model.config.history_format == "fused":
        per_user += point.history_length * _matrix_elements(model.fuser.up_proj)
        per_user += point.history_length * _matrix_elements(model.fuser.down_proj)
    if isinstance(model, DecoForSIDRetrieval):
        per_user += _matrix_elements(model.concept_head)
    return point.batch_size * per_user


class Rivals:
    """The systems of one point, ready to take turns."""

    def __init__(self, point: Point, codes: torch.Tensor, args):
        self.point, self.models, self.clock = point, {}, clock_of(args)
        self.weight_bytes = torch.finfo(args.dtype).bits // 8
        for name in point.systems:
            base = "flat_gr" if name == "transformers_generate" else name.split("/")[0]
            if base not in self.models:
                self.models[base] = build(base, point, codes, args)
        generator = torch.Generator().manual_seed(args.seed)
        rows = torch.randint(0, len(codes), (point.batch_size, point.history_length), generator=generator)
        self.item_codes, self.mask = codes[rows].long(), torch.ones_like(rows)
        self.stock = StockGenerate(self.models["flat_gr"]) if "transformers_generate" in point.systems else None
        self.stored = self.models["deco"].encode(self.item_codes, self.mask).concepts if "deco" in self.models else None

    def run(self, name: str) -> tuple[float, float]:
        """Seconds of prefill and of search; all are prefill's where they cannot be told apart."""
        point, clock = self.point, self.clock
        start = clock()
        if name == "transformers_generate":
            self.stock.generate(self.item_codes, self.mask, point.num_beams)
            return clock() - start, 0.0
        scorer, model = self.scorer(name)
        middle = start if name.endswith("/stored") else clock()
        if name.endswith("/dense_mask"):
            dense_beam_search(scorer, model.trie, point.num_beams)
        else:
            self.search(name, scorer, model).run()
        return middle - start, clock() - middle

    def scorer(self, name: str):
        model = self.models[name.split("/")[0]]
        if name.endswith("/stored"):
            return model._start_search(None, None, self.stored, None, model.trie)[0], model
        return model._start_search(self.item_codes, self.mask, None, None, model.trie)[0], model

    def search(self, name: str, scorer, model) -> BeamSearch:
        beams = [self.point.num_beams] * self.point.num_codebooks
        return BeamSearch(scorer, model.trie, beams, self.point.num_results, skip_forced_levels="unskipped" not in name)

    def floors(self, name: str, machine: Machine) -> tuple[float, float]:
        """Floors of prefill and search, in seconds."""
        scorer, model = self.scorer(name)
        work = Work(scorer, model, self.point)
        if name.endswith("/dense_mask"):
            dense_beam_search(work, model.trie, self.point.num_beams)
        else:
            self.search(name, work, model).run()
        size = self.weight_bytes
        transformer = model.decoder if isinstance(model, DecoForSIDRetrieval) else model.backbone
        prefill = machine.floor_s(
            prefill_multiplications(model, self.point), size * _matrix_elements(model.backbone.layers)
        )
        prefill *= not name.endswith("/stored")
        return prefill, machine.floor_s(work.multiplications(), size * _matrix_elements(transformer))


@torch.inference_mode()
def measure(points: list[Point], tables: dict[tuple[int, int], torch.Tensor], machine: Machine, args) -> list[dict]:
    """One row for every system of every point; all take turns."""
    rivals = [Rivals(point, tables[point.num_items, point.num_codebooks], args) for point in points]
    laps: dict[tuple[int, str], list[tuple[float, float]]] = {
        (place, name): [] for place, point in enumerate(points) for name in point.systems
    }
    order = list(laps)
    for turn in range(args.warm_up + args.rounds):
        random.Random(turn).shuffle(order)
        for key in order:
            place, name = key
            stock = name == "transformers_generate"
            if stock and (turn < args.warm_up - 1 or len(laps[key]) >= args.slow_rounds):
                continue
            lap = rivals[place].run(name)
            if turn >= args.warm_up:
                laps[key].append(lap)
    rows = []
    for (place, name), found in laps.items():
        floor = rivals[place].floors(name, machine) if name != "transformers_generate" else None
        row = make_row(name, points[place], np.array(found), floor, args)
        rows.append(row | {"nodes": trie_shape(rivals[place])})
    return rows


def trie_shape(rivals: Rivals) -> list[int]:
    trie = next(iter(rivals.models.values())).trie
    return [trie.num_nodes(level) for level in range(1, trie.num_codebooks + 1)]


def make_row(name: str, point: Point, laps: np.ndarray, floor: tuple[float, float] | None, args) -> dict:
    """A speed row, as `recipes/results` holds them."""
    per_user = 1000 / point.batch_size
    total, stock = laps.sum(1), name == "transformers_generate"
    row = {"system": name, "catalog": "random SIDs", "backbone": point.backbone}
    row |= {key: getattr(point, key) for key in ("num_items", "num_codebooks", "history_length", "batch_size")}
    row |= {"num_beams": point.num_beams, "num_results": point.num_beams if stock else point.num_results}
    row |= {"skip_forced": not stock and not name.endswith(UNSKIPPED), "dtype": str(args.dtype).removeprefix("torch.")}
    row |= {"compiled": args.compile and not stock, "threads": torch.get_num_threads(), "rounds": len(laps)}
    row["clock"] = "process" if args.cpu_time else "wall"
    row["prefill_ms_per_user"] = None if stock else float(np.median(laps[:, 0])) * per_user
    row["search_ms_per_user"] = None if stock else float(np.median(laps[:, 1])) * per_user
    row["total_ms_per_user"] = float(np.median(total)) * per_user
    row["p95_ms"] = 1000 * float(np.quantile(total, 0.95))
    row["users_per_s"] = point.batch_size / float(np.median(total))
    for place, part in enumerate(("prefill", "search")):
        row[f"{part}_floor_ms_per_user"] = None if floor is None else floor[place] * per_user
    row["floor_ms_per_user"] = None if floor is None else sum(floor) * per_user
    row["peak_rss_mib"] = peak_mib()  # so far; one point run alone tells its own
    return row | {"seed": args.seed, "command": shlex.join(["python", *sys.argv]), "date": date.today().isoformat()}


def plots(rows: list[dict], path: Path) -> None:
    """Cost against users per batch, beam width, catalog size and SID levels, where rows differ in them."""
    base = Point()
    for name, label in (
        ("batch_size", "users per batch"),
        ("num_beams", "beams"),
        ("num_items", "items"),
        ("num_codebooks", "SID levels"),
    ):
        if len({row[name] for row in rows}) == 1:
            continue
        others = {"backbone", "num_items", "num_codebooks", "history_length", "batch_size", "num_beams"} - {name}
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            whole = row["num_results"] == row["num_beams"]
            if (
                whole
                and not row["system"].endswith(UNSKIPPED)
                and all(row[key] == getattr(base, key) for key in others)
            ):
                lines.setdefault(row["system"], []).append((row[name], row["total_ms_per_user"]))
        plot_lines(lines, label, "milliseconds per user", path.with_name(f"{path.stem}_{name}.png"))
        if name == "batch_size":
            budget = path.with_name(f"{path.stem}_budget.png")
            plot_lines(under_budget(rows), "p95 budget (ms)", "users per second", budget)


def under_budget(rows: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """For every system, the best throughput of the batch sizes whose 95th percentile stays within a budget."""
    base, lines = Point(), {}
    same = [key for key in vars(base) if key not in ("batch_size", "systems")]
    for row in rows:
        if not row["system"].endswith(UNSKIPPED) and all(row[key] == getattr(base, key) for key in same):
            lines.setdefault(row["system"], []).append((row["p95_ms"], row["users_per_s"]))
    for points in lines.values():
        points.sort()
        best = np.maximum.accumulate([speed for _, speed in points]).tolist()
        points[:] = [(budget, speed) for (budget, _), speed in zip(points, best, strict=True)]
    return lines


def plane(rows: list[dict], accuracies: list[dict], backbone: str, path: Path) -> None:
    """Draw what a study's systems reach against what they cost at the first point of its backbone."""
    known, speeds = {row["system"] for row in accuracies}, {}
    for row in rows:
        if row["backbone"] == backbone and row["system"] in known:
            speeds.setdefault(row["system"], row)
    draw_plane(accuracies, list(speeds.values()), path.with_name(f"{path.stem}_tradeoff.png"))


def study_backbone(accuracies: list[dict], path: Path) -> str:
    """The backbone of a study's trained systems."""
    found = {row["config"]["backbone"] for row in accuracies if "backbone" in row.get("config", {})}
    if len(found) != 1:
        raise SystemExit(f"`--accuracies` must hold runs of one backbone, got {sorted(found)} in {str(path)!r}.")
    return found.pop()


def main(args: argparse.Namespace) -> None:
    if args.accuracies:
        if not args.json:
            raise SystemExit("`--accuracies` is drawn beside the file that `--json` names: give both.")
        accuracies = read_rows(args.accuracies)
        backbone = study_backbone(accuracies, args.accuracies)
    machine, rows = Machine(args.dtype, clock_of(args)), []
    print(f"{machine.flops_per_s / 1e9:.0f} GFLOP/s, {machine.bytes_per_s / 1e9:.1f} GB/s, {args.dtype}", flush=True)
    tables: dict[tuple[int, int], torch.Tensor] = {}
    groups = [[point] for point in ([read_point(args.point)] if args.point else grid(args.quick))]
    groups = [catalogs()] if args.catalogs else groups
    if args.accuracies and all(point.backbone != backbone for group in groups for point in group):
        groups.append([replace(groups[0][0], backbone=backbone, systems=BEST)])
    for group in groups:
        for point in group:
            key = (point.num_items, point.num_codebooks)
            if key not in tables:
                tables[key] = synthetic_codes(*key, args.codebook_size, args.seed)
        for row in measure(group, tables, machine, args):
            row["machine"] = {"gflop_per_s": machine.flops_per_s / 1e9, "gb_per_s": machine.bytes_per_s / 1e9}
            rows.append(row)
            print(describe(row), flush=True)
            if args.json:
                write_json(args.json, rows)
    if args.json:
        plots(rows, args.json)
    if args.accuracies:
        plane(rows, accuracies, backbone, args.json)


def describe(row: dict) -> str:
    parts = [f"{row['system']:<22} {row['backbone']:<12} {row['num_items']:>8} items, K {row['num_codebooks']}"]
    parts += [f"T {row['history_length']:>3}, {row['batch_size']:>3} users, B {row['num_beams']:>4}"]
    parts += [f"k {row['num_results']:>4}: {row['total_ms_per_user']:8.2f} ms a user"]
    if row["prefill_ms_per_user"] is not None:
        parts += [f"prefill {row['prefill_ms_per_user']:.2f} (floor {row['prefill_floor_ms_per_user']:.2f})"]
        parts += [f"search {row['search_ms_per_user']:.2f} (floor {row['search_floor_ms_per_user']:.2f})"]
    return ", ".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    points = parser.add_mutually_exclusive_group()
    points.add_argument("--quick", action="store_true", help="a few points, in some ten minutes")
    points.add_argument(
        "--point", nargs="+", metavar="NAME=VALUE", help="one point instead, as: batch_size=8 num_beams=50"
    )
    points.add_argument("--catalogs", action="store_true", help="catalogs of 12 thousand to 10 million items instead")
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor, not of the wall")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    parser.add_argument("--slow-rounds", type=int, default=2, help="rounds of transformers' generate (default: 2)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before (default: 2)")
    parser.add_argument("--codebook-size", type=int, default=2048)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="eager kernels")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="by default what this machine is best at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file of the result rows, plots beside it")
    parser.add_argument("--accuracies", type=Path, help="result rows of `recipes/compare.py`, for the plane of both")
    arguments = parser.parse_args()
    arguments.compile &= has_compiler()
    arguments.dtype = getattr(torch, arguments.dtype) if arguments.dtype else preferred_dtype(torch.device("cpu"))
    main(arguments)
