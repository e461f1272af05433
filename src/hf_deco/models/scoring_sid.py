"""Log-probabilities of next codes among the valid children of SID prefixes (Eq. 6), for training and search alike."""

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
        states (`torch.Tensor` of shape `(R, w)`): Decoder state of every prefix.
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
        logits = F.linear(states, weight)[parents, codes]
    else:
        logits = (states[parents] * F.embedding(codes, weight)).sum(-1)
    return segment_log_softmax(logits.float(), parents, rows)


def gold_log_probs(
    states: torch.Tensor,
    weight: torch.Tensor,
    trie: SIDTrie,
    level: int,
    nodes: torch.LongTensor,
    children: torch.LongTensor,
    normalize_over: str,
) -> torch.Tensor:
    """Log-probability of one given child of every prefix.

    Args:
        states (`torch.Tensor` of shape `(R, w)`): Decoder state of every prefix.
        weight (`torch.Tensor` of shape `(V, w)`): Output class vectors of the level.
        trie (`SIDTrie`): The catalog.
        level (`int`): Level of the prefixes.
        nodes (`torch.LongTensor` of shape `(R,)`): Node of every prefix.
        children (`torch.LongTensor` of shape `(R,)`): Node of the given child in level `level + 1`.
        normalize_over (`str`): `"children"` or `"vocabulary"`.

    Returns:
        `torch.Tensor` of shape `(R,)`, float32.
    """  # fmt: skip
    if normalize_over == "vocabulary":
        return -F.cross_entropy(
            F.linear(states, weight).float(), trie.child_codes[level][children].long(), reduction="none"
        )
    if level == 0:  # one node, the root: every row has the same candidates
        root_weight = (
            weight if trie.num_nodes(1) == weight.shape[0] else F.embedding(trie.child_codes[0].long(), weight)
        )
        return -F.cross_entropy(F.linear(states, root_weight).float(), children, reduction="none")
    parents, candidates, codes = trie.expand(level, nodes)
    log_probs = candidate_log_probs(states, weight, parents, codes, normalize_over)
    return log_probs[candidates == children[parents]]
