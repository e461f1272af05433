"""Losses of GEAR: LambdaLoss for towers and reranker, weighted cross-entropy for the generator."""

import math

import torch
import torch.nn.functional as F


def lambda_loss(
    scores: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.BoolTensor | None = None,
    sigma: float = 1.0,
    gain: str = "linear",
) -> torch.Tensor:
    """Pairwise logistic loss, each pair weighed by what swapping it would change in NDCG (Eq. 8, 11).

        sum over y_i > y_j of log(1 + exp(-sigma (s_i - s_j))) |Delta NDCG_ij|,
        |Delta NDCG_ij| = |G_i - G_j| |1 / log2(1 + r_i) - 1 / log2(1 + r_j)| / max DCG

    `r` are the ranks of the scores, equal ones in the order of their places; they and the weights have no gradient.
    *Choice*: the mean over lists that have a pair. A list without one, because its labels are all equal, is 0.

    Args:
        scores (`torch.Tensor` of shape `(B, C)`): Scores of the items of every list.
        labels (`torch.Tensor` of shape `(B, C)`): Their labels, of any scale.
        mask (`torch.BoolTensor` of shape `(B, C)`, *optional*): Items that exist; all by default.
        sigma (`float`, *optional*, defaults to 1.0): Factor of score differences.
        gain (`str`, *optional*, defaults to `"linear"`): Gain `G` of a label: `"linear"` for `y`, `"exp2"` for
            `2^y - 1`.

    Returns:
        `torch.Tensor`: scalar, float32 (float64 for such scores).

    Raises:
        ValueError: If shapes differ, or a label of an item that exists is negative, NaN or infinite.
    """
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    if not scores.shape == labels.shape == mask.shape or scores.dim() != 2:
        raise ValueError(
            "`scores`, `labels` and `mask` must have the same shape (lists, items), got "
            f"{tuple(scores.shape)}, {tuple(labels.shape)} and {tuple(mask.shape)}."
        )
    check_non_negative("labels", labels, mask)
    with torch.autocast(scores.device.type, enabled=False):
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~mask, 0)
        ordered = (labels.unsqueeze(2) > labels.unsqueeze(1)) & mask.unsqueeze(2) & mask.unsqueeze(1)
        weights = _swap_weights(scores.detach(), labels, mask, gain) * ordered
        differences = scores.unsqueeze(2) - scores.unsqueeze(1)
        losses = (F.softplus(-sigma * differences) * weights).sum((1, 2))
        return losses.sum() / ordered.any(2).any(1).sum().clamp(min=1)


def _swap_weights(scores: torch.Tensor, labels: torch.Tensor, mask: torch.BoolTensor, gain: str) -> torch.Tensor:
    """`|Delta NDCG|` of every pair, `(B, C, C)`."""
    labels = labels.to(torch.promote_types(labels.dtype, torch.float32)).masked_fill(~mask, 0)
    gains = _relative_gains(labels, gain).to(scores.dtype)
    places = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    discounts = 1 / torch.log2(1 + places.to(scores.dtype))
    order = scores.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    own = torch.zeros_like(scores).scatter_(1, order, discounts.expand_as(scores))
    best = (gains.sort(1, descending=True).values * discounts).sum(1)
    best = torch.where(best > 0, best, 1)[:, None, None]
    return (gains.unsqueeze(2) - gains.unsqueeze(1)).abs() * (own.unsqueeze(2) - own.unsqueeze(1)).abs() / best


def _relative_gains(labels: torch.Tensor, gain: str) -> torch.Tensor:
    """Gains `(B, C)` up to a factor of each list, which NDCG does not see: so that no label overflows."""
    if gain not in ("linear", "exp2"):
        raise ValueError(f"`gain` must be 'linear' or 'exp2', got {gain!r}.")
    if not labels.shape[1]:
        return labels
    highest = labels.amax(1, keepdim=True)
    if gain == "linear":
        return labels / torch.where(highest > 0, highest, 1)
    return torch.exp2(labels - highest) * -torch.expm1(-labels * math.log(2))  # (2^y - 1) / 2^highest


def generator_weights(weights: torch.Tensor | None, impressed: torch.BoolTensor) -> torch.Tensor:
    """What samples weigh in the generator's loss: `log(1 + weight)` where impressed, 0 elsewhere (Eq. 10).

    Args:
        weights (`torch.Tensor` of shape `(...)`, *optional*): Business value of every sample. Without it, impressed
            samples weigh 1.
        impressed (`torch.BoolTensor` of shape `(...)`): Samples that were shown.

    Returns:
        `torch.Tensor` of shape `(...)`, float32.

    Raises:
        ValueError: If shapes differ, or the value of an impressed sample is negative, NaN or infinite.
    """
    impressed = impressed.bool()
    if weights is None:
        return impressed.float()
    if weights.shape != impressed.shape:
        raise ValueError(
            f"`weights` must have the shape of `impressed`, {tuple(impressed.shape)}, got {tuple(weights.shape)}."
        )
    check_non_negative("weights", weights, impressed)
    return torch.log1p(weights.float().masked_fill(~impressed, 0))


def generator_loss(logits: list[torch.Tensor], codes: torch.LongTensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the codes of every sample, summed over levels, times the sample's weight (Eq. 10).

    *Choice*: the mean over samples, so that a batch of more valuable samples counts for more.

    Args:
        logits (`list` of `K` `torch.Tensor` of shape `(R, V_k)`): Scores of the codes of every level, given the codes
            before.
        codes (`torch.LongTensor` of shape `(R, K)`): SIDs.
        weights (`torch.Tensor` of shape `(R,)`): As of [`generator_weights`].

    Returns:
        `torch.Tensor`: scalar, float32; 0 where there are no samples.
    """
    losses = [F.cross_entropy(level.float(), codes[:, k], reduction="none") for k, level in enumerate(logits)]
    return (torch.stack(losses).sum(0) * weights).sum() / max(1, len(codes))


def check_non_negative(name: str, values: torch.Tensor, mask: torch.BoolTensor) -> None:
    """Raise a `ValueError` unless all values under the mask are finite and at least 0."""
    bad = mask & ~(torch.isfinite(values) & (values >= 0))
    if bad.any():
        raise ValueError(
            f"`{name}` must be finite and not negative, got {values[bad][0].item()} at {bad.nonzero()[0].tolist()} and "
            f"{int(bad.sum()) - 1} more such values."
        )
