"""The committed model cards are what the results say."""

import importlib.util
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, metadata_load

from hf_deco import DecoConfig, DecoForSIDRetrieval
from hf_deco.models.configuration_deco import qwen2_shape

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "recipes/results"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("render_cards", ROOT / "recipes/render_cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rendered(recipe):
    return recipe.render_cards(RESULTS)


def test_committed_cards_are_those_that_the_command_renders(rendered):
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "model_cards").glob("*.md")}
    assert sorted(committed) == sorted(rendered), "run: python recipes/render_cards.py"
    for name, text in rendered.items():
        assert committed[name] == text, f"{name} is stale; run: python recipes/render_cards.py"


def test_the_hub_can_read_them_and_their_figures_are_the_results(rendered, tmp_path):
    rows = [row for path in RESULTS.glob("*.json") for row in json.loads(path.read_text()) if "num_parameters" in row]
    known = {round(value, 12) for row in rows for value in row["metrics"].values()}
    assert {"beauty_deco_ce.md", "demo_grocery.md"} <= set(rendered)
    for name, text in rendered.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert metadata_load(tmp_path / name)["library_name"] == "transformers"
        results = ModelCard(text).data.eval_results
        cutoffs = {result.metric_args["k"] for result in results}
        assert (
            10 in cutoffs
            and len(results) == 2 * len(cutoffs)
            and {round(result.metric_value, 12) for result in results} <= known
        )
        assert "| part | parameters |" in text and "/work/" not in text and "/home/" not in text


def test_it_runs_as_a_program(rendered, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "cards").mkdir()
    shutil.copy(RESULTS / "demo_grocery.json", tmp_path / "results")
    options = ["--results", str(tmp_path / "results"), "--cards", str(tmp_path / "cards")]
    monkeypatch.setattr(sys, "argv", ["render_cards.py", *options])
    runpy.run_path(str(ROOT / "recipes/render_cards.py"), run_name="__main__")
    assert [path.name for path in (tmp_path / "cards").iterdir()] == ["demo_grocery.md"]
    assert (tmp_path / "cards/demo_grocery.md").read_text(encoding="utf-8") == rendered["demo_grocery.md"]


def study(seeds=(0, 1), **options):
    """Rows of a study with one system, a floor that was judged alike and one that was not."""
    config = {"cutoffs": [10], "max_history_length": 20, "learning_rate": 0.1} | options
    common = {"dataset": "toys", "protocol": "temporal"}
    rows = []
    for seed in seeds:
        metrics = {"ndcg@10": 0.1 + seed / 100, "recall@10": 0.2, "num_examples": 5}
        row = {"system": "deco_ce", **common, "seed": seed, "metrics": metrics, "config": config | {"seed": seed}}
        rows.append(row | {"num_parameters": 7, "validation_ndcg@10": 0.1})
    floor = {"system": "popularity", **common, "seed": None, "metrics": {"ndcg@10": 0.05, "recall@10": 0.05}}
    return rows, [floor | {"config": {"max_history_length": length}} for length in (20, 5)]


def test_seeds_of_the_newest_options_share_a_card(recipe, tmp_path):
    old, _ = study(seeds=(0, 1, 2), learning_rate=0.5)
    new, floors = study(seeds=(1, 0))
    other = [row | {"system": "fused_gr/x"} for row in new]
    (tmp_path / "toys.json").write_text(json.dumps(old + new + floors))
    (tmp_path / "two.json").write_text(json.dumps(other + new + floors))
    (tmp_path / "speed.json").write_text(json.dumps([{"system": "deco_ce", "users_per_s": 3}]))
    (tmp_path / "report.json").write_text(json.dumps({"seconds": 3}))
    cards = recipe.render_cards(tmp_path)
    assert sorted(cards) == ["toys.md", "two-deco_ce.md", "two-fused_gr-x.md"]
    lines = [line for line in cards["toys.md"].splitlines() if line.startswith(("| seed", "| popularity"))]
    assert lines == ["| seed 0 | 0.1000 | 0.2000 |", "| seed 1 | 0.1100 | 0.2000 |", "| popularity | 0.0500 | 0.0500 |"]
    assert "| `learning_rate` | 0.1 |" in cards["toys.md"]


def test_parts_of_an_older_model_are_told_only_where_its_size_is_met(recipe):
    (row, *_), _ = study(backbone="S", codebook_sizes=[4, 4], decoder_width=64)
    assert recipe.describe_model(row) is row  # it has not seven parameters
    config = DecoConfig.from_preset("S", num_codebooks=2, codebook_size=[4, 4], decoder_config=qwen2_shape(64, 2, 1))
    model = DecoForSIDRetrieval(config)
    described = recipe.describe_model(row | {"num_parameters": model.num_parameters()})
    counts = {name: sum(part.numel() for part in child.parameters()) for name, child in model.named_children()}
    assert described["parameters"] == counts | {"start_state": 128}
    assert described["sids"] == {"codebook_sizes": [4, 4]}
