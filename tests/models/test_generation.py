import copy
import itertools
import math

import pytest
import torch
from transformers import GenerationConfig

from hf_deco import SIDGenerationConfig, SIDGenerationOutput, SIDTrie
from hf_deco.models.beam_search_sid import BeamSearch, PrefixStates, top_per_user

SHAPES = [((7,), 6), ((5, 4), 12), ((5, 1, 6), 17), ((3, 4, 2, 5), 40), ((2,) * 7, 25)]
NORMALIZATIONS = ["children", "vocabulary"]


def search(model, *args, **kwargs):
    return model.generate(*args, return_dict_in_generate=True, **kwargs)


def assert_same(got, expected, atol=1e-5):
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.item_rows.tolist() == expected.item_rows.tolist()
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, rtol=0, atol=atol)


def assert_ranked(output, user, number, expected):
    """The user's rows are `expected`, `[(sid, score)]`."""
    rows = slice(user * number, user * number + len(expected))
    assert output.sequences[rows].tolist() == [list(sid) for sid, _ in expected]
    scores = torch.stack([score for _, score in expected])
    torch.testing.assert_close(output.sequences_scores[rows], scores, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize(("sizes", "num_items"), SHAPES)
def test_beam_as_wide_as_the_catalog_ranks_every_sid_like_brute_force(
    make_model, make_reference, make_histories, sizes, num_items, normalize_over
):
    model = make_model(sizes, num_items, normalize_over=normalize_over)
    reference = make_reference(model)
    item_codes, mask = make_histories(model, [3, 1])
    output = search(model, item_codes, mask, num_beams=num_items, num_return_sequences=num_items)
    assert isinstance(output, SIDGenerationOutput)
    assert output.sequences.dtype == output.item_rows.dtype == torch.int64
    for user, length in enumerate([3, 1]):
        expected = reference.sid_log_probs(reference.concept(item_codes[user, 3 - length :]))
        assert len(expected) == num_items
        assert_ranked(output, user, num_items, expected)
    assert model.catalog_codes[output.item_rows].tolist() == output.sequences.tolist()
    total = output.sequences_scores.view(2, -1).exp().sum(1)
    if normalize_over == "children":
        torch.testing.assert_close(total, torch.ones(2), rtol=0, atol=1e-5)
    else:
        assert (total < 0.99).all()


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
def test_probabilities_of_the_complete_catalog_sum_to_one(make_model, make_histories, normalize_over):
    sizes = (3, 4, 2)
    every = torch.tensor(list(itertools.product(*map(range, sizes))))
    model = make_model(sizes, catalog=every, normalize_over=normalize_over)
    output = search(model, *make_histories(model, [2, 4]), num_beams=24, num_return_sequences=24)
    torch.testing.assert_close(output.sequences_scores.view(2, -1).exp().sum(1), torch.ones(2), rtol=1e-5, atol=1e-5)
    assert [sorted(user) for user in output.sequences.view(2, 24, 3).tolist()] == [every.tolist()] * 2


@torch.no_grad()
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("widths", [1, 3, [4, 2, 6], [1, 7, 3], [2, 20, 5]])
def test_narrow_beam_equals_a_naive_search_that_rereads_every_prefix(
    make_model, make_reference, make_histories, widths, normalize_over
):
    model = make_model((6, 5, 4), 60, normalize_over=normalize_over, seed=3)
    reference = make_reference(model)
    item_codes, mask = make_histories(model, [4, 0, 2])
    per_level = widths if isinstance(widths, list) else [widths] * 3
    number = per_level[-1]
    output = search(model, item_codes, mask, num_beams=widths, num_return_sequences=number)
    for user, length in enumerate([4, 0, 2]):
        expected = reference.beam_search(reference.concept(item_codes[user, 4 - length :]), per_level)
        assert_ranked(output, user, number, expected)
        rest = slice(user * number + len(expected), (user + 1) * number)
        assert (output.sequences[rest] == -1).all()


@torch.no_grad()
def test_narrow_beam_on_a_deep_sparse_catalog_equals_the_naive_search(make_model, make_reference, make_histories):
    # Prefixes leave the model's batch at different levels, and users at different times.
    model = make_model((3, 2, 3, 2, 3, 2), 14, seed=5)
    reference = make_reference(model)
    item_codes, mask = make_histories(model, [2, 3, 1, 3])
    for widths in ([3] * 6, [2, 4, 3, 5, 2, 6]):
        number = widths[-1]
        output = search(model, item_codes, mask, num_beams=widths, num_return_sequences=number)
        for user, length in enumerate([2, 3, 1, 3]):
            assert_ranked(
                output, user, number, reference.beam_search(reference.concept(item_codes[user, 3 - length :]), widths)
            )


def test_results_do_not_depend_on_batch_mates_or_padding(make_model, make_histories):
    model = make_model()
    lengths = [5, 1, 0, 3, 5, 2]
    item_codes, mask = make_histories(model, lengths)
    together = search(model, item_codes, mask, num_beams=6, num_return_sequences=6)
    for user, length in enumerate(lengths):
        history = item_codes[user : user + 1, 5 - length :]
        variants = [(history, None)] if length else []
        junk = torch.full((1, 3, 3), 2)
        variants.append((torch.cat([junk, history], 1), torch.tensor([[0] * 3 + [1] * length])))
        variants.append((torch.cat([history, junk], 1), torch.tensor([[1] * length + [0] * 3])))
        variants.append((torch.cat([junk, history, junk], 1), torch.tensor([[0] * 3 + [1] * length + [0] * 3])))
        for codes, alone_mask in variants:
            alone = search(model, codes, alone_mask, num_beams=6, num_return_sequences=6)
            rows = slice(user * 6, user * 6 + 6)
            assert alone.sequences.tolist() == together.sequences[rows].tolist()
            torch.testing.assert_close(alone.sequences_scores, together.sequences_scores[rows], rtol=1e-5, atol=1e-5)


def test_code_values_at_padding_do_not_matter_even_invalid_ones(make_model, make_histories):
    model = make_model()
    item_codes, mask = make_histories(model, [4, 2])
    marked = item_codes.masked_fill(mask.unsqueeze(-1) == 0, -1)
    assert_same(search(model, marked, mask, num_beams=5), search(model, item_codes, mask, num_beams=5), atol=0)


class CountingScorer:
    """Counts the prefixes a search reads."""

    def __init__(self, model):
        self.read, start = [], model._start_search

        def counting(*args):
            scorer, copies = start(*args)
            advance = scorer.advance

            def count(states, rows, codes, level):
                self.read.append(len(codes))
                return advance(states, rows, codes, level)

            scorer.advance = count
            return scorer, copies

        model._start_search = counting


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize(("sizes", "num_items"), [((5, 4, 6), 12), ((2,) * 7, 12), ((1, 4, 1, 5), 9), ((7,), 5)])
def test_skipping_forced_levels_changes_nothing_but_the_work(
    make_model, make_histories, sizes, num_items, normalize_over
):
    model = make_model(sizes, num_items, normalize_over=normalize_over)
    inputs = make_histories(model, [3, 1, 2])
    counter = CountingScorer(model)
    fast = search(model, *inputs, num_beams=8, num_return_sequences=8, skip_forced_levels=True)
    work_fast, counter.read = sum(counter.read), []
    slow = search(model, *inputs, num_beams=8, num_return_sequences=8, skip_forced_levels=False)
    work_slow = sum(counter.read)
    assert_same(fast, slow)
    if normalize_over == "vocabulary" or len(sizes) == 1:
        assert work_fast == work_slow
    else:
        assert work_fast < work_slow
    assert_same(search(model, *inputs, num_beams=8, num_return_sequences=8), fast, atol=0)  # the default


def test_forced_levels_are_skipped_by_default(make_model, make_histories):
    catalog = [[0, 1, 2, 3], [1, 3, 0, 0], [2, 0, 0, 1]]  # only the first code is a choice
    model = make_model((4, 4, 4, 4), catalog=catalog)
    counter = CountingScorer(model)
    search(model, *make_histories(model, [2]), num_beams=3)
    assert counter.read == []


@torch.no_grad()
@pytest.mark.parametrize("skip", [True, False])
def test_catalog_in_which_only_the_first_code_is_a_choice(make_model, make_reference, make_histories, skip):
    model = make_model((4, 4, 4), catalog=[[0, 1, 2], [1, 3, 0], [2, 0, 0]])
    reference = make_reference(model)
    item_codes, mask = make_histories(model, [2])
    output = search(model, item_codes, mask, num_beams=3, skip_forced_levels=skip)
    assert_ranked(output, 0, 3, reference.sid_log_probs(reference.concept(item_codes[0])))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("copies", [1, 3])
def test_catalog_of_a_single_sid_has_probability_one(make_model, make_histories, skip, copies):
    model = make_model((4, 5, 3), catalog=[[2, 4, 1]] * copies)
    output = search(model, *make_histories(model, [2, 0]), num_beams=2, skip_forced_levels=skip)
    assert output.sequences.tolist() == [[2, 4, 1], [-1] * 3] * 2
    assert output.sequences_scores.tolist() == [0.0, -math.inf] * 2
    assert output.item_rows.tolist() == [0, -1] * 2


def test_items_that_share_a_sid_come_as_one_with_the_first_row(make_model, make_histories):
    catalog = [[3, 1], [0, 2], [3, 1], [0, 0], [0, 2]]
    model = make_model((4, 3), catalog=catalog)
    output = search(model, *make_histories(model, [2]), num_beams=5, num_return_sequences=5)
    assert sorted(output.item_rows.tolist()) == [-1, -1, 0, 1, 3]
    assert output.item_rows.tolist()[3:] == [-1, -1]
    for sid, row in zip(output.sequences.tolist()[:3], output.item_rows.tolist()[:3], strict=True):
        assert catalog[row] == sid and catalog.index(sid) == row
    torch.testing.assert_close(output.sequences_scores[:3].exp().sum(), torch.tensor(1.0), rtol=1e-5, atol=1e-5)


def test_users_with_fewer_reachable_items_than_beams_end_in_fillers(make_model, make_histories):
    # The first code decides how many items stay reachable under a first beam of width 1.
    catalog = [[0, 0], [0, 1], [0, 2], [1, 0], [2, 3], [2, 1]]
    model = make_model((3, 4), catalog=catalog, seed=2)
    with torch.no_grad():
        model.decoder.heads[0].weight.mul_(3)
    inputs = make_histories(model, [3, 2, 1, 4, 2, 3, 1, 0])
    output = search(model, *inputs, num_beams=[1, 5], num_return_sequences=5)
    reached = []
    for user in range(8):
        rows = slice(user * 5, user * 5 + 5)
        sequences, scores, items = output.sequences[rows], output.sequences_scores[rows], output.item_rows[rows]
        first = int(sequences[0, 0])
        number = sum(sid[0] == first for sid in catalog)
        reached.append(number)
        assert sorted(sequences[:number].tolist()) == sorted(sid for sid in catalog if sid[0] == first)
        assert scores[:number].isfinite().all() and (scores[:number].diff() <= 0).all()
        assert [catalog[item] for item in items[:number].tolist()] == sequences[:number].tolist()
        assert sequences[number:].tolist() == [[-1, -1]] * (5 - number)
        assert scores[number:].tolist() == [-math.inf] * (5 - number)
        assert items[number:].tolist() == [-1] * (5 - number)
    assert len(set(reached)) > 1  # users differ, so rows of one user must not slide into another's


def test_returned_sequences_are_the_best_of_the_beam(make_model, make_histories):
    model = make_model()
    inputs = make_histories(model, [3, 2])
    full = search(model, *inputs, num_beams=8, num_return_sequences=8)
    few = search(model, *inputs, num_beams=8, num_return_sequences=3)
    assert few.sequences.tolist() == full.sequences.view(2, 8, 3)[:, :3].reshape(6, 3).tolist()
    assert few.sequences_scores.tolist() == full.sequences_scores.view(2, 8)[:, :3].reshape(6).tolist()
    assert few.item_rows.tolist() == full.item_rows.view(2, 8)[:, :3].reshape(6).tolist()


def test_a_tensor_of_sequences_is_returned_by_default(make_model, make_histories):
    model = make_model()
    inputs = make_histories(model, [3, 2])
    sequences = model.generate(*inputs, num_beams=4)
    assert isinstance(sequences, torch.Tensor) and sequences.shape == (8, 3)
    assert sequences.tolist() == search(model, *inputs, num_beams=4).sequences.tolist()


def test_default_is_a_beam_of_100_and_10_returned_sequences(make_model, make_histories):
    model = make_model((6, 5, 7), 150)
    inputs = make_histories(model, [3])
    assert_same(search(model, *inputs), search(model, *inputs, num_beams=100, num_return_sequences=10), atol=0)
    assert SIDGenerationConfig().resolve(3) == ([100, 100, 100], 10)
    assert SIDGenerationConfig(num_beams=4).resolve(2) == ([4, 4], 4)
    assert SIDGenerationConfig(num_beams=[4, 30]).resolve(2) == ([4, 30], 10)


def test_arguments_go_over_the_given_configuration_which_goes_over_the_models(make_model, make_histories):
    model = make_model()
    inputs = make_histories(model, [3])
    model.generation_config = SIDGenerationConfig(num_beams=7, num_return_sequences=5)
    assert model.generate(*inputs).shape == (5, 3)
    assert model.generate(*inputs, generation_config=SIDGenerationConfig(num_return_sequences=6)).shape == (6, 3)
    given = SIDGenerationConfig(num_beams=2, num_return_sequences=2)
    assert model.generate(*inputs, generation_config=given).shape == (2, 3)
    assert model.generate(*inputs, generation_config=given, num_return_sequences=1).shape == (1, 3)
    assert (given.num_beams, given.num_return_sequences, model.generation_config.num_beams) == (2, 2, 7)
    expected = search(model, *inputs, num_beams=2, num_return_sequences=2).sequences
    assert model.generate(*inputs, generation_config=given).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 3, "num_return_sequences": 4}, r"`num_return_sequences` \(4\) must not exceed `num_beams` \(3"),
        ({"num_beams": [9, 9, 3], "num_return_sequences": 4}, r"must not exceed `num_beams` \(3 at the last level\)"),
        ({"num_beam": 3}, r"Unknown generation arguments \['num_beam'\]"),
        ({"temperature": 0.5, "max_new_tokens": 3}, r"\['max_new_tokens', 'temperature'\]"),
        ({"num_beams": [3, 3]}, "lists 2 widths for 3 SID levels"),
        ({"num_beams": []}, "lists 0 widths for 3 SID levels"),
        ({"num_beams": 0}, "`num_beams` must be a positive integer"),
        ({"num_beams": [3, 0, 3]}, "`num_beams` must be a positive integer"),
        ({"num_beams": 2.0}, "`num_beams` must be a positive integer"),
        ({"num_beams": True}, "`num_beams` must be a positive integer"),
        ({"num_beams": "3"}, "`num_beams` must be a positive integer"),
        ({"num_return_sequences": 0}, "`num_return_sequences` must be a positive integer"),
        ({"num_return_sequences": 1.0}, "`num_return_sequences` must be a positive integer"),
        ({"num_return_sequences": True}, "`num_return_sequences` must be a positive integer"),
    ],
)
def test_options_that_no_search_could_run_with_are_refused(make_model, make_histories, arguments, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        model.generate(*make_histories(model, [2]), **arguments)


def test_stock_generation_options_are_refused_rather_than_ignored(make_model, make_histories):
    model = make_model()
    with pytest.raises(ValueError, match="Unknown generation arguments.*temperature"):
        model.generate(*make_histories(model, [2]), generation_config=GenerationConfig(temperature=0.5))


def test_histories_and_concepts_exclude_each_other_and_one_is_needed(make_model, make_histories):
    model = make_model()
    item_codes, mask = make_histories(model, [2])
    concepts = model.encode_concepts(item_codes, mask)
    for arguments in ({}, {"attention_mask": mask}, {"item_codes": item_codes, "concepts": concepts}):
        with pytest.raises(ValueError, match="either `item_codes`.*or stored `concepts`"):
            model.generate(**arguments)


def test_a_model_without_a_catalog_says_so(make_model):
    model = make_model(catalog=False)
    with pytest.raises(ValueError, match="no catalog: call `model.set_catalog"):
        model.generate(torch.zeros((1, 2, 3), dtype=torch.long))


def test_inputs_of_a_wrong_shape_are_refused(make_model):
    model = make_model()
    with pytest.raises(ValueError, match=r"`item_codes` must have shape \(batch, items, 3\), got \(2, 4, 2\)"):
        model.generate(torch.zeros((2, 4, 2), dtype=torch.long))
    with pytest.raises(ValueError, match=r"`item_codes` must have shape .* got \(4, 3\)"):
        model.generate(torch.zeros((4, 3), dtype=torch.long))
    with pytest.raises(ValueError, match=r"`attention_mask` must have shape \(2, 4\), got \(2, 3\)"):
        model.generate(torch.zeros((2, 4, 3), dtype=torch.long), torch.ones((2, 3)))
    for shape in ((3, 2, 11), (3, 1, 12), (2, 12)):
        with pytest.raises(ValueError, match=r"`concepts` must have shape \(batch, 2, 12\)"):
            model.generate(concepts=torch.zeros(shape))


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
def test_search_from_stored_concepts_equals_search_from_histories_without_the_backbone(
    make_model, make_histories, monkeypatch, normalize_over
):
    model = make_model(normalize_over=normalize_over)
    item_codes, mask = make_histories(model, [3, 0, 2])
    expected = search(model, item_codes, mask, num_beams=6)
    concepts = model.encode_concepts(item_codes, mask).detach()
    assert concepts.shape == (3, 2, 12)

    def broken(*args, **kwargs):
        raise AssertionError("the backbone was called")

    monkeypatch.setattr(model.backbone, "forward", broken)
    monkeypatch.setattr(model.fuser, "forward", broken)
    assert_same(search(model, concepts=concepts, num_beams=6), expected)
    assert_same(search(model, concepts=concepts.double(), num_beams=6), expected)
    with pytest.raises(AssertionError, match="the backbone was called"):
        model.generate(item_codes, mask)


def test_generate_keeps_no_graph_and_leaves_the_callers_concepts_alone(make_model, make_histories):
    model = make_model()
    concepts = model.encode_concepts(*make_histories(model, [3, 2]))
    before = concepts.clone()
    output = search(model, concepts=concepts, num_beams=4)
    assert not output.sequences_scores.requires_grad
    torch.testing.assert_close(concepts, before, rtol=0, atol=0)


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "broken", ["everything", "decoder.heads.0.weight", "decoder.heads.1.weight", "decoder.tables.1.weight"]
)
def test_nan_weights_never_produce_an_invalid_sid(make_model, make_histories, normalize_over, skip, broken):
    model = make_model((5, 4, 6), 12, normalize_over=normalize_over)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if broken in ("everything", name):
                parameter.fill_(torch.nan)
    output = search(model, *make_histories(model, [2, 0, 3]), num_beams=9, skip_forced_levels=skip)
    assert output.sequences.shape == (27, 3)
    catalog = model.catalog_codes.tolist()
    rows = (output.sequences.tolist(), output.sequences_scores.tolist(), output.item_rows.tolist())
    for sid, score, row in zip(*rows, strict=True):
        assert (sid == [-1] * 3 and row == -1 and score == -math.inf) or (catalog[row] == sid and math.isfinite(score))


def test_a_user_with_nan_concepts_gets_fillers_and_disturbs_nobody(make_model, make_histories):
    model = make_model()
    concepts = model.encode_concepts(*make_histories(model, [2, 1, 3])).detach()
    expected = search(model, concepts=concepts, num_beams=5)
    concepts[1] = torch.nan
    output = search(model, concepts=concepts, num_beams=5)
    assert output.sequences[5:10].tolist() == [[-1] * 3] * 5 and output.item_rows[5:10].tolist() == [-1] * 5
    for rows in (slice(0, 5), slice(10, 15)):
        assert output.sequences[rows].tolist() == expected.sequences[rows].tolist()
        torch.testing.assert_close(output.sequences_scores[rows], expected.sequences_scores[rows], rtol=1e-5, atol=1e-5)


def test_bfloat16_search_returns_valid_sids_with_float32_scores(make_model, make_histories):
    model = make_model()
    inputs = make_histories(model, [3, 2])
    expected = search(model, *inputs, num_beams=30, num_return_sequences=30)
    output = search(model.to(torch.bfloat16), *inputs, num_beams=30, num_return_sequences=30)
    assert output.sequences_scores.dtype == torch.float32
    assert model.catalog_codes[output.item_rows].tolist() == output.sequences.tolist()
    assert sorted(output.item_rows[:30].tolist()) == list(range(30))
    best = expected.sequences_scores.view(2, 30)[:, 0].exp() - output.sequences_scores.view(2, 30)[:, 0].exp()
    assert (best.abs() < 0.1).all()


def test_top_per_user_keeps_each_users_best_in_order():
    nan, inf = math.nan, math.inf
    users = torch.tensor([0, 0, 0, 0, 2, 3, 3, 3])
    scores = torch.tensor([-3.0, -1.0, nan, -2.0, -9.0, -inf, -5.0, -4.0])
    assert top_per_user(scores, users, 5, 2).tolist() == [1, 3, 4, 7, 6]
    assert top_per_user(scores, users, 5, 9).tolist() == [1, 3, 0, 4, 7, 6]
    assert top_per_user(scores, users, 5, 1).tolist() == [1, 4, 7]
    assert top_per_user(torch.full((8,), nan), users, 5, 3).tolist() == []


def test_generation_config_survives_json_and_copies(tmp_path):
    config = SIDGenerationConfig(num_beams=[3, 4, 5], num_return_sequences=2, skip_forced_levels=False)
    config.save_pretrained(tmp_path)
    for other in (
        SIDGenerationConfig.from_pretrained(tmp_path),
        copy.deepcopy(config),
        SIDGenerationConfig.from_dict(config.to_dict()),
    ):
        assert isinstance(other, SIDGenerationConfig)
        assert (other.num_beams, other.num_return_sequences, other.skip_forced_levels) == ([3, 4, 5], 2, False)
        assert other.return_dict_in_generate is None


def test_search_follows_the_catalog_it_is_given_not_the_models():
    # The same search serves any scorer and trie.
    class UniformScorer:
        def start(self):
            return PrefixStates(torch.zeros((2, 1)), torch.arange(2), [], [])

        def advance(self, states, rows, codes, level):
            return states.select(rows)

        def head(self, level):
            return torch.zeros((4, 1))

    trie = SIDTrie(torch.tensor([[0, 0], [0, 1], [0, 2], [3, 3]]), (4, 4))
    beams = BeamSearch(UniformScorer(), trie, [4, 4]).run()
    assert beams.users.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert beams.codes[:4].tolist()[0] == [3, 3]
    expected = torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6] * 2).log()
    torch.testing.assert_close(beams.scores, expected)
    beams = BeamSearch(UniformScorer(), trie, [4, 4], normalize_over="vocabulary").run()
    torch.testing.assert_close(beams.scores, torch.full((8,), 1 / 16).log())


def test_no_users_get_no_items(make_model):
    model = make_model(num_items=8)
    output = model.generate(
        torch.zeros((0, 3, 3), dtype=torch.long), num_return_sequences=2, return_dict_in_generate=True
    )
    assert output.sequences.shape == (0, 3) and output.sequences_scores.shape == output.item_rows.shape == (0,)
    assert model.generate(concepts=torch.zeros((0, 2, 12)), num_beams=4).shape == (0, 3)
