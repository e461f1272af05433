"""What a training step costs, against the same step on padded batches.

    OMP_NUM_THREADS=1 python recipes/benchmark_training.py --json recipes/results/benchmark_training.json

Sequences have lengths as in Beauty's training part (2 to 20 items with a geometric tail, 5.2 on average), random SIDs.
Both versions take turns on the same batches, forward, backward and AdamW under bfloat16 autocast. Useful tokens are
history items; the padded version computes all positions, all decoder levels and whole heads.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch
from transformers import set_seed

from hf_deco import DecoConfig, DecoForSIDRetrieval
from hf_deco.evaluation.baselines.padded_training import padded_loss
from hf_deco.training.results import write_json


def make_batch(args, catalog: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Histories of Beauty's lengths, and the items behind each position."""
    lengths = 1 + torch.empty(args.batch_size).geometric_(0.23, generator=generator).long()
    lengths = lengths.clamp(max=args.history_length)
    rows = torch.randint(0, len(catalog), (args.batch_size, args.history_length + 1), generator=generator)
    codes = catalog[rows].long()
    mask = torch.arange(args.history_length) >= args.history_length - lengths.unsqueeze(1)
    labels = codes[:, 1:].masked_fill(~mask.unsqueeze(-1), -100)
    return {"item_codes": codes[:, :-1], "attention_mask": mask.long(), "labels": labels}


def main(args: argparse.Namespace) -> None:
    set_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    catalog = torch.randint(0, args.codebook_size, (args.num_items, 4), generator=generator)
    batches = [make_batch(args, catalog, generator) for _ in range(args.steps + 1)]
    config = {"codebook_size": args.codebook_size, "dropout": 0.2}
    models = {
        "deco": DecoForSIDRetrieval(DecoConfig.from_preset(args.backbone, **config)),
        "deco/padded": DecoForSIDRetrieval(
            DecoConfig.from_preset(args.backbone, normalize_over="vocabulary", **config)
        ),
    }
    losses = {
        "deco": lambda batch: models["deco"](**batch).loss,
        "deco/padded": lambda batch: padded_loss(models["deco/padded"], **batch),
    }
    optimizers = {}
    for name, model in models.items():
        model.set_catalog(catalog)
        optimizers[name] = torch.optim.AdamW(model.train().parameters(), lr=1e-3, fused=True)
    rates: dict[str, list[float]] = {name: [] for name in models}
    for turn, batch in enumerate(batches):
        for name in sorted(models, reverse=bool(turn % 2)):
            start = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = losses[name](batch)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if turn:  # the first step warms up
                rates[name].append(int(batch["attention_mask"].sum()) / (time.perf_counter() - start))
    rows = [make_row(name, found, args) for name, found in rates.items()]
    for row in rows:
        print(f"{row['system']:<12} {row['useful_tokens_per_s']:8.0f} useful tokens a second")
    if args.json:
        write_json(args.json, rows)


def make_row(name: str, rates: list[float], args) -> dict:
    row = {"system": name, "backbone": args.backbone, "batch_size": args.batch_size, "num_items": args.num_items}
    row |= {"history_length": args.history_length, "dtype": "bfloat16 autocast", "threads": torch.get_num_threads()}
    row |= {"useful_tokens_per_s": statistics.median(rates), "steps": len(rates), "seed": args.seed}
    return row | {"command": shlex.join(["python", *sys.argv]), "date": date.today().isoformat()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=("S", "M", "L"), default="M")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--history-length", type=int, default=20)
    parser.add_argument("--num-items", type=int, default=12_101)
    parser.add_argument("--codebook-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each (default: 7)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file of the result rows")
    main(parser.parse_args())
