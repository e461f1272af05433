"""The one beam search: trie-constrained, over whatever can score next codes.

Three things keep it small, none of which changes a result. Only valid children are expanded. A prefix with a single SID
left has probability 1 from there on and leaves the model's batch. And an extension never has more probability than its
prefix: once a user has `k` whole SIDs, prefixes that score less than the worst of them can no longer reach the best
`k`, so the likeliest prefixes are read first, and the others only where they still can.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from .filters_sid import ItemFilter
from .pointer_sid import BeamCopies
from .scoring_sid import candidate_log_probs, root_log_probs
from .selection_sid import pad_per_user, ranks, top_per_user
from .trie import SIDTrie
from .wide_levels_sid import best_children, is_wide

# Prefixes are read in two waves where the first, twice as many as the results wanted, is at most this share of a beam.
_FIRST_SHARE = 0.5
_MOST_OUT = 4  # times as many as are kept: with more taken out by a filter, all children are listed
_SLACK = 1e-4  # rounding of a pointer's mixture can put an extension this much above its prefix


@dataclass
class PrefixStates:
    """What a model knows of `A` prefixes.

    Attributes:
        hidden (`torch.Tensor` of shape `(A, w)`): State after the last code.
        users (`torch.LongTensor` of shape `(A,)`): User of every prefix.
        keys, values (`list` of `torch.Tensor` of shape `(A, ...)`): What every layer keeps of it.
    """

    hidden: torch.Tensor
    users: torch.LongTensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def select(self, rows: torch.LongTensor) -> "PrefixStates":
        """The states of some prefixes, or of one several times."""
        keys, values = ([layer.index_select(0, rows) for layer in part] for part in (self.keys, self.values))
        return PrefixStates(self.hidden.index_select(0, rows), self.users[rows], keys, values)

    @classmethod
    def join(cls, parts: "list[PrefixStates]") -> "PrefixStates":
        """The prefixes of several, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        keys, values = (
            [torch.cat(layer) for layer in zip(*(getattr(part, name) for part in parts), strict=True)]
            for name in ("keys", "values")
        )
        return cls(torch.cat([part.hidden for part in parts]), torch.cat([part.users for part in parts]), keys, values)


class SIDScorer(Protocol):
    """What a beam search needs of a model: a state per prefix, and one more code read."""

    def start(self) -> PrefixStates:
        """States of the empty prefix of every user, in order."""

    def advance(
        self, states: PrefixStates, rows: torch.LongTensor, codes: torch.LongTensor, level: int
    ) -> PrefixStates:
        """States after `codes` `(A,)` of this level are read, `rows` `(A,)` indexing `states`, users ascending."""

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
    state_rows: torch.LongTensor  # (R,) row of the state of the prefix before the last code, -1 where there is none

    @classmethod
    def roots(cls, num_users: int, device: torch.device) -> "Beams":
        """The empty prefix of every user."""
        users, scores = torch.arange(num_users, device=device), torch.zeros(num_users, device=device)
        return cls(users, torch.zeros_like(users), scores, scores, users.new_zeros((num_users, 0)), users)

    @classmethod
    def none(cls, trie: SIDTrie) -> "Beams":
        """The beams of no users."""
        return replace(cls.roots(0, trie.device), codes=trie.item_rows.new_zeros((0, trie.num_codebooks)))


@dataclass
class Candidates:
    """Children of beams, each `(C,)`: beam, node, code, the generator's log-probability, and score."""

    beams: torch.LongTensor
    nodes: torch.LongTensor
    codes: torch.LongTensor
    log_probs: torch.Tensor
    scores: torch.Tensor

    def select(self, chosen: torch.Tensor) -> "Candidates":
        return Candidates(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    @classmethod
    def join(cls, parts: "list[Candidates]") -> "Candidates":
        """All of several, by user: beams are."""
        if len(parts) == 1:
            return parts[0]
        joined = cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))
        return joined.select(joined.beams.argsort(stable=True))


class BeamSearch:
    """Finds the most likely SIDs of every user.

    Args:
        scorer (`SIDScorer`): Scores next codes, for `U` users.
        trie (`SIDTrie`): The catalog.
        num_beams (`list[int]`): Beam width of every level.
        num_results (`int`, *optional*): SIDs wanted per user; the last beam width by default. The best `num_results`
            are those of a search that keeps all beams; what else is returned is not.
        normalize_over (`str`): `"children"` or `"vocabulary"`.
        skip_forced_levels (`bool`): Whether prefixes that need no model work are spared it.
        copies (`BeamCopies`, *optional*): Pointer over the histories; the search then runs on the mixture.
        item_filter (`ItemFilter`, *optional*): What users may be given. A prefix without such an item leaves the beam
            at once; scores stay those of the search without a filter.
    """

    def __init__(
        self,
        scorer: SIDScorer,
        trie: SIDTrie,
        num_beams: list[int],
        num_results: int | None = None,
        normalize_over: str = "children",
        skip_forced_levels: bool = True,
        copies: BeamCopies | None = None,
        item_filter: ItemFilter | None = None,
    ):
        self.scorer, self.trie, self.num_beams = scorer, trie, num_beams
        self.num_results = num_beams[-1] if num_results is None else num_results
        self.normalize_over, self.copies, self.item_filter = normalize_over, copies, item_filter
        self.skip = skip_forced_levels and normalize_over == "children"

    @torch.no_grad()
    def run(self) -> Beams:
        """[`Beams`] of complete SIDs; a user has fewer than wanted where fewer can be reached."""
        self.states = self.scorer.start()
        self.num_users = self.states.hidden.shape[0]
        beams = Beams.roots(self.num_users, self.states.hidden.device)
        candidates = self._root_candidates(beams)
        for level in range(self.trie.num_codebooks):
            if level:
                beams, candidates = self._expand(level, beams)
            beams = self._keep(level, beams, candidates)
        return beams

    def _root_candidates(self, beams: Beams) -> Candidates:
        """The first codes, the same for all users."""
        nodes = torch.arange(self.trie.num_nodes(1), device=beams.users.device).repeat(self.num_users)
        parents = beams.users.repeat_interleave(self.trie.num_nodes(1))
        log_probs = root_log_probs(self.states.hidden, self.scorer.head(0), self.trie, self.normalize_over)
        return self._scored(0, beams, beams.users, parents, nodes, self.trie.child_codes[0].long()[nodes], log_probs)

    def _expand(self, level: int, beams: Beams) -> tuple[Beams, Candidates]:
        """Read the last code of the beams that may still matter, and score their children."""
        whole = torch.zeros_like(beams.nodes, dtype=torch.bool)
        if self.skip:
            whole = self.trie.leaf_counts(level, beams.nodes) == 1
        known = whole.nonzero().squeeze(1)
        parts, states, read = [self._children(level, beams, known)], [], 0
        bounds, state_rows = self._bounds(level, beams, parts), torch.full_like(beams.nodes, -1)
        for wave in self._waves(level, beams, ~whole):
            wave = wave[beams.scores[wave] >= bounds[beams.users[wave]]]
            if not wave.numel():
                continue
            states.append(self.scorer.advance(self.states, beams.state_rows[wave], beams.codes[wave, -1], level - 1))
            state_rows[wave] = torch.arange(read, read + wave.shape[0], device=wave.device)
            read += wave.shape[0]
            parts.append(self._children(level, beams, wave, states[-1].hidden))
            bounds = self._bounds(level, beams, parts)
        if states:
            self.states = PrefixStates.join(states)
        candidates = Candidates.join(parts)
        if self._bounded(level):
            candidates = candidates.select(candidates.scores >= bounds[beams.users[candidates.beams]])
        return replace(beams, state_rows=state_rows), candidates

    def _children(self, level: int, beams: Beams, chosen: torch.LongTensor, hidden=None) -> Candidates:
        """Children of the `chosen` beams, given their states; without states each has one child, of probability 1."""
        nodes = beams.nodes[chosen]
        if hidden is not None and self.copies is None:
            best = self._best_children(level, beams, chosen, hidden)
            if best is not None:
                return best
        parents, children, codes = self.trie.expand(level, nodes)
        log_probs = beams.log_probs[chosen][parents]
        if hidden is not None:
            weight = self.scorer.head(level)
            log_probs = log_probs + candidate_log_probs(hidden, weight, parents, codes, self.normalize_over)
        return self._scored(level, beams, chosen, parents, children, codes, log_probs)

    def _best_children(self, level: int, beams: Beams, chosen: torch.LongTensor, hidden) -> Candidates | None:
        """Of the children of the `chosen` beams, which are many, those that can be kept; None where all have to be
        listed."""
        nodes, users, log_probs = beams.nodes[chosen], beams.users[chosen], beams.log_probs[chosen]
        if not is_wide(self.trie, level, nodes):
            return None
        # What the filter takes out is replaced by what comes next.
        weight, number = self.scorer.head(level), self.num_beams[level]
        out = 0 if self.item_filter is None else self.item_filter.most_out(level + 1)
        if out is None or out > _MOST_OUT * number:
            return None
        wanted = number + out
        best = best_children(hidden, weight, self.trie, level, nodes, users, log_probs, wanted, self.normalize_over)
        if best is None:
            return None
        rows, codes, log_probs = best
        children = self.trie.child_nodes(level, nodes[rows], codes)
        return self._scored(level, beams, chosen, rows, children, codes, log_probs)

    def _scored(self, level: int, beams: Beams, chosen, parents, children, codes, log_probs) -> Candidates:
        """Candidates with the scores that the pointer and the filter make of their log-probabilities."""
        scores, users = log_probs, beams.users[chosen]
        if self.copies is not None:
            scores = self.copies.mix_children(level, users, beams.nodes[chosen], self.trie, parents, log_probs)
        if self.item_filter is not None:
            scores = scores.masked_fill(~self.item_filter.alive(level + 1, users[parents], children), -torch.inf)
        return Candidates(chosen[parents], children, codes, log_probs, scores)

    def _bounded(self, level: int) -> bool:
        """Whether so few results are wanted that a bound on them saves reading prefixes."""
        return self.skip and 2 * self.num_results <= self.num_beams[level - 1] * _FIRST_SHARE

    def _bounds(self, level: int, beams: Beams, parts: list[Candidates]) -> torch.Tensor:
        """What a prefix must score to reach the results, for every user `(U,)`: as much as the last of the best whole
        SIDs found so far."""
        bounds = beams.scores.new_full((self.num_users,), -torch.inf)
        if not self._bounded(level):
            return bounds
        candidates = Candidates.join(parts)
        found = self.trie.leaf_counts(level + 1, candidates.nodes) == 1
        users, scores = beams.users[candidates.beams[found]], candidates.scores[found]
        if users.numel():
            scores = torch.where(scores.isnan(), -torch.inf, scores)  # `topk` would take NaN for the highest
            padded = pad_per_user(scores, users, self.num_users, -torch.inf)
            if padded.shape[1] >= self.num_results:
                bounds = padded.topk(self.num_results, dim=1).values[:, -1]
        return bounds if self.copies is None else bounds - _SLACK

    def _waves(self, level: int, beams: Beams, alive: torch.BoolTensor) -> list[torch.LongTensor]:
        """Beams to be read, at once or the likeliest of every user first."""
        rows = alive.nonzero().squeeze(1)
        if not self._bounded(level):
            return [rows]
        first = ranks(beams.users, self.num_users)[rows] < 2 * self.num_results
        return [rows[first], rows[~first]]

    def _keep(self, level: int, beams: Beams, candidates: Candidates) -> Beams:
        """The best candidates of every user, as beams."""
        users = beams.users[candidates.beams]
        kept = candidates.select(top_per_user(candidates.scores, users, self.num_users, self.num_beams[level]))
        return Beams(
            beams.users[kept.beams],
            kept.nodes,
            kept.scores,
            kept.log_probs,
            torch.cat([beams.codes[kept.beams], kept.codes.unsqueeze(1)], 1),
            beams.state_rows[kept.beams],
        )
