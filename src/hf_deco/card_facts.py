"""What a model card says of a run, taken from the rows of its results."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .cards import is_secret, shown_command, without_folders
from .models.configuration_deco import SCRATCH_BACKBONES

FLOORS = {
    "popularity": "popularity",
    "text_neighbors": "nearest text neighbours of the last item",
    "cooccurrence": "co-occurrence with the last items",
    "repeat_last": "the user's latest items",
}
SLICES = {
    "repeat": "target in the history",
    "new": "target not in the history",
    "warm": "target in the catalog",
    "head": "target in the most popular third of the catalog",
    "torso": "in the middle third",
    "tail": "in the least popular third",
}
# Options that a card tells otherwise, or that say nothing of the model: files, columns, and what a run prints.
_ELSEWHERE = {"interactions", "items", "embeddings", "sids", "teacher", "system", "seed", "protocol", "cutoffs"}
_ELSEWHERE |= {"num_beams", "codebook_sizes", "embedding_model", "user_column", "item_column", "timestamp_column"}
_ELSEWHERE |= {"text_columns", "title_column", "unknown_items", "results_file", "use_cpu", "do_train", "do_eval"}
_INCIDENTAL = ("hub_", "push_to_hub", "log", "report_to", "run_name", "project", "trackio", "dataloader_", "disable_")
# Options that only count beside a decoder, or beside a teacher.
_OF_DECODER = {"decoder_width", "decoder_layers", "decoder_input", "decoder_dropout", "num_concepts"}
_OF_TEACHER = {"temperature", "objective", "init_from_teacher"}


def describe_run(args, log, split, table, model) -> dict:
    """What a run knows beyond its options and metrics, to stand in its row: data, SIDs, parameters, origins.

    Args:
        args ([`DecoTrainingArguments`]): Options of the run.
        log ([`Interactions`]): The log after all filters.
        split ([`Split`]): Its parts.
        table ([`SIDTable`]): The whole SID table, with its report.
        model (`PreTrainedModel`): The trained model.
    """
    counts = {name: value for name, value in log.summary().items() if name != "avg_length"}
    row = {
        "data": counts | {"catalog": len(split.catalog), "training_users": len(split.train)},
        "sids": {"num_items": len(table), "codebook_sizes": list(table.codebook_sizes)} | table.report,
        "parameters": count_parameters(model),
    }
    if args.backbone not in SCRATCH_BACKBONES and not Path(args.backbone).exists():
        row["base_model"] = args.backbone
    if args.teacher is not None:
        row["teacher"] = _teacher(args.teacher)
    return row


def count_parameters(model) -> dict[str, int]:
    """Parameters of a model by its parts, each counted once; the sum is `model.num_parameters()`."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts[name.split(".")[0]] += parameter.numel()
    return dict(parts.most_common())


def _teacher(name: str) -> str:
    """What a teacher is called: its name on the Hub, or the system that a local one was trained as."""
    folder = Path(name)
    if not folder.exists():
        return name
    try:
        return json.loads((folder / "training_data.json").read_text(encoding="utf-8"))["system"]
    except (OSError, ValueError, KeyError):
        return _folder_name(name)


def _folder_name(path: str) -> str:
    parts = [part for part in re.split(r"[/\\]", path) if part]
    return parts[-2] if len(parts) > 1 and parts[-1] == "model" else parts[-1]


def run_facts(rows: list[dict]) -> dict:
    """What the template of a model card asks for.

    Args:
        rows (`list[dict]`): Result rows: first that of the checkpoint, behind it in any order the same system with
            other seeds, and the floors, whose seed is None.
    """
    from .training.arguments import DecoTrainingArguments  # on top, the import would be circular

    row, defaults = rows[0], DecoTrainingArguments()
    config = {name: getattr(defaults, name) for name in DecoTrainingArguments.__annotations__} | row.get("config", {})
    idle = (_OF_DECODER if config["search_in"] == "backbone" else set()) | (set() if config["teacher"] else _OF_TEACHER)
    options = changed_options(row, defaults, _ELSEWHERE | idle)
    facts = {"config": config, "name": system_name(config), "options": options}
    facts |= {name: row.get(name) for name in ("data", "parameters", "base_model", "date", "revision", "steps")}
    facts |= {"best_step": row.get("best_step"), "validation": row.get("validation_ndcg@10"), "seed": row["seed"]}
    # Of a merged model the parts: the row counted what LoRA added to it in training.
    count = sum(row["parameters"].values()) if row.get("parameters") else row.get("num_parameters")
    facts |= {"num_parameters": count, "sids": _sid_facts(row, config), "system": row["system"]}
    facts["teacher"] = row.get("teacher") or (_folder_name(config["teacher"]) if config["teacher"] else None)
    facts["backbone"] = SCRATCH_BACKBONES.get(config["backbone"])
    facts["embedding_model"] = None if config["embeddings"] else without_folders(config["embedding_model"])
    facts["command"] = shown_command(shlex.split(row["command"])) if row.get("command") else None
    facts["minutes"] = round(row["wall_s"] / 60) if row.get("wall_s") and not row.get("resumed") else None
    return facts | _metric_facts(rows, config)


def system_name(config: dict) -> str:
    """What the field calls the model that some options train."""
    taught = config["teacher"] is not None
    if config["search_in"] == "backbone":
        name = ("FusedGR" if config["history_format"] == "fused" else "FlatGR") + (", distilled" if taught else "")
    elif config["history_format"] == "flat":
        name = "Deco-flat" + ("" if taught else ", cross-entropy alone")
    else:
        name = "Deco" if taught else "Deco-CE"
    added = [part for part, given in (("copy pointer", "copy_pointer"), ("reranker", "reranker")) if config[given]]
    return " with ".join([name, " and ".join(added)]) if added else name


def changed_options(row: dict, defaults, left_out: set[str]) -> list[tuple[str, str]]:
    """Options that differ from their defaults, count, and may be shown, as name and text.

    Those that the class of `defaults` does not have are told wherever they are set.
    """
    told = []
    for name, value in row.get("config", {}).items():
        default = getattr(defaults, name, None)
        same = value == getattr(default, "value", default) or (not hasattr(defaults, name) and not value)
        if same or name in left_out or name.startswith(_INCIDENTAL) or is_secret(name):
            continue
        shown = without_folders(value)
        if shown is not None:
            told.append((name, str(shown).lower() if isinstance(shown, bool) else str(shown)))
    return told


def _sid_facts(row: dict, config: dict) -> dict | None:
    """Report of the SID table; without one, the sizes, where the run made the table from its options."""
    sids = row.get("sids")
    if sids is None and config["sids"] is not None:
        return None
    sids = {"codebook_sizes": config["codebook_sizes"]} if sids is None else dict(sids)
    if config["sids"] is None:
        sids["method"] = "residual k-means"
    if "levels" in sids:
        columns = (sids["levels"], sids["explained_variance_before"], sids["forced_share"])
        sids["levels"] = [
            level | {"explained": explained, "forced": forced}
            for level, explained, forced in zip(*columns, strict=True)
        ]
    return sids


def _metric_facts(rows: list[dict], config: dict) -> dict:
    """Tables of metrics: overall, and in the slices that hold a part of the examples."""
    row, metrics, cutoffs = rows[0], rows[0]["metrics"], config["cutoffs"]
    floors = [other for other in rows[1:] if other["seed"] is None]
    others = [other for other in rows[1:] if other["seed"] is not None]
    names = [f"seed {other['seed']}" for other in (row, *others)] if others else ["this model"]
    columns = list(zip(names, (row, *others), strict=False))
    columns += [(FLOORS.get(floor["system"], floor["system"]), floor) for floor in floors]
    keys = metric_keys(cutoffs)
    first, head = keys[0], metric_head(keys)
    results = [(name, cells(entry["metrics"], keys)) for name, entry in columns]
    slices = []
    for part, meaning in SLICES.items():
        count = metrics.get(f"{part}/num_examples")
        if count is not None and count != metrics["num_examples"]:
            found = [cell for _, entry in columns for cell in cells(entry["metrics"], [f"{part}/{first}"])]
            slices.append((f"{part}: {meaning}", f"{count:,}", found))
    return {
        "metric_head": head,
        "results": results,
        "slice_head": [name for name, _ in columns],
        "slices": slices,
        "behind": behind(metrics, floors, first),
        "first_metric": head[0],
        "has_floors": bool(floors),
        "examples": metrics.get("num_examples"),
        "cold": metrics.get("num_cold_targets"),
        "gate": {name: metrics.get(f"gate/{name}") for name in ("mean", "repeat", "new", "auc")},
    }


def behind(metrics: dict, floors: list[dict], key: str) -> list[tuple[str, str, str, str]]:
    """Where the best floor reaches the model: among which examples, the model's figure, the floor, the floor's."""
    found = []
    for part, meaning in {"": "all examples", **SLICES}.items():
        name = f"{part}/{key}" if part else key
        count = metrics.get(f"{part}/num_examples")
        rivals = [floor for floor in floors if name in floor["metrics"]]
        if name not in metrics or not rivals or (part and count == metrics.get("num_examples")):
            continue
        best = max(rivals, key=lambda floor: floor["metrics"][name])
        if best["metrics"][name] >= metrics[name]:
            floor = FLOORS.get(best["system"], best["system"])
            examples = f"{part} ({meaning})" if part else meaning
            found.append((examples, f"{metrics[name]:.4f}", floor, f"{best['metrics'][name]:.4f}"))
    return found


def metric_keys(cutoffs: list[int]) -> list[str]:
    """Names of the metrics that a card shows."""
    return [f"{metric}@{k}" for k in cutoffs for metric in ("ndcg", "recall")]


def metric_head(keys: list[str]) -> list[str]:
    """The same for readers."""
    return [key.replace("ndcg", "NDCG").replace("recall", "Recall") for key in keys]


def cells(metrics: dict, keys: Iterable[str]) -> list[str]:
    """Figures as a table shows them, empty where there is none."""
    return [f"{metrics[key]:.4f}" if key in metrics else "" for key in keys]
