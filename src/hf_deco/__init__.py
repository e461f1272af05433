"""Generative recommendation on the Hugging Face stack: semantic IDs, Deco models, trie-constrained retrieval."""

__version__ = "0.1.0.dev0"

# First, because it refuses a transformers that is too old for the rest.
from .models.configuration_deco import BackboneConfig, DecoConfig

# isort: split
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.pipelines import PIPELINE_REGISTRY

from .models.configuration_gear import GearConfig
from .models.filters_sid import ItemSet
from .models.generation_config_sid import SIDGenerationConfig, SIDGenerationOutput
from .models.generation_sid import TrieLogitsProcessor
from .models.modeling_backbone import BackboneForSIDRetrieval
from .models.modeling_deco import DecoForSIDRetrieval
from .models.modeling_gear import GearForSIDRetrieval
from .models.pipeline_sid import TASK, SIDRetrievalPipeline
from .models.processing_deco import DecoProcessor
from .models.processing_gear import GearProcessor
from .models.trie import SIDTrie

for _config, _model, _processor in (
    (DecoConfig, DecoForSIDRetrieval, DecoProcessor),
    (BackboneConfig, BackboneForSIDRetrieval, DecoProcessor),
    (GearConfig, GearForSIDRetrieval, GearProcessor),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
    AutoProcessor.register(_config, _processor)
    # From here on whatever is saved carries its code, and loads without this package by `trust_remote_code=True`.
    _config.register_for_auto_class("AutoConfig")
    _model.register_for_auto_class("AutoModel")
    _processor.register_for_auto_class("AutoProcessor")
PIPELINE_REGISTRY.register_pipeline(TASK, pipeline_class=SIDRetrievalPipeline, pt_model=AutoModel)

__all__ = [
    "BackboneConfig",
    "BackboneForSIDRetrieval",
    "DecoConfig",
    "DecoForSIDRetrieval",
    "DecoProcessor",
    "GearConfig",
    "GearForSIDRetrieval",
    "GearProcessor",
    "ItemSet",
    "SIDGenerationConfig",
    "SIDGenerationOutput",
    "SIDRetrievalPipeline",
    "SIDTrie",
    "TrieLogitsProcessor",
]
