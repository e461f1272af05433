"""One dense pass over histories and gold prefixes, against one pass per position and prefix."""

import pytest
import torch
import torch.nn.functional as F

from hf_deco.models import layers_sid

MODELS = [("deco", "fused"), ("deco", "flat"), ("backbone", "fused"), ("backbone", "flat")]
NORMALIZATIONS = ["children", "vocabulary"]
BRANCHING = [[a, b, c] for a in range(3) for b in range(2) for c in range(3)]  # every level branches everywhere


@pytest.fixture
def make_grid_model(make_model):
    def make(kind_and_format, **kwargs):
        kind, history_format = kind_and_format
        return make_model(kind=kind, history_format=history_format, **kwargs)

    return make


def every_target(item_codes, mask, labels):
    """`(user, history before the target, target)` in the order of users and positions."""
    for user in range(len(item_codes)):
        history, after = item_codes[user][mask[user].bool()], labels[user][mask[user].bool()]
        if len(history):
            yield user, history[:0], tuple(history[0].tolist())
        for position, label in enumerate(after):
            if label[0] != -100:
                yield user, history[: position + 1], tuple(label.tolist())


def gradients_by_name(model, loss):
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True)
    }


def assert_same_gradients(got, expected):
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, rtol=1e-3, atol=2e-5), name


@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize(
    ("sizes", "num_items", "padding"),
    [((5, 4, 6), 30, "left"), ((5, 4, 6), 30, "right"), ((3, 1, 4, 2), 9, "both"), ((6,), 5, "left")],
)
@pytest.mark.parametrize("kind", MODELS)
def test_dense_scores_equal_one_pass_per_position_and_prefix(
    make_grid_model, make_reference, make_sequences, kind, sizes, num_items, padding, normalize_over, copy_pointer
):
    model = make_grid_model(
        kind, sizes=sizes, num_items=num_items, normalize_over=normalize_over, copy_pointer=copy_pointer
    )
    reference = make_reference(model)
    item_codes, mask, labels = make_sequences(model, [4, 1, 0, 3], padding=padding)
    columns = mask[0].nonzero().squeeze(1)
    labels[0, columns[1]] = -100  # not every position is a target
    scores = model.score_targets(item_codes, mask, labels)
    wanted = list(every_target(item_codes, mask, labels))
    assert [(user, list(sid)) for user, _, sid in wanted] == list(
        zip(scores.targets.users.tolist(), scores.targets.codes.tolist(), strict=True)
    )

    likelihoods = torch.stack([reference.log_likelihood(history, sid) for _, history, sid in wanted])
    torch.testing.assert_close(scores.log_likelihood(), likelihoods, rtol=1e-5, atol=1e-5)
    output = model(item_codes, mask, labels, return_target_scores=True)
    torch.testing.assert_close(output.loss, -likelihoods.mean(), rtol=1e-5, atol=1e-5)
    assert len(output.target_scores.targets) == len(wanted) == 10 and output.loss.dtype == torch.float32
    assert torch.equal(output.target_scores.log_likelihood(), scores.log_likelihood())
    assert model(item_codes, mask, labels).target_scores is None
    assert_same_gradients(gradients_by_name(model, output.loss), gradients_by_name(model, -likelihoods.mean()))

    scored = set()
    for entry in scores.levels:
        counts = torch.diff(entry.starts, append=torch.tensor([len(entry.log_probs)])).tolist()
        for row, log_probs, gold in zip(
            entry.rows.tolist(), entry.log_probs.split(counts), (entry.gold - entry.starts).tolist(), strict=True
        ):
            _, history, sid = wanted[row]
            expected = reference.next_log_probs(reference.known(history), sid[: entry.level])
            torch.testing.assert_close(log_probs, torch.stack(list(expected.values())), rtol=1e-5, atol=1e-5)
            assert list(expected)[gold] == sid[entry.level]
            scored.add((row, entry.level))
    forced = {
        (row, level)
        for row, (_, _, sid) in enumerate(wanted)
        for level in range(len(sizes))
        if normalize_over == "children" and len(reference.children(sid[:level])) == 1
    }
    assert scored == {(row, level) for row in range(10) for level in range(len(sizes))} - forced


@pytest.mark.parametrize("kind", MODELS[::2])
def test_targets_of_a_fused_history_need_not_be_its_own_next_items(
    make_grid_model, make_reference, make_sequences, kind
):
    model = make_grid_model(kind, copy_pointer=True)
    item_codes, mask, labels = make_sequences(model, [4, 1, 3])
    labels = torch.where(labels == -100, labels, model.catalog_codes[[7, 3, 20]].long()[:, None])
    expected = [
        make_reference(model).log_likelihood(history, sid) for _, history, sid in every_target(item_codes, mask, labels)
    ]
    torch.testing.assert_close(
        model.score_targets(item_codes, mask, labels).log_likelihood(), torch.stack(expected), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", MODELS)
def test_history_items_outside_the_catalog_are_read_but_never_copied(
    make_grid_model, make_reference, make_sequences, kind
):
    model = make_grid_model(kind, copy_pointer=True)
    known = set(map(tuple, model.catalog_codes.tolist()))
    outside = next([a, b, c] for a in range(5) for b in range(4) for c in range(6) if (a, b, c) not in known)
    item_codes, mask, labels = make_sequences(model, [4, 3])
    item_codes[0, 2], labels[0, 1] = torch.tensor(outside), -100
    item_codes[1, 3], labels[1, 2] = torch.tensor(outside), -100
    wanted = list(every_target(item_codes, mask, labels))
    expected = torch.stack([make_reference(model).log_likelihood(history, sid) for _, history, sid in wanted])
    scores = model.score_targets(item_codes, mask, labels)
    torch.testing.assert_close(scores.log_likelihood(), expected, rtol=1e-5, atol=1e-5)
    assert scores.copies.weights[:, 2][scores.targets.users == 0].abs().sum() == 0


@pytest.mark.parametrize("rows_per_group", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_grouping_histories_changes_neither_scores_nor_gradients(
    make_grid_model, make_sequences, monkeypatch, kind, rows_per_group
):
    model = make_grid_model(kind, copy_pointer=True)
    batch = make_sequences(model, [2, 5, 0, 1, 5, 3, 2], padding="both")
    shapes, forward = [], model.backbone.forward
    monkeypatch.setattr(
        model.backbone,
        "forward",
        lambda inputs_embeds, **kw: shapes.append(inputs_embeds.shape) or forward(inputs_embeds=inputs_embeds, **kw),
    )

    def step():
        shapes.clear()
        scores = model.score_targets(*batch).log_likelihood()
        return scores, gradients_by_name(model, scores.mean())

    monkeypatch.setattr(layers_sid, "ROWS_PER_GROUP", 32)
    expected, expected_gradients = step()
    assert len(shapes) == 1 and shapes[0][0] == 6  # all but the empty history
    monkeypatch.setattr(layers_sid, "ROWS_PER_GROUP", rows_per_group)
    got, gradients = step()
    assert len(shapes) == 6 // rows_per_group and {shape[0] for shape in shapes} == {rows_per_group}
    assert len({shape[1] for shape in shapes}) > 1  # short groups are read short
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients, expected_gradients)


@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_loss_does_not_depend_on_padding_or_on_codes_there(make_grid_model, make_sequences, kind, copy_pointer):
    model = make_grid_model(kind, copy_pointer=copy_pointer)
    item_codes, mask, labels = make_sequences(model, [4, 1, 0, 3])
    expected = model(item_codes, mask, labels).loss
    for left, right in ((3, 0), (0, 2), (2, 1)):
        for value in (0, 3, -1):
            padded_mask = F.pad(mask, (left, right))
            padded_codes = F.pad(item_codes, (0, 0, left, right))
            padded_codes[padded_mask == 0] = value
            padded_labels = F.pad(labels, (0, 0, left, right), value=-100)
            loss = model(padded_codes, padded_mask, padded_labels).loss
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_gradient_of_the_loss_reaches_every_parameter(make_grid_model, make_sequences, kind, copy_pointer):
    model = make_grid_model(kind, sizes=(3, 2, 3), catalog=BRANCHING, copy_pointer=copy_pointer).train()
    model(*make_sequences(model, [5, 2, 0, 4, 6])).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # A softmax ignores a bias of all its keys.
        assert parameter.grad.abs().sum() > 0 or name.endswith("k_proj.bias"), name


@pytest.mark.parametrize("kind", MODELS)
def test_activation_checkpointing_changes_neither_loss_nor_gradients(make_grid_model, make_sequences, kind):
    model = make_grid_model(kind, copy_pointer=True).train()
    batch = make_sequences(model, [4, 1, 3])
    loss = model(*batch).loss
    expected = loss.item(), gradients_by_name(model, loss)
    model.activation_checkpointing_enable()
    assert model.backbone.is_activation_checkpointing
    loss = model(*batch).loss
    assert abs(loss.item() - expected[0]) < 1e-5
    assert_same_gradients(gradients_by_name(model, loss), expected[1])


@pytest.mark.parametrize("kind", MODELS[2:])
def test_a_full_backbone_skips_the_prefix_tokens_that_forced_levels_would_need(
    make_grid_model, make_sequences, monkeypatch, kind
):
    model = make_grid_model(kind, sizes=(4, 4, 4), catalog=[[0, 1, 2], [1, 3, 0], [2, 0, 0]])
    shapes, forward = [], model.backbone.forward
    monkeypatch.setattr(
        model.backbone,
        "forward",
        lambda inputs_embeds, **kw: shapes.append(inputs_embeds.shape) or forward(inputs_embeds=inputs_embeds, **kw),
    )
    model.score_targets(*make_sequences(model, [3, 3]))
    expected = 3 if kind[1] == "fused" else 4 * 3  # a flat history is its own prefixes, and the last target's
    assert [tuple(shape[:2]) for shape in shapes] == [(2, expected)]


@pytest.mark.parametrize("change", ["other item", "position of another"])
def test_labels_of_a_flat_full_backbone_must_be_the_next_items(make_grid_model, make_sequences, change):
    model = make_grid_model(("backbone", "flat"))
    item_codes, mask, labels = make_sequences(model, [4, 2])
    model(item_codes, mask, labels)
    if change == "other item":
        sid = next(code for code in model.catalog_codes.long() if not torch.equal(code, labels[0, 1]))
        labels[0, 1] = sid
    else:
        labels = item_codes.masked_fill(mask.unsqueeze(-1) == 0, -100)
    with pytest.raises(ValueError, match="`labels` of a flat history must be its own next items"):
        model(item_codes, mask, labels)


@pytest.mark.parametrize("kind", MODELS)
def test_labels_outside_the_catalog_are_named(make_grid_model, make_sequences, kind):
    model = make_grid_model(kind, sizes=(4, 4), catalog=[[0, 1], [1, 3], [2, 0]])
    item_codes, mask, labels = make_sequences(model, [3, 2])
    labels[1, -1] = torch.tensor([3, 2])
    with pytest.raises(ValueError, match=r"1 SIDs that are not in the catalog, such as \[3, 2\]"):
        model(item_codes, mask, labels)


def test_code_tables_of_a_full_backbone_start_from_content_in_all_roles(make_grid_model):
    generator = torch.Generator().manual_seed(0)
    books = [torch.randn((size, 20), generator=generator) + 3 for size in (5, 4, 6)]
    for kind in MODELS[2:]:
        model = make_grid_model(kind)
        model.init_code_tables(books)
        for level, book in enumerate(books):
            centred = book - book.mean(0)
            expected = F.cosine_similarity(centred[:, None], centred[None], dim=-1)
            roles = [(model.heads[level].weight, 0.02)]
            roles.append((model.fuser.tables[level].weight, 0.2 if kind[1] == "fused" else 0.02))
            if kind[1] == "fused" and level < 2:
                roles.append((model.tables[level].weight, 0.02))
            for weight, scale in roles:
                cosines = F.cosine_similarity(weight[:, None], weight[None], dim=-1)
                torch.testing.assert_close(cosines, expected, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(weight.square().mean().sqrt(), torch.tensor(scale), rtol=1e-4, atol=0)


def test_a_flat_history_has_no_prefix_tables_of_its_own(make_grid_model):
    flat, fused = (make_grid_model(kind) for kind in (MODELS[3], MODELS[2]))
    assert flat.tables is None and not any(name.startswith("tables") for name, _ in flat.named_parameters())
    assert [table.weight.shape for table in fused.tables] == [(5, 16), (4, 16)]
    assert [table.weight.shape for table in flat.fuser.tables] == [(5, 16), (4, 16), (6, 16)]
