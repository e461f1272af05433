"""The beam search itself: what it reads, in which order, and that reading less finds the same."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_deco import SIDTrie
from hf_deco.models.beam_search_sid import BeamSearch, Candidates, PrefixStates

MODELS = [("deco", "fused"), ("deco", "flat"), ("backbone", "fused"), ("backbone", "flat")]
NAN, INF = math.nan, math.inf


class TableScorer:
    """Scores by a table: `weights(user, prefix)` lists a weight for every code; notes which prefixes are read."""

    def __init__(self, weights, size, num_users=1):
        self.weights, self.size, self.num_users, self.calls = weights, size, num_users, []

    def start(self):
        users = torch.arange(self.num_users)
        return self.states(users, torch.zeros((self.num_users, 0), dtype=torch.long))

    def advance(self, states, rows, codes, level):
        states = states.select(rows)
        prefixes = torch.cat([states.keys[0], codes.unsqueeze(1)], 1)
        assert prefixes.shape[1] == level + 1 and (states.users.diff() >= 0).all()
        self.calls.append(list(zip(states.users.tolist(), map(tuple, prefixes.tolist()), strict=True)))
        return self.states(states.users, prefixes)

    def states(self, users, prefixes):
        rows = [
            self.weights(user, tuple(prefix)) for user, prefix in zip(users.tolist(), prefixes.tolist(), strict=True)
        ]
        hidden = torch.tensor(rows, dtype=torch.float32).view(len(users), self.size).log()
        return PrefixStates(hidden.clamp(min=-1e4), users, [prefixes], [prefixes + 1])

    def head(self, level):
        return torch.eye(self.size)


def complete(*sizes):
    """Every SID of so many codes a level, in codebooks as large as the largest of them."""
    codes = torch.tensor(list(itertools.product(*map(range, sizes))))
    return SIDTrie(codes, [max(sizes)] * len(sizes))


def found_by(beams):
    """`[(user, SID, probability)]` in the order found."""
    rows = zip(beams.users.tolist(), map(tuple, beams.codes.tolist()), beams.scores.exp().tolist(), strict=True)
    return list(rows)


def test_the_likeliest_prefixes_are_read_first_and_no_others_where_they_cannot_win():
    first = [4, 30, 5, 20, 2, 6, 8, 25]  # of 100; prefixes 1 and 7 are the likeliest
    scorer = TableScorer(lambda user, prefix: [3, 1] + [0] * 6 if prefix else first, 8)
    found = found_by(BeamSearch(scorer, complete(8, 2), [8, 8], num_results=1).run())
    assert scorer.calls == [[(0, (1,)), (0, (7,))]]  # the best SID has 0.225: no other prefix has as much
    assert found[0][:2] == (0, (1, 0)) and found[0][2] == pytest.approx(0.3 * 0.75)


def test_other_prefixes_are_read_where_they_still_can_win():
    first = [4, 30, 5, 20, 2, 6, 8, 25]
    # Spread evenly over five children the likeliest prefixes leave 0.06: prefixes 3, 6 and 5 may hold more.
    weights = {(6,): [1, 0, 0, 0, 0, 0, 0, 0], (3,): [1] * 8}
    scorer = TableScorer(lambda user, prefix: weights.get(prefix, [1] * 8) if prefix else first, 8)
    found = found_by(BeamSearch(scorer, complete(8, 5), [8, 8], num_results=1).run())
    assert scorer.calls == [[(0, (1,)), (0, (7,))], [(0, (3,)), (0, (6,)), (0, (5,))]]
    assert found[0][:2] == (0, (6, 0)) and found[0][2] == pytest.approx(0.08)


def test_every_user_has_a_bound_of_its_own():
    # User 0 is decided by the first wave, user 1 has but two prefixes, user 2 needs the second wave.
    first = [[70, 10, 5, 4, 3, 3, 3, 2], [60, 40] + [0] * 6, [13, 13, 13, 13, 12, 12, 12, 12]]
    scorer = TableScorer(lambda user, prefix: first[user] if not prefix else [1] * 8, 8, num_users=3)
    beams = BeamSearch(scorer, complete(8, 2), [8, 8], num_results=2).run()
    read = [[sum(user == other for other, _ in call) for user in range(3)] for call in scorer.calls]
    assert read[0] == [4, 4, 4] and len(read) == 2
    assert read[1][:2] == [0, 0] and read[1][2] == 4
    for user in range(3):
        best = [probability for owner, _, probability in found_by(beams) if owner == user][:2]
        assert best == pytest.approx([first[user][0] / 200] * 2, rel=1e-4)


def test_a_prefix_with_one_sid_left_bounds_the_others_before_anything_is_read():
    catalog = [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1], [4, 0], [5, 2]]
    scorer = TableScorer(lambda user, prefix: [1] * 6 if prefix else [60, 20, 9, 5, 4, 2], 6)
    trie = SIDTrie(torch.tensor(catalog), (6, 6))
    found = found_by(BeamSearch(scorer, trie, [6, 6], num_results=1).run())
    assert scorer.calls == [] and found[0][:2] == (0, (0, 0)) and found[0][2] == pytest.approx(0.6)
    # Two are wanted: (1, 0) has 0.1, more than (4, 0) with 0.04; prefix 2 may not reach it.
    found = found_by(BeamSearch(scorer, trie, [8, 8], num_results=2).run())
    assert scorer.calls == [[(0, (1,)), (0, (2,)), (0, (3,))]]
    assert [sid for _, sid, _ in found[:1]] == [(0, 0)] and {sid for _, sid, _ in found[1:3]} == {(1, 0), (1, 1)}


@pytest.mark.parametrize("options", [{"normalize_over": "vocabulary"}, {"skip_forced_levels": False}])
def test_without_skipping_every_beam_is_read_at_once(options):
    scorer = TableScorer(lambda user, prefix: [1] * 6 if prefix else [60, 20, 9, 5, 4, 2], 6, num_users=2)
    BeamSearch(scorer, complete(6, 6, 1), [6, 20, 6], num_results=1, **options).run()
    assert [len(call) for call in scorer.calls] == [2 * 6, 2 * 20]


@pytest.mark.parametrize("number", [2, 6])
def test_beams_of_few_results_more_are_read_at_once(number):
    # A first wave of 4 is more than half of a beam of 6.
    scorer = TableScorer(lambda user, prefix: [1] * 6 if prefix else [60, 20, 9, 5, 4, 2], 6)
    BeamSearch(scorer, complete(6, 6), [6, 6], num_results=number).run()
    assert [len(call) for call in scorer.calls] == [6]


@pytest.mark.parametrize("number", [1, 3, 16])
def test_equal_scores_lose_no_result(number):
    scorer = TableScorer(lambda user, prefix: [1] * 4, 4, num_users=2)
    found = found_by(BeamSearch(scorer, complete(4, 4, 4), [16] * 3, num_results=number).run())
    for user in range(2):
        best = [entry for entry in found if entry[0] == user][:number]
        assert len({sid for _, sid, _ in best}) == number
        assert [probability for *_, probability in best] == pytest.approx([1 / 64] * number)


def test_states_of_both_waves_reach_the_next_level():
    # Prefix (3, .) is read in the second wave, and its third code is as sure as its second is not.
    def weights(user, prefix):
        sure = [97, 1, 1, 1]
        return [[26, 25.5, 24.5, 24], [1] * 4, sure if prefix[:1] == (3,) else [1] * 4][len(prefix)]

    scorer = TableScorer(weights, 4)
    found = found_by(BeamSearch(scorer, complete(4, 4, 4), [4, 16, 16], num_results=1).run())
    assert [len(call) for call in scorer.calls][:2] == [2, 2]
    assert found[0][1][0] == 3 and found[0][2] == pytest.approx(0.24 * 0.25 * 0.97, rel=1e-4)


class CountedReads:
    """The number of prefixes that the searches of a model read."""

    def __init__(self, model):
        self.number, start = 0, model._start_search

        def counted(*args):
            scorer, copies = start(*args)
            advance = scorer.advance

            def count(states, rows, codes, level):
                self.number += len(rows)
                return advance(states, rows, codes, level)

            scorer.advance = count
            return scorer, copies

        model._start_search = counted

    def of(self, call, *args, **kwargs):
        self.number = 0
        return call(*args, return_dict_in_generate=True, **kwargs), self.number


def assert_best_of(few, full, number, width, num_users):
    """`few` holds the first `number` of `full`'s `width` results; where scores are near, in any order."""
    scores, expected = few.sequences_scores.view(num_users, number), full.sequences_scores.view(num_users, width)
    torch.testing.assert_close(scores, expected[:, :number], rtol=1e-5, atol=1e-4)
    rows, expected_rows = few.item_rows.view(num_users, number), full.item_rows.view(num_users, width)
    for user in range(num_users):
        assert len(set(rows[user][rows[user] >= 0].tolist())) == int((rows[user] >= 0).sum())
        for row, score in zip(rows[user].tolist(), scores[user], strict=True):
            near = (expected[user] - score).abs() < 2e-4
            assert row in expected_rows[user][near | (expected[user] == score)].tolist()


@st.composite
def searches(draw):
    sizes = draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    number = draw(st.integers(1, 4))
    widths = draw(st.lists(st.integers(1, 40), min_size=len(sizes), max_size=len(sizes)))
    widths[0], widths[-1] = max(widths[0], 4 * number), max(widths[-1], number)
    return SimpleNamespace(
        sizes=sizes,
        num_items=draw(st.integers(1, 120)),
        widths=widths,
        number=number,
        kind=draw(st.sampled_from(MODELS)),
        pointer=draw(st.sampled_from([None, -2.0, 4.0])),  # bias of its gate
        peak=draw(st.sampled_from([1.0, 4.0])),
        denied=draw(st.lists(st.floats(0, 1, exclude_max=True), max_size=30)),
        exclude_seen=draw(st.booleans()),
        lengths=draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)),
        seed=draw(st.integers(0, 99)),
    )


def test_few_results_are_the_first_of_many_for_less_work(make_model, make_histories):
    saved = []

    @torch.no_grad()
    @settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=searches())
    def check(case):
        generator = torch.Generator().manual_seed(case.seed)
        draws = [torch.randint(0, size, (case.num_items,), generator=generator) for size in case.sizes]
        model = make_model(
            tuple(case.sizes), catalog=torch.stack(draws, 1), kind=case.kind[0], history_format=case.kind[1],
            copy_pointer=case.pointer is not None, seed=case.seed,
        )  # fmt: skip
        for head in model.heads:
            head.weight.mul_(case.peak)
        if case.pointer is not None:
            model.pointer.gate_proj.bias.fill_(case.pointer)
        reads, inputs = CountedReads(model), make_histories(model, case.lengths, case.seed)
        options = {"num_beams": case.widths, "exclude_seen": case.exclude_seen}
        options["deny_rows"] = [int(part * case.num_items) for part in case.denied]
        width = case.widths[-1]
        full, many = reads.of(model.generate, *inputs, num_return_sequences=width, **options)
        few, fewer = reads.of(model.generate, *inputs, num_return_sequences=case.number, **options)
        assert_best_of(few, full, case.number, width, len(case.lengths))
        assert fewer <= many
        saved.append((many - fewer) / max(1, many))

    check()
    assert sum(part > 0.1 for part in saved) >= 10  # it was no comparison of a search with itself


@torch.no_grad()
@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_sure_model_reads_a_small_part_of_its_beam(make_model, make_histories, kind, copy_pointer):
    model = make_model(
        (12, 8, 8), 500, kind=kind[0], history_format=kind[1], copy_pointer=copy_pointer, normalize_over="children"
    )
    for head in model.heads:
        head.weight.mul_(4)
    reads, inputs = CountedReads(model), make_histories(model, [3, 0, 6, 1])
    full, many = reads.of(model.generate, *inputs, num_beams=40, num_return_sequences=40)
    few, fewer = reads.of(model.generate, *inputs, num_beams=40, num_return_sequences=3)
    assert_best_of(few, full, 3, 40, 4)
    assert 0 < fewer < many / 2
    unskipped, most = reads.of(model.generate, *inputs, num_beams=40, num_return_sequences=3, skip_forced_levels=False)
    assert_best_of(unskipped, full, 3, 40, 4)
    assert most == 4 * (12 + 40) >= many


@torch.no_grad()
@pytest.mark.parametrize("number", [1, 2, 4])
def test_prefixes_that_score_nan_hide_no_other_result(make_model, make_histories, number):
    model = make_model((6, 5, 4), 60)
    model.decoder.tables[0].weight[[0, 3]] = NAN
    inputs = make_histories(model, [4, 0, 2])
    options = {"num_beams": 20, "return_dict_in_generate": True}
    full = model.generate(*inputs, num_return_sequences=20, **options)
    few = model.generate(*inputs, num_return_sequences=number, **options)
    assert (full.item_rows.view(3, 20)[:, :4] >= 0).all()
    assert_best_of(few, full, number, 20, 3)
    assert not {0, 3} & {code for code, *_ in few.sequences.tolist()}


def test_states_are_selected_and_joined_row_by_row():
    def states(*rows):
        rows = torch.tensor(rows)
        layers = [rows[:, None, None] * torch.ones(1, 2, 3) + layer for layer in (0.5, 0.25)]
        return PrefixStates(rows[:, None].float(), rows + 10, layers, [-layer for layer in layers])

    def assert_rows(found, *rows):
        expected = states(*rows)
        assert torch.equal(found.hidden, expected.hidden) and torch.equal(found.users, expected.users)
        for ours, theirs in zip(found.keys + found.values, expected.keys + expected.values, strict=True):
            assert torch.equal(ours, theirs)

    assert_rows(states(1, 2, 3).select(torch.tensor([2, 0, 0])), 3, 1, 1)
    assert_rows(PrefixStates.join([states(1, 2), states(3), states(4, 5)]), 1, 2, 3, 4, 5)
    assert_rows(PrefixStates.join([states(1, 2)]), 1, 2)
    bare = PrefixStates(torch.ones(1, 2), torch.tensor([0]), [], [])
    joined = PrefixStates.join([bare, bare])
    assert joined.hidden.shape == (2, 2) and joined.keys == joined.values == []


def test_joined_candidates_are_by_beam_and_keep_the_order_of_children():
    def candidates(beams, nodes):
        nodes = torch.tensor(nodes)
        return Candidates(torch.tensor(beams), nodes, nodes + 100, nodes / 2, -nodes.float())

    joined = Candidates.join(
        [candidates([1, 1, 4], [0, 1, 2]), candidates([0, 3, 3, 3], [3, 4, 5, 6]), candidates([2], [7])]
    )
    assert joined.beams.tolist() == [0, 1, 1, 2, 3, 3, 3, 4]
    assert joined.nodes.tolist() == [3, 0, 1, 7, 4, 5, 6, 2]
    assert torch.equal(joined.codes, joined.nodes + 100)
    assert torch.equal(joined.log_probs, joined.nodes / 2) and torch.equal(joined.scores, -joined.nodes.float())
