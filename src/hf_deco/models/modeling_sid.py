"""What all models share: they read a history of items, carry a catalog, and learn from dense next-item targets."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import ModelOutput

from .checkpoint_sid import CheckpointModel
from .configuration_deco import SIDRetrievalConfig
from .generation_config_sid import SIDGenerationConfig
from .generation_sid import SIDGenerationMixin
from .inference_sid import EAGER, FlatTransformer, Layout, ReadSequences
from .layers_sid import (
    CodeFuser,
    CodeTokens,
    add_residual_dropout,
    groups_of_like_length,
    make_transformer,
    principal_rows,
)
from .pointer_sid import CopyPointer, CopyState, TargetCopies
from .pretrained_sid import PretrainedBackboneMixin
from .scoring_sid import LevelScores, Targets, gold_log_probs, score_level
from .trie import SIDTrie


@dataclass
class TargetScores:
    """What a model says of the codes of its targets: one [`LevelScores`] a level, and the pointer where there is
    one. With a reranking head also `shared`: which targets share their SID with other items, and the states `(r, w)`
    behind these SIDs."""

    targets: Targets
    levels: list[LevelScores]
    copies: TargetCopies | None = None
    shared: tuple[torch.LongTensor, torch.Tensor] | None = None

    def log_likelihood(self) -> torch.Tensor:
        """Log-probability of every target's SID, `(R,)` float32; under a pointer that of the mixture."""
        log_probs = gold_log_probs(self.levels, self.targets).sum(1)
        return log_probs if self.copies is None else self.copies.mix_likelihood(log_probs, self.targets)

    def level_log_probs(self) -> list[torch.Tensor]:
        """For every level, log-probabilities `(C,)` of the children of the gold prefixes, pointer included."""
        if self.copies is None:
            return [scores.log_probs for scores in self.levels]
        gold = gold_log_probs(self.levels, self.targets)
        before = gold.cumsum(1) - gold
        return [self.copies.mix_level(scores, self.targets, before[:, scores.level]) for scores in self.levels]


@dataclass
class SIDRetrievalOutput(ModelOutput):
    """
    Output of a model.

    Args:
        loss (`torch.FloatTensor`, *optional*): Mean over targets of the negative log-likelihood of a target's SID,
            where `labels` were given; with a reranking head, that and the head's loss.
        target_scores ([`TargetScores`], *optional*): What the loss was made of, where it was asked for.
        concepts (`torch.FloatTensor` of shape `(B, M, w)`, *optional*): Concepts of the whole histories, Deco's serving
            state.
        copies ([`CopyState`], *optional*): The pointer's part of the serving state, where there is a pointer.
        rerank_loss (`torch.FloatTensor`, *optional*): The reranking head's loss by itself.
    """

    loss: torch.FloatTensor | None = None
    target_scores: TargetScores | None = None
    concepts: torch.FloatTensor | None = None
    copies: CopyState | None = None
    rerank_loss: torch.FloatTensor | None = None


class SIDRetrievalModel(CheckpointModel, PretrainedBackboneMixin, SIDGenerationMixin):
    """
    Base of the models: history, catalog, targets, loss.

    The codes of all items are a buffer of the model (`catalog_codes`), so a checkpoint is whole; `set_catalog` swaps
    them.

    A history without items is defined: a learned `start_state` stands in for the backbone's, trained to predict every
    user's first item. It answers with what users begin with, the best that can be said about one of whom nothing is
    known.

    A subclass supplies `_states_of_targets`, `_start_search`, `_code_tables` and `heads`, and calls `post_init` last.
    """

    config: SIDRetrievalConfig
    base_model_prefix = "model"
    main_input_name = "item_codes"
    input_modalities = output_modalities = ("text",)
    generation_config_class = SIDGenerationConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, config: SIDRetrievalConfig):
        super().__init__(config)
        self.fuser = CodeFuser(config) if config.history_format == "fused" else CodeTokens(config)
        self.backbone = make_transformer(config.text_config)
        self.start_state = nn.Parameter(torch.empty(config.text_config.hidden_size))
        self.pointer = CopyPointer(config.text_config.hidden_size) if config.copy_pointer else None
        self.reranker = None
        self._add_catalog()
        self.kernels = EAGER  # what inference computes between matrix products; an engine gives compiled ones
        add_residual_dropout(self.backbone, config.dropout)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, SIDRetrievalModel):
            init.normal_(module.start_state, mean=0.0, std=1.0)  # the scale of a normalised backbone state
            init.zeros_(module.catalog_codes)
            if module.pointer is not None:  # here, for a module without parameters of its own is never asked
                init.constant_(module.pointer.gate_proj.bias, -2.0)  # copying has to earn its share

    @torch.no_grad()
    def init_code_tables(self, codebooks: list) -> None:
        """Start the code tables from content: similar codes begin with similar vectors, in every role.

        A level's centroids are centred and turned onto their leading principal directions, then scaled to a root mean
        square of 0.2 for the rows that the fuser reads and of `initializer_range` for all other tables.

        Args:
            codebooks (`list` of `K` arrays of shape `(V_k, d_content)`): Centroids of the tokenizer.

        Raises:
            ValueError: If they do not fit the model's codebooks.
        """
        shapes = [tuple(book.shape) for book in codebooks]
        fits = all(len(shape) == 2 for shape in shapes)
        if not fits or tuple(shape[0] for shape in shapes) != self.config.codebook_sizes:
            raise ValueError(
                f"`codebooks` have shapes {shapes}, but the model's levels have {self.config.codebook_sizes} codes."
            )
        for level, book in enumerate(codebooks):
            content = torch.as_tensor(book, dtype=torch.float32)
            for weight, scale in self._code_tables(level):
                weight.copy_(principal_rows(content, weight.shape[1], scale))

    def _code_tables(self, level: int) -> list[tuple[torch.Tensor, float]]:
        """Every table of a level, and the scale at which content enters it."""
        tables = [(self.heads[level].weight, self.config.initializer_range)]
        if not self.config.tie_code_tables:
            fused = self.config.history_format == "fused"
            tables.append((self.fuser.tables[level].weight, 0.2 if fused else self.config.initializer_range))
        return tables

    def encode_history(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Backbone states of all history items; of a flat history, at each item's last code.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories, padded on either side.
            attention_mask (`torch.LongTensor` of shape `(B, T)`, *optional*): 1 for items, 0 for padding.

        Returns:
            `torch.Tensor` of shape `(B, T, d)`: states, zero at padding.
        """
        return self._item_states(self._read(item_codes, self._check_inputs(item_codes, attention_mask)))

    def _item_states(self, token_states: torch.Tensor) -> torch.Tensor:
        """States `(B, T, d)` of items, at the last token of each, of states of all tokens."""
        per_item = self.config.tokens_per_item
        return token_states[:, per_item - 1 :: per_item]

    def _read(self, item_codes: torch.LongTensor, mask: torch.BoolTensor) -> torch.Tensor:
        """States of all tokens, `(B, T * tokens_per_item, d)`, zero at padding.

        Histories are read in groups of like length, trimmed to the longest of the group: little work is spent on
        padding.
        """
        flat = self._flat_backbone()
        if flat is not None:
            return self._unpack(self._read_sequences(flat, item_codes, mask), mask)
        per_item, states = self.config.tokens_per_item, None
        for rows, start, end in groups_of_like_length(mask):
            group_mask = mask[rows, start:end].repeat_interleave(per_item, 1)
            tokens = self._tokens(item_codes[rows, start:end])
            seen = None if bool(group_mask.all()) else group_mask
            hidden = self.backbone(inputs_embeds=tokens, attention_mask=seen, use_cache=False).last_hidden_state
            hidden = hidden.masked_fill(~group_mask.unsqueeze(-1), 0)
            if states is None:
                states = hidden.new_zeros((mask.shape[0], mask.shape[1] * per_item, hidden.shape[-1]))
            states[rows, start * per_item : end * per_item] = hidden
        if states is None:
            return self.start_state.new_zeros((mask.shape[0], mask.shape[1] * per_item, self.start_state.shape[0]))
        return states

    def _flat_backbone(self) -> FlatTransformer | None:
        """The backbone over flat tokens, for inference; None in training, or where it is none that can be so read."""
        if torch.is_grad_enabled() or not FlatTransformer.supports(self.backbone):
            return None
        return FlatTransformer(self.backbone, self.kernels)

    def _read_sequences(
        self, flat: FlatTransformer, item_codes: torch.LongTensor, mask: torch.BoolTensor, last_only: bool = False
    ) -> ReadSequences:
        """Read histories without their padding."""
        tokens = self._tokens(item_codes[mask].unsqueeze(0)).squeeze(0)
        return flat.read_sequences(tokens, Layout.of(mask.sum(1) * self.config.tokens_per_item), last_only)

    def _unpack(self, read: ReadSequences, mask: torch.BoolTensor) -> torch.Tensor:
        """States of all tokens that were read in their columns, `(B, T * tokens_per_item, d)`, zero at padding."""
        places = mask.repeat_interleave(self.config.tokens_per_item, 1)
        states = read.states.new_zeros((places.numel(), read.states.shape[-1]))
        states.index_copy_(0, places.flatten().nonzero().squeeze(1), read.states)
        return states.view(*places.shape, states.shape[-1])

    def _read_last(self, item_codes: torch.LongTensor, mask: torch.BoolTensor) -> torch.Tensor:
        """State `(B, d)` of every whole history, the start state for those without items."""
        flat = self._flat_backbone()
        if flat is None:
            return self._last_states(self._item_states(self._read(item_codes, mask)), mask)
        return self._read_sequences(flat, item_codes, mask, last_only=True).last_states(self.start_state)

    def _tokens(self, item_codes: torch.LongTensor) -> torch.Tensor:
        """What the backbone reads of `(B, T, K)` codes; negative ones, which can only be padding, read as 0."""
        return self.fuser(item_codes.clamp(min=0), self._tied_tables())

    def _tied_tables(self) -> list[torch.Tensor | None]:
        """The table of every level that all roles share, None where each has its own."""
        return [head.weight if self.config.tie_code_tables else None for head in self.heads]

    def _last_states(self, states: torch.Tensor, mask: torch.BoolTensor) -> torch.Tensor:
        """State `(B, d)` of every whole history, the start state for those without items."""
        start_state = self.start_state.to(states.dtype)
        if not mask.shape[1]:
            return start_state.expand(mask.shape[0], -1)
        positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = (mask * positions).amax(1)
        chosen = states[torch.arange(mask.shape[0], device=mask.device), (last - 1).clamp(min=0)]
        return torch.where((last > 0).unsqueeze(1), chosen, start_state)

    def _copy_state(
        self, item_codes: torch.LongTensor, states: torch.Tensor, mask: torch.BoolTensor, trie: SIDTrie
    ) -> CopyState:
        """The pointer over whole histories."""
        copyable = mask & (trie.rows(item_codes) >= 0)
        weights, gate = self.pointer(self._last_states(states, mask).unsqueeze(1), states, copyable.unsqueeze(1))
        return CopyState(item_codes=item_codes, weights=weights.squeeze(1), gate=gate.squeeze(1))

    def _take_catalog(self) -> tuple[SIDTrie, torch.Tensor | None]:
        """What one search reads of the catalog: its trie and, for a reranking head, the items' content. Taken once, for
        another thread may replace the catalog meanwhile."""
        return self.trie, None

    def score_targets(
        self,
        item_codes: torch.LongTensor,
        attention_mask: torch.LongTensor | None,
        labels: torch.LongTensor,
        from_start: torch.BoolTensor | None = None,
    ) -> TargetScores:
        """Score the codes of every labelled position, and of the first items of users, densely.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories.
            attention_mask (`torch.LongTensor` of shape `(B, T)`, *optional*): 1 for items, 0 for padding.
            labels (`torch.LongTensor` of shape `(B, T, K)`): SID of the item after each position, -100 where there is
                no target.
            from_start (`torch.BoolTensor` of shape `(B,)`, *optional*): Sequences that begin with their user's first
                item. All by default.
        """
        mask = self._check_inputs(item_codes, attention_mask)
        targets = self._locate_targets(item_codes, mask, labels, from_start)
        states, level_states = self._states_of_targets(item_codes, mask, targets)
        levels = [
            score_level(found, self.heads[level].weight, self.trie, level, rows, targets, self.config.normalize_over)
            for level, (rows, found) in enumerate(level_states[: self.config.num_codebooks])
            if rows.numel()
        ]
        copies = None if self.pointer is None else self._target_copies(item_codes, states, mask, targets)
        return TargetScores(targets, levels, copies, *level_states[self.config.num_codebooks :])

    def forward(
        self,
        item_codes: torch.LongTensor,
        attention_mask: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        from_start: torch.BoolTensor | None = None,
        return_target_scores: bool = False,
    ) -> SIDRetrievalOutput:
        """Serving state of histories or, given targets, the dense training loss.

        Every labelled position is a target: `-sum_k log p(c_k | c_<k, z_t)`, averaged over targets. The first item of
        each user is one more target, predicted from the start state.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories.
            attention_mask (`torch.LongTensor` of shape `(B, T)`, *optional*): 1 for items, 0 for padding.
            labels (`torch.LongTensor` of shape `(B, T, K)`, *optional*): SID of the item after each position, -100
                where there is no target.
            from_start (`torch.BoolTensor` of shape `(B,)`, *optional*): Sequences that begin with their user's first
                item, which is then a target too. All by default.
            return_target_scores (`bool`, *optional*): Whether the scores behind the loss are returned with it.
        """
        if labels is None:
            return self.encode(item_codes, attention_mask)
        scores = self.score_targets(item_codes, attention_mask, labels, from_start)
        return SIDRetrievalOutput(
            loss=-scores.log_likelihood().mean(),
            target_scores=scores if return_target_scores else None,
        )

    def _locate_targets(self, item_codes, mask: torch.BoolTensor, labels: torch.LongTensor, from_start) -> Targets:
        """All targets, by user and position; the first item of a sequence has the column before it as its position."""
        if labels.shape != item_codes.shape:
            raise ValueError(
                f"`labels` must have the shape of `item_codes`, {tuple(item_codes.shape)}, got {tuple(labels.shape)}."
            )
        known = (mask.any(1) if from_start is None else mask.any(1) & from_start).nonzero().squeeze(1)
        first = mask[known].to(torch.int8).argmax(1)
        inside = self.trie.rows(item_codes[known, first]) >= 0  # what is never retrieved is no target
        known, first = known[inside], first[inside]
        users, positions = ((labels[..., 0] != -100) & mask).nonzero(as_tuple=True)
        codes = torch.cat([labels[users, positions], item_codes[known, first]]).long()
        users, positions = torch.cat([users, known]), torch.cat([positions, first - 1])
        if not users.numel():
            raise ValueError("`labels` hold no target: every position is -100.")
        order = (users * (mask.shape[1] + 1) + positions).argsort(stable=True)
        return Targets.locate(users[order], positions[order], codes[order], self.trie, self.config.normalize_over)

    def _states_at(
        self, states: torch.Tensor, mask: torch.BoolTensor, users: torch.LongTensor, positions: torch.LongTensor
    ) -> torch.Tensor:
        """State `(R, d)` of the histories up to a column each, the start state where there is no item."""
        places = positions.clamp(min=0)
        known = (positions >= 0) & mask[users, places]
        return torch.where(known.unsqueeze(1), states[users, places], self.start_state.to(states.dtype))

    def _target_copies(self, item_codes, states: torch.Tensor, mask: torch.BoolTensor, targets: Targets):
        """The pointer of every target, over the items up to its position."""
        paths = self.trie.node_paths(item_codes)
        columns = torch.arange(mask.shape[1], device=mask.device)
        copyable = (mask & (paths[..., -1] >= 0)).unsqueeze(1) & (columns <= columns.unsqueeze(1))
        weights, gate = self.pointer(states, states, copyable)
        positions = targets.positions.clamp(min=0)
        known = (targets.positions >= 0) & mask[targets.users, positions]
        return TargetCopies(
            weights[targets.users, positions] * known.unsqueeze(1),
            gate[targets.users, positions] * known,
            paths[targets.users],
        )

    def _with_a_column(self, item_codes, mask: torch.BoolTensor) -> tuple[torch.LongTensor, torch.BoolTensor]:
        """Histories `(B, T, K)` and mask `(B, T)`; where no history has a column, one of padding keeps the shapes."""
        if mask.shape[1]:
            return item_codes, mask
        item_codes = item_codes.new_zeros((mask.shape[0], 1, self.config.num_codebooks))
        return item_codes, torch.zeros((mask.shape[0], 1), dtype=torch.bool, device=mask.device)

    def _check_inputs(self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None) -> torch.BoolTensor:
        """The boolean attention mask `(B, T)`, after shapes are checked."""
        if item_codes.dim() != 3 or item_codes.shape[2] != self.config.num_codebooks:
            raise ValueError(
                f"`item_codes` must have shape (batch, items, {self.config.num_codebooks}), got "
                f"{tuple(item_codes.shape)}."
            )
        if attention_mask is None:
            return torch.ones(item_codes.shape[:2], dtype=torch.bool, device=item_codes.device)
        if attention_mask.shape != item_codes.shape[:2]:
            raise ValueError(
                f"`attention_mask` must have shape {tuple(item_codes.shape[:2])}, got {tuple(attention_mask.shape)}."
            )
        return attention_mask.bool()
