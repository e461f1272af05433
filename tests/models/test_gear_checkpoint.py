"""GEAR's checkpoints: exact, through Auto classes, with and without the package, and their tokenizer's version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gear_models import make_batch, make_gear, make_items, users_of
from remote_code import MODELS, WITHOUT_PACKAGE, import_closure
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import get_relative_import_files

from hf_deco import GearConfig, GearForSIDRetrieval, SIDGenerationConfig

SEARCH = {"num_beams": [3, 5, 8], "num_return_sequences": 8, "rerank": True, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model():
    model = make_gear()
    model.set_catalog(model.encode_items(*make_items(9, 30)).codes)
    model.generation_config = SIDGenerationConfig(num_beams=[3, 5, 8], num_return_sequences=8)
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gear")
    model.save_pretrained(folder)
    return folder


def same_answers(model, other):
    batch = make_batch()
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert model.tokenizer_version == other.tokenizer_version
    first, second = model(**batch), other(**batch)
    assert torch.equal(first.loss, second.loss) and torch.equal(first.item_codes, second.item_codes)
    first, second = (each.generate(**users_of(batch), **SEARCH) for each in (model, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    return True


@pytest.mark.parametrize("auto_class", [GearForSIDRetrieval, AutoModel])
def test_a_checkpoint_answers_exactly_as_the_model_did(model, folder, auto_class):
    loaded = auto_class.from_pretrained(folder)
    assert type(loaded) is GearForSIDRetrieval and not loaded.training and same_answers(model, loaded)
    assert loaded.generation_config.num_beams == [3, 5, 8]
    assert loaded.generate(**users_of(make_batch())).shape == (32, 3)
    assert loaded.config.catalog_version == model.tokenizer_version


def test_auto_classes_know_the_package(model, folder):
    assert type(AutoConfig.from_pretrained(folder)) is GearConfig
    assert type(AutoModel.from_config(model.config)) is GearForSIDRetrieval
    assert type(AutoConfig.for_model("gear", codebook_size=[4, 4])) is GearConfig
    stored, own = (config.to_dict() for config in (AutoConfig.from_pretrained(folder), model.config))
    assert {name for name in stored if stored[name] != own.get(name)} <= {"auto_map", "architectures", "_name_or_path"}
    assert stored["catalog_version"] == model.tokenizer_version and stored["num_items"] == 30


@pytest.mark.parametrize("quantizer", ["rq", "rq-ema", "simvq", "basis-rq", "prefix-basis-rq"])
def test_every_quantiser_survives(quantizer, tmp_path):
    model = make_gear(quantizer=quantizer, restart_dead_codes=True)
    model.train()(**make_batch())
    model.eval().set_catalog(model.encode_items(*make_items(9, 30)).codes)
    model.save_pretrained(tmp_path)
    assert same_answers(model, AutoModel.from_pretrained(tmp_path))


def test_a_checkpoint_carries_exactly_its_code(folder):
    closure = import_closure("configuration_gear") | import_closure("modeling_gear")
    copied = {Path(file).name for file in get_relative_import_files(MODELS / "modeling_gear.py")}
    assert copied | {"modeling_gear.py"} == closure
    assert {path.name for path in folder.glob("*.py")} == closure
    for path in folder.glob("*.py"):
        assert path.read_bytes() == (MODELS / path.name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_gear.GearConfig",
        "AutoModel": "modeling_gear.GearForSIDRetrieval",
    }
    assert "custom_pipelines" not in config  # which read histories of item ids


JOURNEY = (
    WITHOUT_PACKAGE
    + """
import torch
from transformers import AutoModel

folder, batch, answer, again = sys.argv[1:]
batch = torch.load(batch)
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules"), type(model)
search = {"num_beams": [3, 5, 8], "num_return_sequences": 8, "rerank": True, "return_dict_in_generate": True}
users = {name: batch[name] for name in ("content", "item_ids", "user_ids", "behaviors")}
with torch.no_grad():
    loss = model(**batch).loss
torch.save({"loss": loss, "version": model.tokenizer_version, **model.generate(**users, **search)}, answer)
model.save_pretrained(again)
"""
)


def test_it_answers_the_same_without_the_package(model, folder, tmp_path):
    batch = make_batch()
    torch.save(batch, tmp_path / "batch.pt")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    paths = [str(folder), str(tmp_path / "batch.pt"), str(tmp_path / "answer.pt"), str(tmp_path / "again")]
    done = subprocess.run([sys.executable, "-c", JOURNEY, *paths], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, expected = torch.load(tmp_path / "answer.pt"), model.generate(**users_of(batch), **SEARCH)
    assert torch.equal(answer["loss"], model(**batch).loss) and answer["version"] == model.tokenizer_version
    for name in ("sequences", "sequences_scores", "item_rows", "rerank_vectors"):
        assert torch.equal(answer[name], expected[name])
    assert same_answers(model, AutoModel.from_pretrained(tmp_path / "again"))


def test_the_version_follows_what_decides_vectors_and_codes():
    model, same = make_gear(), make_gear()
    versions = [model.tokenizer_version]
    assert len(versions[0]) == 64 and same.tokenizer_version == versions[0]
    with torch.no_grad():
        for part in (model.decoder, model.memory_encoder, model.user_tower, model.user_features):
            next(part.parameters()).add_(1)
            assert model.tokenizer_version == versions[0]
        for part in (model.item_features, model.item_tower, model.quantizer):
            next(part.parameters()).add_(1)
            versions.append(model.tokenizer_version)
        model.quantizer.mean.add_(1)
        versions.append(model.tokenizer_version)
    assert len(set(versions)) == 5


def test_a_catalog_knows_the_tokenizer_that_spelt_it(model):
    other = make_gear()
    codes = torch.tensor([[0, 1, 2], [0, 1, 2], [3, 2, 4]])
    other.set_catalog(codes)
    assert other.config.catalog_version == other.tokenizer_version and other.trie.num_leaves == 2
    with torch.no_grad():
        other.item_tower.out_proj.bias.add_(1)
    assert other.config.catalog_version != other.tokenizer_version  # outgrown
    other.set_catalog(codes[:2], version="of last week")
    assert other.config.catalog_version == "of last week" and other.config.num_items == 2
    for bad in (codes + 3, codes[:, :2], codes[:0], codes.float()):
        with pytest.raises(ValueError, match="`codes`"):
            other.set_catalog(bad)
        assert other.config.num_items == 2 and other.trie.num_leaves == 1
    other.load_state_dict({**other.state_dict(), "catalog_codes": codes[1:].int()})
    assert other.trie.num_leaves == 2


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("truncate", OSError, "are damaged or truncated"),
        ("missing", ValueError, "lacks 1 tensors of the model, such as .'quantizer.mean'"),
        ("shape", ValueError, "does not fit its configuration in 1 tensors, such as 'quantizer.mean'"),
        ("catalog", ValueError, "its catalog, 'catalog_codes', has shape"),
        ("codes", ValueError, "`codes` of level 1 must lie in 0..3, got 77..77"),
        ("pickle", OSError, "holds no model.safetensors, only pytorch_model.bin"),
        ("argument", ValueError, "Unknown configuration arguments"),
        ("type", ValueError, "`model_type`"),
    ],
)
def test_damaged_checkpoints_are_refused(model, damage, error, message, tmp_path):
    model.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, options = load_file(weights), json.loads(config.read_text())
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif damage == "missing":
        del tensors["quantizer.mean"]
    elif damage == "shape":
        tensors["quantizer.mean"] = torch.zeros(7)
    elif damage == "catalog":
        options["num_items"] = 29
    elif damage == "codes":
        tensors["catalog_codes"] = torch.full_like(tensors["catalog_codes"], 77)
    elif damage == "pickle":
        weights.rename(tmp_path / "pytorch_model.bin")
    elif damage == "argument":
        options["tower_sise"] = 3
    elif damage == "type":
        options["model_type"] = "deco"
    if damage in ("missing", "shape", "codes"):
        save_file(tensors, weights, {"format": "pt"})
    config.write_text(json.dumps(options))
    with pytest.raises(error, match=message):
        GearForSIDRetrieval.from_pretrained(tmp_path)


def test_an_adapter_at_the_root_is_refused(model, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds adapter_config.json at its root"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("quantizer", ["prefix-basis-rq", "rq-ema"])
def test_tensors_of_other_shapes_start_afresh_where_that_is_accepted(quantizer, tmp_path):
    model = make_gear(quantizer=quantizer)
    model.train()(**make_batch())
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.codebook_size = [4, 2, 6]
    torch.manual_seed(0)
    loaded = GearForSIDRetrieval.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
    fresh, before, kept = loaded.quantizer.levels[2], model.quantizer.levels[0], loaded.quantizer.levels[0]
    assert fresh.codebook.shape == (6, 8) and 0.05 < fresh.codebook.abs().max() <= 0.1
    assert torch.equal(kept.codebook, before.codebook) and torch.equal(loaded.quantizer.mean, model.quantizer.mean)
    if quantizer == "rq-ema":
        assert torch.equal(fresh.ema_sums, fresh.codebook) and torch.equal(fresh.ema_counts, torch.ones(6))
        assert torch.equal(kept.ema_counts, before.ema_counts) and not torch.equal(kept.ema_counts, torch.ones(4))
    else:
        assert torch.equal(loaded.quantizer.scales[1], torch.ones(2, 8))
        assert torch.equal(loaded.quantizer.biases[1], torch.zeros(2, 8))
        assert torch.equal(fresh.basis, model.quantizer.levels[2].basis)


def test_half_precision_keeps_its_distances_in_full(model, folder):
    loaded = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}
    batch = make_batch()
    output = loaded.generate(**users_of(batch), **SEARCH)
    assert output.sequences.shape == (32, 3) and output.rerank_vectors.isfinite().all()
    assert loaded.encode_items(batch["content"], batch["item_ids"]).vectors.dtype == torch.float32
    assert loaded(**batch).loss.isfinite()


def test_the_scale_of_contents_travels_with_the_checkpoint(tmp_path):
    plain, scaled = make_gear(), make_gear(content_scale=4.0)
    scaled.load_state_dict(plain.state_dict())
    assert scaled.tokenizer_version != plain.tokenizer_version  # it decides vectors and codes
    content, categories = make_items(9, 30)
    expected = plain.encode_items(4 * content, categories)
    scaled.save_pretrained(tmp_path)
    found = AutoModel.from_pretrained(tmp_path).encode_items(content, categories)
    torch.testing.assert_close(found.vectors, expected.vectors)
    assert torch.equal(found.codes, expected.codes)
    with pytest.raises(Exception, match="`content_scale` must be positive and finite, got 0"):
        GearConfig(content_scale=0)
