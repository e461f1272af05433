import random

import pytest
import torch

from hf_deco import SIDTrie
from hf_deco.models.trie import check_codes

SHAPES = [
    ((7,), 12),
    ((3, 4), 10),
    ((6, 1, 5), 25),
    ((3, 4, 2, 5), 60),
    ((2,) * 8, 40),
    ((2048,) * 8, 50),  # 88 bits: two words
    ((2**20,) * 8, 30),  # 160 bits: three words
    ((2**31 - 1, 3, 2**31 - 1), 30),
]


def random_catalog(sizes, num_items, seed):
    """Random SIDs that share prefixes, some of them repeated; the largest code of each level is in use."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_items):
        sid = [rng.choice((rng.randrange(size), 0, size - 1)) for size in sizes]
        if rows and rng.random() < 0.7:
            depth = rng.randrange(len(sizes) + 1)
            sid[:depth] = rng.choice(rows)[:depth]
        rows.append(sid)
    rows.append([size - 1 for size in sizes])
    return rows


class DictTrie:
    def __init__(self, rows):
        self.items, self.levels = {}, [sorted({tuple(row[:k]) for row in rows}) for k in range(len(rows[0]) + 1)]
        for row, sid in enumerate(rows):
            self.items.setdefault(tuple(sid), []).append(row)
        self.number = [{prefix: node for node, prefix in enumerate(level)} for level in self.levels]

    def children(self, level, node):
        prefix = self.levels[level][node]
        found = [
            (self.number[level + 1][longer], longer[-1]) for longer in self.levels[level + 1] if longer[:-1] == prefix
        ]
        return [node for node, _ in found], [code for _, code in found]

    def leaves(self, level, node):
        return sum(leaf[:level] == self.levels[level][node] for leaf in self.levels[-1])


@pytest.fixture(
    params=[(shape, seed) for shape in SHAPES for seed in range(2)], ids=lambda p: f"{p[0][0][0]}x{len(p[0][0])}-{p[1]}"
)
def catalog(request):
    (sizes, num_items), seed = request.param
    rows = random_catalog(sizes, num_items, seed)
    return sizes, rows, SIDTrie(torch.tensor(rows, dtype=torch.int64), sizes), DictTrie(rows)


def test_nodes_children_and_leaves_equal_a_dictionary_of_prefixes(catalog):
    sizes, rows, trie, reference = catalog
    assert (trie.num_codebooks, trie.codebook_sizes) == (len(sizes), sizes)
    assert (trie.num_items, trie.num_leaves) == (len(rows), len(reference.items))
    assert [trie.num_nodes(level) for level in range(len(sizes) + 1)] == [len(level) for level in reference.levels]
    for level in range(len(sizes)):
        nodes = torch.arange(trie.num_nodes(level))
        expected = [reference.children(level, node) for node in nodes.tolist()]
        for node, (children, codes) in enumerate(expected):
            got = trie.children(level, node)
            assert [part.tolist() for part in got] == [children, codes]
        assert trie.num_children(level, nodes).tolist() == [len(children) for children, _ in expected]
    for level in range(len(sizes) + 1):
        nodes = torch.arange(trie.num_nodes(level))
        assert trie.leaf_counts(level, nodes).tolist() == [reference.leaves(level, node) for node in nodes.tolist()]


def test_expand_lists_the_children_of_any_nodes_in_their_order_repeats_included(catalog):
    sizes, _, trie, reference = catalog
    for level in range(len(sizes)):
        nodes = torch.randint(0, trie.num_nodes(level), (11,), generator=torch.Generator().manual_seed(level))
        expected = [
            (parent, child, code)
            for parent, node in enumerate(nodes.tolist())
            for child, code in zip(*reference.children(level, node), strict=True)
        ]
        parents, children, codes = trie.expand(level, nodes)
        assert list(zip(parents.tolist(), children.tolist(), codes.tolist(), strict=True)) == expected
        assert codes.dtype == torch.int64


def test_expand_of_no_nodes_is_empty():
    trie = SIDTrie(torch.tensor([[0, 1], [1, 0]]), (2, 2))
    assert [part.tolist() for part in trie.expand(1, torch.zeros(0, dtype=torch.long))] == [[], [], []]


def test_items_of_a_leaf_are_its_catalog_rows_ascending(catalog):
    _, rows, trie, reference = catalog
    for leaf, sid in enumerate(reference.levels[-1]):
        start, end = trie.item_offsets[leaf : leaf + 2].tolist()
        assert trie.item_rows[start:end].tolist() == reference.items[sid]
    assert trie.rows(torch.tensor(rows)).tolist() == [reference.items[tuple(sid)][0] for sid in rows]


def probes(sizes, rows, seed=0):
    """SIDs of the catalog, near misses at every level, and codes outside their level."""
    rng = random.Random(seed)
    sids = [list(row) for row in rows]
    for row in rows:
        for level, size in enumerate(sizes):
            for code in (rng.randrange(size), -1, size, size + 5, -(2**40)):
                sids.append([*row[:level], code, *row[level + 1 :]])
    return sids


def test_node_paths_and_rows_are_minus_one_from_the_first_missing_level_on(catalog):
    sizes, rows, trie, reference = catalog
    sids = probes(sizes, rows)
    expected = [[reference.number[k + 1].get(tuple(sid[: k + 1]), -1) for k in range(len(sizes))] for sid in sids]
    assert any(-1 in path for path in expected)
    assert trie.node_paths(torch.tensor(sids)).tolist() == expected
    for length in range(len(sizes) + 1):
        prefixes = torch.tensor(sids)[:, :length]
        assert trie.node_paths(prefixes).tolist() == [path[:length] for path in expected]
    assert trie.rows(torch.tensor(sids)).tolist() == [reference.items.get(tuple(sid), [-1])[0] for sid in sids]


def test_node_paths_and_rows_keep_leading_dimensions():
    trie = SIDTrie(torch.tensor([[1, 1], [0, 2], [1, 0]]), (2, 3))
    sids = torch.tensor([[[1, 1], [0, 0]], [[0, 2], [1, 0]], [[1, 2], [-1, -1]]])
    assert trie.node_paths(sids).tolist() == [[[1, 2], [0, -1]], [[0, 0], [1, 1]], [[1, -1], [-1, -1]]]
    assert trie.rows(sids).tolist() == [[0, -1], [1, 2], [-1, -1]]


@pytest.mark.parametrize("length", [1, 3])
def test_rows_refuses_what_is_no_whole_sid(length):
    trie = SIDTrie(torch.tensor([[1, 1], [0, 2]]), (2, 3))
    with pytest.raises(ValueError, match="SIDs of 2 codes"):
        trie.rows(torch.zeros((4, length), dtype=torch.long))


def test_child_nodes_follow_every_code_of_every_node():
    sizes, rows = (3, 4, 2), random_catalog((3, 4, 2), 9, seed=3)
    trie, reference = SIDTrie(torch.tensor(rows), sizes), DictTrie(rows)
    for level, size in enumerate(sizes):
        nodes = [node for node in range(-1, trie.num_nodes(level)) for _ in range(-1, size + 1)]
        codes = [code for _ in range(-1, trie.num_nodes(level)) for code in range(-1, size + 1)]
        expected = [
            -1 if node < 0 else reference.number[level + 1].get((*reference.levels[level][node], code), -1)
            for node, code in zip(nodes, codes, strict=True)
        ]
        assert trie.child_nodes(level, torch.tensor(nodes), torch.tensor(codes)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_type_of_codes_gives_the_same_trie(dtype):
    rows = random_catalog((5, 3, 9), 20, seed=1)
    trie, expected = SIDTrie(torch.tensor(rows, dtype=dtype), (5, 3, 9)), SIDTrie(torch.tensor(rows), (5, 3, 9))
    for name in ("child_offsets", "child_codes", "leaf_offsets"):
        for got, wanted in zip(getattr(trie, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert trie.item_rows.tolist() == expected.item_rows.tolist()


def test_to_moves_every_array_and_keeps_the_trie_that_is_there_already():
    rows = random_catalog((5, 3, 9), 20, seed=1)
    trie = SIDTrie(torch.tensor(rows), (5, 3, 9))
    assert trie.to("cpu") is trie
    trie.rows(torch.tensor(rows))  # fills what is cached
    moved = trie.to("meta")
    arrays = [*moved.child_offsets, *moved.child_codes, *moved.leaf_offsets, moved.item_offsets, moved.item_rows]
    originals = [*trie.child_offsets, *trie.child_codes, *trie.leaf_offsets, trie.item_offsets, trie.item_rows]
    assert [(a.device.type, a.shape, a.dtype) for a in arrays] == [("meta", a.shape, a.dtype) for a in originals]
    assert moved.device.type == "meta" and trie.device.type == "cpu"
    assert (moved.codebook_sizes, moved.num_codebooks) == (trie.codebook_sizes, trie.num_codebooks)
    assert moved._edge_keys == [None] * 3  # none kept on the old device


def test_repr_tells_items_sizes_and_nodes():
    trie = SIDTrie(torch.tensor([[0, 1], [2, 0], [0, 3], [0, 3]]), (3, 4))
    assert repr(trie) == "SIDTrie(items=4, codebook_sizes=(3, 4), nodes=2/3)"


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"shape \(items, 2\), one column per codebook, got \(3,\)"),
        (torch.zeros((3, 3), dtype=torch.long), r"got \(3, 3\)"),
        (torch.zeros((1, 3, 2), dtype=torch.long), r"got \(1, 3, 2\)"),
        (torch.zeros((3, 2)), "integers.*float32"),
        (torch.zeros((3, 2), dtype=torch.bool), "integers.*bool"),
        (torch.zeros((3, 2), dtype=torch.uint16), "integers.*uint16"),
        (torch.zeros((0, 2), dtype=torch.long), "empty"),
        (torch.tensor([[0, 0], [4, 2]]), r"level 1 must lie in 0\.\.3, got 0\.\.4"),
        (torch.tensor([[3, 0], [0, 5]]), r"level 2 must lie in 0\.\.4, got 0\.\.5"),
        (torch.tensor([[3, 0], [0, -1]]), r"level 2 must lie in 0\.\.4, got -1\.\.0"),
        (torch.tensor([[2**33, 0]]), "level 1"),
    ],
)
def test_bad_codes_are_named(codes, message):
    with pytest.raises(ValueError, match=message):
        check_codes(codes, (4, 5))
    with pytest.raises(ValueError, match=message):
        SIDTrie(codes, (4, 5))


def test_codes_at_both_ends_of_their_level_are_fine():
    check_codes(torch.tensor([[0, 0], [3, 4]]), (4, 5))


def test_child_penalties_leave_children_alone():
    trie = SIDTrie(torch.tensor([[0, 1], [2, 0], [0, 3], [2, 2]]), (3, 4))
    off = -torch.inf
    assert trie.child_penalties(0).tolist() == [[0, off, 0]]
    assert trie.child_penalties(1).tolist() == [[off, 0, off, 0], [0, off, 0, off]]
    assert [trie.most_children(level) for level in range(2)] == [2, 2]
    assert SIDTrie(torch.tensor([[0, 1], [2, 0], [2, 3], [2, 1]]), (3, 4)).most_children(1) == 3
