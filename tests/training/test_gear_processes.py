"""A GEAR run on two processes: they share the stream and agree on the model; one of them judges and writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel

import hf_deco
from hf_deco.data.requests import Requests
from hf_deco.items.generations import open_index
from hf_deco.training.gear import prepare_stream
from hf_deco.training.gear_arguments import GearTrainingArguments
from hf_deco.training.gear_stream import RequestStream

# What every process saw of a run, and of the same run from its checkpoint on, told by the trainer's own parts.
PROGRAM = """
import hashlib, json, sys
from pathlib import Path

import torch
from accelerate import PartialState
from hf_deco.evaluation.next_period import NextPeriodEvaluator
from hf_deco.items.generations import IndexWriter
from hf_deco.training import gear
from hf_deco.training.gear_arguments import GearTrainingArguments

diary = {"batches": [], "judged": [], "published": 0}
make_trainer, judge, publish = gear.make_trainer, NextPeriodEvaluator.__call__, IndexWriter.publish


def watched(args, checkpoint=None):
    trainer = make_trainer(args, checkpoint)

    class Watched(type(trainer.collator)):
        def __call__(self, requests, item_codes=None):
            diary["batches"].append([trainer.state.global_step, [request.number for request in requests]])
            return super().__call__(requests, item_codes)

    trainer.collator.__class__ = Watched
    diary["trainer"] = trainer
    return trainer


def judging(self, model, index, period, vectors=None):
    diary["judged"].append(period)
    return judge(self, model, index, period, vectors)


def publishing(self, index, keep=None):
    diary["published"] += 1
    return publish(self, index, keep)


def digest(trainer):
    tensors = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    del tensors["catalog_codes"]  # its order is that of the index in what the main process saves
    parts = (f"{name} {tensor.dtype} ".encode() + tensor.numpy().tobytes() for name, tensor in sorted(tensors.items()))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def told(trainer):
    curve, losses = gear.curve(trainer.state.log_history), [e["loss"] for e in trainer.state.log_history if "loss" in e]
    seen = {name: diary[name] for name in ("batches", "judged", "published")}
    diary.update(batches=[], judged=[], published=0)
    return seen | {"weights": digest(trainer), "curve": curve, "losses": losses}


gear.make_trainer, NextPeriodEvaluator.__call__, IndexWriter.publish = watched, judging, publishing
args = GearTrainingArguments(**json.loads(Path("options.json").read_text()))
rank = args.process_index
metrics = gear.train_gear(args)
answer = {"whole": told(diary["trainer"]), "metrics": metrics}
checkpoint = str(Path(args.output_dir) / "checkpoint-14")
trainer = watched(args, checkpoint)
trainer.train(resume_from_checkpoint=checkpoint)
answer["resumed"] = told(trainer)
Path(f"rank{rank}.json").write_text(json.dumps(answer))
PartialState().destroy_process_group()
"""
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


@pytest.fixture(scope="module")
def run(stream_options, tmp_path_factory):
    """Folder of the run, its options, and what both processes told."""
    folder = tmp_path_factory.mktemp("two")
    # 4 steps a week as in a run of one process: two batches of 5 in the place of one of 10.
    options = stream_options | {
        "output_dir": "run",
        "per_device_train_batch_size": 5,
        "results_file": "rows.json",
        "save_total_limit": 4,
    }
    (folder / "options.json").write_text(json.dumps(options))
    (folder / "program.py").write_text(PROGRAM)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1"}
    environment["PYTHONPATH"] = str(Path(hf_deco.__file__).parents[1])
    command = [*LAUNCH, "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, options, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_request_is_trained_on_once_at_its_step(run):
    folder, options, ranks = run
    args = GearTrainingArguments(**(options | {"output_dir": str(folder / "nowhere")}))
    requests = Requests(prepare_stream(args), (6, 4), 2, 2, 2)
    expected = [[request.number for request in batch] for batch in RequestStream(requests, 5, 2)]
    assert len(expected) == 48 and sum(expected, []) == list(range(240))
    for rank, told in enumerate(ranks):
        assert told["whole"]["batches"] == [[step, expected[2 * step + rank]] for step in range(24)]
        assert told["resumed"]["batches"] == [[step, expected[2 * step + rank]] for step in range(14, 24)]


def test_the_processes_agree_and_a_checkpoint_goes_on_to_the_same_weights(run):
    first, second = run[2]
    assert len({told[part]["weights"] for told in (first, second) for part in ("whole", "resumed")}) == 1
    assert first["resumed"]["losses"] == first["whole"]["losses"] and len(first["whole"]["losses"]) == 24
    assert first["resumed"]["curve"] == first["whole"]["curve"]


def test_one_process_judges_and_writes(run):
    folder, _, (first, second) = run
    assert first["whole"]["judged"] == [2, 3, 4, 5] and first["resumed"]["judged"] == [4, 5]
    assert first["whole"]["published"] == 5 and first["resumed"]["published"] == 2
    assert second["whole"]["judged"] == second["resumed"]["judged"] == [] and second["whole"]["published"] == 0
    assert [point["period"] for point in first["whole"]["curve"]] == [2, 3, 4, 5]
    assert second["metrics"] == {} and set(first["metrics"]) == {"gear", "popularity", "repeat_last"}
    rows = json.loads((folder / "rows.json").read_text())
    assert [row["system"] for row in rows] == ["gear", "popularity", "repeat_last"] and rows[0]["steps"] == 24
    assert rows == json.loads((folder / "run/run.json").read_text())["rows"]
    model, index = AutoModel.from_pretrained(folder / "run/model"), open_index(folder / "run/model/index")
    index.check_made_for(model.tokenizer_version, model.config.model_type)
    assert np.array_equal(model.catalog_codes.numpy(), index.item_codes()) and len(index) == 28
