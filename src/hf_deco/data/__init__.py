"""From a log of interactions to training and evaluation examples."""

from .interactions import Interactions, read_interactions
from .items import ItemTable, read_items
from .sequences import Examples, Sequences
from .splits import Split, leave_one_out_split, temporal_split

__all__ = [
    "Examples",
    "Interactions",
    "ItemTable",
    "Sequences",
    "Split",
    "leave_one_out_split",
    "read_interactions",
    "read_items",
    "temporal_split",
]
