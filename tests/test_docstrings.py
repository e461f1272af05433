"""The examples of docstrings, run."""

import doctest
import importlib
from pathlib import Path

import pytest

import hf_deco

ROOT = Path(hf_deco.__file__).parent
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_examples_give_what_they_say(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ".".join(("hf_deco", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    assert doctest.testmod(importlib.import_module(name)).failed == 0
