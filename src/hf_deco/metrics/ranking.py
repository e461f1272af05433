"""What the metrics share: the columns they take, and how lists of items become figures."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import datasets
import evaluate
import numpy as np

from ..evaluation.metrics import ranking_metrics, ranks_in_lists

INPUTS = """\
Args:
    predictions (list of lists): items retrieved for each example, best first, by id (strings or integers). Lists may
        differ in length, and -1 or None, for a place that nothing was found for, is never a hit.
    references (list): the one relevant item of each example; -1 or None where there is none, which counts as a miss.
    groups (list of lists of `str`, with the configuration "slices"): the slices that each example is in.
    k (`int` or list of `int`): cutoffs, 10 by default.
"""


class RankingMetric:
    """Mixin of the metrics: takes item ids of either kind, keeps them as strings.

    It is no `evaluate.Metric` itself, because `evaluate` loads the first one that it finds in a file.
    """

    def add_batch(self, *, predictions=None, references=None, **kwargs):
        """Add examples."""
        if predictions is None or references is None:
            raise ValueError(f"`{'predictions' if predictions is None else 'references'}` is missing.")
        predictions = [_ids(items) for items in predictions]
        super().add_batch(predictions=predictions, references=_ids(references), **kwargs)

    def add(self, *, prediction=None, reference=None, **kwargs):
        """Add one example."""
        super().add(prediction=_ids(prediction), reference=_ids([reference])[0], **kwargs)


def ranking_info(description: str, citation: str, config_name: str) -> evaluate.MetricInfo:
    """What `evaluate` wants to know of a ranking metric."""
    text = datasets.Value("string")
    columns = {"predictions": datasets.List(text), "references": text}
    if config_name == "slices":
        columns["groups"] = datasets.List(text)
    return evaluate.MetricInfo(
        description=description, citation=citation, inputs_description=INPUTS, features=datasets.Features(columns)
    )


def compute_ranking(
    name: str, predictions: Sequence, references: Sequence, k: int | Sequence[int], groups: Sequence | None
) -> dict[str, float]:
    """One of the two metrics, `"ndcg"` or `"recall"`, at all cutoffs: overall as `"ndcg@10"`, and in the slices that
    `groups` names as `"new/ndcg@10"`."""
    ks = (k,) if isinstance(k, Integral) else tuple(k)
    if groups is not None and len(groups) != len(references):
        raise ValueError(f"`groups` has {len(groups)} lists for {len(references)} `references`; need one for each.")
    ranks = ranks_in_lists(predictions, [reference or None for reference in references])
    values = _values(name, ranks, ks)
    members: dict[str, list[int]] = {}
    for row, names in enumerate(groups or ()):
        for group in set(names):
            members.setdefault(group, []).append(row)
    for group in sorted(members):
        values |= {f"{group}/{key}": value for key, value in _values(name, ranks[members[group]], ks).items()}
    return values


def _values(name: str, ranks: np.ndarray, ks: tuple[int, ...]) -> dict[str, float]:
    return {key: value for key, value in ranking_metrics(ranks, ks).items() if key.startswith(f"{name}@")}


def _ids(items) -> list[str]:
    """Item ids as strings, the empty one where there is no item."""
    return [_id(item) for item in (items.tolist() if hasattr(items, "tolist") else items)]


def _id(item) -> str:
    item = item.item() if hasattr(item, "item") else item
    if item is None or item == -1:
        return ""
    if isinstance(item, str):
        return item
    if isinstance(item, Integral):
        return str(item)
    raise ValueError(f"an item id must be a string or an integer, got {item!r} ({type(item).__name__}).")
