"""Children of prefixes at levels where a large share of all codes are children.

Listed one by one, such children cost far more than the model does. Here they are scored as rows over all codes, the
others at `-inf`, and only those that can be kept are ever listed. To find these, rows are cut into chunks: with `n` to
be kept, none lies outside the `n` chunks whose best children are best.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from .selection_sid import top_per_user
from .trie import SIDTrie

_SHARE = 0.05  # of the codes; with fewer children listing them is as fast
_MOST_PENALTIES = 2**25  # elements of a level's table
_BLOCK = 2**21  # log-probabilities computed at once, so that memory does not grow with the batch
_CHUNK = 64


def is_wide(trie: SIDTrie, level: int, nodes: torch.LongTensor) -> bool:
    """Whether the children of `nodes` `(R,)` are so many that [`best_children`] is the faster way to them."""
    size = trie.codebook_sizes[level]
    if trie.most_children(level) < _SHARE * size or trie.num_nodes(level) * size > _MOST_PENALTIES:
        return False
    return int(trie.num_children(level, nodes).sum()) >= _SHARE * size * nodes.shape[0]


def best_children(
    states: torch.Tensor,
    weight: torch.Tensor,
    trie: SIDTrie,
    level: int,
    nodes: torch.LongTensor,
    users: torch.LongTensor,
    log_probs: torch.Tensor,
    number: int,
    normalize_over: str,
) -> tuple[torch.LongTensor, torch.LongTensor, torch.Tensor] | None:
    """The children that are among the best `number` of their user.

    Args:
        states (`torch.Tensor` of shape `(R, w)`): State of every prefix.
        weight (`torch.Tensor` of shape `(V, w)`): Output class vectors of the level.
        trie ([`SIDTrie`]): The catalog.
        level (`int`): Level of the prefixes.
        nodes (`torch.LongTensor` of shape `(R,)`): Their nodes.
        users (`torch.LongTensor` of shape `(R,)`): Their users, ascending.
        log_probs (`torch.Tensor` of shape `(R,)`): Their log-probabilities, float32.
        number (`int`): Children kept per user.
        normalize_over (`str`): `"children"` or `"vocabulary"`.

    Returns:
        Three tensors of shape `(C,)`, in the order of prefixes and codes: row of the prefix, code, and log-probability
        of the extended prefix. None where a log-probability is NaN: all children then have to be looked at.
    """
    penalties, size, found = trie.child_penalties(level), weight.shape[0], []
    num_users = int(users[-1]) + 1
    users_per_block = max(1, _BLOCK * num_users // (size * users.shape[0]))
    first_users = torch.arange(0, num_users, users_per_block, device=users.device)
    bounds = [*torch.searchsorted(users, first_users).tolist(), users.shape[0]]
    for first, end in itertools.pairwise(bounds):
        if first == end:
            continue
        logits, rows = F.linear(states[first:end], weight), penalties.index_select(0, nodes[first:end])
        if normalize_over == "vocabulary":
            cells = logits.log_softmax(-1, dtype=torch.float32) + rows
        else:
            cells = (logits + rows).log_softmax(-1, dtype=torch.float32)
        best = _best_cells(cells, log_probs[first:end], users[first:end] - users[first], users_per_block, number)
        if best is None:
            return None
        found.append((best[0] + first, *best[1:]))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _best_cells(
    cells: torch.Tensor, log_probs: torch.Tensor, users: torch.LongTensor, num_users: int, number: int
) -> tuple[torch.LongTensor, torch.LongTensor, torch.Tensor] | None:
    """Row, column and value of the highest `number` cells of every user's rows of `cells` `(R, V)`, after `log_probs`
    `(R,)` are added; None where one is NaN."""
    width = math.gcd(cells.shape[1], _CHUNK)
    highest = cells.unflatten(1, (-1, width)).amax(-1)  # (R, V / width)
    if highest.isnan().any():
        return None
    scores, per_row = (highest + log_probs.unsqueeze(1)).flatten(), highest.shape[1]
    chunks = top_per_user(scores, users.repeat_interleave(per_row), num_users, number).sort().values
    rows = chunks // per_row
    scores = (cells.view(-1, width)[chunks] + log_probs[rows].unsqueeze(1)).flatten()
    best = top_per_user(scores, users[rows].repeat_interleave(width), num_users, number).sort().values
    chosen = best // width
    return rows[chosen], chunks[chosen] % per_row * width + best % width, scores[best]
