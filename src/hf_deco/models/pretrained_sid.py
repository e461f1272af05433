"""Pretrained backbones: any decoder-only language model, by name or path, in the place of a fresh one."""

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel, PreTrainedConfig

from .layers_sid import add_residual_dropout, drop_text_embedding


def causal_lm_config(name: str) -> PreTrainedConfig:
    """Configuration of a decoder-only language model.

    Args:
        name (`str`): Folder of the model, or its name on the Hub.

    Raises:
        OSError: If there is no such model.
        ValueError: If it is not a decoder-only language model.
    """
    name = str(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise OSError(f"`backbone` {name!r} is neither a folder with a model nor one on the Hub ({error}).") from error
    except ValueError as error:
        raise ValueError(f"`backbone` {name!r} is of a kind that transformers does not know ({error}).") from error
    # Encoders are in the mapping too, for those that were turned into decoders.
    decodes = getattr(config, "is_decoder", True) and not getattr(config, "is_encoder_decoder", False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not decodes:
        raise ValueError(
            f"`backbone` {name!r} is a {config.model_type!r}, not a decoder-only language model: name one, such as "
            "Qwen/Qwen2.5-0.5B."
        )
    return config


class PretrainedBackboneMixin:
    """Gives a model its `from_backbone`."""

    @classmethod
    def from_backbone(cls, name: str, dtype: torch.dtype | None = None, **kwargs):
        """A model whose backbone is a pretrained language model; all its other parts are fresh.

        The table of text embeddings and the language head are left out: histories are codes.

        Args:
            name (`str`): Folder of a decoder-only language model, or its name on the Hub.
            dtype (`torch.dtype`, *optional*): Type of all weights; that of the language model by default.
            kwargs: Arguments of the model's configuration, all but `text_config`.

        Raises:
            OSError: If there is no such model.
            ValueError: If it is not a decoder-only language model, or its weights are not whole.

        Example:
            ```python
            >>> from hf_deco import DecoForSIDRetrieval
            >>> model = DecoForSIDRetrieval.from_backbone("Qwen/Qwen2.5-0.5B", codebook_size=256)  # doctest: +SKIP

            ```
        """
        text_config = causal_lm_config(name)
        config = cls.config_class(text_config=text_config, **kwargs)
        model = cls._from_config(config, dtype=dtype or text_config.dtype or torch.float32)
        # After construction, which initialises whatever it finds.
        backbone, info = AutoModel.from_pretrained(
            name, config=config.text_config, dtype=model.dtype, output_loading_info=True
        )
        missing = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
        if missing:
            raise ValueError(
                f"`backbone` {str(name)!r} lacks {len(missing)} tensors of its model, such as {missing[:3]}: its "
                "weights are not whole, or not a language model's."
            )
        model.config.text_config = backbone.config  # the copy that its layers hold, so that later changes reach them
        model.backbone = drop_text_embedding(backbone)
        add_residual_dropout(model.backbone, config.dropout)
        return model.eval()
