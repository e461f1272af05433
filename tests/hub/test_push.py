"""What is refused before the Hub is asked anything."""

import json
import re

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from hf_deco import DecoProcessor, hub
from hf_deco.cli import main
from hf_deco.hub import push_checkpoint


@pytest.fixture
def folder(tmp_path, make_checkpoint, monkeypatch):
    """A whole checkpoint, and no Hub: to ask it anything is an error."""

    def refuse(**kwargs):
        raise AssertionError("The Hub was asked.")

    monkeypatch.setattr(hub, "HfApi", refuse)
    return make_checkpoint(tmp_path / "model")


def change_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_a_whole_checkpoint_gets_as_far_as_the_hub(folder):
    (folder / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "adapter" / name).write_text("{}")
    with pytest.raises(AssertionError, match="The Hub was asked"):
        push_checkpoint(folder, "me/deco")


def test_a_hub_that_cannot_be_reached_is_told(folder, monkeypatch, capsys):
    monkeypatch.setattr(hub, "HfApi", lambda token: HfApi("http://127.0.0.1:1", token="none"))
    monkeypatch.setattr(hub, "get_token", lambda: "none")
    assert main(["push", str(folder), "me/deco"]) == 1
    assert re.match(r"hf-deco push: .*(refused|connect)", capsys.readouterr().err)


def test_without_a_token_nothing_is_sent(folder, monkeypatch, capsys):
    monkeypatch.setattr(hub, "HfApi", lambda token: None)
    monkeypatch.setattr(hub, "get_token", lambda: None)
    assert main(["push", str(folder), "me/deco"]) == 1
    assert "hf-deco push: `token` is missing: log in by `hf auth login`" in capsys.readouterr().err
    with pytest.raises(AttributeError, match="create_repo"):
        push_checkpoint(folder, "me/deco", token="given")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "holds no config.json: it is not a checkpoint"),
        ("model.safetensors", r"holds no model\.safetensors: it is not a checkpoint"),
        ("processor_config.json", "processor_config.json"),
        ("catalog.safetensors", "catalog.safetensors"),
    ],
)
def test_a_folder_that_lacks_a_file_is_no_checkpoint(folder, name, message):
    (folder / name).unlink()
    with pytest.raises(OSError, match=message):
        push_checkpoint(folder, "me/deco")


@pytest.mark.parametrize("name", ["modeling_deco.py", "configuration_deco.py", "trie.py", "processing_deco.py"])
def test_a_folder_that_lacks_a_file_of_its_code_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(
        ValueError, match=f"lacks {name}, so nobody could load it without this package.*save them again"
    ):
        push_checkpoint(folder, "me/deco")


@pytest.mark.parametrize("name", ["config.json", "processor_config.json"])
def test_a_folder_that_names_no_code_is_refused(folder, name):
    change_json(folder / name, auto_map=None)
    with pytest.raises(ValueError, match="lacks the code of its classes"):
        push_checkpoint(folder, "me/deco")


def test_pickled_weights_alone_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"only pytorch_model\.bin: pickled weights can run code"):
        push_checkpoint(folder, "me/deco")


def test_truncated_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(OSError, match="weights .* are damaged"):
        push_checkpoint(folder, "me/deco")


def test_weights_without_a_catalog_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["catalog_codes"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match="hold no catalog"):
        push_checkpoint(folder, "me/deco")


def test_another_librarys_model_is_refused(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="holds a 'bert' model, not one of hf_deco that retrieves items"):
        push_checkpoint(folder, "me/deco")


def test_a_catalog_that_does_not_fit_the_configuration_is_refused(folder):
    change_json(folder / "config.json", num_items=29)
    with pytest.raises(ValueError, match=r"its catalog, 'catalog_codes', has shape \(30, 3\).*are \(29, 3\)"):
        push_checkpoint(folder, "me/deco")


def test_a_processor_of_other_items_is_refused(folder):
    processor = DecoProcessor.from_pretrained(folder)
    codes = processor.item_codes.flip(0)
    DecoProcessor(processor.item_ids, codes, processor.codebook_sizes).save_pretrained(folder)
    with pytest.raises(ValueError, match="The processor's 30 items are not the catalog of the model"):
        push_checkpoint(folder, "me/deco")


def test_an_adapter_beside_the_weights_is_refused(folder, capsys):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="to merged ones a second time. Move the adapter's files to `adapter/`"):
        push_checkpoint(folder, "me/deco")
    assert main(["push", str(folder), "me/deco"]) == 1
    assert "hf-deco push: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_refused(folder, name):
    (folder / "adapter").mkdir()
    (folder / "adapter" / name).write_text("{}")
    (folder / "adapter/adapter_model.bin").write_text("a pickle, which would stay behind")
    with pytest.raises(ValueError, match="must hold both adapter_config.json and adapter_model.safetensors"):
        push_checkpoint(folder, "me/deco")


def test_sharded_weights_are_read_where_their_catalog_is(tmp_path, make_model, folder):
    model = make_model()
    model.save_pretrained(folder, max_shard_size="10KB")
    (folder / "model.safetensors").unlink()
    with pytest.raises(AssertionError, match="The Hub was asked"):
        push_checkpoint(folder, "me/deco")
    model.set_catalog(torch.flip(model.catalog_codes, (0,)))
    model.save_pretrained(folder, max_shard_size="10KB")
    with pytest.raises(ValueError, match="are not the catalog of the model"):
        push_checkpoint(folder, "me/deco")
