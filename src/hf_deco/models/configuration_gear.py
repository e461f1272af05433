"""Configuration of GEAR: two towers, their tokenizer, a generator and a reranker."""

import random

# First, because it refuses a transformers that is too old for the rest.
from .configuration_sid import NORMALIZATIONS, CheckedConfig

# isort: split
from huggingface_hub.dataclasses import strict

QUANTIZERS = ("rq", "rq-ema", "simvq", "basis-rq", "prefix-basis-rq")
GAINS = ("linear", "exp2")
# Weights of the parts of the loss (Eq. 12), in the order in which training takes them up.
LOSS_WEIGHTS = {"ltr": 1.0, "rq": 1.0, "gen": 10.0, "rerank": 1.0}
# What a user has done, by kind; the paper's two sequences.
BEHAVIORS = ({"name": "clicks", "length": 200}, {"name": "conversions", "length": 100})
MOST_FEATURE_GROUPS = 28
GROUPING_SEED = 0
_SIZES = ("content_size", "feature_size", "tower_hidden_size", "tower_size", "code_size", "num_decoder_layers")
_SIZES += ("num_attention_heads", "head_dim", "intermediate_size")


@strict
class GearConfig(CheckedConfig):
    r"""
    Configuration of [`GearForSIDRetrieval`].

    A categorical feature is `{"name": ..., "size": V}`, or `{"name": ..., "size": V, "hashed": True}` where its values
    are open-ended: any integer from 0 is then hashed into `V` rows. Of a feature that is not hashed, values of `V` and
    above are unseen ones. They read as missing values (-1) do: as a vector of zeros.

    Args:
        content_size (`int`, *optional*, defaults to 384):
            Width of the items' content embeddings.
        content_scale (`float`, *optional*, defaults to 1.0):
            Factor of the content embeddings. Rows of length 1 are so small that towers lose the users' signal: choose
            it such that their root mean square is some 0.3.
        item_features (`list[dict]`, *optional*):
            Categorical features of items, in the order of their columns. None by default.
        user_features (`list[dict]`, *optional*):
            Categorical features of users. None by default.
        behaviors (`list[dict]`, *optional*):
            Sequences of items that a user has dealt with, each `{"name": ..., "length": T}`. Defaults to 200 clicks and
            100 conversions.
        feature_size (`int`, *optional*, defaults to 16):
            Width of the embedding of a categorical feature.
        tower_hidden_size (`int`, *optional*, defaults to 256):
            Width of the first hidden layer of both towers.
        tower_size (`int`, *optional*, defaults to 96):
            Width of what both towers put out, and of the reranker's user vectors.
        codebook_size (`list[int]`, *optional*):
            Codes of every level. Defaults to 2048, 512 and 128.
        code_size (`int`, *optional*, defaults to 128):
            Width of a code, and of the item tower's last hidden layer, which is what is quantised.
        quantizer (`str`, *optional*, defaults to `"prefix-basis-rq"`):
            How codebooks are made; see [`ResidualQuantizer`].
        newton_schulz_steps (`int`, *optional*, defaults to 5):
            Newton-Schulz steps of the two BasisRQs.
        commitment_weight (`float`, *optional*, defaults to 0.1):
            `eta` of Eq. 9.
        restart_dead_codes (`bool`, *optional*, defaults to `False`):
            Whether codes that are no longer chosen are moved; see [`VectorQuantizer`].
        feature_groups (`list[list[int]]`, *optional*):
            Columns of `user_features` that make one token of the memory each. By default a random partition into 28
            groups, or into as many as there are features.
        num_decoder_layers (`int`, *optional*, defaults to 2):
            Layers of the decoder.
        num_attention_heads (`int`, *optional*, defaults to 6):
            Heads of its attentions.
        head_dim (`int`, *optional*, defaults to 64):
            Width of a head; heads together are as wide as the decoder.
        intermediate_size (`int`, *optional*, defaults to 384):
            Width inside a gated feed-forward network.
        loss_weights (`dict`, *optional*):
            Weights of `"ltr"`, `"rq"`, `"gen"` and `"rerank"` (Eq. 12). Defaults to 1, 1, 10, 1. A part of weight 0 is
            not computed.
        sigma (`float`, *optional*, defaults to 1.0):
            Factor of score differences in the two ranking losses (Eq. 8, 11).
        gain (`str`, *optional*, defaults to `"linear"`):
            What a label is worth there: `"linear"`, itself, or `"exp2"`, `2^y - 1`.
        normalize_over (`str`, *optional*, defaults to `"vocabulary"`):
            What a code competes with in a search: `"vocabulary"`, all codes of its level, as in training, or
            `"children"`, those that continue its prefix in the catalog.
        num_items (`int`, *optional*, defaults to 0):
            Items in the catalog that the model carries; kept by `set_catalog`.
        catalog_version (`str`, *optional*):
            Version of the tokenizer that spelt the catalog; kept by `set_catalog`.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of freshly initialised weights.

    Example:
        ```python
        >>> from hf_deco import GearConfig
        >>> brand = {"name": "brand", "size": 1000, "hashed": True}
        >>> config = GearConfig(content_size=64, item_features=[brand], codebook_size=[64, 32])
        >>> config.num_codebooks, config.hidden_size
        (2, 384)

        ```
    """

    model_type = "gear"

    content_size: int = 384
    content_scale: float | int = 1.0
    item_features: list[dict] | None = None
    user_features: list[dict] | None = None
    behaviors: list[dict] | None = None
    feature_size: int = 16
    tower_hidden_size: int = 256
    tower_size: int = 96
    codebook_size: list[int] | tuple[int, ...] = (2048, 512, 128)
    code_size: int = 128
    quantizer: str = "prefix-basis-rq"
    newton_schulz_steps: int = 5
    commitment_weight: float | int = 0.1
    restart_dead_codes: bool = False
    feature_groups: list[list[int]] | None = None
    num_decoder_layers: int = 2
    num_attention_heads: int = 6
    head_dim: int = 64
    intermediate_size: int = 384
    loss_weights: dict | None = None
    sigma: float | int = 1.0
    gain: str = "linear"
    normalize_over: str = "vocabulary"
    num_items: int = 0
    catalog_version: str | None = None
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        self.item_features = list(self.item_features or [])
        self.user_features = list(self.user_features or [])
        if self.behaviors is None:
            self.behaviors = [dict(behavior) for behavior in BEHAVIORS]
        if self.feature_groups is None:
            self.feature_groups = random_groups(len(self.user_features))
        self.loss_weights = LOSS_WEIGHTS | (self.loss_weights or {})
        super().__post_init__(**kwargs)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Codes of every level, `K` integers."""
        return tuple(self.codebook_size)

    @property
    def num_codebooks(self) -> int:
        """SID levels `K`."""
        return len(self.codebook_size)

    @property
    def hidden_size(self) -> int:
        """Width of the decoder and of its memory."""
        return self.num_attention_heads * self.head_dim

    @property
    def item_feature_width(self) -> int:
        """Width of an item's features, side by side."""
        return self.content_size + len(self.item_features) * self.feature_size

    def validate_sizes(self):
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not self.codebook_size or any(size < 2 for size in self.codebook_size):
            raise ValueError(f"`codebook_size` must list a size of at least 2 per level, got {self.codebook_size}.")
        if self.num_items < 0:
            raise ValueError(f"`num_items` must not be negative, got {self.num_items}.")

    def validate_choices(self):
        for name, allowed in (("quantizer", QUANTIZERS), ("gain", GAINS), ("normalize_over", NORMALIZATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")

    def validate_features(self):
        check_entries("item_features", self.item_features, "size", {"hashed": bool})
        check_entries("user_features", self.user_features, "size", {"hashed": bool})
        check_entries("behaviors", self.behaviors, "length", {})
        if not self.behaviors:
            raise ValueError("`behaviors` needs at least one sequence.")
        grouped = sorted(column for group in self.feature_groups or [] for column in group)
        if grouped != list(range(len(self.user_features))) or not all(self.feature_groups):
            raise ValueError(
                f"`feature_groups` must hold each of the {len(self.user_features)} columns of `user_features` once, in "
                f"groups that are not empty, got {self.feature_groups}."
            )

    def validate_content_scale(self):
        if not 0 < self.content_scale < float("inf"):
            raise ValueError(f"`content_scale` must be positive and finite, got {self.content_scale}.")

    def validate_losses(self):
        if self.sigma <= 0:
            raise ValueError(f"`sigma` must be positive, got {self.sigma}.")
        if self.commitment_weight < 0:
            raise ValueError(f"`commitment_weight` must not be negative, got {self.commitment_weight}.")
        if set(self.loss_weights) != set(LOSS_WEIGHTS):
            raise ValueError(f"`loss_weights` may hold {', '.join(LOSS_WEIGHTS)}, got {', '.join(self.loss_weights)}.")
        weights = self.loss_weights.values()
        if not all(isinstance(weight, int | float) and 0 <= weight < float("inf") for weight in weights):
            raise ValueError(f"`loss_weights` must be finite and not negative, got {self.loss_weights}.")


def random_groups(num_features: int) -> list[list[int]]:
    """Columns `0 .. num_features - 1` in random order, in up to 28 groups whose sizes differ by at most one."""
    columns, number = list(range(num_features)), min(MOST_FEATURE_GROUPS, num_features)
    random.Random(GROUPING_SEED).shuffle(columns)
    return [columns[group::number] for group in range(number)]


def check_entries(argument: str, entries: list[dict], extent: str, optional: dict) -> None:
    """Raise a `ValueError` unless every entry has a name of its own and a positive `extent`, and nothing unknown."""
    names, kinds = [entry.get("name") for entry in entries], {"name": str, extent: int} | optional
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"`{argument}` must each have a `name` of their own, got {names}.")
    for entry in entries:
        known = all(type(value) is kinds.get(key) for key, value in entry.items())
        if not known or entry.get(extent, 0) < 1:
            also = f" and may have {', '.join(optional)}" if optional else ""
            raise ValueError(f"`{argument}` {entry['name']!r} needs {extent} (at least 1){also}, got {entry}.")


__all__ = ["GearConfig"]
