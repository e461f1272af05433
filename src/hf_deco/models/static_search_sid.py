"""Prefill and search of fixed shapes: what a CUDA graph can hold.

Every history has the same number of places, every user the same number of beams, dead ones at `-inf`, and every beam as
many children as the node of its level that has most. No shape depends on what is read or found, so nothing waits for
the device. Results are those of [`BeamSearch`], without filters and pointer; no level is skipped.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .beam_search_sid import SIDScorer
from .decoder_sid import DecoderContext
from .inference_sid import FlatTransformer, Layout
from .scorers_sid import DecoderScorer
from .selection_sid import top_cells
from .trie import SIDTrie


@dataclass
class FixedBeams:
    """SIDs of `U` users, best first; all have the same number `B`, some of which may be dead.

    Attributes:
        codes (`torch.LongTensor` of shape `(U, B, K)`): SIDs.
        nodes (`torch.LongTensor` of shape `(U, B)`): Their nodes.
        scores (`torch.FloatTensor` of shape `(U, B)`): Their log-probabilities, `-inf` where there is no more SID.
    """

    codes: torch.LongTensor
    nodes: torch.LongTensor
    scores: torch.FloatTensor


def is_static(model) -> bool:
    """Whether a model is read and searched by the functions of this module: a Deco whose concepts are all that the
    search needs, with a backbone and a decoder of Qwen2's kind."""
    return (
        getattr(model.config, "decoder_input", None) == "last_state"
        and model.pointer is None
        and model.reranker is None
        and FlatTransformer.supports(model.backbone)
        and FlatTransformer.supports(model.decoder.transformer)
    )


@torch.no_grad()
def read_concepts(model, item_codes: torch.LongTensor, lengths: torch.LongTensor) -> torch.Tensor:
    """Concepts `(U, M, w)` of histories `(U, T, K)` that are padded on the right, `lengths` `(U,)` of which exist."""
    per_item = model.config.tokens_per_item
    tokens = model._tokens(item_codes).flatten(0, 1)
    layout = Layout.grid(lengths * per_item, item_codes.shape[1] * per_item)
    read = FlatTransformer(model.backbone, model.kernels).read_sequences(tokens, layout, last_only=True)
    return model.concept_head(read.last_states(model.start_state))


@torch.no_grad()
def search_concepts(model, concepts: torch.Tensor, num_beams: list[int], trie: SIDTrie) -> FixedBeams:
    """The most likely SIDs of users in a catalog, from their concepts `(U, M, w)`."""
    scorer = DecoderScorer(model.decoder, DecoderContext(concepts.to(model.dtype)), model.kernels)
    return static_search(scorer, trie, num_beams, model.config.normalize_over)


def static_search(scorer: SIDScorer, trie: SIDTrie, num_beams: list[int], normalize_over: str) -> FixedBeams:
    """The most likely SIDs of the users of a scorer.

    Args:
        scorer (`SIDScorer`): Scores next codes, for `U` users.
        trie ([`SIDTrie`]): The catalog.
        num_beams (`list[int]`): Beam width of every level.
        normalize_over (`str`): `"children"` or `"vocabulary"`.
    """
    states = scorer.start()
    num_users = states.hidden.shape[0]
    nodes = torch.zeros((num_users, 1), dtype=torch.long, device=states.hidden.device)
    beams = FixedBeams(nodes.unsqueeze(2)[..., :0], nodes, torch.zeros_like(nodes, dtype=torch.float32))
    for level in range(trie.num_codebooks):
        found = padded_children(states.hidden, scorer.head(level), trie, level, beams.nodes.flatten(), normalize_over)
        children, codes, log_probs = found  # each (U * B, W)
        scores = beams.scores.view(-1, 1) + log_probs
        places, alive = top_cells(scores.view(num_users, -1), num_beams[level])
        parents = places // children.shape[1]  # in 0 .. U * B - 1, which are the rows of the states
        codes = torch.cat([beams.codes.flatten(0, 1)[parents], codes.flatten()[places].unsqueeze(2)], 2)
        beams = FixedBeams(codes, children.flatten()[places], scores.flatten()[places].masked_fill(~alive, -torch.inf))
        if level < trie.num_codebooks - 1:
            states = scorer.advance(states, parents.flatten(), codes[..., -1].flatten(), level)
    return beams


def padded_children(
    states: torch.Tensor,
    weight: torch.Tensor,
    trie: SIDTrie,
    level: int,
    nodes: torch.LongTensor,
    normalize_over: str,
) -> tuple[torch.LongTensor, torch.LongTensor, torch.Tensor]:
    """Children of prefixes, as many as the node with most of them has; where a node has fewer, the others are at
    `-inf`.

    Args:
        states (`torch.Tensor` of shape `(R, w)`): State of every prefix.
        weight (`torch.Tensor` of shape `(V, w)`): Output class vectors of the level.
        trie ([`SIDTrie`]): The catalog.
        level (`int`): Level of the prefixes.
        nodes (`torch.LongTensor` of shape `(R,)`): Their nodes.
        normalize_over (`str`): `"children"` or `"vocabulary"`.

    Returns:
        Three tensors of shape `(R, W)`: nodes in level `level + 1`, codes, log-probabilities in float32.
    """
    offsets, width = trie.child_offsets[level], trie.most_children(level)
    children = offsets[nodes].unsqueeze(1) + torch.arange(width, device=nodes.device)
    missing = children >= offsets[nodes + 1].unsqueeze(1)
    children = children.masked_fill(missing, 0)
    codes = trie.child_codes[level][children].long()
    logits = F.linear(states, weight).float()
    if normalize_over == "vocabulary":
        return children, codes, logits.log_softmax(-1).gather(1, codes).masked_fill(missing, -torch.inf)
    return children, codes, logits.gather(1, codes).masked_fill(missing, -torch.inf).log_softmax(-1)
