"""What a GEAR run leaves to be served: model, processor, index and card, which say the same as the run did."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoProcessor

from hf_deco import GearProcessor
from hf_deco.cli import main
from hf_deco.data.gear_batches import GearCollator
from hf_deco.data.requests import Requests
from hf_deco.items.generations import IndexWriter, open_index
from hf_deco.items.packing import PackedRows
from hf_deco.model_card import render_model_card, write_model_card
from hf_deco.training.gear import prepare_stream, train_gear
from hf_deco.training.gear_arguments import GearTrainingArguments

HISTORIES = [{"clicks": ["i3", "i27", "i3"], "conversions": ["i3"]}, {}, {"clicks": ["i9"]}]
USERS = [{"age": "old"}, None, {"age": "neither"}]
SEEN = [["i3", "i27", "i404"], [], ["i9"]]


@pytest.fixture(scope="module")
def run(stream_options, tmp_path_factory):
    """Folder of a run, its arguments and its metrics."""
    folder = tmp_path_factory.mktemp("gear")
    args = GearTrainingArguments(**(stream_options | {"output_dir": str(folder / "run")}))
    return folder / "run", args, train_gear(args)


@pytest.fixture
def served(run):
    folder = run[0] / "model"
    return AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder), open_index(folder / "index")


def test_the_folder_encodes_its_items_to_the_very_index_that_it_holds(run, served):
    model, processor, index = served
    published = open_index(run[0] / "index")
    assert index.generation == published.generation and list(index.item_ids) == list(published.item_ids)
    assert {path.name for path in (run[0] / "model/index").iterdir()} - {".lock"} == {
        "CURRENT",
        f"gen-{index.generation}",
    }
    encoded = model.encode_items(**processor.item_inputs(list(index.item_ids)))
    assert np.array_equal(encoded.codes.numpy(), index.item_codes())
    packed = PackedRows.pack(encoded.vectors.numpy(), "int8")
    assert np.array_equal(packed.data, index.embeddings.data) and np.array_equal(packed.scales, index.embeddings.scales)
    assert np.array_equal(model.catalog_codes.numpy(), index.item_codes())
    assert model.config.catalog_version == index.tokenizer_version == model.tokenizer_version
    processor.check_config(model.config)


def test_its_processor_reads_users_as_training_did(run, served):
    model, processor, _ = served
    log = prepare_stream(run[1])
    requests = Requests(log, (6, 4))
    users = np.arange(len(log.user_ids))
    histories = [requests.history(user, 4 * 604_800 + 1_000_000) for user in users]
    theirs = GearCollator(log).users(users.tolist(), histories)
    ages = dict(zip([f"u{user}" for user in range(0, 20, 2)], ["old", "young"] * 5, strict=True))
    ours = processor(
        [dict(zip(log.behaviors, (log.item_ids[items].tolist() for items in some), strict=True)) for some in histories],
        [{"age": ages[user]} if user in ages else None for user in log.user_ids],
    )
    assert torch.equal(ours["user_ids"], theirs["user_ids"])
    for rows, others in zip(ours["behaviors"], theirs["behaviors"], strict=True):
        assert torch.equal(rows >= 0, others >= 0) and (rows >= 0).any()
        for name in ("content", "item_ids"):
            assert torch.equal(ours[name][rows[rows >= 0]], theirs[name][others[others >= 0]])
    torch.testing.assert_close(model.encode_users(**ours), model.encode_users(**theirs))
    torch.testing.assert_close(model.encode_memory(**ours).states, model.encode_memory(**theirs).states)


def test_the_processor_knows_what_items_are_made_of_and_no_user(run, served):
    processor = served[1]
    assert type(processor) is GearProcessor and len(processor.item_ids) == 28
    assert (processor.embedding_model, processor.text_columns) == (None, ["text"])  # embeddings were given
    assert [feature.to_dict() for feature in processor.item_features] == [
        {"name": "kind", "values": ("k0", "k1", "k2")},
        {"name": "item_id", "buckets": 16},
    ]
    saved = (run[0] / "model/processor_config.json").read_text() + (run[0] / "model/config.json").read_text()
    assert not re.search(r'"u\d+"', saved) and str(Path.home()) + "/" not in saved and "/tmp" not in saved


def test_what_a_user_has_seen_stays_out_by_id(served):
    model, processor, index = served
    inputs, denied = processor(HISTORIES, USERS), index.rows_of(SEEN)
    assert [[index.item_ids[row] if row >= 0 else None for row in rows] for rows in denied] == [
        ["i3", "i27", None],
        [],
        ["i9"],
    ]
    options = {"num_beams": [6, 20], "num_return_sequences": 20, "rerank": True, "return_dict_in_generate": True}

    def retrieve(deny_rows):
        output = model.generate(**inputs, deny_rows=deny_rows, **options)
        sids = output.sequences.unflatten(0, (3, -1))
        found = index.rerank(output.rerank_vectors.unflatten(0, (3, -1)), sids, k=28, deny_rows=deny_rows)
        return sids, index.ids(found.rows)

    (_, free), (some, filtered) = retrieve(None), retrieve(denied)
    assert [sorted(items) for items in free] == [sorted(index.item_ids)] * 3  # the beam is as wide as the catalog
    for user in range(3):
        assert set(filtered[user]) == set(index.item_ids) - set(SEEN[user])
        assert filtered[user] == [item for item in free[user] if item not in SEEN[user]]
    # in the search a SID is out where all its items were seen, and stays where one was not
    sid_of = {item: tuple(codes) for item, codes in zip(index.item_ids, index.item_codes().tolist(), strict=True)}
    for user in range(3):
        left = {sid_of[item] for item in set(index.item_ids) - set(SEEN[user])}
        assert {tuple(sid) for sid in some[user].tolist() if sid[0] >= 0} == left


def test_a_new_item_is_encoded_indexed_read_and_found(run, served, tmp_path):
    model, processor, index = served
    later = processor.update(["new", "i3"], torch.full((2, 6), 0.5), [{"kind": "k1"}, {"kind": "k9"}])
    assert len(processor.item_ids) == 28 and list(later.item_ids) == [*processor.item_ids, "new"]
    encoding = model.encode_items(**later.item_inputs(["new"]))
    updated = index.update(["new"], encoding.codes, encoding.vectors)
    model.set_catalog(updated.item_codes(), updated.tokenizer_version)
    (row,) = updated.rows_of([["new"]])[0]
    inputs = later([{"clicks": ["i5", "new"]}])
    with pytest.raises(ValueError, match="`items` holds 1 ids that are none of the 28 known items: 'new'"):
        processor([{"clicks": ["i5", "new"]}])
    options = {"num_beams": [6, 20], "num_return_sequences": 20, "rerank": True, "return_dict_in_generate": True}
    output = model.generate(**inputs, allow_rows=[row], **options)
    found = updated.rerank(
        output.rerank_vectors[None], output.sequences[None], k=29, deny_rows=updated.rows_of([SEEN[0]])
    )
    assert "new" in updated.ids(found.rows)[0] and output.item_rows[0] == row
    with IndexWriter(tmp_path) as writer:  # a serving team goes on from the generation that it downloaded
        writer.adopt(run[0] / "model/index")
        published = writer.publish(updated)
    assert (published.base, published.generation) == (index.generation + 1, index.generation + 1)
    assert open_index(tmp_path).rows_of([["new"]]) == [[row]]


def test_commands_for_histories_of_items_say_that_it_is_no_model_of_theirs(run, tmp_path, capsys):
    folder = str(run[0] / "model")
    assert main(["recommend", "--model", folder, "--items", "i3"]) == 1
    assert "A GearProcessor does not turn histories of item ids into items by itself" in capsys.readouterr().err
    (tmp_path / "options.yaml").write_text("interactions: log.csv\nitems: items.csv\n")
    assert main(["evaluate", folder, str(tmp_path / "options.yaml")]) == 1
    assert "holds a GearProcessor, which is no DecoProcessor" in capsys.readouterr().err


def test_the_card_says_what_the_run_measured(run):
    folder, args, metrics = run
    text, own = (folder / "model/README.md").read_text(), metrics["gear"]
    keys = ["ndcg@3", "recall@3", "ndcg@10", "recall@10"]
    for name, system in (("this model", "gear"), ("popularity",) * 2, ("the user's latest items", "repeat_last")):
        assert f"| {name} | " + " | ".join(f"{metrics[system][key]:.4f}" for key in keys) + " |" in text
    for part in ("sid", "cold", "int8", "int4"):
        row = next(line for line in text.splitlines() if line.startswith(f"| {part}: "))
        figures = [f"{own[f'{part}/{key}']:.4f}" if f"{part}/{key}" in own else "" for key in keys]
        assert row.endswith(" | ".join(["", *figures, ""]).rstrip())
    assert f"{own['colliding']:.2%} of the items shared their SID" in text
    assert f"From one period to the next {own['sids_changed']:.2%} of the SIDs changed" in text
    assert "20 users, 28 items, " in text and ", 6 periods." in text and "4 periods were judged" in text
    assert "| `learning_rate` | 0.001 |" in text and "| `save_steps` | 7 |" in text
    assert str(folder) not in text and "/tmp" not in text
    card = ModelCard.load(folder / "model/README.md").data
    values = {(result.metric_type, result.metric_args["k"]): result.metric_value for result in card.eval_results}
    assert values == {(f"{m}_at_{k}", k): own[f"{m}@{k}"] for m in ("ndcg", "recall") for k in (3, 10)}
    assert card.eval_results[0].dataset_args == {"protocol": "stream", "eval_users": 256, "per_sid_limit": 8}
    parts = json.loads((folder / "run.json").read_text())["rows"][0]["parameters"]
    assert all(f"| `{part}` | {count:,} |" in text for part, count in parts.items())


def test_the_cards_code_runs(run):
    blocks = re.findall(r"```python\n(.*?)```", (run[0] / "model/README.md").read_text(), re.DOTALL)
    names = {"histories": HISTORIES, "users": USERS, "seen": SEEN}
    names |= {"content": torch.ones(1, 6), "features": [{"kind": "k2"}]}
    assert len(blocks) == 3
    for block in blocks:
        block = block.replace("path/or/repository/of/this/model", str(run[0] / "model"))
        exec(block.replace("[32, 32, 64]", "[6, 8]"), names)
    assert [len(items) for items in names["items"]] == [10] * 3
    assert not any(set(items) & set(seen) for items, seen in zip(names["items"], SEEN, strict=True))
    assert "new" in names["index"].item_ids and names["model"].config.num_items == 29
    rows = json.loads((run[0] / "run.json").read_text())["rows"]
    rows[0] = rows[0] | {"system": "gear/no_reranker", "config": rows[0]["config"] | {"reranker": False}}
    text = render_model_card(rows)
    assert (
        "# GEAR, without reranker on log" in text
        and "nothing ranks them" in text
        and "rerank" not in "".join(blocks := re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    )
    exec(blocks[0].replace("path/or/repository/of/this/model", str(run[0] / "model")), names)
    exec(blocks[1], names)
    assert all(items and set(items) <= set(names["index"].item_ids) for items in names["items"])


def test_what_was_not_measured_is_left_out_and_other_seeds_stand_beside(run, tmp_path):
    rows = json.loads((run[0] / "run.json").read_text())["rows"]
    bare = {name: rows[0][name] for name in ("system", "dataset", "protocol", "seed", "config")}
    text = render_model_card([bare | {"metrics": {"num_periods": 0}}])
    assert "of the items shared" not in text and "What else" not in text and "no period was judged" in text
    assert "| this model |  |  |  |  |" in text and ModelCard(text).data.eval_results is None
    other = rows[0] | {"seed": 1, "metrics": rows[0]["metrics"] | {"ndcg@3": 0.5}}
    assert write_model_card(tmp_path, [rows[0], other, *rows[1:]], dataset_id="me/log")
    text = (tmp_path / "README.md").read_text()
    figures = [f"{rows[0]['metrics'][name]:.4f}" for name in ("recall@3", "ndcg@10", "recall@10")]
    assert f"| seed 1 | 0.5000 | {' | '.join(figures)} |" in text and "| seed 0 | " in text
    assert "https://huggingface.co/datasets/me/log" in text
    (entries,) = (tmp_path / ".eval_results").iterdir()
    assert [entry["value"] for entry in yaml.safe_load(entries.read_text())] == [
        rows[0]["metrics"][name] for name in ("ndcg@3", "recall@3", "ndcg@10", "recall@10")
    ]


def test_an_edited_card_stays(run, capsys):
    path = run[0] / "model/README.md"
    before = path.read_text()
    assert write_model_card(run[0] / "model") and path.read_text() == before
    try:
        path.write_text(before.replace("# GEAR", "# Our GEAR"))
        assert not write_model_card(run[0] / "model", license="mit")
    finally:
        path.write_text(before)
