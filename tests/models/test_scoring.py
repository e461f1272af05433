import pytest
import torch

from hf_deco import SIDTrie
from hf_deco.models import scoring_sid
from hf_deco.models.scoring_sid import (
    Targets,
    candidate_log_probs,
    gold_log_probs,
    score_level,
    segment_log_softmax,
)

SIZES = (6, 4, 7)


def tensors(rows, size, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn((rows, width), generator=generator).requires_grad_()
    weight = torch.randn((size, width), generator=generator).requires_grad_()
    return states, weight


def gradients(values, inputs, seed=1):
    cotangent = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad(values, inputs, cotangent)


def assert_equal_with_gradients(got, expected, inputs):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def trie(make_codes):
    return SIDTrie(make_codes(SIZES, 40), SIZES)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_segment_log_softmax_is_a_log_softmax_per_segment(scale):
    logits = (torch.randn(20, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
    segments = torch.tensor(
        [3, 0, 0, 2, 3, 3, 0, 2, 2, 2, 0, 5, 3, 3, 0, 0, 2, 3, 3, 0]
    )  # in any order; 1 and 4 are empty
    expected = torch.zeros(20)
    for segment in (0, 2, 3, 5):
        members = torch.nonzero(segments == segment).squeeze(1)
        expected = expected.index_put((members,), logits[members].log_softmax(0))
    assert_equal_with_gradients(segment_log_softmax(logits, segments, 6), expected, [logits])
    assert segment_log_softmax(logits, segments, 6)[11] == 0  # alone in its segment


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("branch", ["full head", "sparse"])
def test_children_log_probs_equal_a_softmax_over_the_children_of_each_prefix(trie, monkeypatch, level, branch):
    monkeypatch.setattr(scoring_sid, "_GATHER_COST", 10**9 if branch == "full head" else 0)
    products = []
    monkeypatch.setattr(
        scoring_sid.F, "linear", lambda a, b, real=torch.nn.functional.linear: products.append(1) or real(a, b)
    )
    nodes = torch.tensor([3, 0, 3, 1, 5])
    states, weight = tensors(len(nodes), SIZES[level])
    parents, _, codes = trie.expand(level, nodes)
    got = candidate_log_probs(states, weight, parents, codes, "children")
    assert len(products) == (branch == "full head")
    expected = [
        (weight[trie.children(level, node)[1]] @ states[row]).log_softmax(0) for row, node in enumerate(nodes.tolist())
    ]
    assert_equal_with_gradients(got, torch.cat(expected), [states, weight])


def test_vocabulary_log_probs_equal_a_softmax_over_all_codes_of_the_level(trie):
    nodes = torch.tensor([3, 0, 3, 1, 5])
    states, weight = tensors(len(nodes), SIZES[1])
    parents, _, codes = trie.expand(1, nodes)
    expected = torch.stack(
        [(weight @ states[row]).log_softmax(0)[code] for row, code in zip(parents.tolist(), codes, strict=True)]
    )
    assert_equal_with_gradients(
        candidate_log_probs(states, weight, parents, codes, "vocabulary"), expected, [states, weight]
    )


@pytest.mark.parametrize("branch", ["full head", "sparse"])
def test_half_precision_states_give_float32_log_probs(trie, monkeypatch, branch):
    monkeypatch.setattr(scoring_sid, "_GATHER_COST", 10**9 if branch == "full head" else 0)
    states, weight = (tensor.detach().bfloat16() for tensor in tensors(3, SIZES[1]))
    parents, _, codes = trie.expand(1, torch.tensor([0, 2, 4]))
    for normalize_over in ("children", "vocabulary"):
        log_probs = candidate_log_probs(states, weight, parents, codes, normalize_over)
        expected = candidate_log_probs(states.float(), weight.float(), parents, codes, normalize_over)
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs, expected, rtol=0.05, atol=0.05)


def naive_level(states, weight, trie, level, nodes, normalize_over):
    """For every row, log-probabilities of the children of its node."""
    result = []
    for row, node in enumerate(nodes.tolist()):
        codes, logits = trie.children(level, node)[1], weight @ states[row]
        result.append(logits.log_softmax(0)[codes] if normalize_over == "vocabulary" else logits[codes].log_softmax(0))
    return result


def make_targets(trie, codes, normalize_over, number=9):
    chosen = codes[torch.randint(0, len(codes), (number,), generator=torch.Generator().manual_seed(2))].long()
    users = torch.arange(number)
    return Targets.locate(users, torch.zeros_like(users), chosen, trie, normalize_over)


@pytest.fixture
def make_trie(make_codes):
    def make(all_roots):
        codes = make_codes(SIZES, 60)
        codes = codes if all_roots else codes[(codes[:, 0] != 0) & (codes[:, 0] != 3)]  # level 1 leaves codes unused
        trie = SIDTrie(codes, SIZES)
        assert (trie.num_nodes(1) == SIZES[0]) == all_roots
        return trie, codes

    return make


@pytest.mark.parametrize("normalize_over", ["children", "vocabulary"])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("all_roots", [True, False])
def test_level_scores_equal_a_softmax_per_row(make_trie, normalize_over, level, all_roots):
    trie, codes = make_trie(all_roots)
    targets = make_targets(trie, codes, normalize_over)
    rows = torch.tensor([7, 0, 3, 2, 8])
    nodes = targets.nodes[rows, level]
    states, weight = tensors(5, SIZES[level])
    scores = score_level(states, weight, trie, level, rows, targets, normalize_over)
    expected = naive_level(states, weight, trie, level, nodes, normalize_over)
    assert_equal_with_gradients(scores.log_probs, torch.cat(expected), [states, weight])

    counts = [len(part) for part in expected]
    assert scores.starts.tolist() == [sum(counts[:row]) for row in range(5)]
    places = [
        trie.children(level, node)[1].tolist().index(code)
        for node, code in zip(nodes.tolist(), targets.codes[rows, level].tolist(), strict=True)
    ]
    assert (scores.gold - scores.starts).tolist() == places
    assert scores.locate(torch.arange(5), targets.paths[rows, level]).tolist() == scores.gold.tolist()
    values = torch.randn(5, generator=torch.Generator().manual_seed(1))
    assert scores.spread(values).tolist() == [
        value for value, count in zip(values.tolist(), counts, strict=True) for _ in range(count)
    ]
    flat = torch.randn(sum(counts), generator=torch.Generator().manual_seed(3))
    parts = flat.split(counts)
    torch.testing.assert_close(scores.normalized(flat), torch.cat([part.log_softmax(0) for part in parts]))


@pytest.mark.parametrize("normalize_over", ["children", "vocabulary"])
@pytest.mark.parametrize("all_roots", [True, False])
def test_gold_log_probs_equal_a_softmax_per_row_and_are_zero_where_not_scored(make_trie, normalize_over, all_roots):
    trie, codes = make_trie(all_roots)
    targets = make_targets(trie, codes, normalize_over)
    levels, expected, inputs = [], torch.zeros((9, 3)), []
    for level in range(3):
        rows = torch.tensor([[8, 0, 1, 2, 3, 4, 5, 6, 7], [4, 1, 8], []][level], dtype=torch.long)
        if not rows.numel():
            continue
        states, weight = tensors(len(rows), SIZES[level], seed=level)
        inputs += [states, weight]
        levels.append(score_level(states, weight, trie, level, rows, targets, normalize_over))
        log_probs = naive_level(states, weight, trie, level, targets.nodes[rows, level], normalize_over)
        for row, part in zip(rows.tolist(), log_probs, strict=True):
            place = trie.children(level, int(targets.nodes[row, level]))[1].tolist().index(targets.codes[row, level])
            expected = expected.index_put((torch.tensor(row), torch.tensor(level)), part[place])
    assert_equal_with_gradients(gold_log_probs(levels, targets), expected, inputs)


def test_targets_know_where_they_branch(make_codes):
    trie = SIDTrie(torch.tensor([[0, 0, 0], [0, 1, 0], [0, 1, 2], [3, 2, 2], [5, 2, 1], [5, 2, 3]]), SIZES)
    codes = torch.tensor([[0, 1, 2], [3, 2, 2], [5, 2, 3], [0, 0, 0]])
    users = torch.arange(4)
    children = Targets.locate(users, users, codes, trie, "children")
    assert children.branching.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0]]
    assert children.depth.tolist() == [3, 1, 3, 2] and len(children) == 4
    assert children.at(1).tolist() == [0, 3] and children.at(2).tolist() == [0, 2]
    assert children.nodes[:, 1:].tolist() == children.paths[:, :-1].tolist() and children.nodes[:, 0].sum() == 0
    everything = Targets.locate(users, users, codes, trie, "vocabulary")
    assert everything.branching.all() and everything.depth.tolist() == [3] * 4
    with pytest.raises(ValueError, match=r"1 SIDs that are not in the catalog, such as \[5, 2, 2\]"):
        Targets.locate(users[:2], users[:2], torch.tensor([[5, 2, 1], [5, 2, 2]]), trie, "children")
