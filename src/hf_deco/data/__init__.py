"""From a log of interactions to training and evaluation examples."""

from .events import EventLog, read_event_log, read_item_texts
from .interactions import Interactions, read_interactions
from .items import ItemTable, read_items
from .requests import Requests
from .roles import read_roles
from .sequences import Examples, Sequences
from .splits import Split, leave_one_out_split, temporal_split

__all__ = [
    "EventLog",
    "Examples",
    "Interactions",
    "ItemTable",
    "Requests",
    "Sequences",
    "Split",
    "leave_one_out_split",
    "read_event_log",
    "read_interactions",
    "read_item_texts",
    "read_items",
    "read_roles",
    "temporal_split",
]
