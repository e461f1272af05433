"""How fast the quantisers encode and train, and in how much memory.

    OMP_NUM_THREADS=1 python recipes/benchmark_quantizer.py --json recipes/results/benchmark_quantizer.json

Three questions, a row for each method: how long a whole catalog takes and how much memory beyond the embeddings; what a
method costs relative to plain RQ; how many items a second training takes (forward, backward, Adam). On a busy machine
look at `cpu_s`, seconds of processor time summed over threads: with one thread, what a free core would need. Methods
take turns, so that what slows one slows all. The catalog is made up: clusters within clusters plus noise.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch

from hf_deco.models.quantization import METHODS, ResidualQuantizer
from hf_deco.training.results import read_rows, write_json

INIT_ROWS = 20_000


def make_catalog(num_items: int, width: int, seed: int) -> torch.Tensor:
    """Embeddings `(N, d)` with unit rows, made in place so that they are the peak of memory."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(num_items, width, generator=generator)
    centres = [torch.randn(size, width, generator=generator) * scale for size, scale in ((200, 5.0), (20_000, 2.5))]
    for rows in embeddings.split(2**14):
        for table in centres:
            rows += table[torch.randint(len(table), (len(rows),), generator=generator)]
        rows /= rows.norm(dim=1, keepdim=True)
    return embeddings


def mib_now_and_peak() -> tuple[float, float]:
    """Resident memory of this process now (Linux) and at its peak; elsewhere the peak twice."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20 if statm.exists() else peak
    return now, peak


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock seconds and seconds of processor time of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def take_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """`seconds` of every function in every round, after one round that is not counted."""
    laps = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            lap = seconds(function)
            if turn:
                laps[name].append(lap)
    return laps


def make_quantizers(args: argparse.Namespace, embeddings: torch.Tensor) -> dict[str, ResidualQuantizer]:
    quantizers = {method: ResidualQuantizer(args.codebook_sizes, args.width, method) for method in args.methods}
    for method, quantizer in quantizers.items():
        lap = seconds(lambda quantizer=quantizer: quantizer.init_from_data(embeddings[:INIT_ROWS], seed=args.seed))
        print(f"{method:>16} k-means start {lap[0]:7.1f} s, cpu {lap[1]:.1f} s", flush=True)
    return quantizers


def training_step(quantizer: ResidualQuantizer, embeddings: torch.Tensor, batch_size: int) -> Callable[[], None]:
    parameters = list(quantizer.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3) if parameters else None
    batches = iter(list(embeddings.split(batch_size)) * 1000)

    def step() -> None:
        loss = quantizer(next(batches)).loss
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


def encode_catalog(quantizer: ResidualQuantizer, embeddings: torch.Tensor) -> dict[str, float]:
    """Time and memory of encoding all; memory is the peak of all the process has done: exact for its first method."""
    quantizer.eval().encode(embeddings[:1])
    before, _ = mib_now_and_peak()
    wall, cpu = seconds(lambda: quantizer.encode(embeddings))
    extra = max(0.0, mib_now_and_peak()[1] - before)
    return {"encode_all_wall_s": wall, "encode_all_cpu_s": cpu, "encode_all_extra_mib": extra}


def summarise(name: str, num_items: int, laps: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Medians of every method, and of the processor time of a round relative to the first method's."""
    first, rows = next(iter(laps.values())), {}
    for method, lap in laps.items():
        walls, cpus = zip(*lap, strict=True)
        rows[method] = {
            f"{name}_ms": 1000 * median(walls),
            f"{name}_items_per_s": num_items / median(walls),
            f"{name}_items_per_cpu_s": num_items / median(cpus),
            f"{name}_relative_cpu": median(cpu / plain for cpu, (_, plain) in zip(cpus, first, strict=True)),
        }
        print(f"{method:>16}", *(f"{key} {value:,.2f}" for key, value in rows[method].items()), flush=True)
    return rows


def main(args: argparse.Namespace) -> None:
    embeddings = make_catalog(args.num_items, args.width, args.seed)
    quantizers = make_quantizers(args, embeddings)
    rows = {}
    for method, quantizer in quantizers.items():
        rows[method] = {"system": method, **encode_catalog(quantizer, embeddings)}
        print(rows[method], flush=True)
    some = embeddings[: args.encode_rows]
    encode = {name: partial(quantizer.encode, some) for name, quantizer in quantizers.items()}
    one = {name: partial(quantizer.encode, some[:1]) for name, quantizer in quantizers.items()}
    steps = {name: training_step(quantizer, some, args.batch_size) for name, quantizer in quantizers.items()}
    parts = [summarise("encode", len(some), take_turns(encode, args.repeats))]
    parts.append(summarise("encode_one", 1, take_turns(one, 20 * args.repeats)))
    for quantizer in quantizers.values():
        quantizer.train()
    parts.append(summarise("train", args.batch_size, take_turns(steps, 2 * args.repeats)))
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "methods", "quick")}
    settings |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    settings |= {"command": shlex.join(["python", *sys.argv]), "date": date.today().isoformat()}
    for method, row in rows.items():
        for part in parts:
            row |= part[method]
        row |= settings
    if args.json:
        write_json(args.json, [*read_rows(args.json), *rows.values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-items", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--codebook-sizes", type=int, nargs="+", default=[2048, 512, 128])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="the first is the measure")
    parser.add_argument("--encode-rows", type=int, default=32_768, help="items encoded in turns")
    parser.add_argument("--batch-size", type=int, default=2048, help="of training")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a small catalog and two rounds, to try it out")
    parser.add_argument("--json", type=Path, help="append result rows to this file")
    args = parser.parse_args()
    if args.quick:
        args.num_items, args.encode_rows, args.repeats = 20_000, 8192, 2
        args.codebook_sizes = [256, 128, 64]
    main(args)
