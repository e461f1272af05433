"""`recipes/grounding_beauty.py` on a small log: its rows, its table, its plot, and that it goes on."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes/grounding_beauty.py"


@pytest.fixture
def recipe(monkeypatch):
    """The study, small enough for forty items."""
    spec = importlib.util.spec_from_file_location("grounding_beauty", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VOCABULARY", 300)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(module, "SHAPE", shape)
    small = {"codebook_sizes": [8, 8, 8], "decoder_width": 64, "num_beams": 20, "cutoffs": [10, 20], "bf16": False}
    monkeypatch.setattr(module, "SHARED", module.SHARED | small)
    monkeypatch.setattr(module, "GROUNDING", module.GROUNDING | {"grounding_epochs": 1, "grounding_holdout": 0.25})
    monkeypatch.setattr(module, "RECOMMENDATION", module.RECOMMENDATION | {"num_train_epochs": 1})
    return module


def test_a_study_writes_rows_table_and_plot_and_is_not_run_twice(
    recipe, log_folder, item_texts, tmp_path, monkeypatch, capsys
):
    data = tmp_path / "ring"
    data.mkdir()
    for name in ("interactions.parquet", "item_embeddings.npy"):
        shutil.copy(log_folder / name, data / name)
    table = {"item_id": [f"i{item}" for item in range(40)], "title": item_texts, "text": item_texts}
    pd.DataFrame(table).to_parquet(data / "items.parquet")
    command = [
        "study",
        "--data",
        str(data),
        "--output",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path),
        "--seeds",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", command)
    recipe.main()
    rows = json.loads((tmp_path / "grounding_beauty.json").read_text())
    systems = ["grounding", "deco_ce/grounded", "deco_ce/ungrounded"]
    systems += ["deco_ce/grounded_lora", "deco_ce/ungrounded_lora"]
    assert [row["system"] for row in rows if row["seed"] == 3] == systems
    assert {row["system"] for row in rows if row["seed"] is None} == {"popularity", "text_neighbors", "cooccurrence"}
    assert [entry["epoch"] for entry in rows[0]["epochs"]] == [0, 1]
    assert set(rows[0]["metrics"]) == {
        f"{part}_{name}" for part in ("seen", "heldout") for name in ("sid_loss", "text_loss", "recall@10")
    }
    assert rows[0]["dataset"] == "ring" and rows[0]["config"]["grounding_holdout"] == 0.25
    starts = {row["system"]: row["config"]["start_from"] for row in rows if row["seed"] == 3}
    assert starts["deco_ce/grounded"].endswith("grounding-seed3/grounded") and starts["deco_ce/ungrounded"] is None
    written = (tmp_path / "grounding_beauty.md").read_text()
    assert "| texts held out | 3 | " in written and "| deco_ce/grounded | 3 | " in written
    assert (tmp_path / "grounding_beauty.png").read_bytes().startswith(b"\x89PNG")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    recipe.main()
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    assert sorted(map(str, json.loads((tmp_path / "grounding_beauty.json").read_text()))) == sorted(map(str, rows))
