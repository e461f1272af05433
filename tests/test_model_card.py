"""Model cards: what they say of every kind of model, what they never say, and whose edits they keep."""

import getpass
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, metadata_load, parse_eval_result_entries
from huggingface_hub.errors import HFValidationError

from hf_deco import DecoProcessor
from hf_deco.card_facts import count_parameters
from hf_deco.cards import save_rendered, shown_command, without_folders
from hf_deco.model_card import render_model_card, write_model_card
from hf_deco.training import DecoTrainingArguments, evaluate, train
from hf_deco.training.results import changed_arguments

TAGS = ["recommendation", "sequential-recommendation", "generative-retrieval", "semantic-ids", "custom_code"]
METRICS = {"ndcg@10": 0.3, "recall@10": 0.5, "ndcg@20": 0.35, "recall@20": 0.6, "num_examples": 10}


def make_row(metrics=METRICS, seed=3, kind=DecoTrainingArguments, **options):
    """A row as a run writes it."""
    args = kind(**({"interactions": "data/toys/log.csv", "cutoffs": [10, 20], "seed": seed} | options))
    row = {"system": args.system, "dataset": "toys", "protocol": args.protocol, "seed": seed, "metrics": metrics}
    return row | {"config": changed_arguments(args), "date": "2026-11-30"}


def make_floor(system, **metrics):
    return {"system": system, "dataset": "toys", "protocol": "temporal", "seed": None, "metrics": METRICS | metrics}


def table(text, first):
    """Rows of the Markdown table whose head begins with a cell."""
    block = text[text.index(f"| {first} |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return [rows[0], *rows[2:]]


@pytest.fixture(scope="module")
def runs(options, tmp_path_factory):
    """A FusedGR and a Deco with pointer distilled from it: folder, options of the Deco, metrics of both."""
    folder = tmp_path_factory.mktemp("cards")
    few = options | {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    first = few | {"search_in": "backbone", "output_dir": str(folder / "teacher")}
    second = few | {"teacher": str(folder / "teacher/model"), "copy_pointer": True, "output_dir": str(folder / "run")}
    second |= {"sids": str(folder / "teacher/sids")}
    metrics = [train(DecoTrainingArguments(**chosen)) for chosen in (first, second)]
    return folder, second, metrics


@pytest.fixture
def run_card(runs):
    return (runs[0] / "run/model/README.md").read_text()


def test_a_run_writes_a_card_that_the_hub_can_read(runs):
    folder, _, metrics = runs
    for name, found in zip(("teacher", "run"), metrics, strict=True):
        system = "fused_gr" if name == "teacher" else "deco"
        data = ModelCard.load(folder / name / "model/README.md").data
        assert (data.library_name, data.tags, data.license, data.datasets, data.base_model) == (
            *("transformers", TAGS),
            *(None, None, None),
        )
        values = {(result.metric_type, result.metric_args["k"]): result.metric_value for result in data.eval_results}
        assert values == {
            (f"{metric}_at_{k}", k): found[system][f"{metric}@{k}"] for metric in ("ndcg", "recall") for k in (10, 20)
        }
        result = data.eval_results[0]
        assert (result.dataset_type, result.dataset_split) == ("unknown", "test")
        assert result.dataset_args["protocol"] == "temporal"
        assert result.metric_args == {"k": 10, "num_beams": 40, "seed": 42}
    assert not (folder / "run/model/.eval_results").exists()


def test_its_tables_hold_the_runs_metrics(runs, run_card):
    metrics = runs[2][1]
    names = ["ndcg@10", "recall@10", "ndcg@20", "recall@20"]
    rows = {name: cells for name, *cells in table(run_card, "system")[1:]}
    assert [list(rows)[0], len(rows)] == ["this model", 4]
    for cells, system in zip(rows.values(), ("deco", "popularity", "text_neighbors", "cooccurrence"), strict=True):
        assert cells == [f"{metrics[system][name]:.4f}" for name in names]
    for part, count, *cells in table(run_card, "slice")[1:]:
        part = part.split(":")[0]
        assert int(count) == metrics["deco"][f"{part}/num_examples"] < metrics["deco"]["num_examples"]
        assert cells == [f"{metrics[system][f'{part}/ndcg@10']:.4f}" for system in metrics]
    assert f"AUC {metrics['deco']['gate/auc']:.2f}" in run_card


def test_it_says_what_the_run_knew(runs, run_card):
    folder, _, _ = runs
    row = json.loads((folder / "run/run.json").read_text())["rows"][0]
    assert "80 users, 40 items, " in run_card and "Catalog: 40 items" in run_card
    assert "distilled from `fused_gr` along the gold prefixes, beside cross-entropy, at temperature 1.0" in run_card
    assert f"shared an ID with another item; {row['sids']['moved_share']:.2%} were moved" in run_card
    assert [line[0] for line in table(run_card, "level")[1:]] == ["1", "2", "3"]
    parts = {name.strip("`"): int(count.replace(",", "")) for name, count in table(run_card, "part")[1:]}
    assert parts == row["parameters"] and {"backbone", "decoder", "pointer"} <= set(parts)
    assert f"{sum(parts.values()):,} parameters" in run_card and sum(parts.values()) == row["num_parameters"]
    told = {name.strip("`"): value for name, value in table(run_card, "option")[1:]}
    assert told["decoder_width"] == "64" and told["learning_rate"] == "0.003" and told["copy_pointer"] == "true"
    assert not set(told) & {"interactions", "items", "embeddings", "teacher", "sids", "seed", "weight_decay"}
    assert "by residual k-means" in (folder / "teacher/model/README.md").read_text()  # that run made the SIDs


def test_no_card_names_a_folder_of_this_machine(runs):
    folder, _, _ = runs
    for path in folder.rglob("README.md"):
        text = path.read_text()
        assert str(folder) not in text and "/tmp" not in text and str(Path.home()) + "/" not in text
        assert f"/{getpass.getuser()}/" not in text


def test_the_cards_code_runs(runs, run_card):
    folder = runs[0] / "run/model"
    blocks = re.findall(r"```python\n(.*?)```", run_card, re.DOTALL)
    assert len(blocks) == 3 and all(block.count("\n") in (3, 4, 5) for block in blocks)
    for load in blocks[:2]:
        names = {"histories": [["i3", "i10"], []]}
        exec(load.replace("path/or/repository/of/this/model", str(folder)), names)
        exec(blocks[2], names)
        assert len(names["items"]) == 20 and set(names["items"]) <= {f"i{item}" for item in range(40)}


def test_the_cards_code_names_the_items_that_a_reranker_chose(make_model):
    codes = torch.tensor([[0, 1], [0, 1], [0, 1], [2, 2]])
    model = make_model((3, 3), catalog=False, content_size=2)
    model.set_catalog(codes, torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, 1]]))
    processor, histories = DecoProcessor(["a", "b", "c", "d"], codes, (3, 3)), [["a", "d"], []]
    text = render_model_card([make_row(reranker=True, collisions="keep", num_beams=20, cutoffs=[10])])
    names = {"model": model, "processor": processor, "histories": histories}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[2], names)
    output = model.generate(**processor(histories), num_beams=4, num_return_sequences=4, return_dict_in_generate=True)
    rows = output.item_rows.view(2, 4).tolist()
    assert names["items"] == [["abcd"[row] for row in user] for user in rows]  # all four of them, each once
    assert [sorted(user) for user in names["items"]] == [["a", "b", "c", "d"]] * 2


def test_evaluating_and_going_on_leave_an_edited_card(runs, tmp_path):
    folder, chosen, _ = runs
    path = folder / "run/model/README.md"
    before = path.read_text()
    try:
        path.write_text(before.replace("# Deco", "# Our Deco"))
        edited = path.read_text()
        evaluate(DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path)})), folder / "run/model")
        train(DecoTrainingArguments(**(chosen | {"resume_from_checkpoint": "last"})))
        assert not write_model_card(folder / "run/model", license="mit")
        assert path.read_text() == edited
    finally:
        path.write_text(before)


def test_a_card_that_nobody_edited_is_renewed(runs, tmp_path):
    rows = json.loads((runs[0] / "run/run.json").read_text())["rows"]
    assert write_model_card(tmp_path, rows) and write_model_card(runs[0] / "run/model")  # the run's own rows
    first = (tmp_path / "README.md").read_text()
    assert first == (runs[0] / "run/model/README.md").read_text()
    rows[0]["metrics"]["ndcg@10"] = 0.9876
    assert write_model_card(tmp_path, rows, license="mit")
    second = (tmp_path / "README.md").read_text()
    assert "0.9876" in second and metadata_load(tmp_path / "README.md")["license"] == "mit"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md"]


@pytest.mark.parametrize("edit", ["# Mine\n", "{}\n\nA line of mine.\n", "A word {}", ""])
def test_any_edit_is_kept(tmp_path, edit):
    path = tmp_path / "card.md"
    assert save_rendered(path, "# Card\n\nText.\n") and save_rendered(path, "# Card\n\nOther text.\n")
    edited = edit.replace("{}", path.read_text())
    path.write_text(edited)
    assert not save_rendered(path, "# Card\n\nMore.\n")
    assert path.read_text() == edited


def test_a_data_set_of_the_hub_gets_eval_results(tmp_path):
    row = make_row(num_beams=50)
    write_model_card(tmp_path, [row], dataset_id="org/toys", dataset_name="Toys")
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.datasets == ["org/toys"] and {result.dataset_type for result in data.eval_results} == {"org/toys"}
    (path,) = (tmp_path / ".eval_results").iterdir()
    entries = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert [(entry.dataset_id, entry.task_id, entry.value) for entry in entries] == [
        ("org/toys", f"{metric}_at_{k}", METRICS[f"{metric}@{k}"]) for k in (10, 20) for metric in ("ndcg", "recall")
    ]
    assert entries[0].date == "2026-11-30" and entries[0].notes == "temporal split, full catalog, beam 50, seed 3"
    with pytest.raises(HFValidationError, match="Repo id"):
        write_model_card(tmp_path / "other", [row], dataset_id="a/b/c")
    assert not (tmp_path / "other").exists()


KINDS = {
    "Deco-CE": ({}, "a light decoder (2 layers of width 256) spells"),
    "Deco-CE with copy pointer": ({"copy_pointer": True}, "A copy pointer over the history is mixed in"),
    "Deco": (
        {"teacher": "org/fused"},
        "distilled from `org/fused` along the gold prefixes, beside cross-entropy",
    ),
    "Deco-flat": (
        {"history_format": "flat", "teacher": "org/flat", "objective": "kd", "temperature": 2.0},
        "distilled from `org/flat` along the gold prefixes, without the cross-entropy term, at temperature 2.0",
    ),
    "Deco-flat, cross-entropy alone": ({"history_format": "flat"}, "the codes of every item, one token each"),
    "FusedGR": ({"search_in": "backbone"}, "one fused token per item, and spells the semantic IDs (SIDs)"),
    "FlatGR": ({"search_in": "backbone", "history_format": "flat"}, "(M: 4 layers of width 384) reads"),
    "FlatGR, distilled": ({"search_in": "backbone", "history_format": "flat", "teacher": "org/t"}, "`org/t`"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_is_called_by_its_name(name):
    options, sentence = KINDS[name]
    text = render_model_card([make_row(**options) | {"teacher": options.get("teacher")}])
    assert f"\n# {name} on toys\n" in text and sentence in text
    alone = "It is trained with cross-entropy alone"
    assert (alone in text) == name.startswith(("Deco-CE", "Deco-flat, cross"))
    assert ("light decoder" in text) == name.startswith("Deco")
    assert ("distilled" in text) == ("teacher" in options)
    assert ModelCard(text).data.model_name == f"{name} on toys"


def test_of_a_teacher_that_only_a_path_tells_the_folder_is_named():
    text = render_model_card([make_row(teacher="/home/me/runs/fused_gr-seed0/model")])
    assert "distilled from `fused_gr-seed0` along" in text and "/home" not in text


def test_a_pretrained_backbone_is_named():
    from hf_deco.training.llm_arguments import LLMTrainingArguments

    row = make_row(kind=LLMTrainingArguments, backbone="Qwen/Qwen2.5-0.5B", lora_rank=8, stage="recommendation")
    text = render_model_card([row | {"base_model": "Qwen/Qwen2.5-0.5B"}])
    assert ModelCard(text).data.base_model == "Qwen/Qwen2.5-0.5B"
    assert "A backbone (`Qwen/Qwen2.5-0.5B`) reads" in text
    assert "with LoRA of rank 8, which is merged into these weights" in text
    told = {name.strip("`"): value for name, value in table(text, "option")[1:]}
    assert told["lora_rank"] == "8" and "start_from" not in told
    local = make_row(kind=LLMTrainingArguments, backbone="/home/me/secret/qwen", stage="recommendation")
    text = render_model_card([local])
    assert "secret" not in text and "(a pretrained language model)" in text and "base_model" not in text


def test_what_is_not_known_is_left_out():
    row = {"system": "deco_ce", "dataset": "toys", "protocol": "leave_one_out", "seed": 0, "metrics": METRICS}
    row |= {"config": {"cutoffs": [10], "embeddings": "vectors.npy", "sids": "sids"}}
    text = render_model_card([row])
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings == [
        *("How to load it", "Data and protocol", "Training", "Results"),
        *("Intended use and limits", "Licence", "Citation"),
    ]
    assert "None" not in text and "embedded with" not in text and "Measured" not in text and "floors" not in text
    assert "No licence is stated for the weights" in text and not re.search(r"^license", text, re.MULTILINE)
    assert "\n\n\n" not in text


def test_floors_that_reach_the_model_are_told():
    slices = {"repeat/ndcg@10": 0.6, "repeat/num_examples": 4, "new/ndcg@10": 0.1, "new/num_examples": 6}
    slices |= {"warm/ndcg@10": 0.3, "warm/num_examples": 10}
    floors = [
        make_floor("popularity", **(slices | {"ndcg@10": 0.2, "repeat/ndcg@10": 0.1})),
        make_floor("cooccurrence", **(slices | {"ndcg@10": 0.29, "new/ndcg@10": 0.4, "repeat/ndcg@10": 0.5})),
    ]
    text = render_model_card([make_row(METRICS | slices), *floors])
    limits = text[text.index("## Intended use") : text.index("## Licence")]
    assert re.findall(r"NDCG@10 of .*", limits) == [
        "NDCG@10 of new (target not in the history): 0.1000; co-occurrence with the last items, which needs no "
        "training, reaches 0.4000."
    ]
    assert [row[0].split(":")[0] for row in table(text, "slice")[1:]] == ["repeat", "new"]  # warm is everybody
    floors[0]["metrics"]["ndcg@10"] = 0.3
    assert "NDCG@10 of all examples: 0.3000; popularity" in render_model_card([make_row(METRICS | slices), *floors])


def test_other_seeds_stand_beside_the_checkpoints():
    rows = [make_row(), make_row(METRICS | {"ndcg@10": 0.4}, seed=4), make_floor("popularity")]
    text = render_model_card(rows)
    assert [row[:2] for row in table(text, "system")[1:]] == [
        ["seed 3", "0.3000"],
        ["seed 4", "0.4000"],
        ["popularity", "0.3000"],
    ]
    assert [result.metric_args["seed"] for result in ModelCard(text).data.eval_results] == [3] * 4


def test_rows_have_to_begin_with_a_model(tmp_path):
    for rows in ([], [make_floor("popularity"), make_row()]):
        with pytest.raises(ValueError, match="`rows` must begin with the row of a trained model"):
            render_model_card(rows)
    with pytest.raises(ValueError, match="does not lie in the folder of a finished run: give its `rows`"):
        write_model_card(tmp_path)
    assert not list(tmp_path.iterdir())


def test_secrets_and_folders_of_options_are_not_shown():
    row = make_row(hub_token="hf_" + "a" * 30, hub_model_id="me/mine", learning_rate=0.5)
    row["config"] |= {"deepspeed": "/home/me/zero.json", "fsdp_config": "{'transformer': '/home/me/wrap'}"}
    row["config"] |= {"start_from": "../../me/model", "embedding_model": "/home/me/minilm"}
    row["command"] = "python /home/me/bin/hf-deco train --items '/home/me/my items.csv' --hub_token hf_x --seed=3"
    text = render_model_card([row])
    told = {name.strip("`"): value for name, value in table(text, "option")[1:]}
    assert told == {"deepspeed": "zero.json", "learning_rate": "0.5", "start_from": "model"}
    assert 'hf-deco train --items "my items.csv" --hub_token ... --seed=3\n' in text
    assert "`minilm`" in text and "/me" not in text and "hf_x" not in text and "aaaa" not in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/data/log.csv", "log.csv"),
        ("/home/me/data/", "data"),
        ("~/data/log.csv", "log.csv"),
        (r"C:\Users\me\log.csv", "log.csv"),
        ("data/toys/log.csv", "data/toys/log.csv"),
        ("data/../../me/log.csv", "log.csv"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("https://host/path", "https://host/path"),
        ("{'a': '/home/me'}", None),
        ("hf_" + "A1" * 12, "..."),
        (["/a/b", "c"], ["b", "c"]),
        (0.5, 0.5),
    ],
)
def test_of_a_path_elsewhere_the_last_part_is_shown(value, shown):
    assert without_folders(value) == shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["python", "recipes/train.py", "a.yaml", "--seed", "1"], "python recipes/train.py a.yaml --seed 1"),
        (["python", "/opt/env/bin/hf-deco", "demo"], "hf-deco demo"),
        (["hf-deco", "demo"], "hf-deco demo"),
        (["python", "/home/me/train.py", "--out=/home/me/x", "--api-key=k"], "python train.py --out=x --api-key=..."),
        (["python", "/site/ipykernel_launcher.py", "-f", "/run/kernel.json"], None),
        (["python", "/site/pytest/__main__.py"], None),
        (["python", "-c"], None),
        (["python", ""], None),
    ],
)
def test_commands_are_shown_as_one_would_type_them(words, shown):
    assert shown_command(words) == shown


def test_parameters_are_counted_once_each():
    shared = torch.nn.Linear(3, 2, bias=False)
    model = torch.nn.ModuleDict({"backbone": torch.nn.Linear(4, 5), "decoder": shared, "heads": shared})
    assert count_parameters(model) == {"backbone": 25, "decoder": 6}
