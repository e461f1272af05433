"""The README's commands and code, run in order on a small log."""

import re
import shlex
from pathlib import Path

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
