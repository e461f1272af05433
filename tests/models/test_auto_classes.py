import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from remote_code import MODELS, import_closure
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.dynamic_module_utils import get_relative_import_files

import hf_deco
from hf_deco import (
    BackboneConfig,
    BackboneForSIDRetrieval,
    DecoConfig,
    DecoForSIDRetrieval,
    DecoProcessor,
    SIDGenerationConfig,
)

REOPEN = """
import sys, torch
import hf_deco
from transformers import AutoConfig, AutoModel, AutoProcessor

for folder in sys.argv[1:]:
    expected = torch.load(folder + "/expected.pt")
    config, processor = AutoConfig.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder)
    assert type(config) is getattr(hf_deco, expected["config"]), type(config)
    assert type(processor) is hf_deco.DecoProcessor, type(processor)
    assert type(model) is getattr(hf_deco, expected["model"]) and not model.training
    output = model.generate(**processor([["item 3", "item 1"], []]), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected["sequences"])
    assert torch.equal(output.item_rows, expected["item_rows"])
    torch.testing.assert_close(output.sequences_scores, expected["sequences_scores"])
    assert processor.batch_decode(output.sequences) == expected["items"]
    print("reopened")
"""


def test_a_fresh_process_reopens_models_and_processors_after_importing_the_package(make_model, tmp_path):
    for kind in ("deco", "backbone"):
        model = make_model(kind=kind)
        model.generation_config = SIDGenerationConfig(num_beams=[5, 6, 7], num_return_sequences=4)
        names = [f"item {row}" for row in range(30)]
        processor = DecoProcessor(names, model.catalog_codes, model.config.codebook_sizes)
        model.save_pretrained(tmp_path / kind)
        processor.save_pretrained(tmp_path / kind)
        output = model.generate(**processor([["item 3", "item 1"], []]), return_dict_in_generate=True)
        assert output.sequences.shape == (8, 3)
        classes = {"config": type(model.config).__name__, "model": type(model).__name__}
        items = processor.batch_decode(output.sequences)
        torch.save({**output, **classes, "items": items}, tmp_path / kind / "expected.pt")
    source = os.path.dirname(os.path.dirname(hf_deco.__file__))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REOPEN, str(tmp_path / "deco"), str(tmp_path / "backbone")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["reopened"] * 2, done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "config_class", "model_class"),
    [
        ("deco", "deco", DecoConfig, DecoForSIDRetrieval),
        ("backbone", "sid_backbone", BackboneConfig, BackboneForSIDRetrieval),
    ],
)
def test_auto_classes_know_the_package_here_too(make_model, tmp_path, kind, name, config_class, model_class):
    model = make_model(kind=kind)
    model.save_pretrained(tmp_path)
    DecoProcessor(["a"], torch.tensor([[1]]), (2,)).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class
    assert type(AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)) is model_class
    assert type(AutoProcessor.from_pretrained(tmp_path)) is DecoProcessor
    assert type(AutoModel.from_config(model.config)) is model_class
    assert type(AutoConfig.for_model(name, num_codebooks=2)) is config_class


AUTO_CLASSES = [DecoConfig, BackboneConfig, DecoForSIDRetrieval, BackboneForSIDRetrieval, DecoProcessor]


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_what_an_auto_class_reads_lies_beside_it_and_needs_no_other_package(auto_class):
    module = auto_class.__module__.rsplit(".", 1)[1]
    closure = import_closure(module)
    assert all((MODELS / name).is_file() for name in closure)
    # What transformers copies: a pattern on lines, which reads docstrings too.
    copied = {Path(file).name for file in get_relative_import_files(MODELS / f"{module}.py")}
    assert copied | {f"{module}.py"} == closure


@pytest.mark.parametrize("kind", ["deco", "backbone"])
def test_a_saved_checkpoint_carries_exactly_that_code(make_model, tmp_path, kind):
    model = make_model(kind=kind)
    model.save_pretrained(tmp_path)
    names = ["configuration_deco", type(model).__module__.rsplit(".", 1)[1]]
    assert {path.name for path in tmp_path.glob("*.py")} == set.union(*map(import_closure, names))
    assert model.config.auto_map == {
        "AutoConfig": f"configuration_deco.{type(model.config).__name__}",
        "AutoModel": f"{names[1]}.{type(model).__name__}",
    }
    for path in tmp_path.glob("*.py"):
        assert path.read_bytes() == (MODELS / path.name).read_bytes()


def test_a_processor_alone_carries_its_code(tmp_path):
    DecoProcessor(["a"], torch.tensor([[1]]), (2,)).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == import_closure("processing_deco")


def test_an_older_transformers_is_named_before_anything_else(tmp_path, monkeypatch):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text("__version__ = '4.57.1'\n")  # and nothing to import from it
    path = os.pathsep.join([str(tmp_path), str(MODELS.parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", "import hf_deco"], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 1
    message = "ImportError: hf_deco needs transformers>=5.24, but 4.57.1 is installed: run `pip install -U "
    assert done.stderr.splitlines()[-1].startswith(message)
    monkeypatch.setattr(transformers, "__version__", "5.23.4")  # a checkpoint's own code says the same
    with pytest.raises(ImportError, match=r"needs transformers>=5\.24, but 5\.23\.4 is installed"):
        runpy.run_path(str(MODELS / "configuration_sid.py"))


@pytest.mark.parametrize("version", ["5.24.0", "5.25.0.dev0", "6.0.0rc1"])
def test_a_later_transformers_is_let_through(monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    assert "CheckedConfig" in runpy.run_path(str(MODELS / "configuration_sid.py"))
