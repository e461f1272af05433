import json
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "benchmark.py"
SYSTEMS = ["deco", "fused_gr", "flat_gr", "deco/unskipped", "deco/dense_mask", "transformers_generate"]


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
        assert row["total_ms_per_user"] > 0 and row["users_per_s"] > 0 and row["rounds"] == 2
        assert row["skip_forced"] == (row["system"] in SYSTEMS[:3]) and not row["compiled"]
        assert row["num_results"] == (6 if row["system"] == "transformers_generate" else 3)
        if row["system"] != "transformers_generate":
            parts = row["prefill_floor_ms_per_user"] + row["search_floor_ms_per_user"]
            assert abs(row["floor_ms_per_user"] - parts) < 1e-9 and parts > 0
    floors = {row["system"]: row["search_floor_ms_per_user"] for row in rows[:-1]}
    assert floors["deco"] <= floors["deco/unskipped"] == floors["deco/dense_mask"]
    names = ("batch_size", "num_beams", "num_items", "num_codebooks", "budget")
    assert all((tmp_path / f"b_{name}.png").stat().st_size for name in names)


def test_an_unknown_point_is_refused():
    refused = run("--point", "beams=3")
    assert refused.returncode == 1 and "`--point` knows backbone, num_items" in refused.stderr
    assert "got beams" in refused.stderr
