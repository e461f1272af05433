"""`recipes/compare_tokenizers.py` as a program: a small study, finished in one go, and gone on with."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def study(tmp_path):
    rng = np.random.default_rng(0)
    centres = 3 * rng.standard_normal((10, 12))
    embeddings = (centres[rng.integers(0, 10, 310)] + rng.standard_normal((310, 12))).astype(np.float16)
    np.save(tmp_path / "embeddings.npy", embeddings)
    items = pd.DataFrame({"item_id": range(310), "text": [f"item {row % 300}" for row in range(310)]})
    items["categories"] = [f"c{row % 5}" for row in range(310)]
    items.to_csv(tmp_path / "items.csv", index=False)
    return {
        "study": "small",
        "output_dir": str(tmp_path / "runs"),
        "seeds": [0, 1],
        "width": 8,
        "load": 0.3,
        "training": {"num_steps": 4, "batch_size": 64, "learning_rate": 0.01},
        "data": {"small": {"items": str(tmp_path / "items.csv"), "embeddings": str(tmp_path / "embeddings.npy")}},
        "systems": [{"system": "rq-kmeans"}, {"system": "prefix-basis-rq"}],
        "variants": [{"system": "basis-rq/12-steps", "options": {"newton_schulz_steps": 12}}],
        "drift": {"strength": {"rotation": 1.0}, "num_batches": 3, "batch_size": 16, "learning_rate": 0.003},
        "toy": {
            "num_clusters": 8,
            "num_points": 200,
            "width": 3,
            "noise": 0.1,
            "epochs": 1,
            "batch_size": 64,
            "learning_rate": 0.01,
        },
    }


@pytest.fixture
def recipe(monkeypatch):
    """The recipe as a module, for what need not be a program of its own."""
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module("compare_tokenizers")


def write(study, folder):
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    return folder / "study.yaml"


def run(study, folder):
    write(study, folder)
    command = [sys.executable, str(RECIPES / "compare_tokenizers.py"), "study.yaml", "--results", "results"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_study_writes_rows_tables_and_pictures_and_skips_what_is_finished(study, tmp_path, recipe, capsys):
    done = run(study, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "small: 300 items" in done.stdout  # ten texts occur twice
    file = tmp_path / "results/small.json"
    rows = json.loads(file.read_text())
    runs = [(row["protocol"], row["system"], row["config"].get("sizes")) for row in rows if row["seed"] == 1]
    drifts = ["rq-kmeans/frozen", "rq-kmeans/refit", "rq-ema/restart", "prefix-basis-rq"]
    toys = ["rq-kmeans", "rq", "rq-ema", "rq-ema/restart", "simvq", "basis-rq", "basis-rq/12-steps"]
    assert runs == [
        ("static", "rq-kmeans", "progressive"),
        ("static", "prefix-basis-rq", "progressive"),
        ("static", "basis-rq/12-steps", "progressive"),
        ("static", "rq-kmeans", "uniform"),
        ("static", "prefix-basis-rq", "uniform"),
        *(("drift/rotation", system, None) for system in drifts),
        *(("toy", system, None) for system in toys),
    ]
    # 300 items at a load of 0.3 are 1,000 sequences, as nearly as 64 a^3 comes: a is 2.
    static = [row for row in rows if row["protocol"] == "static"]
    assert {tuple(row["config"]["codebook_sizes"]) for row in static} == {(32, 8, 2), (8, 8, 8)}
    assert all(0 < row["metrics"]["utilization"] <= 300 / 512 for row in static)
    assert all(len(row["metrics"]["prefix_purity"]) == 3 for row in static)
    errors = [row["metrics"]["orthogonality_error"] for row in static if row["system"] == "basis-rq/12-steps"]
    assert np.shape(errors) == (2, 3) and np.max(errors) < 0.01
    assert all(0 <= row["metrics"]["changed_share"] <= 1 for row in rows if row["protocol"] == "drift/rotation")

    table = (tmp_path / "results/small.md").read_text()
    headings = [line for line in table.splitlines() if line.startswith("#")]
    assert headings == [
        "## small, progressive sizes (32, 8, 2)",
        "## small, uniform sizes (8, 8, 8)",
        "## small, drift/rotation, strength 1",
        "## Appendix A's toy",
    ]
    values = [row["metrics"]["mse"] * 1000 for row in static if row["config"]["sizes"] == "uniform"][:2]
    assert "| rq-kmeans | 2 | " in table and f" | {np.mean(values):.3f} ± {np.std(values, ddof=1):.3f} | " in table
    for name in ("small.png", "small_toy.png"):
        assert (tmp_path / "results" / name).read_bytes().startswith(b"\x89PNG")

    kept = [row for row in rows if (row["protocol"], row["seed"]) != ("drift/rotation", 1)]
    file.write_text(json.dumps(kept))
    recipe.main(tmp_path / "study.yaml", tmp_path / "results")
    output = capsys.readouterr().out.splitlines()
    made = [line for line in output if line.startswith(("small static", "small drift", "toy toy"))]
    assert len(made) == len(drifts) and all(" 1 " in line for line in made)
    redone = json.loads(file.read_text())
    assert redone[: len(kept)] == kept
    metrics = {(row["system"], row["protocol"], row["seed"]): row["metrics"] for row in rows}
    assert all(row["metrics"] == metrics[row["system"], row["protocol"], row["seed"]] for row in redone[len(kept) :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "and no other keys"),
        ({"systems": [{"system": "vq"}]}, "`method` must be one of"),
        ({"systems": [{"system": "rq", "lr": 1}]}, "a system has the keys"),
        ({"variants": [{"system": "rq", "options": {"speed": 1}}]}, "speed"),
        ({"training": {"num_steps": 0}}, "`num_steps` must be at least 1"),
    ],
)
def test_a_study_that_cannot_run_is_refused(study, tmp_path, recipe, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        recipe.main(write(study | change, tmp_path), tmp_path / "results")
    assert not (tmp_path / "runs").exists() and not (tmp_path / "results").exists()
