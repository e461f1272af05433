import numpy as np
import pytest

from hf_deco.items import EmbeddingDrift


@pytest.fixture(scope="module", params=[6, 5])
def embeddings(request):
    return np.random.default_rng(0).standard_normal((150, request.param)).astype(np.float32)


def pairwise(points):
    return np.linalg.norm(points[:, None] - points[None], axis=2)


@pytest.mark.parametrize("kind", ["rotation", "new_topics", "shifted_mean"])
def test_time_0_is_as_given_and_the_seed_decides(embeddings, kind):
    drift, same, other = (EmbeddingDrift(embeddings, kind, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_allclose(drift.at(0), embeddings, atol=1e-6)
    np.testing.assert_array_equal(drift.at(0.7), same.at(0.7))
    np.testing.assert_array_equal(drift.at(0.7, np.array([4, 2])), drift.at(0.7)[[4, 2]])
    np.testing.assert_array_equal(drift.present(0), same.present(0))
    assert kind == "new_topics" or not np.allclose(drift.at(1), other.at(1))
    assert kind != "new_topics" or not np.array_equal(drift.present(0), other.present(0))
    for (rows, batch), (same_rows, same_batch) in zip(drift.batches(3, 8), same.batches(3, 8), strict=True):
        np.testing.assert_array_equal(rows, same_rows)
        np.testing.assert_array_equal(batch, same_batch)


def test_rotation_turns_every_pair_of_coordinates_by_the_angle(embeddings):
    drift = EmbeddingDrift(embeddings, "rotation", strength=2.0, seed=3)
    turned = drift.at(0.5).astype(np.float64)
    np.testing.assert_allclose(pairwise(turned), pairwise(embeddings), atol=1e-5)
    # The map is linear: recover it, and look at its eigenvalues, exp(+-i) for every plane.
    matrix = np.linalg.lstsq(embeddings.astype(np.float64), turned, rcond=None)[0]
    angles = np.sort(np.abs(np.angle(np.linalg.eigvals(matrix))))
    width = embeddings.shape[1]
    np.testing.assert_allclose(angles, [0.0] * (width % 2) + [1.0] * (width - width % 2), atol=1e-5)


def test_shifted_mean_moves_all_items_by_a_multiple_of_their_spread(embeddings):
    drift = EmbeddingDrift(embeddings, "shifted_mean", strength=3.0)
    moved = drift.at(1) - embeddings
    np.testing.assert_allclose(moved, np.broadcast_to(moved[0], moved.shape), atol=1e-5)
    spread = np.sqrt(np.square(embeddings - embeddings.mean(axis=0)).sum(axis=1).mean())
    assert np.linalg.norm(moved[0]) == pytest.approx(3 * spread, rel=1e-4)
    np.testing.assert_allclose(drift.at(0.25) - embeddings, moved / 4, atol=1e-5)


def test_new_topics_appear_one_after_the_other(embeddings):
    drift = EmbeddingDrift(embeddings, "new_topics", strength=0.5)
    times = np.arange(0, 12) / 11  # ten of twenty topics are late, at times 1/11 .. 10/11
    counts = [int(drift.present(time + 1e-9).sum()) for time in times]
    assert 0 < counts[0] < 150 and counts[-2] == counts[-1] == 150
    assert all(before < after for before, after in zip(counts[:10], counts[1:11], strict=True))
    np.testing.assert_array_equal(drift.at(0.3), embeddings)


def test_batches_hold_items_of_their_time(embeddings):
    drift = EmbeddingDrift(embeddings, "new_topics", seed=5)
    batches = list(drift.batches(4, 40))
    for step, (rows, batch) in enumerate(batches, 1):
        assert len(set(rows.tolist())) == len(rows) == 40
        assert drift.present(step / 4)[rows].all()
        np.testing.assert_array_equal(batch, embeddings[rows])
    [(rows, batch)] = EmbeddingDrift(embeddings, "shifted_mean").batches(1, 999)
    assert sorted(rows.tolist()) == list(range(150))
    np.testing.assert_allclose(batch, EmbeddingDrift(embeddings, "shifted_mean").at(1)[rows])


def test_nothing_may_happen(embeddings):
    drift = EmbeddingDrift(embeddings, "none")
    np.testing.assert_array_equal(drift.at(1), embeddings)
    assert drift.present(0).all()
    (first, batch), (second, _) = drift.batches(2, 10)
    np.testing.assert_array_equal(batch, embeddings[first])
    assert set(first.tolist()) != set(second.tolist())


def test_bad_input(embeddings):
    with pytest.raises(ValueError, match="`kind` must be one of none, rotation, new_topics, shifted_mean, got 'noise'"):
        EmbeddingDrift(embeddings, "noise")
    with pytest.raises(ValueError, match="no variance"):
        EmbeddingDrift(np.ones((4, 2)), "rotation")
