import numpy as np
import pytest

from hf_deco.items import Projection


@pytest.fixture(scope="module")
def embeddings():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((200, 7)) * [5, 1, 3, 0.5, 2, 4, 1] + 10).astype(np.float32)


def test_projection_is_the_singular_value_decomposition_of_the_centred_embeddings(embeddings):
    projection = Projection.fit(embeddings, 3)
    centred = embeddings.astype(np.float64) - embeddings.mean(axis=0, dtype=np.float64)
    _, values, directions = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign((directions[:3] * projection.components.T).sum(axis=1))
    np.testing.assert_allclose(projection.components.T, signs[:, None] * directions[:3], atol=1e-6)
    np.testing.assert_allclose(projection(embeddings), centred @ (signs[:, None] * directions[:3]).T, atol=1e-4)
    assert projection.explained_variance == pytest.approx((values[:3] ** 2).sum() / (values**2).sum())
    assert (projection.components[np.abs(projection.components).argmax(axis=0), np.arange(3)] > 0).all()


def test_all_directions_keep_all_distances(embeddings):
    projected = Projection.fit(embeddings, 7)(embeddings)
    np.testing.assert_allclose(
        np.linalg.norm(projected[:50] - projected[50:100], axis=1),
        np.linalg.norm(embeddings[:50] - embeddings[50:100], axis=1),
        rtol=1e-5,
    )


def test_an_item_is_projected_alike_alone_and_in_a_batch(embeddings):
    projection = Projection.fit(embeddings, 4)
    together = projection(embeddings)
    for row in range(0, 200, 13):
        np.testing.assert_array_equal(projection(embeddings[row : row + 1])[0], together[row])


@pytest.mark.parametrize("width", [0, 8, -1])
def test_bad_width(embeddings, width):
    with pytest.raises(ValueError, match=f"`width` must be between 1 and the embeddings' 7 columns, got {width}"):
        Projection.fit(embeddings, width)


def test_bad_embeddings(embeddings):
    with pytest.raises(ValueError, match="200 rows that are all the same: they have no variance"):
        Projection.fit(np.ones((200, 3)), 2)
    with pytest.raises(ValueError, match="NaN or infinite values in 1 of 200 rows, first in row 3"):
        Projection.fit(np.where(np.arange(200)[:, None] == 3, np.nan, embeddings), 2)
