"""The best of what every user has. Entries lie flat, by user; users may have different numbers of them."""

import torch

_PLACES = (1 << 32) - 1  # the low half of a key: where its score lies
_LOWEST = (1 - 0x7F800000) << 32  # keys of scores above -inf are at least this


def ranks(users: torch.LongTensor, num_users: int) -> torch.LongTensor:
    """Place of every entry among those of its user; `users` `(C,)` ascend."""
    counts = torch.bincount(users, minlength=num_users)
    return torch.arange(users.shape[0], device=users.device) - (torch.cumsum(counts, 0) - counts)[users]


def pad_per_user(values: torch.Tensor, users: torch.LongTensor, num_users: int, filler: float) -> torch.Tensor:
    """Values `(C,)` of ascending `users` as `(num_users, width)`, the filler behind them."""
    counts = torch.bincount(users, minlength=num_users)
    shift = torch.cumsum(counts, 0) - counts
    width = int(counts.max())
    slots = users * width + torch.arange(users.shape[0], device=users.device) - shift[users]
    return values.new_full((num_users * width,), filler).index_copy_(0, slots, values).view(num_users, width)


def top_per_user(scores: torch.Tensor, users: torch.LongTensor, num_users: int, number: int) -> torch.LongTensor:
    """Positions of the best scores of every user.

    Args:
        scores (`torch.FloatTensor` of shape `(C,)`): Scores; those that are `-inf` or NaN are never chosen.
        users (`torch.LongTensor` of shape `(C,)`): Ascending user of every score.
        num_users (`int`): Number of users.
        number (`int`): Scores kept per user.

    Returns:
        `torch.LongTensor`: positions, grouped by user, best first; of equal scores the first comes first.
    """
    keys = pad_per_user(_keys(scores), users, num_users, torch.iinfo(torch.long).min)
    best = keys.topk(min(number, keys.shape[1]), dim=1).values
    return _PLACES - (best[best >= _LOWEST] & _PLACES)


def top_cells(scores: torch.FloatTensor, number: int) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """Positions of the best scores of every row, where all have as many; nothing here waits for a device.

    Args:
        scores (`torch.FloatTensor` of shape `(U, C)`): Scores.
        number (`int`): Scores kept per row, `n` or all `C`.

    Returns:
        Two tensors of shape `(U, min(n, C))`: position in the flattened scores, best first and of equal scores the
        first, and whether the score is one that `top_per_user` would choose.
    """
    best = _keys(scores.flatten()).view_as(scores).topk(min(number, scores.shape[1]), dim=1).values
    return _PLACES - (best & _PLACES), best >= _LOWEST


def _keys(scores: torch.FloatTensor) -> torch.LongTensor:
    """Integers, all different, in the order of scores `(C,)`, the earlier of two equal ones higher; NaN is as `-inf`.

    The bits of a float32 are a sign and a magnitude: read as an integer, they order as the numbers do, once those with
    a sign are turned around.
    """
    bits = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).view(torch.int32)
    ordered = torch.where(bits < 0, -(2**31) - bits, bits)
    places = torch.arange(_PLACES, _PLACES - scores.shape[0], -1, device=scores.device)
    return torch.add(places, ordered, alpha=1 << 32)
