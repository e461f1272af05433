"""Newton-Schulz, distances, nearest codes and k-means against what they should be by definition."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_deco.models import codebook_search
from hf_deco.models.codebook_search import kmeans, nearest_codes, squared_distances
from hf_deco.models.orthogonal_basis import newton_schulz, orthogonality_error, singular_value_after


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def naive_distances(x, codebook, scale=None, bias=None):
    """`(B, V)` in float64 by way of all codebooks, `(B, V, d)`."""
    codes = codebook.double()[None].expand(len(x), -1, -1)
    if scale is not None:
        codes = scale.double()[:, None] * codes + bias.double()[:, None]
    return (x.double()[:, None] - codes).square().sum(-1)


@pytest.mark.parametrize("width", [3, 8, 20])
def test_newton_schulz_converges_to_the_polar_factor(width):
    matrix = random(width, width, dtype=torch.float64) + 2 * torch.eye(width, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix)
    assert values[-1] > 1e-2  # else 40 steps would not be enough
    torch.testing.assert_close(newton_schulz(matrix, 40), left @ right, rtol=0, atol=1e-9)


def test_newton_schulz_follows_equations_3_and_4():
    matrix = random(6, 6, dtype=torch.float64)
    expected = matrix / matrix.square().sum().sqrt()
    for _ in range(5):
        expected = 0.5 * expected @ (3 * torch.eye(6, dtype=torch.float64) - expected.T @ expected)
    torch.testing.assert_close(newton_schulz(matrix), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(newton_schulz(matrix, 0), matrix / matrix.square().sum().sqrt(), rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(newton_schulz, matrix.requires_grad_())


@pytest.mark.parametrize(
    "width,value,error,steps_to_1e3,steps_to_1e6",
    [(8, 0.999, 1.5e-3, 6, 7), (64, 0.766, 0.41, 8, 9), (96, 0.669, 0.55, 9, 10), (128, 0.600, 0.64, 9, 10)],
)
@pytest.mark.parametrize("start", ["identity", "rotation"])
def test_five_steps_leave_a_scaled_rotation(width, value, error, steps_to_1e3, steps_to_1e6, start):
    matrix = torch.eye(width, dtype=torch.float64)
    if start == "rotation":
        matrix = torch.linalg.qr(random(width, width, dtype=torch.float64)).Q
    after = newton_schulz(matrix)
    values = torch.linalg.svdvals(after)
    torch.testing.assert_close(values, torch.full_like(values, value), rtol=0, atol=6e-4)
    assert singular_value_after(width, 5) == pytest.approx(values[0].item(), abs=1e-12)
    assert orthogonality_error(after) == pytest.approx(error, abs=6e-3 if width > 8 else 6e-5)
    errors = [orthogonality_error(newton_schulz(matrix, steps)) for steps in range(13)]
    assert min(step for step, value in enumerate(errors) if value < 1e-3) == steps_to_1e3
    assert min(step for step, value in enumerate(errors) if value < 1e-6) == steps_to_1e6


def test_five_steps_do_not_make_an_ordinary_matrix_orthogonal():
    generator = torch.Generator().manual_seed(0)
    matrix = (2 * torch.rand(128, 128, generator=generator, dtype=torch.float64) - 1) / 128**0.5  # as nn.Linear's
    values = torch.linalg.svdvals(newton_schulz(matrix))
    assert values[0] == pytest.approx(0.90, abs=0.01) and values[-1] < 0.05
    assert orthogonality_error(newton_schulz(matrix)) == pytest.approx(0.74, abs=0.01)
    assert orthogonality_error(newton_schulz(matrix, 40)) < 1e-6


def test_newton_schulz_never_runs_in_half_precision():
    matrix = random(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(newton_schulz(matrix), newton_schulz(matrix.clone()))
        inside = newton_schulz(matrix)
    assert torch.equal(inside, newton_schulz(matrix))
    assert torch.equal(newton_schulz(matrix.bfloat16()), newton_schulz(matrix.bfloat16().float()))


def test_newton_schulz_of_zero_stays_finite():
    matrix = torch.zeros(4, 4, requires_grad=True)
    newton_schulz(matrix).sum().backward()
    assert matrix.grad.isfinite().all()
    assert orthogonality_error(newton_schulz(matrix)) == 1


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-4), (torch.float64, 1e-11)])
@pytest.mark.parametrize("prefix", [False, True])
def test_fast_distances_equal_naive_ones(prefix, dtype, tolerance):
    x, codebook = random(50, 24, seed=1, dtype=dtype), random(30, 24, seed=2, dtype=dtype)
    affine = (random(50, 24, seed=3, dtype=dtype), random(50, 24, seed=4, dtype=dtype)) if prefix else ()
    constant = (x - affine[1] if prefix else x).square().sum(1, keepdim=True)
    fast = squared_distances(x, codebook, *affine) + constant
    torch.testing.assert_close(fast.double(), naive_distances(x, codebook, *affine), rtol=0, atol=tolerance)


@pytest.mark.parametrize("prefix", [False, True])
def test_nearest_codes_are_the_naive_ones(prefix):
    x, codebook = random(500, 24, seed=1), random(37, 24, seed=2)
    affine = (random(500, 24, seed=3), random(500, 24, seed=4)) if prefix else ()
    codes = nearest_codes(x, codebook, *affine)
    assert codes.dtype == torch.long
    assert torch.equal(codes, naive_distances(x, codebook, *affine).argmin(1))


def close_calls(num_items=400, width=32, num_codes=51):
    """Items half-way between two codes up to rounding, far from the origin: products in float32 cannot tell them."""
    codebook = random(num_codes, width, seed=5) + 10
    left, right = codebook[: num_codes // 2].repeat(num_items, 1), codebook[num_codes // 2 :][:25].repeat(num_items, 1)
    return ((left + right)[:num_items] / 2 + 1e-6 * random(num_items, width, seed=6)), codebook


@pytest.mark.parametrize("prefix", [False, True])
def test_close_calls_are_settled_in_float64(prefix):
    x, codebook = close_calls()
    affine = (torch.ones_like(x), torch.zeros_like(x)) if prefix else ()
    # The test means something only where plain float32 is wrong.
    assert not torch.equal(squared_distances(x, codebook).argmin(1), naive_distances(x, codebook).argmin(1))
    assert torch.equal(nearest_codes(x, codebook, *affine), naive_distances(x, codebook).argmin(1))


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_codes_do_not_depend_on_the_batch(batch_size):
    x, codebook = close_calls()
    alone = torch.cat([nearest_codes(part, codebook) for part in x.split(batch_size)])
    assert torch.equal(alone, nearest_codes(x, codebook))


@pytest.mark.parametrize("prefix", [False, True])
def test_chunks_change_nothing(prefix, monkeypatch):
    x, codebook = close_calls()
    affine = (random(*x.shape, seed=3), random(*x.shape, seed=4)) if prefix else ()
    whole = nearest_codes(x, codebook, *affine)
    monkeypatch.setattr(codebook_search, "CHUNK_DISTANCES", 51 * 9)
    monkeypatch.setattr(codebook_search, "CHUNK_DIFFERENCES", 32 * 3)
    assert torch.equal(nearest_codes(x, codebook, *affine), whole)


@pytest.mark.parametrize("num_codes", [2, 5, 33])
def test_ties_go_to_the_lowest_code(num_codes):
    x = random(20, 6)
    assert torch.equal(nearest_codes(x, random(1, 6).repeat(num_codes, 1)), torch.zeros(20, dtype=torch.long))
    codebook = torch.cat([random(num_codes, 6), random(num_codes, 6).flip(0)])  # every code twice
    assert nearest_codes(x, codebook).max() < num_codes


def test_no_item_means_no_code():
    assert torch.equal(nearest_codes(torch.empty(0, 4), random(3, 4)), torch.empty(0, dtype=torch.long))


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_tensor_of_all_codebooks_is_made():
    x, codebook, scale, bias = random(40, 16), random(64, 16), random(40, 16, seed=3), random(40, 16, seed=4)
    with LargestTensor() as largest:
        nearest_codes(x, codebook, scale, bias)
    assert largest.numel == 40 * 64


def test_codebooks_that_are_not_finite_are_refused():
    codebook = random(5, 4)
    codebook[3, 1] = torch.nan
    with pytest.raises(ValueError, match="the codebook holds NaN"):
        nearest_codes(random(6, 4), codebook)
    with pytest.raises(ValueError, match="too large to be squared"):
        nearest_codes(random(6, 4) * 1e25, random(5, 4) * 1e25)


def test_kmeans_finds_two_clusters_and_repeats_itself():
    centres = 10 * random(2, 5)
    points = (centres[:, None] + 0.01 * random(2, 30, 5, seed=1)).flatten(0, 1)
    centroids = kmeans(points, 2, torch.Generator().manual_seed(0))
    nearest = torch.cdist(points.reshape(2, 30, 5).mean(1), centroids).min(1)
    assert sorted(nearest.indices.tolist()) == [0, 1] and nearest.values.max() < 1e-4
    many = random(600, 4)
    centroids = kmeans(many, 12, torch.Generator().manual_seed(0))
    assert torch.equal(centroids, kmeans(many, 12, torch.Generator().manual_seed(0)))
    assert not torch.equal(centroids, kmeans(many, 12, torch.Generator().manual_seed(1)))


def test_kmeans_is_lloyds_algorithm(monkeypatch):
    points, generator = random(200, 4), torch.Generator().manual_seed(0)
    expected = points[torch.randperm(200, generator=generator)[:8]].double()
    for _ in range(5):
        codes = naive_distances(points, expected).argmin(1)
        assert len(codes.unique()) == 8  # no code is re-seeded here
        expected = torch.stack([points.double()[codes == code].mean(0) for code in range(8)])
    monkeypatch.setattr(codebook_search, "KMEANS_ITERATIONS", 5)
    centroids = kmeans(points, 8, torch.Generator().manual_seed(0))
    torch.testing.assert_close(centroids, expected.float(), rtol=0, atol=1e-5)


def test_as_many_points_as_codes_are_the_codes():
    points = random(9, 3)
    centroids = kmeans(points, 9, torch.Generator().manual_seed(0))
    assert torch.equal(torch.cdist(points, centroids).argmin(1).sort().values, torch.arange(9))
    torch.testing.assert_close(torch.cdist(points, centroids).amin(1), torch.zeros(9), rtol=0, atol=1e-3)


def test_kmeans_uses_every_code_though_most_points_are_copies():
    points = torch.cat([torch.zeros(200, 3), 5 + random(12, 3)])
    centroids = kmeans(points, 10, torch.Generator().manual_seed(0))
    assert len(naive_distances(points, centroids).argmin(1).unique()) == 10
