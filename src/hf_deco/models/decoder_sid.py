"""The light decoder: spells semantic IDs from what it is told of a history."""

from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_deco import DecoConfig
from .layers_sid import add_residual_dropout, make_transformer
from .scoring_sid import Targets


@dataclass
class DecoderContext:
    """What the decoder is told of `R` histories.

    Attributes:
        tokens (`torch.Tensor` of shape `(R, P, w)`): Its prefix: concepts, or item states.
        mask (`torch.BoolTensor` of shape `(R, P)`, *optional*): Prefix tokens that exist; all by default.
        memory (`torch.Tensor` of shape `(R, S, w)`, *optional*): States that every layer attends to.
        memory_mask (`torch.BoolTensor` of shape `(R, S)`, *optional*): Those that exist.
    """

    tokens: torch.Tensor
    mask: torch.BoolTensor | None = None
    memory: torch.Tensor | None = None
    memory_mask: torch.BoolTensor | None = None

    def select(self, rows: torch.LongTensor) -> "DecoderContext":
        """The context of some histories, or of one several times."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return DecoderContext(**{name: None if value is None else value[rows] for name, value in values.items()})


class CrossAttention(nn.Module):
    """Reads a memory into a residual stream: `x + O softmax(Q x (K m)^T) V m`, behind a norm of the stream."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.query_proj = nn.Linear(width, width, bias=False)
        self.key_value_proj = nn.Linear(width, 2 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, stream: torch.Tensor, memory: torch.Tensor, mask: torch.BoolTensor) -> torch.Tensor:
        """Map a stream `(R, L, w)` and memory `(R, S, w)` to a stream `(R, L, w)`."""
        parts = self.query_proj(self.norm(stream)), *self.key_value_proj(memory).chunk(2, -1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        return stream + self.out_proj(read.transpose(1, 2).flatten(2))


class CodeDecoder(nn.Module):
    """The light decoder: a causal transformer over `u_1..u_M, e_1(c_1), ..`, with a head per level (Eq. 6)."""

    def __init__(self, config: DecoConfig):
        super().__init__()
        width, sizes = config.decoder_config.hidden_size, config.codebook_sizes
        self.transformer = make_transformer(config.decoder_config)
        tied = config.tie_code_tables
        read = sizes if config.content_size else sizes[:-1]  # only a reranker reads the last code
        self.tables = None if tied else nn.ModuleList(nn.Embedding(size, width) for size in read)
        self.heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        add_residual_dropout(self.transformer, config.decoder_dropout)
        self.cross_layers, self._context = None, None
        if config.decoder_input.endswith("_cross"):
            heads = config.decoder_config.num_attention_heads
            self.cross_layers = nn.ModuleList(CrossAttention(width, heads) for _ in self.transformer.layers)
            for index, layer in enumerate(self.transformer.layers):
                layer.register_forward_hook(partial(self._read_memory, index))

    def _read_memory(self, index: int, layer: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return self.cross_layers[index](output, self._context.memory, self._context.memory_mask)

    def prefix_tokens(self, level: int, codes: torch.LongTensor) -> torch.Tensor:
        """Embeddings `(..., w)` of the codes `(...)` that prefixes hold at a level."""
        return F.embedding(codes, self.heads[level].weight) if self.tables is None else self.tables[level](codes)

    def read(self, context: DecoderContext, tokens: torch.Tensor, **kwargs) -> torch.Tensor:
        """States `(R, L, w)` of the last `L` tokens read; `kwargs` go to the transformer."""
        mask = None
        if context.mask is not None:  # code tokens, read now or cached, all exist
            length = tokens.shape[1] + (kwargs["cache"].get_seq_length() if "cache" in kwargs else 0)
            mask = F.pad(context.mask, (0, length - context.mask.shape[1]), value=True)
        self._context = context
        try:
            return self.transformer(inputs_embeds=tokens, attention_mask=mask, **kwargs).last_hidden_state
        finally:
            self._context = None

    def forward(self, context: DecoderContext, codes: torch.LongTensor) -> torch.Tensor:
        """States of all prefixes of a SID.

        Args:
            context ([`DecoderContext`]): What is known of `R` histories.
            codes (`torch.LongTensor` of shape `(R, L)`): First codes of the SIDs, `L < K`; all `K` in models with a
                reranking head.

        Returns:
            `torch.Tensor` of shape `(R, L + 1, w)`: state after `0 .. L` codes.
        """
        prefix = [self.prefix_tokens(level, codes[:, level]) for level in range(codes.shape[1])]
        tokens = torch.cat([context.tokens, torch.stack(prefix, 1)], 1) if prefix else context.tokens
        return self.read(context, tokens, use_cache=False)[:, context.tokens.shape[1] - 1 :]

    def target_states(
        self, context: DecoderContext, targets: Targets, whole: torch.BoolTensor | None = None
    ) -> list[tuple[torch.LongTensor, torch.Tensor]]:
        """States of the gold prefixes, for every level the rows that have to be scored there and their states.

        A target is read only as far as its last branching level: what comes behind is forced.

        Args:
            context ([`DecoderContext`]): What is known of the history before each of the `R` targets.
            targets ([`Targets`]): Where their SIDs pass the trie.
            whole (`torch.BoolTensor` of shape `(R,)`, *optional*): Targets that are read to their end, for the state
                behind the whole SID. It stands at one more level.
        """
        scored = targets.branching if whole is None else torch.cat([targets.branching, whole.unsqueeze(1)], 1)
        num_levels = scored.shape[1]
        depths = (scored * torch.arange(1, num_levels + 1, device=scored.device)).amax(1)
        sizes = torch.bincount(depths, minlength=num_levels + 1).tolist()
        pieces = []  # (rows, states) by depth
        for depth, rows in enumerate(depths.argsort(stable=True).split(sizes)):
            if depth and rows.numel():
                pieces.append((rows, self(context.select(rows), targets.codes[rows, : depth - 1])))
        levels = []
        for level in range(num_levels):
            rows, states = [depths.new_zeros(0)], [context.tokens[:0, 0]]
            for piece_rows, piece_states in pieces:
                if piece_states.shape[1] > level:
                    chosen = scored[piece_rows, level]
                    rows.append(piece_rows[chosen])
                    states.append(piece_states[chosen, level])
            rows, states = torch.cat(rows), torch.cat(states)
            order = rows.argsort()  # as every other model has them: a teacher's scores are compared one by one
            levels.append((rows[order], states[order]))
        return levels
