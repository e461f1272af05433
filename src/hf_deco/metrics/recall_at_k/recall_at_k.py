"""Recall@k with one relevant item an example. `evaluate` copies this file elsewhere and runs it there."""

import evaluate

from hf_deco.metrics.ranking import RankingMetric, compute_ranking, ranking_info

DESCRIPTION = """\
Share of examples whose relevant item stands among the first k. One item is relevant, so this is also the hit rate.
"""


class RecallAtK(RankingMetric, evaluate.Metric):
    """Recall at one or several cutoffs; the configuration `"slices"` takes `groups` as well."""

    def _info(self):
        return ranking_info(DESCRIPTION, "", self.config_name)

    def _compute(self, predictions, references, groups=None, k=10):
        return compute_ranking("recall", predictions, references, k, groups)
