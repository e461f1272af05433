import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoProcessor

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
