"""NDCG@k with one relevant item an example. `evaluate` copies this file elsewhere and runs it there."""

import evaluate

from hf_deco.metrics.ranking import RankingMetric, compute_ranking, ranking_info

DESCRIPTION = """\
Normalised discounted cumulative gain: an example is worth 1 / log2(r + 2) where its item stands at rank r < k, counted
from 0, and nothing otherwise; the mean over examples. One item is relevant, so the ideal ranking is worth 1.
"""
CITATION = """\
@article{jarvelin2002cumulated,
  title = {Cumulated gain-based evaluation of {IR} techniques},
  author = {J{\\"a}rvelin, Kalervo and Kek{\\"a}l{\\"a}inen, Jaana},
  journal = {ACM Transactions on Information Systems},
  volume = {20},
  number = {4},
  pages = {422--446},
  year = {2002}
}
"""


class NDCGAtK(RankingMetric, evaluate.Metric):
    """NDCG at one or several cutoffs; the configuration `"slices"` takes `groups` as well."""

    def _info(self):
        return ranking_info(DESCRIPTION, CITATION, self.config_name)

    def _compute(self, predictions, references, groups=None, k=10):
        return compute_ranking("ndcg", predictions, references, k, groups)
