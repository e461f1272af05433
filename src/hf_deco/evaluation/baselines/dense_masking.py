"""Beam search over a dense mask: what a search costs that scores every code of a level."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...models.trie import SIDTrie


def dense_beam_search(scorer, trie: SIDTrie, num_beams: int) -> tuple[torch.LongTensor, torch.Tensor]:
    """Beam search as it is done over a dense mask: every level scores, masks and sorts all codes of all beams.

    Args:
        scorer (`SIDScorer`): Scores next codes, for `U` users.
        trie ([`SIDTrie`]): The catalog; wide enough that no beam stays empty.
        num_beams (`int`): Beam width `B`.

    Returns:
        SIDs `(U, B, K)` and their log-probabilities `(U, B)`, best first.
    """
    states = scorer.start()
    num_users, device = states.hidden.shape[0], states.hidden.device
    nodes = torch.zeros((num_users, 1), dtype=torch.long, device=device)
    scores, paths = torch.zeros((num_users, 1), device=device), nodes.new_zeros((num_users, 1, 0))
    first = torch.arange(num_users, device=device).unsqueeze(1)
    for level, size in enumerate(trie.codebook_sizes):
        logits = F.linear(states.hidden, scorer.head(level)).float()  # (U * B, V)
        parents, _, codes = trie.expand(level, nodes.flatten())
        masked = torch.full_like(logits, -torch.inf)
        masked[parents, codes] = logits[parents, codes]
        extended = (masked.log_softmax(-1) + scores.flatten().unsqueeze(1)).view(num_users, -1)
        scores, best = extended.topk(min(num_beams, extended.shape[1]), dim=1)
        beams, codes = best // size, best % size
        paths = torch.cat([paths.gather(1, beams.unsqueeze(-1).expand(-1, -1, level)), codes.unsqueeze(-1)], -1)
        nodes = trie.child_nodes(level, nodes.gather(1, beams), codes).clamp(min=0)
        if level + 1 < trie.num_codebooks:
            rows = beams + first * (logits.shape[0] // num_users)
            states = scorer.advance(states, rows.flatten(), codes.flatten(), level)
    return paths, scores
