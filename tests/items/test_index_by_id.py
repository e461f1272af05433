"""Rows of an index by item id, and items that a user may not be given: in the reranking, and in a search before it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_deco.items.index import ItemIndex
from hf_deco.items.packing import PRECISIONS
from hf_deco.models.filters_sid import ItemFilter
from hf_deco.models.trie import SIDTrie

SIZES = (3, 3)


def make(precision="int8", number=40, seed=0):
    random = np.random.default_rng(seed)
    codes, vectors = random.integers(0, 3, (number, 2)), random.standard_normal((number, 5)).astype(np.float32)
    names = {"tokenizer_version": "t", "model_id": "m", "precision": precision}
    return ItemIndex.build([f"i{row}" for row in random.permutation(number)], codes, vectors, SIZES, **names)


@pytest.fixture(scope="module", params=PRECISIONS)
def index(request):
    return make(request.param)


def test_rows_and_ids_are_each_others_inverse(index):
    every = [f"i{number}" for number in range(40)]
    rows = index.rows_of([every, ["i3", "none", "i3"], []])
    assert index.ids(rows[:1]) == [every] and sorted(rows[0]) == list(range(40))
    assert rows[1:] == [[rows[0][3], -1, rows[0][3]], []] and index.rows_of([]) == []
    numbered = ItemIndex.build([7, 5], [[0, 1], [0, 0]], np.ones((2, 3)), SIZES, tokenizer_version="t", model_id="m")
    assert numbered.rows_of([[7, "5"], (np.int64(5),)]) == [[1, 0], [0]]
    for wrong in ("i3", ["i3"]):
        with pytest.raises(ValueError, match="`item_ids` must hold one list of item ids per user, got a string"):
            index.rows_of(wrong)


def test_item_codes_are_the_sids_of_rows(index):
    codes = index.item_codes()
    first, last = index.find_codes(codes)
    assert codes.shape == (40, 2) and all(first[row] <= row < last[row] for row in range(40))


def test_rows_of_the_index_are_rows_of_a_catalog_in_its_order(index):
    """What `model.set_catalog(index.item_codes())` makes: the items of a SID in the trie are those of the index."""
    trie = SIDTrie(torch.from_numpy(index.item_codes()), SIZES)
    for leaf in range(trie.num_leaves):
        start, end = trie.item_offsets[leaf : leaf + 2].tolist()
        assert trie.item_rows[start:end].tolist() == list(range(index.offsets[leaf], index.offsets[leaf + 1]))
    seen = index.rows_of([["i3", "i9", "none"], []])
    left = ItemFilter.build(trie, 2, deny_rows=seen)
    users, leaves = torch.tensor([0, 1]).repeat_interleave(trie.num_leaves), torch.arange(trie.num_leaves).repeat(2)
    first = left.first_rows(users, leaves).view(2, -1).tolist()
    for user, denied in enumerate(seen):
        for leaf, row in enumerate(first[user]):
            rows = range(index.offsets[leaf], index.offsets[leaf + 1])
            assert row == next(row for row in rows if row not in denied)


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("by_sid", [True, False])
def test_denied_rows_leave_their_places_to_others(index, limit, by_sid):
    random = np.random.default_rng(1)
    users = random.standard_normal((3, 4, 5) if by_sid else (3, 5)).astype(np.float32)
    sids = np.stack([random.permutation(index.num_sids)[:4] for _ in range(3)])
    denied = [index.rows_of([["i3", "i5", "i7", "i1", "i2"]])[0], [], [-1, *range(index.offsets[1], index.offsets[2])]]
    found = index.rerank(users, sids, per_sid_limit=limit, k=7, deny_rows=denied)
    for user in range(3):
        scored = []
        for place, sid in enumerate(sids[user]):
            rows = [row for row in range(index.offsets[sid], index.offsets[sid + 1]) if row not in denied[user]]
            scores = index.embeddings.reference_scores(users[user, place] if by_sid else users[user])
            scored += sorted((-scores[row], place, row) for row in rows)[:limit]
        wanted = sorted(scored)[:7]
        assert found.rows[user].tolist() == [row for _, _, row in wanted] + [-1] * (7 - len(wanted))
        assert found.sids[user].tolist() == [place for _, place, _ in wanted] + [-1] * (7 - len(wanted))
    assert not np.array_equal(found.rows, index.rerank(users, sids, per_sid_limit=limit, k=7).rows)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-1, 39), max_size=60))
def test_any_denied_rows_are_left_out_of_the_ranking_and_nothing_else(denied):
    index, user, sids = make(), np.ones((1, 5), dtype=np.float32), np.arange(9)[None]
    free, filtered = (index.rerank(user, sids, k=40, deny_rows=rows).rows[0].tolist() for rows in (None, [denied]))
    left = [row for row in free if row not in denied]
    assert filtered == left + [-1] * (40 - len(left))


def test_tensors_and_arrays_are_taken(index):
    user, sids = np.ones((2, 5), dtype=np.float32), np.arange(8).reshape(2, 4)
    expected = index.rerank(user, sids, deny_rows=[[0, 9], [3, -1]]).rows
    for kind in (np.array, torch.tensor):
        assert np.array_equal(index.rerank(user, sids, deny_rows=kind([[0, 9], [3, -1]])).rows, expected)


@pytest.mark.parametrize(
    ("denied", "message"),
    [
        ([[1]], "`deny_rows` must hold a list of rows for each of 2 users, got 1"),
        (
            [[40], []],
            r"`deny_rows` must hold a list of rows 0..39, or -1 for none, for each user, got \[40\] for user 0",
        ),
        ([[], [-2]], r"got \[-2\] for user 1"),
        ([1, 2], "`deny_rows` must hold a list of rows 0..39"),
        ([["i3"], []], "`deny_rows` must be integers, got <U2"),
        ([[], [0.5]], "`deny_rows` must be integers, got float64"),
    ],
)
def test_denied_rows_that_are_none_are_refused(denied, message):
    with pytest.raises(ValueError, match=message):
        make().rerank(np.ones((2, 5)), np.zeros((2, 1), dtype=int), deny_rows=denied)
