"""Qwen2 over flat tokens against transformers' own, and the models' flat form against the form through modules."""

import copy
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, AutoModel, Qwen2Config, Qwen2Model

from hf_deco.models import inference_sid
from hf_deco.models.attention_sid import SharedHistory
from hf_deco.models.decoder_sid import DecoderContext
from hf_deco.models.inference_sid import EAGER, FlatTransformer, Kernels, Layout
from hf_deco.models.scorers_sid import DecoderScorer

MODELS = [("deco", "fused"), ("deco", "flat"), ("backbone", "fused"), ("backbone", "flat")]
LENGTHS = [3, 0, 5, 1, 0]
SHAPES = {
    "grouped queries": {},
    "one key head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 10},
    "one layer": {"num_hidden_layers": 1},
    "slow angles": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "stretched angles": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "scaled angles": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4,
            "attention_factor": 1.3,
        }
    },
    "coarse norms": {"rms_norm_eps": 0.1},
}  # fmt: skip


@pytest.fixture
def make_qwen(randomise_weights):
    def make(model_class=Qwen2Model, **changes):
        options = {
            "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": None,
            "eos_token_id": None,
        }  # fmt: skip
        return randomise_weights(model_class(Qwen2Config(**{**options, **changes}))).eval()

    return make


def random_tokens(number, width=16, seed=0):
    return torch.randn((number, width), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read_alone(model, tokens):
    """Final states of one sequence, `(T, d)`, by transformers."""
    if not len(tokens):
        return tokens
    return model(inputs_embeds=tokens.unsqueeze(0), use_cache=False).last_hidden_state[0]


@pytest.fixture
def through_modules(monkeypatch):
    """A function's result, with all transformers read through their own modules."""

    def call(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(FlatTransformer, "supports", staticmethod(lambda model: False))
            return function(*args, **kwargs)

    return call


@pytest.fixture
def flat_calls(monkeypatch):
    """Every use of a flat transformer."""
    calls, call = [], FlatTransformer.__call__

    def counting(self, tokens, *args, **kwargs):
        calls.append(len(tokens))
        return call(self, tokens, *args, **kwargs)

    monkeypatch.setattr(FlatTransformer, "__call__", counting)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_sequences_of_any_length_are_read_as_transformers_reads_each_alone(make_qwen, changes):
    model = make_qwen(**changes)
    assert FlatTransformer.supports(model)
    flat, tokens, layout = FlatTransformer(model), random_tokens(9), Layout.of(torch.tensor(LENGTHS))
    alone = [read_alone(model, part) for part in tokens.split(LENGTHS)]
    read = flat.read_sequences(tokens, layout)
    torch.testing.assert_close(read.states, torch.cat(alone), rtol=1e-4, atol=1e-5)
    start_state = random_tokens(1, seed=1)[0]
    expected = torch.stack([states[-1] if len(states) else start_state for states in alone])
    torch.testing.assert_close(read.last_states(start_state), expected, rtol=1e-4, atol=1e-5)
    last = flat.read_sequences(tokens, layout, last_only=True)
    assert last.states.shape == (5, 16) and last.states.isfinite().all()
    torch.testing.assert_close(last.last_states(start_state), expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(last.keys + last.values, read.keys + read.values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours.shape[:2] == (5, 5) and (ours[~layout.mask()] == 0).all()


@torch.no_grad()
def test_long_sequences_are_read_as_transformers_reads_each_alone(make_qwen):
    lengths, model = [130, 3, 0, 131], make_qwen()
    tokens = random_tokens(sum(lengths))
    read = FlatTransformer(model).read_sequences(tokens, Layout.of(torch.tensor(lengths)))
    alone = torch.cat([read_alone(model, part) for part in tokens.split(lengths)])
    torch.testing.assert_close(read.states, alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[4, 4, 4], [6], [0, 0], [1], [0, 2]])
def test_sequences_without_padding_and_without_tokens(make_qwen, lengths):
    model, start_state = make_qwen(), random_tokens(1, seed=1)[0]
    tokens, layout = random_tokens(sum(lengths)), Layout.of(torch.tensor(lengths))
    alone = [read_alone(model, part) for part in tokens.split(lengths)]
    expected = torch.stack([states[-1] if len(states) else start_state for states in alone])
    for last_only in (False, True):
        read = FlatTransformer(model).read_sequences(tokens, layout, last_only=last_only)
        torch.testing.assert_close(read.last_states(start_state), expected, rtol=1e-4, atol=1e-5)
        assert [key.shape for key in read.keys] == [(len(lengths), max(lengths), 2, 4)] * 3


@torch.no_grad()
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shared_length", [0, 4])
def test_tokens_read_one_by_one_equal_one_pass(make_qwen, changes, shared_length):
    model = make_qwen(**changes)
    flat, rows = FlatTransformer(model), random_tokens(6 * 7).view(6, 7, 16)
    users = torch.tensor([0, 0, 1, 1, 1, 3])  # user 2 has no row; what lies before is the same for all rows of a user
    rows[:, :shared_length] = random_tokens(4 * shared_length, seed=2).view(4, shared_length, 16)[users]
    expected = torch.stack([read_alone(model, row) for row in rows])
    keys, values, shared = [], [], None
    if shared_length:
        layout = Layout.of(torch.full((4,), shared_length))
        first = [int((users == user).nonzero()[0]) if (users == user).any() else 0 for user in range(4)]
        read = flat.read_sequences(rows[first, :shared_length].flatten(0, 1), layout)
        shared = SharedHistory(read.keys, read.values, layout.mask(), users)
    for place in range(shared_length, 7):
        positions = torch.full((6,), place)
        states, keys, values = flat.read_next(rows[:, place], positions, keys, values, shared)
        torch.testing.assert_close(states, expected[:, place], rtol=1e-4, atol=1e-5)
    assert all(part.shape[:2] == (6, 7 - shared_length) for part in keys + values)


@torch.no_grad()
@pytest.mark.parametrize("history_form", ["own", "shared"])
def test_flat_tokens_under_autocast_are_close_to_float32(make_qwen, history_form):
    flat, tokens, layout = FlatTransformer(make_qwen()), random_tokens(9), Layout.of(torch.tensor(LENGTHS))

    def read():
        history = flat.read_sequences(tokens, layout)
        users = torch.arange(5)
        if history_form == "shared":
            shared, keys, values = SharedHistory(history.keys, history.values, layout.mask(), users), [], []
        else:
            shared, keys, values = None, history.keys, history.values
        positions = layout.lengths if shared else torch.full((5,), 5)
        return history.states, flat.read_next(random_tokens(5, seed=3), positions, keys, values, shared)[0]

    exact = read()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = read()
    for ours, theirs in zip(rough, exact, strict=True):
        assert ours.isfinite().all() and not torch.equal(ours.float(), theirs)
        assert (ours.float() - theirs).abs().mean() < 0.05 * theirs.abs().mean()


def test_layout_of_ragged_sequences():
    layout = Layout.of(torch.tensor([2, 0, 3]))
    assert layout.positions.tolist() == [0, 1, 0, 1, 2] and layout.slots.tolist() == [0, 1, 6, 7, 8]
    assert layout.width == 3 and [layout.last[0], layout.last[2]] == [1, 4]
    assert layout.mask().tolist() == [[True, True, False], [False] * 3, [True] * 3]
    flat = torch.arange(1.0, 11.0).view(5, 2)
    padded = layout.pad(flat)
    assert padded.tolist() == [[[1, 2], [3, 4], [0, 0]], [[0, 0]] * 3, [[5, 6], [7, 8], [9, 10]]]
    assert torch.equal(layout.flatten(padded), flat)
    full = Layout.of(torch.tensor([2, 2]))
    assert torch.equal(full.pad(flat[:4]), flat[:4].view(2, 2, 2))
    assert torch.equal(full.flatten(full.pad(flat[:4])), flat[:4])
    for lengths in ([], [0, 0]):
        empty = Layout.of(torch.tensor(lengths, dtype=torch.long))
        assert empty.width == 0 and empty.mask().shape == (len(lengths), 0)
        assert empty.flatten(empty.pad(flat[:0])).shape == (0, 2)


class Qwen2Subclass(Qwen2Model):
    pass


def test_only_plain_qwen2_models_are_read_flat(make_qwen):
    assert FlatTransformer.supports(make_qwen())
    assert not FlatTransformer.supports(make_qwen(Qwen2Subclass))
    assert not FlatTransformer.supports(make_qwen(hidden_act="gelu"))
    assert not FlatTransformer.supports(make_qwen(use_sliding_window=True, sliding_window=4, max_window_layers=1))
    assert not FlatTransformer.supports(make_qwen().train())
    for rope_type in ("dynamic", "longrope"):
        factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]} if rope_type == "longrope" else {}
        angles = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, **factors}
        assert not FlatTransformer.supports(make_qwen(rope_parameters=angles, original_max_position_embeddings=8))
    for model_type in ("llama", "qwen3", "mistral", "gemma2"):
        tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = AutoConfig.for_model(model_type, vocab_size=8, num_key_value_heads=1, **tiny, pad_token_id=0)
        assert not FlatTransformer.supports(AutoModel.from_config(config).eval())


@pytest.mark.parametrize("target", ["q_proj", "o_proj", "down_proj"])
def test_wrapped_and_replaced_layers_are_not_read_flat(make_qwen, target):
    adapted = inject_adapter_in_model(LoraConfig(r=2, target_modules=[target]), make_qwen()).eval()
    assert not FlatTransformer.supports(adapted)
    replaced = make_qwen()
    parent = replaced.layers[1].mlp if target == "down_proj" else replaced.layers[1].self_attn
    setattr(parent, target, torch.nn.Sequential(getattr(parent, target)))  # has no weight of its own, as when quantised
    assert not FlatTransformer.supports(replaced)
    normed = make_qwen()
    normed.layers[2].input_layernorm = torch.nn.LayerNorm(16)
    assert not FlatTransformer.supports(normed)


def hooked(module):
    module.register_forward_hook(lambda module, inputs, output: output)


def hooked_before(module):
    module.register_forward_pre_hook(lambda module, inputs: inputs)


def replaced(module):
    module.forward = module.forward


@pytest.mark.parametrize("change", [hooked, hooked_before, replaced])
@pytest.mark.parametrize("name", ["norm", "layers.0", "layers.1.self_attn", "layers.2.mlp", "layers.2.mlp.up_proj"])
def test_hooks_are_never_passed_over(make_qwen, change, name):
    model = make_qwen()
    change(model.get_submodule(name))
    assert not FlatTransformer.supports(model)


@torch.no_grad()
def test_models_with_dropout_are_read_flat(make_model, make_histories, flat_calls, through_modules):
    model = make_model(dropout=0.4, decoder_dropout=0.3)
    inputs = make_histories(model, [3, 2])
    assert FlatTransformer.supports(model.backbone) and FlatTransformer.supports(model.decoder.transformer)
    assert_same_search(model, through_modules, *inputs)
    assert len(flat_calls) >= 2


def histories_of(model, make_histories, padding, lengths=(4, 1, 0, 6)):
    """Histories with their padding on one side or, of even rows, on the other."""
    item_codes, mask = make_histories(model, list(lengths))
    for row, length in enumerate(lengths):
        if padding == "right" or (padding == "both" and row % 2 == 0):
            shift = length - mask.shape[1]
            item_codes[row], mask[row] = item_codes[row].roll(shift, 0), mask[row].roll(shift, 0)
    return item_codes, mask


def assert_same_search(model, through_modules, *inputs):
    options = {"num_beams": 12, "num_return_sequences": 12, "return_dict_in_generate": True}
    found, expected = model.generate(*inputs, **options), through_modules(model.generate, *inputs, **options)
    assert found.item_rows.tolist() == expected.item_rows.tolist()
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_flat_form_of_a_model_equals_the_form_through_modules(
    make_model, make_histories, through_modules, flat_calls, kind, copy_pointer, padding
):
    model = make_model(kind=kind[0], history_format=kind[1], copy_pointer=copy_pointer, seed=1)
    batches = [histories_of(model, make_histories, padding)]
    if padding == "left":
        nobody_knows = batches[0][0][:2], torch.zeros_like(batches[0][1][:2])
        batches += [nobody_knows, (batches[0][0][:2, :0], batches[0][1][:2, :0])]
    for inputs in batches:
        states = model.encode_history(*inputs)
        assert len(flat_calls) == 1
        torch.testing.assert_close(states, through_modules(model.encode_history, *inputs), rtol=1e-4, atol=1e-5)
        found, expected = model.encode(*inputs), through_modules(model.encode, *inputs)
        for name in ("concepts", "copies"):
            parts = [output[name] if name in output else None for output in (found, expected)]
            if name == "copies" and copy_pointer:
                parts = [(part.weights, part.gate) for part in parts]
            torch.testing.assert_close(*parts, rtol=1e-4, atol=1e-5) if parts[0] is not None else None
        assert_same_search(model, through_modules, *inputs)
        flat_calls.clear()


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_no_users_at_all(make_model, kind):
    model = make_model(kind=kind[0], history_format=kind[1], copy_pointer=True)
    nobody = torch.zeros((0, 3, 3), dtype=torch.long)
    assert model.encode_history(nobody).shape == (0, 3, 16)
    output = model.encode(nobody)
    assert output.copies.gate.shape == (0,) and output.copies.weights.shape == (0, 3)
    if kind[0] == "deco":
        assert output.concepts.shape == (0, 2, 12)


@pytest.mark.parametrize("kind", MODELS)
def test_training_and_gradients_go_through_modules(make_model, make_histories, make_sequences, flat_calls, kind):
    model = make_model(kind=kind[0], history_format=kind[1], copy_pointer=True)
    inputs, batch = make_histories(model, [3, 2]), make_sequences(model, [3, 2])
    assert model.encode_history(*inputs).requires_grad
    model(*batch).loss.backward()
    assert flat_calls == [] and model.backbone.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    model.train()
    with torch.no_grad():
        model.encode(*inputs), model(*batch), model.generate(*inputs, num_beams=3)
    assert flat_calls == []
    model.eval()
    with torch.no_grad():
        model.encode(*inputs)
        model.generate(*inputs, num_beams=3)
    assert len(flat_calls) >= 2


@torch.no_grad()
def test_adapters_are_used_in_a_search_and_merged_ones_are_read_flat(make_model, make_histories, flat_calls):
    model = make_model(kind="backbone", history_format="fused")
    inputs, plain = make_histories(model, [3, 2]), copy.deepcopy(model)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False), model.backbone)
    model.eval()
    options = {"num_beams": 30, "num_return_sequences": 30, "return_dict_in_generate": True}
    adapted = model.generate(*inputs, **options)
    assert flat_calls == []
    for layer, target in zip(plain.backbone.layers, model.backbone.layers, strict=True):
        target.self_attn.v_proj.merge()
        layer.self_attn.v_proj.load_state_dict(target.self_attn.v_proj.base_layer.state_dict())
    merged = plain.generate(*inputs, **options)
    assert len(flat_calls) == 3 and merged.item_rows.tolist() == adapted.item_rows.tolist()
    torch.testing.assert_close(merged.sequences_scores, adapted.sequences_scores, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_decoder_with_a_short_window_is_searched_as_it_was_trained(make_model, make_reference, make_histories):
    window = {
        "model_type": "mistral", "vocab_size": 1, "hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 2, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    model = make_model((3, 4, 3, 2), 40, decoder_config=window)
    item_codes, mask = make_histories(model, [3, 2])
    output = model.generate(
        item_codes, mask, num_beams=40, num_return_sequences=40, return_dict_in_generate=True, skip_forced_levels=False
    )
    for user, length in enumerate([3, 2]):
        expected = make_reference(model).ranking(item_codes[user, 3 - length :])
        scores = torch.stack([score for _, score in expected])
        found = output.sequences_scores.view(2, 40)[user]
        torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4)
        assert output.sequences.view(2, 40, 4)[user].tolist() == [list(sid) for sid, _ in expected]


@torch.no_grad()
def test_a_decoder_that_is_told_more_than_concepts_is_read_through_modules(make_model):
    model = make_model()
    context = DecoderContext(torch.zeros(2, 2, 12))
    assert DecoderScorer(model.decoder, context).flat is not None
    masked = DecoderContext(torch.zeros(2, 2, 12), mask=torch.ones((2, 2), dtype=torch.bool))
    assert DecoderScorer(model.decoder, masked).flat is None
    remembering = DecoderContext(torch.zeros(2, 2, 12), memory=torch.zeros(2, 3, 12))
    assert DecoderScorer(model.decoder, remembering).flat is None


@pytest.fixture
def compiler():
    """Counters of the compiler, which fails where it would return to eager in silence."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    with dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        yield dynamo.utils.counters
    dynamo.reset()


@torch.no_grad()
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_compiled_kernels_serve_any_number_of_tokens_with_one_graph_each(
    make_model, make_histories, monkeypatch, compiler
):
    monkeypatch.setattr(inference_sid, "FEW_ROWS", 1)
    shape = {
        "model_type": "qwen2", "vocab_size": 1, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    model = make_model((6, 5, 4), 60, text_config=shape, decoder_config=shape)
    compiled, graphs = Kernels.compiled(), []
    for seed, lengths in enumerate([[9, 8], [0, 3, 14], [1], [5, 5], [0], [2, 0, 7, 1, 1], [30, 2]]):
        inputs = make_histories(model, lengths, seed)
        for options in ({"num_beams": 20, "num_return_sequences": 3}, {"num_beams": [2, 7, 3]}, {"num_beams": 1}):
            results = []
            for kernels in (EAGER, compiled):
                model.kernels = kernels
                results.append(model.generate(*inputs, return_dict_in_generate=True, **options))
            assert results[0].item_rows.tolist() == results[1].item_rows.tolist()
            torch.testing.assert_close(results[1].sequences_scores, results[0].sequences_scores, rtol=1e-5, atol=1e-5)
            graphs.append(compiler["stats"]["unique_graphs"])
    # Norm, feed-forward and attention have one, and so have projections to queries and to keys, which are narrower.
    assert graphs == [5] * 21 and not compiler["graph_break"]


@torch.no_grad()
def test_models_of_many_shapes_do_not_reach_the_limit_at_which_the_compiler_gives_up(make_qwen, monkeypatch, compiler):
    monkeypatch.setattr(inference_sid, "FEW_ROWS", 1)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # spares the seconds of C++
    kernels = Kernels(rms_norm=Kernels.compiled().rms_norm)

    @torch.no_grad()
    def read(width):
        shape = {"hidden_size": width, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
        model, tokens, layout = make_qwen(**shape), random_tokens(3, width), Layout.of(torch.tensor([1, 2]))
        FlatTransformer(model, kernels).read_sequences(tokens, layout)

    for width in range(2, 24, 2):
        read(width)
    assert compiler["stats"]["unique_graphs"] == 11
    with ThreadPoolExecutor(1) as thread:  # torch's settings are a thread's own
        list(thread.map(read, range(24, 30, 2)))
    assert compiler["stats"]["unique_graphs"] == 14


@torch.no_grad()
def test_few_rows_are_not_worth_a_call_of_compiled_functions(make_qwen, monkeypatch):
    monkeypatch.setattr(inference_sid, "FEW_ROWS", 4)
    model, rows = make_qwen(), []
    noting = Kernels(rms_norm=lambda tokens, *args: rows.append(len(tokens)) or EAGER.rms_norm(tokens, *args))
    flat = FlatTransformer(model, noting)
    for lengths in ([2, 2], [2, 3]):
        layout = Layout.of(torch.tensor(lengths))
        tokens = random_tokens(sum(lengths), model.config.hidden_size)
        flat.read_sequences(tokens, layout)
    assert set(rows) == {5}
    rows.clear()
    flat.read_sequences(tokens, layout, last_only=True)
    assert len(rows) == model.config.num_hidden_layers  # all but the last norm, of two rows
