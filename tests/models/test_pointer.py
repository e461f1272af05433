"""The copy pointer: the mixture over the catalog (Eq. 11), its next codes (Eq. 12), and its search state."""

import pytest
import torch

from hf_deco.models.modeling_deco import DecoForSIDRetrieval
from hf_deco.models.pointer_sid import CopyPointer, CopyState, mix

MODELS = [("deco", "fused"), ("deco", "flat"), ("backbone", "fused"), ("backbone", "flat")]
NORMALIZATIONS = ["children", "vocabulary"]


def search(model, *args, **kwargs):
    return model.generate(*args, return_dict_in_generate=True, **kwargs)


def scores_by_sid(output, user, number):
    rows = slice(user * number, (user + 1) * number)
    pairs = zip(map(tuple, output.sequences[rows].tolist()), output.sequences_scores[rows], strict=True)
    return {sid: score for sid, score in pairs if sid[0] >= 0}


@pytest.fixture
def make_pointer_model(make_model):
    def make(kind, *args, **kwargs):
        return make_model(*args, kind=kind[0], history_format=kind[1], copy_pointer=True, **kwargs)

    return make


@pytest.fixture
def make_twin(make_model):
    """The same weights without the pointer."""

    def make(model, kind, *args, **kwargs):
        twin = make_model(*args, kind=kind[0], history_format=kind[1], **kwargs)
        twin.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("pointer")})
        return twin

    return make


@torch.no_grad()
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_mixture_equals_its_closed_form_item_by_item(
    make_pointer_model, make_twin, make_histories, kind, normalize_over
):
    model = make_pointer_model(kind, (4, 3, 5), 25, normalize_over=normalize_over)
    item_codes, mask = make_histories(model, [6, 2, 0, 4], seed=3)
    item_codes[0, 1], item_codes[0, 4] = item_codes[0, 5], item_codes[0, 2]  # repeats add up
    options = {"num_beams": 25, "num_return_sequences": 25}
    mixture = search(model, item_codes, mask, **options)
    generator = search(
        make_twin(model, kind, (4, 3, 5), 25, normalize_over=normalize_over), item_codes, mask, **options
    )
    copies = model.encode(item_codes, mask).copies
    torch.testing.assert_close(mixture.gates, copies.gate)
    assert mixture.gates.shape == (4,) and generator.gates is None
    for user in range(4):
        p, P = scores_by_sid(generator, user, 25), scores_by_sid(mixture, user, 25)
        assert len(p) == len(P) == 25
        gate, weights = copies.gate[user], copies.weights[user]
        history = list(map(tuple, item_codes[user].tolist()))
        for sid, log_prob in p.items():
            copied = sum((a for a, item in zip(weights, history, strict=True) if item == sid), torch.zeros(()))
            expected = (1 - gate) * log_prob.exp() + gate * copied
            torch.testing.assert_close(P[sid].exp(), expected, rtol=1e-4, atol=1e-6)
        total = torch.stack(list(P.values())).exp().sum()
        if normalize_over == "children":
            torch.testing.assert_close(total, torch.tensor(1.0), rtol=0, atol=1e-5)
        else:
            generated = torch.stack(list(p.values())).exp().sum()
            torch.testing.assert_close(total, (1 - gate) * generated + gate, rtol=0, atol=1e-5)
    assert 0.02 < copies.gate[0] < 0.98


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_gate_are_those_of_the_history_alone(make_pointer_model, make_reference, make_histories, kind):
    model = make_pointer_model(kind)
    reference = make_reference(model)
    item_codes, mask = make_histories(model, [5, 0, 1, 3])
    copies = model(item_codes, mask).copies
    assert isinstance(copies, CopyState) and torch.equal(copies.item_codes, item_codes)
    assert copies.weights.dtype == copies.gate.dtype == torch.float32
    for user, length in enumerate([5, 0, 1, 3]):
        weights, gate = reference.pointer(item_codes[user, 5 - length :])
        torch.testing.assert_close(copies.weights[user, 5 - length :], weights, rtol=1e-5, atol=1e-5)
        assert copies.weights[user, : 5 - length].abs().sum() == 0
        torch.testing.assert_close(copies.gate[user], gate, rtol=1e-5, atol=1e-5)
    assert len({round(weight, 4) for weight in copies.weights[0].tolist()}) > 3 and copies.gate[1] == 0


def test_pointer_attends_over_the_copyable_items_alone():
    torch.manual_seed(0)
    pointer = CopyPointer(6)
    queries, states = torch.randn(2, 2, 6) * 3, torch.randn(2, 4, 6) * 3
    copyable = torch.tensor([[[1, 0, 0, 0], [1, 0, 1, 1]], [[0, 0, 0, 0], [0, 1, 1, 0]]]).bool()
    weights, gate = pointer(queries, states, copyable)
    for user in range(2):
        for query in range(2):
            allowed = copyable[user, query]
            expected = torch.zeros(4)
            if allowed.any():
                keys = states[user][allowed] @ pointer.key_proj.weight.T
                expected[allowed] = (keys @ (pointer.query_proj.weight @ queries[user, query]) / 6**0.5).softmax(0)
                lam = (pointer.gate_proj.weight[0] @ queries[user, query] + pointer.gate_proj.bias[0]).sigmoid()
            else:
                lam = torch.zeros(())
            torch.testing.assert_close(weights[user, query], expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(gate[user, query], lam, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize(("sizes", "num_items"), [((4, 3, 5), 25), ((3, 1, 4, 2), 9)])
@pytest.mark.parametrize("kind", MODELS)
def test_next_codes_under_the_mixture_follow_from_masses_of_prefixes(
    make_pointer_model, make_reference, make_sequences, kind, sizes, num_items, normalize_over
):
    model = make_pointer_model(kind, sizes, num_items, normalize_over=normalize_over)
    reference = make_reference(model)
    item_codes, mask, labels = make_sequences(model, [4, 2])
    with torch.no_grad():
        scores = model.score_targets(item_codes, mask, labels)
        mixed_levels = scores.level_log_probs()
    assert len(mixed_levels) == len(scores.levels) > 1
    masses = {}  # (user, items known) -> weights, gate, and probabilities of all SIDs by the generator
    checked_copies = 0
    total = torch.zeros(len(scores.targets))
    for entry, mixed in zip(scores.levels, mixed_levels, strict=True):
        counts = torch.diff(entry.starts, append=torch.tensor([len(entry.log_probs)])).tolist()
        for row, log_probs in zip(entry.rows.tolist(), mixed.split(counts), strict=True):
            user, position = int(scores.targets.users[row]), int(scores.targets.positions[row])
            first = int(mask[user].argmax())
            history = item_codes[user, first : max(position + 1, first)]
            if (user, position) not in masses:
                with torch.no_grad():
                    known = reference.known(history)
                    masses[user, position] = (
                        *reference.pointer(history),
                        {
                            sid[:k]: reference.log_prob(known, sid[:k]).exp()
                            for sid in reference.sids
                            for k in range(len(sizes) + 1)
                        },
                    )
            weights, gate, generated = masses[user, position]

            def mass(prefix, history=history, weights=weights, gate=gate, generated=generated):
                copied = sum(
                    (a for a, sid in zip(weights, history.tolist(), strict=True) if sid[: len(prefix)] == list(prefix)),
                    torch.zeros(()),
                )
                if prefix or len(history):
                    return (1 - gate) * generated[prefix] + gate * copied
                return torch.ones(())

            prefix = tuple(scores.targets.codes[row, : entry.level].tolist())
            codes = reference.children(prefix)
            expected = torch.stack([mass((*prefix, code)) for code in codes]) / mass(prefix)
            torch.testing.assert_close(log_probs.exp(), expected, rtol=1e-4, atol=1e-6)
            checked_copies += int(gate > 0 and entry.level > 0 and mass(prefix) > (1 - gate) * generated[prefix])
            if normalize_over == "children":
                torch.testing.assert_close(log_probs.exp().sum(), torch.tensor(1.0), rtol=0, atol=1e-5)
            total[row] += log_probs[codes.index(int(scores.targets.codes[row, entry.level]))]
    assert checked_copies > 0
    # The chain of next codes is the likelihood that the loss is made of.
    torch.testing.assert_close(total, scores.log_likelihood(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_items_outside_the_catalog_get_no_mass(make_pointer_model, make_reference, make_histories, kind):
    model = make_pointer_model(kind)
    known = set(map(tuple, model.catalog_codes.tolist()))
    outside = next([a, b, c] for a in range(5) for b in range(4) for c in range(6) if (a, b, c) not in known)
    item_codes, mask = make_histories(model, [4, 4])
    item_codes[0, 3] = item_codes[0, 1] = torch.tensor(outside)
    copies = model.encode(item_codes, mask).copies
    assert copies.weights[0, [1, 3]].tolist() == [0, 0]
    torch.testing.assert_close(copies.weights.sum(1), torch.ones(2))
    output = search(model, item_codes, mask, num_beams=30, num_return_sequences=30)
    torch.testing.assert_close(output.sequences_scores.view(2, 30).exp().sum(1), torch.ones(2), rtol=1e-5, atol=1e-5)
    expected = make_reference(model).ranking(item_codes[0])
    assert output.sequences[:30].tolist() == [list(sid) for sid, _ in expected]


@torch.no_grad()
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_where_nothing_can_be_copied_the_generator_answers_alone(
    make_pointer_model, make_twin, make_histories, kind, normalize_over
):
    catalog = [[a, b, 0] for a in range(4) for b in range(3)]
    model = make_pointer_model(kind, (5, 4, 6), catalog=catalog, normalize_over=normalize_over)
    twin = make_twin(model, kind, (5, 4, 6), catalog=catalog, normalize_over=normalize_over)
    outside = torch.tensor([[4, 0, 0], [0, 3, 0], [1, 1, 5]])  # each leaves the trie at another level
    item_codes = torch.stack([outside, outside.flip(0), outside])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0]])
    copies = model.encode(item_codes, mask).copies
    assert copies.gate.tolist() == [0, 0, 0] and copies.weights.abs().sum() == 0
    output, expected = (search(m, item_codes, mask, num_beams=5) for m in (model, twin))
    assert output.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_items_that_share_a_sid_share_its_mass_and_the_first_is_named(
    make_pointer_model, make_reference, make_histories, kind
):
    catalog = [[3, 1], [0, 2], [3, 1], [0, 0], [0, 2], [2, 2]]
    model = make_pointer_model(kind, (4, 3), catalog=catalog)
    histories = torch.tensor([[[0, 2], [3, 1], [0, 2], [2, 2]]])  # the same SID from whichever of its items
    output = search(model, histories, num_beams=6, num_return_sequences=6)
    expected = make_reference(model).ranking(histories[0])
    assert output.sequences[:4].tolist() == [list(sid) for sid, _ in expected]
    torch.testing.assert_close(
        output.sequences_scores[:4], torch.stack([score for _, score in expected]), rtol=1e-5, atol=1e-5
    )
    assert output.item_rows.tolist() == [catalog.index(sid) for sid in output.sequences[:4].tolist()] + [-1, -1]
    torch.testing.assert_close(output.sequences_scores[:4].exp().sum(), torch.tensor(1.0), rtol=1e-5, atol=1e-5)
    assert model.encode(histories).copies.weights.min() > 0  # each of the four items is one to copy


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("history_format", ["fused", "flat"])
def test_search_from_stored_state_equals_search_from_histories(
    make_pointer_model, make_histories, monkeypatch, history_format, normalize_over
):
    model = make_pointer_model(("deco", history_format), normalize_over=normalize_over)
    item_codes, mask = make_histories(model, [3, 0, 2])
    expected = search(model, item_codes, mask, num_beams=6)
    with torch.no_grad():
        state = model.encode(item_codes, mask)

    def broken(*args, **kwargs):
        raise AssertionError("the backbone was called")

    monkeypatch.setattr(model.backbone, "forward", broken)
    monkeypatch.setattr(model.fuser, "forward", broken)
    output = search(model, concepts=state.concepts, copies=state.copies, num_beams=6)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(output.sequences_scores, expected.sequences_scores)
    some = CopyState(**{name: value[[2, 0]] for name, value in state.copies.items()})
    output = search(model, concepts=state.concepts[[2, 0]], copies=some, num_beams=6)
    wanted = expected.sequences.view(3, 6, 3)[[2, 0]].flatten(0, 1)
    assert output.sequences.tolist() == wanted.tolist()


def test_concepts_and_copies_go_together_if_and_only_if_there_is_a_pointer(
    make_model, make_pointer_model, make_histories
):
    model, plain = make_pointer_model(("deco", "fused")), make_model()
    item_codes, mask = make_histories(model, [3, 2])
    state = model.encode(item_codes, mask)
    together = "`copies` must be given with `concepts` if, and only if, the model has a copy pointer"
    with pytest.raises(ValueError, match=together):
        model.generate(concepts=state.concepts)
    with pytest.raises(ValueError, match=together):
        plain.generate(concepts=state.concepts, copies=state.copies)
    with pytest.raises(ValueError, match="`copies` go with stored `concepts`"):
        model.generate(item_codes, mask, copies=state.copies)
    with pytest.raises(ValueError, match="`copies` are of 2 users, `concepts` of 1"):
        model.generate(concepts=state.concepts[:1], copies=state.copies)
    assert plain.encode(item_codes, mask).copies is None


@pytest.mark.parametrize("history_format", ["fused", "flat"])
def test_a_full_backbone_takes_no_copies(make_pointer_model, make_histories, history_format):
    model = make_pointer_model(("backbone", history_format))
    item_codes, mask = make_histories(model, [3, 2])
    state = model(item_codes, mask)
    assert state.concepts is None
    with pytest.raises(ValueError, match="`concepts` are Deco's"):
        model.generate(concepts=torch.zeros((2, 2, 12)), copies=state.copies)
    with pytest.raises(ValueError, match="`copies` go with stored `concepts`"):
        model.generate(item_codes, mask, copies=state.copies)


def test_mix_is_the_logarithm_of_the_mixture_and_has_finite_gradients():
    log_probs = torch.tensor([-1.0, -3.0, -2.0, -2.0, -200.0, -1.0], requires_grad=True)
    copied = torch.tensor([0.5, 0.0, 0.3, 0.0, 1e-3, 1.0], requires_grad=True)
    gate = torch.tensor([0.2, 0.2, 0.0, 0.0, 0.5, 0.9], requires_grad=True)
    output = mix(log_probs, copied, gate)
    expected = ((1 - gate) * log_probs.exp() + gate * copied).log()
    torch.testing.assert_close(output, expected)
    gradients = [
        torch.autograd.grad(values.sum(), (log_probs, gate), retain_graph=True) for values in (output, expected)
    ]
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), (log_probs, copied, gate)))
    kept = torch.tensor([0, 1, 3, 4, 5])  # where the gate is shut the other half of its gradient is not read
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours[kept], theirs[kept])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", MODELS)
def test_a_saturated_gate_leaves_loss_and_gradients_finite(make_pointer_model, make_sequences, kind, sign):
    model = make_pointer_model(kind)
    with torch.no_grad():
        model.pointer.gate_proj.weight.zero_()
        model.pointer.gate_proj.bias.fill_(sign * 60.0)
    loss = model(*make_sequences(model, [4, 2])).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    output = search(model, *make_sequences(model, [4, 2])[:2], num_beams=30, num_return_sequences=30)
    assert output.sequences_scores.isfinite().all()  # what is not in the history can still be reached


def test_fresh_pointers_start_with_a_gate_that_is_nearly_shut():
    torch.manual_seed(0)
    config = DecoForSIDRetrieval.config_class.from_preset("S", codebook_size=8, num_codebooks=2, copy_pointer=True)
    model = DecoForSIDRetrieval(config).eval()
    model.set_catalog(torch.tensor([[0, 1], [3, 4], [7, 2]]))
    with torch.no_grad():
        copies = model.encode(torch.tensor([[[0, 1], [3, 4]]])).copies
    assert 0.05 < copies.gate.item() < 0.25
    torch.testing.assert_close(copies.weights, torch.full((1, 2), 0.5), rtol=0, atol=0.1)
