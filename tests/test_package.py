"""What importing the package does, and does not."""

import subprocess
import sys

BASE = "import torch, transformers.models.qwen2.modeling_qwen2"
OPTIONAL = (
    "accelerate",
    "datasets",
    "evaluate",
    "faiss",
    "matplotlib",
    "pandas",
    "peft",
    "pyarrow",
    "scipy",
    "sklearn",
)


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_no_optional_part():
    new = python(f"import sys; {BASE}; before = set(sys.modules); import hf_deco; print(*(set(sys.modules) - before))")
    roots = {name.split(".")[0] for name in new.split()}
    assert "hf_deco" in roots
    assert not roots & {*OPTIONAL, "sentence_transformers", "yaml", "tensorboard"}


def test_import_changes_neither_warnings_nor_environment_nor_output():
    state = "(list(warnings.filters), dict(os.environ), torch.get_default_dtype(), torch.random.initial_seed())"
    code = f"import os, warnings; {BASE}; before = {state}; import hf_deco; print(before == {state})"
    assert python(code) == "True"


def test_version_is_a_literal_that_packaging_can_read():
    import hf_deco

    assert hf_deco.__version__.count(".") >= 2
