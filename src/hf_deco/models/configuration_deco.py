"""Configurations of the models that retrieve by semantic IDs: the light decoder's and the full backbone's."""

# First, because it refuses a transformers that is too old for the rest.
from .configuration_sid import NORMALIZATIONS, CheckedConfig

# isort: split
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

# Scratch backbones: Qwen2-style, feed-forward 4 x width. They read fused tokens only, so they carry no text vocabulary.
SCRATCH_BACKBONES = {
    "S": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "M": {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6},
    "L": {"hidden_size": 640, "num_hidden_layers": 8, "num_attention_heads": 10},
}
HISTORY_FORMATS = ("fused", "flat")
DECODER_INPUTS = ("last_state", "item_states_prefix", "item_states_cross", "token_states_cross")


def qwen2_shape(hidden_size: int, num_hidden_layers: int, num_attention_heads: int) -> dict:
    """Qwen2 configuration arguments of a model of this size that is trained from scratch on codes."""
    return {
        "model_type": "qwen2",
        "vocab_size": 1,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_attention_heads,
        "max_position_embeddings": 4096,
        "use_cache": False,
    }


def _init_kwargs(hidden_size: int, num_hidden_layers: int, num_attention_heads: int) -> dict:
    shape = qwen2_shape(hidden_size, num_hidden_layers, num_attention_heads)
    return {name: value for name, value in shape.items() if name != "model_type"}


@strict
class SIDRetrievalConfig(CheckedConfig):
    r"""
    What all models share: the backbone, the shape of SIDs, and how a history is read.

    Args:
        text_config (`dict` or `PreTrainedConfig`, *optional*):
            The backbone, any decoder-only model by its `model_type`. Defaults to the scratch backbone L (8 layers of
            640).
        num_codebooks (`int`, *optional*, defaults to 4):
            SID levels `K`.
        codebook_size (`int` or `list[int]`, *optional*, defaults to 2048):
            Codes per level `V`; a list of `K` sizes where levels differ.
        history_format (`str`, *optional*, defaults to `"fused"`):
            What the backbone reads: `"fused"`, one token per item (Eq. 3), or `"flat"`, its `K` code tokens.
        code_embedding_size (`int`, *optional*, defaults to 64):
            Width of the code embeddings that the fuser reads.
        tie_code_tables (`bool`, *optional*, defaults to `False`):
            Whether one table per level serves as output classes, as prefix embeddings and, its rows normalised to a
            root mean square of 1, as what the history is read from. Three tables otherwise.
        max_history_length (`int`, *optional*, defaults to 20):
            Items of a history that are read, the latest `T`.
        copy_pointer (`bool`, *optional*, defaults to `False`):
            Whether a pointer over the history is mixed in, for logs in which users come back to items (Eq. 11).
        normalize_over (`str`, *optional*, defaults to `"children"`):
            What a code competes with (Eq. 6): `"children"`, the valid next codes of its prefix, so that a forced level
            has probability 1 and all SIDs of the catalog sum to 1; or `"vocabulary"`, all codes of the level, invalid
            ones included.
        dropout (`float`, *optional*, defaults to 0.0):
            Dropout in the fuser and on the residual branches of the backbone. Scratch backbones want 0.3.
        distillation (`dict`, *optional*):
            What a distilled model was trained with: `temperature`, `ce_weight`, `kd_weight` (Eq. 9).
        num_items (`int`, *optional*, defaults to 0):
            Items in the catalog that the model carries; kept by `set_catalog`.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of freshly initialised weights.
    """

    sub_configs_defaults = {
        "text_config": SubConfigSpec(
            AutoConfig, model_type="qwen2", init_kwargs=_init_kwargs(**SCRATCH_BACKBONES["L"])
        ),
    }

    text_config: dict | PreTrainedConfig | None = None
    num_codebooks: int = 4
    codebook_size: int | list[int] | tuple[int, ...] = 2048
    history_format: str = "fused"
    code_embedding_size: int = 64
    tie_code_tables: bool = False
    max_history_length: int = 20
    copy_pointer: bool = False
    normalize_over: str = "children"
    dropout: float | int = 0.0
    distillation: dict | None = None
    num_items: int = 0
    initializer_range: float = 0.02

    @classmethod
    def from_preset(cls, size: str, **kwargs):
        """Configuration with a scratch backbone.

        Args:
            size (`str`): `"S"` (2 layers of 128), `"M"` (4 of 384) or `"L"` (8 of 640).
            kwargs: Any other argument; `dropout` is 0.3 unless given.

        Raises:
            ValueError: If there is no such preset.
        """
        if size not in SCRATCH_BACKBONES:
            raise ValueError(f"`size` must be one of {', '.join(SCRATCH_BACKBONES)}, got {size!r}.")
        kwargs.setdefault("dropout", 0.3)
        return cls(text_config=qwen2_shape(**SCRATCH_BACKBONES[size]), **kwargs)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Codes of every level, `K` integers."""
        if isinstance(self.codebook_size, int):
            return (self.codebook_size,) * self.num_codebooks
        return tuple(self.codebook_size)

    @property
    def output_width(self) -> int:
        """Width of the output class vectors: that of the transformer that scores codes."""
        return self.text_config.hidden_size

    @property
    def tokens_per_item(self) -> int:
        """Tokens that the backbone reads for each item: 1 fused, `K` flat."""
        return 1 if self.history_format == "fused" else self.num_codebooks

    def validate_codebooks(self):
        for name in ("num_codebooks", "code_embedding_size", "max_history_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not isinstance(self.codebook_size, int) and len(self.codebook_size) != self.num_codebooks:
            raise ValueError(
                f"`codebook_size` lists {len(self.codebook_size)} levels but `num_codebooks` is {self.num_codebooks}: "
                "give one size for all levels or one per level."
            )
        if any(size < 1 for size in self.codebook_sizes):
            raise ValueError(f"`codebook_size` must be positive, got {self.codebook_size}.")

    def validate_options(self):
        for name, allowed in (("normalize_over", NORMALIZATIONS), ("history_format", HISTORY_FORMATS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must lie in [0, 1), got {self.dropout}.")
        if self.num_items < 0:
            raise ValueError(f"`num_items` must not be negative, got {self.num_items}.")


@strict
class DecoConfig(SIDRetrievalConfig):
    r"""
    Configuration of [`DecoForSIDRetrieval`]: a backbone that reads the history, a light decoder that spells semantic
    IDs. All arguments of [`SIDRetrievalConfig`], and:

    Args:
        decoder_config (`dict` or `PreTrainedConfig`, *optional*):
            The light decoder. Defaults to 2 layers of width 256 with 4 heads.
        num_concepts (`int`, *optional*, defaults to 2):
            Concept vectors `M` that the history is condensed into (Eq. 5).
        decoder_input (`str`, *optional*, defaults to `"last_state"`):
            What the decoder sees of a history: `"last_state"`, the concept alone, of fixed size;
            `"item_states_prefix"`, all item states as its prefix; or beside the concept, by cross-attention in every
            layer, `"item_states_cross"`, all item states, or `"token_states_cross"`, the states of all code tokens of a
            flat history.
        decoder_dropout (`float`, *optional*, defaults to 0.0):
            Dropout on the residual branches of the light decoder.
        content_size (`int`, *optional*, defaults to 0):
            Width of the items' content embeddings, by which a reranking head tells items of one SID apart. 0 for no
            head: of items that share a SID only the first can be retrieved.
        rerank_size (`int`, *optional*, defaults to 96):
            Width of the vectors that the head multiplies, where there is one.

    Example:
        ```python
        >>> from hf_deco import DecoConfig
        >>> config = DecoConfig.from_preset("S", codebook_size=[256, 256, 64], num_codebooks=3)
        >>> config.codebook_sizes
        (256, 256, 64)

        ```
    """

    model_type = "deco"
    sub_configs_defaults = {
        **SIDRetrievalConfig.sub_configs_defaults,
        "decoder_config": SubConfigSpec(AutoConfig, model_type="qwen2", init_kwargs=_init_kwargs(256, 2, 4)),
    }

    decoder_config: dict | PreTrainedConfig | None = None
    num_concepts: int = 2
    decoder_input: str = "last_state"
    decoder_dropout: float | int = 0.0
    content_size: int = 0
    rerank_size: int = 96

    @property
    def output_width(self) -> int:
        return self.decoder_config.hidden_size

    def validate_decoder(self):
        if self.decoder_input not in DECODER_INPUTS:
            raise ValueError(f"`decoder_input` must be one of {', '.join(DECODER_INPUTS)}, got {self.decoder_input!r}.")
        if self.decoder_input == "token_states_cross" and self.history_format != "flat":
            raise ValueError(
                "`decoder_input` 'token_states_cross' reads the code tokens of a flat history, but `history_format` is "
                f"{self.history_format!r}: set it to 'flat', or read 'item_states_cross'."
            )
        if self.num_concepts < 1:
            raise ValueError(f"`num_concepts` must be at least 1, got {self.num_concepts}.")
        if not 0 <= self.decoder_dropout < 1:
            raise ValueError(f"`decoder_dropout` must lie in [0, 1), got {self.decoder_dropout}.")
        if self.content_size < 0:
            raise ValueError(f"`content_size` must not be negative, got {self.content_size}.")
        if self.rerank_size < 1:
            raise ValueError(f"`rerank_size` must be at least 1, got {self.rerank_size}.")


@strict
class BackboneConfig(SIDRetrievalConfig):
    r"""
    Configuration of [`BackboneForSIDRetrieval`]: the backbone reads the history and spells semantic IDs itself, as
    FlatGR (`history_format="flat"`) and FusedGR do. Its arguments are those of [`SIDRetrievalConfig`].
    """

    model_type = "sid_backbone"


__all__ = ["BackboneConfig", "DecoConfig"]
