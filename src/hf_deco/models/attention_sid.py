"""Attention of beams over a history that all beams of a user share, merged with each beam's own suffix."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache

SHARED_HISTORY = "sid_shared_history"


@dataclass
class SharedHistory:
    """Keys and values of histories, once per user, and which beams belong to whom.

    Attributes:
        cache ([`DynamicCache`]): Keys and values `(U, heads, T, head_dim)` of every layer.
        mask (`torch.BoolTensor` of shape `(U, T)`): Positions that exist.
        users (`torch.LongTensor` of shape `(R,)`): User of every beam, ascending.
    """

    cache: DynamicCache
    mask: torch.BoolTensor
    users: torch.LongTensor

    def __post_init__(self):
        counts = torch.bincount(self.users, minlength=self.mask.shape[0])
        starts = torch.cumsum(counts, 0) - counts
        self.slots = torch.arange(self.users.shape[0], device=self.users.device) - starts[self.users]
        self.width = int(counts.max())

    def group(self, rows: torch.Tensor) -> torch.Tensor:
        """Beams `(R, H, d)` by user: `(U, H, width, d)`, zeros where a user has fewer."""
        grouped = rows.new_zeros((self.mask.shape[0], self.width, *rows.shape[1:]))
        grouped[self.users, self.slots] = rows
        return grouped.transpose(1, 2)

    def ungroup(self, grouped: torch.Tensor) -> torch.Tensor:
        """The inverse of `group`: `(U, H, width, d)` to `(R, H, d)`."""
        return grouped[self.users, :, self.slots]


def shared_history_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    shared_history: SharedHistory,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per beam over its user's history and its own suffix, under one softmax.

    The history is read once per user, by all its beams in one product; it is never copied to beams.

    Args:
        module (`nn.Module`): The attention layer; gives its index and the number of query heads per key head.
        query (`torch.Tensor` of shape `(R, H, 1, d)`): Queries of the new tokens.
        key, value (`torch.Tensor` of shape `(R, H_kv, s, d)`): Suffixes, the new tokens included.
        attention_mask (`torch.Tensor`): Not read: a beam sees its whole suffix.
        scaling (`float`): Factor of the scores.
        shared_history ([`SharedHistory`]): Histories.

    Returns:
        Outputs `(R, 1, H, d)`, and None in place of the weights.

    Raises:
        ValueError: If the layer wants an attention that this is not: score capping, sinks, or a window shorter than the
            history.
    """
    window = kwargs.get("sliding_window")
    too_long = window is not None and shared_history.mask.shape[1] + key.shape[2] > window
    if too_long or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(
            f"The search of a full backbone knows plain attention alone, but {type(module).__name__} caps its scores, "
            f"has sinks, or has a window ({window}) shorter than the history: use another backbone, or a light decoder."
        )
    layer = shared_history.cache.layers[module.layer_idx]
    repeats = query.shape[1] // key.shape[1]
    past_keys, past_values = (part.repeat_interleave(repeats, 1) for part in (layer.keys, layer.values))
    key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))

    past_scores = shared_history.group(query.squeeze(2)) @ past_keys.transpose(2, 3)  # (U, H, width, T)
    past_scores = past_scores.masked_fill(~shared_history.mask[:, None, None], torch.finfo(past_scores.dtype).min)
    past_length = past_scores.shape[-1]
    scores = torch.cat([shared_history.ungroup(past_scores), (query @ key.transpose(2, 3)).squeeze(2)], -1)
    weights = (scores.float() * scaling).softmax(-1).to(query.dtype)  # (R, H, T + s)

    past = shared_history.ungroup(shared_history.group(weights[..., :past_length]) @ past_values)
    suffix = (weights[..., past_length:].unsqueeze(2) @ value).squeeze(2)
    return (past + suffix).unsqueeze(1), None


AttentionInterface.register(SHARED_HISTORY, shared_history_attention)


@contextmanager
def attention_over_shared_history(transformer: nn.Module):
    """Let a decoder-only model attend over a [`SharedHistory`], given to its `forward` as `shared_history`."""
    before = transformer.config._attn_implementation
    transformer.config._attn_implementation = SHARED_HISTORY
    try:
        yield
    finally:
        transformer.config._attn_implementation = before
