"""GEAR's training: every loss against the model written out, what each stage trains, and bad batches."""

import pytest
import torch
from gear_models import CONFIG, Reference, make_batch, make_gear, make_items

from hf_deco import GearConfig, GearForSIDRetrieval
from hf_deco.models.losses_gear import generator_weights, lambda_loss

PARTS = ("ltr", "rq", "gen", "rerank")


@pytest.fixture
def model():
    return make_gear()


@pytest.fixture
def batch():
    return make_batch()


def expected_losses(model, batch):
    """The four losses, a request and a candidate at a time."""
    reference = Reference(model)
    hidden, vectors = zip(*(reference.item_tower(reference.item(batch, row)) for row in range(12)), strict=True)
    hidden = torch.stack(hidden)
    codes = model.encode_items(batch["content"], batch["item_ids"]).codes.tolist()
    there = batch["candidates"] >= 0
    towers, reranked, spelt = torch.zeros(4, 3), torch.zeros(4, 3), []
    weights = generator_weights(batch["weights"], batch["impressed"] & there)
    for user, place in there.nonzero().tolist():
        row = int(batch["candidates"][user, place])
        memory = reference.memory(batch, user)
        towers[user, place] = reference.user_tower(batch, user) @ vectors[row]
        reranked[user, place] = reference.rerank_vector(memory, codes[row]) @ vectors[row]
        if batch["impressed"][user, place]:
            spelt.append(-weights[user, place] * reference.log_prob(memory, codes[row]))
    return {
        "ltr": lambda_loss(towers, batch["labels"], there, model.config.sigma, model.config.gain),
        "rq": model.quantizer(hidden).loss,
        "gen": torch.stack(spelt).mean(),
        "rerank": lambda_loss(reranked, batch["labels"], there, model.config.sigma, model.config.gain),
    }


@pytest.mark.parametrize("options", [{}, {"sigma": 0.5, "gain": "exp2"}, {"quantizer": "rq"}])
def test_losses_are_those_of_the_model_written_out(batch, options):
    model = make_gear(**options)
    output = model(**batch)
    expected = expected_losses(model, batch)
    for name in PARTS:
        assert expected[name] > 0.01
        torch.testing.assert_close(output[f"{name}_loss"], expected[name], rtol=1e-4, atol=1e-5)
    total = expected["ltr"] + expected["rq"] + 10 * expected["gen"] + expected["rerank"]
    torch.testing.assert_close(output.loss, total, rtol=1e-4, atol=1e-5)
    assert torch.equal(output.item_codes, model.encode_items(batch["content"], batch["item_ids"]).codes)


def test_a_stage_computes_its_losses_alone_and_weighs_them(batch):
    weights = {"ltr": 2.0, "rq": 0.5, "gen": 3.0, "rerank": 0.25}
    model = make_gear(loss_weights=weights)
    whole = model(**batch)
    for stage, names in (("ltr", PARTS[:1]), ("rq", PARTS[:2]), ("joint", PARTS)):
        model.set_stage(stage)
        output = model(**batch)
        losses = {name: getattr(output, f"{name}_loss") for name in PARTS}
        computed = {name: loss for name, loss in losses.items() if loss is not None}
        assert tuple(computed) == names
        for name in names:
            torch.testing.assert_close(computed[name], whole[f"{name}_loss"])
        torch.testing.assert_close(output.loss, sum(weights[name] * computed[name] for name in names))
        assert (output.item_codes is None) == (stage == "ltr")


@pytest.mark.parametrize("off", PARTS)
def test_a_part_of_weight_zero_is_not_computed(batch, off):
    whole, model = make_gear()(**batch), make_gear(loss_weights={off: 0.0})
    output = model(**batch)
    for name in PARTS:
        if name == off:
            assert getattr(output, f"{name}_loss") is None
        else:
            torch.testing.assert_close(output[f"{name}_loss"], whole[f"{name}_loss"])
    assert torch.equal(output.item_codes, whole.item_codes)  # also from a tokenizer that does not learn


ITEM_HIDDEN = {"item_features", "item_tower.up_proj", "item_tower.down_proj"}
ITEM = ITEM_HIDDEN | {"item_tower.wide_proj", "item_tower.out_proj"}
USER = {"user_features", "user_tower"}
MEMORY = {"item_features", "user_features", "memory_encoder"}
SPELLER = {"decoder.start_token", "decoder.tables", "decoder.layers"}
REACHED = {
    "ltr": ITEM | USER,
    "rq": ITEM_HIDDEN | {"quantizer"},
    "gen": MEMORY | SPELLER | {"decoder.heads"},
    "rerank": MEMORY | SPELLER | {"decoder.rerank_head"} | ITEM,
}


def parts_with_gradient(model):
    """Parts of the model, as named above, whose parameters have a gradient that is not zero."""
    names = set().union(*REACHED.values())
    found, all_of = set(), {}
    for parameter, value in model.named_parameters():
        part = next(name for name in names if parameter == name or parameter.startswith(name + "."))
        reached = value.grad is not None and bool((value.grad != 0).any())
        found |= {part} if reached else set()
        all_of.setdefault(part, []).append((parameter, reached))
    return found, all_of


@pytest.mark.parametrize("name", PARTS)
def test_a_loss_reaches_its_own_parts_and_nothing_else(model, batch, name):
    model(**batch)[f"{name}_loss"].backward()
    found, all_of = parts_with_gradient(model)
    assert found == REACHED[name]
    for part in found - {"decoder.tables"}:
        assert all(reached for _, reached in all_of[part]), all_of[part]
    last_table = model.decoder.tables[2].weight.grad
    if name == "gen":  # the last code is a target alone
        assert last_table is None or not last_table.any()
    elif name == "rerank":
        assert last_table.any()


@pytest.mark.parametrize(("stage", "names"), [("ltr", PARTS[:1]), ("rq", PARTS[:2]), ("joint", PARTS)])
def test_a_stage_leaves_what_it_does_not_train_without_gradient(model, batch, stage, names):
    model.train()
    model.set_stage(stage)
    model(**batch).loss.backward()
    expected = set().union(*(REACHED[name] for name in names))
    assert parts_with_gradient(model)[0] == expected
    for parameter, value in model.named_parameters():
        outside = not any(parameter == name or parameter.startswith(name + ".") for name in expected)
        assert (value.grad is None) == outside, parameter


def test_training_on_one_batch_learns_it():
    """All four losses fall, and the generator then finds what it was shown."""
    torch.manual_seed(0)
    model, batch = make_gear(scale=0.2, head_dim=16, intermediate_size=32).train(), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    first = None
    for step in range(150):
        model.set_stage("ltr" if step < 20 else "rq" if step < 40 else "joint")
        output = model(**batch)
        first = first or (output if step == 40 else None)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    assert output.gen_loss < 0.3 * first.gen_loss and output.rerank_loss < first.rerank_loss
    model.eval()
    items = model.encode_items(batch["content"], batch["item_ids"])
    model.set_catalog(items.codes)
    users = {name: batch[name] for name in ("content", "item_ids", "user_ids", "behaviors")}
    best = model.generate(**users, num_beams=12, num_return_sequences=1)
    valuable = torch.tensor([6, 8, 6, 5])  # of every request, the impressed item of the highest weight
    assert torch.equal(best, items.codes[valuable])


def test_candidates_that_do_not_exist_count_for_nothing(model, batch):
    expected = model(**batch)
    wider = {name: torch.nn.functional.pad(batch[name], (0, 2)) for name in ("labels", "impressed", "weights")}
    wider["candidates"] = torch.nn.functional.pad(batch["candidates"], (0, 2), value=-1)
    wider["labels"][:, 3:], wider["weights"][:, 3:], wider["impressed"][:, 3:] = torch.nan, torch.inf, True
    output = model(**{**batch, **wider})
    for name in PARTS:
        torch.testing.assert_close(output[f"{name}_loss"], expected[f"{name}_loss"])


def test_lists_whose_labels_are_equal_teach_towers_and_reranker_nothing(model, batch):
    output = model(**{**batch, "labels": torch.full((4, 3), 2.0)})
    assert output.ltr_loss.item() == output.rerank_loss.item() == 0 and output.loss > 0
    output.loss.backward()
    assert all(not value.grad.any() for value in model.user_tower.parameters())


def test_nobody_saw_anything(model, batch):
    output = model(**{**batch, "impressed": torch.zeros(4, 3, dtype=torch.bool)})
    assert output.gen_loss.item() == 0
    output.gen_loss.backward()
    model.config.loss_weights["rerank"] = 0.0  # then no SID is read at all
    alone = model(**{**batch, "impressed": torch.zeros(4, 3, dtype=torch.bool)})
    assert alone.gen_loss.item() == 0
    alone.loss.backward()


def test_without_weights_every_impressed_sample_weighs_one(model, batch):
    del batch["weights"]
    weighed = {**batch, "weights": torch.full((4, 3), torch.e - 1)}
    torch.testing.assert_close(model(**batch).gen_loss, model(**weighed).gen_loss)


def test_frozen_codes_take_the_tokenizers_place(model, batch):
    own = model(**batch)
    same = model(**batch, item_codes=own.item_codes)
    assert same.rq_loss is None and torch.equal(same.gen_loss, own.gen_loss)
    other = model(**batch, item_codes=own.item_codes.roll(1, 0).int())
    assert not torch.equal(other.gen_loss, own.gen_loss) and torch.equal(other.ltr_loss, own.ltr_loss)
    other.loss.backward()
    assert all(value.grad is None for value in model.quantizer.parameters())


def test_running_means_move_in_training_alone(batch):
    model = make_gear(quantizer="rq-ema")
    before = model.quantizer.levels[0].codebook.clone()
    model(**batch)
    assert torch.equal(model.quantizer.levels[0].codebook, before)
    model.train().config.loss_weights["ltr"] = 0.0  # so that the first to read labels is the reranker
    for name in ("weights", "labels"):
        with pytest.raises(ValueError, match=f"`{name}` must be finite and not negative"):
            model(**{**batch, name: -1 - batch[name]})
        assert torch.equal(model.quantizer.levels[0].codebook, before)  # a bad batch changed nothing
    model(**batch)
    assert not torch.equal(model.quantizer.levels[0].codebook, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": None}, "needs `candidates` and `labels`; to search, `generate`"),
        ({"labels": None}, "needs `candidates` and `labels`"),
        ({"candidates": torch.full((4, 3), 12)}, "`candidates` must be rows of the batch's 12 items, .* got 12 to 12"),
        ({"candidates": torch.zeros(3, 3).long()}, r"`candidates` must be integers of shape \(4, items\)"),
        ({"labels": torch.zeros(4, 2)}, r"`labels` must have the shape of `candidates`, \(4, 3\), got \(4, 2\)"),
        ({"labels": torch.full((4, 3), -1.0)}, r"`labels` must be finite and not negative, got -1.0 at \[0, 0\]"),
        ({"labels": torch.full((4, 3), torch.inf)}, r"`labels` must be finite and not negative, got inf"),
        ({"weights": torch.full((4, 3), -2.0)}, r"`weights` must be finite and not negative, got -2.0 at \[0, 0\]"),
        ({"weights": torch.full((4, 3), torch.inf)}, r"`weights` must be finite and not negative, got inf"),
        ({"weights": torch.zeros(4)}, r"`weights` must have the shape of `impressed`, \(4, 3\), got \(4,\)"),
        ({"impressed": None}, r"`impressed` must have the shape of `candidates`, \(4, 3\), got None"),
        ({"impressed": torch.ones(4)}, r"`impressed` must have the shape of `candidates`, \(4, 3\), got \(4,\)"),
        ({"item_codes": torch.zeros(11, 3).long()}, "`item_codes` must have a row for each of 12 items, got 11"),
        ({"item_codes": torch.full((12, 3), 4)}, "`codes` of level 1 must lie in 0..3, got 4..4"),
        ({"content": torch.full((12, 5), torch.inf)}, "`content` holds NaN or infinite values"),
    ],
)
def test_bad_batches_are_named(model, batch, change, message):
    with pytest.raises(ValueError, match=message):
        model(**{**batch, **change})


def test_mixed_precision_trains_and_searches(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        output = model.train()(**batch)
        output.loss.backward()
        model.eval().set_catalog(output.item_codes)
        users = {name: batch[name] for name in ("content", "item_ids", "user_ids", "behaviors")}
        memory = model.encode_memory(**users)
        found = model.generate(
            memory=memory, num_beams=9, num_return_sequences=9, rerank=True, return_dict_in_generate=True
        )
        vectors = model.rerank_vectors(memory, found.sequences.view(4, 9, 3))
    expected = make_gear()(**batch)
    for name in PARTS:
        torch.testing.assert_close(output[f"{name}_loss"], expected[f"{name}_loss"], rtol=0.1, atol=0.1)
    assert torch.equal(output.item_codes, expected.item_codes)  # codes are never made in half precision
    assert all(value.grad is None or value.grad.isfinite().all() for value in model.parameters())
    assert found.rerank_vectors.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(found.rerank_vectors.view(4, 9, 6), vectors, rtol=0.1, atol=0.3)


def test_an_empty_table_is_named(model, batch):
    content, item_ids = make_items(0, 0)
    empty = {"behaviors": [torch.full((4, 1), -1)] * 2, "candidates": torch.full((4, 3), -1)}
    with pytest.raises(ValueError, match="`content` is empty: a batch to train on needs items"):
        model(**{**batch, **empty, "content": content, "item_ids": item_ids})


def test_stages_are_named(batch):
    model = make_gear(loss_weights={"ltr": 0})
    with pytest.raises(ValueError, match="`stage` must be one of ltr, rq, joint, got 'gen'"):
        model.set_stage("gen")
    assert model.stage == "joint"
    model.set_stage("ltr")
    with pytest.raises(ValueError, match="Nothing to train in stage 'ltr' with `loss_weights`"):
        model(**batch)


def test_weight_decay_is_kept_from_bases_and_scales(model):
    names = model.no_decay_parameters()
    assert len(names) == 5 and set(names) <= {name for name, _ in model.named_parameters()}
    assert {name.rsplit(".", 2)[-2] if "scales" in name else name.rsplit(".", 1)[1] for name in names} == {
        "basis",
        "scales",
    }


def test_defaults_are_the_papers():
    config = GearConfig()
    assert config.codebook_sizes == (2048, 512, 128) and (config.code_size, config.tower_size) == (128, 96)
    assert [behavior["length"] for behavior in config.behaviors] == [200, 100]
    heads = (config.num_decoder_layers, config.num_attention_heads, config.head_dim, config.intermediate_size)
    assert heads == (2, 6, 64, 384) and config.sigma == 1 and config.commitment_weight == 0.1
    assert config.loss_weights == {"ltr": 1, "rq": 1, "gen": 10, "rerank": 1}
    features = [{"name": f"feature {column}", "size": 2} for column in range(60)]
    groups = GearConfig(user_features=features).feature_groups
    assert len(groups) == 28 and {len(group) for group in groups} == {2, 3}
    assert sorted(sum(groups, [])) == list(range(60)) and groups != [list(range(g, 60, 28)) for g in range(28)]
    assert groups == GearConfig(user_features=features).feature_groups
    assert len(GearConfig(user_features=features[:3]).feature_groups) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content_size": 0}, "`content_size` must be at least 1, got 0"),
        ({"codebook_size": [4, 1]}, r"`codebook_size` must list a size of at least 2 per level, got \[4, 1\]"),
        ({"codebook_size": []}, "`codebook_size` must list a size of at least 2 per level"),
        ({"quantizer": "vq"}, "`quantizer` must be one of rq, rq-ema, .*, got 'vq'"),
        ({"gain": "log"}, "`gain` must be one of linear, exp2, got 'log'"),
        ({"normalize_over": "trie"}, "`normalize_over` must be one of children, vocabulary, got 'trie'"),
        ({"sigma": 0.0}, "`sigma` must be positive, got 0.0"),
        ({"commitment_weight": -1.0}, "`commitment_weight` must not be negative, got -1.0"),
        ({"loss_weights": {"gem": 1.0}}, "`loss_weights` may hold ltr, rq, gen, rerank, got .*gem"),
        ({"loss_weights": {"gen": "10"}}, "`loss_weights` must be finite and not negative"),
        ({"loss_weights": {"gen": -1.0}}, "`loss_weights` must be finite and not negative"),
        ({"behaviors": []}, "`behaviors` needs at least one sequence"),
        ({"behaviors": [{"name": "clicks"}]}, r"`behaviors` 'clicks' needs length \(at least 1\), got"),
        ({"item_features": [{"size": 3}]}, r"`item_features` must each have a `name` of their own, got \[None\]"),
        ({"item_features": [{"name": "a", "size": 3}] * 2}, "`item_features` must each have a `name` of their own"),
        ({"item_features": [{"name": "a", "size": 0}]}, r"`item_features` 'a' needs size \(at least 1\) and may have"),
        ({"item_features": [{"name": "a", "size": 3, "hash": True}]}, "`item_features` 'a' needs size .* hashed"),
        ({"feature_groups": [[0, 1]]}, "`feature_groups` must hold each of the 3 columns of `user_features` once"),
        ({"feature_groups": [[0, 1, 2], []]}, "`feature_groups` must hold each of the 3 columns"),
        (
            {"tower_sise": 3},
            r"Unknown configuration arguments \['tower_sise'\] of GearConfig; did you mean `tower",
        ),
        ({"model_type": "deco"}, "`model_type` is 'deco', but GearConfig needs 'gear'"),
    ],
)
def test_bad_configurations_are_named(change, message):
    from huggingface_hub.errors import StrictDataclassClassValidationError

    with pytest.raises((ValueError, StrictDataclassClassValidationError)) as failure:
        GearConfig(**{**CONFIG, **change})
    assert failure.match(message) or pytest.fail(str(failure.value))


def test_fresh_models_of_a_seed_are_alike_and_ready():
    torch.manual_seed(3)
    first = GearForSIDRetrieval(GearConfig(**CONFIG))
    torch.manual_seed(3)
    second = GearForSIDRetrieval(GearConfig(**CONFIG))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert all(value.isfinite().all() for value in first.state_dict().values())
    assert torch.equal(first.quantizer.levels[0].basis, torch.eye(8))
    assert first.quantizer.levels[0].codebook.abs().max() > 0 and first.decoder.start_token.abs().max() > 0
    assert all((table.weight[0] == 0).all() for table in first.user_features.tables)
    first(**make_batch()).loss.backward()
