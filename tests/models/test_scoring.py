import pytest
import torch

from hf_deco import SIDTrie
from hf_deco.models import scoring_sid
from hf_deco.models.scoring_sid import candidate_log_probs, gold_log_probs, segment_log_softmax

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


def naive_gold(states, weight, trie, level, nodes, children, normalize_over):
    result = []
    for row, (node, child) in enumerate(zip(nodes.tolist(), children.tolist(), strict=True)):
        numbers, codes = trie.children(level, node)
        place = numbers.tolist().index(child)
        logits = weight @ states[row]
        over = logits if normalize_over == "vocabulary" else logits[codes]
        result.append(over.log_softmax(0)[codes[place] if normalize_over == "vocabulary" else place])
    return torch.stack(result)


@pytest.mark.parametrize("normalize_over", ["children", "vocabulary"])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("all_roots", [True, False])
def test_gold_log_probs_equal_a_softmax_per_row(make_codes, normalize_over, level, all_roots):
    codes = make_codes(SIZES, 60)
    codes = codes if all_roots else codes[(codes[:, 0] != 0) & (codes[:, 0] != 3)]  # level 1 then leaves codes unused
    trie = SIDTrie(codes, SIZES)
    assert (trie.num_nodes(1) == SIZES[0]) == all_roots
    paths = trie.node_paths(codes[torch.randint(0, len(codes), (9,), generator=torch.Generator().manual_seed(2))])
    nodes, children = torch.nn.functional.pad(paths, (1, 0))[:, level], paths[:, level]
    states, weight = tensors(9, SIZES[level])
    got = gold_log_probs(states, weight, trie, level, nodes, children, normalize_over)
    expected = naive_gold(states, weight, trie, level, nodes, children, normalize_over)
    assert got.shape == (9,)
    assert_equal_with_gradients(got, expected, [states, weight])
