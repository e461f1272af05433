"""Filters inside the search: the unfiltered ranking without what is filtered out, at the price of no beam."""

import math

import numpy as np
import pytest
import torch

from hf_deco import SIDGenerationConfig, SIDTrie
from hf_deco.models.filters_sid import ItemFilter, ItemSet
from hf_deco.models.trie import spread_ranges

KINDS = [("deco", "fused", False), ("deco", "flat", True), ("backbone", "fused", True), ("backbone", "flat", False)]
SIZES, NUM_ITEMS = (4, 3, 5), 30
LENGTHS = [3, 1, 0, 4]


def search(model, *args, **kwargs):
    return model.generate(*args, return_dict_in_generate=True, **kwargs)


@pytest.fixture
def build(make_model, make_codes):
    """Model whose catalog repeats some SIDs, up to four times, in a shuffled order."""

    def make(kind=KINDS[0], sizes=SIZES, distinct=22, seed=0, **kwargs):
        codes = make_codes(sizes, distinct, seed)
        catalog = torch.cat([codes, codes[:5], codes[:2], codes[:1]])
        catalog = catalog[torch.randperm(len(catalog), generator=torch.Generator().manual_seed(seed + 1))]
        name, history_format, pointer = kind
        options = {"kind": name, "history_format": history_format, "copy_pointer": pointer, **kwargs}
        return make_model(sizes, catalog=catalog, seed=seed, **options)

    return make


def filtered(ranking, catalog, permitted):
    """Of a ranking `[(sid, score)]`, the entries with a permitted item, as `(sid, first such row, score)`."""
    found = []
    for sid, score in ranking:
        rows = [row for row, item in enumerate(catalog) if tuple(item) == tuple(sid) and row in permitted]
        if rows:
            found.append((list(sid), rows[0], float(score)))
    return found


def assert_answers(output, number, expected):
    """Every user's rows are `expected`, then fillers."""
    assert output.sequences.shape[0] == number * len(expected)
    for user, entries in enumerate(expected):
        rows = slice(user * number, (user + 1) * number)
        entries = entries[:number] + [([-1] * output.sequences.shape[1], -1, -math.inf)] * (number - len(entries))
        assert output.sequences[rows].tolist() == [sid for sid, _, _ in entries]
        assert output.item_rows[rows].tolist() == [row for _, row, _ in entries]
        scores = torch.tensor([score for _, _, score in entries])
        torch.testing.assert_close(output.sequences_scores[rows], scores, rtol=1e-4, atol=1e-4)


def as_sets(rows, num_users):
    """The sets of rows of every user of a list that is shared or per user."""
    rows = [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]
    nested = rows if rows and isinstance(rows[0], list) else [rows] * num_users
    return [{row for row in own if row >= 0} for own in nested]


def pick(number, seed):
    return torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(seed))[:number].tolist()


SHARED, OWN = pick(14, 1), [pick(number, seed) for seed, number in enumerate([9, 0, 30, 13])]
LISTS = [
    {"deny_rows": SHARED},
    {"deny_rows": OWN},
    {"allow_rows": SHARED},
    {"allow_rows": OWN},
    {"allow_rows": SHARED, "deny_rows": pick(8, 2)},
    {"allow_rows": SHARED, "deny_rows": OWN},
    {"allow_rows": OWN, "deny_rows": SHARED},
    {"allow_rows": OWN, "deny_rows": [pick(7, seed) for seed in range(4)]},
]


@torch.no_grad()
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("lists", LISTS, ids=lambda lists: "-".join(lists))
@pytest.mark.parametrize("kind", KINDS)
def test_wide_beam_returns_the_unfiltered_ranking_without_what_is_out(
    build, make_reference, make_histories, kind, lists, seen
):
    model = build(kind)
    reference, catalog = make_reference(model), model.catalog_codes.tolist()
    item_codes, mask = make_histories(model, LENGTHS)
    item_codes[~mask.bool()] = torch.tensor(catalog[OWN[0][0]])  # what stands at padding was not seen
    allow, deny = (as_sets(lists.get(name, []), 4) for name in ("allow_rows", "deny_rows"))
    expected = []
    for user, length in enumerate(LENGTHS):
        history = item_codes[user, 4 - length :]
        permitted = (allow[user] if "allow_rows" in lists else set(range(NUM_ITEMS))) - deny[user]
        if seen:
            permitted = {row for row in permitted if catalog[row] not in history.tolist()}
        expected.append(filtered(reference.ranking(history), catalog, permitted))
    output = search(model, item_codes, mask, num_beams=22, num_return_sequences=22, exclude_seen=seen, **lists)
    assert_answers(output, 22, expected)


@torch.no_grad()
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("normalize_over", ["children", "vocabulary"])
def test_deep_sparse_catalogs_are_filtered_alike_with_and_without_forced_levels(
    build, make_reference, make_histories, normalize_over, skip
):
    model = build(sizes=(3, 2, 3, 2, 3, 2), distinct=22, normalize_over=normalize_over)
    reference, catalog = make_reference(model), model.catalog_codes.tolist()
    item_codes, mask = make_histories(model, [2, 3])
    output = search(
        model,
        item_codes,
        mask,
        num_beams=22,
        num_return_sequences=22,
        deny_rows=OWN[:2],
        exclude_seen=True,
        skip_forced_levels=skip,
    )
    expected = []
    for user, length in enumerate([2, 3]):
        history = item_codes[user, 3 - length :]
        out = set(OWN[user]) | {row for row, item in enumerate(catalog) if item in history.tolist()}
        expected.append(filtered(reference.ranking(history), catalog, set(range(30)) - out))
    assert_answers(output, 22, expected)


@torch.no_grad()
@pytest.mark.parametrize("width", [1, 2, 4])
def test_narrow_beam_equals_a_naive_search_that_drops_dead_prefixes_at_every_level(
    build, make_reference, make_histories, width
):
    model = build(KINDS[1])
    reference, catalog = make_reference(model), model.catalog_codes.tolist()
    item_codes, mask = make_histories(model, LENGTHS)
    output = search(model, item_codes, mask, num_beams=width, deny_rows=OWN)
    expected = []
    for user, length in enumerate(LENGTHS):
        history = item_codes[user, 4 - length :]
        known, mix = reference.known(history), reference.mixer(history)
        permitted = {tuple(sid) for row, sid in enumerate(catalog) if row not in OWN[user]}
        beams = [((), torch.zeros(()))]
        for _ in SIZES:
            beams = [
                ((*prefix, code), score + log_prob)
                for prefix, score in beams
                for code, log_prob in reference.next_log_probs(known, prefix).items()
                if any(sid[: len(prefix) + 1] == (*prefix, code) for sid in permitted)
            ]
            beams = sorted(beams, key=lambda pair: -mix(*pair).item())[:width]
        beams = [(sid, mix(sid, score)) for sid, score in beams]
        expected.append(filtered(beams, catalog, set(range(NUM_ITEMS)) - set(OWN[user])))
    assert_answers(output, width, expected)


@torch.no_grad()
@pytest.mark.parametrize("wanted", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_few_results_of_a_wide_beam_are_the_first_of_the_filtered_ranking(
    build, make_reference, make_histories, kind, wanted
):
    model = build(kind)
    reference, catalog = make_reference(model), model.catalog_codes.tolist()
    item_codes, mask = make_histories(model, LENGTHS)
    output = search(
        model, item_codes, mask, num_beams=22, num_return_sequences=wanted, allow_rows=SHARED, deny_rows=OWN
    )
    expected = []
    for user, length in enumerate(LENGTHS):
        ranking = reference.ranking(item_codes[user, 4 - length :])
        expected.append(filtered(ranking, catalog, set(SHARED) - set(OWN[user])))
    assert_answers(output, wanted, expected)


def test_a_narrow_beam_stays_full_when_everything_it_would_have_found_is_denied(make_model, make_histories):
    model = make_model((8, 8, 8), 400)
    inputs = make_histories(model, [3, 2])
    free = search(model, *inputs, num_beams=5)
    # All items under the first codes that the free search ends in: whole subtrees of the root.
    firsts = {sid[0] for sid in free.sequences.tolist()}
    dead = [row for row, sid in enumerate(model.catalog_codes.tolist()) if sid[0] in firsts]
    assert 0 < len(dead) < 400
    output = search(model, *inputs, num_beams=5, deny_rows=dead)
    assert (output.item_rows >= 0).all() and not set(output.item_rows.tolist()) & set(dead)
    assert output.sequences_scores.isfinite().all()
    # A search that is filtered afterwards has nothing left.
    assert set(free.item_rows.tolist()) <= set(dead)


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_of_one_width_returns_as_many_items_as_are_left(build, make_histories, seed):
    model = build(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = make_histories(model, LENGTHS)
    chosen = [torch.randperm(NUM_ITEMS, generator=generator)[: 6 * user + 1].tolist() for user in range(4)]
    sids = [{tuple(model.catalog_codes[row].tolist()) for row in rows} for rows in chosen]
    for width in (1, 3, 7):
        output = search(model, *inputs, num_beams=width, allow_rows=chosen)
        for user, rows in enumerate(output.item_rows.view(4, width).tolist()):
            assert sum(row >= 0 for row in rows) == min(width, len(sids[user]))
            assert {row for row in rows if row >= 0} <= set(chosen[user])


def test_an_sid_is_out_only_when_all_its_items_are(make_model, make_histories):
    model = make_model((4, 3), catalog=[[3, 1], [0, 2], [3, 1], [0, 0], [3, 1]])
    inputs = make_histories(model, [2])

    def rows(**kwargs):
        return sorted(search(model, *inputs, num_beams=4, num_return_sequences=4, **kwargs).item_rows.tolist())

    assert rows() == [-1, 0, 1, 3]
    assert rows(deny_rows=[0]) == [-1, 1, 2, 3]
    assert rows(deny_rows=[2]) == [-1, 0, 1, 3]
    assert rows(deny_rows=[2, 0, 0]) == [-1, 1, 3, 4]
    assert rows(deny_rows=[4, 0, 2]) == [-1, -1, 1, 3]
    assert rows(allow_rows=[4, 2]) == [-1, -1, -1, 2]
    assert rows(allow_rows=[4, 2, 1], deny_rows=[2]) == [-1, -1, 1, 4]
    assert rows(allow_rows=[4, 2], deny_rows=[[2, 4]]) == [-1] * 4


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_users_for_whom_nothing_remains_get_fillers_and_disturb_nobody(build, make_histories, kind, skip):
    model = build(kind)
    inputs = make_histories(model, LENGTHS)
    options = {"num_beams": 6, "num_return_sequences": 5, "skip_forced_levels": skip}
    free = search(model, *inputs, **options)
    everything = list(range(NUM_ITEMS))
    output = search(model, *inputs, deny_rows=[[], everything, [], everything], **options)
    for user in range(4):
        rows = slice(user * 5, user * 5 + 5)
        if user % 2:
            assert output.item_rows[rows].tolist() == [-1] * 5 and (output.sequences[rows] == -1).all()
            assert output.sequences_scores[rows].tolist() == [-math.inf] * 5
        else:
            assert output.sequences[rows].tolist() == free.sequences[rows].tolist()
            torch.testing.assert_close(output.sequences_scores[rows], free.sequences_scores[rows])
    for nothing in ({"allow_rows": []}, {"deny_rows": everything}, {"allow_rows": [3], "deny_rows": [3]}):
        assert search(model, *inputs, **nothing, **options).item_rows.tolist() == [-1] * 20


def test_forms_of_one_list_mean_the_same(build, make_histories):
    model = build()
    inputs = make_histories(model, LENGTHS)
    padded = torch.full((4, 30), -1)
    for user, rows in enumerate(OWN):
        padded[user, : len(rows)] = torch.tensor(rows, dtype=torch.long)
    own = [OWN, tuple(map(tuple, OWN)), padded, padded.numpy(), padded.int(), model.item_set(OWN)]
    own += [[torch.tensor(rows, dtype=torch.int16) for rows in OWN], [np.array(rows, dtype=np.int64) for rows in OWN]]
    shared = [SHARED, tuple(SHARED), torch.tensor(SHARED), np.array(SHARED, dtype=np.uint16), [*SHARED, -1, SHARED[0]]]
    shared += [list(torch.tensor(SHARED)), model.item_set(SHARED), [SHARED] * 4]
    for forms in (own, shared):
        for name in ("allow_rows", "deny_rows"):
            first, *others = (search(model, *inputs, num_beams=9, **{name: form}) for form in forms)
            assert len(set(first.item_rows.tolist())) > 3
            for other in others:
                assert torch.equal(other.item_rows, first.item_rows)
                assert torch.equal(other.sequences_scores, first.sequences_scores)
    assert torch.equal(model.generate(*inputs, allow_rows=range(30)), model.generate(*inputs))
    assert torch.equal(model.generate(*inputs, deny_rows=[]), model.generate(*inputs))


@pytest.mark.parametrize("allow", [None, SHARED, OWN[::-1]])
def test_several_sets_that_are_denied_are_their_union(build, make_histories, allow):
    model = build()
    inputs = make_histories(model, LENGTHS)
    lists = [OWN, SHARED[:5], [[3], [4, 5], [], [6]], SHARED[3:8]]
    union = [sorted({*SHARED[:8], *own, *more}) for own, more in zip(OWN, lists[2], strict=True)]
    options = {"num_beams": 22, "num_return_sequences": 22, "allow_rows": allow, "exclude_seen": True}
    expected = search(model, *inputs, deny_rows=union, **options)
    output = search(model, *inputs, deny_rows=[model.item_set(rows) for rows in lists], **options)
    assert output.item_rows.tolist() == expected.item_rows.tolist() and (output.item_rows >= 0).any()


def test_returned_rows_can_be_denied_to_get_the_next_page(build, make_histories):
    model = build()
    inputs = make_histories(model, [3, 2])
    first = search(model, *inputs, num_beams=22, num_return_sequences=6)
    both = search(model, *inputs, num_beams=22, num_return_sequences=12)
    # All items of the first page's SIDs are denied, not only the row that was shown.
    shown = [model.catalog_codes[rows].tolist() for rows in first.item_rows.view(2, 6)]
    deny = [[row for row, sid in enumerate(model.catalog_codes.tolist()) if sid in page] for page in shown]
    second = search(model, *inputs, num_beams=22, num_return_sequences=6, deny_rows=deny)
    assert second.item_rows.view(2, 6).tolist() == both.item_rows.view(2, 12)[:, 6:].tolist()
    again = search(model, *inputs, num_beams=22, num_return_sequences=22, deny_rows=first.item_rows.view(2, 6))
    assert not set(again.item_rows.view(2, -1)[0].tolist()) & set(first.item_rows.view(2, -1)[0].tolist())


def test_filters_work_from_stored_concepts(build, make_histories):
    model = build(KINDS[1])
    item_codes, mask = make_histories(model, LENGTHS)
    state = model.encode(item_codes, mask)
    expected = search(model, item_codes, mask, num_beams=7, deny_rows=OWN, allow_rows=SHARED)
    stored = {"concepts": state.concepts.detach(), "copies": state.copies}
    output = search(model, **stored, num_beams=7, deny_rows=OWN, allow_rows=SHARED)
    assert torch.equal(output.item_rows, expected.item_rows)
    with pytest.raises(ValueError, match="`exclude_seen` reads `item_codes`.*`deny_rows`"):
        model.generate(**stored, exclude_seen=True)


def test_exclude_seen_of_the_checkpoint_is_honoured_and_overridden(build, make_histories, tmp_path):
    model = build()
    item_codes, mask = make_histories(model, [3, 2])
    model.generation_config = SIDGenerationConfig(num_beams=22, num_return_sequences=22, exclude_seen=True)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    assert model.generation_config.exclude_seen is True

    def found(**kwargs):
        return {tuple(sid) for sid in model.generate(item_codes[:1], mask[:1], **kwargs).tolist()}

    seen = {tuple(sid) for sid in item_codes[0].tolist()}
    assert not found() & seen
    assert found(exclude_seen=False) >= seen
    assert not found(generation_config=SIDGenerationConfig(num_return_sequences=5)) & seen


def test_items_outside_the_catalog_in_a_history_exclude_nothing(make_model):
    model = make_model((4, 3), catalog=[[3, 1], [0, 2], [0, 0]])
    output = search(model, torch.tensor([[[1, 1], [0, 2]]]), num_beams=3, exclude_seen=True)
    assert sorted(output.item_rows.tolist()) == [-1, 0, 2]


def test_no_users_may_be_filtered(build):
    model = build()
    nobody = torch.zeros((0, 3, 3), dtype=torch.long)
    for lists in ({"deny_rows": [1, 2]}, {"allow_rows": torch.zeros((0, 5), dtype=torch.long)}, {"exclude_seen": True}):
        assert model.generate(nobody, num_beams=4, **lists).shape == (0, 3)


INTEGERS = "must hold integers, rows of the catalog: a flat list for all users, or one list for each user"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 30], r"must hold rows of the catalog, 0..29 \(-1: no item\), got 0..30"),
        ([[2], [-2], [], []], r"must hold rows of the catalog, 0..29 \(-1: no item\), got -2..2"),
        (["B001"], f"{INTEGERS}; got list"),
        ("12", f"{INTEGERS}; got str"),
        (3, f"{INTEGERS}; got int"),
        ({3}, f"{INTEGERS}; got set"),
        ([[1], 2, [], []], f"{INTEGERS}; got list"),
        ([None], f"{INTEGERS}; got list"),
        ([2**70], f"{INTEGERS}; got list"),
        ([1.0], f"{INTEGERS}; got torch.float32"),
        (torch.ones(30, dtype=torch.bool), f"{INTEGERS}; got torch.bool"),
        (torch.tensor(3), f"{INTEGERS}; got Tensor"),
        (torch.zeros((2, 2, 2), dtype=torch.long), rf"{INTEGERS}; got torch.int64 of shape \(2, 2, 2\)"),
        ([[[1]], [[2]], [], []], rf"{INTEGERS}; got torch.int64 of shape \(1, 1\)"),
        ([[1], [2]], "holds a list for each of 2 users, but there are 4: give one for each, or a flat list for all"),
        (torch.zeros((3, 2), dtype=torch.long), "holds a list for each of 3 users, but there are 4"),
    ],
)
@pytest.mark.parametrize("name", ["allow_rows", "deny_rows"])
def test_rows_that_cannot_be_meant_are_refused_before_the_backbone_runs(
    build, make_histories, monkeypatch, name, rows, message
):
    model = build()
    inputs = make_histories(model, LENGTHS)
    monkeypatch.setattr(model, "_start_search", None)
    with pytest.raises(ValueError, match=f"`{name}` {message}"):
        model.generate(*inputs, **{name: rows})


def test_other_wrong_filters_are_refused(build, make_histories):
    model, other = build(), build()
    inputs = make_histories(model, LENGTHS)
    with pytest.raises(ValueError, match="`deny_rows` was made for another catalog"):
        model.generate(*inputs, deny_rows=other.item_set([1]))
    stale = model.item_set([1])
    model.set_catalog(model.catalog_codes.flip(0))
    with pytest.raises(ValueError, match="`allow_rows` was made for another catalog.*by `model.item_set`"):
        model.generate(*inputs, allow_rows=stale)
    with pytest.raises(ValueError, match="`exclude_seen` must be True or False, got 'yes'"):
        model.generate(*inputs, exclude_seen="yes")
    with pytest.raises(ValueError, match=r"Unknown generation arguments \['deny_items'\]"):
        model.generate(*inputs, deny_items=["a"])


@pytest.mark.parametrize("per_user", [True, False])
def test_counts_under_every_node_equal_brute_force(make_codes, per_user):
    codes = make_codes((4, 3, 5), 25)
    codes = torch.cat([codes, codes[:7], codes[:2]])[torch.randperm(34, generator=torch.Generator().manual_seed(3))]
    trie = SIDTrie(codes, (4, 3, 5))
    generator = torch.Generator().manual_seed(0)
    deny = [torch.randperm(34, generator=generator)[:20].tolist() for _ in range(3)]
    seen = codes[:6].reshape(3, 2, 3).long()
    item_filter = ItemFilter.build(trie, 3, deny_rows=deny if per_user else deny[0], seen_codes=seen)
    for user in range(3):
        seen_sids = seen[user].tolist()
        denied = {*deny[user if per_user else 0], *(r for r in range(34) if codes[r].tolist() in seen_sids)}
        for level in range(4):
            nodes = torch.arange(trie.num_nodes(level))
            alive = item_filter.alive(level, torch.full_like(nodes, user), nodes)
            prefixes = sorted({tuple(sid[:level]) for sid in codes.tolist()})
            left = {tuple(codes[row, :level].tolist()) for row in range(34) if row not in denied}
            assert alive.tolist() == [prefix in left for prefix in prefixes]


def test_sets_hold_their_members_alone(make_codes):
    trie = SIDTrie(make_codes((4, 3, 5), 50), (4, 3, 5))
    shared, own = ItemSet([7, 7, -1, 3], trie), ItemSet([[7], [], [3, 7]], trie)
    assert repr(shared) == "ItemSet(items=2, users=all)" and repr(own) == "ItemSet(items=3, users=3)"
    assert shared.keys.shape == (2,) and own.keys.shape == (3,)
    assert trie.item_rows[shared.keys].sort().values.tolist() == [3, 7]


def test_ranges_come_one_behind_the_other():
    ranges, values = spread_ranges(torch.tensor([5, 2, 0, 9]), torch.tensor([2, 0, 3, 1]))
    assert ranges.tolist() == [0, 0, 2, 2, 2, 3] and values.tolist() == [5, 6, 0, 1, 2, 9]
