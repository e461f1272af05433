"""Reranking with a vector for every user and SID, as GEAR's head gives them."""

import numpy as np
import pytest

from hf_deco.items.index import ItemIndex
from hf_deco.items.packing import PRECISIONS


@pytest.fixture
def make():
    def make(precision):
        random = np.random.default_rng(0)
        codes, embeddings = random.integers(0, 3, (40, 2)), random.standard_normal((40, 5)).astype(np.float32)
        names = {"tokenizer_version": "t", "model_id": "m", "precision": precision}
        return ItemIndex.build([f"i{row}" for row in range(40)], codes, embeddings, (3, 3), **names)

    return make


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_item_meets_the_vector_of_its_sid(make, precision):
    index, random = make(precision), np.random.default_rng(1)
    users = random.standard_normal((3, 4, 5)).astype(np.float32)
    sids = np.stack([random.permutation(index.num_sids)[:4] for _ in range(3)])
    sids[1, 2] = -1
    found = index.rerank(users, sids, per_sid_limit=2, k=6)
    for user in range(3):
        scored = []
        for place, sid in enumerate(sids[user]):
            rows = [] if sid < 0 else range(index.offsets[sid], index.offsets[sid + 1])
            scores = index.embeddings.reference_scores(users[user, place])
            scored += sorted((-scores[row], place, row) for row in rows)[:2]
        wanted = sorted(scored)[:6]
        assert found.rows[user].tolist()[: len(wanted)] == [row for _, _, row in wanted]
        assert found.sids[user].tolist()[: len(wanted)] == [place for _, place, _ in wanted]
        assert found.scores[user, : len(wanted)] == pytest.approx([-score for score, _, _ in wanted], rel=1e-5)


def test_the_same_vector_for_all_sids_is_a_vector_of_the_user(make):
    index = make("int8")
    users, sids = np.random.default_rng(2).standard_normal((2, 5)), np.array([[0, 3, 5], [1, 2, 4]])
    by_user, by_sid = index.rerank(users, sids), index.rerank(np.repeat(users[:, None], 3, axis=1), sids)
    assert np.array_equal(by_user.rows, by_sid.rows) and np.array_equal(by_user.scores, by_sid.scores)


def test_vectors_that_do_not_fit_the_sids_are_refused(make):
    index = make("int8")
    with pytest.raises(ValueError, match=r"`sids` must be positions \(B, S\)"):
        index.rerank(np.ones((2, 3, 5)), np.zeros((2, 4), dtype=int))
    with pytest.raises(ValueError, match="width 5"):
        index.rerank(np.ones((2, 4, 6)), np.zeros((2, 4), dtype=int))
    with pytest.raises(ValueError, match="NaN or infinite"):
        index.rerank(np.full((2, 4, 5), np.nan), np.zeros((2, 4), dtype=int))


@pytest.mark.parametrize("denied", [None, [[2, 30], [], [11, 12, 13]]])
def test_with_log_probs_scores_are_log_probabilities_of_items(make, denied):
    index, random = make("fp16"), np.random.default_rng(3)
    users = random.standard_normal((3, 4, 5)).astype(np.float32)
    sids = np.stack([random.permutation(index.num_sids)[:4] for _ in range(3)])
    sids[1, 2], sids[2, 3] = -1, sids[2, 0]  # no SID, and one that stood before
    log_probs = np.log(random.dirichlet(np.ones(6), 3)[:, :4])
    found = index.rerank(users, sids, per_sid_limit=3, k=8, deny_rows=denied, log_probs=log_probs)
    for user in range(3):
        scored = []
        for place, sid in enumerate(sids[user]):
            if sid < 0 or sid in sids[user, :place]:
                continue
            rows = np.arange(index.offsets[sid], index.offsets[sid + 1])
            products = index.embeddings.reference_scores(users[user, place])[rows].astype(np.float64)
            shares = np.exp(products) / np.exp(products).sum()
            probabilities = np.exp(log_probs[user, place]) * shares
            kept = [
                pair for pair in zip(-probabilities, rows, strict=True) if not denied or pair[1] not in denied[user]
            ]
            scored += sorted(kept)[:3]
        wanted = sorted(scored)[:8]
        assert found.rows[user].tolist()[: len(wanted)] == [row for _, row in wanted]
        assert np.exp(found.scores[user, : len(wanted)]) == pytest.approx([-p for p, _ in wanted], rel=1e-4)
    assert not np.array_equal(found.rows, index.rerank(users, sids, per_sid_limit=3, k=8, deny_rows=denied).rows)


def test_log_probs_choose_among_sids_however_long_their_vectors_are(make):
    index = make("fp16")
    users = np.ones((1, 2, 5)) * np.array([1.0, 100.0])[:, None]
    found = index.rerank(users, [[4, 7]], k=50, log_probs=[[-0.1, -60.0]])
    first = (found.sids[0] == 0).sum()
    assert found.sids[0, :first].tolist() == [0] * first and 0 < first < (found.sids[0] >= 0).sum()


@pytest.mark.parametrize("limit", [None, 2])
def test_a_sid_that_is_impossible_gives_no_items(make, limit):
    index, users = make("int8"), np.random.default_rng(4).standard_normal((2, 3, 5))
    log_probs = np.array([[-0.5, -np.inf, -1.0], [-np.inf, -np.inf, -np.inf]])
    found = index.rerank(users, [[0, 1, 2]] * 2, limit, k=40, log_probs=log_probs)
    without = index.rerank(users, [[0, -1, 2], [-1, -1, -1]], limit, k=40, log_probs=log_probs)
    for name in ("rows", "scores", "sids"):
        assert np.array_equal(getattr(found, name), getattr(without, name))
    assert np.array_equal(found.rows == -1, found.scores == -np.inf)
    assert set(found.sids[0]) == {0, 2, -1} and set(found.rows[1]) == {-1}


def test_log_probs_that_are_none_are_refused(make):
    users, sids = np.ones((1, 3, 5)), [[0, 1, 2]]
    with pytest.raises(
        ValueError, match=r"`log_probs` must have a value for every candidate SID, \(1, 3\), got \(1, 2\)"
    ):
        make("int8").rerank(users, sids, log_probs=[[-1.0, -2.0]])
    for wrong in (0.5, np.nan):
        with pytest.raises(ValueError, match="`log_probs` must be logarithms of probabilities"):
            make("int8").rerank(users, sids, log_probs=[[-1.0, wrong, -2.0]])
    assert len(make("int8").rerank(users, sids, log_probs=[[-1.0, -np.inf, -2.0]]).rows) == 1
