"""A GEAR run on a stream: what it trains on when, what it publishes, and how it goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoProcessor, TrainerCallback

from hf_deco.hub import check_folder
from hf_deco.items.generations import open_index
from hf_deco.training.gear import curve, make_config, make_trainer, prepare_stream, summarise, train_gear
from hf_deco.training.gear_arguments import ABLATIONS, GearTrainingArguments
from hf_deco.training.gear_index import IndexPublisher


@pytest.fixture
def arguments(stream_options, tmp_path):
    def make(folder="run", **options):
        return GearTrainingArguments(**(stream_options | {"output_dir": str(tmp_path / folder)} | options))

    return make


class Diary(TrainerCallback):
    """What happened, in order: batches trained on, stages, and periods evaluated."""

    def __init__(self, trainer):
        self.trainer, self.batches, self.entries = trainer, [], []
        make_batch = trainer.collator

        def remember(requests, item_codes=None):
            self.entries.append(("train", {request.period for request in requests}, trainer.model.stage))
            self.batches.append(make_batch(requests, item_codes))
            return self.batches[-1]

        remember.items, remember.set_catalog, remember.log = make_batch.items, make_batch.set_catalog, make_batch.log
        trainer.collator = remember
        trainer.add_callback(self)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.entries.append(("evaluate", metrics["eval_period"], state.global_step))


def losses(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def assert_same_batches(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            pairs = zip(value, other[name], strict=True) if isinstance(value, list) else [(value, other[name])]
            assert all(torch.equal(*pair) for pair in pairs), name


def test_a_period_is_evaluated_after_all_before_it_and_before_anything_of_it(arguments):
    trainer = make_trainer(arguments())
    diary = Diary(trainer)
    trainer.train()
    trained = set()
    for entry in diary.entries:
        if entry[0] == "train":
            trained |= entry[1]
        else:
            assert trained == set(range(entry[1])) and entry[2] == 4 * entry[1]
    assert [entry[1] for entry in diary.entries if entry[0] == "evaluate"] == [2, 3, 4, 5]
    stages = [entry[2] for entry in diary.entries if entry[0] == "train"]
    assert stages == ["ltr"] * 3 + ["rq"] * 2 + ["joint"] * 19
    log = trainer.state.log_history
    assert "loss_rq" not in log[2] and "loss_gen" not in log[4] and {"loss_gen", "loss_rerank"} <= set(log[5])
    points = curve(log)
    assert [point["items_added"] for point in points] == [25, 1, 1, 1]
    assert all(0 <= point["sids_changed"] <= 1 for point in points[1:]) and "sids_changed" not in points[0]


@pytest.mark.parametrize("options", [{"save_steps": 8}, {"frozen_sids": True}, {"refresh_index": False}])
def test_a_run_goes_on_with_the_same_batches_and_losses(arguments, tmp_path, options):
    whole = make_trainer(arguments("whole", **options))
    diary = Diary(whole)
    whole.train()
    checkpoints = list((tmp_path / "whole").glob("checkpoint-*"))
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        step = int(checkpoint.name.split("-")[1])
        args = arguments("whole", **options)
        resumed = make_trainer(args, str(checkpoint))
        rest = Diary(resumed)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert step in (16, 21, 24) and len(rest.batches) == 24 - step
        assert_same_batches(diary.batches[step:], rest.batches)
        assert losses(resumed) == losses(whole)
        for name, weight in resumed.model.state_dict().items():
            assert torch.equal(weight, whole.model.state_dict()[name]), name
        assert curve(resumed.state.log_history) == curve(whole.state.log_history)


def test_the_same_seed_gives_the_same_run_and_another_another(arguments):
    runs = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        trainer = make_trainer(arguments(folder, seed=seed, max_steps=8))
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1] != runs[2]


def test_the_index_is_that_of_the_model(arguments, tmp_path):
    metrics = train_gear(arguments())
    assert list(metrics) == ["gear", "popularity", "repeat_last"] and metrics["gear"]["num_periods"] == 4
    index, model = open_index(tmp_path / "run/index"), AutoModel.from_pretrained(tmp_path / "run/model")
    index.check_made_for(model.config.catalog_version, "gear")
    assert model.tokenizer_version == index.tokenizer_version and len(index) == model.config.num_items == 28
    log = prepare_stream(arguments())
    assert sorted(index.item_ids) == sorted(log.item_ids.tolist())
    assert np.array_equal(model.catalog_codes.numpy(), index.item_codes())
    # finished: nothing is trained, and what it found is returned
    before = (tmp_path / "run/model/model.safetensors").stat().st_mtime_ns
    assert train_gear(arguments(resume_from_checkpoint="last")) == metrics
    assert (tmp_path / "run/model/model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds a finished run with another `num_positives`"):
        train_gear(arguments(resume_from_checkpoint="last", num_positives=1))
    with pytest.raises(ValueError, match="holds an earlier run"):
        train_gear(arguments())


def test_an_index_that_is_not_refreshed_stays_and_new_items_stay_out(arguments):
    trainer = make_trainer(arguments(refresh_index=False))
    trainer.train()
    points = curve(trainer.state.log_history)
    assert [point["num_items"] for point in points] == [25] * 4 and "items_added" not in points[1]
    assert trainer.model.config.catalog_version != trainer.model.tokenizer_version
    assert open_index(trainer.publisher.folder).tokenizer_version == trainer.model.config.catalog_version


def test_frozen_sids_never_change_and_new_items_get_theirs_from_the_frozen_tokenizer(arguments):
    trainer = make_trainer(arguments(frozen_sids=True))
    trainer.train()
    assert trainer.frozen_codes.shape == (28, 2)
    points = curve(trainer.state.log_history)
    assert [point["sids_changed"] for point in points[1:]] == [0.0] * 3
    assert np.array_equal(trainer.model.catalog_codes.numpy(), trainer.frozen_codes[: trainer.model.config.num_items])
    assert not any("loss_rq" in entry for entry in trainer.state.log_history if entry["step"] > 5)


def test_an_unmoved_tokenizer_adds_new_items_to_the_index_it_has(arguments, tmp_path):
    trainer = make_trainer(arguments())
    items = trainer.collator.items(28)
    trainer.model.eval().init_quantizer(items["content"], items["item_ids"])
    publisher = IndexPublisher(tmp_path / "index", trainer.collator)
    first = publisher.publish(trainer.model, 20)
    second = publisher.publish(trainer.model, 28)
    anew = IndexPublisher(tmp_path / "other", trainer.collator).publish(trainer.model, 28)
    assert (first.added, first.changed, second.added, second.changed) == (20, None, 8, 0.0)
    assert (second.index.generation, second.index.base) == (2, 2)
    for name in ("keys", "offsets"):
        assert np.array_equal(getattr(second.index, name), getattr(anew.index, name))
    assert np.array_equal(second.index.embeddings.data, anew.index.embeddings.data)
    back = publisher.publish(trainer.model, 20)  # a resumed run knows fewer
    assert len(back.index) == 20 and np.array_equal(back.index.keys, first.index.keys)


@pytest.mark.parametrize(
    ("option", "held"),
    [
        ("tower_rate", {"item_tower.up_proj", "item_tower.down_proj"}),
        ("quantizer_rate", {"quantizer", "item_features"}),
    ],
)
def test_what_makes_sids_learns_at_rates_of_its_own(arguments, option, held):
    rates = {"tower_rate": 0.25, "quantizer_rate": 0.5} | {option: 0.0}
    trainer = make_trainer(arguments(max_steps=6, **rates))
    trainer.train()
    rate_of = {id(w): group["lr"] for group in trainer.optimizer.param_groups for w in group["params"]}
    for name, weight in trainer.model.named_parameters():
        factor = {"quantizer": rates["quantizer_rate"], "item_features": rates["quantizer_rate"]}.get(
            name.split(".")[0]
        )
        if name.startswith(("item_tower.up_proj", "item_tower.down_proj")):
            factor = rates["tower_rate"]
        assert rate_of[id(weight)] == pytest.approx(1e-3 * (1.0 if factor is None else factor)), name
    assert any(name.startswith(tuple(held)) for name, _ in trainer.model.named_parameters())


def test_what_has_a_rate_of_zero_stays(arguments):
    trainer = make_trainer(arguments(tower_rate=0.0, quantizer_rate=0.0, max_steps=6))
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    parts = {".".join(name.split(".")[: 1 + name.startswith("item_tower")]) for name in moved}
    # the quantizer was initialised, once, and did not learn
    towers = {"user_tower", "item_tower.wide_proj", "item_tower.out_proj"}
    assert parts == towers | {"decoder", "memory_encoder", "quantizer", "user_features"}


def test_the_model_starts_with_scores_of_zero_and_content_of_a_known_size(arguments):
    trainer = make_trainer(arguments())
    log = trainer.stream.log
    content, categories = torch.from_numpy(log.content).float(), torch.from_numpy(log.item_categories)
    read = trainer.model.item_features(content, categories, torch.float32)
    assert read[:, : log.content.shape[1]].square().mean().item() == pytest.approx(0.09, rel=1e-4)
    assert trainer.model.config.content_scale * np.sqrt(np.square(log.content).mean()) == pytest.approx(0.3, rel=1e-4)
    batch = trainer.collator.users([0, 1], [trainer.stream.requests.history(user, 10**9) for user in (0, 1)])
    assert len(batch["content"]) and not trainer.model.encode_users(**batch).any()
    memory = trainer.model.encode_memory(**batch)
    assert not trainer.model.rerank_vectors(memory, torch.ones((2, 1, 2), dtype=torch.long)).any()


def test_ablations_leave_out_what_they_name(arguments):
    log = prepare_stream(arguments())
    assert make_config(arguments(), log).loss_weights == {"ltr": 1, "rq": 1, "gen": 10, "rerank": 1}
    assert make_config(arguments(reranker=False), log).loss_weights["rerank"] == 0
    assert make_config(arguments(quantizer_method="rq"), log).quantizer == "rq"
    names = [arguments(**options).system for options in ABLATIONS.values()]
    assert names == [f"gear/{name}" for name in ABLATIONS] and arguments().system == "gear"


def test_a_list_of_equal_labels_teaches_nothing_and_harms_nothing(arguments, stream_folder, tmp_path):
    """No impressions, no popular candidates: every candidate of a list has an event, and here the same grade."""
    roles = (stream_folder / "log.yaml").read_text().replace("path: ", f"path: {stream_folder}/")
    roles = roles.replace(", conversions: discounted", "").split("impressions")[0]
    (tmp_path / "equal.yaml").write_text(roles)
    options = {"log": str(tmp_path / "equal.yaml"), "history_lengths": [6], "num_negatives": 0, "num_popular": 0}
    trainer = make_trainer(arguments(**options, num_same_sid=0, max_steps=9))
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["loss_ltr"] == 0 for entry in log) and all(np.isfinite(entry["loss"]) for entry in log)
    assert log[-1]["loss_gen"] > 0


def test_a_log_of_items_and_events_alone_is_trained_on_and_served(arguments, stream_folder, tmp_path):
    """No features of items or users, no impressions, no business value, one behaviour, periods by their length."""
    (tmp_path / "plain.yaml").write_text(
        f"items: {{path: {stream_folder}/items.csv}}\nevents: {{path: {stream_folder}/events.parquet}}\n"
    )
    train_gear(arguments(log=str(tmp_path / "plain.yaml"), history_lengths=[6]))
    check_folder(tmp_path / "run/model")
    model, processor = (kind.from_pretrained(tmp_path / "run/model") for kind in (AutoModel, AutoProcessor))
    assert model.config.user_features == model.config.item_features == [] and len(processor.item_ids) == 28
    inputs = processor([{"clicks": ["i3"]}, {}], [None, {}])
    assert inputs["user_ids"].shape == (2, 0) and inputs["item_ids"].shape == (1, 0)
    assert model.generate(**inputs, num_beams=4, num_return_sequences=4).shape == (8, 2)


def test_means_over_periods_and_over_cold_targets():
    points = [
        {"step": 1, "period": 3, "recall@3": 0.2, "cold/num_targets": 3, "cold/recall@3": 1.0},
        {"step": 2, "period": 4, "recall@3": 0.4, "cold/num_targets": 0, "sids_changed": 0.5},
        {"step": 3, "period": 5, "recall@3": 0.6, "cold/num_targets": 1, "cold/recall@3": 0.0, "sids_changed": 0.1},
    ]
    assert summarise(points) == pytest.approx(
        {"recall@3": 0.4, "cold/num_targets": 4, "cold/recall@3": 0.75, "sids_changed": 0.3, "num_periods": 3}
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gradient_accumulation_steps": 2}, "a step may not span two periods"),
        ({"dataloader_num_workers": 1}, "every worker would read the whole stream"),
        ({"ignore_data_skip": False}, "`ignore_data_skip` must stay True"),
        ({"num_beams": [4]}, r"`num_beams` \[4\] must have a width for each of 2 levels"),
        ({"loss_weights": [1, 1]}, "`loss_weights` must be four numbers"),
        ({"cutoffs": [0]}, "`cutoffs` must be a list of positive integers"),
        ({"quantizer_method": "kmeans"}, "`quantizer_method` must be one of rq, rq-ema"),
        ({"tower_rate": -1.0}, "`tower_rate` must be finite and not negative"),
        ({"quantizer_rate": float("inf")}, "`quantizer_rate` must be finite and not negative"),
        ({"num_positives": 0}, "`num_positives` must be at least 1"),
    ],
)
def test_options_that_no_stream_could_use(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_steps": 25}, "`max_steps` is 25, but the stream is over after 24"),
        ({"ltr_steps": 20, "rq_steps": 4}, "leave the generator none of 24 steps"),
        (
            {"codebook_sizes": [40, 4]},
            r"need 40 items .*, but after `ltr_steps` \(3\) 24 are known",
        ),
        ({"history_lengths": [6]}, "`history_lengths` .* a length for each of clicks, conversions"),
        ({"log": "nowhere.yaml"}, "there is no such file"),
    ],
)
def test_a_run_that_the_log_does_not_allow_is_refused_before_it_trains(arguments, tmp_path, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_gear(arguments(**options))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_stream_is_refused(arguments, tmp_path):
    trainer = make_trainer(arguments(max_steps=8))
    trainer.train()
    checkpoint = tmp_path / "run/checkpoint-7"
    state = json.loads((checkpoint / "stream.json").read_text())
    assert state["step"] == 7 and state["request"] == 70
    with pytest.raises(ValueError, match="was trained on another stream"):
        make_trainer(arguments(num_negatives=1), str(checkpoint))
    assert Path(checkpoint / "model.safetensors").exists()
