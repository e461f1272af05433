"""GEAR's decoder: spells semantic IDs by cross-attention over a user's memory, and reads them for the reranker."""

import torch
import torch.nn.functional as F
from torch import nn

from .attention_sid import SharedHistory
from .beam_search_sid import PrefixStates
from .configuration_gear import GearConfig
from .feed_forward_sid import FeedForward
from .memory_gear import GearMemory


class MemoryView:
    """Memories of `U` users as keys and values, and which of `R` prefixes belong to whom.

    Args:
        memory ([`GearMemory`]): Memories.
        users (`torch.LongTensor` of shape `(R,)`): User of every prefix, ascending.
        length (`int`): Tokens `L` of a prefix that read the memory.
        num_heads (`int`): Attention heads `H`.
    """

    def __init__(self, memory: GearMemory, users: torch.LongTensor, length: int, num_heads: int):
        self.heads = memory.states.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (U, H, T, d)
        self.mask, self.length = memory.mask[:, None, None], length
        self.owners = SharedHistory([], [], memory.mask, users.repeat_interleave(length)) if len(users) else None

    def read(self, queries: torch.Tensor) -> torch.Tensor:
        """What queries `(R, L, H, d)` find in the memories of their users, `(R, L, H, d)`.

        A memory is read by all prefixes of its user in one product; it is never copied to them.
        """
        if self.owners is None:
            return queries
        grouped = self.owners.group(queries.flatten(0, 1))
        found = F.scaled_dot_product_attention(grouped, self.heads, self.heads, attn_mask=self.mask)
        return self.owners.ungroup(found).unflatten(0, (-1, self.length))


class GatedFFN(nn.Module):
    """`(SiLU(x W_1) * x W_3) W_2`, behind a norm."""

    def __init__(self, config: GearConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CrossAttention(nn.Module):
    """Attention over a memory whose tokens are keys and values as they are, the same for all layers."""

    def __init__(self, config: GearConfig):
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, memory: MemoryView) -> torch.Tensor:
        queries = self.q_proj(self.norm(x)).unflatten(2, (self.num_heads, -1))
        return self.o_proj(memory.read(queries).flatten(2))


class CausalSelfAttention(nn.Module):
    """Attention of a prefix' tokens to those before them and to themselves.

    Tokens carry no positions: every level has a table of its own, so a token says where it stands.
    """

    def __init__(self, config: GearConfig):
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor | None = None, values: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read tokens `(R, L, w)`: all of a prefix, or the one behind cached keys and values `(R, H, s, d)`.

        Returns:
            Outputs `(R, L, w)`, and keys and values with those of the tokens, `(R, H, s + L, d)`.
        """
        heads = self.qkv_proj(self.norm(x)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if keys is not None:
            key, value = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=keys is None)
        return self.o_proj(found.transpose(1, 2).flatten(2)), key, value


class DecoderLayer(nn.Module):
    """`x + CrossAttn(x, H)`, `x + GatedFFN(x)`, `x + CausalSelfAttn(x)`, `x + GatedFFN(x)` (Eq. 7)."""

    def __init__(self, config: GearConfig):
        super().__init__()
        self.cross_attention, self.cross_ffn = CrossAttention(config), GatedFFN(config)
        self.self_attention, self.self_ffn = CausalSelfAttention(config), GatedFFN(config)

    def forward(self, x, memory: MemoryView, keys=None, values=None):
        x = x + self.cross_attention(x, memory)
        x = x + self.cross_ffn(x)
        found, keys, values = self.self_attention(x, keys, values)
        x = x + found
        return x + self.self_ffn(x), keys, values


class GearDecoder(nn.Module):
    """Spells SIDs from a user's memory, and turns a whole SID into the vector that ranks its items.

    Attributes:
        tables (`nn.ModuleList` of `K` `nn.Embedding`): Codes as inputs; the last level's are read by the reranker.
        heads (`nn.ModuleList` of `K` `nn.Linear`): Output classes of every level.
        rerank_head ([`FeedForward`]): Maps the state behind a whole SID to `u_rerank`.
    """

    def __init__(self, config: GearConfig):
        super().__init__()
        width, sizes, self.num_heads = config.hidden_size, config.codebook_sizes, config.num_attention_heads
        self.start_token = nn.Parameter(torch.empty(width))
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        self.rerank_head = FeedForward(width, width, config.tower_size)

    def forward(self, memory: GearMemory, users: torch.LongTensor, codes: torch.LongTensor) -> torch.Tensor:
        """States of all prefixes of SIDs, in one pass.

        Args:
            memory ([`GearMemory`]): Memories of `U` users.
            users (`torch.LongTensor` of shape `(R,)`): User of every SID, ascending.
            codes (`torch.LongTensor` of shape `(R, L)`): First codes of the SIDs, `L <= K`.

        Returns:
            `torch.Tensor` of shape `(R, L + 1, w)`: state after `0 .. L` codes.
        """
        start = self.start_token.expand(len(codes), 1, -1)
        read = [self.tables[level](codes[:, level]).unsqueeze(1) for level in range(codes.shape[1])]
        x, view = torch.cat([start, *read], 1), MemoryView(memory, users, codes.shape[1] + 1, self.num_heads)
        for layer in self.layers:
            x, _, _ = layer(x, view)
        return x

    def step(self, memory: GearMemory, users, tokens: torch.Tensor, keys: list, values: list) -> PrefixStates:
        """Read one more token `(A, w)` of prefixes, behind their cached keys and values of every layer."""
        x, view, new_keys, new_values = tokens.unsqueeze(1), MemoryView(memory, users, 1, self.num_heads), [], []
        for index, layer in enumerate(self.layers):
            past = (keys[index], values[index]) if keys else (None, None)
            x, key, value = layer(x, view, *past)
            new_keys.append(key)
            new_values.append(value)
        return PrefixStates(x.squeeze(1), users, new_keys, new_values)


class GearScorer:
    """Scores codes in GEAR's decoder for a beam search, over memories that all beams of a user share.

    Args:
        decoder ([`GearDecoder`]): The decoder.
        memory ([`GearMemory`]): Memories of `U` users.
    """

    def __init__(self, decoder: GearDecoder, memory: GearMemory):
        self.decoder, self.memory = decoder, memory

    def start(self) -> PrefixStates:
        num_users = len(self.memory.states)
        users = torch.arange(num_users, device=self.memory.states.device)
        return self.decoder.step(self.memory, users, self.decoder.start_token.expand(num_users, -1), [], [])

    def advance(
        self, states: PrefixStates, rows: torch.LongTensor, codes: torch.LongTensor, level: int
    ) -> PrefixStates:
        states, tokens = states.select(rows), self.decoder.tables[level](codes)
        return self.decoder.step(self.memory, states.users, tokens, states.keys, states.values)

    def head(self, level: int) -> torch.Tensor:
        return self.decoder.heads[level].weight
