"""How long semantic IDs take on a catalog of any size, and how much memory: k-means, collisions, report.

    python recipes/benchmark_sids.py --num-items 1000000 --width 96 --codebook-sizes 256 256 256 --json rows.json

The catalog is made up: clusters within clusters plus noise, and a share of items that repeat the embedding of another,
as items with the same text do. Popularity follows a power law.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np

from hf_deco.items import RQKMeans, format_report, quality_report, resolve_collisions
from hf_deco.training.results import read_rows, write_json


def make_catalog(num_items: int, width: int, duplicate_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings `(N, d)` with unit rows, and popularity `(N,)`."""
    rng = np.random.default_rng(seed)
    embeddings = 0.2 * rng.standard_normal((num_items, width), dtype=np.float32)
    for num_clusters, scale in ((200, 1.0), (20_000, 0.5)):
        centers = scale * rng.standard_normal((num_clusters, width), dtype=np.float32)
        # Squaring a uniform number crowds the first clusters, as a few categories hold most of a real catalog.
        cluster = (num_clusters * rng.random(num_items) ** 2).astype(np.int64)
        for rows in np.array_split(np.arange(num_items), max(1, num_items // 65_536)):
            embeddings[rows] += centers[cluster[rows]]
    copies = rng.choice(num_items, int(duplicate_share * num_items), replace=False)
    embeddings[copies] = embeddings[rng.integers(0, num_items, len(copies))]
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings, rng.zipf(1.5, num_items).astype(np.float64)


def main(args: argparse.Namespace) -> None:
    embeddings, popularity = make_catalog(args.num_items, args.width, args.duplicate_share, args.seed)
    quantizer = RQKMeans(args.codebook_sizes, num_iterations=args.num_iterations, seed=args.seed)
    seconds = {}
    start = time.perf_counter()

    def lap(stage: str) -> None:
        seconds[f"{stage}_s"] = time.perf_counter() - start - sum(seconds.values())
        print(f"{stage:>10} {seconds[f'{stage}_s']:8.1f} s", flush=True)

    before = quantizer.fit_encode(embeddings)
    lap("kmeans")
    after, moved = resolve_collisions(before, embeddings, quantizer.codebooks, popularity)
    lap("collisions")
    report = quality_report(before, after, embeddings, quantizer.codebooks, moved)
    lap("report")
    # Linux counts in KiB, macOS in bytes; the peak includes the catalog itself.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    print(f"{'total':>10} {sum(seconds.values()):8.1f} s, peak memory {peak:,.0f} MiB\n{format_report(report)}")
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        row = {"system": "rq-kmeans", **settings, **seconds, "total_s": sum(seconds.values()), "peak_rss_mib": peak}
        row |= {"threads": os.environ.get("OMP_NUM_THREADS", os.cpu_count()), "report": report}
        row |= {"command": " ".join(["python", *sys.argv]), "date": date.today().isoformat()}
        write_json(args.json, [*read_rows(args.json), row])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-items", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--codebook-sizes", type=int, nargs="+", default=[256, 256, 256])
    parser.add_argument("--num-iterations", type=int, default=25)
    parser.add_argument("--duplicate-share", type=float, default=0.1, help="items that repeat another's embedding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append a result row to this file")
    main(parser.parse_args())
