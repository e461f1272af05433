"""What users of transformers do with any model: other types, devices, compilation, inference mode, saved options."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModel, GenerationConfig

from hf_deco import SIDGenerationConfig
from hf_deco.models.inference_sid import EAGER, Kernels

KINDS = [("deco", "fused"), ("deco", "flat"), ("backbone", "fused"), ("backbone", "flat")]
LENGTHS = [3, 0, 5, 1]
TINY = {
    "model_type": "qwen2",
    "vocab_size": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def search(model, *args, **kwargs):
    return model.generate(*args, num_beams=30, num_return_sequences=30, return_dict_in_generate=True, **kwargs)


def probabilities(output):
    """Probability of every catalog row, by user."""
    scores = output.sequences_scores.view(len(LENGTHS), -1).cpu()
    return torch.zeros_like(scores).scatter(1, output.item_rows.view(scores.shape).cpu(), scores.exp())


def assert_close(output, expected, atol):
    for found in (output, expected):
        assert found.item_rows.view(len(LENGTHS), -1).sort(1).values.tolist() == [list(range(30))] * len(LENGTHS)
    torch.testing.assert_close(probabilities(output), probabilities(expected), rtol=0, atol=atol)


@pytest.fixture
def build(make_model):
    return lambda kind: make_model(kind=kind[0], history_format=kind[1], copy_pointer=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float64, 1e-5)])
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_find_the_same_items_with_scores_in_float32(build, make_histories, kind, dtype, atol, device):
    model = build(kind)
    inputs = make_histories(model, LENGTHS)
    expected = search(model, *inputs)
    other = model.half() if dtype == torch.float16 else model.to(dtype)
    other = other.to(device)
    assert other is model and other.dtype == dtype and other.catalog_codes.dtype == torch.int32
    output = search(other, *inputs)  # inputs stay on the CPU
    assert output.sequences_scores.dtype == output.gates.dtype == torch.float32
    assert {value.device.type for value in output.values()} == {device}
    assert_close(output, expected, atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_exist_in_half_precision(build, make_sequences, kind, dtype):
    model = build(kind)
    expected = model(*make_sequences(model, [4, 2])).loss
    loss = model.to(dtype)(*make_sequences(model, [4, 2])).loss
    loss.backward()
    torch.testing.assert_close(loss.float(), expected, rtol=0.05, atol=0)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "float16", "device_map": "cpu"}, torch.float16),
        ({"device_map": "auto"}, torch.float32),
        ({"device_map": {"": "cpu"}}, torch.float32),
        ({"attn_implementation": "eager"}, torch.float32),
        ({"attn_implementation": "sdpa", "dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[2]])
def test_options_of_loading(build, make_histories, tmp_path, kind, options, dtype):
    model = build(kind)
    inputs = make_histories(model, LENGTHS)
    expected = search(model, *inputs)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, **options)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    output = search(loaded, *inputs)
    assert output.sequences.device == loaded.device
    assert_close(output, expected, 1e-5 if dtype == torch.float32 else 0.1)


def test_a_compiled_model_trains_and_searches_as_the_model_does(make_model, make_histories, make_sequences):
    model = make_model((4, 3), 9, text_config=TINY, decoder_config=TINY)
    inputs, batch = make_histories(model, [2, 1]), make_sequences(model, [2, 2])
    expected, loss = model.generate(*inputs, num_beams=9), model(*batch).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")  # what is traced is the same for every backend
    assert compiled.generate(*inputs, num_beams=9).tolist() == expected.tolist()
    compiled_loss = compiled(*batch).loss
    torch.testing.assert_close(compiled_loss, loss)
    compiled_loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", KINDS)
def test_a_search_in_inference_mode_leaves_a_model_that_trains(build, make_histories, make_sequences, kind, context):
    model = build(kind)
    inputs = make_histories(model, LENGTHS)
    expected = search(model, *inputs, exclude_seen=True)
    model.set_catalog(model.catalog_codes)  # forgets what was derived
    with context():
        output = search(model, *inputs, exclude_seen=True)
        model.set_catalog(model.catalog_codes)
    assert output.item_rows.tolist() == expected.item_rows.tolist()
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
    model.train()
    model(*make_sequences(model, [4, 2])).loss.backward()
    assert model.heads[0].weight.grad.abs().sum() > 0
    assert_close(search(model.eval(), *inputs), search(model, *inputs), 1e-6)


def test_autocast_searches_too(build, make_histories):
    model = build(KINDS[0])
    inputs = make_histories(model, LENGTHS)
    expected = search(model, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output = search(model, *inputs)
    assert output.sequences_scores.dtype == torch.float32
    assert_close(output, expected, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_and_masks_of_any_type_are_read(build, make_histories, kind):
    model = build(kind)
    codes, mask = make_histories(model, LENGTHS)
    expected = search(model, codes, mask)
    for other_codes, other_mask in (
        (codes.int(), mask.bool()),
        (codes.int(), mask.float()),
        (codes, mask.to(torch.int8)),
    ):
        assert_close(search(model, other_codes, other_mask), expected, 1e-6)


def test_copies_of_a_model_search_alone(build, make_histories):
    model = build(KINDS[0])
    inputs = make_histories(model, LENGTHS)
    expected = search(model, *inputs)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_close(search(twin, *inputs), expected, 1e-6)


@pytest.mark.parametrize("kernels", [EAGER, Kernels.compiled()], ids=["eager", "compiled"])
def test_models_are_pickled_and_copied_with_their_kernels(build, make_histories, kernels):
    model = build(KINDS[0])
    model.kernels = kernels
    twins = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    inputs = make_histories(model, LENGTHS)
    for twin in twins:
        assert (twin.kernels is EAGER) == (kernels is EAGER)
        twin.kernels = model.kernels = EAGER  # spares the seconds of a compiler
        assert_close(search(twin, *inputs), search(model, *inputs), 1e-6)


def test_saved_options_are_honoured_and_a_call_goes_over_them(make_model, make_histories, tmp_path):
    model = make_model()
    inputs = make_histories(model, [3, 2])
    model.generation_config = SIDGenerationConfig(num_beams=[4, 5, 6], num_return_sequences=3, exclude_seen=True)
    model.save_pretrained(tmp_path)
    model.generation_config = SIDGenerationConfig()
    loaded = AutoModel.from_pretrained(tmp_path)
    options = {"num_beams": [4, 5, 6], "num_return_sequences": 3, "exclude_seen": True}
    assert loaded.generate(*inputs).tolist() == model.generate(*inputs, **options).tolist()
    options |= {"num_beams": 9, "exclude_seen": False}
    called = loaded.generate(*inputs, num_beams=9, exclude_seen=False)
    assert called.shape == (6, 3) and called.tolist() == model.generate(*inputs, **options).tolist()
    given = SIDGenerationConfig(num_beams=7, num_return_sequences=5)
    assert loaded.generate(*inputs, generation_config=given).shape == (10, 3)
    assert loaded.generate(*inputs, generation_config=given, num_return_sequences=2).shape == (4, 3)
    assert loaded.generation_config.to_dict() == SIDGenerationConfig.from_pretrained(tmp_path).to_dict()
    loaded.generation_config = GenerationConfig(num_beams=4)  # transformers' own, most of it unset
    assert loaded.generate(*inputs).shape == (8, 3)
    replaced = AutoModel.from_pretrained(tmp_path, generation_config=given)
    assert replaced.generate(*inputs).shape == (10, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_state_from_another_device_is_searched_on_the_models(build, make_histories, device):
    model = build(KINDS[0])
    inputs = make_histories(model, LENGTHS)
    expected = search(model, *inputs, deny_rows=[3, 4], exclude_seen=True)
    state = model.encode(*inputs)
    stored = {"concepts": state.concepts.detach(), "copies": state.copies}
    plain = search(model, *inputs)
    model.to(device)
    for output in (search(model, *inputs), search(model, **stored)):
        assert output.item_rows.device.type == device
        assert_close(output, plain, 1e-4)
    filtered = search(model, *inputs, deny_rows=torch.tensor([3, 4]), exclude_seen=True)
    assert filtered.item_rows.device.type == device
    assert filtered.item_rows.tolist() == expected.item_rows.tolist()
