"""Attention of beams over a history that all beams of a user share, merged with each beam's own suffix."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface

SHARED_HISTORY = "sid_shared_history"
# Layers look their attention up in the model's configuration, which threads share: one reads at a time.
CONFIGURED_ATTENTION = threading.RLock()


@dataclass
class SharedHistory:
    """Keys and values of histories, once per user, and which beams belong to whom.

    Attributes:
        keys, values (`list` of `torch.Tensor` of shape `(U, T, H_kv, d)`): Of every layer; finite at padding.
        mask (`torch.BoolTensor` of shape `(U, T)`): Positions that exist.
        users (`torch.LongTensor` of shape `(R,)`): User of every beam, ascending.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    mask: torch.BoolTensor
    users: torch.LongTensor

    def __post_init__(self):
        counts = torch.bincount(self.users, minlength=self.mask.shape[0])
        starts = torch.cumsum(counts, 0) - counts
        self.width = int(counts.max())
        self.cells = self.users * self.width + torch.arange(self.users.shape[0], device=counts.device)
        self.cells -= starts[self.users]

    def group(self, rows: torch.Tensor) -> torch.Tensor:
        """Beams `(R, H, d)` by user: `(U, H, width, d)`, zeros where a user has fewer."""
        shape = (self.mask.shape[0] * self.width, *rows.shape[1:])
        if rows.shape[0] != shape[0]:
            rows = rows.new_zeros(shape).index_copy_(0, self.cells, rows)
        return rows.unflatten(0, (-1, self.width)).transpose(1, 2)

    def ungroup(self, grouped: torch.Tensor) -> torch.Tensor:
        """The inverse of `group`: `(U, H, width, d)` to `(R, H, d)`."""
        rows = grouped.transpose(1, 2).flatten(0, 1)
        return rows if rows.shape[0] == self.cells.shape[0] else rows.index_select(0, self.cells)


def attend_shared(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, shared: SharedHistory, scaling: float
) -> torch.Tensor:
    """Attention of one new token per beam over its user's history and its own suffix, under one softmax.

    The history is read once per user, by all its beams in one product; it is never copied to beams.

    Args:
        query (`torch.Tensor` of shape `(R, H, d)`): Queries of the new tokens.
        keys, values (`torch.Tensor` of shape `(R, s, H_kv, d)`): Suffixes, the new tokens included.
        layer (`int`): Index of the layer.
        shared ([`SharedHistory`]): Histories.
        scaling (`float`): Factor of the scores.

    Returns:
        `torch.Tensor` of shape `(R, H, d)`.
    """
    repeats = query.shape[1] // keys.shape[2]
    keys, values = (part.repeat_interleave(repeats, 2) for part in (keys, values))  # (R, s, H, d)
    past = shared.keys[layer], shared.values[layer]
    past_keys, past_values = (part.transpose(1, 2).repeat_interleave(repeats, 1) for part in past)  # (U, H, T, d)

    past_scores = shared.group(query) @ past_keys.transpose(2, 3)  # (U, H, width, T)
    past_scores = past_scores.masked_fill(~shared.mask[:, None, None], torch.finfo(past_scores.dtype).min)
    past_length = past_scores.shape[-1]
    own_scores = (query.unsqueeze(1) * keys).sum(-1).transpose(1, 2)  # (R, H, s)
    scores = torch.cat([shared.ungroup(past_scores), own_scores], -1)
    weights = (scores.float() * scaling).softmax(-1).to(values.dtype)  # (R, H, T + s)

    read = shared.ungroup(shared.group(weights[..., :past_length]) @ past_values)
    return read + (weights[..., past_length:].transpose(1, 2).unsqueeze(-1) * values).sum(1)


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
    """[`attend_shared`] as transformers calls attention: queries `(R, H, 1, d)`, keys and values `(R, H_kv, s, d)`.

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
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    attended = attend_shared(query.squeeze(2), key, value, module.layer_idx, shared_history, scaling)
    return attended.unsqueeze(1), None


AttentionInterface.register(SHARED_HISTORY, shared_history_attention)


@contextmanager
def attention_over_shared_history(transformer: nn.Module):
    """Let a decoder-only model attend over a [`SharedHistory`], given to its `forward` as `shared_history`."""
    with CONFIGURED_ATTENTION:
        before = transformer.config._attn_implementation
        transformer.config._attn_implementation = SHARED_HISTORY
        try:
            yield
        finally:
            transformer.config._attn_implementation = before
