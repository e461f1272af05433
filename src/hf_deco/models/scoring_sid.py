"""Log-probabilities of next codes among the valid children of SID prefixes (Eq. 6), for training and search alike."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .trie import SIDTrie

# One multiply-add of a full-head product costs about this much less than one gathered for a ragged dot product.
_GATHER_COST = 32


def segment_log_softmax(logits: torch.Tensor, segments: torch.LongTensor, num_segments: int) -> torch.Tensor:
    """Log-softmax inside every segment of a flat tensor.

    Args:
        logits (`torch.Tensor` of shape `(C,)`): Float logits.
        segments (`torch.LongTensor` of shape `(C,)`): Segment of every logit.
        num_segments (`int`): Number of segments.

    Returns:
        `torch.Tensor` of shape `(C,)`.
    """
    highest = logits.new_full((num_segments,), -torch.inf).scatter_reduce(0, segments, logits.detach(), "amax")
    shifted = logits - highest[segments]
    normalizer = torch.zeros_like(highest).index_add(0, segments, shifted.exp()).log()
    return shifted - normalizer[segments]


def candidate_log_probs(
    states: torch.Tensor, weight: torch.Tensor, parents: torch.LongTensor, codes: torch.LongTensor, normalize_over: str
) -> torch.Tensor:
    """Log-probability of every candidate code, given the children of a set of prefixes.

    Where candidates are many, one product with the whole head and a gather; where they are few, dot products with their
    rows of the head alone.

    Args:
        states (`torch.Tensor` of shape `(R, w)`): State of every prefix.
        weight (`torch.Tensor` of shape `(V, w)`): Output class vectors of the level.
        parents (`torch.LongTensor` of shape `(C,)`): Row in `states` of every candidate.
        codes (`torch.LongTensor` of shape `(C,)`): Code of every candidate; under `"children"` all children of a
            prefix.
        normalize_over (`str`): `"children"` or `"vocabulary"`.

    Returns:
        `torch.Tensor` of shape `(C,)`, float32.
    """
    rows, size = states.shape[0], weight.shape[0]
    if normalize_over == "vocabulary":
        return F.linear(states, weight).float().log_softmax(-1)[parents, codes]
    if codes.shape[0] * _GATHER_COST > rows * size:
        logits = F.linear(states, weight).flatten().index_select(0, parents * size + codes)
    else:
        logits = (states.index_select(0, parents) * F.embedding(codes, weight)).sum(-1)
    return segment_log_softmax(logits.float(), parents, rows)


@dataclass
class Targets:
    """SIDs to be scored, and where they pass the trie.

    Attributes:
        users (`torch.LongTensor` of shape `(R,)`): Batch row of every target.
        positions (`torch.LongTensor` of shape `(R,)`): Column of the item before it, -1 for the first of a sequence.
        codes (`torch.LongTensor` of shape `(R, K)`): SIDs.
        paths (`torch.LongTensor` of shape `(R, K)`): Node after every level.
        nodes (`torch.LongTensor` of shape `(R, K)`): Node before every level.
        branching (`torch.BoolTensor` of shape `(R, K)`): Levels that have to be scored; the others have probability 1.
        depth (`torch.LongTensor` of shape `(R,)`): Levels up to the last branching one.
    """

    users: torch.LongTensor
    positions: torch.LongTensor
    codes: torch.LongTensor
    paths: torch.LongTensor
    nodes: torch.LongTensor
    branching: torch.BoolTensor
    depth: torch.LongTensor

    @classmethod
    def locate(cls, users, positions, codes: torch.LongTensor, trie: SIDTrie, normalize_over: str) -> "Targets":
        """Find the SIDs in the trie; a `ValueError` names one that is not there."""
        paths = trie.node_paths(codes)
        if (paths[:, -1] < 0).any():
            missing = codes[paths[:, -1] < 0]
            raise ValueError(
                f"`labels` hold {missing.shape[0]} SIDs that are not in the catalog, such as {missing[0].tolist()}."
            )
        nodes = F.pad(paths[:, :-1], (1, 0))
        branching = torch.ones_like(nodes, dtype=torch.bool)
        if normalize_over == "children":
            branching = torch.stack([trie.num_children(k, nodes[:, k]) > 1 for k in range(trie.num_codebooks)], 1)
        levels = torch.arange(1, trie.num_codebooks + 1, device=codes.device)
        return cls(users, positions, codes, paths, nodes, branching, (branching * levels).amax(1))

    def __len__(self) -> int:
        return self.codes.shape[0]

    def at(self, level: int) -> torch.LongTensor:
        """Rows that have to be scored at a level."""
        return self.branching[:, level].nonzero().squeeze(1)


@dataclass
class LevelScores:
    """Log-probabilities of the children of gold prefixes at one level, flat: the children of a prefix lie together.

    Attributes:
        level (`int`): The level, from 0.
        rows (`torch.LongTensor` of shape `(r,)`): Targets that are scored here.
        log_probs (`torch.Tensor` of shape `(C,)`): Log-probability of every child given its prefix, float32.
        starts (`torch.LongTensor` of shape `(r,)`): Where the children of a prefix begin.
        first_nodes (`torch.LongTensor` of shape `(r,)`): Node of its first child in level `level + 1`.
        gold (`torch.LongTensor` of shape `(r,)`): Where the target's own child lies.
        parents (`torch.LongTensor` of shape `(C,)`, *optional*): Prefix of every child, as a position in `rows`. None
            at the root, where every prefix has the same number of children.
    """

    level: int
    rows: torch.LongTensor
    log_probs: torch.Tensor
    starts: torch.LongTensor
    first_nodes: torch.LongTensor
    gold: torch.LongTensor
    parents: torch.LongTensor | None = None

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of prefixes `(r,)` at their children, `(C,)`."""
        if self.parents is not None:
            return values[self.parents]
        return values.repeat_interleave(self.log_probs.shape[0] // max(1, values.shape[0]))

    def locate(self, prefixes: torch.LongTensor, nodes: torch.LongTensor) -> torch.LongTensor:
        """Where the children `nodes` `(m,)` of `prefixes` `(m,)` lie, `(m,)`."""
        return self.starts[prefixes] + nodes - self.first_nodes[prefixes]

    def normalized(self, log_weights: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `(C,)` in proportion to `exp(log_weights)` among the children of each prefix."""
        if self.parents is not None:
            return segment_log_softmax(log_weights, self.parents, self.rows.shape[0])
        return log_weights.view(self.rows.shape[0], -1).log_softmax(-1).flatten()


def score_level(
    states: torch.Tensor,
    weight: torch.Tensor,
    trie: SIDTrie,
    level: int,
    rows: torch.LongTensor,
    targets: Targets,
    normalize_over: str,
) -> LevelScores:
    """Score the children of gold prefixes at one level.

    Args:
        states (`torch.Tensor` of shape `(r, w)`): State of every prefix.
        weight (`torch.Tensor` of shape `(V, w)`): Output class vectors of the level.
        trie ([`SIDTrie`]): The catalog.
        level (`int`): The level, from 0.
        rows (`torch.LongTensor` of shape `(r,)`): Targets that the states belong to.
        targets ([`Targets`]): All targets.
        normalize_over (`str`): `"children"` or `"vocabulary"`.
    """
    parents = None
    if level == 0:
        log_probs = root_log_probs(states, weight, trie, normalize_over)
        starts = torch.arange(rows.shape[0], device=rows.device) * trie.num_nodes(1)
        first_nodes = torch.zeros_like(starts)
    else:
        nodes = targets.nodes[rows, level]
        parents, _, codes = trie.expand(level, nodes)
        log_probs = candidate_log_probs(states, weight, parents, codes, normalize_over)
        counts = trie.num_children(level, nodes)
        starts, first_nodes = torch.cumsum(counts, 0) - counts, trie.child_offsets[level][nodes]
    gold = starts + targets.paths[rows, level] - first_nodes
    return LevelScores(level, rows, log_probs, starts, first_nodes, gold, parents)


def root_log_probs(states: torch.Tensor, weight: torch.Tensor, trie: SIDTrie, normalize_over: str) -> torch.Tensor:
    """Log-probabilities of the first codes in use, flat: all rows have the same candidates."""
    codes = trie.child_codes[0].long()
    if normalize_over == "vocabulary":
        return F.linear(states, weight).float().log_softmax(-1)[:, codes].flatten()
    root_weight = weight if codes.shape[0] == weight.shape[0] else F.embedding(codes, weight)
    return F.linear(states, root_weight).float().log_softmax(-1).flatten()


def gold_log_probs(scores: list[LevelScores], targets: Targets) -> torch.Tensor:
    """Log-probability of every code of the targets, `(R, K)` float32; 0 at levels that are not scored."""
    log_probs = torch.zeros(targets.codes.shape, dtype=torch.float32, device=targets.codes.device)
    for entry in scores:
        level = torch.tensor(entry.level, device=entry.rows.device)
        log_probs = log_probs.index_put((entry.rows, level), entry.log_probs[entry.gold])
    return log_probs
