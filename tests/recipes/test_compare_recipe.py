"""`recipes/compare.py` as a program: a small study with a teacher, stopped and gone on with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes/compare.py")


@pytest.fixture
def study(options, tmp_path):
    shared = {name: value for name, value in options.items() if name != "output_dir"} | {"max_steps": 2}
    shared |= {"cutoffs": [10, 50, 100], "num_beams": 100}
    return {
        "study": "small",
        "output_dir": str(tmp_path / "runs"),
        "seeds": [0, 1],
        "options": shared,
        "runs": [
            {"system": "fused_gr", "options": {"search_in": "backbone"}},
            {"system": "deco", "teacher": "fused_gr"},
            {"system": "flat_gr", "options": {"search_in": "backbone", "history_format": "flat"}, "seeds": [0]},
        ],
        "paper": {"deco": {"ndcg@10": 0.5, "recall@100": 0.75}},
        "speed": {"batch_size": 4, "num_beams": 10, "rounds": 2},
    }


def run(study, folder):
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    command = [sys.executable, RECIPE, "study.yaml", "--results", "results"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_study_trains_teachers_first_and_goes_on_where_it_was(study, tmp_path):
    done = run(study, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "results/small.json").read_text())
    assert sorted((row["system"], row["seed"] if row["seed"] is not None else -1) for row in rows) == [
        ("cooccurrence", -1), ("deco", 0), ("deco", 1), ("flat_gr", 0), ("fused_gr", 0), ("fused_gr", 1),
        ("popularity", -1), ("text_neighbors", -1),
    ]  # fmt: skip
    speeds = json.loads((tmp_path / "results/small_speed.json").read_text())
    assert [row["system"] for row in speeds] == ["fused_gr", "deco", "flat_gr"]
    assert all(row["users_per_s"] > 0 and row["batch_size"] == 4 for row in speeds)
    table = (tmp_path / "results/small.md").read_text().splitlines()
    deco = next(line for line in table if line.startswith("| deco |"))
    values = [row["metrics"]["ndcg@10"] for row in rows if row["system"] == "deco"]
    assert f"| {sum(values) / 2:.4f} ± " in deco and deco.endswith("| 0.5000 / 0.7500 |")
    assert (tmp_path / "results/small.png").read_bytes().startswith(b"\x89PNG")

    config = json.loads((tmp_path / "runs/deco-seed1/model/config.json").read_text())
    assert config["distillation"]["kd_weight"] > 0
    weights = tmp_path / "runs/deco-seed0/model/model.safetensors"
    before = weights.stat().st_mtime_ns
    again = run(study, tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert weights.stat().st_mtime_ns == before
    assert json.loads((tmp_path / "results/small.json").read_text()) == rows


@pytest.mark.parametrize(
    "change, message",
    [
        ({"extra": 1}, "holds unknown keys: extra"),
        ({"runs": [{"system": "deco", "teacher": "fused_gr"}]}, "must stand before it in `runs`"),
        ({"seeds": None}, "must name"),
    ],
)
def test_a_study_that_cannot_run_is_refused_at_once(study, tmp_path, change, message):
    study |= change
    if change.get("seeds", 0) is None:
        del study["seeds"]
    done = run(study, tmp_path)
    assert done.returncode != 0 and message in done.stderr
    assert not (tmp_path / "runs").exists()
