"""Deco: a backbone that reads the history once, and a light decoder that spells semantic IDs from its concept."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from .configuration_deco import DecoConfig
from .layers_sid import add_residual_dropout, make_transformer
from .modeling_sid import SIDRetrievalModel, SIDRetrievalOutput
from .pointer_sid import BeamCopies, CopyState
from .scoring_sid import Targets


class ConceptHead(nn.Module):
    """Condenses a backbone state into concepts: `z = reshape(W_z h)`, `u = psi(z)` (Eq. 5)."""

    def __init__(self, config: DecoConfig):
        super().__init__()
        hidden_size, width = config.text_config.hidden_size, config.decoder_config.hidden_size
        self.num_concepts = config.num_concepts
        self.concept_proj = nn.Linear(hidden_size, config.num_concepts * hidden_size)
        self.adapter_up_proj = nn.Linear(hidden_size, width)
        self.adapter_down_proj = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map states `(..., d)` to adapted concepts `(..., M, w)`."""
        concepts = self.concept_proj(states).unflatten(-1, (self.num_concepts, -1))
        return self.adapter_down_proj(F.silu(self.adapter_up_proj(concepts)))


class CodeDecoder(nn.Module):
    """The light decoder: a causal transformer over `u_1..u_M, e_1(c_1), ..`, with a head per level (Eq. 6)."""

    def __init__(self, config: DecoConfig):
        super().__init__()
        width, sizes = config.decoder_config.hidden_size, config.codebook_sizes
        self.transformer = make_transformer(config.decoder_config)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes[:-1])
        self.heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        add_residual_dropout(self.transformer, config.decoder_dropout)

    def forward(self, concepts: torch.Tensor, codes: torch.LongTensor) -> torch.Tensor:
        """States of all prefixes of a SID.

        Args:
            concepts (`torch.Tensor` of shape `(R, M, w)`): Adapted concepts.
            codes (`torch.LongTensor` of shape `(R, L)`): First codes of the SIDs, `L < K`.

        Returns:
            `torch.Tensor` of shape `(R, L + 1, w)`: state after `0 .. L` codes.
        """
        prefix = [self.tables[level](codes[:, level]) for level in range(codes.shape[1])]
        tokens = torch.cat([concepts, torch.stack(prefix, 1)], 1) if prefix else concepts
        return self.transformer(inputs_embeds=tokens, use_cache=False).last_hidden_state[:, concepts.shape[1] - 1 :]

    def target_states(self, concepts: torch.Tensor, targets: Targets) -> list[tuple[torch.LongTensor, torch.Tensor]]:
        """States of the gold prefixes, for every level the rows that have to be scored there and their states.

        A target is read only as far as its last branching level: what comes behind is forced.

        Args:
            concepts (`torch.Tensor` of shape `(R, M, w)`): Adapted concepts.
            targets ([`Targets`]): Where their SIDs pass the trie.
        """
        num_codebooks = targets.codes.shape[1]
        sizes = torch.bincount(targets.depth, minlength=num_codebooks + 1).tolist()
        pieces = []  # (rows, states) by depth
        for depth, rows in enumerate(targets.depth.argsort(stable=True).split(sizes)):
            if depth and rows.numel():
                pieces.append((rows, self(concepts[rows], targets.codes[rows, : depth - 1])))
        levels = []
        for level in range(num_codebooks):
            rows, states = [targets.at(level)[:0]], [concepts[:0, 0]]
            for piece_rows, piece_states in pieces:
                if piece_states.shape[1] > level:
                    chosen = targets.branching[piece_rows, level]
                    rows.append(piece_rows[chosen])
                    states.append(piece_states[chosen, level])
            rows, states = torch.cat(rows), torch.cat(states)
            order = rows.argsort()  # as every other model has them: a teacher's scores are compared one by one
            levels.append((rows[order], states[order]))
        return levels


class DecoderScorer:
    """Runs a beam search in the light decoder, with its own cache of keys and values."""

    def __init__(self, decoder: CodeDecoder, concepts: torch.Tensor):
        self.decoder, self.concepts = decoder, concepts
        self.cache = DynamicCache(config=decoder.transformer.config)

    def start(self) -> torch.Tensor:
        return self._read(self.concepts)

    def advance(self, parents: torch.LongTensor, codes: torch.LongTensor, level: int) -> torch.Tensor:
        self.cache.reorder_cache(parents)
        return self._read(self.decoder.tables[level](codes).unsqueeze(1))

    def head(self, level: int) -> torch.Tensor:
        return self.decoder.heads[level].weight

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        output = self.decoder.transformer(inputs_embeds=tokens, cache=self.cache, use_cache=True)
        return output.last_hidden_state[:, -1]


class DecoForSIDRetrieval(SIDRetrievalModel):
    """Deco: reads a history of items once, and retrieves the next items by a beam search in a light decoder.

    Args:
        config ([`DecoConfig`]): Sizes and options.

    Example:
        ```python
        >>> import torch
        >>> from hf_deco import DecoConfig, DecoForSIDRetrieval
        >>> model = DecoForSIDRetrieval(DecoConfig.from_preset("S", num_codebooks=2, codebook_size=16)).eval()
        >>> model.set_catalog(torch.tensor([[0, 1], [0, 2], [7, 3]]))
        >>> history = torch.tensor([[[0, 1], [7, 3]]])
        >>> model.generate(history, num_beams=3, num_return_sequences=2).shape
        torch.Size([2, 2])

        ```
    """

    config: DecoConfig

    def __init__(self, config: DecoConfig):
        super().__init__(config)
        self.concept_head = ConceptHead(config)
        self.decoder = CodeDecoder(config)
        self.post_init()

    @property
    def heads(self) -> nn.ModuleList:
        """Output class vectors of every level."""
        return self.decoder.heads

    def encode(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> SIDRetrievalOutput:
        """The complete serving state of each user: concepts `(B, M, w)` of whole histories (Eq. 5), and the pointer."""
        mask = self._check_inputs(item_codes, attention_mask)
        states = self.encode_history(item_codes, attention_mask)
        copies = None if self.pointer is None else self._copy_state(item_codes, states, mask)
        return SIDRetrievalOutput(concepts=self.concept_head(self._last_states(states, mask)), copies=copies)

    def encode_concepts(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Concepts `(B, M, w)` of whole histories."""
        return self.encode(item_codes, attention_mask).concepts

    def _states_of_targets(self, item_codes, mask: torch.BoolTensor, targets: Targets):
        states = self.encode_history(item_codes, mask)
        concepts = self.concept_head(self._states_before(states, mask, targets))
        return states, self.decoder.target_states(concepts, targets)

    def _code_tables(self, level: int) -> list[tuple[torch.Tensor, float]]:
        tables = super()._code_tables(level)
        if level < len(self.decoder.tables):
            tables.append((self.decoder.tables[level].weight, self.config.initializer_range))
        return tables

    def _start_search(
        self,
        item_codes: torch.LongTensor | None,
        attention_mask: torch.LongTensor | None,
        concepts: torch.Tensor | None,
        copies: CopyState | None,
    ) -> tuple[DecoderScorer, BeamCopies | None]:
        if concepts is None:
            state = self.encode(item_codes, attention_mask)
            concepts, copies = state.concepts, state.copies
        expected = (self.config.num_concepts, self.config.decoder_config.hidden_size)
        if concepts.dim() != 3 or tuple(concepts.shape[1:]) != expected:
            raise ValueError(
                f"`concepts` must have shape (batch, {expected[0]}, {expected[1]}), got {tuple(concepts.shape)}."
            )
        if (copies is None) != (self.pointer is None):
            raise ValueError(
                "`copies` must be given with `concepts` if, and only if, the model has a copy pointer: both are what "
                "`encode` returns."
            )
        if copies is not None and copies.gate.shape[0] != concepts.shape[0]:
            raise ValueError(
                f"`copies` are of {copies.gate.shape[0]} users, `concepts` of {concepts.shape[0]}: give those of the "
                "same histories."
            )
        scorer = DecoderScorer(self.decoder, concepts.to(self.dtype))
        return scorer, None if copies is None else BeamCopies.start(copies, self.trie)


__all__ = ["DecoForSIDRetrieval"]
