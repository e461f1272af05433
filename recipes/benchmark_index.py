"""How long an index of a large catalog takes to build, to refresh, to open and to answer.

    OMP_NUM_THREADS=1 python recipes/benchmark_index.py --json recipes/results/benchmark_index.json

Items and users are random; every SID has the same number of items. Seconds are medians over `--repeats`, milliseconds
over `--queries` users, each with SIDs of its own, one user at a time; `cpu` marks processor time. Files are read from
the system's page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np

from hf_deco.items import packing
from hf_deco.items.generations import IndexReader, IndexWriter, open_index
from hf_deco.items.index import ItemIndex
from hf_deco.training.results import read_rows, write_json

MADE_BY = {"tokenizer_version": "benchmark", "model_id": "benchmark"}


def make_catalog(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Item ids `(N,)`, codes `(N, K)` and embeddings `(N, d)` with unit rows."""
    rng, sizes = np.random.default_rng(args.seed), args.codebook_sizes
    sids = np.unique(rng.integers(0, np.prod(sizes), 2 * args.num_items // args.items_per_sid))
    sids = rng.permutation(sids)[: args.num_items // args.items_per_sid]
    codes = np.stack(np.unravel_index(sids, sizes), axis=1).repeat(args.items_per_sid, axis=0)
    embeddings = rng.standard_normal((len(codes), args.width), dtype=np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    order = rng.permutation(len(codes))
    return np.array([f"B{number:09d}" for number in order]), codes[order], embeddings


class Laps:
    """Wall-clock and processor seconds of the calls of a function; the two part where a machine is busy."""

    def __init__(self):
        self.wall, self.processor = [], []

    def __call__(self, function):
        start = time.perf_counter(), time.process_time()
        result = function()
        self.wall.append(time.perf_counter() - start[0])
        self.processor.append(time.process_time() - start[1])
        return result

    def medians(self, name: str) -> dict:
        return {f"{name}_s": statistics.median(self.wall), f"{name}_cpu_s": statistics.median(self.processor)}


def time_queries(index: ItemIndex, args: argparse.Namespace) -> dict:
    """Milliseconds to rerank one user's SIDs."""
    rng, lap = np.random.default_rng(args.seed + 1), Laps()
    users = rng.standard_normal((args.queries, args.width), dtype=np.float32)
    directory = index.codes()
    for user in users:
        codes = directory[rng.choice(index.num_sids, args.sids, replace=False)]
        lap(lambda user=user, codes=codes: index.rerank(user[None], codes[None], args.per_sid_limit, args.k))
    wall, processor = np.array(lap.wall) * 1000, np.array(lap.processor) * 1000
    percentiles = {"rerank_ms": np.median(wall), "rerank_p95_ms": np.quantile(wall, 0.95)}
    percentiles |= {"rerank_cpu_ms": np.median(processor), "rerank_cpu_p95_ms": np.quantile(processor, 0.95)}
    return {name: float(value) for name, value in percentiles.items()}


def time_refresh(catalog: tuple, folder: Path, args: argparse.Namespace) -> dict:
    """Seconds to update a share of the items, to publish, and for a reader to go over: a half of the share changes, a
    quarter is new, a quarter leaves."""
    ids, codes, embeddings = catalog
    rng, number = np.random.default_rng(args.seed + 2), int(args.changed_share * len(ids))
    shuffled, laps = rng.permutation(len(ids)), {name: Laps() for name in ("update", "publish", "follow", "refresh")}

    def refresh(changes: tuple, removed: np.ndarray, writer: IndexWriter, reader: IndexReader) -> None:
        fresh = laps["update"](lambda: reader.index.update(*changes, removed=removed))
        laps["publish"](lambda: writer.publish(fresh, keep=2))
        laps["follow"](reader.refresh)

    with IndexWriter(folder) as writer:
        reader = IndexReader(folder, *MADE_BY.values())
        for turn in range(args.repeats):
            rows = shuffled[turn * number : (turn + 1) * number]
            changed, new, removed = np.split(rows, [number // 2, 3 * number // 4])
            names = np.append(ids[changed], [f"new-{turn}-{row}" for row in new])
            sids, vectors = codes[rng.permutation(len(ids))[: len(names)]], -embeddings[np.append(changed, new)]
            changes = names, sids, vectors
            laps["refresh"](lambda changes=changes, gone=ids[removed]: refresh(changes, gone, writer, reader))
    return {name: value for step, lap in laps.items() for name, value in lap.medians(step).items()}


def measure(catalog: tuple, precision: str, args: argparse.Namespace) -> dict:
    """All figures of one precision."""
    row, build, verified, unverified = {"precision": precision}, Laps(), Laps(), Laps()
    for _ in range(args.repeats):
        index = build(lambda: ItemIndex.build(*catalog, args.codebook_sizes, **MADE_BY, precision=precision))
    with tempfile.TemporaryDirectory() as folder:
        with IndexWriter(folder) as writer:
            writer.publish(index)
        row["bytes"] = sum(path.stat().st_size for path in Path(folder).rglob("*.npy"))
        for _ in range(args.repeats):
            verified(lambda: open_index(folder))
            unverified(lambda: open_index(folder, verify=False))
        row |= build.medians("build") | verified.medians("open") | unverified.medians("open_without_hashes")
        row |= time_refresh(catalog, Path(folder), args)
    row |= time_queries(index, args)
    if precision == "int4" and packing.numkong is not None:
        row["numkong"], packing.numkong = packing.numkong.__version__, None
        row |= {f"{name}_by_numpy": value for name, value in time_queries(index, args).items()}
    return row


def main(args: argparse.Namespace) -> None:
    catalog = make_catalog(args)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "precisions")}
    rows = []
    for precision in args.precisions:
        row = {"system": "index", **settings, **measure(catalog, precision, args)}
        row["threads"] = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))
        # Linux counts in KiB, macOS in bytes; includes the catalog, and what the precisions before took.
        row["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            2**20 if sys.platform == "darwin" else 2**10
        )
        row |= {"command": shlex.join(["python", *sys.argv]), "date": date.today().isoformat()}
        print(json.dumps(row, indent=1), flush=True)
        rows.append(row)
    if args.json:
        write_json(args.json, [*read_rows(args.json), *rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-items", type=int, default=1_000_000)
    parser.add_argument("--items-per-sid", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--codebook-sizes", type=int, nargs="+", default=[2048, 512, 128])
    parser.add_argument("--precisions", nargs="+", default=["int8", "int4", "fp16"])
    parser.add_argument("--sids", type=int, default=512, help="candidate SIDs of a user")
    parser.add_argument("--per-sid-limit", type=int, default=5)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--changed-share", type=float, default=0.01, help="items a refresh touches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append result rows to this file")
    main(parser.parse_args())
