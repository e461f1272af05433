"""Newton-Schulz: a matrix made orthogonal by products alone, so that gradients pass through it."""

import torch

# Below this norm a matrix counts as zero (Eq. 4).
SMALLEST_NORM = 1e-6


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push the singular values of a matrix towards 1.

    First `W / max(|W|_F, 1e-6)` (Eq. 4), then in every step `W <- 1/2 W (3I - W^T W)` (Eq. 3).

    The division leaves an orthogonal matrix with singular values of `1/sqrt(d)`, and a step grows a small one by 1.5.
    So 5 steps, the paper's number, end at 0.60 for a width of 128, a scaled rotation; 12 steps reach 1. What is unequal
    stays so until the last steps: of any other matrix, 5 steps make no rotation, but a map that never stretches.

    Args:
        matrix (`torch.Tensor` of shape `(d, d)`): float32 or float64; half precision is cast to float32.
        steps (`int`, *optional*, defaults to 5): Newton-Schulz steps.

    Returns:
        `torch.Tensor` of shape `(d, d)`, float32 or float64.
    """
    with torch.autocast(matrix.device.type, enabled=False):
        matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        matrix = matrix / torch.linalg.matrix_norm(matrix).clamp(min=SMALLEST_NORM)
        for _ in range(steps):
            matrix = 1.5 * matrix - 0.5 * matrix @ (matrix.mT @ matrix)
    return matrix


def singular_value_after(width: int, steps: int) -> float:
    """The one singular value that `newton_schulz` leaves an orthogonal matrix of a width with."""
    value = width**-0.5
    for _ in range(steps):
        value = 0.5 * value * (3 - value**2)
    return value


def orthogonality_error(matrix: torch.Tensor) -> float:
    """`|W^T W - I|_F / sqrt(d)` of a matrix `(d, d)`, in float64: 0 for a rotation, 1 for zero."""
    matrix = matrix.detach().cpu().double()
    identity = torch.eye(matrix.shape[0], dtype=matrix.dtype)
    return float(torch.linalg.matrix_norm(matrix.mT @ matrix - identity) / matrix.shape[0] ** 0.5)
