"""One evaluation for every system: same examples, same catalog, same slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..data.sequences import Examples, Sequences
from .metrics import MISS, check_cutoffs, ranking_metrics, ranks_of_scores, ranks_of_targets

_POPULARITY = ("head", "torso", "tail")
_SCORES_AT_ONCE = 2**22  # 32 MB of float64


class Evaluator:
    """Scores ranked items against the targets of a split, overall and by slice.

    Metrics are keyed `"ndcg@10"` overall and `"repeat/ndcg@10"` in a slice, beside the slice's `"repeat/num_examples"`.
    A slice without examples is left out. The slices:

    - `repeat` and `new`: the target occurs in the (truncated) history, or does not;
    - `warm`: the target is in the catalog. Targets that are not, cold ones, never count as found;
    - `head`, `torso`, `tail`: thirds of the catalog. Its `C` items are sorted by training interactions, most first,
      ties by item index; the item at place `p` from 0 belongs to third `floor(3 p / C)`. Cold targets are in none.

    Args:
        examples ([`Examples`]): what to predict from what.
        item_counts (`np.ndarray` of shape `(N,)`): training interactions of each item.
        catalog (`np.ndarray` of shape `(C,)`): item indices a system chooses among, ascending.
        ks (`Sequence[int]`, *optional*, defaults to `(10, 50, 100)`): cutoffs.
        max_history_length (`int`, *optional*): how many of the latest items of a history are shown; all by default.
        cold_targets (`str`, *optional*, defaults to `"miss"`): `"miss"` counts examples with a cold target as misses,
            `"drop"` leaves them out of `examples`.

    Attributes:
        examples ([`Examples`]): the examples to answer, in order, histories truncated, cold ones dropped if so asked.
        num_cold_targets (`int`): examples given whose target is cold, whether dropped or not.

    Raises:
        ValueError: an option is not one of its values, or no example is left.

    Example:
        ```python
        >>> options = {"max_history_length": 50}
        >>> evaluator = Evaluator(split.test, split.item_counts, split.catalog, **options)  # doctest: +SKIP
        >>> evaluator.evaluate_retrieved(item_indices)["ndcg@10"]  # doctest: +SKIP
        0.0375

        ```
    """

    def __init__(
        self,
        examples: Examples,
        item_counts: np.ndarray,
        catalog: np.ndarray,
        *,
        ks: Sequence[int] = (10, 50, 100),
        max_history_length: int | None = None,
        cold_targets: str = "miss",
    ) -> None:
        check_cutoffs(ks)
        if cold_targets not in ("miss", "drop"):
            raise ValueError(f"`cold_targets` is {cold_targets!r}; choose 'miss' or 'drop'.")
        self.ks = tuple(ks)
        self.catalog = catalog
        self._columns = np.full(len(item_counts), -1)  # item index -> place in the catalog
        self._columns[catalog] = np.arange(len(catalog))
        cold = self._columns[examples.targets] < 0
        self.num_cold_targets = int(cold.sum())
        if cold_targets == "drop":
            examples = examples.select(~cold)
        if len(examples) == 0:
            raise ValueError(
                f"no example is left to evaluate; {self.num_cold_targets:,} had a target outside `catalog`."
            )
        self.examples = examples if max_history_length is None else examples.truncate(max_history_length)
        self._target_columns = self._columns[examples.targets]
        self._slices = self._find_slices(item_counts)

    def metrics(self, ranks: np.ndarray) -> dict[str, float]:
        """Metrics of a system from the ranks it gives to the targets.

        Args:
            ranks (`np.ndarray` of shape `(E,)`): rank from 0 on for each of `self.examples`; those of cold targets are
                not looked at.

        Returns:
            `dict[str, float]`: metrics overall and by slice, and the counts `num_examples` and `num_cold_targets`.
        """
        ranks = np.asarray(ranks)
        if ranks.shape != (len(self.examples),):
            raise ValueError(f"`ranks` has shape {ranks.shape}; `self.examples` asks for ({len(self.examples)},).")
        ranks = np.where(self._target_columns >= 0, ranks, MISS)
        metrics = ranking_metrics(ranks, self.ks)
        metrics["num_examples"] = len(ranks)
        metrics["num_cold_targets"] = self.num_cold_targets
        for name, rows in self._slices.items():
            if rows.any():
                metrics.update({f"{name}/{key}": value for key, value in ranking_metrics(ranks[rows], self.ks).items()})
                metrics[f"{name}/num_examples"] = int(rows.sum())
        return metrics

    def evaluate_retrieved(self, item_indices: np.ndarray) -> dict[str, float]:
        """Metrics of a system that retrieves items.

        Args:
            item_indices (`np.ndarray` of shape `(E, R)`): item indices for each of `self.examples`, best first, -1
                where fewer than `R` were found. `R` must reach the largest cutoff, or the size of a smaller catalog.

        Returns:
            `dict[str, float]`: as [`~Evaluator.metrics`].
        """
        item_indices = np.asarray(item_indices)
        needed = min(max(self.ks), len(self.catalog))
        if item_indices.ndim != 2 or item_indices.shape[1] < needed:
            raise ValueError(
                f"`item_indices` has shape {item_indices.shape}; `ks`={self.ks} needs {needed} items for each example."
            )
        return self.metrics(ranks_of_targets(item_indices, self.examples.targets))

    def evaluate(self, scorer: Callable[[Sequences], np.ndarray]) -> dict[str, float]:
        """Metrics of a system that scores the whole catalog.

        Args:
            scorer (`Callable`): takes [`Sequences`] of `B` histories and returns scores of shape `(B, C)`, columns in
                the order of the catalog. A target ranks behind the items that score strictly higher. `B` is chosen
                so that `B * C` stays bounded.

        Returns:
            `dict[str, float]`: as [`~Evaluator.metrics`].
        """
        ranks = np.empty(len(self.examples), dtype=np.int64)
        batch_size = max(1, _SCORES_AT_ONCE // len(self.catalog))
        for start in range(0, len(ranks), batch_size):
            rows = np.arange(start, min(start + batch_size, len(ranks)))
            scores = scorer(self.examples.histories.select(rows))
            ranks[rows] = ranks_of_scores(scores, self._target_columns[rows])
        return self.metrics(ranks)

    def gate_metrics(self, gates: np.ndarray) -> dict[str, float]:
        """How well a copy pointer's gate tells repeats from new items.

        Args:
            gates (`np.ndarray` of shape `(E,)`): Probability of copying for each of `self.examples`.

        Returns:
            `dict[str, float]`: `gate/mean`; where both kinds of target occur, also `gate/repeat` and `gate/new`, its
            means before them, and `gate/auc`.
        """
        from sklearn.metrics import roc_auc_score

        repeat = self._slices["repeat"]
        metrics = {"gate/mean": float(gates.mean())}
        if repeat.any() and not repeat.all():
            metrics["gate/repeat"] = float(gates[repeat].mean())
            metrics["gate/new"] = float(gates[~repeat].mean())
            metrics["gate/auc"] = float(roc_auc_score(repeat, gates))
        return metrics

    def _find_slices(self, item_counts: np.ndarray) -> dict[str, np.ndarray]:
        histories, targets = self.examples.histories, self.examples.targets
        matches = histories.items == np.repeat(targets, histories.lengths)
        owner = np.repeat(np.arange(len(targets)), histories.lengths)
        repeat = np.bincount(owner[matches], minlength=len(targets)) > 0
        warm = self._target_columns >= 0

        place = np.empty(len(self.catalog), dtype=np.int64)
        place[np.argsort(-item_counts[self.catalog], kind="stable")] = np.arange(len(self.catalog))
        third = np.where(warm, 3 * place[self._target_columns] // len(self.catalog), -1)
        return {"repeat": repeat, "new": ~repeat, "warm": warm} | {
            name: third == i for i, name in enumerate(_POPULARITY)
        }
