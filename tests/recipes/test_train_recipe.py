"""`recipes/train.py` as a program, alone and on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_deco.training.arguments import DecoTrainingArguments
from hf_deco.training.parser import parse_arguments
from hf_deco.training.run import evaluate

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes/train.py")


def run(command, folder, **environment):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_trains_from_a_file_and_prints_the_table(options, tmp_path):
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(options | {"max_steps": 4}))
    output = run([sys.executable, RECIPE, "options.yaml", "--output_dir", "out", "--seed", "1"], tmp_path)
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert f"| deco_ce | {metrics['deco_ce']['ndcg@10']:.4f} |" in output
    assert (tmp_path / "out/model/model.safetensors").exists()


def test_two_processes_share_the_work_and_agree_with_one(options, tmp_path):
    chosen = options | {"max_steps": 4, "output_dir": str(tmp_path / "out"), "per_device_eval_batch_size": 7}
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(chosen))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    output = run([*launch, RECIPE, "options.yaml"], tmp_path, ACCELERATE_USE_CPU="1")
    assert output.count("| deco_ce |") == 1
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    args = DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "alone")}))
    alone = evaluate(args, tmp_path / "out/model")
    # Two ranks see 80 users in batches of 7: a wrong order or a duplicate of the padding would move every figure.
    assert metrics["deco_ce"] == pytest.approx(alone["deco_ce"], abs=1e-6)
    state = json.loads(next((tmp_path / "out").glob("checkpoint-*/trainer_state.json")).read_text())
    assert state["train_batch_size"] == 32


# Those of other recipes are theirs to test.
CONFIGS = sorted(
    path
    for path in (ROOT / "recipes/configs").glob("*.yaml")
    if not path.name.startswith(("llm_", "compare_tokenizers", "gear_"))
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_parses_and_begins_with_its_launch_line(path):
    options = yaml.safe_load(path.read_text())
    program = "recipes/compare.py" if "study" in options else "recipes/train.py"
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ") and f"{program} recipes/configs/{path.name}" in first
    assert options["output_dir"].startswith("runs/")
    if "study" not in options:
        parse_arguments([str(path)])
        return
    systems = [run["system"] for run in options["runs"]]
    for run in options["runs"]:
        args = DecoTrainingArguments(**(options["options"] | run.get("options", {})), output_dir="runs/nowhere")
        assert args.interactions == options["options"]["interactions"]
        assert run.get("teacher") in {None, *systems}
