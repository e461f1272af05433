"""How long a processor of a large catalog takes to load, how much memory, and what it costs to ask it.

    python recipes/benchmark_processor.py --num-items 10000000 --json recipes/results/benchmark_processor.json

A catalog of random SIDs is saved first, by another process, so that only loading is measured. Ids look like those of a
shop, one in eight holds letters outside ASCII; every item has a title of about 40 characters.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from benchmark_trie import median_ms, peak_mib

from hf_deco import DecoProcessor
from hf_deco.training.results import read_rows, write_json

DEPTH, SIZE = 4, 2048


def write_processor(folder: str, num_items: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, SIZE, (num_items, DEPTH), generator=generator, dtype=torch.int32)
    ids = [f"{'Ż' if row % 8 == 0 else 'B'}{row * 7919 % 10**10:010d}" for row in range(num_items)]
    titles = (f"{item}, a thing to buy, size {row % 40}, blue" for row, item in enumerate(ids))
    DecoProcessor(ids, codes, (SIZE,) * DEPTH, titles=titles).save_pretrained(folder)


def timed(function):
    """Seconds on the clock and of this process, and what the function returns."""
    clock, process = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - clock, time.process_time() - process, result


def main(args: argparse.Namespace) -> None:
    before = peak_mib()
    load_s, load_cpu_s, processor = timed(lambda: DecoProcessor.from_pretrained(args.folder))
    loaded = peak_mib()
    step = max(1, len(processor.item_ids) // 1000)
    users = [processor.item_ids[row : row + 20] for row in range(0, len(processor.item_ids), step)][:1000]
    first_decode_s, first_decode_cpu_s, _ = timed(lambda: processor.batch_decode(processor.item_codes[:1]))
    row = {
        "system": "processor",
        "num_items": args.num_items,
        "seed": args.seed,
        "file_mib": sum(path.stat().st_size for path in Path(args.folder).iterdir()) / 2**20,
        "load_s": load_s,
        "load_cpu_s": load_cpu_s,  # where others use the machine too, this is what an idle one would take
        "libraries_mib": before,
        "peak_rss_after_load_mib": loaded,
        "first_decode_s": first_decode_s,  # builds the trie
        "first_decode_cpu_s": first_decode_cpu_s,
        "peak_rss_mib": peak_mib(),
        "encode_1_user_ms": median_ms(lambda: processor(users[:1])),
        "encode_1000_users_ms": median_ms(lambda: processor(users)),
        "decode_1000_sids_ms": median_ms(lambda: processor.batch_decode(processor.item_codes[:1000])),
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", "recipes/benchmark_processor.py", "--num-items", str(args.num_items)]),
        "date": date.today().isoformat(),
    }
    print(json.dumps(row, indent=1))
    if args.json:
        write_json(args.json, [*read_rows(args.json), row])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-items", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append a result row to this file")
    parser.add_argument("--write-only", metavar="FOLDER", help="write the processor there and measure nothing")
    args = parser.parse_args()
    if args.write_only:
        write_processor(args.write_only, args.num_items, args.seed)
    else:
        with tempfile.TemporaryDirectory() as args.folder:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--write-only", args.folder], check=True)
            main(args)
