"""Whole runs on a small log: what they write, what they learn, how they go on, what they refuse."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor

from hf_deco import DecoForSIDRetrieval
from hf_deco.items.sid_table import SIDTable
from hf_deco.training import DecoTrainingArguments, evaluate, train
from hf_deco.training.checkpoints import find_checkpoint
from hf_deco.training.preparation import make_config


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory):
    """One finished run: its folder, its options, the metrics it returned."""
    folder = tmp_path_factory.mktemp("run")
    chosen = options | {
        "output_dir": str(folder / "run"),
        "num_train_epochs": 25,
        "results_file": str(folder / "rows.json"),
    }
    return folder, chosen, train(DecoTrainingArguments(**chosen))


def test_a_run_learns_what_the_log_holds(finished):
    _, _, metrics = finished
    assert set(metrics) == {"deco_ce", "popularity", "text_neighbors", "cooccurrence"}
    assert metrics["deco_ce"]["ndcg@10"] > metrics["popularity"]["ndcg@10"] + 0.2
    assert metrics["deco_ce"]["ndcg@10"] > metrics["text_neighbors"]["ndcg@10"] + 0.05


def test_a_run_writes_metrics_plot_and_result_rows(finished):
    folder, chosen, metrics = finished
    assert json.loads((folder / "run/metrics.json").read_text()) == metrics
    assert (folder / "run/training.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((folder / "rows.json").read_text())
    assert [row["system"] for row in rows] == ["deco_ce", "popularity", "text_neighbors", "cooccurrence"]
    assert rows[0]["metrics"] == metrics["deco_ce"]
    assert (rows[0]["seed"], rows[0]["protocol"]) == (42, "temporal")
    assert rows[0]["config"]["codebook_sizes"] == [8, 8, 8]
    assert "output_dir" not in rows[0]["config"]


def test_the_folder_holds_no_pickle_but_the_resumable_state(finished):
    folder, _, _ = finished
    outside = [path for path in (folder / "run").rglob("*") if path.is_file() and "checkpoint-" not in str(path)]
    assert {path.suffix for path in outside} <= {".safetensors", ".json", ".parquet", ".npy", ".png", ".md", ".py"}


def test_auto_classes_reopen_the_checkpoint(finished):
    folder, _, _ = finished
    model = AutoModel.from_pretrained(folder / "run/model")
    processor = AutoProcessor.from_pretrained(folder / "run/model")
    inputs = processor([["i3", "i10", "i17"], []], return_tensors="pt")
    items = processor.batch_decode(model.generate(**inputs, num_beams=20, num_return_sequences=3))
    assert items[0] == "i24"
    assert len(set(items[:3])) == 3 and all(item.startswith("i") for item in items)
    assert processor.title("i6") == "Item i6"


def test_evaluating_the_checkpoint_gives_the_runs_metrics(finished, tmp_path):
    folder, chosen, metrics = finished
    args = DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path)}))
    again = evaluate(args, folder / "run/model")
    assert not any(tmp_path.iterdir())
    assert again["deco_ce"] == pytest.approx(metrics["deco_ce"], abs=1e-6)
    assert again["popularity"] == metrics["popularity"]


def test_the_best_validation_checkpoint_is_kept(finished):
    folder, _, _ = finished
    states = sorted((folder / "run").glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    state = json.loads(states[-1].read_text())
    scores = [entry["eval_ndcg@10"] for entry in state["log_history"] if "eval_ndcg@10" in entry]
    assert state["best_metric"] == max(scores)
    best = load_file(Path(state["best_model_checkpoint"]) / "model.safetensors")
    kept = load_file(folder / "run/model/model.safetensors")
    assert all(torch.equal(best[name], kept[name]) for name in best)


def test_items_behind_the_catalog_are_read_but_never_retrieved(options, tmp_path):
    log = pd.read_parquet(options["interactions"])
    late = pd.DataFrame({"user_id": ["u0", "u0"], "item_id": ["i_new", "i3"], "timestamp": [1_009_990, 1_009_999]})
    pd.concat([log, late]).to_parquet(tmp_path / "log.parquet")
    table = pd.read_csv(options["items"])
    new = pd.DataFrame({"item_id": ["i_new"], "title": ["New"], "text": ["new"]})
    pd.concat([table, new]).to_csv(tmp_path / "items.csv", index=False)
    embeddings = np.load(options["embeddings"])
    np.save(tmp_path / "embeddings.npy", np.concatenate([embeddings, embeddings[:1] + 0.3]))
    chosen = options | {
        "interactions": str(tmp_path / "log.parquet"),
        "items": str(tmp_path / "items.csv"),
        "embeddings": str(tmp_path / "embeddings.npy"),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 3,
    }
    metrics = train(DecoTrainingArguments(**chosen))
    processor = AutoProcessor.from_pretrained(tmp_path / "run/model")
    model = AutoModel.from_pretrained(tmp_path / "run/model")
    assert (processor.num_items, len(processor.item_ids), model.config.num_items) == (40, 41, 40)
    items = processor.batch_decode(model.generate(**processor([["i_new"]]), num_beams=50, num_return_sequences=50))
    assert "i_new" not in items and len(set(items) - {None}) == 40
    args = DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "again")}))
    assert evaluate(args, tmp_path / "run/model")["deco_ce"] == pytest.approx(metrics["deco_ce"], abs=1e-6)


def test_a_resumed_run_ends_with_exactly_the_weights_of_an_uninterrupted_one(options, tmp_path):
    chosen = options | {
        "dropout": 0.3,
        "decoder_dropout": 0.1,
        "max_steps": 8,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": None,
        "logging_steps": 1,
        "load_best_model_at_end": False,
    }
    train(DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "whole")})))
    # Step 5 of 3 steps an epoch: inside the second epoch, where data order and dropout both have to be picked up.
    shutil.copytree(tmp_path / "whole/checkpoint-5", tmp_path / "resumed/checkpoint-5")
    again = chosen | {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": "last"}
    train(DecoTrainingArguments(**again))
    whole = load_file(tmp_path / "whole/model/model.safetensors")
    resumed = load_file(tmp_path / "resumed/model/model.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    losses = [
        json.loads((tmp_path / name / "checkpoint-8/trainer_state.json").read_text()) for name in ("whole", "resumed")
    ]
    first, second = ([entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in losses)
    assert first == second and len(first) == 8


def test_resuming_from_last_begins_where_there_is_nothing_yet(options, tmp_path):
    args = DecoTrainingArguments(
        **(options | {"output_dir": str(tmp_path / "new"), "resume_from_checkpoint": "last", "max_steps": 1})
    )
    assert train(args)["deco_ce"]["num_examples"] > 0


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(options, tmp_path):
    weights = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        train(DecoTrainingArguments(**(options | {"output_dir": str(tmp_path / name), "max_steps": 2, "seed": seed})))
        weights.append(load_file(tmp_path / name / "model/model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["fuser.up_proj.weight"], weights[2]["fuser.up_proj.weight"])


def test_a_given_sid_table_is_used(finished, options, tmp_path):
    folder, _, _ = finished
    args = DecoTrainingArguments(
        **(options | {"output_dir": str(tmp_path), "sids": str(folder / "run/sids"), "max_steps": 1, "seed": 3})
    )
    train(args)
    kept, given = (load_file(path / "model/catalog.safetensors") for path in (tmp_path, folder / "run"))
    assert torch.equal(kept["item_codes"], given["item_codes"])
    assert not (tmp_path / "sids").exists()


STEPWISE = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "logging_steps": 1,
    "save_total_limit": None,
}


def test_a_resumed_run_has_the_patience_that_was_left(options, tmp_path):
    # A learning rate of nothing: no validation is better than the first, so patience alone decides.
    chosen = options | STEPWISE | {"learning_rate": 1e-12, "early_stopping_patience": 3, "max_steps": 20}
    train(DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "whole")})))
    assert sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))[-1] == "checkpoint-4"
    for step in (1, 2, 3):  # what is there when the run is stopped after three steps
        shutil.copytree(tmp_path / f"whole/checkpoint-{step}", tmp_path / f"resumed/checkpoint-{step}")
    again = chosen | {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": "last"}
    train(DecoTrainingArguments(**again))
    assert sorted(path.name for path in (tmp_path / "resumed").glob("checkpoint-*"))[-1] == "checkpoint-4"


def test_an_earlier_run_is_not_overwritten(options, tmp_path):
    chosen = options | {"output_dir": str(tmp_path), "max_steps": 1}
    train(DecoTrainingArguments(**chosen))
    before = (tmp_path / "sids/sids.safetensors").read_bytes(), (tmp_path / "model/model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="`output_dir` .* holds an earlier run: set `resume_from_checkpoint` to last"):
        train(DecoTrainingArguments(**(chosen | {"seed": 5})))
    assert before == (
        (tmp_path / "sids/sids.safetensors").read_bytes(),
        (tmp_path / "model/model.safetensors").read_bytes(),
    )


def test_a_run_goes_on_from_the_newest_whole_checkpoint(options, tmp_path):
    chosen = options | STEPWISE | {"output_dir": str(tmp_path), "max_steps": 3}
    train(DecoTrainingArguments(**chosen))
    (tmp_path / "checkpoint-3/trainer_state.json").unlink()  # stopped while it was written
    assert find_checkpoint(DecoTrainingArguments(**(chosen | {"resume_from_checkpoint": "last"}))).endswith(
        "checkpoint-2"
    )
    with pytest.raises(ValueError, match="`resume_from_checkpoint` .*checkpoint-3' is no checkpoint of a run"):
        named = {"resume_from_checkpoint": str(tmp_path / "checkpoint-3")}
        find_checkpoint(DecoTrainingArguments(**(chosen | named)))


def test_a_run_does_not_go_on_with_other_sids(options, tmp_path):
    chosen = options | {"output_dir": str(tmp_path), "max_steps": 2}
    train(DecoTrainingArguments(**chosen))
    (tmp_path / "run.json").unlink()  # stopped before its end
    table = (tmp_path / "sids/sids.safetensors").read_bytes()
    other = SIDTable.load(tmp_path / "sids")
    SIDTable(other.item_ids, other.codes[::-1], other.codebook_sizes, other.codebooks).save(tmp_path / "other")
    again = chosen | {"resume_from_checkpoint": "last", "sids": str(tmp_path / "other")}
    with pytest.raises(ValueError, match="`resume_from_checkpoint` .* was trained on other SIDs"):
        train(DecoTrainingArguments(**again))
    assert (tmp_path / "sids/sids.safetensors").read_bytes() == table


def test_going_on_uses_the_sids_of_the_run_even_if_embeddings_changed(options, tmp_path):
    chosen = options | STEPWISE | {"output_dir": str(tmp_path / "run"), "max_steps": 4}
    chosen |= {"load_best_model_at_end": False}
    first = train(DecoTrainingArguments(**chosen))
    for name in ("checkpoint-3", "checkpoint-4", "model"):  # stopped after two steps
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run/run.json").unlink()
    table = (tmp_path / "run/sids/sids.safetensors").read_bytes()
    np.save(tmp_path / "other.npy", np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32))
    again = chosen | {"resume_from_checkpoint": "last", "embeddings": str(tmp_path / "other.npy")}
    second = train(DecoTrainingArguments(**again))
    assert (tmp_path / "run/sids/sids.safetensors").read_bytes() == table
    assert second["deco_ce"] == first["deco_ce"]


def test_a_finished_run_is_left_as_it_is(finished):
    folder, chosen, metrics = finished
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    again = chosen | {"resume_from_checkpoint": "last", "results_file": str(folder / "other_rows.json")}
    assert train(DecoTrainingArguments(**again)) == metrics
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    assert json.loads((folder / "other_rows.json").read_text()) == json.loads((folder / "rows.json").read_text())
    with pytest.raises(ValueError, match="holds a finished run with another `learning_rate` "):
        train(DecoTrainingArguments(**(again | {"learning_rate": 0.5})))


def test_a_checkpoint_is_not_tested_under_another_split_than_it_was_trained_under(finished, tmp_path):
    folder, chosen, _ = finished
    changed = chosen | {"protocol": "leave_one_out", "output_dir": str(tmp_path)}
    with pytest.raises(ValueError, match="`protocol` is 'leave_one_out', but .* was trained with 'temporal'"):
        evaluate(DecoTrainingArguments(**changed), folder / "run/model")


def test_a_checkpoint_is_not_tested_on_a_log_that_ends_inside_its_training(finished, tmp_path):
    folder, chosen, _ = finished
    log = pd.read_parquet(chosen["interactions"]).sort_values("timestamp", kind="stable")
    log.head(len(log) * 2 // 3).to_parquet(tmp_path / "short.parquet")
    changed = chosen | {"interactions": str(tmp_path / "short.parquet"), "output_dir": str(tmp_path)}
    with pytest.raises(ValueError, match="`interactions` puts the test from time .* was trained on all up to"):
        evaluate(DecoTrainingArguments(**changed), folder / "run/model")


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_run_resumed_in_a_later_epoch_ends_like_an_uninterrupted_one(options, tmp_path, strategy):
    chosen = options | STEPWISE | {"train_sampling_strategy": strategy, "per_device_train_batch_size": 16}
    chosen |= {"max_steps": 17, "dropout": 0.2, "load_best_model_at_end": False, "eval_strategy": "no"}
    train(DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "whole")})))
    shutil.copytree(tmp_path / "whole/checkpoint-15", tmp_path / "resumed/checkpoint-15")  # in the third epoch
    train(
        DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": "last"}))
    )
    whole, resumed = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_grouping_by_length_trains_on_everything_and_leaves_tests_in_order(finished, options, tmp_path):
    folder, chosen, metrics = finished
    grouped = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 8, "max_steps": 12}
    train(DecoTrainingArguments(**(options | grouped | {"output_dir": str(tmp_path / "run")})))
    args = DecoTrainingArguments(**(chosen | grouped | {"output_dir": str(tmp_path / "again")}))
    assert evaluate(args, folder / "run/model")["deco_ce"] == pytest.approx(metrics["deco_ce"], abs=1e-6)


def test_a_pointer_reports_its_gate(options, tmp_path):
    chosen = options | {"copy_pointer": True, "max_steps": 3, "output_dir": str(tmp_path)}
    for search_in in ("decoder", "backbone"):
        args = DecoTrainingArguments(**(chosen | {"search_in": search_in, "output_dir": str(tmp_path / search_in)}))
        metrics = train(args)[args.system]
        assert 0 < metrics["gate/mean"] < 1
    assert AutoModel.from_pretrained(tmp_path / "decoder/model").config.copy_pointer


KEPT = {"codebook_sizes": [6, 4], "collisions": "keep"}  # 40 items on at most 24 SIDs


def test_a_reranker_learns_which_item_of_a_sid_comes_next(options, tmp_path):
    """Neighbours share SIDs. It beats the first item of every SID, and a choice that is the same for all items."""
    metrics = {}
    for name, reranker in (("first", False), ("ranked", True)):
        chosen = options | KEPT | {"reranker": reranker, "num_train_epochs": 12, "output_dir": str(tmp_path / name)}
        metrics[name] = train(DecoTrainingArguments(**chosen))["deco_ce"]
    assert metrics["ranked"]["recall@20"] > metrics["first"]["recall@20"] + 0.1
    model = AutoModel.from_pretrained(tmp_path / "ranked/model")
    processor = AutoProcessor.from_pretrained(tmp_path / "ranked/model")
    embeddings = torch.from_numpy(np.load(options["embeddings"]))
    rows = [int(item[1:]) for item in processor.item_ids[: processor.num_items]]
    assert torch.equal(model.catalog_content, embeddings[rows])
    output = model.generate(**processor([["i3", "i10"]]), num_beams=40, return_dict_in_generate=True)
    assert len(set(output.item_rows.tolist())) == 10 and model.trie.num_leaves < 24
    args = DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "again")}))
    assert evaluate(args, tmp_path / "ranked/model")["deco_ce"] == pytest.approx(metrics["ranked"], abs=1e-6)
    shutil.copytree(tmp_path / "ranked/model", tmp_path / "blind")
    model.reranker.item_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "blind")
    blind = evaluate(args, tmp_path / "blind")["deco_ce"]
    assert metrics["ranked"]["ndcg@10"] > blind["ndcg@10"] + 0.02
    card = (tmp_path / "ranked/model/README.md").read_text()
    assert "told apart by a reranking head" in card and "processor.item_ids[row] for row in user if row >= 0" in card
    assert "reranking head" not in (tmp_path / "first/model/README.md").read_text()


def test_the_width_of_a_reranker_is_an_option():
    for chosen, width in (({}, 96), ({"rerank_size": 24}, 24)):
        args = DecoTrainingArguments(backbone="S", reranker=True, collisions="keep", **chosen)
        reranker = DecoForSIDRetrieval(make_config(args, (6, 4), content_size=5)).reranker
        assert reranker.item_proj.weight.shape == (width, 5)


def test_a_resumed_run_with_a_reranker_ends_with_the_weights_of_an_uninterrupted_one(options, tmp_path):
    chosen = options | KEPT | STEPWISE | {"reranker": True, "max_steps": 4, "load_best_model_at_end": False}
    train(DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "whole")})))
    shutil.copytree(tmp_path / "whole/checkpoint-2", tmp_path / "resumed/checkpoint-2")
    shutil.copytree(tmp_path / "whole/sids", tmp_path / "resumed/sids")
    train(
        DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": "last"}))
    )
    whole, resumed = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole) and "catalog_content" in whole


def test_a_table_without_shared_sids_leaves_a_reranker_nothing_to_learn(finished, options, tmp_path):
    folder, _, _ = finished
    changes = {"sids": str(folder / "run/sids"), "reranker": True, "embeddings": None}
    with pytest.raises(ValueError, match="in the SID table every item has its own"):
        train(_broken(options, tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_from_before_an_option_was_there_is_still_finished(finished, tmp_path):
    folder, chosen, metrics = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    run = json.loads((tmp_path / "run/run.json").read_text())
    for name in ("reranker", "collisions"):
        del run["options"][name]
    (tmp_path / "run/run.json").write_text(json.dumps(run))
    again = chosen | {"output_dir": str(tmp_path / "run"), "resume_from_checkpoint": "last"}
    assert train(DecoTrainingArguments(**again)) == metrics
    with pytest.raises(ValueError, match=r"another `collisions` \('resolve', not 'keep'\)"):
        train(DecoTrainingArguments(**(again | {"collisions": "keep"})))


def _broken(options, tmp_path, **changes):
    return DecoTrainingArguments(**(options | {"output_dir": str(tmp_path / "run")} | changes))


def test_bad_input_is_refused_before_anything_is_written(options, tmp_path):
    embeddings = np.load(options["embeddings"])
    np.save(tmp_path / "short.npy", embeddings[:-1])
    np.save(tmp_path / "nan.npy", np.where(np.arange(40)[:, None] == 7, np.nan, embeddings))
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "rows.json").write_text("{broken")
    log = pd.read_parquet(options["interactions"])
    log.assign(item_id="ghost").to_parquet(tmp_path / "ghosts.parquet")
    log.head(1).to_parquet(tmp_path / "tiny.parquet")
    log.groupby("user_id").head(3).to_parquet(tmp_path / "threes.parquet")
    cases = [
        ({"interactions": None}, "`interactions` is not set"),
        ({"interactions": str(tmp_path / "none.parquet")}, "none.parquet"),
        ({"user_column": "shopper"}, "shopper"),
        ({"embeddings": str(tmp_path / "short.npy")}, "40"),
        ({"embeddings": str(tmp_path / "nan.npy")}, "7"),
        ({"embeddings": str(tmp_path / "text.npy")}, "`embeddings` .* is no .npy file of one array"),
        ({"embeddings": str(tmp_path / "absent.npy")}, "`embeddings` is .*, and there is no such file"),
        ({"codebook_sizes": [64, 8], "embeddings": None}, r"`codebook_sizes` \[64, 8\] do not suit 40 items"),
        ({"codebook_sizes": [3, 3], "embeddings": None}, r"`codebook_sizes` \[3, 3\] do not suit 40 items"),
        ({"codebook_sizes": [64, 8], "embeddings": None, "collisions": "keep"}, r"\[64, 8\] do not suit 40 items"),
        ({"sids": str(tmp_path / "nowhere"), "embeddings": None}, "nowhere"),
        ({"dropout": 1.5, "embeddings": None}, "`dropout` must lie in"),
        ({"num_concepts": 0, "embeddings": None}, "`num_concepts` must be at least 1"),
        ({"results_file": str(tmp_path / "rows.json"), "embeddings": None}, "`results_file` .* is no JSON"),
        ({"interactions": str(tmp_path / "ghosts.parquet")}, "ghost"),
        ({"interactions": str(tmp_path / "tiny.parquet")}, "split|test|train"),
        ({"interactions": str(tmp_path / "threes.parquet"), "protocol": "leave_one_out"}, "nothing to learn from"),
        ({"resume_from_checkpoint": str(tmp_path / "nowhere")}, "`resume_from_checkpoint` .* is no checkpoint"),
        ({"teacher": str(tmp_path / "nowhere"), "embeddings": None}, "nowhere"),
    ]
    for changes, message in cases:
        with pytest.raises((ValueError, OSError, StrictDataclassError), match=message):
            train(_broken(options, tmp_path, **changes))
        assert not (tmp_path / "run").exists(), changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"protocol": "random"}, "`protocol` must be one of temporal, leave_one_out, got 'random'"),
        ({"backbone": "XL"}, "`backbone` must be one of S, M, L"),
        ({"num_beams": 10}, r"`num_beams` \(10\) is narrower than the largest of `cutoffs` \(20\)"),
        ({"validation_beams": 5}, "`validation_beams` must be at least 10"),
        ({"decoder_width": 100}, "`decoder_width` must be a positive multiple of 64"),
        ({"normalize_over": "all"}, "`normalize_over` must be one of"),
        ({"collisions": "drop"}, "`collisions` must be one of resolve, keep, got 'drop'"),
        ({"reranker": True}, "`reranker` tells items of one SID apart, but `collisions` is 'resolve'"),
        ({"reranker": True, **KEPT, "search_in": "backbone"}, "`reranker` reads on in the light decoder"),
        ({"reranker": True, **KEPT, "teacher": "runs/teacher"}, "`reranker` learns beside cross-entropy alone"),
        ({"cutoffs": [0, 20]}, r"`cutoffs` must be a list of positive integers, got \[0, 20\]"),
        ({"cutoffs": []}, "`cutoffs` must be a list of positive integers"),
        ({"cutoffs": 10}, "`cutoffs` must be a list of positive integers, got 10"),
        ({"codebook_sizes": [8, 2.5]}, "`codebook_sizes` must be a list of positive integers"),
        ({"text_columns": "text"}, "`text_columns` must be a list of column names, got 'text'"),
        ({"decoder_layers": 0}, "`decoder_layers` must be at least 1, got 0"),
        ({"rerank_size": 0}, "`rerank_size` must be at least 1, got 0"),
        ({"early_stopping_patience": -1}, "`early_stopping_patience` must be at least 0"),
        ({"validation_examples": -5}, "`validation_examples` must be at least 0"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        _broken(options, tmp_path, **changes)


def test_a_checkpoint_is_not_evaluated_on_items_it_does_not_know(finished, options, tmp_path):
    folder, chosen, _ = finished
    table = pd.read_csv(options["items"])
    pd.concat([table, table.head(1).assign(item_id="stranger")]).to_csv(tmp_path / "more.csv", index=False)
    np.save(tmp_path / "more.npy", np.concatenate([np.load(options["embeddings"]), np.ones((1, 6), np.float32)]))
    changes = {
        "items": str(tmp_path / "more.csv"),
        "embeddings": str(tmp_path / "more.npy"),
        "output_dir": str(tmp_path),
    }
    with pytest.raises(ValueError, match="stranger"):
        evaluate(DecoTrainingArguments(**(chosen | changes)), folder / "run/model")


def test_every_option_has_a_help_text():
    own = DecoTrainingArguments.__annotations__
    assert all(item.metadata.get("help") for item in dataclasses.fields(DecoTrainingArguments) if item.name in own)
