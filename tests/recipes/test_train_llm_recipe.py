"""`recipes/train_llm.py` as a program, alone and on two processes."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_deco.training import evaluate
from hf_deco.training.llm_arguments import LLMTrainingArguments
from hf_deco.training.parser import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes/train_llm.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


def run(command, folder, **environment):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(checkpoint):
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_it_grounds_from_a_file_and_prints_figures(llm_options, tmp_path, monkeypatch, capsys):
    chosen = llm_options | {"grounding_epochs": 1, "grounding_holdout": 0.25}
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(chosen))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [RECIPE, "options.yaml", "--output_dir", "out", "--stage", "grounding"])
    runpy.run_path(RECIPE, run_name="__main__")
    output = capsys.readouterr().out
    figures = json.loads((tmp_path / "out/grounded/grounding.json").read_text())["metrics"]
    assert f"seen_recall@10 {figures['seen_recall@10']:.4f}" in output
    assert f"heldout_text_loss {figures['heldout_text_loss']:.4f}" in output
    assert not (tmp_path / "out/model").exists()


def test_two_processes_run_both_stages_and_go_on_exactly_where_they_stopped(llm_options, tmp_path):
    chosen = llm_options | {"output_dir": "whole", "grounding_backbone": "lora", "grounding_epochs": 1, "max_steps": 5}
    chosen |= {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "save_total_limit": None}
    chosen |= {"eval_strategy": "no", "load_best_model_at_end": False, "dropout": 0.1, "num_train_epochs": 9}
    chosen |= {"per_device_eval_batch_size": 7}
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(chosen))
    output = run([*LAUNCH, RECIPE, "options.yaml"], tmp_path, ACCELERATE_USE_CPU="1")
    assert output.count("| deco_ce |") == 1
    state = json.loads((tmp_path / "whole/grounding/checkpoint-3/trainer_state.json").read_text())
    assert state["global_step"] == 3  # 40 items in batches of 8 on two processes

    # Merged weights, read by one process, answer as the adapted model did on two.
    metrics = json.loads((tmp_path / "whole/metrics.json").read_text())
    args = LLMTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "alone")}))
    assert evaluate(args, tmp_path / "whole/model")["deco_ce"] == pytest.approx(metrics["deco_ce"], abs=1e-6)

    # Stopped in the second stage: in its second epoch, where order and dropout have to be picked up.
    for name in ("checkpoint-4", "grounded", "sids"):
        shutil.copytree(tmp_path / "whole" / name, tmp_path / "again" / name)
    command = [*LAUNCH, RECIPE, "options.yaml", "--output_dir", "again", "--resume_from_checkpoint", "last"]
    run(command, tmp_path, ACCELERATE_USE_CPU="1")
    whole, again = (losses(tmp_path / name / "checkpoint-5") for name in ("whole", "again"))
    assert whole == again and len(whole) == 5
    whole, again = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/configs").glob("llm_*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_parses_and_begins_with_its_launch_line(path):
    first, size = path.read_text().splitlines()[0], path.stem.rpartition("_")[2].upper()
    assert first == f"# accelerate launch recipes/train_llm.py recipes/configs/{path.name}"
    args = parse_arguments([str(path)], options=LLMTrainingArguments)
    assert args.backbone == f"Qwen/Qwen2.5-{size}" and args.output_dir == f"runs/{path.stem}"
    assert (args.stage, args.train_backbone, args.bf16) == ("both", "lora", True)
