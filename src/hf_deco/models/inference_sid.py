"""Qwen2-type transformers over flat tokens, for inference.

transformers runs its models over padded batches, every layer at every position, and spends most of a small model's time
in elementwise operations. Here tokens of all histories or prefixes lie one behind the other, `(N, d)`: no padding is
computed, the last layer is spared where nothing reads it, and what stands between two matrix products is one function
of tensors, which `torch.compile` turns into one loop. Weights are the model's own; results are the model's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2MLP,
    Qwen2Model,
    Qwen2RMSNorm,
)

from .attention_sid import SharedHistory, attend_shared
from .layers_sid import drop
from .trie import spread_ranges

_MOST_GRAPHS = 64  # of one function, for all models of a process
FEW_ROWS = 512  # with no more than these, calling compiled functions costs more time than they save
_LONG = 128  # attention scores of sequences of more tokens are better never kept

# Attention of flat tokens: (layer, queries, keys, values), each (N, heads, head_dim), to outputs (N', heads, head_dim).
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows `(..., d)` at a root mean square of 1, times a weight; in float32 between."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)


def rotate(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of `(N, heads, head_dim)`, with the angles' `cos` and `sin` `(N, head_dim / 2)`."""
    first, second = vectors.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def project_queries(normed, weight, bias, cos, sin):
    """Rotated vectors `(N, heads, head_dim)` of normalised tokens `(N, d)`: queries, or keys."""
    return rotate(F.linear(normed, weight, bias).unflatten(-1, (-1, 2 * cos.shape[-1])), cos, sin)


def feed_forward(tokens, attended, out_weight, out_bias, norm_weight, eps, gate_weight, up_weight, down_weight):
    """The second half of a layer: tokens `(N, d)`, after what attention brought, `(N, heads * head_dim)`."""
    tokens = tokens + F.linear(attended, out_weight, out_bias)
    normed = rms_norm(tokens, norm_weight, eps)
    return tokens + F.linear(F.silu(F.linear(normed, gate_weight)) * F.linear(normed, up_weight), down_weight)


def attend_own(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of one query per row over the row's own few keys, all of which it sees.

    Args:
        query (`torch.Tensor` of shape `(R, H, d)`): Queries.
        keys, values (`torch.Tensor` of shape `(R, S, H_kv, d)`): The rows' keys and values.
        scaling (`float`): Factor of the scores.

    Returns:
        `torch.Tensor` of shape `(R, H, d)`.
    """
    grouped = query.unflatten(1, (keys.shape[2], -1)).unsqueeze(1)  # (R, 1, H_kv, H / H_kv, d)
    keys, values = keys.unsqueeze(3), values.unsqueeze(3)
    weights = ((grouped.float() * keys.float()).sum(-1, keepdim=True) * scaling).softmax(1)
    return (weights * values.float()).sum(1).to(query.dtype).flatten(1, 2)


@dataclass
class Kernels:
    """The functions between matrix products: as they stand, or compiled."""

    rms_norm: Callable = rms_norm
    project_queries: Callable = project_queries
    feed_forward: Callable = feed_forward
    attend_own: Callable = attend_own

    @classmethod
    def compiled(cls) -> "Kernels":
        """All of them compiled, for tokens of any number."""
        functions = {name: getattr(EAGER, name) for name in cls.__dataclass_fields__}
        return cls(**{name: torch.compile(function, dynamic=True) for name, function in functions.items()})

    def __reduce__(self):
        # So that a model can be pickled: what is compiled cannot, and is compiled anew.
        return "EAGER" if self is EAGER else (Kernels.compiled, ())

    def allow_graphs(self) -> None:
        """Let this thread compile as many graphs as there are shapes of weights, types of numbers and autocast states;
        above its limit, which torch keeps by thread, the compiler would go back to eager."""
        if self is not EAGER and torch._dynamo.config.recompile_limit < _MOST_GRAPHS:
            torch._dynamo.config.recompile_limit = _MOST_GRAPHS


EAGER = Kernels()


@dataclass
class Layout:
    """Where the tokens of `U` sequences, one behind the other, lie in a padded `(U, T)` grid, all from its left edge.

    Attributes:
        lengths (`torch.LongTensor` of shape `(U,)`): Tokens of every sequence; some, not all, may be 0.
        positions (`torch.LongTensor` of shape `(N,)`): Place of every token in its sequence.
        slots (`torch.LongTensor` of shape `(N,)`): Cell of every token in the flattened grid.
        last (`torch.LongTensor` of shape `(U,)`): Last token of every sequence, in `0 .. N - 1`; any one of an empty
            sequence.
        width (`int`): Longest sequence `T`.
    """

    lengths: torch.LongTensor
    positions: torch.LongTensor
    slots: torch.LongTensor
    last: torch.LongTensor
    width: int

    @classmethod
    def of(cls, lengths: torch.LongTensor) -> "Layout":
        """The layout of sequences of these lengths."""
        ends, width = lengths.cumsum(0), int(lengths.max()) if lengths.numel() else 0
        rows, positions = spread_ranges(torch.zeros_like(lengths), lengths)
        return cls(lengths, positions, rows * width + positions, (ends - 1).clamp(min=0), width)

    @classmethod
    def grid(cls, lengths: torch.LongTensor, width: int) -> "Layout":
        """A layout that holds all cells of the grid: tokens behind the end of a sequence are computed, and never seen.
        It does not wait for the device to tell lengths."""
        cells = torch.arange(lengths.shape[0] * width, device=lengths.device)
        last = torch.arange(lengths.shape[0], device=lengths.device) * width + (lengths - 1).clamp(min=0)
        return cls(lengths, cells % width, cells, last, width)

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """Rows of tokens `(N, ...)` in the grid, `(U, T, ...)`, zero elsewhere."""
        shape = (self.lengths.shape[0], self.width, *flat.shape[1:])
        if flat.shape[0] == shape[0] * shape[1]:
            return flat.view(shape)
        return flat.new_zeros((shape[0] * shape[1], *shape[2:])).index_copy_(0, self.slots, flat).view(shape)

    def flatten(self, padded: torch.Tensor) -> torch.Tensor:
        """The inverse of `pad`: `(U, T, ...)` to `(N, ...)`."""
        flat = padded.flatten(0, 1)
        return flat if flat.shape[0] == self.slots.shape[0] else flat.index_select(0, self.slots)

    def mask(self) -> torch.BoolTensor:
        """Cells that hold a token, `(U, T)`."""
        return torch.arange(self.width, device=self.lengths.device) < self.lengths.unsqueeze(1)


@dataclass
class ReadSequences:
    """Sequences that were read.

    Attributes:
        layout ([`Layout`]): Where they begin and end.
        states (`torch.Tensor` of shape `(N, d)` or `(U, d)`): Final states of all tokens, or of each sequence's last.
        last_only (`bool`): Which of the two.
        keys, values (`list` of `torch.Tensor` of shape `(U, T, H_kv, head_dim)`): Of every layer. Behind
            the ends lie zeros or, in a layout of all cells, keys and values of tokens that nothing sees.
    """

    layout: Layout
    states: torch.Tensor
    last_only: bool
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def last_states(self, start_state: torch.Tensor) -> torch.Tensor:
        """State `(U, d)` after every sequence, the start state after those without tokens."""
        if self.layout.width == 0:
            return start_state.to(self.states.dtype).expand(self.layout.lengths.shape[0], -1)
        last = self.states if self.last_only else self.states.index_select(0, self.layout.last)
        return torch.where((self.layout.lengths > 0).unsqueeze(1), last, start_state.to(last.dtype))


def attend_causally(query, keys, values, scaling: float) -> torch.Tensor:
    """Attention of all tokens of every sequence to those up to themselves: [`attend_sequences`] with `Q = T`."""
    length = query.shape[1]
    if length > _LONG:
        parts = (part.transpose(1, 2) for part in (query, keys, values))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
        return attended.transpose(1, 2)
    causal = torch.ones((1, length, length), dtype=torch.bool, device=query.device).tril()
    return attend_sequences(query, keys, values, scaling, causal)


def attend_sequences(query, keys, values, scaling: float, seen: torch.BoolTensor) -> torch.Tensor:
    """Attention inside every sequence.

    Args:
        query (`torch.Tensor` of shape `(U, Q, H, d)`): Queries.
        keys, values (`torch.Tensor` of shape `(U, T, H_kv, d)`): Keys and values.
        scaling (`float`): Factor of the scores.
        seen (`torch.BoolTensor`): What a query sees, broadcast to `(U, Q, T)`.

    Returns:
        `torch.Tensor` of shape `(U, Q, H, d)`.
    """
    repeats = query.shape[2] // keys.shape[2]
    keys, values = (part.transpose(1, 2).repeat_interleave(repeats, 1) for part in (keys, values))
    scores = (query.transpose(1, 2) @ keys.transpose(2, 3)).float() * scaling  # (U, H, Q, T)
    scores = scores.masked_fill(~seen.unsqueeze(1), torch.finfo(scores.dtype).min)  # a query may see nothing
    return (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2)


class FlatTransformer:
    """A Qwen2 model over flat tokens.

    Args:
        model (`Qwen2Model`): Whose weights are used. Not copied: a change of theirs is seen.
        kernels ([`Kernels`], *optional*): Elementwise functions; eager by default.

    Gradients do not flow through it.
    """

    def __init__(self, model: Qwen2Model, kernels: Kernels = EAGER):
        kernels.allow_graphs()
        self.model, self.kernels = model, kernels
        config = model.config
        self.num_layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.scaling = model.layers[0].self_attn.scaling

    @staticmethod
    def supports(model: nn.Module) -> bool:
        """Whether a model is one that this class computes: a plain Qwen2 in evaluation mode, without windows, angles
        that depend on the length, adapters, quantised layers or hooks."""
        if type(model) is not Qwen2Model or model.training or set(model.config.layer_types) != {"full_attention"}:
            return False
        if model.config.hidden_act != "silu" or model.rotary_emb.rope_type in ("dynamic", "longrope"):
            return False
        return _are_plain(Qwen2RMSNorm, model.norm) and all(map(_is_plain_layer, model.layers))

    def __call__(
        self, tokens: torch.Tensor, positions: torch.LongTensor, attend: Attend, kept: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Final states of flat tokens.

        Args:
            tokens (`torch.Tensor` of shape `(N, d)`): Input embeddings.
            positions (`torch.LongTensor` of shape `(N,)`): Place of every token in its sequence.
            attend: Attention; in the last layer its queries are those of the `kept` tokens.
            kept (`torch.LongTensor` of shape `(n,)`, *optional*): Tokens whose state is wanted; all by default.

        Returns:
            `torch.Tensor` of shape `(N, d)`, or `(n, d)`.
        """
        cos, sin = self._angles(positions, tokens.dtype)
        kernels, eps = self._kernels(tokens), self.eps
        tokens = tokens.detach()  # no view: views, too, would be compiled for anew
        for index, layer in enumerate(self.model.layers[: self.num_layers]):
            attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
            normed = kernels.rms_norm(tokens, layer.input_layernorm.weight, eps)
            key = kernels.project_queries(normed, attention.k_proj.weight, attention.k_proj.bias, cos, sin)
            value = attention.v_proj(normed).unflatten(-1, (-1, key.shape[-1]))
            if kept is not None and index == self.num_layers - 1:
                normed, tokens, cos, sin = (part.index_select(0, kept) for part in (normed, tokens, cos, sin))
                kernels = self._kernels(tokens)
            query = kernels.project_queries(normed, attention.q_proj.weight, attention.q_proj.bias, cos, sin)
            tokens = kernels.feed_forward(
                tokens,
                attend(index, query, key, value).flatten(1).detach(),
                attention.o_proj.weight,
                attention.o_proj.bias,
                norm.weight,
                eps,
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                mlp.down_proj.weight,
            )
        return kernels.rms_norm(tokens, self.model.norm.weight, eps)

    def _kernels(self, rows: torch.Tensor) -> Kernels:
        """Eager functions for few rows."""
        return self.kernels if rows.shape[0] > FEW_ROWS else EAGER

    def _angles(self, positions: torch.LongTensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = self.model.rotary_emb
        angles = positions.unsqueeze(1).float() * rotary.inv_freq.float()
        return (angles.cos() * rotary.attention_scaling).to(dtype), (angles.sin() * rotary.attention_scaling).to(dtype)

    def read_sequences(self, tokens: torch.Tensor, layout: Layout, last_only: bool = False) -> ReadSequences:
        """Read whole sequences causally.

        Args:
            tokens (`torch.Tensor` of shape `(N, d)`): Input embeddings, one sequence behind the other.
            layout ([`Layout`]): Where the sequences begin and end.
            last_only (`bool`, *optional*): Give the state of each sequence's last token alone; spares the last layer
                most of its work.
        """
        keys, values, last_only = [], [], last_only and layout.width > 0

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.append(layout.pad(key))
            values.append(layout.pad(value))
            if last_only and index == self.num_layers - 1:
                seen = layout.mask().unsqueeze(1)
                return attend_sequences(query.unsqueeze(1), keys[-1], values[-1], self.scaling, seen).squeeze(1)
            return layout.flatten(attend_causally(layout.pad(query), keys[-1], values[-1], self.scaling))

        states = self(tokens, layout.positions, attend, layout.last if last_only else None)
        return ReadSequences(layout, states, last_only, keys, values)

    def read_next(
        self,
        tokens: torch.Tensor,
        positions: torch.LongTensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        shared: SharedHistory | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Read one more token of every row.

        Args:
            tokens (`torch.Tensor` of shape `(R, d)`): Input embeddings.
            positions (`torch.LongTensor` of shape `(R,)`): Their places in their sequences.
            keys, values (`list` of `torch.Tensor` of shape `(R, S, H_kv, head_dim)`): What every layer keeps of the
                rows; empty lists where that is nothing.
            shared ([`SharedHistory`], *optional*): What lies before that, shared by the rows of a user.

        Returns:
            Final states `(R, d)`, and keys and values with the new token behind.
        """
        more_keys, more_values = [], []

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            key, value = key.unsqueeze(1), value.unsqueeze(1)
            more_keys.append(torch.cat([keys[index], key], 1) if keys else key)
            more_values.append(torch.cat([values[index], value], 1) if values else value)
            if shared is not None:
                return attend_shared(query, more_keys[-1], more_values[-1], index, shared, self.scaling)
            return self._kernels(query).attend_own(query, more_keys[-1], more_values[-1], self.scaling)

        return self(tokens, positions, attend), more_keys, more_values


def _is_plain_layer(layer: nn.Module) -> bool:
    """Whether a layer of a Qwen2 model is as transformers makes it: nothing in it is wrapped, replaced or hooked."""
    if not _are_plain(Qwen2DecoderLayer, layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if not (_are_plain(Qwen2Attention, attention) and _are_plain(Qwen2MLP, mlp)):
        return False
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    feed_forward = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return _are_plain(nn.Linear, *projections, *feed_forward) and _are_plain(Qwen2RMSNorm, *norms)


def _are_plain(kind: type, *modules: nn.Module) -> bool:
    """Whether modules are of a class, and compute what it does: offloading, sharding and probes change that by hooks
    or by another `forward`; a dropout's hook is nothing in inference."""
    for module in modules:  # every search asks: no generators
        if type(module) is not kind or module._forward_pre_hooks or "forward" in module.__dict__:
            return False
        if module._forward_hooks and any(
            getattr(hook, "func", None) is not drop for hook in module._forward_hooks.values()
        ):
            return False
    return True
