"""Three processes: one trains and publishes, one opens the checkpoint without the package, one what that saved."""

import json

import pytest
import torch
from transformers import AutoModel, AutoProcessor

HISTORIES = [["i3", "i10", "i17"], ["i8"], []]
RANDOM_HISTORIES = [["item 3", "item 1"], []]

PUBLISH = """
from hf_deco import DecoForSIDRetrieval, DecoProcessor, SIDGenerationConfig
from hf_deco.cli import main
from hf_deco.hub import push_checkpoint
from hf_deco.training import DecoTrainingArguments, train
from transformers import AutoModel, AutoProcessor
from pathlib import Path
import torch

train(DecoTrainingArguments(**argument["options"], output_dir="run", max_steps=20))
folder = Path("run/model")
(folder / "README.md").write_text("---\\nlicense: apache-2.0\\n---\\n# The card\\n")
(folder / "adapter").mkdir()
for name in ("adapter_config.json", "adapter_base.json", "adapter_model.safetensors"):
    (folder / "adapter" / name).write_text("{}")
(folder / "optimizer.pt").write_text("a pickle")
first = push_checkpoint(folder, "me/deco")

# Another catalog, the same weights, under another number of beams; no adapter any more.
model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
codes = model.catalog_codes.flip(0)
model.set_catalog(codes)
model.generation_config = SIDGenerationConfig(num_beams=7, num_return_sequences=4)
other = type(processor)(processor.item_ids, codes, processor.codebook_sizes, 3)
model.save_pretrained("other", max_shard_size="40KB")
other.save_pretrained("other")
assert main(["push", "other", "me/deco", "--message", "Another catalog"]) == 0
assert main(["push", "run/model", "me/deco", "--revision", "branch"]) == 0
again = push_checkpoint("other", "me/deco")

# The habit of transformers: one thing at a time.
model.push_to_hub("me/by-parts")
processor.push_to_hub("me/by-parts")
processor.save_pretrained("processor", push_to_hub=True, repo_id="me/processor")

# By its own class, and by revision.
ours = DecoForSIDRetrieval.from_pretrained(folder).state_dict()
theirs = DecoForSIDRetrieval.from_pretrained("me/deco", revision=first.oid).state_dict()
assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
lengths = [DecoProcessor.from_pretrained("me/deco", revision=name).max_history_length for name in ("branch", "main")]
assert lengths == [6, 3], lengths
result = {"first": first.oid, "again": again.oid, "url": str(first.repo_url)}
"""

OPEN = """
from transformers import AutoConfig, AutoModel, AutoProcessor

result = []
for job in argument:
    where = {"trust_remote_code": True, "revision": job.get("revision")}
    config = AutoConfig.from_pretrained(job["path"], **where)
    model = AutoModel.from_pretrained(job["path"], **where)
    processor = AutoProcessor.from_pretrained(job["path"], **where)
    inputs = processor(job["histories"], return_tensors="pt")
    output = model.generate(**inputs, return_dict_in_generate=True)
    plain = processor.batch_decode(model.generate(**inputs, num_beams=9, num_return_sequences=2))
    items = processor.batch_decode(output.sequences)
    result.append({
        "modules": [type(value).__module__ for value in (config, model, processor, model.generation_config)],
        "items": items,
        "scores": output.sequences_scores.tolist(),
        "plain": plain,
        "titles": [processor.title(item) for item in items],
    })
    if "save" in job:
        model.save_pretrained(job["save"])
        processor.save_pretrained(job["save"])
"""


def answers(folder, histories):
    """What the package itself says of a checkpoint here."""
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    inputs = processor(histories)
    output = model.generate(**inputs, return_dict_in_generate=True)
    items = processor.batch_decode(output.sequences)
    return {
        "items": items,
        "scores": output.sequences_scores.tolist(),
        "plain": processor.batch_decode(model.generate(**inputs, num_beams=9, num_return_sequences=2)),
        "titles": [processor.title(item) for item in items],
    }


def assert_same(found, expected):
    assert all(module.startswith("transformers_modules.") for module in found["modules"])
    for name in ("items", "plain", "titles"):
        assert found[name] == expected[name], name
    # Weights are equal bit by bit; where they lie in memory may still decide in which order they are summed.
    torch.testing.assert_close(torch.tensor(found["scores"]), torch.tensor(expected["scores"]), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def published(loopback, client, options):
    return client.run(PUBLISH, {"options": options})


@pytest.fixture(scope="module")
def jobs(client, published, make_checkpoint):
    folder = client.folder
    local = {
        kind: {"path": str(make_checkpoint(folder / kind, kind=kind)), "histories": RANDOM_HISTORIES}
        for kind in ("deco", "backbone")
    }
    hub = {"path": "me/deco", "histories": HISTORIES}
    jobs = {
        **local,
        "main": hub,
        "first": hub | {"revision": published["first"]},
        "branch": hub | {"revision": "branch"},
        "by parts": hub | {"path": "me/by-parts"},
    }
    return {
        name: job | ({"save": str(folder / f"{name} again")} if name in ("deco", "backbone", "first") else {})
        for name, job in jobs.items()
    }


@pytest.fixture(scope="module")
def opened(client, published, jobs):
    """Answers of a process without the package, which also saves the checkpoints, and of one that opens those."""
    first = client.run(OPEN, list(jobs.values()), package=False)
    saved = {name: {"path": job["save"], "histories": job["histories"]} for name, job in jobs.items() if "save" in job}
    second = client.run(OPEN, list(saved.values()), package=False)
    return dict(zip(jobs, first, strict=True)), dict(zip(saved, second, strict=True))


def test_training_and_saving_push_nothing(loopback, published):
    """Every repository is one that was named."""
    assert set(loopback.repos) == {"me/deco", "me/by-parts", "me/processor"}
    assert loopback.requests[0] == ("POST", "/api/repos/create")


def test_everything_goes_in_one_commit_and_pickles_stay(loopback, client, published):
    assert published["url"] == f"{loopback.url}/me/deco"
    assert loopback.history("me/deco") == [
        "initial commit",
        "Upload checkpoint",
        "Another catalog",
        "Upload checkpoint",
    ]
    _, files = loopback.files("me/deco", published["first"])
    folder = client.folder / "run/model"
    there = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert there.pop("optimizer.pt") and files.keys() - {".gitattributes"} == there.keys()
    assert {name: files[name] for name in there} == there
    assert {"README.md", "adapter/adapter_config.json", "modeling_deco.py", "processing_deco.py"} <= files.keys()


def test_large_files_go_by_lfs_and_others_do_not(loopback, published):
    _, files = loopback.files("me/deco", published["first"])
    large = [files[name] for name in ("model.safetensors", "catalog.safetensors", "adapter/adapter_model.safetensors")]
    assert all(data in loopback.blobs.values() for data in large)
    assert files["modeling_deco.py"] not in loopback.blobs.values()
    puts = [path for method, path in loopback.requests if method == "PUT"]
    assert len(puts) == len(set(puts)) == len(loopback.blobs)


def test_weights_and_adapters_of_an_earlier_commit_do_not_stay_beside_the_new_ones(loopback, published):
    _, files = loopback.files("me/deco", "main")
    assert "model.safetensors.index.json" in files and "model.safetensors" not in files
    assert not any(name.startswith("adapter/") for name in files)
    assert b"# The card" in files["README.md"]  # what says no more than the folder does is not deleted


def test_what_is_unchanged_makes_no_commit(loopback, published):
    assert published["again"] == loopback.repos["me/deco"]["refs"]["main"]
    assert len(loopback.history("me/deco")) == 4


@pytest.mark.parametrize(
    ("name", "folder", "histories"),
    [
        ("deco", "deco", RANDOM_HISTORIES),
        ("backbone", "backbone", RANDOM_HISTORIES),
        ("first", "run/model", HISTORIES),
        ("main", "other", HISTORIES),
        ("branch", "run/model", HISTORIES),
    ],
)
def test_a_process_without_the_package_finds_the_same_items_and_scores(client, opened, name, folder, histories):
    expected = answers(client.folder / folder, histories)
    assert_same(opened[0][name], expected)
    if name in opened[1]:
        assert_same(opened[1][name], expected)


def test_revisions_differ(opened):
    first, main = opened[0]["first"], opened[0]["main"]
    assert len(first["items"]) == 30 and len(main["items"]) == 12
    assert first["items"][:4] != main["items"][:4]


def test_model_and_processor_pushed_one_by_one_carry_their_code_too(loopback, opened, client):
    assert loopback.history("me/by-parts")[1:] == ["Upload DecoForSIDRetrieval", "Upload processor"]
    _, files = loopback.files("me/processor", "main")
    assert {"processor_config.json", "catalog.safetensors", "processing_deco.py", "trie.py"} <= files.keys()
    assert opened[0]["by parts"]["modules"][1].startswith("transformers_modules.me.by_hyphen_parts.")


def test_a_trainers_checkpoint_carries_the_code_of_the_model(client, published):
    (folder,) = client.folder.glob("run/checkpoint-*")
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoConfig": "configuration_deco.DecoConfig", "AutoModel": "modeling_deco.DecoForSIDRetrieval"}
    code, whole = (
        {path.name: path.read_bytes() for path in place.glob("*.py")} for place in (folder, folder.parent / "model")
    )
    assert "modeling_deco.py" in code and code.items() <= whole.items()
