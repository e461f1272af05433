"""A GEAR run is pushed by one process; others, with the package and without, give the same users the same items."""

import inspect

import pytest
import torch
from transformers import AutoModel, AutoProcessor

from hf_deco.items.generations import open_index

HISTORIES = [{"clicks": ["i3", "i27", "i3"], "conversions": ["i3"]}, {}, {"clicks": ["i9"]}]
USERS = [{"age": "old"}, None, {"age": "neither"}]
SEEN = [["i3", "i27", "i404"], [], ["i9"]]
NEW = {"content": [[0.5, -1.0, 0.25, 2.0, 0.0, 1.0]], "features": [{"kind": "k1"}]}

PUBLISH = """
from pathlib import Path
import shutil
import torch
from hf_deco.cli import main
from hf_deco.items.generations import IndexWriter, open_index
from hf_deco.training.gear import train_gear
from hf_deco.training.gear_arguments import GearTrainingArguments
from transformers import AutoModel, AutoProcessor

metrics = train_gear(GearTrainingArguments(**argument["options"], output_dir="run"))
assert main(["push", "run/model", "me/gear"]) == 0

# A new item enters: another generation, another catalog, the same weights.
shutil.copytree("run/model", "later")
model, processor = AutoModel.from_pretrained("later"), AutoProcessor.from_pretrained("later")
index = open_index("later/index")
processor = processor.update(["new"], torch.tensor(argument["content"]), argument["features"])
encoding = model.encode_items(**processor.item_inputs(["new"]))
index = index.update(["new"], encoding.codes, encoding.vectors)
model.set_catalog(index.item_codes(), index.tokenizer_version)
with IndexWriter("later/index") as writer:
    writer.publish(index)
model.save_pretrained("later")
processor.save_pretrained("later")
assert main(["push", "later", "me/gear", "--message", "A new item"]) == 0
result = {"recall": metrics["gear"]["recall@10"]}
"""

# With the package: by ids, from history to items.
RETRIEVE = """
import hf_deco
from hf_deco.items import open_index
from huggingface_hub import snapshot_download
from transformers import AutoModel, AutoProcessor

result = []
for revision in argument["revisions"]:
    folder = snapshot_download("me/gear", revision=revision)
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    result.append(answers(model, processor, open_index(f"{folder}/index"), argument))
"""

# Without: what model and processor alone can do.
OPEN = """
import torch
from transformers import AutoModel, AutoProcessor

where = {"trust_remote_code": True, "revision": argument["revisions"][0]}
model, processor = AutoModel.from_pretrained("me/gear", **where), AutoProcessor.from_pretrained("me/gear", **where)
inputs = processor(argument["histories"], argument["users"])
options = {"num_beams": [6, 8], "num_return_sequences": 8, "rerank": True, "return_dict_in_generate": True}
output = model.generate(**inputs, **options)
new = processor.update(["new"], torch.tensor(argument["content"]), argument["features"])
result = {
    "modules": [type(value).__module__ for value in (model, processor)],
    "sequences": output.sequences.tolist(),
    "vectors": output.rerank_vectors.tolist(),
    "users": model.encode_users(**inputs).tolist(),
    "new": [part.tolist() for part in model.encode_items(**new.item_inputs(["new"])).values()],
}
"""


def answers(model, processor, index, argument):
    """Items of users without and with what they have seen, and their scores."""
    index.check_made_for(model.tokenizer_version, model.config.model_type)
    inputs, found = processor(argument["histories"], argument["users"]), {}
    options = {"num_beams": [6, 8], "num_return_sequences": 8, "rerank": True, "return_dict_in_generate": True}
    for name, seen in (("all", None), ("unseen", index.rows_of(argument["seen"]))):
        output = model.generate(**inputs, deny_rows=seen, **options)
        vectors, sids = (part.unflatten(0, (3, -1)) for part in (output.rerank_vectors, output.sequences))
        ranked = index.rerank(vectors, sids, per_sid_limit=4, k=10, deny_rows=seen)
        found[name] = {"items": index.ids(ranked.rows), "scores": ranked.scores.tolist()}
    return found | {"generation": index.generation, "items": len(index)}


@pytest.fixture(scope="module")
def published(loopback, client, stream_options):
    return client.run(PUBLISH, {"options": stream_options, **NEW})


@pytest.fixture(scope="module")
def argument(loopback, published):
    commits = list(loopback.repos["me/gear"]["commits"])
    return {"revisions": commits[1:], "histories": HISTORIES, "users": USERS, "seen": SEEN, **NEW}


def test_a_commit_holds_model_processor_card_and_one_generation(loopback, client, published):
    assert loopback.history("me/gear") == ["initial commit", "Upload checkpoint", "A new item"]
    first, second = (files for files in list(loopback.repos["me/gear"]["commits"].values())[1:])
    for files, folder in ((first, "run/model"), (second, "later")):
        index = open_index(client.folder / folder / "index")
        parts = {"keys", "offsets", "item_ids", "item_id_offsets", "embeddings", "scales"}
        assert {name for name in files if name.startswith("index/")} == {
            "index/CURRENT",
            *(f"index/gen-{index.generation}/{part}.npy" for part in parts),
            f"index/gen-{index.generation}/manifest.json",
        }
        assert {"modeling_gear.py", "processing_gear.py", "README.md", "model.safetensors"} <= files.keys()
        for name in files.keys() - {".gitattributes"}:
            assert files[name] == (client.folder / folder / name).read_bytes()
    assert f"| {published['recall']:.4f} |" in first["README.md"].decode()


def test_another_process_retrieves_the_same_items_by_id(client, argument):
    found = client.run(inspect.getsource(answers) + RETRIEVE, argument)
    for answer, folder in zip(found, ("run/model", "later"), strict=True):
        folder = client.folder / folder
        model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
        expected = answers(model, processor, open_index(folder / "index"), argument)
        for name in ("all", "unseen"):
            assert answer[name]["items"] == expected[name]["items"]
            torch.testing.assert_close(
                torch.tensor(answer[name]["scores"]), torch.tensor(expected[name]["scores"]), rtol=1e-5, atol=1e-6
            )
        assert all(len(items) >= 4 for items in answer["all"]["items"])
        assert not any(set(items) & set(seen) for items, seen in zip(answer["unseen"]["items"], SEEN, strict=True))
    assert [answer["items"] for answer in found] == [28, 29]
    assert found[1]["generation"] == found[0]["generation"] + 1


def test_without_the_package_users_and_new_items_are_encoded_alike(client, argument):
    found = client.run(OPEN, argument, package=False)
    assert all(module.startswith("transformers_modules.me.gear.") for module in found["modules"])
    model, processor = (kind.from_pretrained(client.folder / "run/model") for kind in (AutoModel, AutoProcessor))
    inputs = processor(HISTORIES, USERS)
    options = {"num_beams": [6, 8], "num_return_sequences": 8, "rerank": True, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options)
    new = processor.update(["new"], torch.tensor(NEW["content"]), NEW["features"])
    encoding = model.encode_items(**new.item_inputs(["new"]))
    assert found["sequences"] == output.sequences.tolist() and found["new"][1] == encoding.codes.tolist()
    for name, expected in (("vectors", output.rerank_vectors), ("users", model.encode_users(**inputs))):
        torch.testing.assert_close(torch.tensor(found[name]), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(found["new"][0]), encoding.vectors, rtol=1e-5, atol=1e-6)
