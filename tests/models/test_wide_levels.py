"""Wide levels: the children that can be kept, found among rows over all codes, against all of them listed."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_deco import SIDTrie
from hf_deco.models import beam_search_sid, wide_levels_sid
from hf_deco.models.beam_search_sid import BeamSearch
from hf_deco.models.scoring_sid import candidate_log_probs
from hf_deco.models.selection_sid import top_per_user
from hf_deco.models.wide_levels_sid import best_children, is_wide

NAN, INF = math.nan, math.inf
NORMALIZATIONS = ["children", "vocabulary"]


def listed(states, weight, trie, level, nodes, users, log_probs, number, normalize_over):
    """What `best_children` finds, from a list of all children."""
    parents, _, codes = trie.expand(level, nodes)
    scores = log_probs[parents] + candidate_log_probs(states, weight, parents, codes, normalize_over)
    best = top_per_user(scores, users[parents], int(users.max()) + 1, number).sort().values
    return parents[best], codes[best], scores[best]


def assert_same_children(found, expected):
    assert found[0].tolist() == expected[0].tolist() and found[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(found[2], expected[2], rtol=1e-6, atol=1e-5)


def random_trie(sizes, share, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor(list(itertools.product(*map(range, sizes))))
    kept = torch.rand(len(codes), generator=generator) < share
    kept[torch.randint(0, len(codes), (1,), generator=generator)] = True
    return SIDTrie(codes[kept], sizes)


@pytest.fixture
def always_wide(monkeypatch):
    monkeypatch.setattr(beam_search_sid, "is_wide", lambda *args: True)


@given(
    size=st.sampled_from([1, 2, 6, 7, 64, 96, 128]),
    share=st.sampled_from([0.05, 0.5, 1.0]),
    number=st.sampled_from([1, 3, 20, 500]),
    rows=st.integers(1, 12),
    normalize_over=st.sampled_from(NORMALIZATIONS),
    ties=st.booleans(),
    block=st.sampled_from([1, 200, 2**21]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_best_children_are_those_of_a_list_of_all(
    monkeypatch, size, share, number, rows, normalize_over, ties, block, seed
):
    generator = torch.Generator().manual_seed(seed)
    trie = random_trie((5, size), share, seed)
    nodes = torch.randint(0, trie.num_nodes(1), (rows,), generator=generator)
    users = torch.randint(0, 5, (rows,), generator=generator).sort().values
    states, weight = torch.randn(rows, 3, generator=generator), torch.randn(size, 3, generator=generator)
    log_probs = -torch.rand(rows, generator=generator)
    if ties:  # few different logits, exact ones; prefixes in pairs that are equal in all
        states, weight = states.round().clamp(-1, 1), weight.round().clamp(-1, 1)
        twins = torch.arange(rows) // 2 * 2
        nodes, states, log_probs = nodes[twins], states[twins], log_probs[twins]
    monkeypatch.setattr(wide_levels_sid, "_BLOCK", block)
    arguments = (states, weight, trie, 1, nodes, users, log_probs, number, normalize_over)
    assert_same_children(best_children(*arguments), listed(*arguments))


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
def test_prefixes_and_codes_of_no_probability_are_never_chosen(normalize_over):
    trie = SIDTrie(torch.tensor(list(itertools.product(range(3), range(4)))), (3, 4))
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    weight = torch.tensor([[1.0, 0.5], [-INF, -INF], [0.5, 2.0], [0.0, 0.0]]).nan_to_num(neginf=-1e38)
    log_probs = torch.tensor([-INF, -1.0, NAN])
    arguments = (states, weight, trie, 1, torch.arange(3), torch.zeros(3, dtype=torch.long), log_probs, 9)
    rows, codes, scores = best_children(*arguments, normalize_over)
    assert rows.tolist() == [1, 1, 1, 1] and codes.tolist() == [0, 1, 2, 3]
    assert_same_children((rows, codes, scores), listed(*arguments, normalize_over))


def test_nan_among_the_log_probabilities_is_left_to_the_list():
    trie = SIDTrie(torch.tensor([[0, 0], [0, 1], [1, 1], [1, 2]]), (2, 4))
    states, weight = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [NAN, 1.0]])
    arguments = (trie, 1, torch.arange(2), torch.arange(2), torch.zeros(2), 2, "children")
    assert best_children(states, weight, *arguments) is None  # the code that nothing uses
    weight[3] = 0
    assert best_children(states, weight, *arguments) is not None
    states[1] = NAN
    assert best_children(states, weight, *arguments) is None


def test_levels_are_wide_where_a_share_of_all_codes_are_children(monkeypatch):
    # Node 0 of level 1 has 10 children of 100 codes, node 1 has one.
    trie = SIDTrie(torch.tensor([[0, code] for code in range(10)] + [[1, 7]]), (2, 100))
    assert is_wide(trie, 1, torch.tensor([0]))
    assert is_wide(trie, 1, torch.tensor([0, 1]))  # 11 of 200
    assert not is_wide(trie, 1, torch.tensor([0, 1, 1]))  # 12 of 300
    assert not is_wide(trie, 1, torch.tensor([1]))
    monkeypatch.setattr(wide_levels_sid, "_MOST_PENALTIES", 199)
    assert not is_wide(trie, 1, torch.tensor([0]))
    sparse = SIDTrie(torch.tensor([[0, 1], [0, 2], [1, 7]]), (2, 100))
    assert not is_wide(sparse, 1, torch.tensor([0]))


SHAPES = [("children", True, 20), ("children", True, 2), ("children", False, 20), ("vocabulary", False, 20)]


@torch.no_grad()
@pytest.mark.parametrize(("normalize_over", "skip", "number"), SHAPES)
@pytest.mark.parametrize("kind", ["deco", "backbone"])
@pytest.mark.parametrize(("sizes", "num_items"), [((6, 16, 8), 500), ((20, 9, 4), 60), ((3, 7), 21)])
def test_a_search_finds_the_same_on_either_way(
    make_model, make_histories, monkeypatch, sizes, num_items, kind, normalize_over, skip, number
):
    model = make_model(sizes, num_items, kind=kind, normalize_over=normalize_over)
    inputs = make_histories(model, [3, 0, 6, 1])
    options = {"num_beams": 20, "num_return_sequences": number, "skip_forced_levels": skip}
    calls, real = [], beam_search_sid.best_children
    monkeypatch.setattr(beam_search_sid, "best_children", lambda *args: calls.append(1) or real(*args))
    outputs = []
    for wide in (False, True):
        monkeypatch.setattr(beam_search_sid, "is_wide", lambda *args, wide=wide: wide)
        outputs.append(model.generate(*inputs, return_dict_in_generate=True, **options))
        assert bool(calls) == wide
    expected, found = outputs
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.item_rows.tolist() == expected.item_rows.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-6, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("options", [
    {"exclude_seen": True}, {"deny_rows": list(range(0, 500, 3))}, {"deny_rows": [[1, 2, 3], [], list(range(60)), [7]]},
    {"deny_rows": list(range(0, 500, 2)), "exclude_seen": True}, {"allow_rows": list(range(0, 500, 7))},
])  # fmt: skip
@pytest.mark.parametrize("number", [20, 2])
@pytest.mark.parametrize("sizes", [(6, 16, 8), (30, 40)])
def test_a_filter_takes_the_same_out_on_either_way(make_model, make_histories, monkeypatch, sizes, number, options):
    model = make_model(sizes, 500)
    inputs = make_histories(model, [9, 0, 6, 1])
    outputs = []
    for wide in (False, True):
        monkeypatch.setattr(beam_search_sid, "is_wide", lambda *args, wide=wide: wide)
        found = model.generate(
            *inputs, num_beams=20, num_return_sequences=number, return_dict_in_generate=True, **options
        )
        outputs.append(found)
    expected, found = outputs
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.item_rows.tolist() == expected.item_rows.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-6, atol=1e-5)


@torch.no_grad()
def test_what_a_filter_takes_out_is_replaced_by_what_comes_next(make_model, make_histories, monkeypatch, always_wide):
    asked, real = [], beam_search_sid.best_children
    monkeypatch.setattr(beam_search_sid, "best_children", lambda *args: asked.append(args[7]) or real(*args))
    model = make_model((6, 8), 48)  # all SIDs
    inputs = make_histories(model, [3, 1])

    def widths(**options):
        asked.clear()
        model.generate(*inputs, num_beams=10, **options)
        return list(asked)

    assert widths() == [10]
    assert widths(deny_rows=[3, 4, 4]) == [12]
    assert widths(deny_rows=[[3, 4, 5], [6, -1, -1]]) == [13]
    assert widths(deny_rows=list(range(40))) == [50]
    assert widths(deny_rows=list(range(41))) == []  # more than four times as many as are kept
    assert widths(allow_rows=[3, 4]) == []
    pointing = make_model((6, 8), 48, copy_pointer=True)
    pointing.generate(*inputs, num_beams=10)
    assert asked == []


@torch.no_grad()
def test_equal_scores_are_kept_in_the_order_of_beams_and_codes(always_wide):
    class Uniform:
        def start(self):
            return beam_search_sid.PrefixStates(torch.zeros((1, 1)), torch.zeros(1, dtype=torch.long), [], [])

        def advance(self, states, rows, codes, level):
            return states.select(rows)

        def head(self, level):
            return torch.zeros((4, 1))

    trie = SIDTrie(torch.tensor(list(itertools.product(range(4), range(4)))), (4, 4))
    beams = BeamSearch(Uniform(), trie, [4, 10]).run()
    assert beams.codes.tolist() == [[0, code] for code in range(4)] + [[1, code] for code in range(4)] + [
        [2, 0],
        [2, 1],
    ]
