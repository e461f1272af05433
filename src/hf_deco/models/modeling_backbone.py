"""FlatGR and FusedGR: the backbone reads the history, and runs the whole beam search itself."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import create_causal_mask

from .configuration_deco import BackboneConfig
from .layers_sid import groups_of_like_length
from .modeling_sid import SIDRetrievalModel, SIDRetrievalOutput
from .pointer_sid import BeamCopies, CopyState
from .scorers_sid import BackboneScorer
from .scoring_sid import Targets
from .trie import SIDTrie, spread_ranges


@dataclass
class Prefixes:
    """Gold prefix tokens behind the histories of a batch, flat, by user, target and level.

    Attributes:
        rows (`torch.LongTensor` of shape `(P,)`): Target of every token.
        levels (`torch.LongTensor` of shape `(P,)`): Level of its code, from 0.
        users (`torch.LongTensor` of shape `(P,)`): Batch row.
        slots (`torch.LongTensor` of shape `(P,)`): Place among the tokens of its batch row.
        counts (`torch.LongTensor` of shape `(B,)`): Tokens of every batch row.
    """

    rows: torch.LongTensor
    levels: torch.LongTensor
    users: torch.LongTensor
    slots: torch.LongTensor
    counts: torch.LongTensor

    @classmethod
    def of(cls, targets: Targets, num_users: int) -> "Prefixes":
        """The tokens that some branching level still needs: all codes before the last such level."""
        lengths = (targets.depth - 1).clamp(min=0)
        rows, levels = spread_ranges(torch.zeros_like(lengths), lengths)
        users = targets.users[rows]
        counts = torch.bincount(users, minlength=num_users)
        slots = torch.arange(rows.shape[0], device=rows.device) - (counts.cumsum(0) - counts)[users]
        return cls(rows, levels, users, slots, counts)


class BackboneForSIDRetrieval(SIDRetrievalModel):
    """A generative recommender whose backbone scores every code: FlatGR over a flat history, FusedGR over a fused one.

    Trained densely in one pass: behind a fused history stand the gold prefixes of all next items, each of which sees
    the history up to its position and itself (Eq. 4); a flat history holds them already.

    Args:
        config ([`BackboneConfig`]): Sizes and options.
    """

    config: BackboneConfig
    _supports_flash_attn = False  # it knows no block-causal mask, and would train on another attention in silence

    def __init__(self, config: BackboneConfig):
        super().__init__(config)
        hidden_size, sizes = config.text_config.hidden_size, config.codebook_sizes
        self.heads = nn.ModuleList(nn.Linear(hidden_size, size, bias=False) for size in sizes)
        self.tables = None  # a flat history has the tokens of codes, a tied model those of its heads
        if config.history_format == "fused" and not config.tie_code_tables:
            self.tables = nn.ModuleList(nn.Embedding(size, hidden_size) for size in sizes[:-1])
        self.post_init()

    def prefix_tokens(self, level: int, codes: torch.LongTensor) -> torch.Tensor:
        """Tokens `(..., d)` of the codes `(...)` that prefixes hold at a level."""
        if self.config.history_format == "flat":
            return self.fuser.token(level, codes, self._tied_tables()[level])
        return F.embedding(codes, self.heads[level].weight) if self.tables is None else self.tables[level](codes)

    def encode(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> SIDRetrievalOutput:
        """The pointer over whole histories, where there is one; everything else is in the backbone's cache."""
        if self.pointer is None:
            return SIDRetrievalOutput()
        mask = self._check_inputs(item_codes, attention_mask)
        return SIDRetrievalOutput(
            copies=self._copy_state(item_codes, self.encode_history(item_codes, mask), mask, self.trie)
        )

    def _code_tables(self, level: int) -> list[tuple[torch.Tensor, float]]:
        tables = super()._code_tables(level)
        if self.tables is not None and level < len(self.tables):
            tables.append((self.tables[level].weight, self.config.initializer_range))
        return tables

    def _states_of_targets(self, item_codes, mask: torch.BoolTensor, targets: Targets):
        if self.config.history_format == "flat":
            return self._flat_states(item_codes, mask, targets)
        return self._fused_states(item_codes, mask, targets)

    def _flat_states(self, item_codes, mask: torch.BoolTensor, targets: Targets):
        """One causal pass over the history and the last target behind it: every code token predicts the next one."""
        num_codebooks, columns = self.config.num_codebooks, targets.positions + 1
        inside = columns < mask.shape[1]
        inside &= mask[targets.users, columns.clamp(max=mask.shape[1] - 1)]
        given = item_codes[targets.users[inside], columns[inside]]
        if not torch.equal(given, targets.codes[inside].to(given.dtype)):
            raise ValueError("`labels` of a flat history must be its own next items: its code tokens are the prefixes.")
        codes = torch.cat([item_codes, torch.zeros_like(item_codes[:, :1])], 1)
        seen = torch.cat([mask, torch.zeros_like(mask[:, :1])], 1)
        codes[targets.users, columns] = targets.codes.to(codes.dtype)
        seen[targets.users, columns] = True
        states = self._read(codes, seen).unflatten(1, (-1, num_codebooks))  # (B, T + 1, K, d)
        item_states = states[:, : mask.shape[1], -1]
        levels = []
        for level in range(num_codebooks):
            rows = targets.at(level)
            if level:
                levels.append((rows, states[targets.users[rows], columns[rows], level - 1]))
            else:
                levels.append((rows, self._states_at(item_states, mask, targets.users, targets.positions)[rows]))
        return item_states * mask.unsqueeze(-1), levels

    def _fused_states(self, item_codes, mask: torch.BoolTensor, targets: Targets):
        """One pass under the block-causal mask (Eq. 4), over groups of histories of like length."""
        prefixes = Prefixes.of(targets, mask.shape[0])
        hidden_size = self.config.text_config.hidden_size
        item_states = prefix_states = None
        for rows, start, end in groups_of_like_length(mask):
            width = int(prefixes.counts[rows].max())
            chosen = torch.isin(prefixes.users, rows).nonzero().squeeze(1)
            hidden = self._read_block_causal(item_codes, mask, targets, prefixes, rows, start, end, chosen, width)
            if item_states is None:
                item_states = hidden.new_zeros((*mask.shape, hidden_size))
                prefix_states = hidden.new_zeros((prefixes.rows.shape[0], hidden_size))
            length = end - start
            item_states[rows, start:end] = hidden[:, :length].masked_fill(~mask[rows, start:end].unsqueeze(-1), 0)
            place = self._places(rows, mask.shape[0])[prefixes.users[chosen]]
            prefix_states[chosen] = hidden[place, length + prefixes.slots[chosen]]
        offsets = (targets.depth - 1).clamp(min=0).cumsum(0) - (targets.depth - 1).clamp(min=0)
        levels = []
        for level in range(self.config.num_codebooks):
            rows = targets.at(level)
            if level:
                levels.append((rows, prefix_states[offsets[rows] + level - 1]))
            else:
                levels.append((rows, self._states_at(item_states, mask, targets.users, targets.positions)[rows]))
        return item_states, levels

    def _read_block_causal(self, item_codes, mask, targets, prefixes, rows, start, end, chosen, width):
        """Hidden states `(rows, items + width, d)` of a group: its items, then its prefix tokens."""
        length, device = end - start, mask.device
        place = self._places(rows, mask.shape[0])[prefixes.users[chosen]]
        slots = length + prefixes.slots[chosen]
        # What a token belongs to: the item before it (1 for the first), and how deep in its prefix it is (0: an item).
        owner = torch.zeros((rows.shape[0], length + width), dtype=torch.long, device=device)
        depth, valid = torch.zeros_like(owner), torch.zeros_like(owner, dtype=torch.bool)
        owner[:, :length] = torch.arange(1, length + 1, device=device)
        valid[:, :length] = mask[rows, start:end]
        owner[place, slots] = targets.positions[prefixes.rows[chosen]] - start + 1
        depth[place, slots], valid[place, slots] = prefixes.levels[chosen] + 1, True

        items = self._tokens(item_codes[rows, start:end])
        tokens = torch.cat([items, items.new_zeros((rows.shape[0], width, items.shape[-1]))], 1)
        codes = targets.codes[prefixes.rows[chosen], prefixes.levels[chosen]]
        for level in range(self.config.num_codebooks - 1):
            here = prefixes.levels[chosen] == level
            found = self.prefix_tokens(level, codes[here]).to(tokens.dtype)
            tokens = tokens.index_put((place[here], slots[here]), found)

        def sees(batch, head, query, key):
            item = (depth[batch, key] == 0) & (owner[batch, key] <= owner[batch, query])
            same = (owner[batch, key] == owner[batch, query]) & (depth[batch, key] <= depth[batch, query])
            own = (depth[batch, key] > 0) & (depth[batch, query] > 0) & same
            return (valid[batch, key] & (item | own)) | (query == key)

        block_causal = create_causal_mask(
            config=self.backbone.config,
            inputs_embeds=tokens,
            attention_mask=None,
            cache=None,
            and_mask_function=sees,
        )
        return self.backbone(
            inputs_embeds=tokens,
            attention_mask=block_causal,
            position_ids=(owner - 1 + depth).clamp(min=0),
            use_cache=False,
        ).last_hidden_state

    @staticmethod
    def _places(rows: torch.LongTensor, num_users: int) -> torch.LongTensor:
        """Place of every batch row in a group, by batch row."""
        places = torch.zeros(num_users, dtype=torch.long, device=rows.device)
        places[rows] = torch.arange(rows.shape[0], device=rows.device)
        return places

    def _start_search(
        self,
        item_codes: torch.LongTensor | None,
        attention_mask: torch.LongTensor | None,
        concepts: torch.Tensor | None,
        copies: CopyState | None,
        trie: SIDTrie,
    ) -> tuple[BackboneScorer, BeamCopies | None]:
        if concepts is not None or copies is not None:
            raise ValueError("`concepts` are Deco's: a full backbone searches from `item_codes`.")
        mask = self._check_inputs(item_codes, attention_mask)
        item_codes, mask = self._with_a_column(item_codes, mask)
        scorer = BackboneScorer(self, item_codes, mask)
        if self.pointer is None:
            return scorer, None
        return scorer, BeamCopies.start(self._copy_state(item_codes, scorer.item_states, mask, trie), trie)


__all__ = ["BackboneForSIDRetrieval"]
