"""What of a GEAR checkpoint is refused before the Hub is asked anything: parts that do not go together."""

import shutil

import pytest
import torch
from transformers import AutoModel

from hf_deco import GearProcessor, hub
from hf_deco.hub import push_checkpoint
from hf_deco.items.generations import IndexWriter, open_index
from hf_deco.training.gear import train_gear
from hf_deco.training.gear_arguments import GearTrainingArguments


@pytest.fixture(scope="module")
def trained(stream_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gear")
    train_gear(GearTrainingArguments(**(stream_options | {"output_dir": str(folder / "run"), "max_steps": 9})))
    return folder / "run/model"


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A whole checkpoint, and no Hub: to ask it anything is an error."""

    def refuse(**kwargs):
        raise AssertionError("The Hub was asked.")

    monkeypatch.setattr(hub, "HfApi", refuse)
    return shutil.copytree(trained, tmp_path / "model")


def test_a_whole_checkpoint_gets_as_far_as_the_hub(folder):
    with pytest.raises(AssertionError, match="The Hub was asked"):
        push_checkpoint(folder, "me/gear")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", r"holds no model\.safetensors"),
        ("processor_config.json", "processor_config.json"),
        ("catalog.safetensors", "catalog.safetensors"),
        ("index/CURRENT", "CURRENT' is missing; `folder` must be one that an `IndexWriter` published to"),
    ],
)
def test_a_folder_that_lacks_a_part_is_no_checkpoint(folder, name, message):
    (folder / name).unlink()
    with pytest.raises(OSError, match=message):
        push_checkpoint(folder, "me/gear")


@pytest.mark.parametrize("name", ["modeling_gear.py", "processing_gear.py", "categories_gear.py", "processor_sid.py"])
def test_a_folder_that_lacks_a_file_of_its_code_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"lacks {name}, so nobody could load it without this package"):
        push_checkpoint(folder, "me/gear")


def test_a_damaged_generation_is_refused(folder):
    (path,) = folder.glob("index/gen-*/embeddings.npy")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="the hash of 'embeddings.npy' is not the one that was published"):
        push_checkpoint(folder, "me/gear")


def test_an_index_that_the_weights_have_outgrown_is_refused(folder):
    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        model.item_tower.out_proj.bias.add_(1)
    model.save_pretrained(folder)  # the configuration still names the version that spelt the catalog
    with pytest.raises(ValueError, match="the index was made with tokenizer version .* Build the index anew"):
        push_checkpoint(folder, "me/gear")


def test_another_catalog_than_that_of_the_index_is_refused(folder):
    model = AutoModel.from_pretrained(folder)
    model.set_catalog(model.catalog_codes.flip(0))
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="is not that of its index: call `model.set_catalog"):
        push_checkpoint(folder, "me/gear")


def test_items_of_the_index_that_the_processor_does_not_know_are_named(folder):
    model, index = AutoModel.from_pretrained(folder), open_index(folder / "index")
    index = index.update(["new"], index.item_codes()[:1], torch.ones(1, 8))
    model.set_catalog(index.item_codes())
    model.save_pretrained(folder)
    with IndexWriter(folder / "index") as writer:
        writer.publish(index)
    with pytest.raises(ValueError, match="lacks 1 items of the index, such as 'new': give it those by `update`"):
        push_checkpoint(folder, "me/gear")


def test_a_processor_of_other_features_is_refused(folder):
    processor = GearProcessor.from_pretrained(folder)
    processor.behaviors[0]["length"] = 7
    processor.save_pretrained(folder)
    with pytest.raises(ValueError, match="The processor's `behaviors` are not those of the model"):
        push_checkpoint(folder, "me/gear")
