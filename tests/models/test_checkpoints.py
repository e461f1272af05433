import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel

from hf_deco import BackboneConfig, BackboneForSIDRetrieval, DecoConfig, DecoForSIDRetrieval, SIDGenerationConfig

VARIANTS = [
    {"kind": kind, "history_format": history_format, "copy_pointer": copy_pointer}
    for kind in ("deco", "backbone")
    for history_format in ("fused", "flat")
    for copy_pointer in (False, True)
]


def assert_same_state(model, expected):
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.device.type == "cpu" and torch.equal(tensor, theirs[name]), name
    assert ours["catalog_codes"].dtype == torch.int32


def assert_same_results(model, expected, inputs):
    options = {"num_beams": 9, "num_return_sequences": 9, "return_dict_in_generate": True}
    ours, theirs = model.generate(*inputs, **options), expected.generate(*inputs, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.item_rows, theirs.item_rows)
    # Weights are equal bit by bit; how they lie in memory may still decide in which order they are summed.
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-5, atol=1e-6)


def cast(model, dtype):
    """The model in another dtype, rotary frequencies in float32 as in every model that transformers builds."""
    model.to(dtype)
    for transformer in [module for module in model.modules() if hasattr(module, "rotary_emb")]:
        rotary = transformer.rotary_emb
        rotary.inv_freq = rotary.compute_default_rope_parameters(transformer.config)[0]
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_comes_back_exactly(make_model, make_histories, tmp_path, dtype):
    model = cast(make_model(dropout=0.1), dtype)
    model.save_pretrained(tmp_path)
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path)
    assert not loaded.training and loaded.dtype == dtype
    assert_same_state(loaded, model)
    assert_same_results(loaded, model, make_histories(model, [3, 0, 2]))
    assert loaded.config.to_dict()["num_items"] == 30
    assert loaded.config.codebook_sizes == (5, 4, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_checkpoint_of_every_kind_comes_back_exactly_by_its_class_and_by_automodel(
    make_model, make_histories, tmp_path, variant, dtype
):
    model = cast(make_model(dropout=0.1, **variant), dtype)
    model.save_pretrained(tmp_path)
    expected_class = DecoForSIDRetrieval if variant["kind"] == "deco" else BackboneForSIDRetrieval
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [expected_class.__name__]
    for loader in (expected_class, AutoModel):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is expected_class and not loaded.training and loaded.dtype == dtype
        assert (loaded.pointer is not None) == variant["copy_pointer"]
        assert loaded.config.history_format == variant["history_format"]
        assert_same_state(loaded, model)
        assert_same_results(loaded, model, make_histories(model, [3, 0, 2]))


@pytest.mark.parametrize("variant", VARIANTS[4:])
def test_loaded_full_backbone_trains_like_the_saved_one(make_model, make_sequences, tmp_path, variant):
    model = make_model(**variant)
    model.save_pretrained(tmp_path)
    loaded = BackboneForSIDRetrieval.from_pretrained(tmp_path)
    losses = [m(*make_sequences(model, [3, 2])).loss for m in (model, loaded)]
    assert losses[0].item() == losses[1].item()


@pytest.mark.parametrize(("saved", "opened"), [(False, True), (True, False)])
def test_a_checkpoint_and_a_configuration_that_differ_in_the_pointer_do_not_go_together(
    make_model, tmp_path, saved, opened
):
    make_model(copy_pointer=saved).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"copy_pointer": opened}))
    if opened:
        with pytest.raises(ValueError, match=r"lacks 4 tensors of the model, such as \['pointer.gate_proj.bias'"):
            DecoForSIDRetrieval.from_pretrained(tmp_path)
    else:  # the generator alone is a model too; transformers reports what it leaves out
        _, info = DecoForSIDRetrieval.from_pretrained(tmp_path, output_loading_info=True)
        assert len(info["unexpected_keys"]) == 4


@pytest.mark.parametrize(("saved", "opened"), [("fused", "flat"), ("flat", "fused")])
@pytest.mark.parametrize("kind", ["deco", "backbone"])
def test_a_checkpoint_of_the_other_history_format_is_refused(make_model, tmp_path, kind, saved, opened):
    make_model(kind=kind, history_format=saved).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"history_format": opened}))
    with pytest.raises(ValueError, match="lacks|does not fit"):
        AutoModel.from_pretrained(tmp_path)


@pytest.fixture
def no_weights(monkeypatch):
    """To read a weight is an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("Weights were read.")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "gone"}))


@pytest.mark.parametrize("model_type", ["sid_backbone", "bert", "", None])
def test_a_foreign_model_type_is_refused(make_model, tmp_path, no_weights, model_type):
    make_model().save_pretrained(tmp_path)
    change_config(tmp_path, model_type=model_type, vocab_size=7)
    with pytest.raises(ValueError, match=f"`model_type` is {model_type!r}, but DecoConfig needs 'deco'"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"`model_type` is {model_type!r}, but DecoConfig needs 'deco'"):
        DecoConfig.from_pretrained(tmp_path)


def test_a_missing_model_type_is_refused(make_model, tmp_path, no_weights):
    make_model().save_pretrained(tmp_path)
    change_config(tmp_path, model_type="gone")
    with pytest.raises(ValueError, match="has no `model_type`; a checkpoint of DecoConfig says 'deco'"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


@pytest.mark.parametrize("loader", [DecoForSIDRetrieval, AutoModel])
def test_a_configuration_with_unknown_keys_is_refused(make_model, tmp_path, no_weights, loader):
    make_model().save_pretrained(tmp_path)
    change_config(tmp_path, num_codebook=3, frobnicate=True)
    message = r"Unknown configuration arguments \['frobnicate', 'num_codebook'\] of DecoConfig"
    with pytest.raises(ValueError, match=message):
        loader.from_pretrained(tmp_path)


def test_a_given_configuration_of_another_kind_is_refused(make_model, tmp_path, no_weights):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`config` is of a 'sid_backbone' model, but this class needs a DecoConfig"):
        DecoForSIDRetrieval.from_pretrained(tmp_path, config=BackboneConfig())
    with pytest.raises(AssertionError, match="Weights were read"):
        DecoForSIDRetrieval.from_pretrained(tmp_path, config=str(tmp_path))


@pytest.mark.parametrize("change", [{"num_items": 29}, {"num_items": 0}, {"num_codebooks": 2, "codebook_size": [5, 4]}])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "10KB"}])
def test_a_catalog_of_another_shape_is_refused(make_model, tmp_path, no_weights, change, shards):
    make_model().save_pretrained(tmp_path, **shards)
    assert (tmp_path / "model.safetensors").exists() != bool(shards)
    change_config(tmp_path, **change)
    expected = rf"\({change['num_items'] if 'num_items' in change else 30}, {change.get('num_codebooks', 3)}\)"
    with pytest.raises(ValueError, match=rf"'catalog_codes', has shape \(30, 3\), but .* are {expected}\."):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_refused_unread(make_model, tmp_path, no_weights, name):
    make_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(OSError, match=rf"only {name}: pickled weights can run code.*Convert them to safetensors"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


def test_safetensors_cannot_be_switched_off(make_model, tmp_path, no_weights):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`use_safetensors` must be True"):
        DecoForSIDRetrieval.from_pretrained(tmp_path, use_safetensors=False)


def test_weights_beside_pickled_ones_are_read(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert_same_state(DecoForSIDRetrieval.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "10KB"}])
def test_a_variant_is_found(make_model, tmp_path, shards):
    model = make_model()
    model.save_pretrained(tmp_path, variant="other", **shards)
    assert_same_state(DecoForSIDRetrieval.from_pretrained(tmp_path, variant="other"), model)
    with pytest.raises(OSError, match=r"holds no model\.safetensors: it is not a checkpoint"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


def test_a_checkpoint_in_a_subfolder_is_found_and_checked(make_model, make_histories, tmp_path):
    model = make_model()
    model.generation_config = SIDGenerationConfig(num_beams=7)
    model.save_pretrained(tmp_path / "inner")
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path, subfolder="inner")
    assert_same_state(loaded, model)
    assert loaded.generation_config.num_beams == 7
    with pytest.raises(OSError, match=r"holds no config\.json: it is not a checkpoint"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)
    change_config(tmp_path / "inner", num_items=29)
    with pytest.raises(ValueError, match=r"'catalog_codes', has shape \(30, 3\)"):
        DecoForSIDRetrieval.from_pretrained(tmp_path, subfolder="inner")


def test_a_model_is_not_saved_beside_an_adapter(make_model, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="Move the adapter's files to `adapter/`"):
        make_model().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16])
def test_checkpoint_loads_in_the_asked_dtype(make_model, make_histories, tmp_path, saved, asked):
    model = cast(make_model(), saved)
    model.save_pretrained(tmp_path)
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path, dtype=asked)
    assert_same_state(loaded, cast(model, asked))
    assert_same_results(loaded, model, make_histories(model, [3, 2]))


def test_loading_does_not_pass_through_the_random_generator(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    torch.manual_seed(1)
    first = DecoForSIDRetrieval.from_pretrained(tmp_path)
    torch.manual_seed(2)
    assert_same_state(DecoForSIDRetrieval.from_pretrained(tmp_path), first)


def test_loaded_model_trains_like_the_saved_one(make_model, make_histories, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path)
    item_codes, mask = make_histories(model, [3, 2])
    labels = item_codes.masked_fill(mask.unsqueeze(-1) == 0, -100)
    losses = [m(item_codes, mask, labels).loss for m in (model, loaded)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) and (
            ours.grad is None or torch.equal(ours.grad, theirs.grad)
        ), name


def test_checkpoint_saved_after_set_catalog_carries_the_new_catalog(make_model, make_codes, make_histories, tmp_path):
    model = make_model()
    inputs = make_histories(model, [3, 2])
    model.save_pretrained(tmp_path / "old")
    model.set_catalog(make_codes((5, 4, 6), 17, seed=8))
    model.save_pretrained(tmp_path / "new")
    old, new = (DecoForSIDRetrieval.from_pretrained(tmp_path / name) for name in ("old", "new"))
    assert (old.config.num_items, new.config.num_items) == (30, 17)
    assert_same_state(new, model)
    assert_same_results(new, model, inputs)
    old.set_catalog(make_codes((5, 4, 6), 17, seed=8))
    assert_same_results(old, model, inputs)


def test_model_without_a_catalog_can_be_saved_and_given_one_later(make_model, make_codes, tmp_path):
    model = make_model(catalog=False)
    model.save_pretrained(tmp_path)
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path)
    assert_same_state(loaded, model)
    with pytest.raises(ValueError, match="no catalog"):
        loaded.generate(torch.zeros((1, 1, 3), dtype=torch.long))
    loaded.set_catalog(make_codes((5, 4, 6), 5))
    assert loaded.generate(torch.zeros((1, 1, 3), dtype=torch.long), num_beams=5).shape == (5, 3)


@pytest.mark.parametrize("loader", [DecoForSIDRetrieval, AutoModel])
@pytest.mark.parametrize("num_beams", [7, [4, 5, 6]])
def test_generation_options_travel_with_the_checkpoint(make_model, make_histories, tmp_path, loader, num_beams):
    model = make_model()
    inputs = make_histories(model, [3])
    model.generation_config = SIDGenerationConfig(num_beams=num_beams, num_return_sequences=3, skip_forced_levels=False)
    model.save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path)
    config = loaded.generation_config
    assert type(config) is SIDGenerationConfig
    assert (config.num_beams, config.num_return_sequences, config.skip_forced_levels) == (num_beams, 3, False)
    assert loaded.generate(*inputs).tolist() == model.generate(*inputs).tolist()
    assert loaded.generate(*inputs).shape == (3, 3)


def test_checkpoint_without_generation_options_gets_the_defaults(make_model, make_histories, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path)
    assert type(loaded.generation_config) is SIDGenerationConfig and loaded.generation_config.num_beams is None
    assert loaded.generate(*make_histories(model, [2])).shape == (10, 3)


def test_given_generation_options_replace_those_of_the_checkpoint(make_model, tmp_path):
    model = make_model()
    model.generation_config = SIDGenerationConfig(num_beams=7)
    model.save_pretrained(tmp_path)
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path, generation_config=SIDGenerationConfig(num_beams=2))
    assert loaded.generation_config.num_beams == 2


def test_loading_info_is_returned_on_request(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    loaded, info = DecoForSIDRetrieval.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, DecoForSIDRetrieval)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_missing_weights_file_or_folder_is_an_oserror(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_truncated_weights_are_an_oserror_that_says_so(make_model, tmp_path, kept):
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(OSError, match="damaged or truncated.*fetch the checkpoint again"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["start_state", "catalog_codes", "decoder.heads.1.weight", "backbone.layers.0.mlp.up_proj.weight"]
)
def test_weights_that_lack_a_tensor_are_refused(make_model, tmp_path, name):
    make_model().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"lacks 1 tensors of the model, such as \['{name}'\]"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_items": 29}, "catalog_codes"),
        ({"num_items": 0}, "catalog_codes"),
        ({"codebook_size": [5, 4, 7]}, "decoder.heads.2.weight"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(make_model, tmp_path, change, name):
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=f"does not fit its configuration.*'{name}'"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)


def test_mismatched_sizes_are_reinitialised_on_request(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"codebook_size": [5, 4, 7]}))
    loaded = DecoForSIDRetrieval.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert loaded.decoder.heads[2].weight.shape == (7, 12) and loaded.decoder.heads[2].weight.isfinite().all()


def test_a_stored_catalog_with_codes_outside_their_level_is_refused(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["catalog_codes"][3].fill_(9))
    with pytest.raises(ValueError, match="level 1 must lie in 0..4"):
        DecoForSIDRetrieval.from_pretrained(tmp_path)
