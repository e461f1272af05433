"""The README's commands and code, run in order on a small log."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd

from hf_deco.cli import main

README = Path(__file__).resolve().parents[1] / "README.md"


def test_commands_and_code_run_as_they_stand(log_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pd.read_parquet(log_folder / "interactions.parquet").to_csv("log.csv", index=False)
    pd.read_csv(log_folder / "items.csv").to_csv("items.csv", index=False)
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names, commands = {}, 0
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "README.md", "exec"), names)
            continue
        for line in text.splitlines():
            if line.startswith("hf-deco "):
                commands += 1
                assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert commands == 2
    assert len(names["items"]) == 10 and set(names["items"]) <= {f"i{item}" for item in range(40)}
    mass = names["output"].sequences_scores.view(2, -1).exp().nansum(1)
    assert (mass - 1).abs().max() < 1e-4


def test_code_of_the_page_on_tokenizers_runs():
    page = README.parent / "docs" / "tokenizers.md"
    rng = np.random.default_rng(0)
    names = {"item_ids": [f"i{item}" for item in range(300)], "new_ids": ["new", "newer"]}
    names |= {"embeddings": rng.standard_normal((300, 8)), "new_embeddings": rng.standard_normal((2, 8))}
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for text in blocks:
        exec(compile(text, page.name, "exec"), names)
    assert len(blocks) == 1 and names["update"].version == 2 and sorted(names["update"].added) == ["new", "newer"]
