"""Options of a search over semantic IDs, and what it returns."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

DEFAULT_NUM_BEAMS = 100
_KNOWN = "`num_beams`, `num_return_sequences`, `return_dict_in_generate`, `skip_forced_levels`, `exclude_seen`"


class SIDGenerationConfig(GenerationConfig):
    """Options of [`SIDGenerationMixin.generate`].

    Args:
        num_beams (`int` or `list[int]`, *optional*): Beam width `B`; a list of `K` widths where levels differ. Defaults
            to 100.
        num_return_sequences (`int`, *optional*): Items returned per user, at most the last beam width. Defaults to 10,
            or to the last beam width where that is smaller.
        return_dict_in_generate (`bool`, *optional*): Return a [`SIDGenerationOutput`] instead of the sequences alone.
        skip_forced_levels (`bool`, *optional*): Spend no model work on prefixes with one continuation, whose
            probability is 1 under `normalize_over="children"`. Results are the same; defaults to `True`.
        exclude_seen (`bool`, *optional*): Leave out the items of the history, with all that share their SIDs. Defaults
            to `False`.

    Raises:
        ValueError: For any other argument, and for values that no search could run with.
    """

    def __init__(self, **kwargs):
        # The parent's many fields describe text generation; a search over SIDs reads only these.
        self.num_beams: int | list[int] | None = kwargs.pop("num_beams", None)
        self.num_return_sequences: int | None = kwargs.pop("num_return_sequences", None)
        self.return_dict_in_generate: bool | None = kwargs.pop("return_dict_in_generate", None)
        self.skip_forced_levels: bool | None = kwargs.pop("skip_forced_levels", None)
        self.exclude_seen: bool | None = kwargs.pop("exclude_seen", None)
        self._commit_hash = kwargs.pop("_commit_hash", None)
        self._from_model_config = kwargs.pop("_from_model_config", None)
        self.transformers_version = kwargs.pop("transformers_version", None)
        if kwargs:
            raise ValueError(f"Unknown generation arguments {sorted(kwargs)}; a search over SIDs takes {_KNOWN}.")
        self.validate()

    def validate(self, **unused):
        self.num_beams, self.num_return_sequences = _plain(self.num_beams), _plain(self.num_return_sequences)
        widths = (
            [] if self.num_beams is None else self.num_beams if isinstance(self.num_beams, list) else [self.num_beams]
        )
        for width in widths:
            if not isinstance(width, int) or isinstance(width, bool) or width < 1:
                raise ValueError(f"`num_beams` must be a positive integer or a list of them, got {self.num_beams!r}.")
        number = self.num_return_sequences
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(f"`num_return_sequences` must be a positive integer, got {number!r}.")
        if self.exclude_seen not in (None, True, False):
            raise ValueError(f"`exclude_seen` must be True or False, got {self.exclude_seen!r}.")

    def resolve(self, num_codebooks: int) -> tuple[list[int], int]:
        """Beam width of every level and the number of sequences to return, checked against each other."""
        widths = DEFAULT_NUM_BEAMS if self.num_beams is None else self.num_beams
        widths = list(widths) if isinstance(widths, list) else [widths] * num_codebooks
        if len(widths) != num_codebooks:
            raise ValueError(
                f"`num_beams` lists {len(widths)} widths for {num_codebooks} SID levels: give one for each level."
            )
        number = min(10, widths[-1]) if self.num_return_sequences is None else self.num_return_sequences
        if number > widths[-1]:
            raise ValueError(
                f"`num_return_sequences` ({number}) must not exceed `num_beams` ({widths[-1]} at the last level): "
                "widen the beam."
            )
        return widths, number

    @staticmethod
    def _get_default_generation_params() -> dict[str, Any]:
        return {}

    @classmethod
    def from_model_config(cls, model_config):
        # transformers asks for this while it builds a model, and takes exactly this error for "use the defaults".
        raise NotImplementedError("SID models keep no generation options in their model configuration.")


def _plain(value):
    """Integers of any kind, and sequences of them, as plain ones; everything else as it is."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


@dataclass
class SIDGenerationOutput(ModelOutput):
    """
    Result of a search, best first for every user, flattened over users and their `R` returned sequences.

    Args:
        sequences (`torch.LongTensor` of shape `(batch_size * R, K)`): SIDs; a user with fewer reachable items than `R`
            has rows of -1 at the end.
        sequences_scores (`torch.FloatTensor` of shape `(batch_size * R,)`): Log-probabilities of SIDs, or of items
            where these were ranked; `-inf` for rows of -1.
        item_rows (`torch.LongTensor` of shape `(batch_size * R,)`): Catalog row of every SID, its first item where
            several share it and no reranking head ranked them, -1 for rows of -1.
        gates (`torch.FloatTensor` of shape `(batch_size,)`, *optional*): Probability of copying, of models with a copy
            pointer.
    """

    sequences: torch.LongTensor | None = None
    sequences_scores: torch.FloatTensor | None = None
    item_rows: torch.LongTensor | None = None
    gates: torch.FloatTensor | None = None


__all__ = ["SIDGenerationConfig", "SIDGenerationOutput"]
