"""Generative recommendation on the Hugging Face stack: semantic IDs, Deco models, trie-constrained retrieval."""

__version__ = "0.1.0.dev0"

from transformers import AutoConfig, AutoModel, AutoProcessor

from .models.configuration_deco import BackboneConfig, DecoConfig
from .models.generation_sid import SIDGenerationConfig, SIDGenerationOutput, TrieLogitsProcessor
from .models.modeling_backbone import BackboneForSIDRetrieval
from .models.modeling_deco import DecoForSIDRetrieval
from .models.processing_deco import DecoProcessor
from .models.trie import SIDTrie

AutoConfig.register(DecoConfig.model_type, DecoConfig)
AutoModel.register(DecoConfig, DecoForSIDRetrieval)
AutoProcessor.register(DecoConfig, DecoProcessor)
AutoConfig.register(BackboneConfig.model_type, BackboneConfig)
AutoModel.register(BackboneConfig, BackboneForSIDRetrieval)
AutoProcessor.register(BackboneConfig, DecoProcessor)

__all__ = [
    "BackboneConfig",
    "BackboneForSIDRetrieval",
    "DecoConfig",
    "DecoForSIDRetrieval",
    "DecoProcessor",
    "SIDGenerationConfig",
    "SIDGenerationOutput",
    "SIDTrie",
    "TrieLogitsProcessor",
]
