"""Metrics and templates out of a built wheel, not out of this tree."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, sys
import hf_deco
from hf_deco import metrics
from hf_deco.model_card import render_model_card

assert "evaluate" not in sys.modules
ndcg = metrics.load("ndcg_at_k", keep_in_memory=True)
recall = metrics.load("recall_at_k", keep_in_memory=True)
row = {"system": "deco_ce", "dataset": "toys", "protocol": "temporal", "seed": 0, "config": {"cutoffs": [10]}}
row["metrics"] = {"ndcg@10": 0.25, "recall@10": 0.5, "num_examples": 3}
found = ndcg.compute(predictions=[[1, 2]], references=[2]) | recall.compute(predictions=[[1, 2]], references=[2])
print(json.dumps([hf_deco.__file__, found, render_model_card([row])]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder that a wheel of this tree is unpacked into."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*build, "--wheel-dir", str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_every_file_of_the_package_is_in_the_wheel(installed):
    def files(root):
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    expected = {name for name in files(ROOT / "src/hf_deco") if "__pycache__" not in name}
    assert files(installed / "hf_deco") == expected
    assert {"templates/model_card.md", "templates/sid_card.md", "metrics/ndcg_at_k/ndcg_at_k.py"} <= expected


def test_metrics_load_and_a_card_is_rendered_from_the_wheel_without_network(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_EVALUATE_OFFLINE": "1"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    file, found, card = json.loads(done.stdout.splitlines()[-1])
    assert Path(file) == installed / "hf_deco/__init__.py"
    assert found == {"ndcg@10": pytest.approx(0.6309297535714575), "recall@10": 1.0}
    assert "# Deco-CE on toys" in card and "| this model | 0.2500 | 0.5000 |" in card
