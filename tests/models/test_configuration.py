import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, Qwen2Config

from hf_deco import BackboneConfig, DecoConfig


def test_defaults_are_the_large_backbone_and_a_light_decoder():
    config = DecoConfig()
    backbone, decoder = config.text_config, config.decoder_config
    assert isinstance(backbone, Qwen2Config) and isinstance(decoder, Qwen2Config)
    assert (
        backbone.num_hidden_layers,
        backbone.hidden_size,
        backbone.num_attention_heads,
        backbone.intermediate_size,
    ) == (8, 640, 10, 2560)
    assert (decoder.num_hidden_layers, decoder.hidden_size, decoder.num_attention_heads, decoder.intermediate_size) == (
        2,
        256,
        4,
        1024,
    )
    assert (config.num_codebooks, config.codebook_sizes, config.num_concepts, config.code_embedding_size) == (
        4,
        (2048,) * 4,
        2,
        64,
    )
    assert (config.max_history_length, config.normalize_over, config.dropout, config.num_items) == (
        20,
        "children",
        0.0,
        0,
    )


@pytest.mark.parametrize(("size", "layers", "width", "heads"), [("S", 2, 128, 2), ("M", 4, 384, 6), ("L", 8, 640, 10)])
def test_presets_set_the_backbone_and_its_dropout(size, layers, width, heads):
    config = DecoConfig.from_preset(size, num_concepts=3)
    backbone = config.text_config
    assert (backbone.num_hidden_layers, backbone.hidden_size, backbone.num_attention_heads) == (layers, width, heads)
    assert (backbone.intermediate_size, backbone.num_key_value_heads, backbone.vocab_size) == (4 * width, heads, 1)
    assert (config.dropout, config.num_concepts) == (0.3, 3)
    assert DecoConfig.from_preset(size, dropout=0.1).dropout == 0.1


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="`size` must be one of S, M, L, got 'XL'"):
        DecoConfig.from_preset("XL")


@pytest.mark.parametrize("codebook_size", [16, [16, 8, 4], (16, 8, 4)])
def test_configuration_survives_json(tmp_path, codebook_size):
    config = DecoConfig(
        text_config=LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
        decoder_config={"model_type": "qwen3", "hidden_size": 48},
        num_codebooks=3,
        codebook_size=codebook_size,
        num_concepts=5,
        history_format="flat",
        copy_pointer=True,
        code_embedding_size=7,
        max_history_length=9,
        normalize_over="vocabulary",
        dropout=0,
        decoder_dropout=0.25,
        content_size=17,
        rerank_size=19,
        num_items=11,
        initializer_range=0.5,
    )
    config.save_pretrained(tmp_path)
    other = DecoConfig.from_pretrained(tmp_path)
    assert type(other.text_config) is LlamaConfig and other.text_config.hidden_size == 32
    assert other.decoder_config.model_type == "qwen3" and other.decoder_config.hidden_size == 48
    assert other.codebook_sizes == config.codebook_sizes == ((16,) * 3 if codebook_size == 16 else (16, 8, 4))
    for name in (
        "num_codebooks", "num_concepts", "code_embedding_size", "max_history_length", "normalize_over", "dropout",
        "decoder_dropout", "num_items", "initializer_range", "history_format", "copy_pointer", "content_size",
        "rerank_size",
    ):  # fmt: skip
        assert getattr(other, name) == getattr(config, name), name
    assert json.loads(other.to_json_string()) == json.loads(config.to_json_string())
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "deco"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_codebooks": 0}, "`num_codebooks` must be at least 1, got 0"),
        ({"num_concepts": 0}, "`num_concepts` must be at least 1, got 0"),
        ({"code_embedding_size": -1}, "`code_embedding_size` must be at least 1, got -1"),
        ({"max_history_length": 0}, "`max_history_length` must be at least 1, got 0"),
        ({"codebook_size": [8, 8]}, "`codebook_size` lists 2 levels but `num_codebooks` is 4"),
        ({"codebook_size": (8,) * 5}, "`codebook_size` lists 5 levels but `num_codebooks` is 4"),
        ({"codebook_size": 0}, "`codebook_size` must be positive, got 0"),
        ({"codebook_size": [8, 0, 8, 8]}, "`codebook_size` must be positive"),
        ({"normalize_over": "items"}, "`normalize_over` must be one of children, vocabulary, got 'items'"),
        ({"history_format": "items"}, "`history_format` must be one of fused, flat, got 'items'"),
        ({"history_format": None}, "history_format"),
        ({"copy_pointer": "yes"}, "copy_pointer"),
        ({"copy_pointer": 1}, "copy_pointer"),
        ({"dropout": 1.0}, r"`dropout` must lie in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"`dropout` must lie in \[0, 1\), got -0.1"),
        ({"decoder_dropout": 1}, r"`decoder_dropout` must lie in \[0, 1\), got 1"),
        ({"content_size": -1}, "`content_size` must not be negative, got -1"),
        ({"rerank_size": 0}, "`rerank_size` must be at least 1, got 0"),
        ({"num_items": -1}, "`num_items` must not be negative, got -1"),
        ({"num_codebooks": "4"}, "num_codebooks"),
        ({"codebook_size": 8.5}, "codebook_size"),
        ({"dropout": None}, "dropout"),
        ({"normalize_over": 3}, "normalize_over"),
    ],
)
def test_values_that_make_no_model_are_refused(arguments, message):
    with pytest.raises(StrictDataclassError, match=message):
        DecoConfig(**arguments)
    if not arguments.keys() & {"num_concepts", "decoder_dropout", "content_size", "rerank_size"}:
        with pytest.raises(StrictDataclassError, match=message):
            BackboneConfig(**arguments)


@pytest.mark.parametrize("config_class", [DecoConfig, BackboneConfig])
def test_history_is_fused_and_not_copied_from_by_default(config_class):
    config = config_class()
    assert (config.history_format, config.copy_pointer, config.tokens_per_item) == ("fused", False, 1)
    assert config_class(history_format="flat", num_codebooks=3).tokens_per_item == 3


def test_a_full_backbone_has_the_shared_options_alone(tmp_path):
    config = BackboneConfig.from_preset(
        "S", num_codebooks=3, codebook_size=[16, 8, 4], history_format="flat", copy_pointer=True, num_items=7,
        normalize_over="vocabulary", max_history_length=9, code_embedding_size=5, initializer_range=0.5,
    )  # fmt: skip
    assert (config.text_config.hidden_size, config.dropout, config.model_type) == (128, 0.3, "sid_backbone")
    config.save_pretrained(tmp_path)
    other = BackboneConfig.from_pretrained(tmp_path)
    assert other.to_dict() == config.to_dict() and "decoder_config" not in other.to_dict()
    assert (other.codebook_sizes, other.history_format, other.copy_pointer) == ((16, 8, 4), "flat", True)
    assert BackboneConfig().text_config.hidden_size == 640
    with pytest.raises(ValueError, match="`size` must be one of S, M, L, got 'XL'"):
        BackboneConfig.from_preset("XL")


def test_values_at_their_limits_are_fine():
    config = DecoConfig(
        num_codebooks=1, codebook_size=[1], num_concepts=1, code_embedding_size=1, max_history_length=1, dropout=0
    )
    assert config.codebook_sizes == (1,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_codebook": 3}, r"\['num_codebook'\] of DecoConfig; did you mean `num_codebooks`\?"),
        ({"zebra": 1, "apple": 2}, r"\['apple', 'zebra'\] of DecoConfig\. A checkpoint that holds them"),
        ({"num_beams": 5}, r"\['num_beams'\] of DecoConfig"),  # the parent would drop it in silence
    ],
)
def test_misspelt_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"Unknown configuration arguments {message}"):
        DecoConfig(**arguments)
    with pytest.raises(ValueError, match="Unknown configuration arguments"):
        DecoConfig.from_dict({"model_type": "deco", **arguments})
    with pytest.raises(ValueError, match="Unknown configuration arguments .* of BackboneConfig"):
        BackboneConfig(**arguments)


def test_what_transformers_keeps_in_every_configuration_is_fine(tmp_path):
    kept = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    config = DecoConfig(
        **kept, use_cache=False, name_or_path="me/deco", attn_implementation="eager", torch_dtype="bfloat16"
    )
    assert {name: getattr(config, name) for name in kept} == kept
    assert (config.name_or_path, config._attn_implementation, config.dtype) == ("me/deco", "eager", torch.bfloat16)
    config.quantization_config = {"quant_method": "none"}
    config.save_pretrained(tmp_path)
    assert DecoConfig.from_pretrained(tmp_path).quantization_config == {"quant_method": "none"}


@pytest.mark.parametrize("config_class", [DecoConfig, BackboneConfig])
def test_a_model_type_is_needed_and_must_be_the_classs_own(config_class):
    content = config_class().to_dict()
    assert config_class.from_dict(content).to_dict() == config_class(**content).to_dict()
    with pytest.raises(ValueError, match=f"`model_type` is 'bert', but {config_class.__name__} needs"):
        config_class.from_dict({**content, "model_type": "bert", "vocab_size": 3})
    del content["model_type"]
    with pytest.raises(ValueError, match=f"has no `model_type`; a checkpoint of {config_class.__name__} says"):
        config_class.from_dict(content)
