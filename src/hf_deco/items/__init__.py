"""Content to embeddings to semantic IDs."""

from .collisions import resolve_collisions
from .drift import EmbeddingDrift
from .embedding import check_embeddings, embed_texts
from .generations import IndexReader, IndexWriter, open_index
from .index import ItemIndex
from .packing import PackedRows
from .projection import Projection
from .quality import format_report, quality_report
from .quantizer_training import QuantizerTraining
from .reranking import Reranked
from .rq_kmeans import RQKMeans
from .sid_table import SIDTable
from .streaming import SIDUpdate, StreamingTokenizer
from .tokenizer import ItemTokenizer

__all__ = [
    "EmbeddingDrift",
    "IndexReader",
    "IndexWriter",
    "ItemIndex",
    "ItemTokenizer",
    "PackedRows",
    "Projection",
    "QuantizerTraining",
    "RQKMeans",
    "Reranked",
    "SIDTable",
    "SIDUpdate",
    "StreamingTokenizer",
    "check_embeddings",
    "embed_texts",
    "format_report",
    "open_index",
    "quality_report",
    "resolve_collisions",
]
