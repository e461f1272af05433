"""GEAR's memory, decoder and search against the same written out for one user and one prefix."""

from functools import partial

import pytest
import torch
from gear_models import SIZES, Reference, make_batch, make_gear, make_items, users_of

from hf_deco.models.memory_gear import GearMemory

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)  # outputs are not normalised


def all_codes(sizes=SIZES):
    return torch.cartesian_prod(*map(torch.arange, sizes))


@pytest.fixture(scope="module")
def model():
    return make_gear()


@pytest.fixture(scope="module")
def batch():
    return make_batch()


@pytest.fixture(scope="module")
def memory(model, batch):
    return model.encode_memory(**users_of(batch))


@pytest.fixture(scope="module")
def catalog(model):
    """60 items on fewer SIDs."""
    codes = all_codes()[torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(3))]
    model.set_catalog(codes)
    sids = sorted(set(map(tuple, codes.tolist())))
    assert len(sids) < 40
    return sids


def test_memory_is_a_token_for_every_group_and_item(model, batch, memory):
    reference = Reference(model)
    assert memory.mask.sum(1).tolist() == [3 + 5 + 1, 3, 3 + 3 + 1, 3]
    for user in range(4):
        expected = reference.memory(batch, user)
        torch.testing.assert_close(memory.states[user][memory.mask[user]], expected)


def test_padding_of_sequences_does_not_matter(model, batch, memory):
    """On the other side, more of it, or none at all."""
    for moved in ([[9, 0, -1], [-1, -1, -1]], [[-1, 9, -1, 0], [-1, -1, -1, -1]], [[9, 0], [-1, -1]]):
        rows = torch.tensor(moved)
        users = {**users_of(batch), "user_ids": batch["user_ids"][:2], "behaviors": [rows, rows.new_empty((2, 0))]}
        found = model.encode_memory(**users)
        users["behaviors"] = [torch.tensor([[-1, -1, 9, -1, 0], [-1] * 5]), torch.full((2, 3), -1)]
        expected = model.encode_memory(**users)
        assert found.mask.sum(1).tolist() == [5, 3]
        for user in range(2):
            torch.testing.assert_close(found.states[user][found.mask[user]], expected.states[user][expected.mask[user]])


def test_a_user_of_whom_nothing_is_known_has_a_memory():
    model = make_gear(user_features=[], feature_groups=[])
    empty = [torch.empty((2, 0), dtype=torch.long)] * 2
    content, item_ids = make_items(0, 0)
    memory = model.encode_memory(content, item_ids, None, empty)
    assert memory.states.shape == (2, 1, 8) and memory.mask.all()
    items = model.encode_items(*make_items(1, 30))
    model.set_catalog(items.codes)
    output = model.generate(memory=memory, num_beams=20, num_return_sequences=3, return_dict_in_generate=True)
    assert torch.equal(output.sequences[:3], output.sequences[3:]) and output.sequences_scores.isfinite().all()


def test_decoder_is_the_step_by_step_reference(model, batch, memory):
    """All tokens at once in training; rows of one user lie together, users may have none."""
    reference = Reference(model)
    users = torch.tensor([0, 0, 0, 1, 3, 3])
    codes = all_codes()[torch.tensor([0, 17, 59, 33, 8, 21])]
    states = model.decoder(memory, users, codes)
    assert states.shape == (6, 4, 8)
    for row, user in enumerate(users.tolist()):
        own = reference.memory(batch, user)
        for length in range(4):
            torch.testing.assert_close(states[row, length], reference.state(own, codes[row, :length].tolist()))
    assert model.decoder(memory, users[:0], codes[:0]).shape == (0, 4, 8)


@pytest.mark.parametrize("over", ["vocabulary", "children"])
@pytest.mark.parametrize("widths", [[4, 12, 60], [1, 2, 3], [3, 2, 5], [2, 7, 4]])
def test_search_is_the_reference_beam_search(model, batch, memory, catalog, over, widths):
    model.config.normalize_over = over
    reference = Reference(model)
    for rerank in (False, True):
        output = model.generate(
            **users_of(batch),
            num_beams=widths,
            num_return_sequences=widths[-1],
            rerank=rerank,
            return_dict_in_generate=True,
        )
        scores = output.sequences_scores.view(4, -1)
        for user, sequences in enumerate(output.sequences.view(4, widths[-1], 3).tolist()):
            expected = reference.search(reference.memory(batch, user), catalog, widths, over)
            assert [tuple(sid) for sid in sequences[: len(expected)]] == [sid for sid, _ in expected]
            assert all(sid == [-1] * 3 for sid in sequences[len(expected) :])
            torch.testing.assert_close(scores[user, : len(expected)], torch.tensor([score for _, score in expected]))
            assert (scores[user, len(expected) :] == -torch.inf).all()
    model.config.normalize_over = "vocabulary"


def test_a_wide_search_is_brute_force(model, batch, memory, catalog):
    reference = Reference(model)
    output = model.generate(memory=memory, num_return_sequences=60, return_dict_in_generate=True)
    for user in range(4):
        own = reference.memory(batch, user)
        scored = sorted(((reference.log_prob(own, sid).item(), sid) for sid in catalog), reverse=True)
        here = slice(user * 60, user * 60 + len(scored))
        assert [tuple(sid) for sid in output.sequences[here].tolist()] == [sid for _, sid in scored]
        torch.testing.assert_close(output.sequences_scores[here], torch.tensor([score for score, _ in scored]))


@pytest.mark.parametrize("over", ["vocabulary", "children"])
def test_one_more_step_gives_the_vectors_that_rank(model, batch, memory, catalog, over):
    model.config.normalize_over = over
    options = {"num_beams": [2, 3, 50], "num_return_sequences": 9, "return_dict_in_generate": True}
    output = model.generate(memory=memory, rerank=True, **options)
    plain = model.generate(memory=memory, **options)
    assert plain.rerank_vectors is None and torch.equal(plain.sequences, output.sequences)
    close(plain.sequences_scores, output.sequences_scores)
    again = model.rerank_vectors(memory, output.sequences.view(4, 9, 3))
    close(output.rerank_vectors.view(4, 9, 6), again)
    reference = Reference(model)
    for row, sid in enumerate(output.sequences.tolist()):
        if sid[0] < 0:
            assert (output.rerank_vectors[row] == 0).all()
        else:
            expected = reference.rerank_vector(reference.memory(batch, row // 9), sid)
            close(output.rerank_vectors[row], expected)
    assert (output.sequences[:, 0] < 0).any() and (output.sequences[:, 0] >= 0).any()
    model.config.normalize_over = "vocabulary"


def test_vectors_of_sids_whose_last_codes_are_forced(batch):
    """A search that spares forced levels their states has none to read on from: the reranker asks for all."""
    model = make_gear(normalize_over="children")
    model.set_catalog(torch.tensor([[0, 0, 1], [0, 2, 3], [1, 1, 0], [2, 0, 4], [2, 0, 2], [3, 1, 1]]))
    memory = model.encode_memory(**users_of(batch))
    options = {"num_beams": 8, "num_return_sequences": 8, "return_dict_in_generate": True}
    output = model.generate(memory=memory, rerank=True, **options)
    close(output.rerank_vectors.view(4, 8, 6), model.rerank_vectors(memory, output.sequences.view(4, 8, 3)))
    assert torch.equal(output.sequences, model.generate(memory=memory, **options).sequences)
    close(output.sequences_scores.view(4, 8).exp().sum(1), torch.ones(4))
    few = model.generate(memory=memory, rerank=True, num_beams=8, num_return_sequences=2, return_dict_in_generate=True)
    close(few.rerank_vectors.view(4, 2, 6), output.rerank_vectors.view(4, 8, 6)[:, :2])


def test_vectors_of_a_single_level():
    model = make_gear(codebook_size=[6])
    memory = model.encode_memory(**users_of(make_batch()))
    model.set_catalog(torch.tensor([[1], [4], [1], [5]]))
    output = model.generate(
        memory=memory, num_beams=4, num_return_sequences=4, rerank=True, return_dict_in_generate=True
    )
    assert output.item_rows.view(4, 4).sort(1).values.tolist() == [[-1, 0, 1, 3]] * 4
    close(output.rerank_vectors.view(4, 4, 6), model.rerank_vectors(memory, output.sequences.view(4, 4, 1)))


def test_collisions_are_kept_and_filters_look_at_all_items_of_a_sid(model, memory, catalog):
    codes = model.catalog_codes.long()
    options = {"memory": memory, "num_beams": 60, "num_return_sequences": 60, "return_dict_in_generate": True}
    crowded = (codes == codes[:, None]).all(2).sum(1).argmax()
    same = (codes == codes[crowded]).all(1).nonzero()[:, 0]
    assert len(same) > 1
    found = model.generate(**options)
    assert found.item_rows[(found.sequences == codes[crowded]).all(1)].tolist() == [same[0]] * 4  # each user once
    part = model.generate(**options, deny_rows=same[:-1].tolist())
    assert part.item_rows[(part.sequences == codes[crowded]).all(1)].tolist() == [same[-1]] * 4
    without = model.generate(**options, deny_rows=same.tolist())
    assert not (without.sequences == codes[crowded]).all(1).any()
    alone = model.generate(**options, allow_rows=same.tolist(), rerank=True)
    assert (alone.sequences[::60] == codes[crowded]).all() and (alone.sequences[1:60] == -1).all()
    expected = model.rerank_vectors(memory, alone.sequences.view(4, 60, 3))
    close(alone.rerank_vectors.view(4, 60, 6), expected)


def test_users_do_not_disturb_each_other(model, batch, memory, catalog):
    options = {"num_beams": [2, 4, 6], "num_return_sequences": 6, "rerank": True, "return_dict_in_generate": True}
    together = model.generate(memory=memory, **options)
    for user in range(4):
        own = GearMemory(memory.states[user : user + 1], memory.mask[user : user + 1])
        alone = model.generate(memory=own, **options)
        here = slice(6 * user, 6 * user + 6)
        assert torch.equal(alone.sequences, together.sequences[here])
        close(alone.rerank_vectors, together.rerank_vectors[here])
    none = GearMemory(memory.states[:0], memory.mask[:0])
    empty = model.generate(memory=none, **options)
    assert empty.sequences.shape == (0, 3) and empty.rerank_vectors.shape == (0, 6)


def test_default_beams_are_the_papers(model, memory, catalog, monkeypatch):
    from hf_deco.models import generation_gear

    widths = []
    real = generation_gear.BeamSearch

    def spy(scorer, trie, num_beams, *rest):
        widths.append(num_beams)
        return real(scorer, trie, num_beams, *rest)

    monkeypatch.setattr(generation_gear, "BeamSearch", spy)
    assert model.generate(memory=memory).shape == (40, 3)
    model.generate(memory=memory, num_beams=[3, 4, 5], num_return_sequences=5)
    assert widths == [[256, 256, 512], [3, 4, 5]]


def test_bad_arguments_of_a_search_are_named(model, batch, memory, catalog):
    with pytest.raises(ValueError, match="either users .* or a `memory`"):
        model.generate()
    with pytest.raises(ValueError, match="either users .* or a `memory`"):
        model.generate(**users_of(batch), memory=memory)
    with pytest.raises(ValueError, match="`exclude_seen` needs catalog rows"):
        model.generate(memory=memory, exclude_seen=True)
    with pytest.raises(ValueError, match=r"Unknown generation arguments \['num_beam'\]"):
        model.generate(memory=memory, num_beam=3)
    with pytest.raises(ValueError, match=r"lists 2 widths for 3 SID levels"):
        model.generate(memory=memory, num_beams=[3, 4])
    with pytest.raises(ValueError, match=r"`num_return_sequences` \(9\) must not exceed `num_beams` \(5"):
        model.generate(memory=memory, num_beams=5, num_return_sequences=9)
    with pytest.raises(ValueError, match="carries no catalog"):
        make_gear().generate(memory=memory)
    with pytest.raises(ValueError, match=r"`sequences` must have shape \(4, SIDs, 3\), got \(2, 3, 3\)"):
        model.rerank_vectors(memory, torch.zeros((2, 3, 3), dtype=torch.long))
    with pytest.raises(ValueError, match=r"`codes` has 1 rows outside the codebook sizes \[4, 3, 5\]"):
        model.rerank_vectors(memory, torch.tensor([[[0, 0, 0]], [[0, 3, 0]], [[0, 0, 0]], [[0, 0, 0]]]))
