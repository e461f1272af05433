"""Deco: a backbone that reads the history once, and a light decoder that spells semantic IDs from its concept."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .beam_search_sid import Beams, BeamSearch
from .catalog_sid import SWAP
from .configuration_deco import DecoConfig
from .decoder_sid import CodeDecoder, DecoderContext
from .generation_sid import read_on
from .modeling_sid import SIDRetrievalModel, SIDRetrievalOutput, TargetScores
from .pointer_sid import BeamCopies, CopyState
from .reranking_sid import ItemReranker
from .scorers_sid import DecoderScorer
from .scoring_sid import Targets
from .trie import SIDTrie


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
        return self.adapt(self.concept_proj(states).unflatten(-1, (self.num_concepts, -1)))

    def adapt(self, vectors: torch.Tensor) -> torch.Tensor:
        """`psi`: vectors `(..., d)` at the decoder's width, `(..., w)`."""
        return self.adapter_down_proj(F.silu(self.adapter_up_proj(vectors)))


class DecoForSIDRetrieval(SIDRetrievalModel):
    """Deco: reads a history of items once, and retrieves the next items by a beam search in a light decoder.

    Where items share SIDs, a reranking head (`content_size` of the configuration) reads the SIDs found to their ends
    and tells their items apart. It needs the content of all items, `catalog_content`, a buffer beside their codes.

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
        if config.content_size:
            self.reranker = ItemReranker(config)
            self.register_buffer("catalog_content", torch.zeros(config.num_items, config.content_size))
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, DecoForSIDRetrieval) and module.reranker is not None:
            init.zeros_(module.catalog_content)

    def set_catalog(self, codes: torch.Tensor, content: torch.Tensor | None = None) -> None:
        """Replace the catalog; weights stay as they are.

        Args:
            codes (`torch.Tensor` or array of shape `(N, K)`): SID of every item, row `i` for item row `i`.
            content (`torch.Tensor` or array of shape `(N, content_size)`, *optional*): Content embedding of every item;
                needed by a model with a reranking head, and by no other.

        Raises:
            ValueError: If the codes do not fit the model's codebooks, or the content the items. The old catalog then
                stays.
        """
        if self.reranker is None:
            if content is not None:
                raise ValueError(
                    "`content` is what a reranking head reads, and the model has none: set `content_size` of its "
                    "configuration, or leave it out."
                )
            return super().set_catalog(codes)
        expected = (len(codes), self.config.content_size)
        content = None if content is None else torch.as_tensor(content)
        if content is None or content.shape != expected:
            raise ValueError(
                f"`content` must hold the embeddings of all items, of shape {expected}, for the reranking head, got "
                f"{None if content is None else tuple(content.shape)}."
            )
        if not content.isfinite().all():
            raise ValueError("`content` holds NaN or infinite values: embed these items again.")
        self._replace_catalog(codes, catalog_content=content.to(self.catalog_content, copy=True))

    def _take_catalog(self) -> tuple[SIDTrie, torch.Tensor | None]:
        if self.reranker is None:
            return super()._take_catalog()
        with SWAP:
            return self.trie, self.catalog_content

    @property
    def heads(self) -> nn.ModuleList:
        """Output class vectors of every level."""
        return self.decoder.heads

    def encode(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> SIDRetrievalOutput:
        """The complete serving state of each user: concepts `(B, M, w)` of whole histories (Eq. 5), and the pointer.

        Raises:
            ValueError: If the decoder reads more of a history than its concept.
        """
        if self.config.decoder_input != "last_state":
            raise ValueError(
                f"With `decoder_input` {self.config.decoder_input!r} a concept is not all that the decoder reads: "
                "search from `item_codes`."
            )
        mask = self._check_inputs(item_codes, attention_mask)
        if self.pointer is None:
            return SIDRetrievalOutput(concepts=self.concept_head(self._read_last(item_codes, mask)))
        states = self._item_states(self._read(item_codes, mask))
        copies = self._copy_state(item_codes, states, mask, self.trie)
        return SIDRetrievalOutput(concepts=self.concept_head(self._last_states(states, mask)), copies=copies)

    def encode_concepts(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Concepts `(B, M, w)` of whole histories."""
        return self.encode(item_codes, attention_mask).concepts

    def forward(
        self,
        item_codes: torch.LongTensor,
        attention_mask: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        from_start: torch.BoolTensor | None = None,
        return_target_scores: bool = False,
        target_rows: torch.LongTensor | None = None,
    ) -> SIDRetrievalOutput:
        """Serving state of histories or, given targets, the dense training loss; see [`SIDRetrievalModel.forward`].

        A reranking head adds its own loss: within the SID of every target, the target is told from the other items.

        Args:
            item_codes, attention_mask, labels, from_start, return_target_scores: As there.
            target_rows (`torch.LongTensor` of shape `(B, T + 1)`, *optional*): Catalog rows of the targets, for a
                reranking head: in column `t + 1` that of the item after position `t`, in the column of a sequence's
                first item that item's. Other entries do not count.
        """
        if labels is None or self.reranker is None:
            return super().forward(item_codes, attention_mask, labels, from_start, return_target_scores)
        scores = self.score_targets(item_codes, attention_mask, labels, from_start)
        rerank_loss = self._rerank_loss(scores, target_rows, labels)
        return SIDRetrievalOutput(
            loss=rerank_loss - scores.log_likelihood().mean(),
            rerank_loss=rerank_loss,
            target_scores=scores if return_target_scores else None,
        )

    def _rerank_loss(self, scores: TargetScores, target_rows, labels: torch.LongTensor) -> torch.Tensor:
        """Loss of the head over the targets that share their SIDs, after the rows are checked."""
        targets, expected = scores.targets, (labels.shape[0], labels.shape[1] + 1)
        if target_rows is None or target_rows.shape != expected:
            raise ValueError(
                f"`target_rows` must hold catalog rows of the targets, of shape {expected}, for the reranking head, "
                f"got {None if target_rows is None else tuple(target_rows.shape)}."
            )
        bought = target_rows[targets.users, targets.positions + 1]
        known = (bought >= 0) & (bought < self.config.num_items)
        same = (self.catalog_codes[bought.where(known, 0)] == targets.codes).all(1)
        if not (known & same).all():
            raise ValueError(
                f"`target_rows` name other items than the targets in {int((~(known & same)).sum())} places: their rows "
                "of the catalog must have the SIDs of `labels`, and of first items those of `item_codes`."
            )
        rows, states = scores.shared
        leaves = targets.paths[rows, -1]
        return self.reranker.loss(states, leaves, bought[rows], self.trie, self.catalog_content)

    def _states_of_targets(self, item_codes, mask: torch.BoolTensor, targets: Targets):
        token_states, shared = self._read(item_codes, mask), None
        context = self._context(token_states, mask, targets.users, targets.positions)
        if self.reranker is not None:
            starts, ends = self.trie.item_ranges(self.config.num_codebooks, targets.paths[:, -1])
            shared = ends - starts > 1
        return self._item_states(token_states), self.decoder.target_states(context, targets, shared)

    def _log_choices(self, search: BeamSearch, beams: Beams, content: torch.Tensor) -> torch.Tensor:
        """`log p(item | SID)` of all items of the beams' SIDs, `(C,)`: 0 of items that are alone."""
        starts, ends = search.trie.item_ranges(self.config.num_codebooks, beams.nodes)
        counts = ends - starts
        log_choices, shared = beams.scores.new_zeros(int(counts.sum())), (counts > 1).nonzero().squeeze(1)
        if shared.numel():
            leaves, states = beams.nodes[shared], read_on(search, beams, shared)
            chosen = self.reranker.log_choices(states, leaves, search.trie, content)
            log_choices[(counts > 1).repeat_interleave(counts)] = chosen
        return log_choices

    def _context(
        self, token_states: torch.Tensor, mask: torch.BoolTensor, users: torch.LongTensor, positions: torch.LongTensor
    ) -> DecoderContext:
        """What the decoder is told of histories, each that of a batch row up to a column (-1: of no items)."""
        kind, states = self.config.decoder_input, self._item_states(token_states)
        last = self._states_at(states, mask, users, positions)
        if kind == "last_state":
            return DecoderContext(self.concept_head(last))
        # All histories end in the last column, so that every prefix is followed by its codes without a gap.
        width = max(1, mask.shape[1])
        columns = positions.unsqueeze(1) + torch.arange(1 - width, 1, device=mask.device)
        places = columns.clamp(min=0)
        seen = (columns >= 0) & mask[users.unsqueeze(1), places]
        if kind == "token_states_cross":
            per_item = self.config.tokens_per_item
            rows = token_states.unflatten(1, (-1, per_item))[users.unsqueeze(1), places].flatten(1, 2)
            seen = seen.repeat_interleave(per_item, 1)
        else:
            rows = states[users.unsqueeze(1), places]
        # Without items the start state is all there is to read.
        none = ~seen.any(1)
        rows = torch.cat([rows[:, :-1], torch.where(none.unsqueeze(1), last, rows[:, -1]).unsqueeze(1)], 1)
        seen = torch.cat([seen[:, :-1], (seen[:, -1] | none).unsqueeze(1)], 1)
        adapted = self.concept_head.adapt(rows)
        if kind == "item_states_prefix":
            return DecoderContext(adapted, seen)
        return DecoderContext(self.concept_head(last), memory=adapted, memory_mask=seen)

    def _code_tables(self, level: int) -> list[tuple[torch.Tensor, float]]:
        tables = super()._code_tables(level)
        if self.decoder.tables is not None and level < len(self.decoder.tables):
            tables.append((self.decoder.tables[level].weight, self.config.initializer_range))
        return tables

    def _start_search(
        self,
        item_codes: torch.LongTensor | None,
        attention_mask: torch.LongTensor | None,
        concepts: torch.Tensor | None,
        copies: CopyState | None,
        trie: SIDTrie,
    ) -> tuple[DecoderScorer, BeamCopies | None]:
        if concepts is None:
            return self._search_history(item_codes, self._check_inputs(item_codes, attention_mask), trie)
        self._check_state(concepts, copies)
        scorer = DecoderScorer(self.decoder, DecoderContext(concepts.to(self.dtype)), self.kernels)
        return scorer, None if copies is None else BeamCopies.start(copies, trie)

    def _check_state(self, concepts: torch.Tensor, copies: CopyState | None = None) -> None:
        """Raise a `ValueError` where stored concepts, with the pointer's part, are none that a search starts from."""
        if self.config.decoder_input != "last_state":
            raise ValueError(
                f"`concepts` are not all that `decoder_input` {self.config.decoder_input!r} reads: search from "
                "`item_codes`."
            )
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

    def _search_history(
        self, item_codes, mask: torch.BoolTensor, trie: SIDTrie
    ) -> tuple[DecoderScorer, BeamCopies | None]:
        if self.pointer is None and self.config.decoder_input == "last_state":
            context = DecoderContext(self.concept_head(self._read_last(item_codes, mask)))
            return DecoderScorer(self.decoder, context, self.kernels), None
        item_codes, mask = self._with_a_column(item_codes, mask)
        token_states = self._read(item_codes, mask)
        users = torch.arange(mask.shape[0], device=mask.device)
        last = (mask * (torch.arange(mask.shape[1], device=mask.device) + 1)).amax(1) - 1
        scorer = DecoderScorer(self.decoder, self._context(token_states, mask, users, last), self.kernels)
        if self.pointer is None:
            return scorer, None
        copies = self._copy_state(item_codes, self._item_states(token_states), mask, trie)
        return scorer, BeamCopies.start(copies, trie)


__all__ = ["DecoForSIDRetrieval"]
