"""`generate` of the models: a beam search over a catalog, and the same constraint for stock transformers."""

from dataclasses import replace

import torch
from transformers import LogitsProcessor
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .beam_search_sid import Beams, BeamSearch
from .filters_sid import ItemFilter, ItemSet
from .generation_config_sid import SIDGenerationConfig, SIDGenerationOutput
from .pointer_sid import CopyState
from .selection_sid import ranks, top_per_user
from .trie import SIDTrie, spread_ranges

FILLER = -1  # code and item row of a returned sequence that does not exist


class SIDGenerationMixin:
    """Gives a model that carries a catalog its `generate`.

    The model supplies `config` (with `num_codebooks` and `normalize_over`), `device`, `trie`,
    `_take_catalog() -> (SIDTrie, content)`, `_check_inputs(item_codes, attention_mask) -> mask`,
    `_start_search(item_codes, attention_mask, concepts, copies, trie) -> (SIDScorer, BeamCopies | None)` and
    `reranker`; where that is not None, also `_log_choices(search, beams, content) -> (C,)`.
    """

    @torch.no_grad()
    def generate(
        self,
        item_codes: torch.LongTensor | None = None,
        attention_mask: torch.LongTensor | None = None,
        concepts: torch.Tensor | None = None,
        copies: CopyState | None = None,
        allow_rows: ItemSet | torch.LongTensor | list | None = None,
        deny_rows: ItemSet | torch.LongTensor | list | None = None,
        rerank: bool | None = None,
        generation_config: SIDGenerationConfig | None = None,
        **kwargs,
    ) -> torch.LongTensor | SIDGenerationOutput:
        """Retrieve the most likely next items of every user.

        Tensors may lie on any device; the results lie on the model's.

        `allow_rows`, `deny_rows` and the option `exclude_seen` work inside the search: a prefix under which nothing may
        be returned leaves the beam, so a beam of one width for all levels, at least `num_return_sequences`, comes back
        full as long as enough items are left. Scores stay log-probabilities of the unfiltered model. A SID is out when
        all its items are; the row returned is the first that is not.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories, padded on the left.
            attention_mask (`torch.LongTensor` of shape `(B, T)`, *optional*): 1 for items, 0 for padding. All ones by
                default.
            concepts (`torch.Tensor` of shape `(B, M, w)`, *optional*): Stored concepts instead of histories.
            copies ([`CopyState`], *optional*): Beside stored concepts, the pointer's state, where the model has one.
            allow_rows (`list`, `torch.LongTensor` or [`ItemSet`], *optional*): Catalog rows that alone may be returned:
                a flat list for all users, or a list for each (a tensor `(B, L)` is padded with -1).
            deny_rows (`list`, `torch.LongTensor` or [`ItemSet`], *optional*): Catalog rows that may not, in the same
                forms; or a list of several [`ItemSet`].
            rerank (`bool`, *optional*): Whether items are ranked, by `log p(item)`, instead of SIDs: a SID then comes
                once for each of its items that is among the best, and `item_rows` tell which. All items of all SIDs
                that the search ends with compete. By default True of a model with a reranking head where
                `return_dict_in_generate` is set, since sequences alone do not tell the items; else False: a SID comes
                once, with the first of its items in the catalog.
            generation_config ([`SIDGenerationConfig`], *optional*): Options; the checkpoint's own by default.
            kwargs: Any option of [`SIDGenerationConfig`], over both.

        Returns:
            `torch.LongTensor` of shape `(B * num_return_sequences, K)`, best first for every user, or a
            [`SIDGenerationOutput`] where `return_dict_in_generate` is set.

        Raises:
            ValueError: For an unknown argument, more returned sequences than beams, a model without a catalog, neither
                or both of histories and concepts, rows that are not of the catalog or of other users, or items to be
                ranked by a model without a reranking head or without `return_dict_in_generate`.
        """
        options = self._prepare_generation_config(generation_config, **kwargs)
        num_beams, num_return_sequences = options.resolve(self.config.num_codebooks)
        if (item_codes is None) == (concepts is None):
            raise ValueError("Give `generate` either `item_codes` (with their `attention_mask`) or stored `concepts`.")
        if copies is not None and concepts is None:
            raise ValueError("`copies` go with stored `concepts`; from `item_codes` the search makes its own.")
        if rerank and self.reranker is None:
            raise ValueError("`rerank` is set, but the model has no reranking head: it ranks SIDs alone.")
        if rerank and not options.return_dict_in_generate:
            raise ValueError(
                "`rerank` is set, but sequences alone do not tell which items of a SID were chosen: set "
                "`return_dict_in_generate` and read `item_rows`."
            )
        if rerank is None:
            rerank = self.reranker is not None and bool(options.return_dict_in_generate)
        (trie, content), device, seen = self._take_catalog(), self.device, None
        item_codes, attention_mask, concepts = (
            None if tensor is None else tensor.to(device) for tensor in (item_codes, attention_mask, concepts)
        )
        copies = None if copies is None else CopyState(**{name: state.to(device) for name, state in copies.items()})
        if options.exclude_seen:
            seen = self._seen_codes(item_codes, attention_mask)
        num_users, pointer, item_rows = (item_codes if concepts is None else concepts).shape[0], None, None
        item_filter = ItemFilter.build(trie, num_users, allow_rows, deny_rows, seen)
        if num_users:
            scorer, pointer = self._start_search(item_codes, attention_mask, concepts, copies, trie)
            # What tells items apart is read on from the state of every beam, so none may be spared its states.
            skip, over = options.skip_forced_levels is not False and not rerank, self.config.normalize_over
            # An item of a less likely SID can be likelier than all of a better one, if they are many.
            num_results = num_beams[-1] if rerank else num_return_sequences
            search = BeamSearch(scorer, trie, num_beams, num_results, over, skip, pointer, item_filter)
            beams = search.run()
            if rerank:
                log_choices = self._log_choices(search, beams, content)
                beams, item_rows = rank_items(beams, log_choices, trie, num_users, num_return_sequences, item_filter)
        else:
            beams = Beams.none(trie)
        output = collect_results(beams, trie, num_users, num_return_sequences, item_filter, item_rows)
        output.gates = None if pointer is None else pointer.gate
        return output if options.return_dict_in_generate else output.sequences

    def item_set(self, rows) -> ItemSet:
        """A set of catalog rows for `allow_rows` or `deny_rows`, made once for many calls; see [`ItemSet`]."""
        return ItemSet(rows, self.trie)

    def _seen_codes(self, item_codes: torch.LongTensor | None, attention_mask) -> torch.LongTensor:
        """SIDs `(B, T, K)` of the items that users have seen, -1 at padding."""
        if item_codes is None:
            raise ValueError(
                "`exclude_seen` reads `item_codes`: beside stored `concepts`, give what was seen as `deny_rows`."
            )
        mask = self._check_inputs(item_codes, attention_mask)
        return item_codes.masked_fill(~mask.unsqueeze(-1), -1)

    def _prepare_generation_config(
        self, generation_config: SIDGenerationConfig | None, **kwargs
    ) -> SIDGenerationConfig:
        """Options of one call: its keyword arguments, over the given configuration, over the checkpoint's."""
        given, options = {} if generation_config is None else vars(generation_config), {}
        for source in (vars(self.generation_config), given, kwargs):  # of any class: None is a default in all
            options |= {name: value for name, value in source.items() if value is not None and name[0] != "_"}
        return SIDGenerationConfig(**options)

    def adjust_generation_fn(
        self, generation_config, from_auto_class, from_pipeline, pretrained_model_name_or_path, *args, **kwargs
    ):
        """Called by `from_pretrained`: take the checkpoint's `generation_config.json` where it has one."""
        if generation_config is not None:
            self.generation_config = SIDGenerationConfig.from_dict(generation_config.to_dict())
            return
        names = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
        loading = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        present = cached_file(
            pretrained_model_name_or_path,
            GENERATION_CONFIG_NAME,
            _raise_exceptions_for_missing_entries=False,
            **loading,
        )
        if present is None:
            self.generation_config = SIDGenerationConfig()
        else:  # a damaged file is an error, not a reason for defaults
            self.generation_config = SIDGenerationConfig.from_pretrained(pretrained_model_name_or_path, **loading)


def read_on(search: BeamSearch, beams: Beams, chosen: torch.Tensor) -> torch.Tensor:
    """States `(R, w)` behind the whole SIDs of the `chosen` beams: one more step from where a search ended that spared
    no prefix its state."""
    level = search.trie.num_codebooks - 1
    codes, rows = beams.codes[chosen, level], beams.state_rows[chosen]
    return search.scorer.advance(search.states, rows, codes, level).hidden


def rank_items(
    beams: Beams,
    log_choices: torch.Tensor,
    trie: SIDTrie,
    num_users: int,
    number: int,
    item_filter: ItemFilter | None,
) -> tuple[Beams, torch.LongTensor]:
    """The best items of every user, from the SIDs that a search found.

    Args:
        beams ([`Beams`]): SIDs `(R,)`, by user.
        log_choices (`torch.Tensor` of shape `(C,)`): `log p(item | SID)` of all their items, those of a SID together.
        trie ([`SIDTrie`]): The catalog.
        num_users (`int`): Users.
        number (`int`): Items of a user.
        item_filter ([`ItemFilter`], *optional*): What users may be given. It takes items out; the others keep their
            scores.

    Returns:
        The SID of every item kept, by user and best first, scored by `log p(item)`, and the items' catalog rows.
    """
    starts, ends = trie.item_ranges(trie.num_codebooks, beams.nodes)
    owners, positions = spread_ranges(starts, ends - starts)
    users, scores = beams.users[owners], beams.scores[owners] + log_choices
    if item_filter is not None:
        scores = scores.masked_fill(~item_filter.allows(users, positions), -torch.inf)
    kept = top_per_user(scores, users, num_users, number)
    chosen = Beams(*(getattr(beams, name)[owners[kept]] for name in Beams.__dataclass_fields__))
    return replace(chosen, scores=scores[kept]), trie.item_rows[positions[kept]]


def collect_results(
    beams: Beams,
    trie: SIDTrie,
    num_users: int,
    number: int,
    item_filter: ItemFilter | None,
    item_rows: torch.LongTensor | None = None,
) -> SIDGenerationOutput:
    """Pad every user's beams to `number` rows and flatten; `item_rows` `(R,)` are their items, by default the first of
    every SID that its user may be given."""
    places = ranks(beams.users, num_users)
    kept = places < number
    slots = beams.users[kept] * number + places[kept]
    sequences = beams.codes.new_full((num_users * number, trie.num_codebooks), FILLER)
    scores = beams.scores.new_full((num_users * number,), -torch.inf)
    rows = beams.codes.new_full((num_users * number,), FILLER)
    sequences[slots], scores[slots] = beams.codes[kept], beams.scores[kept]
    if item_rows is not None:
        rows[slots] = item_rows[kept]
    elif item_filter is None:
        rows[slots] = trie.item_rows[trie.item_offsets[beams.nodes[kept]]]
    else:
        rows[slots] = item_filter.first_rows(beams.users[kept], beams.nodes[kept])
    return SIDGenerationOutput(sequences=sequences, sequences_scores=scores, item_rows=rows)


class TrieLogitsProcessor(LogitsProcessor):
    """Lets stock transformers `generate` write only SIDs of a catalog, without a Python loop over beams.

    Generated token `k` (counted from the end of the prompt) stands for code `token - level_offsets[k]` of level `k`;
    every other token gets `-inf`. Stock beam search adds the model's unnormalised scores: pass
    `renormalize_logits=True, length_penalty=0.0` to it for probabilities over valid children.

    Args:
        trie ([`SIDTrie`]): The catalog.
        prompt_length (`int`, *optional*, defaults to 0): Tokens before the first generated one.
        level_offsets (`list[int]`, *optional*): First token of every level in the model's vocabulary. Zeros by default:
            tokens are codes.

    Raises:
        ValueError: When called for more levels than the trie has.
    """

    def __init__(self, trie: SIDTrie, prompt_length: int = 0, level_offsets: list[int] | None = None):
        self.trie = trie
        self.prompt_length = prompt_length
        self.level_offsets = (
            [0] * trie.num_codebooks if level_offsets is None else [int(offset) for offset in level_offsets]
        )
        if len(self.level_offsets) != trie.num_codebooks:
            raise ValueError(
                f"`level_offsets` must list {trie.num_codebooks} offsets, one per level, got {len(self.level_offsets)}."
            )

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Mask `scores` `(rows, vocabulary)` given the tokens so far, `input_ids` `(rows, length)`."""
        level = input_ids.shape[1] - self.prompt_length
        if not 0 <= level < self.trie.num_codebooks:
            raise ValueError(
                f"`TrieLogitsProcessor` was asked for code {level + 1} of SIDs with {self.trie.num_codebooks} levels: "
                "check `prompt_length` and set `max_new_tokens` to the number of levels."
            )
        trie = self.trie.to(scores.device)
        if level == 0:
            nodes = torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device)
        else:
            offsets = torch.tensor(self.level_offsets[:level], device=scores.device)
            nodes = trie.node_paths(input_ids[:, self.prompt_length :] - offsets)[:, -1]
        live = (nodes >= 0).nonzero().squeeze(1)  # rows that left the trie have no valid continuation
        parents, _, codes = trie.expand(level, nodes[live])
        masked = torch.full_like(scores, -torch.inf)
        rows, tokens = live[parents], codes + self.level_offsets[level]
        masked[rows, tokens] = scores[rows, tokens]
        return masked


__all__ = ["SIDGenerationConfig", "SIDGenerationOutput", "SIDGenerationMixin", "TrieLogitsProcessor"]
