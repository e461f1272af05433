"""How long a trie takes to build, how much memory, and what a step on it costs.

    python recipes/benchmark_trie.py --num-items 10000000 --num-codebooks 4 --json recipes/results/benchmark_trie.json

SIDs are random: the first code follows a power law, as clusters of a real catalog do, the others are uniform.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import time
from datetime import date
from pathlib import Path

import torch

from hf_deco import SIDTrie
from hf_deco.training.results import read_rows, write_json


def peak_mib() -> float:
    """Peak resident memory of this process; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def median_ms(function, repeats: int = 20) -> float:
    """Median wall-clock milliseconds of a call, after two calls that are not counted."""
    laps = []
    for turn in range(repeats + 2):
        start = time.perf_counter()
        function()
        if turn >= 2:
            laps.append(1000 * (time.perf_counter() - start))
    return sorted(laps)[len(laps) // 2]


def main(args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(args.seed)
    codes = torch.randint(
        0, args.codebook_size, (args.num_items, args.num_codebooks), generator=generator, dtype=torch.int32
    )
    codes[:, 0] = (args.codebook_size * torch.rand(args.num_items, generator=generator) ** 2).int()
    before = peak_mib()
    start = time.perf_counter()
    trie = SIDTrie(codes, (args.codebook_size,) * args.num_codebooks)
    row = {"system": "trie", **{name: value for name, value in vars(args).items() if name != "json"}}
    row |= {"build_s": time.perf_counter() - start, "codes_and_libraries_mib": before, "peak_rss_mib": peak_mib()}
    nodes = torch.randint(0, trie.num_nodes(1), (3200,), generator=generator)
    trie.node_paths(codes[:1])  # builds the edge keys
    row["expand_3200_nodes_ms"] = median_ms(lambda: trie.expand(1, nodes))
    row["paths_of_1000_sids_ms"] = median_ms(lambda: trie.node_paths(codes[:1000]))
    row |= {
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", *sys.argv]),
        "date": date.today().isoformat(),
    }
    print(trie)
    print(json.dumps(row, indent=1))
    if args.json:
        write_json(args.json, [*read_rows(args.json), row])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-items", type=int, default=10_000_000)
    parser.add_argument("--num-codebooks", type=int, default=4)
    parser.add_argument("--codebook-size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append a result row to this file")
    main(parser.parse_args())
