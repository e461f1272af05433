"""Whole runs on a tiny language model: what they write, how they go on, what they start from, what they refuse."""

import json
import shutil

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor

from hf_deco import DecoForSIDRetrieval
from hf_deco.training import evaluate
from hf_deco.training.llm_arguments import LLMTrainingArguments
from hf_deco.training.llm_run import train_llm
from hf_deco.training.lora import load_adapter

STEPWISE = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "save_total_limit": None}
STEPWISE |= {"eval_strategy": "no", "load_best_model_at_end": False}


def run(options, folder, **changes):
    return train_llm(LLMTrainingArguments(**(options | {"output_dir": str(folder)} | changes)))


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def losses(checkpoint):
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def finished(llm_options, tmp_path_factory):
    """One finished run of both stages: its folder, its options, the metrics it returned."""
    folder = tmp_path_factory.mktemp("llm") / "run"
    chosen = llm_options | {"learning_rate": 5e-3, "grounding_learning_rate": 3e-3}
    return folder, chosen, run(chosen, folder)


def test_a_run_writes_model_adapter_and_grounded_base(finished):
    folder, _, metrics = finished
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert set(metrics) == {"deco_ce", "popularity", "text_neighbors", "cooccurrence"}
    assert not (folder / "model/adapter_config.json").exists()
    assert {path.name for path in (folder / "model/adapter").iterdir()} == {
        "adapter_base.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    for part in ("grounded", "model"):
        names = weights(folder / part)
        assert not [name for name in names if "embed_tokens" in name or "lm_head" in name or "lora" in name]
    outside = [path for path in folder.rglob("*") if path.is_file() and "checkpoint-" not in str(path)]
    assert {path.suffix for path in outside} <= {".safetensors", ".json", ".parquet", ".npy", ".png", ".md", ".py"}
    row = json.loads((folder / "run.json").read_text())["rows"][0]
    assert row["num_parameters"] == AutoModel.from_pretrained(folder / "model").num_parameters()
    assert row["config"]["lora_rank"] == 4 and row["config"]["stage"] == "both"


def test_the_merged_checkpoint_has_the_metrics_of_the_adapted_model(finished, tmp_path):
    folder, chosen, metrics = finished
    args = LLMTrainingArguments(**(chosen | {"output_dir": str(tmp_path)}))
    assert evaluate(args, folder / "model")["deco_ce"] == pytest.approx(metrics["deco_ce"], abs=1e-6)


def test_the_adapter_on_the_grounded_base_is_the_merged_model(finished):
    folder, _, _ = finished
    merged, processor = (kind.from_pretrained(folder / "model") for kind in (AutoModel, AutoProcessor))
    adapted = load_adapter(AutoModel.from_pretrained(folder / "grounded"), folder / "model", subfolder="adapter")
    inputs = processor([["i3", "i10", "i17"], [], ["i5"]], return_tensors="pt")
    search = {"num_beams": 40, "num_return_sequences": 40, "return_dict_in_generate": True}
    one, other = (model.generate(**inputs, **search) for model in (merged, adapted))
    assert torch.equal(one.sequences, other.sequences)
    assert torch.allclose(one.sequences_scores, other.sequences_scores, atol=1e-4)
    with pytest.raises(ValueError, match="other backbone weights"):
        load_adapter(merged, folder / "model/adapter")


def test_the_second_stage_trains_all_but_the_backbones_own_weights(finished):
    folder, _, _ = finished
    grounded = AutoModel.from_pretrained(folder / "grounded").state_dict()
    with_adapter = load_adapter(AutoModel.from_pretrained(folder / "grounded"), folder / "model/adapter").state_dict()
    names = {name: name.replace(".base_layer.", ".") for name in with_adapter if ".lora_" not in name}
    names = {name: plain.removeprefix("base_model.model.") for name, plain in names.items()}
    changed = {plain for name, plain in names.items() if not torch.equal(with_adapter[name], grounded[plain])}
    outside = {name for name in grounded if not name.startswith("backbone.") and name != "catalog_codes"}
    assert changed - {name for name in outside if name.endswith("k_proj.bias")} == {
        name for name in outside if not name.endswith("k_proj.bias")
    }
    moved = [name for name in with_adapter if "lora_B" in name and with_adapter[name].any()]
    assert len(moved) == 2 * 7  # LoRA begins at zero


def test_a_record_of_grounding_lies_beside_its_model(finished):
    folder, _, _ = finished
    record = json.loads((folder / "grounded/grounding.json").read_text())
    assert set(record["metrics"]) == {"seen_sid_loss", "seen_text_loss", "seen_recall@10"}
    first = next(entry for entry in record["log"] if "eval_seen_text_loss" in entry)
    assert first["step"] == 0 and record["metrics"]["seen_text_loss"] < first["eval_seen_text_loss"]
    assert record["options"]["grounding_epochs"] == 2 and "learning_rate" not in record["options"]


def test_a_finished_run_is_left_as_it_is(finished):
    folder, chosen, metrics = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert run(chosen, folder, resume_from_checkpoint="last") == metrics
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ValueError, match="holds an earlier run: set `resume_from_checkpoint` to last"):
        run(chosen, folder)


def test_grounding_stopped_halfway_goes_on_to_exactly_the_same_models(llm_options, tmp_path):
    chosen = llm_options | {"grounding_backbone": "lora", "max_steps": 3, "logging_steps": 1, "save_total_limit": None}
    run(chosen, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole/grounding/checkpoint-5", tmp_path / "again/grounding/checkpoint-5")
    shutil.copytree(tmp_path / "whole/sids", tmp_path / "again/sids")
    run(chosen, tmp_path / "again", resume_from_checkpoint="last")
    for part in ("grounded", "model"):
        assert equal(weights(tmp_path / "whole" / part), weights(tmp_path / "again" / part))
    whole, again = (losses(tmp_path / name / "grounding/checkpoint-10") for name in ("whole", "again"))
    assert whole == again and len(whole) == 10
    shutil.rmtree(tmp_path / "again/model")
    (tmp_path / "again/run.json").unlink()
    with pytest.raises(ValueError, match="holds a model grounded with another `grounding_epochs` .2, not 7."):
        run(chosen, tmp_path / "again", resume_from_checkpoint="last", grounding_epochs=7)


def test_recommendation_stopped_halfway_goes_on_to_exactly_the_same_losses(llm_options, tmp_path):
    # With everything that draws random numbers: the order of the data, both kinds of dropout.
    chosen = llm_options | STEPWISE | {"stage": "recommendation", "max_steps": 9}
    chosen |= {"dropout": 0.1, "lora_dropout": 0.2, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    run(chosen, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole/checkpoint-5", tmp_path / "again/checkpoint-5")
    shutil.copytree(tmp_path / "whole/sids", tmp_path / "again/sids")
    run(chosen, tmp_path / "again", resume_from_checkpoint="last")
    whole, again = (losses(tmp_path / name / "checkpoint-9") for name in ("whole", "again"))
    assert whole == again and len(whole) == 9
    assert equal(weights(tmp_path / "whole/model"), weights(tmp_path / "again/model"))
    assert not (tmp_path / "whole/checkpoint-5/model.safetensors").exists()  # the base is not saved again and again


def test_the_backbone_can_train_in_full(llm_options, tmp_path):
    run(llm_options, tmp_path / "run", stage="recommendation", train_backbone="full", max_steps=2)
    before, after = load_file(f"{llm_options['backbone']}/model.safetensors"), weights(tmp_path / "run/model")
    name = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[f"model.{name}"], after[f"backbone.{name}"])
    assert not (tmp_path / "run/model/adapter").exists()


def test_a_run_does_not_go_on_from_an_adapter_of_another_base(llm_options, make_language_model, item_texts, tmp_path):
    chosen = llm_options | STEPWISE | {"stage": "recommendation", "max_steps": 1}
    run(chosen, tmp_path / "run")
    (tmp_path / "run/run.json").unlink()
    make_language_model(tmp_path / "other", item_texts, seed=1)
    with pytest.raises(ValueError, match="checkpoint-1' was trained on other backbone weights"):
        run(chosen, tmp_path / "run", resume_from_checkpoint="last", backbone=str(tmp_path / "other"), max_steps=2)


def test_computing_activations_again_changes_nothing(llm_options, tmp_path):
    chosen = llm_options | {"max_steps": 2, "logging_steps": 1, "grounding_epochs": 1, "lora_dropout": 0.0}
    chosen |= {"grounding_backbone": "lora"}
    run(chosen, tmp_path / "kept")
    run(chosen, tmp_path / "again", activation_checkpointing=True)
    for part in ("grounded", "model"):
        one, other = weights(tmp_path / "kept" / part), weights(tmp_path / "again" / part)
        assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


def test_a_teacher_on_the_grounded_backbone_is_distilled_into_a_student(finished, tmp_path):
    folder, chosen, _ = finished
    shared = chosen | {"stage": "recommendation", "start_from": str(folder / "grounded"), "max_steps": 2}
    taught = run(shared | {"search_in": "backbone"}, tmp_path / "teacher")
    assert "fused_gr" in taught
    teacher, grounded = weights(tmp_path / "teacher/model"), weights(folder / "grounded")
    assert torch.equal(teacher["backbone.norm.weight"], grounded["backbone.norm.weight"])
    assert "decoder.heads.0.weight" not in teacher
    metrics = run(shared | {"teacher": str(tmp_path / "teacher/model")}, tmp_path / "student")
    student = AutoModel.from_pretrained(tmp_path / "student/model")
    assert "deco" in metrics and isinstance(student, DecoForSIDRetrieval)
    assert student.config.distillation["temperature"] == 1.0 and student.config.distillation["kd_weight"] > 0


def test_one_stage_after_the_other_in_one_folder_is_as_both_at_once(finished, tmp_path):
    folder, chosen, metrics = finished
    found = run(chosen, tmp_path, stage="grounding")
    record = json.loads((folder / "grounded/grounding.json").read_text())
    assert found == {"grounding": pytest.approx(record["metrics"])}
    assert equal(weights(tmp_path / "grounded"), weights(folder / "grounded"))
    again = run(chosen, tmp_path, stage="recommendation", start_from=str(tmp_path / "grounded"))
    assert again["deco_ce"] == metrics["deco_ce"]


def test_bad_input_is_refused_before_anything_is_written(llm_options, finished, make_language_model, tmp_path):
    folder, _, _ = finished
    make_language_model(tmp_path / "silent", ["a"])
    (tmp_path / "silent/tokenizer.json").unlink()
    (tmp_path / "silent/tokenizer_config.json").unlink()
    table = pd.read_csv(llm_options["items"])
    table.assign(text="").to_csv(tmp_path / "empty.csv", index=False)
    table.drop(columns="text").to_csv(tmp_path / "without.csv", index=False)
    later = {"stage": "recommendation"}
    cases = [
        ({"backbone": str(tmp_path / "nowhere")}, "`backbone` .*nowhere' is neither a folder with a model nor"),
        ({"backbone": str(folder / "model")}, "`backbone` .* is a 'deco', not a decoder-only language model"),
        ({"backbone": str(tmp_path / "silent")}, "`backbone` .*silent' has no tokenizer, which grounding needs"),
        ({"items": str(tmp_path / "empty.csv")}, "40 of 40 items have no text"),
        ({"items": str(tmp_path / "without.csv")}, "text"),
        (later | {"start_from": str(tmp_path / "nowhere")}, "nowhere"),
        (later | {"start_from": llm_options["backbone"]}, "`start_from` .* is a qwen2, not a model that retrieves"),
        (later | {"start_from": str(folder / "model"), "codebook_sizes": [8, 8, 16]}, "`start_from` .* has SIDs of"),
        ({"lora_targets": ["c_attn"], "grounding_backbone": "lora"}, "`lora_targets` names 'c_attn', but .* no such"),
    ]
    for changes, message in cases:
        with pytest.raises((ValueError, OSError), match=message):
            run(llm_options, tmp_path / "run", **changes)
        assert not (tmp_path / "run").exists(), changes


def test_another_catalog_is_not_started_from(llm_options, finished, tmp_path):
    folder, _, _ = finished
    changes = {"stage": "recommendation", "start_from": str(folder / "grounded"), "seed": 7}
    with pytest.raises(ValueError, match="`start_from` .* carries another catalog .* set `sids` to its SID table"):
        run(llm_options, tmp_path / "run", **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stage": "all"}, "`stage` must be one of both, grounding, recommendation, got 'all'"),
        ({"train_backbone": "none"}, "`train_backbone` must be one of lora, full"),
        ({"lora_rank": 0}, "`lora_rank` must be at least 1, got 0"),
        ({"lora_dropout": 1.0}, r"`lora_dropout` must lie in \[0, 1\), got 1.0"),
        ({"grounding_holdout": -0.1}, r"`grounding_holdout` must lie in \[0, 1\)"),
        ({"grounding_epochs": 0}, "`grounding_epochs` must be positive, got 0"),
        ({"lora_targets": "q_proj"}, "`lora_targets` must be a list of layer names, got 'q_proj'"),
        ({"search_in": "backbone"}, "`search_in` is 'backbone', but in grounding a light decoder writes the SIDs"),
        ({"decoder_input": "item_states_prefix"}, "`decoder_input` is 'item_states_prefix', but a text gives"),
        ({"teacher": "t", "init_from_teacher": True}, "`init_from_teacher` is for scratch backbones"),
        ({"reranker": True, "collisions": "keep"}, "`reranker` is for scratch backbones"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        LLMTrainingArguments(output_dir="runs/nowhere", **changes)


def test_under_deepspeed_a_launch_runs_one_stage():
    args = LLMTrainingArguments(output_dir="runs/nowhere", stage="grounding")
    args.deepspeed_plugin = object()
    args._check_grounding()
    args.stage = "both"
    with pytest.raises(ValueError, match="Under `deepspeed` each stage needs a launch of its own: set `stage` to"):
        args._check_grounding()


def test_every_option_has_a_help_text():
    fields = LLMTrainingArguments.__dataclass_fields__
    assert all(fields[name].metadata.get("help") for name in LLMTrainingArguments.__annotations__)
