from itertools import product

import numpy as np
import pytest

from hf_deco.items import collisions, resolve_collisions


def naive_resolve(codes, embeddings, codebooks, popularity, item_ids):
    """The rule, spelled out over the set of all free IDs."""
    codes = [tuple(row) for row in codes.tolist()]
    free = set(product(*(range(len(codebook)) for codebook in codebooks)))
    waiting = []
    for item in sorted(range(len(codes)), key=lambda i: (-popularity[i], item_ids[i], i)):
        if codes[item] in free:
            free.remove(codes[item])
        else:
            waiting.append(item)
    moved = np.isin(np.arange(len(codes)), waiting)
    for length in reversed(range(len(codebooks))):
        turned_away = []
        for item in waiting:
            choices = {sid for sid in free if sid[:length] == codes[item][:length]}
            if not choices:
                turned_away.append(item)
                continue
            residual = embeddings[item].astype(np.float64)
            for level, codebook in enumerate(codebooks):
                open_codes = sorted({sid[level] for sid in choices})
                nearest = min(open_codes, key=lambda c: np.sum((residual - codebook[c]) ** 2))
                if level < length:
                    nearest = codes[item][level]
                choices = {sid for sid in choices if sid[level] == nearest}
                residual = residual - codebook[nearest]
            (codes[item],) = choices
            free.remove(codes[item])
        waiting = turned_away
    return np.array(codes), moved


def random_case(seed):
    """A catalog from sparse to exactly full, with codes from few values and copies of embeddings."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, rng.integers(1, 5))
    room = int(np.prod(sizes))
    num_items = room if seed % 3 == 0 else int(rng.integers(1, room + 1))
    codebooks = [rng.standard_normal((size, 3)).astype(np.float32) for size in sizes]
    embeddings = rng.standard_normal((num_items, 3)).astype(np.float32)
    embeddings[rng.random(num_items) < 0.3] = embeddings[0]
    codes = np.stack([rng.integers(0, rng.integers(1, size + 1), num_items) for size in sizes], axis=1)
    popularity = rng.integers(0, 4, num_items)
    return codes, embeddings, codebooks, popularity, rng.permutation(num_items).astype(str)


@pytest.mark.parametrize("chunk_rows", [3, 8192])
def test_equals_the_naive_rule_on_random_catalogs(monkeypatch, chunk_rows):
    monkeypatch.setattr(collisions, "CHUNK_ROWS", chunk_rows)
    num_moved = 0
    for seed in range(150):
        case = random_case(seed)
        codes, moved = resolve_collisions(*case)
        expected_codes, expected_moved = naive_resolve(*case)
        np.testing.assert_array_equal(moved, expected_moved, err_msg=f"seed {seed}")
        np.testing.assert_array_equal(codes, expected_codes, err_msg=f"seed {seed}")
        num_moved += moved.sum()
    assert num_moved > 1000  # the cases are hard ones


@pytest.mark.parametrize("num_items", [50, 4_000, 4_096])
def test_identical_items_all_get_an_id_of_their_own(num_items):
    rng = np.random.default_rng(0)
    codebooks = [rng.standard_normal((16, 4)).astype(np.float32) for _ in range(3)]
    codes = np.full((num_items, 3), 5, dtype=np.int32)
    after, moved = resolve_collisions(codes, np.ones((num_items, 4)), codebooks, np.arange(num_items))
    assert len(np.unique(after, axis=0)) == num_items
    assert after.dtype == np.int32 and after.min() >= 0 and after.max() < 16
    assert moved.sum() == num_items - 1 and not moved[-1]
    assert (codes == 5).all()  # the input is left alone
    # Of 4,096 IDs 16 are under the prefix (5, 5): the most popular items have them.
    assert (after[-16:, :2] == 5).all() and not (after[:-16, :2] == 5).all(axis=1).any()


def test_whole_result_of_a_small_catalog():
    codebooks = [np.array([[0.0], [10.0], [30.0]], dtype=np.float32), np.array([[-1.0], [1.0]], dtype=np.float32)]
    codes = [[0, 1], [0, 1], [0, 1], [1, 0], [0, 1]]
    embeddings = [[1.0], [1.2], [1.4], [9.0], [8.0]]
    popularity = [1, 7, 3, 0, 2]
    after, moved = resolve_collisions(codes, embeddings, codebooks, popularity)
    # fmt: off
    assert after.tolist() == [
        [2, 0],  # last: 0 and 10 are full by now, so 30, then -1
        [0, 1],  # most popular: keeps
        [0, 0],  # next: the one other code under its prefix
        [1, 0],  # never shared: keeps, popular or not
        [1, 1],  # its prefix is full: 10 is the next nearest, and only +1 is free there
    ]
    # fmt: on
    assert moved.tolist() == [True, False, True, False, True]


def test_ties_go_to_the_smaller_item_id_then_to_the_earlier_row():
    codebooks = [np.array([[0.0], [1.0], [2.0]], dtype=np.float32)]
    arguments = ([[0], [0], [0]], np.zeros((3, 1)), codebooks, [5, 5, 5])
    assert resolve_collisions(*arguments, item_ids=["c", "a", "b"])[0].tolist() == [[2], [0], [1]]
    assert resolve_collisions(*arguments)[0].tolist() == [[0], [1], [2]]


def test_nothing_to_resolve():
    codes, codebooks = np.array([[0, 1], [1, 0]]), [np.eye(2, dtype=np.float32)] * 2
    after, moved = resolve_collisions(codes, np.eye(2), codebooks, [0, 0])
    assert after.tolist() == codes.tolist() and not moved.any()


def test_sizes_whose_product_exceeds_int64():
    rng = np.random.default_rng(0)
    codebooks = [rng.standard_normal((256, 2)).astype(np.float32) for _ in range(9)]
    after, _ = resolve_collisions(np.full((300, 9), 255), np.zeros((300, 2)), codebooks, np.zeros(300))
    assert len(np.unique(after, axis=0)) == 300


def test_prefix_ids_rank_prefixes_in_lexicographic_order():
    codes = np.array([[1, 0], [0, 2], [0, 1], [1, 0], [0, 2]])
    assert [ids.tolist() for ids in collisions.prefix_ids(codes)] == [[1, 0, 0, 1, 0], [2, 1, 0, 2, 1]]


GOOD = {
    "codes": [[0, 0], [0, 0], [1, 1]],
    "embeddings": np.zeros((3, 2)),
    "codebooks": [np.eye(2, dtype=np.float32)] * 2,
    "popularity": [1, 2, 3],
    "item_ids": ["a", "b", "c"],
}


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("codes", [[0, 2], [0, 0], [1, 1]], r"`codes` has 1 rows outside .* first row 0: \[0, 2\]"),
        ("codes", [[0], [0], [1]], "`codes` must be integers of shape"),
        ("codes", [[0, 0]] * 5, r"`codebook_sizes` \(2, 2\) allow 4 semantic IDs for 5 items"),
        ("embeddings", np.zeros((2, 2)), "`embeddings` has 2 rows for 3 items"),
        ("embeddings", np.full((3, 2), np.inf), "NaN or infinite values in 3 of 3 rows, first in row 0"),
        ("popularity", [1, 2], r"`popularity` must have shape \(3,\)"),
        ("popularity", [1, 2, np.nan], "`popularity` holds 1 NaN"),
        ("item_ids", ["a", "b"], r"`item_ids` must have shape \(3,\)"),
    ],
)
def test_bad_input(argument, value, message):
    resolve_collisions(**GOOD)
    with pytest.raises(ValueError, match=message):
        resolve_collisions(**{**GOOD, argument: value})
