import os
import subprocess
import sys

import torch
from transformers import AutoConfig, AutoModel, AutoProcessor

import hf_deco
from hf_deco import DecoConfig, DecoForSIDRetrieval, DecoProcessor, SIDGenerationConfig

REOPEN = """
import sys, torch
import hf_deco
from transformers import AutoConfig, AutoModel, AutoProcessor

folder, expected = sys.argv[1], torch.load(sys.argv[1] + "/expected.pt")
config, processor = AutoConfig.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
model = AutoModel.from_pretrained(folder)
assert type(config) is hf_deco.DecoConfig and type(processor) is hf_deco.DecoProcessor, (type(config), type(processor))
assert type(model) is hf_deco.DecoForSIDRetrieval and not model.training
output = model.generate(**processor([["item 3", "item 1"], []]), return_dict_in_generate=True)
assert torch.equal(output.sequences, expected["sequences"])
assert torch.equal(output.item_rows, expected["item_rows"])
torch.testing.assert_close(output.sequences_scores, expected["sequences_scores"])
assert processor.batch_decode(output.sequences) == expected["items"]
print("reopened")
"""


def test_a_fresh_process_reopens_model_and_processor_after_importing_the_package(make_model, tmp_path):
    model = make_model()
    model.generation_config = SIDGenerationConfig(num_beams=[5, 6, 7], num_return_sequences=4)
    processor = DecoProcessor([f"item {row}" for row in range(30)], model.catalog_codes, model.config.codebook_sizes)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    output = model.generate(**processor([["item 3", "item 1"], []]), return_dict_in_generate=True)
    assert output.sequences.shape == (8, 3)
    torch.save({**output, "items": processor.batch_decode(output.sequences)}, tmp_path / "expected.pt")
    source = os.path.dirname(os.path.dirname(hf_deco.__file__))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REOPEN, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "reopened", done.stderr


def test_auto_classes_know_the_package_here_too(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    DecoProcessor(["a"], torch.tensor([[1]]), (2,)).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DecoConfig
    assert type(AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)) is DecoForSIDRetrieval
    assert type(AutoProcessor.from_pretrained(tmp_path)) is DecoProcessor
    assert type(AutoModel.from_config(model.config)) is DecoForSIDRetrieval
    assert type(AutoConfig.for_model("deco", num_codebooks=2)) is DecoConfig
