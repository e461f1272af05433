"""What the configurations of all models share: they refuse what is not theirs."""

import difflib

import transformers

# Here, because package and checkpoints read this file first; what follows would fail in its own words.
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
    raise ImportError(
        f"hf_deco needs transformers>=5.24, but {transformers.__version__} is installed: run "
        "`pip install -U 'transformers>=5.24,<6'`."
    )

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME  # noqa: E402

NORMALIZATIONS = ("children", "vocabulary")
# What transformers, its Trainer or a tracker of checkpoints keeps in any configuration beside the declared arguments.
STANDARD_KEYS = {
    *("model_type", "auto_map", "custom_pipelines", "name_or_path", "quantization_config", "tie_word_embeddings"),
    *("attn_implementation", "experts_implementation", "output_attentions", "torch_dtype", "num_labels"),
    *("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "per_layer_config", "transformers_weights"),
}


@strict
class CheckedConfig(PreTrainedConfig):
    """A configuration that takes its declared arguments, and what transformers keeps in any, and nothing else."""

    def __post_init__(self, **kwargs):
        if kwargs.get("model_type", self.model_type) != self.model_type:
            raise ValueError(
                f"`model_type` is {kwargs['model_type']!r}, but {type(self).__name__} needs {self.model_type!r}: open "
                "the checkpoint with `AutoConfig` or `AutoModel`, which choose the class."
            )
        # The parent keeps whatever it is given as an attribute: a misspelt argument would pass in silence.
        unknown = sorted(name for name in kwargs if name not in STANDARD_KEYS and not name.startswith("_"))
        if unknown:
            close = difflib.get_close_matches(unknown[0], self.__dataclass_fields__, n=1, cutoff=0.8)
            raise ValueError(
                f"Unknown configuration arguments {unknown} of {type(self).__name__}"
                + (f"; did you mean `{close[0]}`?" if close else ".")
                + " A checkpoint that holds them was written by a later version, or by hand."
            )
        # The package registers its own pipeline; transformers would ask to run the checkpoint's.
        if not type(self).__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME):
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Configuration from what a `config.json` holds.

        Raises:
            ValueError: If its `model_type` is missing or another class's, or it holds unknown arguments.
        """
        if "model_type" not in config_dict:
            raise ValueError(
                f"The configuration has no `model_type`; a checkpoint of {cls.__name__} says {cls.model_type!r} in its "
                "`config.json`."
            )
        return super().from_dict(config_dict, **kwargs)
