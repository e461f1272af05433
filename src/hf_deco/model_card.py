"""Model cards, rendered from the result rows of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import validate_repo_id

from .card_facts import run_facts
from .cards import fill_template, save_rendered
from .gear_card import STREAM, gear_facts

CARD = "README.md"
RESULTS = ".eval_results"
TAGS = ["recommendation", "sequential-recommendation", "generative-retrieval", "semantic-ids", "custom_code"]
_TASK = ("sequential-recommendation", "Sequential recommendation")
# What else decides a figure, by what the rows are of.
_JUDGED = ("cold_targets", "drop_duplicates", "collapse_repeats", "k_core")
_JUDGED_STREAM = ("eval_users", "per_sid_limit")
_CITATION = """\
@misc{gusak2026separating,
  title = {Separating Thinking from Spelling for Efficient Generative Recommendation},
  author = {Gusak, Danil and Volodkevich, Anna and Oseledets, Ivan and Frolov, Evgeny},
  year = {2026}
}"""

_GEAR_CITATION = """\
@misc{gear2026,
  title = {Generative End-to-end Ad Retrieval at Douyin},
  year = {2026}
}"""


def write_model_card(
    folder: str | Path, rows: Sequence[dict] | None = None, *, dataset_id: str | None = None, **options
) -> bool:
    """Write `README.md` beside a model and, where the data set lies on the Hub, its `.eval_results`.

    A card that somebody wrote or edited stays as it is; one that this function wrote is renewed.

    Args:
        folder (`str` or path): Folder of the checkpoint.
        rows (`list[dict]`, *optional*): As for [`render_model_card`]. By default those of the run that `folder` is the
            `model/` of.
        dataset_id (`str`, *optional*): Name of the log on the Hub.
        options: Of [`render_model_card`].

    Returns:
        `bool`: whether the card was written.

    Raises:
        ValueError: If there is no run beside the folder, or `dataset_id` is no name of a data set.
    """
    folder = Path(folder)
    if rows is None:
        run = folder.resolve().parent / "run.json"
        if not run.is_file():
            raise ValueError(f"`folder` {str(folder)!r} does not lie in the folder of a finished run: give its `rows`.")
        rows = json.loads(run.read_text(encoding="utf-8"))["rows"]
    text = render_model_card(rows, dataset_id=dataset_id, **options)
    if dataset_id is not None:
        entries = yaml.safe_dump(eval_result_entries_to_yaml(eval_entries(rows[0], dataset_id)), sort_keys=False)
        save_rendered(folder / RESULTS / f"{dataset_id.replace('/', '--')}.yaml", entries)
    return save_rendered(folder / CARD, text)


def render_model_card(
    rows: Sequence[dict],
    *,
    dataset_name: str | None = None,
    dataset_id: str | None = None,
    data_note: str | None = None,
    license: str | None = None,
    checkpoint: str = "path/or/repository/of/this/model",
) -> str:
    """A model card as text, of Deco, a full backbone or GEAR. What the rows do not say is left out.

    Args:
        rows (`list[dict]`): Result rows as `run.json` and `recipes/results/` hold them: first that of the checkpoint,
            then in any order the same system with other seeds, and the untrained floors, whose `seed` is None.
        dataset_name (`str`, *optional*): Name of the log for readers. By default that of the folder it lay in.
        dataset_id (`str`, *optional*): Name of the log on the Hub.
        data_note (`str`, *optional*): A sentence or two on the log: where it comes from, its terms.
        license (`str`, *optional*): Licence of the weights, as the Hub names it. The card says that none is stated
            where there is none.
        checkpoint (`str`, *optional*): What the examples load.

    Raises:
        ValueError: If the first row is a floor's, or `dataset_id` is no name of a data set.
    """
    rows = list(rows)
    if not rows or rows[0].get("seed") is None:
        raise ValueError("`rows` must begin with the row of a trained model, which has a `seed`.")
    if dataset_id is not None:
        validate_repo_id(dataset_id)
    stream = rows[0]["protocol"] == STREAM
    facts = gear_facts(rows) if stream else run_facts(rows)
    log = dataset_name or rows[0]["dataset"]
    title = f"{facts['name']} on {log}"
    data = ModelCardData(
        license=license,
        library_name="transformers",
        base_model=facts["base_model"],
        datasets=None if dataset_id is None else [dataset_id],
        tags=TAGS,
        model_name=title,
        eval_results=eval_results(rows[0], log, dataset_id, facts["config"]) or None,
    )
    facts |= {"title": title, "log": log, "data_note": data_note, "dataset_id": dataset_id, "licence": license}
    facts |= {"checkpoint": checkpoint, "citation": _GEAR_CITATION if stream else _CITATION}
    return fill_template(ModelCard, data, "gear_card.md" if stream else "model_card.md", facts)


def eval_results(row: dict, log: str, dataset_id: str | None, config: dict) -> list[EvalResult]:
    """NDCG@k and Recall@k of a row for the `model-index` of a card."""
    about = {name: config[name] for name in (_JUDGED_STREAM if row["protocol"] == STREAM else _JUDGED)}
    return [
        EvalResult(
            task_type=_TASK[0],
            task_name=_TASK[1],
            dataset_type=dataset_id or "unknown",  # the field is required; a log that is not on the Hub has no name
            dataset_name=log,
            dataset_split="test",
            dataset_args={"protocol": row["protocol"], **about},
            metric_type=f"{metric}_at_{k}",
            metric_name=f"{name}@{k}",
            metric_value=row["metrics"][f"{metric}@{k}"],
            metric_args={"k": k, "num_beams": config["num_beams"], "seed": row["seed"]},
        )
        for k in config["cutoffs"]
        for metric, name in (("ndcg", "NDCG"), ("recall", "Recall"))
        if f"{metric}@{k}" in row["metrics"]
    ]


def eval_entries(row: dict, dataset_id: str) -> list[EvalResultEntry]:
    """The same figures as entries of `.eval_results`, which belong to a data set of the Hub."""
    config = row["config"]
    notes = f"{row['protocol']} split, full catalog, beam {config['num_beams']}, seed {row['seed']}"
    return [
        EvalResultEntry(
            dataset_id=dataset_id,
            task_id=f"{metric}_at_{k}",
            value=row["metrics"][f"{metric}@{k}"],
            date=row.get("date"),
            notes=notes,
        )
        for k in config["cutoffs"]
        for metric in ("ndcg", "recall")
        if f"{metric}@{k}" in row["metrics"]
    ]
