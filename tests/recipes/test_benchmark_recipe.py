import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "benchmark.py"
SYSTEMS = ["deco", "deco/stored", "fused_gr", "flat_gr", "deco/unskipped", "deco/dense_mask", "transformers_generate"]


def run(*arguments):
    command = [sys.executable, str(RECIPE), "--no-compile", "--dtype", "float32", "--rounds", "2", "--warm-up", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def test_one_point_gives_a_row_for_every_system_and_plots(tmp_path):
    point = "backbone=S num_items=60 batch_size=2 num_beams=6 num_results=3 history_length=3 num_codebooks=3".split()
    run_ = run(
        "--codebook-size", "16", "--json", str(tmp_path / "b.json"), "--point", *point, "systems=" + ",".join(SYSTEMS)
    )  # fmt: skip
    assert run_.returncode == 0, run_.stderr
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [row["system"] for row in rows] == SYSTEMS
    for row in rows:
        assert row["catalog"] == "random SIDs" and row["nodes"][-1] == row["num_items"] == 60
        assert (row["batch_size"], row["num_beams"], row["history_length"], row["num_codebooks"]) == (2, 6, 3, 3)
        assert row["clock"] == "wall"
        assert row["total_ms_per_user"] > 0 and row["users_per_s"] > 0 and row["rounds"] == 2
        assert row["skip_forced"] == (row["system"] in SYSTEMS[:4]) and not row["compiled"]
        assert row["num_results"] == (6 if row["system"] == "transformers_generate" else 3)
        if row["system"] != "transformers_generate":
            parts = row["prefill_floor_ms_per_user"] + row["search_floor_ms_per_user"]
            assert abs(row["floor_ms_per_user"] - parts) < 1e-9 and parts > 0
            assert (row["prefill_ms_per_user"] == 0) == (row["system"] == "deco/stored")
            assert (row["prefill_floor_ms_per_user"] == 0) == (row["system"] == "deco/stored")
    floors = {row["system"]: row["search_floor_ms_per_user"] for row in rows[:-1]}
    assert floors["deco"] == floors["deco/stored"] <= floors["deco/unskipped"] == floors["deco/dense_mask"]
    assert not list(tmp_path.glob("*.png"))  # one point is no line


def test_what_rows_differ_in_is_drawn(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parent))
    import benchmark

    drawn = {}
    monkeypatch.setattr(benchmark, "plot_lines", lambda lines, x, y, path: drawn.update({path.name: lines}))
    base = {key: value for key, value in vars(benchmark.Point()).items() if key != "systems"}
    costs = [("deco", {}, 4.0), ("deco", {"batch_size": 8}, 5.0), ("deco/stored", {"batch_size": 8}, 2.0)]
    costs += [("deco/unskipped", {"batch_size": 8}, 9.0), ("deco", {"num_items": 100, "batch_size": 1}, 3.0)]
    rows = [
        base | changed | {"system": system, "total_ms_per_user": cost, "p95_ms": cost * 10, "users_per_s": 1000 / cost}
        for system, changed, cost in costs
    ]
    benchmark.plots(rows, tmp_path / "b.json")
    assert drawn == {
        "b_batch_size.png": {"deco": [(32, 4.0), (8, 5.0)], "deco/stored": [(8, 2.0)]},
        "b_budget.png": {"deco": [(40.0, 250.0), (50.0, 250.0)], "deco/stored": [(20.0, 500.0)]},
        "b_num_items.png": {"deco": [(12_101, 4.0)]},
    }


def result_row(system, seed, ndcg, backbone):
    return {"system": system, "seed": seed, "metrics": {"ndcg@10": ndcg}, "config": {"backbone": backbone}}


def test_accuracies_are_drawn_at_the_backbone_of_their_study(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parent))
    import benchmark

    drawn = []
    monkeypatch.setattr("compare.plot_tradeoff", lambda points, path: drawn.append((points, path)))
    accuracies = [
        result_row("deco", 0, 0.25, "S"),
        result_row("deco", 1, 0.75, "S"),
        result_row("flat_gr", 0, 0.5, "S"),
    ]
    accuracies.append({"system": "popularity", "seed": None, "metrics": {"ndcg@10": 0.1}, "config": {}})
    speeds = [("deco", "S", 8.0), ("deco/stored", "S", 9.0), ("deco", "L", 3.0), ("fused_gr", "S", 4.0)]
    speeds.append(("deco", "S", 99.0))  # of another point
    rows = [{"system": system, "backbone": name, "users_per_s": speed} for system, name, speed in speeds]
    assert benchmark.study_backbone(accuracies, tmp_path / "a.json") == "S"
    benchmark.plane(rows, accuracies, "S", tmp_path / "b.json")
    assert drawn == [({"deco": (8.0, 0.5)}, tmp_path / "b_tradeoff.png")]
    with pytest.raises(SystemExit, match=r"`--accuracies` must hold runs of one backbone, got \['L', 'S'\]"):
        benchmark.study_backbone([*accuracies, result_row("fused_gr", 0, 0.5, "L")], tmp_path / "a.json")


def test_accuracies_add_a_point_of_their_backbone_and_a_plane(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps([result_row("deco", 0, 0.25, "S"), result_row("fused_gr", 0, 0.5, "S")])
    )
    point = "backbone=S num_items=60 batch_size=2 num_beams=6 history_length=3 systems=deco,fused_gr".split()
    given = ["--accuracies", str(tmp_path / "a.json"), "--codebook-size", "16", "--point", *point]
    refused = run(*given)
    assert refused.returncode == 1 and "`--accuracies` is drawn beside the file that `--json` names" in refused.stderr
    done = run("--json", str(tmp_path / "b.json"), *given)
    assert done.returncode == 0, done.stderr
    assert [row["system"] for row in json.loads((tmp_path / "b.json").read_text())] == ["deco", "fused_gr"]
    assert (tmp_path / "b_tradeoff.png").read_bytes().startswith(b"\x89PNG")


def test_catalogs_take_turns_in_one_measurement(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parent))
    import benchmark

    args = SimpleNamespace(
        seed=0, codebook_size=16, compile=False, dtype=torch.float32, rounds=3, warm_up=1, slow_rounds=1, cpu_time=True
    )
    small = benchmark.Point(backbone="S", batch_size=2, num_beams=6, num_results=6, history_length=3, num_codebooks=3)
    points = [replace(small, num_items=size, systems=("deco",)) for size in (40, 70)]
    assert [point.num_items for point in benchmark.catalogs()] == [12_101, 207_649, 10_000_000]
    tables = {(size, 3): benchmark.synthetic_codes(size, 3, 16, 0) for size in (40, 70)}
    turns, real = [], benchmark.Rivals.run
    monkeypatch.setattr(
        benchmark.Rivals, "run", lambda rivals, name: turns.append(rivals.point.num_items) or real(rivals, name)
    )
    machine = SimpleNamespace(floor_s=lambda *args: 1.0)
    rows = benchmark.measure(points, tables, machine, args)
    assert [(row["num_items"], row["rounds"], row["nodes"][-1]) for row in rows] == [(40, 3, 40), (70, 3, 70)]
    assert all(row["clock"] == "process" for row in rows)
    assert benchmark.clock_of(args) is time.process_time
    assert [sorted(turns[turn : turn + 2]) for turn in range(0, 8, 2)] == [[40, 70]] * 4


@pytest.mark.parametrize("given", [("--catalogs", "--quick"), ("--quick", "--catalogs"), ("--catalogs", "--point")])
def test_points_are_chosen_in_one_way(given):
    words = [*given, "beams=3"] if given[-1] == "--point" else given
    refused = run(*words, "--accuracies", "a.json")  # without `--json`: refused too, but later
    assert refused.returncode == 2
    assert f"argument {given[1]}: not allowed with argument {given[0]}" in refused.stderr


def test_an_unknown_point_is_refused():
    refused = run("--point", "beams=3")
    assert refused.returncode == 1 and "`--point` knows backbone, num_items" in refused.stderr
    assert "got beams" in refused.stderr
