"""LoRA: what trains, that merging changes nothing, and that an adapter is only put onto its own base."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModel

from hf_deco.training.lora import add_lora, check_base, describe_base, load_adapter, merge_adapter

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = [{"kind": "deco"}, {"kind": "deco", "copy_pointer": True}, {"kind": "backbone", "copy_pointer": True}]
KINDS += [{"kind": "backbone", "history_format": "flat"}, {"kind": "deco", "tie_code_tables": True}]


def trained(model, seed=0):
    """The adapted model after every tensor that trains was moved."""
    torch.manual_seed(seed)  # LoRA's first factor begins at random
    adapted = add_lora(model, rank=3, alpha=6, dropout=0.0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted.eval()


def answers(model, batch, histories):
    """Loss, and scores of all items, of a model."""
    codes, mask, labels = batch
    with torch.no_grad():
        loss = model(item_codes=codes, attention_mask=mask, labels=labels).loss
    found = model.generate(*histories, num_beams=30, num_return_sequences=30, return_dict_in_generate=True)
    return loss, found.sequences, found.sequences_scores


def assert_same(first, second):
    assert torch.allclose(first[0], second[0], atol=1e-4)
    assert torch.equal(first[1], second[1])
    assert torch.allclose(first[2], second[2], atol=1e-4)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_exactly_the_adapter_and_all_outside_the_backbone_train(make_model, options):
    model = make_model(**options)
    outside = {name for name, _ in model.named_parameters() if not name.startswith("backbone.")}
    adapted = add_lora(model, rank=3)
    lora = {
        f"backbone.layers.{layer}.{'self_attn' if name in LAYERS[:4] else 'mlp'}.{name}.lora_{side}.default.weight"
        for layer in range(2)
        for name in LAYERS
        for side in "AB"
    }
    training = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert training == {f"base_model.model.{name}" for name in outside | lora}
    assert "start_state" in outside
    frozen = {name for name, parameter in adapted.named_parameters() if not parameter.requires_grad}
    assert all(name.startswith("base_model.model.backbone.") and ".lora_" not in name for name in frozen)


def test_the_light_decoder_has_no_lora_though_its_layers_have_the_same_names(make_model):
    adapted = add_lora(make_model())
    assert {name for name, _ in adapted.model.decoder.named_modules() if "lora" in name} == set()
    assert any(name.endswith("q_proj") for name, _ in adapted.model.decoder.named_modules())


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_merged_model_answers_as_the_adapted_one(make_model, make_sequences, make_histories, options):
    model = make_model(**options)
    batch, histories = make_sequences(model, [4, 1, 3]), make_histories(model, [3, 0, 2])
    before = answers(model, batch, histories)
    adapted = trained(model)
    expected = answers(adapted, batch, histories)
    assert (before[0] - expected[0]).abs() > 0.01
    count = adapted.num_parameters()
    merged = merge_adapter(adapted)
    assert type(merged) is type(model) and not any("lora" in name for name in merged.state_dict())
    assert merged.num_parameters() == count
    assert_same(answers(merged, batch, histories), expected)


def test_an_adapter_comes_back_as_it_was_saved(make_model, make_sequences, make_histories, tmp_path):
    base = make_model(copy_pointer=True)
    adapted = trained(copy.deepcopy(base))
    adapted.save_pretrained(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_base.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    again = load_adapter(copy.deepcopy(base), tmp_path / "adapter")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in adapted.state_dict().items())
    assert not any(parameter.requires_grad for parameter in again.parameters())
    onwards = load_adapter(copy.deepcopy(base), tmp_path, subfolder="adapter", is_trainable=True)
    assert onwards.num_parameters(only_trainable=True) == adapted.num_parameters(only_trainable=True) > 0
    plain = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in adapted.state_dict().items())


def test_the_adapters_file_holds_lora_and_all_outside_the_backbone_and_no_more(make_model, tmp_path):
    base = make_model()
    outside = {name for name, _ in base.named_parameters() if not name.startswith("backbone.")}
    trained(base).save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        names = {name.removeprefix("base_model.model.") for name in file.keys()}
    assert {name for name in names if ".lora_" not in name} == outside
    assert len([name for name in names if ".lora_" in name]) == 2 * len(LAYERS) * 2


def test_a_merged_checkpoint_beside_its_adapter_does_not_apply_it_twice(
    make_model, make_sequences, make_histories, tmp_path
):
    base = make_model()
    batch, histories = make_sequences(base, [4, 1, 3]), make_histories(base, [3, 0, 2])
    adapted = trained(copy.deepcopy(base))
    expected = answers(adapted, batch, histories)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(adapted).save_pretrained(tmp_path)
    merged = AutoModel.from_pretrained(tmp_path)
    assert_same(answers(merged, batch, histories), expected)
    assert_same(answers(load_adapter(base, tmp_path, subfolder="adapter"), batch, histories), expected)
    with pytest.raises(ValueError, match="other backbone weights .* a merged checkpoint, .* holds it already"):
        load_adapter(merged, tmp_path / "adapter")
    assert_same(answers(merged, batch, histories), expected)  # the refusal changed nothing


def test_an_adapter_of_another_base_is_refused_before_it_is_read(make_model, tmp_path):
    trained(make_model()).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_config.json").unlink()
    wide = make_model(text_config=make_model().config.text_config.to_dict() | {"hidden_size": 24})
    cases = [
        (make_model(seed=1, catalog=make_model().catalog_codes), "was trained on other backbone weights"),
        (wide, "was trained for another base: its `backbone` is .*'hidden_size': 16.* the model's .*'hidden_size': 24"),
        (make_model(kind="backbone"), "its `model_type` is deco, the model's sid_backbone"),
        (make_model(sizes=(5, 4, 7)), r"its `codebook_sizes` is \[5, 4, 6\], the model's \[5, 4, 7\]"),
    ]
    for model, message in cases:
        with pytest.raises(ValueError, match=message):
            load_adapter(model, tmp_path)
        assert not any("lora" in name for name in model.state_dict())


def test_an_adapter_of_nobody_knows_what_is_refused(make_model, tmp_path):
    get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no adapter_base.json"):
        load_adapter(make_model(), tmp_path)


def test_a_base_in_bfloat16_is_the_same_base(make_model, tmp_path):
    model = make_model()
    trained(copy.deepcopy(model)).save_pretrained(tmp_path)
    check_base(describe_base(copy.deepcopy(model).to(torch.bfloat16)), tmp_path)
    with torch.no_grad():
        model.backbone.layers[1].mlp.up_proj.weight[3, 5] *= 1.1
    with pytest.raises(ValueError, match="other backbone weights"):
        check_base(describe_base(model), tmp_path)


def test_an_adapter_that_does_not_fit_or_is_damaged_is_refused(make_model, tmp_path):
    trained(make_model()).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="does not fit the model in .* tensors, such as 'base_model.model.concept_head"
    ):
        load_adapter(make_model(num_concepts=3), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(OSError, match="is damaged or truncated"):
        load_adapter(make_model(), tmp_path)


def test_a_catalog_may_be_swapped_under_an_adapter(make_model, make_codes, tmp_path):
    base = make_model()
    trained(copy.deepcopy(base)).save_pretrained(tmp_path)
    base.set_catalog(make_codes((5, 4, 6), 17, seed=3))
    assert load_adapter(base, tmp_path).config.num_items == 17


def test_what_cannot_get_lora_is_refused(make_model):
    with pytest.raises(ValueError, match="`rank` must be at least 1, got 0"):
        add_lora(make_model(), rank=0)
    with pytest.raises(ValueError, match="`targets` names 'c_attn', but the backbone, a Qwen2Model, has no such layer"):
        add_lora(make_model(), targets=["q_proj", "c_attn"])


def test_the_description_of_a_base_is_json(make_model):
    described = describe_base(make_model())
    assert json.loads(json.dumps(described)) == described
