"""The one beam search: trie-constrained, over whatever can score next codes."""

import copy
import operator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file

from .pointer_sid import BeamCopies, CopyState
from .scoring_sid import candidate_log_probs
from .trie import SIDTrie

FILLER = -1  # code and item row of a returned sequence that does not exist


class SIDGenerationConfig(GenerationConfig):
    """Options of [`SIDGenerationMixin.generate`].

    Args:
        num_beams (`int` or `list[int]`, *optional*): Beam width `B`; a list of `K` widths where levels differ. Defaults
            to 100.
        num_return_sequences (`int`, *optional*): Items returned per user, at most the last beam width. Defaults to 10,
            or to the last beam width where that is smaller.
        return_dict_in_generate (`bool`, *optional*): Return a [`SIDGenerationOutput`] instead of the sequences alone.
        skip_forced_levels (`bool`, *optional*): Spend no model work on prefixes with one continuation, whose
            probability is 1 under `normalize_over="children"`. Results are the same; defaults to `True`.

    Raises:
        ValueError: For any other argument, and for values that no search could run with.
    """

    def __init__(self, **kwargs):
        # The parent's many fields describe text generation; a search over SIDs reads only these.
        self.num_beams: int | list[int] | None = kwargs.pop("num_beams", None)
        self.num_return_sequences: int | None = kwargs.pop("num_return_sequences", None)
        self.return_dict_in_generate: bool | None = kwargs.pop("return_dict_in_generate", None)
        self.skip_forced_levels: bool | None = kwargs.pop("skip_forced_levels", None)
        self._commit_hash = kwargs.pop("_commit_hash", None)
        self._from_model_config = kwargs.pop("_from_model_config", None)
        self.transformers_version = kwargs.pop("transformers_version", None)
        if kwargs:
            known = "`num_beams`, `num_return_sequences`, `return_dict_in_generate`, `skip_forced_levels`"
            raise ValueError(f"Unknown generation arguments {sorted(kwargs)}; a search over SIDs takes {known}.")
        self.validate()

    def validate(self, **unused):
        self.num_beams, self.num_return_sequences = _plain(self.num_beams), _plain(self.num_return_sequences)
        widths = (
            [] if self.num_beams is None else self.num_beams if isinstance(self.num_beams, list) else [self.num_beams]
        )
        for width in widths:
            if not isinstance(width, int) or isinstance(width, bool) or width < 1:
                raise ValueError(f"`num_beams` must be a positive integer or a list of them, got {self.num_beams!r}.")
        number = self.num_return_sequences
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(f"`num_return_sequences` must be a positive integer, got {number!r}.")

    def resolve(self, num_codebooks: int) -> tuple[list[int], int]:
        """Beam width of every level and the number of sequences to return, checked against each other."""
        widths = 100 if self.num_beams is None else self.num_beams
        widths = list(widths) if isinstance(widths, list) else [widths] * num_codebooks
        if len(widths) != num_codebooks:
            raise ValueError(
                f"`num_beams` lists {len(widths)} widths for {num_codebooks} SID levels: give one for each level."
            )
        number = min(10, widths[-1]) if self.num_return_sequences is None else self.num_return_sequences
        if number > widths[-1]:
            raise ValueError(
                f"`num_return_sequences` ({number}) must not exceed `num_beams` ({widths[-1]} at the last level): "
                "widen the beam."
            )
        return widths, number

    @staticmethod
    def _get_default_generation_params() -> dict[str, Any]:
        return {}

    @classmethod
    def from_model_config(cls, model_config):
        # transformers asks for this while it builds a model, and takes exactly this error for "use the defaults".
        raise NotImplementedError("SID models keep no generation options in their model configuration.")


def _plain(value):
    """Integers of any kind, and sequences of them, as plain ones; everything else as it is."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


@dataclass
class SIDGenerationOutput(ModelOutput):
    """
    Result of a search, best first for every user, flattened over users and their `R` returned sequences.

    Args:
        sequences (`torch.LongTensor` of shape `(batch_size * R, K)`): SIDs; a user with fewer reachable items than `R`
            has rows of -1 at the end.
        sequences_scores (`torch.FloatTensor` of shape `(batch_size * R,)`): Log-probabilities, `-inf` for rows of -1.
        item_rows (`torch.LongTensor` of shape `(batch_size * R,)`): Catalog row of every SID, its first item where
            several share it, -1 for rows of -1.
        gates (`torch.FloatTensor` of shape `(batch_size,)`, *optional*): Probability of copying, of models with a copy
            pointer.
    """

    sequences: torch.LongTensor | None = None
    sequences_scores: torch.FloatTensor | None = None
    item_rows: torch.LongTensor | None = None
    gates: torch.FloatTensor | None = None


class SIDScorer(Protocol):
    """What a beam search needs of a model: a state per prefix, and one more code read."""

    def start(self) -> torch.Tensor:
        """States `(U, w)` of the empty prefix of every user."""

    def advance(self, parents: torch.LongTensor, codes: torch.LongTensor, level: int) -> torch.Tensor:
        """States `(A, w)` after `codes` `(A,)` of this level are read, `parents` `(A,)` indexing the rows returned
        last."""

    def head(self, level: int) -> torch.Tensor:
        """Output class vectors `(V, w)` of a level."""


@dataclass
class Beams:
    """Live prefixes of all users, grouped by user, best first."""

    users: torch.LongTensor  # (R,)
    nodes: torch.LongTensor  # (R,)
    scores: torch.Tensor  # (R,) what beams are ranked by
    log_probs: torch.Tensor  # (R,) the generator's; differs from the scores under a pointer
    codes: torch.LongTensor  # (R, level)
    state_rows: torch.LongTensor  # (R,) row of the scorer's states, -1 where the prefix needs none

    @classmethod
    def none(cls, trie: SIDTrie) -> "Beams":
        """The beams of no users."""
        nothing = trie.item_rows[:0]
        return cls(
            nothing, nothing, nothing.float(), nothing.float(), nothing.new_zeros((0, trie.num_codebooks)), nothing
        )


@torch.no_grad()
def beam_search(
    scorer: SIDScorer,
    trie: SIDTrie,
    num_beams: list[int],
    normalize_over: str = "children",
    skip_forced_levels: bool = True,
    copies: BeamCopies | None = None,
) -> Beams:
    """Find the most likely SIDs of every user.

    Only valid children are ever expanded, so no step depends on the catalog's size and every result exists. Under
    `"children"` a prefix with a single SID left has probability 1 from there on: it leaves the model's batch.

    Args:
        scorer (`SIDScorer`): Scores next codes, for `U` users.
        trie (`SIDTrie`): The catalog.
        num_beams (`list[int]`): Beam width of every level.
        normalize_over (`str`): `"children"` or `"vocabulary"`.
        skip_forced_levels (`bool`): Whether prefixes that need no model work are spared it.
        copies ([`BeamCopies`], *optional*): Pointer over the histories; the search then runs on the mixture.

    Returns:
        [`Beams`] of complete SIDs; a user has fewer than `num_beams[-1]` where fewer can be reached.
    """
    skip = skip_forced_levels and normalize_over == "children"
    states = scorer.start()
    rows = torch.arange(states.shape[0], device=states.device)
    num_users = rows.shape[0]
    scores = torch.zeros(num_users, device=states.device)
    beams = Beams(rows, torch.zeros_like(rows), scores, scores, rows.new_zeros((num_users, 0)), rows)
    for level in range(trie.num_codebooks):
        weight = scorer.head(level)
        parents, children, codes, log_probs = _score_children(beams, states, weight, trie, level, normalize_over, skip)
        log_probs = beams.log_probs[parents] + log_probs
        scores = log_probs
        if copies is not None:
            scores = copies.mix_children(level, beams.users, beams.nodes, trie, parents, log_probs)
        kept = top_per_user(scores, beams.users[parents], num_users, num_beams[level])
        parents, nodes, codes = parents[kept], children[kept], codes[kept]
        paths = torch.cat([beams.codes[parents], codes.unsqueeze(1)], 1)
        state_rows = torch.full_like(nodes, -1)
        if level + 1 < trie.num_codebooks:
            alive = trie.leaf_counts(level + 1, nodes) > 1 if skip else torch.ones_like(nodes, dtype=torch.bool)
            alive = alive.nonzero().squeeze(1)
            if alive.numel():
                states = scorer.advance(beams.state_rows[parents[alive]], codes[alive], level)
                state_rows[alive] = torch.arange(alive.shape[0], device=alive.device)
        beams = Beams(beams.users[parents], nodes, scores[kept], log_probs[kept], paths, state_rows)
    return beams


def _score_children(beams, states, weight, trie, level, normalize_over, skip):
    """Children of all beams: parent beam, node, code and log-probability, each `(C,)`; forced children have 0."""
    parents, children, codes = trie.expand(level, beams.nodes)
    if not skip:
        log_probs = candidate_log_probs(states[beams.state_rows], weight, parents, codes, normalize_over)
        return parents, children, codes, log_probs
    branching = trie.num_children(level, beams.nodes) > 1
    log_probs = beams.scores.new_zeros(parents.shape[0])
    candidates = branching[parents].nonzero().squeeze(1)
    if candidates.numel():
        branch_rows = torch.cumsum(branching, 0) - 1
        branch_states = states[beams.state_rows[branching]]
        branch_parents = branch_rows[parents[candidates]]
        log_probs[candidates] = candidate_log_probs(
            branch_states, weight, branch_parents, codes[candidates], normalize_over
        )
    return parents, children, codes, log_probs


def top_per_user(scores: torch.Tensor, users: torch.LongTensor, num_users: int, number: int) -> torch.LongTensor:
    """Positions of the best candidates of every user.

    Args:
        scores (`torch.Tensor` of shape `(C,)`): Candidate scores; those that are `-inf` or NaN are never chosen.
        users (`torch.LongTensor` of shape `(C,)`): Ascending user of every candidate.
        num_users (`int`): Number of users.
        number (`int`): Candidates kept per user.

    Returns:
        `torch.LongTensor`: positions, grouped by user, best first.
    """
    counts = torch.bincount(users, minlength=num_users)
    starts = torch.cumsum(counts, 0) - counts
    width = int(counts.max())
    padded = scores.new_full((num_users, width), -torch.inf)
    padded[users, torch.arange(users.shape[0], device=users.device) - starts[users]] = torch.where(
        scores.isnan(), -torch.inf, scores
    )
    best, positions = padded.topk(min(number, width), dim=1)
    return (positions + starts.unsqueeze(1))[best > -torch.inf]


class SIDGenerationMixin:
    """Gives a model that carries a catalog its `generate`.

    The model supplies `config` (with `num_codebooks` and `normalize_over`), `trie` and
    `_start_search(item_codes, attention_mask, concepts, copies) -> (SIDScorer, BeamCopies | None)`.
    """

    @torch.no_grad()
    def generate(
        self,
        item_codes: torch.LongTensor | None = None,
        attention_mask: torch.LongTensor | None = None,
        concepts: torch.Tensor | None = None,
        copies: CopyState | None = None,
        generation_config: SIDGenerationConfig | None = None,
        **kwargs,
    ) -> torch.LongTensor | SIDGenerationOutput:
        """Retrieve the most likely next items of every user.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories, padded on the left.
            attention_mask (`torch.LongTensor` of shape `(B, T)`, *optional*): 1 for items, 0 for padding. All ones by
                default.
            concepts (`torch.Tensor` of shape `(B, M, w)`, *optional*): Stored concepts instead of histories.
            copies ([`CopyState`], *optional*): Beside stored concepts, the pointer's state, where the model has one.
            generation_config ([`SIDGenerationConfig`], *optional*): Options; the checkpoint's own by default.
            kwargs: Any option of [`SIDGenerationConfig`], over both.

        Returns:
            `torch.LongTensor` of shape `(B * num_return_sequences, K)`, best first for every user, or a
            [`SIDGenerationOutput`] where `return_dict_in_generate` is set.

        Raises:
            ValueError: For an unknown argument, more returned sequences than beams, a model without a catalog, or
                neither or both of histories and concepts.
        """
        options = self._prepare_generation_config(generation_config, **kwargs)
        num_beams, num_return_sequences = options.resolve(self.config.num_codebooks)
        if (item_codes is None) == (concepts is None):
            raise ValueError("Give `generate` either `item_codes` (with their `attention_mask`) or stored `concepts`.")
        if copies is not None and concepts is None:
            raise ValueError("`copies` go with stored `concepts`; from `item_codes` the search makes its own.")
        trie = self.trie
        num_users, pointer = (item_codes if concepts is None else concepts).shape[0], None
        if num_users:
            scorer, pointer = self._start_search(item_codes, attention_mask, concepts, copies)
            skip = options.skip_forced_levels is not False
            beams = beam_search(scorer, trie, num_beams, self.config.normalize_over, skip, pointer)
        else:
            beams = Beams.none(trie)
        output = _collect(beams, trie, num_users, num_return_sequences)
        output.gates = None if pointer is None else pointer.gate
        return output if options.return_dict_in_generate else output.sequences

    def _prepare_generation_config(
        self, generation_config: SIDGenerationConfig | None, **kwargs
    ) -> SIDGenerationConfig:
        """Options of one call: its keyword arguments, over the given configuration, over the checkpoint's."""
        own = {name: value for name, value in vars(self.generation_config).items() if not name.startswith("_")}
        given = {} if generation_config is None else vars(copy.deepcopy(generation_config))
        given = {name: value for name, value in given.items() if value is not None and not name.startswith("_")}
        called = {name: value for name, value in kwargs.items() if value is not None}
        return SIDGenerationConfig(**{**own, **given, **called})

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


def _collect(beams: Beams, trie: SIDTrie, num_users: int, number: int) -> SIDGenerationOutput:
    """Pad every user's beams to `number` rows and flatten."""
    counts = torch.bincount(beams.users, minlength=num_users)
    ranks = (
        torch.arange(beams.users.shape[0], device=beams.users.device) - (torch.cumsum(counts, 0) - counts)[beams.users]
    )
    kept = ranks < number
    slots = beams.users[kept] * number + ranks[kept]
    sequences = beams.codes.new_full((num_users * number, trie.num_codebooks), FILLER)
    scores = beams.scores.new_full((num_users * number,), -torch.inf)
    item_rows = beams.codes.new_full((num_users * number,), FILLER)
    sequences[slots], scores[slots] = beams.codes[kept], beams.scores[kept]
    item_rows[slots] = trie.item_rows[trie.item_offsets[beams.nodes[kept]]]
    return SIDGenerationOutput(sequences=sequences, sequences_scores=scores, item_rows=item_rows)


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


__all__ = ["SIDGenerationConfig", "SIDGenerationOutput", "SIDGenerationMixin", "TrieLogitsProcessor", "beam_search"]
