"""What the model card of a GEAR run says, taken from the rows of its results."""

from __future__ import annotations

import shlex

from .card_facts import FLOORS, behind, cells, changed_options, metric_head, metric_keys
from .cards import shown_command, without_folders

STREAM = "stream"  # protocol of the rows
# Options that the card tells otherwise, or that say nothing of the model.
_ELSEWHERE = {"log", "data_dir", "embeddings", "embedding_model", "codebook_sizes", "quantizer_method"}
_ELSEWHERE |= {"num_beams", "per_sid_limit", "eval_users", "cutoffs", "system", "seed", "results_file", "use_cpu"}
_ELSEWHERE |= {"history_lengths", "ltr_steps", "rq_steps", "precision", "reranker"}
# What evaluations found beside the items, by the prefix of its metrics.
SLICES = {
    "sid": "SIDs as the beam ranks them, before any item of theirs",
    "cold": "items without an event before the period",
    "dot": "the same candidates, ranked by the reranker's products alone",
    "fp32": "the same candidates, items scored by float32 vectors",
    "int8": "by INT8 vectors",
    "int4": "by INT4 vectors",
}
ABLATIONS = {
    "rq": "with a tokenizer of vanilla residual quantisation",
    "basis_rq": "with a tokenizer that does not look at prefixes",
    "no_reranker": "without reranker",
    "no_weight": "without business weights",
    "frozen_sids": "with frozen SIDs",
    "no_refresh": "with an index that is not refreshed while it trains",
}


def gear_facts(rows: list[dict]) -> dict:
    """What the template `gear_card.md` asks for.

    Args:
        rows (`list[dict]`): Result rows: first that of the checkpoint, behind it in any order the same system with
            other seeds, and the floors, whose seed is None.
    """
    from .training.gear_arguments import GearTrainingArguments  # on top, the import would be circular

    row, defaults = rows[0], GearTrainingArguments()
    config = {name: getattr(defaults, name) for name in GearTrainingArguments.__annotations__} | row["config"]
    facts = {"config": config, "options": changed_options(row, defaults, _ELSEWHERE), "base_model": None}
    facts |= {name: row.get(name) for name in ("data", "parameters", "num_parameters", "date", "revision", "steps")}
    facts |= {"system": row["system"], "seed": row["seed"], "name": _name(row["system"])}
    facts["embedding_model"] = None if config["embeddings"] else without_folders(config["embedding_model"])
    facts["command"] = shown_command(shlex.split(row["command"])) if row.get("command") else None
    facts["minutes"] = round(row["wall_s"] / 60) if row.get("wall_s") and not row.get("resumed") else None
    return facts | _metric_facts(rows, config["cutoffs"])


def _name(system: str) -> str:
    changes = [ABLATIONS.get(part, part) for part in system.split("/")[1:]]
    return ", ".join(["GEAR", *changes])


def _metric_facts(rows: list[dict], cutoffs: list[int]) -> dict:
    """Tables of means over the periods: of items beside the floors, and of what else was measured of the model."""
    row, metrics, keys = rows[0], rows[0]["metrics"], metric_keys(cutoffs)
    floors = [other for other in rows[1:] if other["seed"] is None]
    others = [other for other in rows[1:] if other["seed"] is not None]
    names = [f"seed {other['seed']}" for other in (row, *others)] if others else ["this model"]
    results = [(name, cells(entry["metrics"], keys)) for name, entry in zip(names, (row, *others), strict=True)]
    results += [(FLOORS.get(floor["system"], floor["system"]), cells(floor["metrics"], keys)) for floor in floors]
    slices = [
        (f"{part}: {meaning}", cells(metrics, [f"{part}/{key}" for key in keys]))
        for part, meaning in SLICES.items()
        if any(name.startswith(f"{part}/") for name in metrics)
    ]
    kept = {name: metrics.get(f"{name}/kept@{cutoffs[0]}") for name in ("int8", "int4")}
    return {
        "metric_head": metric_head(keys),
        "results": results,
        "slices": slices,
        "kept": {name: share for name, share in kept.items() if share is not None},
        "behind": behind(metrics, floors, keys[0]),
        "first_metric": metric_head(keys)[0],
        "has_floors": bool(floors),
        "periods": metrics.get("num_periods"),
        "cold": metrics.get("cold/num_targets"),
        "colliding": metrics.get("colliding"),
        "sids_changed": metrics.get("sids_changed"),
    }
