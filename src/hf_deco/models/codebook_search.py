"""Nearest codes, the same whatever the batch, and the k-means that codebooks start from."""

import torch

# Distances computed at once, so that they stay in cache whatever the number of rows; an accelerator takes more.
CHUNK_DISTANCES = 2**20
ACCELERATOR_FACTOR = 64
# Differences computed at once where codes are too close to call.
CHUNK_DIFFERENCES = 2**20
KMEANS_ITERATIONS = 16
# k-means learns nothing from more points.
MAX_POINTS_PER_CODE = 32


def squared_distances(
    x: torch.Tensor, codebook: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Squared distances of `x` to a codebook, up to the constant `|x - bias|^2` of each row.

    With `scale` and `bias`, every row has a codebook of its own, `scale * codebook + bias`. Two products do, and
    nothing of shape `(B, V, d)` is made (Eq. 6, 16): `(scale^2) (C^2)^T - 2 ((x - bias) * scale) C^T`.

    Args:
        x (`torch.Tensor` of shape `(B, d)`): float32 or float64, as all others.
        codebook (`torch.Tensor` of shape `(V, d)`): The codes `C`.
        scale (`torch.Tensor` of shape `(B, d)`, *optional*): Composite scale of every row.
        bias (`torch.Tensor` of shape `(B, d)`, *optional*): Composite bias of every row; given with `scale`.

    Returns:
        `torch.Tensor` of shape `(B, V)`.
    """
    squares = codebook.square()
    if scale is None:
        return torch.addmm(squares.sum(1), x, codebook.T, alpha=-2)
    return (scale.square() @ squares.T).addmm_((x - bias) * scale, codebook.T, alpha=-2)


@torch.no_grad()
def nearest_codes(
    x: torch.Tensor, codebook: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.LongTensor:
    """Nearest code of every row, the lowest of equals; arguments as for [`squared_distances`].

    The rounding of a matrix product depends on its shape. Where it could decide between two codes, their distances are
    computed anew in float64, row by row. A row therefore has the same code in every batch. This holds for products in
    float32; leave TF32 off (`torch.set_float32_matmul_precision("highest")`, the default).

    Returns:
        `torch.LongTensor` of shape `(B,)`.

    Raises:
        ValueError: If a distance is NaN or infinite.
    """
    rows = max(1, chunk_size(CHUNK_DISTANCES, x.device) // len(codebook))
    codes = [x.new_empty(0, dtype=torch.long)]
    for start in range(0, len(x), rows):
        here = slice(start, start + rows)
        prefix = (None, None) if scale is None else (scale[here], bias[here])
        codes.append(_nearest_of_chunk(x[here], codebook, *prefix))
    return torch.cat(codes)


def chunk_size(size: int, device: torch.device) -> int:
    """A size that suits a processor's cache, or what an accelerator needs to be busy."""
    return size if device.type == "cpu" else ACCELERATOR_FACTOR * size


def _nearest_of_chunk(x, codebook, scale, bias) -> torch.LongTensor:
    distances = squared_distances(x, codebook, scale, bias)
    best, codes = distances.min(1)
    if not best.isfinite().all():
        raise ValueError(
            "distances to the codebook are not finite: the codebook holds NaN, as after a training that diverged, or "
            "values are too large to be squared. Lower the learning rate, or scale the embeddings."
        )
    second = distances.scatter_(1, codes[:, None], torch.inf).amin(1)
    slack = _rounding_error(x, codebook, scale, bias)
    close = (second <= best + slack).nonzero()[:, 0]
    if len(close):
        candidates = distances[close] <= (best + slack)[close, None]
        candidates.scatter_(1, codes[close, None], True)
        prefix = (None, None) if scale is None else (scale[close], bias[close])
        codes[close] = _nearest_candidate(x[close], codebook, *prefix, candidates)
    return codes


def _rounding_error(x, codebook, scale, bias) -> torch.Tensor:
    """By how much two computed distances of a row may differ although the exact ones are equal; `(B,)`."""
    squares = codebook.square()
    if scale is None:
        longest = squares.sum(1).amax()
    else:
        x, longest = x - bias, scale.square() @ squares.amax(0)
    # A product of width d is off by at most d/2 eps times the product of the norms.
    return (x.shape[1] + 2) * torch.finfo(x.dtype).eps * (longest + 2 * x.norm(dim=1) * longest.sqrt())


def _nearest_candidate(x, codebook, scale, bias, candidates: torch.BoolTensor) -> torch.LongTensor:
    """The nearest of the candidates `(B, V)` of every row, by explicit differences in float64."""
    row, code = candidates.nonzero(as_tuple=True)
    exact = []
    for pairs in torch.arange(len(row), device=row.device).split(max(1, CHUNK_DIFFERENCES // x.shape[1])):
        point, centre = to_float64(x[row[pairs]]), to_float64(codebook[code[pairs]])
        if scale is not None:
            centre = centre * to_float64(scale[row[pairs]]) + to_float64(bias[row[pairs]])
        exact.append((point - centre).square().sum(1))
    exact = torch.cat(exact)
    row, code = row.to(exact.device), code.to(exact.device)
    least = exact.new_full((len(x),), torch.inf).scatter_reduce_(0, row, exact, "amin")
    codes = torch.where(exact == least[row], code, len(codebook))
    return row.new_full((len(x),), len(codebook)).scatter_reduce_(0, row, codes, "amin").to(x.device)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64; on the processor where its device has no such numbers."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


@torch.no_grad()
def kmeans(points: torch.Tensor, num_codes: int, generator: torch.Generator) -> torch.Tensor:
    """Centroids `(V, d)` of points `(S, d)` by Lloyd's iterations from random points; `S` is at least `V`.

    Centroids that lose all points move to the points that are farthest from theirs. The generator decides all.
    """
    order = torch.randperm(len(points), generator=generator).to(points.device)
    centroids = points[order[:num_codes]].clone()
    points = points[order[: num_codes * MAX_POINTS_PER_CODE]]
    for iteration in range(KMEANS_ITERATIONS):
        codes = nearest_codes(points, centroids)
        counts = torch.bincount(codes, minlength=num_codes)
        empty = (counts == 0).nonzero()[:, 0]
        exact = to_float64(points)
        sums = exact.new_zeros(centroids.shape).index_add_(0, codes.to(exact.device), exact)
        errors = (points - centroids[codes]).square().sum(1)
        means = (sums / counts.to(sums.device)[:, None]).to(points)
        centroids = torch.where(counts[:, None] > 0, means, centroids)
        if len(empty) and iteration < KMEANS_ITERATIONS - 1:
            farthest = errors.topk(len(empty)).indices
            centroids[empty] = points[farthest]
    return centroids
