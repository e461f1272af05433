"""Content to embeddings to semantic IDs."""

from .collisions import resolve_collisions
from .embedding import check_embeddings, embed_texts
from .quality import format_report, quality_report
from .rq_kmeans import RQKMeans
from .sid_table import SIDTable

__all__ = [
    "RQKMeans",
    "SIDTable",
    "check_embeddings",
    "embed_texts",
    "format_report",
    "quality_report",
    "resolve_collisions",
]
