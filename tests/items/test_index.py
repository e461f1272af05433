import dataclasses
from bisect import bisect_left, bisect_right

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_deco.items import ItemTokenizer, QuantizerTraining, StreamingTokenizer
from hf_deco.items.index import ItemIndex
from hf_deco.items.packing import PRECISIONS, PackedRows
from hf_deco.models.trie import SIDTrie

SIZES = (4, 3, 5)
MADE_BY = {"tokenizer_version": "v1", "model_id": "m"}


def make(items, precision="int8", sizes=SIZES, **made_by):
    """An index of a `dict` from item id to codes and embedding."""
    codes, embeddings = (np.array([item[part] for item in items.values()]) for part in (0, 1))
    return ItemIndex.build(list(items), codes, embeddings, sizes, precision=precision, **MADE_BY | made_by)


def random_items(number, seed=0, width=6, sizes=SIZES):
    rng = np.random.default_rng(seed)
    ids = [f"item-{row}" for row in rng.permutation(number)]
    codes = rng.integers(0, sizes, (number, len(sizes)))
    return {
        name: (sid.tolist(), vector)
        for name, sid, vector in zip(ids, codes, rng.normal(size=(number, width)), strict=True)
    }


def arrays(index):
    rows, ids = index.embeddings, index.item_ids
    return [index.keys, index.offsets, ids.data, ids.offsets, rows.data, rows.scales]


def assert_same(left, right):
    for ours, theirs in zip(arrays(left), arrays(right), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    names = ("codebook_sizes", "tokenizer_version", "model_id")
    assert [getattr(left, name) for name in names] == [getattr(right, name) for name in names]
    assert (left.embeddings.precision, left.embeddings.width) == (right.embeddings.precision, right.embeddings.width)


@pytest.fixture(scope="module")
def items():
    return random_items(90)


@pytest.fixture(scope="module", params=PRECISIONS)
def index(request, items):
    return make(items, request.param)


def test_rows_stand_by_sid_and_then_by_id_with_their_embeddings(items, index):
    order = sorted(items, key=lambda name: (items[name][0], name))
    assert list(index.item_ids) == order and len(index) == 90
    sids = sorted({tuple(codes) for codes, _ in items.values()})
    assert [tuple(codes) for codes in index.codes().tolist()] == sids and index.num_sids == len(sids)
    expected = PackedRows.pack(np.array([items[name][1] for name in order]), index.embeddings.precision)
    np.testing.assert_array_equal(index.embeddings.data, expected.data)
    np.testing.assert_array_equal(index.embeddings.unpack(), expected.unpack())
    assert repr(index).startswith(f"ItemIndex(items=90, sids={len(sids)}, {index.embeddings.precision}[6]")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sids_and_prefixes_are_found_as_a_scan_finds_them(items, index, length):
    every = np.stack(np.meshgrid(*(np.arange(-1, size + 1) for size in SIZES[:length]), indexing="ij"), -1)
    firsts, lasts = index.find_codes(every)
    assert firsts.shape == every.shape[:-1]
    ordered = [items[name][0][:length] for name in index.item_ids]
    for codes, first, last in zip(every.reshape(-1, length).tolist(), firsts.flat, lasts.flat, strict=True):
        if codes in ordered:
            assert (first, last) == (bisect_left(ordered, codes), bisect_right(ordered, codes))
        else:
            assert first == last
    which, rows = index.expand(every.reshape(-1, length))
    assert sorted(rows) == list(range(90))
    assert [every.reshape(-1, length)[sid].tolist() for sid in which] == [ordered[row] for row in rows]


def test_positions_are_the_leaves_of_the_trie(items, index):
    trie = index.trie()
    leaves = trie.node_paths(torch.tensor([codes for codes, _ in items.values()]))[:, -1]
    assert trie.num_leaves == trie.num_items == index.num_sids
    for ours, theirs in zip(index.find(leaves), index.find_codes([codes for codes, _ in items.values()]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    whole = SIDTrie(torch.tensor([codes for codes, _ in items.values()]), SIZES)
    np.testing.assert_array_equal(index.offsets, whole.item_offsets)
    assert [array.tolist() for array in index.find([[-1], [0]])] == [[[0], [0]], [[0], [int(index.offsets[1])]]]
    sids, rows = index.expand(np.array([5, -1, 0]))
    assert rows.tolist() == [*range(*index.offsets[5:7]), *range(*index.offsets[:2])]
    assert sids.tolist() == [0] * np.diff(index.offsets)[5] + [2] * np.diff(index.offsets)[0]


def test_keys_use_all_64_bits():
    sizes = (256,) * 8
    items = {str(n): (codes, [1.0]) for n, codes in enumerate([[255] * 8, [0] * 8, [255, *[0] * 7], [254, *[255] * 7]])}
    index = make(items, sizes=sizes)
    assert list(index.item_ids) == ["1", "3", "2", "0"] and index.keys[-1] == 2**64 - 1
    assert index.codes().tolist() == sorted(codes for codes, _ in items.values())
    assert [int(bound) for bound in index.find_codes([255])] == [2, 4]
    assert [int(bound) for bound in index.find_codes([255] * 8)] == [3, 4]
    with pytest.raises(ValueError, match=r"span 2.36e\+21 SIDs, but an index tells 2\*\*64 apart"):
        make({"a": ([0] * 9, [1.0])}, sizes=(*sizes, 128))


def naive_rerank(index, items, users, sids, limit, k):
    """Python lists; scores in the index's own arithmetic, which the tests of packing check."""
    ids = list(index.item_ids)
    answers = []
    for user, candidates in zip(users, sids, strict=True):
        found, seen = [], set()
        scores = index.embeddings.reference_scores(user)
        for place, codes in enumerate(candidates):
            rows = [row for row, name in enumerate(ids) if items[name][0][: len(codes)] == list(codes)]
            if tuple(codes) not in seen:
                best = sorted(rows, key=lambda row: (-scores[row], row))
                found += [(row, scores[row], place) for row in best[:limit]]
            seen.add(tuple(codes))
        answers.append(sorted(found, key=lambda item: (-item[1], item[2], item[0]))[:k])
    return answers


def assert_reranked(result, expected, k):
    for number, best in enumerate(expected):
        short = [-1] * (k - len(best))
        assert result.rows[number].tolist() == [row for row, *_ in best] + short
        assert result.sids[number].tolist() == [place for *_, place in best] + short
        wanted = [score for _, score, _ in best] + [-np.inf] * len(short)
        np.testing.assert_allclose(result.scores[number], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_rerank_is_a_naive_loop(items, index, length, limit):
    rng = np.random.default_rng(4)
    users = rng.standard_normal((3, 6)).astype(np.float32)
    sids = rng.integers(-1, 5, (3, 25, length))
    sids[:, ::3] = np.array([codes for codes, _ in items.values()])[rng.integers(0, 90, (3, 9)), :length]
    sids[:, 24] = sids[:, 0]
    expected = naive_rerank(index, items, users, sids.tolist(), limit, 12)
    result = index.rerank(users, sids, limit, k=12)
    assert_reranked(result, expected, 12)
    assert index.ids(result.rows) == [[index.item_ids[row] for row, *_ in best] for best in expected]
    tensors = index.rerank(torch.from_numpy(users).requires_grad_(), torch.from_numpy(sids), limit, k=12)
    np.testing.assert_array_equal(tensors.rows, result.rows)
    for number in range(3):
        alone = index.rerank(users[[number]], sids[[number]], limit, k=12)
        assert alone.scores[0].tobytes() == result.scores[number].tobytes()


def test_rerank_by_positions_is_rerank_by_codes(index):
    users = np.random.default_rng(5).standard_normal((2, 6))
    positions = np.array([[3, 0, 3, -1], [7, 1, 2, 5]])
    codes = np.where(positions[..., None] < 0, -1, index.codes()[positions])
    by_position, by_codes = (index.rerank(users, sids, 2, 50) for sids in (positions, codes))
    np.testing.assert_array_equal(by_position.rows, by_codes.rows)
    np.testing.assert_array_equal(by_position.sids, by_codes.sids)
    assert by_position.generation is None and (by_position.rows[0] >= 0).sum() >= 2


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_ties_and_limits_are_those_of_a_naive_loop(data):
    """Few distinct embeddings, so that most scores are equal, among them 0 and -0."""
    values = st.sampled_from([-1.0, -0.0, 0.0, 1.0])
    names = st.text("ab", min_size=1, max_size=5)
    items = data.draw(st.dictionaries(names, st.tuples(st.just([0]) | st.just([1]), st.tuples(values)), min_size=1))
    index = make(items, data.draw(st.sampled_from(PRECISIONS)), sizes=(3,))
    user = np.array([data.draw(values)], dtype=np.float32)
    sids = data.draw(st.lists(st.tuples(st.integers(-1, 3)), min_size=1, max_size=4))
    limit, k = data.draw(st.none() | st.integers(1, 4)), data.draw(st.integers(1, 6))
    result = index.rerank(user[None], np.array([sids]), limit, k)
    assert_reranked(result, naive_rerank(index, items, [user], [sids], limit, k), k)


def test_many_sids_are_limited_as_few_are():
    """Above 65,536 SIDs, ranks are found by another sort."""
    number = 70_000
    rng = np.random.default_rng(6)
    codes = np.stack([np.arange(number) // 300, np.arange(number) % 300], 1).repeat(2, axis=0)
    vectors = rng.standard_normal((2 * number, 1))
    index = ItemIndex.build(np.arange(2 * number), codes, vectors, (300, 300), **MADE_BY)
    result = index.rerank([[1.0]], np.arange(number)[None], per_sid_limit=1, k=number)
    scores = index.embeddings.unpack().reshape(number, 2).max(1)
    assert (np.diff(result.scores[0]) <= 0).all() and sorted(result.sids[0]) == list(range(number))
    np.testing.assert_allclose(np.sort(result.scores[0]), np.sort(scores), rtol=1e-6)


names = st.text("abz\u00e9\U0001f600", min_size=0, max_size=3)
item = st.tuples(
    st.tuples(*(st.integers(0, size - 1) for size in (2, 2))),
    st.tuples(*[st.floats(-4, 4, width=16)] * 3),
)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_sequence_of_updates_is_a_rebuild(data):
    precision = data.draw(st.sampled_from(PRECISIONS))
    items = data.draw(st.dictionaries(names, item, min_size=1, max_size=8))
    index = first = make(items, precision, sizes=(2, 2))
    before = [array.copy() for array in arrays(index) if array is not None]
    for turn in range(data.draw(st.integers(1, 4))):
        changes = data.draw(st.dictionaries(names, item, max_size=5))
        leaving = st.lists(st.sampled_from(sorted(items.keys() - changes.keys()) or [None]), unique=True)
        removed = [name for name in data.draw(leaving) if name is not None]
        if not changes and len(removed) == len(items):
            continue
        items = {name: value for name, value in items.items() if name not in removed} | changes
        codes, vectors = ([value[part] for value in changes.values()] for part in (0, 1))
        index = index.update(list(changes), codes, vectors, removed=removed, tokenizer_version=f"v{turn}")
        assert_same(index, make(items, precision, sizes=(2, 2), tokenizer_version=f"v{turn}"))
    for array, copy in zip((array for array in arrays(first) if array is not None), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_tokenizer_that_publishes_anew_refreshes_the_index_by_what_changed():
    rng = np.random.default_rng(7)
    ids, vectors = [f"i{n}" for n in range(120)], rng.standard_normal((120, 4)).astype(np.float32)
    tokenizer = ItemTokenizer((6, 5), "basis-rq", training=QuantizerTraining(num_steps=6)).fit(vectors)
    stream = StreamingTokenizer(tokenizer, ids, vectors, learning_rate=0.05)
    table = stream.table
    index = ItemIndex.build(ids, table.codes, vectors, (6, 5), tokenizer_version=stream.version_id, model_id="m")
    new, new_vectors = ["n1", "n0"], rng.standard_normal((2, 4)).astype(np.float32)
    for _ in range(5):
        stream.partial_fit(ids, vectors)
    stream.partial_fit(new, new_vectors)
    change = stream.publish()
    assert 0 < len(change.changed) < 120 and change.version_id != table.tokenizer_version
    touched = stream.table.select([*change.changed, *change.added])
    of = dict(zip([*ids, *new], [*vectors, *new_vectors], strict=True))
    index = index.update(
        touched.item_ids,
        touched.codes,
        [of[name] for name in touched.item_ids.tolist()],
        tokenizer_version=change.version_id,
    )
    rebuilt = {name: (codes, of[name]) for name, codes in zip([*ids, *new], stream.table.codes.tolist(), strict=True)}
    assert_same(index, make(rebuilt, sizes=(6, 5), tokenizer_version=change.version_id))
    index.check_made_for(stream.version_id, "m")


def test_an_update_of_nothing_is_the_same_and_all_may_be_replaced(items):
    index = make(items)
    assert_same(index.update(), index)
    other = random_items(20, seed=9)
    codes, vectors = ([value[part] for value in other.values()] for part in (0, 1))
    gone = [name for name in items if name not in other]
    assert_same(index.update(list(other), codes, vectors, removed=gone), make(other))


def test_strings_are_copied_in_blocks_as_at_once(items, monkeypatch):
    monkeypatch.setattr("hf_deco.items.index_order._BLOCK", 7)
    assert sorted(make(items).item_ids) == sorted(items)
    assert list(make(items).item_ids) == sorted(items, key=lambda name: (items[name][0], name))


def test_a_foreign_asker_is_told_so(items):
    index = make(items)
    index.check_made_for("v1", "m")
    with pytest.raises(ValueError, match="made with tokenizer version 'v1', but is asked by tokenizer version 'v2'"):
        index.check_made_for("v2", "m")
    with pytest.raises(ValueError, match="made with model 'm', but is asked by model 'n', whose codes and vectors"):
        index.check_made_for("v1", "n")


def test_a_snapshot_cannot_be_written_to(items):
    index = make(items)
    for array in arrays(index):
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        index.model_id = "x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_ids": ["a", "a"]}, "`item_ids` names 'a' more than once"),
        ({"item_ids": ["a", "\ud800"]}, r"`item_ids` holds '\\ud800', which is no valid text"),
        ({"codes": [[0, 0, 0]]}, "`codes` has 1 rows for 2 `item_ids`"),
        ({"codes": [[0, 0], [0, 0]]}, r"`codes` must be integers of shape \(num_items, 3\)"),
        ({"codes": [[0, 0, 0], [0, 3, 0]]}, r"`codes` has 1 rows outside `codebook_sizes` \(4, 3, 5\), first row 1"),
        ({"embeddings": [[0.0]]}, "`embeddings` has 1 rows for 2 items"),
        ({"embeddings": [[0.0] * 6, [np.nan] * 6]}, "`embeddings` holds NaN or infinite values in 1 of 2 rows"),
        ({"embeddings": [[0.0] * 6, [1e39] * 6]}, "`embeddings` holds NaN or infinite values in 1 of 2 rows"),
    ],
)
@pytest.mark.parametrize("how", ["build", "update"])
def test_malformed_items_are_refused(items, how, change, message):
    arguments = {"item_ids": ["a", "b"], "codes": [[0, 0, 0], [1, 1, 1]], "embeddings": np.ones((2, 6))} | change
    index = make(items)
    with pytest.raises(ValueError, match=message):
        if how == "build":
            ItemIndex.build(*arguments.values(), SIZES, **MADE_BY)
        else:
            index.update(**arguments)
    assert_same(index, make(items))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"removed": ["item-1", "nobody", "no one"]}, "`removed` names 'nobody', 'no one' not in this index of 90"),
        ({"removed": ["item-1", "item-1"]}, "`item_ids` names 'item-1' more than once"),
        ({"removed": [f"item-{n}" for n in range(90)]}, "`removed` names all 90 items; an index needs at least one"),
        ({"item_ids": ["x"]}, "`item_ids` is given without `codes` or `embeddings`"),
        ({"codes": [[0, 0, 0]]}, "`codes` and `embeddings` are given without `item_ids`"),
        (
            {"item_ids": ["x"], "codes": [[0, 0, 0]], "embeddings": [[1.0]]},
            "`embeddings` must have width 6 here, got 1",
        ),
        (
            {"item_ids": ["item-1"], "codes": [[0, 0, 0]], "embeddings": [[1.0] * 6], "removed": ["item-1"]},
            "`removed` and `item_ids` both name 'item-1'",
        ),
        ({"tokenizer_version": ""}, "`tokenizer_version` must be a non-empty string, got ''"),
    ],
)
def test_malformed_updates_are_refused(items, arguments, message):
    index = make(items)
    with pytest.raises(ValueError, match=message):
        index.update(**arguments)
    assert_same(index, make(items))


@pytest.mark.parametrize(
    ("users", "sids", "options", "message"),
    [
        ([[1.0] * 5], [[0]], {}, "`users` must have width 6 here, got 5"),
        ([1.0] * 6, [[0]], {}, r"`users` must have shape \(n, width\), got \(6,\)"),
        ([[1.0] * 6, [np.nan] * 6], [[0], [0]], {}, "`users` holds NaN or infinite values in 1 rows, first in row 1"),
        ([[1.0] * 6], [[0], [0]], {}, r"`sids` must be positions \(B, S\) or codes \(B, S, L\) for 1 `users`"),
        ([[1.0] * 6], [0], {}, r"got shape \(1,\)"),
        ([[1.0] * 6], [[0.5]], {}, "`sids` must be integers, got float64"),
        ([[1.0] * 6], [[-2]], {}, r"`sids` must be positions 0\.\.\d+, or -1 for none, got -2\.\.-2"),
        ([[1.0] * 6], [[60]], {}, r"or -1 for none, got 60\.\.60"),
        ([[1.0] * 6], [[[0, 0, 0, 0]]], {}, r"`codes` must hold 1 to 3 codes in the last dimension, got \(1, 1, 4\)"),
        ([[1.0] * 6], [[0]], {"k": 0}, "`k` must be an integer of at least 1, got 0"),
        ([[1.0] * 6], [[0]], {"per_sid_limit": 1.5}, "`per_sid_limit` must be an integer of at least 1, got 1.5"),
    ],
)
def test_malformed_questions_are_refused(items, users, sids, options, message):
    with pytest.raises(ValueError, match=message):
        make(items).rerank(users, sids, **options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_beyond_float32_are_refused(precision):
    size = 6e4 if precision == "fp16" else 3e38
    index = make({"a": ([0], [size, -size]), "b": ([1], [1.0, 0.0])}, precision, sizes=(2,))
    with pytest.raises(ValueError, match="`users` row 1 gives scores beyond float32"):
        index.rerank([[1.0, 0.0], [3e38, 3e38 / 2]], [[0], [0]])
    assert index.rerank([[3e38, 3e38]], [[1]]).rows[0, 0] == 1


def test_users_without_candidates_get_nothing(items):
    index = make(items)
    result = index.rerank(np.ones((2, 6)), [[-1], [0]], k=3)
    assert result.rows[0].tolist() == [-1] * 3 and result.scores[0].tolist() == [-np.inf] * 3
    assert result.rows[1, 0] >= 0
    assert index.rerank(np.ones((0, 6)), np.empty((0, 4), dtype=int), k=3).rows.shape == (0, 3)
    assert index.rerank(np.ones((1, 6)), np.empty((1, 0), dtype=int), k=3).rows.tolist() == [[-1] * 3]
    assert index.ids(result.rows)[0] == []


def test_half_precision_users_are_taken():
    index = make(random_items(5))
    users = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    sids = np.array([[0, 1], [1, 2]])
    half, full = (index.rerank(vectors, sids, k=2) for vectors in (users, users.float()))
    np.testing.assert_array_equal(half.scores, full.scores)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"keys": np.array([1, 0], dtype=np.uint64)}, "`keys` must be SIDs within `codebook_sizes`, ascending"),
        ({"keys": np.array([0, 60], dtype=np.uint64)}, "`keys` must be SIDs within `codebook_sizes`, ascending"),
        ({"keys": np.array([0, 1])}, "`keys` must be uint64 of one dimension, got int64"),
        ({"offsets": np.array([0, 2, 2])}, "`offsets` must give each of the 2 SIDs a range of the 2 rows"),
        ({"offsets": np.array([0, 1, 3])}, "`offsets` must give each of the 2 SIDs a range of the 2 rows"),
        ({"embeddings": PackedRows.pack([[1.0]])}, "`embeddings` has 1 rows for 2 `item_ids`"),
        ({"codebook_sizes": (2**32, 2**32, 2)}, r"an index tells 2\*\*64 apart"),
        ({"model_id": None}, "`model_id` must be a non-empty string, got None"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    index = make({"a": ([0, 0, 0], [1.0]), "b": ([3, 2, 4], [1.0])})
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(index, **parts)
