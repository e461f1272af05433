"""The folder of a GEAR run is written whole: what fails before leaves the one that was there."""

import pytest
import torch
from transformers import AutoModel, AutoProcessor

from hf_deco import GearConfig, GearForSIDRetrieval, GearProcessor
from hf_deco.items.generations import IndexWriter, open_index
from hf_deco.items.index import ItemIndex
from hf_deco.training.gear_checkpoint import save_gear

ITEMS = [f"i{row}" for row in range(12)]
BEHAVIORS = [{"name": "clicks", "length": 3}]


def make_parts(seed):
    """A model, its processor and the index of its items."""
    torch.manual_seed(seed)
    sizes = {"feature_size": 2, "tower_hidden_size": 8, "tower_size": 4, "code_size": 4, "intermediate_size": 4}
    kinds = {"item_features": [], "user_features": [], "behaviors": BEHAVIORS}
    heads = {"codebook_size": [3, 3], "num_attention_heads": 1, "head_dim": 4}
    model = GearForSIDRetrieval(GearConfig(content_size=4, **sizes, **kinds, **heads)).eval()
    processor = GearProcessor(ITEMS, torch.randn(12, 4), torch.empty(12, 0), [], [], BEHAVIORS)
    index = ItemIndex.build(
        ITEMS, torch.randint(3, (12, 2)), torch.randn(12, 4), (3, 3), tokenizer_version=f"v{seed}", model_id="m"
    )
    return model, processor, index


def publish(folder, index):
    with IndexWriter(folder) as writer:
        return writer.publish(index)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def saved(tmp_path):
    """A run's folder with its `model/`, and a card and results in it that others wrote."""
    model, processor, index = make_parts(0)
    publish(tmp_path / "index", index)
    save_gear(tmp_path / "model", model, processor, tmp_path / "index")
    (tmp_path / "model/README.md").write_text("edited")
    (tmp_path / "model/.eval_results").mkdir()
    (tmp_path / "model/.eval_results/log.yaml").write_text("- value: 1")
    return tmp_path


def test_a_later_run_takes_the_folder_over_and_leaves_what_is_not_its_own(saved):
    before = files(saved / "model")
    model, processor, index = make_parts(1)
    publish(saved / "index", index)
    assert save_gear(saved / "model", model, processor, saved / "index").generation == 2
    found, loaded = open_index(saved / "model/index"), AutoModel.from_pretrained(saved / "model")
    assert found.tokenizer_version == loaded.config.catalog_version == "v1"
    assert torch.equal(loaded.catalog_codes, torch.from_numpy(found.item_codes()).to(loaded.catalog_codes.dtype))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), loaded.parameters(), strict=True))
    assert torch.equal(AutoProcessor.from_pretrained(saved / "model").content, processor.content)
    assert {path.name for path in (saved / "model/index").iterdir()} - {".lock"} == {"CURRENT", "gen-2"}
    after = files(saved / "model")
    assert {name for name in before if after.get(name) == before[name]} >= {
        path.relative_to(saved / "model")
        for path in (saved / "model/README.md", saved / "model/.eval_results/log.yaml")
    }
    assert {path.name for path in saved.iterdir()} == {"index", "model"}


@pytest.mark.parametrize("failing", ["nothing published", "damaged", "model", "processor"])
def test_what_fails_leaves_the_folder_as_it_was(saved, failing, monkeypatch):
    model, processor, index = make_parts(1)
    publish(saved / "index", index)
    published, before = saved / "index", files(saved / "model")
    if failing == "nothing published":
        published = saved / "nowhere"
    elif failing == "damaged":
        path = saved / "index/gen-2/offsets.npy"
        path.write_bytes(path.read_bytes()[:-8])
    else:

        def fail(*args, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr({"model": model, "processor": processor}[failing], "save_pretrained", fail)
    with pytest.raises((OSError, ValueError)):
        save_gear(saved / "model", model, processor, published)
    assert files(saved / "model") == before and open_index(saved / "model/index").generation == 1
    assert {path.name for path in saved.iterdir()} == {"index", "model"}
