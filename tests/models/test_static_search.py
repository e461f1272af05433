"""Prefill and search of fixed shapes against those of shapes as they come."""

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_deco import SIDTrie
from hf_deco.models.beam_search_sid import BeamSearch, PrefixStates
from hf_deco.models.scoring_sid import candidate_log_probs
from hf_deco.models.selection_sid import top_cells, top_per_user
from hf_deco.models.static_search_sid import (
    is_static,
    padded_children,
    read_concepts,
    search_concepts,
    static_search,
)

NAN, INF = torch.nan, torch.inf
NORMALIZATIONS = ["children", "vocabulary"]
SHAPES = [((7,), 6), ((5, 4), 12), ((5, 1, 6), 17), ((3, 4, 2, 5), 40), ((6, 16, 8), 500)]


def random_states(rows, width, seed=0):
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed))


def as_lists(beams, num_users):
    """`[[(SID, node)]]` and `[[score]]` of every user, of either kind of beams."""
    if beams.nodes.dim() == 2:
        users = torch.arange(num_users).unsqueeze(1).expand_as(beams.nodes)[beams.scores > -INF]
        nodes, codes, scores = (getattr(beams, name)[beams.scores > -INF] for name in ("nodes", "codes", "scores"))
    else:
        users, nodes, codes, scores = beams.users, beams.nodes, beams.codes, beams.scores
    found, given = [[] for _ in range(num_users)], [[] for _ in range(num_users)]
    for user, node, sid, score in zip(users.tolist(), nodes.tolist(), codes.tolist(), scores.tolist(), strict=True):
        found[user].append((sid, node))
        given[user].append(score)
    return found, given


@pytest.mark.parametrize("number", [1, 3, 7])
def test_the_best_cells_of_a_row_are_the_best_scores_of_a_user(number):
    scores = torch.tensor([[-1.0, NAN, 0.0, -1.0, -INF, -0.0], [-2.0, -INF, NAN, -INF, -3.0, -2.0]])
    places, alive = top_cells(scores, number)
    assert places.shape == alive.shape == (2, min(number, 6))
    expected = top_per_user(scores.flatten(), torch.arange(2).repeat_interleave(6), 2, number)
    assert places[alive].tolist() == expected.tolist()
    assert alive.sum(1).tolist() == [min(number, 4), min(number, 3)]


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
def test_children_are_padded_to_the_node_with_most(normalize_over):
    trie = SIDTrie(torch.tensor([[0, 1], [0, 3], [0, 4], [1, 2], [2, 0], [2, 4]]), (3, 5))
    states, weight, nodes = random_states(4, 3), random_states(5, 3, 1), torch.tensor([2, 0, 1, 0])
    children, codes, log_probs = padded_children(states, weight, trie, 1, nodes, normalize_over)
    exists = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool()
    parents, expected_children, expected_codes = trie.expand(1, nodes)
    assert children[exists].tolist() == expected_children.tolist()
    assert codes[exists].tolist() == expected_codes.tolist()
    expected = candidate_log_probs(states, weight, parents, expected_codes, normalize_over)
    torch.testing.assert_close(log_probs[exists], expected)
    assert (log_probs[~exists] == -INF).all()


@torch.no_grad()
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("widths", [4, 30, "rising"])
@pytest.mark.parametrize(("sizes", "num_items"), SHAPES)
def test_a_search_of_fixed_shapes_finds_the_same(make_model, make_histories, sizes, num_items, widths, normalize_over):
    model = make_model(sizes, num_items, normalize_over=normalize_over)
    widths = [2 + 5 * level for level in range(len(sizes))] if widths == "rising" else [widths] * len(sizes)
    concepts = model.encode_concepts(*make_histories(model, [4, 0, 2, 9]))
    scorer, _ = model._start_search(None, None, concepts, None, model.trie)
    expected, expected_scores = as_lists(
        BeamSearch(scorer, model.trie, widths, normalize_over=normalize_over).run(), num_users=4
    )
    found = search_concepts(model, concepts, widths, model.trie)
    assert found.codes.shape == (*found.nodes.shape, len(sizes)) and found.nodes.shape[1] <= widths[-1]
    sids, scores = as_lists(found, num_users=4)
    assert sids == expected
    for got, wanted in zip(scores, expected_scores, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_user_with_nan_concepts_has_dead_beams_and_disturbs_nobody(make_model, make_histories):
    model = make_model((5, 4, 6), 30)
    concepts = model.encode_concepts(*make_histories(model, [2, 1, 3]))
    expected = search_concepts(model, concepts, [8] * 3, model.trie)
    concepts[1] = NAN
    found = search_concepts(model, concepts, [8] * 3, model.trie)
    assert (found.scores[1] == -INF).all()
    assert found.codes[[0, 2]].tolist() == expected.codes[[0, 2]].tolist()
    torch.testing.assert_close(found.scores[[0, 2]], expected.scores[[0, 2]])


def test_equal_scores_come_in_the_order_of_prefixes_and_codes():
    class Uniform:
        def start(self):
            return PrefixStates(torch.zeros((2, 1)), torch.arange(2), [], [])

        def advance(self, states, rows, codes, level):
            return states.select(rows)

        def head(self, level):
            return torch.zeros((4, 1))

    trie = SIDTrie(torch.tensor(list(itertools.product(range(4), range(4)))), (4, 4))
    beams = static_search(Uniform(), trie, [4, 10], "children")
    assert beams.codes.tolist() == [list(map(list, itertools.product(range(4), range(4))))[:10]] * 2
    assert as_lists(beams, 2)[0] == as_lists(BeamSearch(Uniform(), trie, [4, 10]).run(), 2)[0]


@torch.no_grad()
@pytest.mark.parametrize("history_format", ["fused", "flat"])
@pytest.mark.parametrize("width", [5, 8])
def test_concepts_of_padded_histories_are_those_of_histories_alone(make_model, make_histories, history_format, width):
    model = make_model((5, 4, 6), 30, history_format=history_format)
    lengths = torch.tensor([3, 0, 5, 1])
    item_codes, mask = make_histories(model, lengths.tolist(), width=width)
    expected = model.encode_concepts(item_codes, mask)
    on_the_right = torch.full_like(item_codes, 2)  # what padding holds does not count
    for user, length in enumerate(lengths.tolist()):
        on_the_right[user, :length] = item_codes[user, width - length :]
    torch.testing.assert_close(read_concepts(model, on_the_right, lengths), expected, rtol=1e-5, atol=1e-5)


def test_models_whose_search_needs_more_than_concepts_are_not_static(make_model):
    assert is_static(make_model().eval())
    assert not is_static(make_model().train())
    assert not is_static(make_model(copy_pointer=True))
    assert not is_static(make_model(decoder_input="item_states_prefix"))
    assert not is_static(make_model(kind="backbone"))
    assert not is_static(make_model(catalog=False, content_size=3))
    llama = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert not is_static(make_model(text_config=llama)) and not is_static(make_model(decoder_config=llama))


@pytest.mark.parametrize("history_format", ["fused", "flat"])
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
def test_nothing_depends_on_what_the_device_holds(make_model, make_histories, normalize_over, history_format):
    # Traced on tensors without contents: what reads one, or has a shape that it tells, fails.
    model = make_model((5, 4, 6), 30, normalize_over=normalize_over, history_format=history_format)
    item_codes, mask = make_histories(model, [4, 2, 1])
    inputs = item_codes.flip(1), mask.sum(1)

    @torch.no_grad()
    def retrieve(item_codes, lengths):
        beams = search_concepts(model, read_concepts(model, item_codes, lengths), [8, 6, 10], model.trie)
        return beams.codes, beams.nodes, beams.scores

    expected = retrieve(*inputs)  # the trie counts what it is asked for once
    traced = make_fx(retrieve, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    operations = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert "aten.topk.default" in operations
    assert not [name for name in operations if "_local_scalar_dense" in name or "lift_fresh" in name]
    for found, wanted in zip(traced(*inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted)
