import numpy as np
import pytest

from hf_deco.items import RQKMeans, rq_kmeans


@pytest.fixture(scope="module")
def embeddings():
    rng = np.random.default_rng(0)
    centers = 3 * rng.standard_normal((12, 6))
    return (centers[rng.integers(0, 12, 400)] + rng.standard_normal((400, 6))).astype(np.float32)


@pytest.fixture(scope="module")
def quantizer(embeddings):
    return RQKMeans((16, 8, 5), num_iterations=10).fit(embeddings)


def naive_codes(embeddings, codebooks):
    codes = np.zeros((len(embeddings), len(codebooks)), dtype=np.int32)
    for row, x in enumerate(embeddings.astype(np.float64)):
        for level, codebook in enumerate(codebooks):
            codes[row, level] = np.argmin([np.sum((x - centroid) ** 2) for centroid in codebook])
            x = x - codebook[codes[row, level]]
    return codes


@pytest.mark.parametrize("chunk_rows", [7, 8192])
def test_encode_takes_the_nearest_centroid_of_each_residual(embeddings, quantizer, monkeypatch, chunk_rows):
    monkeypatch.setattr(rq_kmeans, "CHUNK_ROWS", chunk_rows)
    codes = quantizer.encode(embeddings)
    assert codes.dtype == np.int32
    np.testing.assert_array_equal(codes, naive_codes(embeddings, quantizer.codebooks))


def test_decode_sums_the_centroids(quantizer):
    codes = np.array([[3, 0, 4], [15, 7, 0]])
    a, b, c = quantizer.codebooks
    np.testing.assert_allclose(quantizer.decode(codes), [a[3] + b[0] + c[4], a[15] + b[7] + c[0]], rtol=1e-6)


def test_codebooks_have_the_sizes_asked_for_and_each_level_lowers_the_error(embeddings, quantizer):
    assert [codebook.shape for codebook in quantizer.codebooks] == [(16, 6), (8, 6), (5, 6)]
    assert {codebook.dtype for codebook in quantizer.codebooks} == {np.dtype(np.float32)}
    codes, residual, errors = quantizer.encode(embeddings), embeddings, [np.square(embeddings).mean()]
    for level, codebook in enumerate(quantizer.codebooks):
        residual = residual - codebook[codes[:, level]]
        errors.append(np.square(residual).mean())
    # The clusters have unit variance, so one code a cluster leaves about 1, and later levels less.
    assert errors[0] > 5 and errors[1] < 1.1
    assert errors[1] > 1.1 * errors[2] > 1.2 * errors[3]


def test_fit_encode_equals_fit_then_encode_and_leaves_the_input_alone(embeddings, quantizer):
    given = embeddings.copy()
    other = RQKMeans((16, 8, 5), num_iterations=10)
    codes = other.fit_encode(given)
    np.testing.assert_array_equal(given, embeddings)
    np.testing.assert_array_equal(codes, quantizer.encode(embeddings))


def test_same_seed_same_codebooks_and_other_seed_others(embeddings, quantizer):
    again = RQKMeans((16, 8, 5), num_iterations=10).fit(embeddings)
    other = RQKMeans((16, 8, 5), num_iterations=10, seed=1).fit(embeddings)
    for ours, same, different in zip(quantizer.codebooks, again.codebooks, other.codebooks, strict=True):
        np.testing.assert_array_equal(ours, same)
        assert not np.array_equal(ours, different)


def test_unused_code_is_reseeded_from_the_point_with_the_largest_residual():
    points = np.array([[0], [0], [0], [1], [10]], dtype=np.float32)
    codebook, codes = rq_kmeans._reseed_unused(points, np.array([[0], [100]], dtype=np.float32))
    np.testing.assert_array_equal(codebook, np.array([[0.25], [10]], dtype=np.float32))
    np.testing.assert_array_equal(codes, [0, 0, 0, 0, 1])


@pytest.mark.parametrize("seed", [*range(20), 461, 2130])  # in the last two, settling would empty a code again
def test_reseeding_leaves_no_code_unused(seed):
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((rng.integers(6, 14), 1)).astype(np.float32)
    codebook = points[rng.integers(0, len(points), int(rng.integers(3, 6)))]
    codebook[0] = 100
    codebook, codes = rq_kmeans._reseed_unused(points, codebook)
    assert set(codes.tolist()) == set(range(len(codebook)))
    np.testing.assert_array_equal(codes, np.abs(points - codebook.T).argmin(axis=1))


def test_seeds_are_distinct_points_and_never_points_on_their_centroid():
    points = np.array([[9], [9], [9], [5], [0], [1]], dtype=np.float32)
    codebook, codes = np.array([[0], [1]], dtype=np.float32), np.array([0, 0, 0, 0, 0, 1])
    seeds = [rq_kmeans._farthest_points(points, codebook, codes, count, 1e-6).tolist() for count in (1, 2, 3)]
    assert seeds == [[[9.0]], [[9.0], [5.0]], [[9.0], [5.0]]]


@pytest.mark.parametrize("num_codes", [30, 60, 61])
def test_every_code_is_used_where_one_point_dominates(num_codes):
    rng = np.random.default_rng(3)
    distinct = rng.standard_normal((61, 4)).astype(np.float32)
    points = np.concatenate([np.repeat(distinct[:1], 3000, axis=0), distinct[1:]])
    codes = RQKMeans((num_codes,), num_iterations=5).fit_encode(points)
    assert set(codes[:, 0].tolist()) == set(range(num_codes))


def test_identical_items_leave_later_levels_nothing_but_no_nan():
    points = np.repeat(np.eye(4, 5, dtype=np.float32), 10, axis=0)
    quantizer = RQKMeans((4, 8))
    codes = quantizer.fit_encode(points)
    assert len(set(codes[:, 0].tolist())) == 4
    np.testing.assert_allclose(quantizer.decode(codes), points, atol=1e-6)
    assert all(np.isfinite(codebook).all() for codebook in quantizer.codebooks)


def test_a_later_level_may_have_more_codes_than_there_are_items(capfd):
    points = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    quantizer = RQKMeans((2, 16)).fit(points)
    assert [codebook.shape for codebook in quantizer.codebooks] == [(2, 3), (16, 3)]
    np.testing.assert_allclose(quantizer.decode(quantizer.encode(points)), points, atol=1e-5)
    assert capfd.readouterr() == ("", "")  # small catalogs are no reason for warnings


def test_verbose_reports_each_level(embeddings, capsys):
    RQKMeans((4, 2), num_iterations=1, verbose=True).fit(embeddings)
    output = capsys.readouterr().out
    assert "level 1: 4 codes, mean squared residual" in output and "level 2: 2 codes" in output


@pytest.mark.parametrize("sizes", [(), 4, (4, 0), (4, 2.5), (4, -1), None])
def test_bad_codebook_sizes(sizes):
    with pytest.raises(ValueError, match="`codebook_sizes` must be a sequence of positive integers"):
        RQKMeans(sizes)


@pytest.mark.parametrize(("argument", "value"), [("num_iterations", 0), ("max_points_per_centroid", 0), ("seed", -1)])
def test_bad_numbers(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` must .* got {value}"):
        RQKMeans((4,), **{argument: value})


def test_more_codes_than_distinct_items():
    points = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    with pytest.raises(ValueError, match=r"`codebook_sizes` \(4, 2\) asks for 4 codes .* 15 items .* only 3 distinct"):
        RQKMeans((4, 2)).fit(points)
    RQKMeans((3, 2)).fit(points)


def test_not_fitted(embeddings):
    with pytest.raises(ValueError, match="call `fit` first"):
        RQKMeans((4,)).encode(embeddings)
    with pytest.raises(ValueError, match="call `fit` first"):
        RQKMeans((4,)).decode([[0]])


def test_bad_input_to_encode_and_decode(embeddings, quantizer):
    with pytest.raises(ValueError, match="width 6 .* got 5"):
        quantizer.encode(embeddings[:, :5])
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantizer.encode(np.full((2, 6), np.nan))
    with pytest.raises(ValueError, match=r"`codes` has 1 rows outside .* first row 1: \[0, 8, 0\]"):
        quantizer.decode([[0, 7, 0], [0, 8, 0]])
    with pytest.raises(ValueError, match=r"`codes` must be integers of shape \(num_items, 3\)"):
        quantizer.decode([[0, 0]])
    with pytest.raises(ValueError, match="`codes` must be integers"):
        quantizer.decode([[0.0, 0.0, 0.0]])
