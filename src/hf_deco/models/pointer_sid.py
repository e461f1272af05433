"""The copy pointer: a second distribution over SIDs, those of the history, mixed in by a gate (Eq. 11, 12)."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import ModelOutput

from .scoring_sid import LevelScores, Targets
from .trie import SIDTrie

_HIGHEST_GATE = 1 - 1e-6  # a gate that rounds to 1 would leave everything that is not in the history at log 0


@dataclass
class CopyState(ModelOutput):
    """
    What the search needs of a history to copy from it.

    Args:
        item_codes (`torch.LongTensor` of shape `(B, T, K)`): SIDs of the history.
        weights (`torch.FloatTensor` of shape `(B, T)`): Attention over its items, 0 at padding and at items outside the
            catalog; sums to 1, or to 0 where nothing can be copied.
        gate (`torch.FloatTensor` of shape `(B,)`): Probability `lambda` of copying; 0 where nothing can be copied.
    """

    item_codes: torch.LongTensor | None = None
    weights: torch.FloatTensor | None = None
    gate: torch.FloatTensor | None = None


class CopyPointer(nn.Module):
    """Attends from a state to the items before it: `P(s) = (1 - lambda) p(s | z) + lambda sum_t a_t [s(i_t) = s]`.

    Args:
        hidden_size (`int`): Width of the backbone's states.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.query_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, 1)

    def forward(
        self, queries: torch.Tensor, states: torch.Tensor, copyable: torch.BoolTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and gate.

        Args:
            queries (`torch.Tensor` of shape `(B, Q, d)`): States that look back.
            states (`torch.Tensor` of shape `(B, T, d)`): Item states.
            copyable (`torch.BoolTensor` of shape `(B, Q, T)`): Items that a query may copy.

        Returns:
            Weights `(B, Q, T)` and gate `(B, Q)`, float32, both 0 where nothing can be copied.
        """
        scores = self.query_proj(queries) @ self.key_proj(states).transpose(1, 2)
        scores = (scores.float() * states.shape[-1] ** -0.5).masked_fill(~copyable, torch.finfo(torch.float32).min)
        weights = scores.softmax(-1) * copyable
        gate = self.gate_proj(queries).squeeze(-1).float().sigmoid().clamp(max=_HIGHEST_GATE) * copyable.any(-1)
        return weights, gate


@dataclass
class TargetCopies:
    """Pointer of every target: weights `(R, T)`, gate `(R,)`, and nodes of the history's items `(R, T, K)`."""

    weights: torch.Tensor
    gate: torch.Tensor
    item_paths: torch.LongTensor

    def mix_likelihood(self, log_probs: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Exact log-likelihood `(R,)` of the targets under the mixture, given the generator's `(R,)` (Eq. 11)."""
        copied = self.item_paths[..., -1] == targets.paths[:, -1:]
        return mix(log_probs, (self.weights * copied).sum(-1), self.gate)

    def mix_level(self, scores: LevelScores, targets: Targets, prefix_log_probs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `(C,)` of the next codes under the mixture (Eq. 12).

        Args:
            scores ([`LevelScores`]): The generator's, at one level.
            targets ([`Targets`]): All targets.
            prefix_log_probs (`torch.Tensor` of shape `(R,)`): The generator's log-probability of the gold prefix.
        """
        level, rows = scores.level, scores.rows
        weights, gate, prefix = self.weights[rows], self.gate[rows], prefix_log_probs[rows]
        shared = torch.ones_like(weights, dtype=torch.bool)
        if level:
            shared = self.item_paths[rows, :, level - 1] == targets.nodes[rows, level].unsqueeze(1)
        nodes = self.item_paths[rows, :, level]
        prefixes, places = (shared & (nodes >= 0)).nonzero(as_tuple=True)
        mass = scores.log_probs.new_zeros(scores.log_probs.shape)
        mass = mass.index_add(0, scores.locate(prefixes, nodes[prefixes, places]), weights[prefixes, places])
        children = mix(scores.spread(prefix) + scores.log_probs, mass, scores.spread(gate))
        return children - scores.spread(mix(prefix, (weights * shared).sum(-1), gate))


def mix(log_probs: torch.Tensor, copied: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`log((1 - lambda) p + lambda A)` from `log p`, `A` and `lambda`, without `log 0` where nothing is copied."""
    generated = torch.log1p(-gate) + log_probs
    mass = gate * copied
    some = mass > 0
    pointed = torch.where(some, mass, 1.0).log()
    return torch.where(some, torch.logaddexp(generated, pointed), generated)


@dataclass
class BeamCopies:
    """The pointer during a beam search: weights and gate of every user, and the nodes that its history passes.

    Attributes:
        weights (`torch.Tensor` of shape `(U, T)`): Attention over the history.
        gate (`torch.Tensor` of shape `(U,)`): Probability of copying.
        item_paths (`torch.LongTensor` of shape `(U, T, K)`): Node of every history item after each level, -1 for none.
    """

    weights: torch.Tensor
    gate: torch.Tensor
    item_paths: torch.LongTensor

    @classmethod
    def start(cls, state: CopyState, trie: SIDTrie) -> "BeamCopies":
        return cls(state.weights, state.gate, trie.node_paths(state.item_codes))

    def mix_children(
        self,
        level: int,
        users: torch.LongTensor,
        nodes: torch.LongTensor,
        trie: SIDTrie,
        parents: torch.LongTensor,
        log_probs: torch.Tensor,
    ) -> torch.Tensor:
        """Log-probability of every extended prefix under the mixture, `(C,)`.

        Args:
            level (`int`): Level of the prefixes.
            users, nodes (`torch.LongTensor` of shape `(R,)`): User and node of every beam.
            trie ([`SIDTrie`]): The catalog.
            parents (`torch.LongTensor` of shape `(C,)`): Beam of every child, children in the order of `trie.expand`.
            log_probs (`torch.Tensor` of shape `(C,)`): The generator's log-probability of the extended prefix.
        """
        children = self.item_paths[users, :, level]
        shared = children >= 0
        if level:
            shared &= self.item_paths[users, :, level - 1] == nodes.unsqueeze(1)
        beams, places = shared.nonzero(as_tuple=True)
        counts = trie.num_children(level, nodes)
        starts = torch.cumsum(counts, 0) - counts - trie.child_offsets[level][nodes]
        mass = torch.zeros_like(log_probs)
        mass.index_add_(0, starts[beams] + children[beams, places], self.weights[users[beams], places].to(mass.dtype))
        return mix(log_probs, mass, self.gate[users][parents].to(mass.dtype))


__all__ = ["CopyPointer", "CopyState"]
