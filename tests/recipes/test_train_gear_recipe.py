"""`recipes/train_gear.py` as a program: a stream of weeks in seconds, an ablation beside it, and the same run again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_deco.training.gear_arguments import GearTrainingArguments
from hf_deco.training.parser import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes/train_gear.py")


@pytest.fixture
def run(stream_options, tmp_path):
    options = stream_options | {"output_dir": "runs", "results_file": "results/small.json"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(options | {"resume_from_checkpoint": "last"}))

    def run(*flags):
        command = [sys.executable, RECIPE, "small.yaml", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_a_stream_is_trained_judged_and_put_beside_its_ablation(run, tmp_path):
    for flags in ((), ("--ablation", "no_reranker", "--max_steps", "16")):
        done = run(*flags)
        assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "results/small.json").read_text())
    base = next(row for row in rows if row["system"] == "gear")
    assert {row["system"] for row in rows} == {"gear", "gear/no_reranker", "popularity", "repeat_last"}
    assert [point["period"] for point in base["curve"]] == [2, 3, 4, 5] and base["steps"] == 24
    mean = sum(point["recall@3"] for point in base["curve"]) / 4
    assert base["metrics"]["recall@3"] == pytest.approx(mean)
    assert base["config"]["quantizer_method"] == "prefix-basis-rq" and "--ablation" not in base["command"]
    table = (tmp_path / "results/small.md").read_text()
    assert f"| gear | 1 | {mean:.4f} |" in table and "| gear/no_reranker | 1 | " in table and " %)" in table
    assert (tmp_path / "results/small.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs/gear-seed0/index/CURRENT").exists()

    weights = tmp_path / "runs/gear-seed0/model/model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run().returncode == 0
    assert weights.stat().st_mtime_ns == before
    assert {row["system"]: row for row in json.loads((tmp_path / "results/small.json").read_text())}["gear"] == base


def test_an_ablation_that_is_none_is_refused(run, tmp_path):
    done = run("--ablation", "nothing")
    assert done.returncode != 0 and "invalid choice: 'nothing'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_committed_configuration_parses_and_begins_with_its_launch_line():
    path = ROOT / "recipes/configs/gear_grocery.yaml"
    assert "recipes/train_gear.py recipes/configs/gear_grocery.yaml" in path.read_text().splitlines()[0]
    args = parse_arguments([str(path), "--seed", "1"], options=GearTrainingArguments)
    assert args.log == "completejourney" and args.seed == 1 and args.output_dir.startswith("runs/")
