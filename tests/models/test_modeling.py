import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_deco import DecoConfig, DecoForSIDRetrieval
from hf_deco.models import layers_sid
from hf_deco.models.layers_sid import add_residual_dropout

NORMALIZATIONS = ["children", "vocabulary"]


def search(model, inputs, **kwargs):
    options = {"num_beams": 8, "num_return_sequences": 8, **kwargs}
    return model.generate(*inputs, return_dict_in_generate=True, **options)


@pytest.fixture
def make_batch(make_histories):
    """Histories, mask and labels; users differ in length and some positions carry no label."""

    def make(model, lengths=(4, 1, 0, 3), seed=0):
        item_codes, mask = make_histories(model, list(lengths), seed)
        generator = torch.Generator().manual_seed(seed + 1)
        rows = torch.randint(0, model.config.num_items, mask.shape, generator=generator)
        labels = model.catalog_codes[rows].long().masked_fill(mask.unsqueeze(-1) == 0, -100)
        labels[0, -2] = -100
        return item_codes, mask, labels

    return make


def naive_loss(model, reference, item_codes, mask, labels):
    """One pass per target: concept of the truncated history, then one pass per code."""
    losses = []
    for user in range(len(item_codes)):
        history = item_codes[user][mask[user].bool()]
        targets = [(history[:0], history[0])] if len(history) else []
        for position, label in enumerate(labels[user][mask[user].bool()]):
            if label[0] != -100:
                targets.append((history[: position + 1], label))
        for known, target in targets:
            concept = model.encode_concepts(known[None])[0]
            steps = [reference.next_log_probs(concept, target[:k].tolist())[int(target[k])] for k in range(len(target))]
            losses.append(-torch.stack(steps).sum())
    return torch.stack(losses).mean(), len(losses)


@torch.no_grad()
def test_concepts_of_a_batch_equal_those_of_each_history_alone(make_model, make_reference, make_histories):
    model = make_model()
    reference, lengths = make_reference(model), [3, 0, 5, 1]
    item_codes, mask = make_histories(model, lengths)
    expected = torch.stack([reference.concept(item_codes[user, 5 - length :]) for user, length in enumerate(lengths)])
    torch.testing.assert_close(model.encode_concepts(item_codes, mask), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(item_codes, mask).concepts, expected, rtol=1e-5, atol=1e-5)
    assert model(item_codes, mask).loss is None


@torch.no_grad()
def test_backbone_states_are_those_of_each_prefix_and_zero_at_padding(make_model, make_histories):
    model = make_model()
    item_codes, mask = make_histories(model, [3, 0, 4])
    item_codes = torch.cat([item_codes, torch.zeros((3, 2, 3), dtype=torch.long)], 1)  # padding on the right too
    mask = F.pad(mask, (0, 2))
    states = model.encode_history(item_codes, mask)
    assert states.shape == (3, 6, 16)
    for user in range(3):
        for position in range(6):
            expected = torch.zeros(16)
            if mask[user, position]:
                tokens = model._tokens(item_codes[user, : position + 1][mask[user, : position + 1].bool()])
                expected = model.backbone(inputs_embeds=tokens[None]).last_hidden_state[0, -1]
            torch.testing.assert_close(states[user, position], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows_per_group", [1, 2, 3, 32])
def test_reading_histories_in_groups_changes_neither_states_nor_gradients(
    make_model, make_histories, monkeypatch, rows_per_group
):
    model = make_model()
    item_codes, mask = make_histories(model, [2, 5, 0, 1, 5, 3, 2])

    def states_and_gradients():
        model.zero_grad()
        states = model.encode_history(item_codes, mask)
        states.square().sum().backward()
        return [states.detach(), *(p.grad.clone() for p in model.backbone.parameters())]

    monkeypatch.setattr(layers_sid, "ROWS_PER_GROUP", 100)
    expected = states_and_gradients()
    monkeypatch.setattr(layers_sid, "ROWS_PER_GROUP", rows_per_group)
    for got, wanted in zip(states_and_gradients(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_short_histories_are_not_read_at_the_width_of_long_ones(make_model, make_histories, monkeypatch):
    model = make_model()
    monkeypatch.setattr(layers_sid, "ROWS_PER_GROUP", 2)
    read, forward = [], model.backbone.forward
    monkeypatch.setattr(
        model.backbone,
        "forward",
        lambda inputs_embeds, **kw: read.append(inputs_embeds.shape[:2]) or forward(inputs_embeds=inputs_embeds, **kw),
    )
    model.encode_history(*make_histories(model, [1, 9, 2, 0, 1, 8]))
    assert [tuple(shape) for shape in read] == [(2, 1), (2, 8), (1, 9)]


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize(
    ("sizes", "num_items"), [((5, 4, 6), 30), ((5, 4, 6), 9), ((2,) * 6, 20), ((1, 3, 1, 4), 8), ((7,), 5)]
)
def test_dense_loss_equals_one_pass_per_target(
    make_model, make_reference, make_batch, sizes, num_items, normalize_over
):
    model = make_model(sizes, num_items, normalize_over=normalize_over)
    item_codes, mask, labels = make_batch(model)
    output = model(item_codes, mask, labels, return_target_scores=True)
    expected, number = naive_loss(model, make_reference(model), item_codes, mask, labels)
    assert len(output.target_scores.targets) == number == 10
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-5)
    assert output.loss.dtype == torch.float32
    gradients = torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    for (name, _), got, want in zip(model.named_parameters(), gradients, wanted, strict=True):
        got, want = (torch.zeros(1) if g is None else g for g in (got, want))  # a forced level is not read at all
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
def test_loss_does_not_depend_on_padding(make_model, make_batch, normalize_over):
    model = make_model(normalize_over=normalize_over)
    item_codes, mask, labels = make_batch(model)
    expected = model(item_codes, mask, labels).loss
    for left, right in ((3, 0), (0, 2), (2, 1)):
        padded = (
            F.pad(item_codes, (0, 0, left, right)),
            F.pad(mask, (left, right)),
            F.pad(labels, (0, 0, left, right), value=-100),
        )
        torch.testing.assert_close(model(*padded).loss, expected, rtol=1e-5, atol=1e-5)


def test_loss_without_a_mask_reads_every_position(make_model, make_batch):
    model = make_model()
    item_codes, mask, labels = make_batch(model, lengths=(4, 4))
    assert model(item_codes, labels=labels).loss.item() == model(item_codes, mask, labels).loss.item()


@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
def test_gradient_of_the_loss_reaches_every_parameter_and_is_finite(make_model, make_batch, normalize_over):
    catalog = [[a, b, c] for a in range(3) for b in range(2) for c in range(3)]  # every level branches
    model = make_model((3, 2, 3), catalog=catalog, normalize_over=normalize_over).train()
    model(*make_batch(model)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0 or name.endswith("k_proj.bias"), (
            name
        )  # softmax ignores a bias of all keys


def test_activation_checkpointing_changes_neither_loss_nor_gradients(make_model, make_batch):
    model = make_model().train()
    batch = make_batch(model)

    def step():
        model.zero_grad()
        loss = model(*batch).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = step()
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    for got, wanted in zip(step(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_labels_outside_the_catalog_are_named(make_model, make_batch):
    model = make_model((5, 4, 6), 30)
    item_codes, mask, labels = make_batch(model)
    known = set(map(tuple, model.catalog_codes.tolist()))
    outside = next([a, b, c] for a in range(5) for b in range(4) for c in range(6) if (a, b, c) not in known)
    labels[3, -1] = torch.tensor(outside)
    with pytest.raises(
        ValueError, match=rf"1 SIDs that are not in the catalog, such as \[{outside[0]}, {outside[1]}, {outside[2]}\]"
    ):
        model(item_codes, mask, labels)


def test_labels_of_a_wrong_shape_or_without_any_target_are_refused(make_model, make_batch):
    model = make_model()
    item_codes, mask, labels = make_batch(model)
    with pytest.raises(ValueError, match="`labels` must have the shape of `item_codes`"):
        model(item_codes, mask, labels[:, :-1])
    with pytest.raises(ValueError, match="no target"):
        model(item_codes, torch.zeros_like(mask), torch.full_like(labels, -100))


def test_loss_on_a_catalog_of_one_sid_is_zero(make_model):
    model = make_model((3, 3), catalog=[[2, 1]])
    codes = torch.tensor([[[2, 1], [2, 1]]])
    assert model(codes, labels=codes).loss.item() == 0


@torch.no_grad()
def test_empty_history_is_answered_from_the_start_state_alone_and_in_a_batch(
    make_model, make_reference, make_histories
):
    model = make_model()
    expected = make_reference(model).concept(torch.zeros((0, 3), dtype=torch.long))
    item_codes, mask = make_histories(model, [3, 0])
    empty = torch.zeros((2, 4, 3), dtype=torch.long), torch.zeros((2, 4), dtype=torch.long)
    for concepts in (
        model.encode_concepts(item_codes, mask)[1:],
        model.encode_concepts(item_codes[1:], mask[1:]),
        model.encode_concepts(*empty)[:1],
        model.encode_concepts(*empty)[1:],
        model.encode_concepts(empty[0][:1, :0]),
        model(*empty).concepts[:1],
    ):
        torch.testing.assert_close(concepts, expected[None], rtol=1e-5, atol=1e-6)
    alone, mixed = search(model, (item_codes[1:], mask[1:])), search(model, (item_codes, mask))
    assert alone.sequences.tolist() == mixed.sequences[8:].tolist()
    torch.testing.assert_close(alone.sequences_scores, mixed.sequences_scores[8:], rtol=1e-5, atol=1e-5)
    model.start_state.add_(torch.randn(16, generator=torch.Generator().manual_seed(9)))
    assert not torch.allclose(model.encode_concepts(*empty)[0], expected, atol=1e-2)
    assert model.encode_history(*empty).abs().sum() == 0


def test_results_after_set_catalog_come_from_the_new_catalog_and_weights_stay(make_model, make_codes, make_histories):
    model = make_model((5, 4, 6), 30)
    inputs = make_histories(model, [3, 2])
    search(model, inputs)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    codes = make_codes((5, 4, 6), 12, seed=7).to(torch.int64)
    given = codes.clone()
    model.set_catalog(codes)
    codes.zero_()  # the model keeps its own copy
    output = search(model, inputs, num_beams=12, num_return_sequences=12)
    for user in range(2):
        rows = slice(user * 12, user * 12 + 12)
        assert sorted(output.sequences[rows].tolist()) == sorted(given.tolist())
        assert given[output.item_rows[rows]].tolist() == output.sequences[rows].tolist()
    assert (model.config.num_items, model.trie.num_items) == (12, 12)
    assert model.catalog_codes.dtype == torch.int32 and model.catalog_codes.tolist() == given.tolist()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize(
    "as_type", [lambda codes: codes.tolist(), lambda codes: codes.numpy(), lambda codes: codes.to(torch.uint8)]
)
def test_set_catalog_takes_lists_and_arrays(make_model, make_codes, as_type):
    model = make_model(catalog=False)
    model.set_catalog(as_type(make_codes((5, 4, 6), 10)))
    assert model.catalog_codes.dtype == torch.int32
    assert model.catalog_codes.tolist() == make_codes((5, 4, 6), 10).tolist()
    assert "catalog_codes" in model.state_dict()


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros((3, 2), dtype=torch.long),
        torch.zeros((3, 3)),
        torch.zeros((0, 3), dtype=torch.long),
        torch.tensor([[0, 4, 0]]),
    ],
)
def test_bad_codes_leave_the_old_catalog_in_place(make_model, make_histories, bad):
    model = make_model()
    inputs = make_histories(model, [3])
    before, codes = search(model, inputs), model.catalog_codes.clone()
    with pytest.raises(ValueError, match="`codes`"):
        model.set_catalog(bad)
    assert torch.equal(model.catalog_codes, codes) and model.config.num_items == 30
    after = search(model, inputs)
    assert torch.equal(after.sequences, before.sequences) and torch.equal(
        after.sequences_scores, before.sequences_scores
    )


def test_loading_a_state_dict_replaces_the_catalog_too(make_model, make_histories):
    model, other = make_model(seed=0), make_model(seed=1)
    inputs = make_histories(model, [3, 2])
    search(model, inputs)
    model.load_state_dict(other.state_dict())
    expected, got = search(other, inputs), search(model, inputs)
    assert torch.equal(got.sequences, expected.sequences) and torch.equal(got.item_rows, expected.item_rows)


def test_deepcopy_is_equal_and_independent(make_model, make_codes, make_histories, make_batch):
    model = make_model(dropout=0.5, decoder_dropout=0.5)
    inputs = make_histories(model, [3, 2])
    before = search(model, inputs)
    twin = copy.deepcopy(model)
    assert torch.equal(search(twin, inputs).sequences_scores, before.sequences_scores)
    twin.set_catalog(make_codes((5, 4, 6), 9, seed=4))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    after = search(model, inputs)
    assert torch.equal(after.sequences, before.sequences) and torch.equal(
        after.sequences_scores, before.sequences_scores
    )
    torch.manual_seed(0)  # hooks came along: dropout still works in both
    fresh = copy.deepcopy(model).train()
    batch = make_batch(fresh)
    assert fresh(*batch).loss.item() != fresh(*batch).loss.item()


def test_eager_attention_equals_sdpa(make_model, make_histories, make_batch, tmp_path):
    make_model().save_pretrained(tmp_path)
    models = [
        DecoForSIDRetrieval.from_pretrained(tmp_path, attn_implementation=name).eval() for name in ("eager", "sdpa")
    ]
    for model, name in zip(models, ("eager", "sdpa"), strict=True):
        assert {model.config._attn_implementation, model.backbone.config._attn_implementation} == {name}
        assert model.decoder.transformer.config._attn_implementation == name
    inputs = make_histories(models[0], [4, 1, 0, 3])
    eager, sdpa = (search(model, inputs) for model in models)
    assert eager.sequences.tolist() == sdpa.sequences.tolist()
    torch.testing.assert_close(eager.sequences_scores, sdpa.sequences_scores, rtol=1e-5, atol=1e-5)
    losses = [model(*make_batch(model)).loss for model in models]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casting_a_model_casts_weights_and_leaves_the_catalog(make_model, make_histories, dtype):
    model = make_model()
    inputs = make_histories(model, [3, 0])
    best = search(model, inputs).sequences_scores[[0, 8]]
    model.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.catalog_codes.dtype == torch.int32
    assert model.encode_concepts(*inputs).dtype == dtype
    tolerance = 0.2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(search(model, inputs).sequences_scores[[0, 8]].float(), best, rtol=0, atol=tolerance)


def cosines(rows):
    return F.cosine_similarity(rows[:, None], rows[None], dim=-1)


def test_code_tables_keep_the_centred_similarities_of_the_codebooks_in_all_roles(make_model):
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    # Centred books of 5, 4 and 6 rows have ranks 4, 3 and 5: the narrowest table is 6 wide.
    books = [torch.randn((size, 20), generator=generator) + 3 for size in (5, 4, 6)]
    untouched = {
        name: p.clone() for name, p in model.named_parameters() if "tables" not in name and "heads" not in name
    }
    model.init_code_tables([books[0], books[1].numpy(), books[2].double()])
    for level, book in enumerate(books):
        expected = cosines(book - book.mean(0))
        roles = [(model.fuser.tables[level].weight, 0.2), (model.decoder.heads[level].weight, 0.02)]
        roles += [(model.decoder.tables[level].weight, 0.02)] if level < 2 else []
        for weight, scale in roles:
            torch.testing.assert_close(cosines(weight), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(weight.square().mean().sqrt(), torch.tensor(scale), rtol=1e-4, atol=0)
            assert weight.requires_grad and weight.is_leaf
    for name, parameter in model.named_parameters():
        assert name not in untouched or torch.equal(parameter, untouched[name]), name


def test_code_tables_narrower_than_the_codebooks_keep_the_leading_directions(make_model):
    generator = torch.Generator().manual_seed(0)
    model = make_model((30,), 20)
    book = torch.randn((30, 9), generator=generator) * torch.tensor([9.0, 8, 7, 6, 5, 4, 1e-4, 1e-4, 1e-4])
    model.init_code_tables([book])
    centred = book - book.mean(0)
    torch.testing.assert_close(cosines(model.fuser.tables[0].weight), cosines(centred[:, :6]), rtol=0, atol=1e-3)
    # The six-wide table and the first six columns of the wider one are the same directions.
    ratio = model.fuser.tables[0].weight.norm() / model.decoder.heads[0].weight[:, :6].norm()
    torch.testing.assert_close(
        model.fuser.tables[0].weight, model.decoder.heads[0].weight[:, :6] * ratio, rtol=0, atol=1e-3
    )


def test_code_tables_of_books_without_directions_are_zero_not_nan(make_model):
    model = make_model((3, 1), 3)
    model.init_code_tables([torch.ones(3, 4), torch.randn(1, 4)])
    assert model.fuser.tables[0].weight.abs().sum() == 0 and model.fuser.tables[1].weight.abs().sum() == 0


@pytest.mark.parametrize(
    "shapes", [[(5, 3), (4, 3)], [(5, 3), (5, 3), (6, 3)], [(5,), (4,), (6,)], [(5, 3), (4, 3), (6, 3), (6, 3)]]
)
def test_codebooks_of_wrong_shapes_are_refused_and_change_nothing(make_model, shapes):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"`codebooks` have shapes .* levels have \(5, 4, 6\) codes"):
        model.init_code_tables([torch.ones(shape) for shape in shapes])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("options", [{"dropout": 0.4}, {"decoder_dropout": 0.4}])
def test_dropout_is_active_in_training_and_off_in_eval(make_model, make_batch, options):
    torch.manual_seed(0)
    plain, model = make_model(), make_model(**options)
    batch = make_batch(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model(*batch).loss.item() == plain(*batch).loss.item()
    model.train()
    states = [model.encode_history(*batch[:2]) for _ in range(2)]
    assert torch.equal(*states) == ("dropout" not in options)  # the decoder's dropout leaves the backbone alone
    assert model(*batch).loss.item() != model(*batch).loss.item()
    assert plain.train()(*batch).loss.item() == plain(*batch).loss.item()
    assert model.eval()(*batch).loss.item() == plain.eval()(*batch).loss.item()


def test_residual_dropout_zeroes_or_rescales_what_every_layer_adds(make_model):
    torch.manual_seed(0)
    backbone = make_model().backbone
    add_residual_dropout(backbone, 0.25)
    for layer in backbone.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            inputs = torch.randn(400, projection.in_features)
            expected = projection.eval()(inputs)
            torch.testing.assert_close(expected, F.linear(inputs, projection.weight, projection.bias))
            dropped = projection.train()(inputs)
            zero = dropped == 0
            assert abs(zero.float().mean().item() - 0.25) < 0.03
            torch.testing.assert_close(dropped[~zero], expected[~zero] / 0.75)
    inputs = torch.randn(3, backbone.layers[0].mlp.up_proj.in_features)
    assert (backbone.layers[0].mlp.up_proj.train()(inputs) != 0).all()


def test_residual_dropout_refuses_a_transformer_without_such_layers():
    other = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="`o_proj` and `down_proj`; Sequential has none"):
        add_residual_dropout(other, 0.1)
    add_residual_dropout(other, 0.0)


def test_fresh_models_start_small_and_have_no_text_embeddings():
    torch.manual_seed(0)
    config = DecoConfig.from_preset("S", codebook_size=32, num_codebooks=2)
    model = DecoForSIDRetrieval(config)
    assert not any("embed_tokens" in name for name, _ in model.named_parameters())
    assert model.get_input_embeddings() is None
    assert abs(model.decoder.heads[0].weight.std().item() - 0.02) < 0.002
    assert abs(model.fuser.up_proj.weight.std().item() - 0.02) < 0.002
    assert 0.7 < model.start_state.std().item() < 1.3
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.catalog_codes.shape == (0, 2)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_any_decoder_only_backbone_of_transformers_works(
    make_reference, make_batch, randomise_weights, make_codes, model_type
):
    shape = {"vocab_size": 1, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    config = DecoConfig(
        text_config={"model_type": model_type, **shape},
        decoder_config={"model_type": model_type, **shape},
        num_codebooks=2,
        codebook_size=[4, 5],
        code_embedding_size=4,
        dropout=0.1,
    )
    model = randomise_weights(DecoForSIDRetrieval(config)).eval()
    model.set_catalog(make_codes((4, 5), 12))
    batch = make_batch(model)
    torch.testing.assert_close(
        model(*batch).loss, naive_loss(model, make_reference(model), *batch)[0], rtol=1e-5, atol=1e-5
    )
