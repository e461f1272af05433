"""Metrics on items, slices of them, and the floors that need no training."""

from .evaluator import Evaluator
from .floors import CooccurrenceFloor, PopularityFloor, TextNeighborFloor, floor_metrics
from .metrics import MISS, ranking_metrics, ranks_of_scores, ranks_of_targets

__all__ = [
    "CooccurrenceFloor",
    "Evaluator",
    "MISS",
    "PopularityFloor",
    "TextNeighborFloor",
    "floor_metrics",
    "ranking_metrics",
    "ranks_of_scores",
    "ranks_of_targets",
]
