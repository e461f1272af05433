"""Pretrained backbones: whose weights they have, what is left out, which models are taken."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5Model,
)

from hf_deco import BackboneForSIDRetrieval, DecoForSIDRetrieval

SIZES = {"num_codebooks": 2, "codebook_size": 8, "code_embedding_size": 6}
TINY = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
CATALOG = torch.tensor([[0, 1], [0, 2], [7, 3]])


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", [DecoForSIDRetrieval, BackboneForSIDRetrieval])
def test_the_backbone_has_exactly_the_language_models_weights(make_language_model, tmp_path, kind, tie):
    language_model = make_language_model(tmp_path, ["a text"], tie=tie)
    model = kind.from_backbone(str(tmp_path), **SIZES)
    expected = {name: value for name, value in language_model.model.state_dict().items() if "embed" not in name}
    found = model.backbone.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not [name for name in model.state_dict() if "embed_tokens" in name or "lm_head" in name]
    assert not model.training


def test_it_reads_as_the_language_model_does(make_language_model, tmp_path):
    language_model = make_language_model(tmp_path, ["a text"])
    model = DecoForSIDRetrieval.from_backbone(str(tmp_path), **SIZES)
    tokens = torch.randn(2, 5, 32)
    with torch.no_grad():
        ours = model.backbone(inputs_embeds=tokens).last_hidden_state
        theirs = language_model.model(inputs_embeds=tokens).last_hidden_state
    assert torch.equal(ours, theirs)


def test_a_bfloat16_model_stays_one_or_becomes_float32_exactly(make_language_model, tmp_path):
    language_model = make_language_model(tmp_path, ["a text"], dtype=torch.bfloat16)
    for asked, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        model = DecoForSIDRetrieval.from_backbone(str(tmp_path), dtype=asked, **SIZES)
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        for name, value in model.backbone.state_dict().items():
            assert torch.equal(value, language_model.model.state_dict()[name].to(expected))
        model.set_catalog(CATALOG)
        model.save_pretrained(tmp_path / "deco")
        again = AutoModel.from_pretrained(tmp_path / "deco")
        assert again.dtype == expected
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_later_choice_of_attention_reaches_the_backbone(make_language_model, tmp_path):
    make_language_model(tmp_path, ["a text"])
    model = DecoForSIDRetrieval.from_backbone(str(tmp_path), **SIZES)
    model.set_attn_implementation("eager")
    assert model.backbone.layers[0].self_attn.config._attn_implementation == "eager"


def test_dropout_is_put_on_the_pretrained_layers(make_language_model, tmp_path):
    make_language_model(tmp_path, ["a text"])
    model = DecoForSIDRetrieval.from_backbone(str(tmp_path), dropout=0.5, **SIZES)
    tokens = torch.randn(1, 4, 32)
    assert torch.equal(model.backbone(inputs_embeds=tokens)[0], model.backbone(inputs_embeds=tokens)[0])
    model.train()
    assert not torch.equal(model.backbone(inputs_embeds=tokens)[0], model.backbone(inputs_embeds=tokens)[0])


@pytest.mark.parametrize(
    "language_model",
    [
        lambda: GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **TINY)),
        lambda: LlamaForCausalLM(LlamaConfig(intermediate_size=32, **TINY)),
    ],
    ids=["gpt2", "llama"],
)
def test_any_decoder_only_model_can_be_the_backbone(language_model, tmp_path):
    language_model().save_pretrained(tmp_path)
    model = DecoForSIDRetrieval.from_backbone(str(tmp_path), **SIZES)
    model.set_catalog(CATALOG)
    table = AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    assert not [name for name, value in model.backbone.named_parameters() if value.shape == table.shape]
    assert model.generate(CATALOG[None], num_beams=3, num_return_sequences=3).unique(dim=0).shape == (3, 2)
    model.save_pretrained(tmp_path / "deco")
    again = AutoModel.from_pretrained(tmp_path / "deco")
    assert torch.equal(again.encode_concepts(CATALOG[None]), model.encode_concepts(CATALOG[None]))


def test_what_is_no_decoder_only_language_model_is_refused(tmp_path, make_model):
    BertModel(BertConfig(intermediate_size=32, **TINY)).save_pretrained(tmp_path / "bert")
    T5Model(T5Config(vocab_size=40, d_model=16, num_heads=2, num_layers=1, d_ff=32)).save_pretrained(tmp_path / "t5")
    make_model().save_pretrained(tmp_path / "deco")
    for name in ("bert", "t5", "deco"):
        with pytest.raises(ValueError, match=f"`backbone` .*{name}' is a '{name}', not a decoder-only language model"):
            DecoForSIDRetrieval.from_backbone(str(tmp_path / name), **SIZES)
    with pytest.raises(OSError, match="`backbone` '.*nowhere' is neither a folder with a model nor one on the Hub"):
        DecoForSIDRetrieval.from_backbone(str(tmp_path / "nowhere"), **SIZES)


def test_a_language_model_without_some_of_its_weights_is_refused(make_language_model, tmp_path):
    make_language_model(tmp_path, ["a text"])
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"`backbone` .* lacks 1 tensors of its model, such as \['norm.weight'\]"):
        DecoForSIDRetrieval.from_backbone(str(tmp_path), **SIZES)
