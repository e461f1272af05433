"""The beam search of all models against one that recomputes every prefix, and the history that beams share."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_deco.models import scorers_sid
from hf_deco.models.attention_sid import SHARED_HISTORY, SharedHistory, attend_shared, shared_history_attention
from hf_deco.models.inference_sid import FlatTransformer

MODELS = [("deco", "fused"), ("deco", "flat"), ("backbone", "fused"), ("backbone", "flat")]
BACKBONES = ["fused", "flat"]
NORMALIZATIONS = ["children", "vocabulary"]


@pytest.fixture
def through_modules(monkeypatch):
    """Searches through transformers' own modules, as of models that cannot be read over flat tokens."""
    monkeypatch.setattr(FlatTransformer, "supports", staticmethod(lambda model: False))


def shape_of(model_type="qwen2", heads=4, kv_heads=2):
    return {
        "model_type": model_type, "vocab_size": 1, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16 // heads,
        "max_position_embeddings": 64,
    }  # fmt: skip


def search(model, *args, **kwargs):
    return model.generate(*args, return_dict_in_generate=True, **kwargs)


def assert_same(got, expected, atol=1e-5):
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.item_rows.tolist() == expected.item_rows.tolist()
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, rtol=0, atol=atol)


def assert_search_equals_the_naive_one(model, reference, item_codes, mask, widths, **kwargs):
    number = widths[-1]
    output = search(model, item_codes, mask, num_beams=widths, num_return_sequences=number, **kwargs)
    for user in range(len(item_codes)):
        expected = reference.search(item_codes[user][mask[user].bool()], widths)
        rows = slice(user * number, user * number + len(expected))
        assert output.sequences[rows].tolist() == [list(sid) for sid, _ in expected]
        scores = torch.stack([score for _, score in expected])
        torch.testing.assert_close(output.sequences_scores[rows], scores, rtol=1e-5, atol=1e-5)
        rest = slice(rows.stop, (user + 1) * number)
        assert (output.sequences[rest] == -1).all() and (output.sequences_scores[rest] == -torch.inf).all()
    found = output.item_rows >= 0
    assert model.catalog_codes[output.item_rows[found]].tolist() == output.sequences[found].tolist()
    return output


@torch.no_grad()
@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_narrow_beams_equal_a_search_that_recomputes_every_prefix(
    make_model, make_reference, make_histories, kind, normalize_over, copy_pointer
):
    model = make_model(
        (6, 5, 4), 60, kind=kind[0], history_format=kind[1], normalize_over=normalize_over, copy_pointer=copy_pointer,
        seed=3,
    )  # fmt: skip
    reference, inputs = make_reference(model), make_histories(model, [4, 0, 2])
    for widths in ([1, 1, 1], [3, 3, 3], [4, 2, 6], [2, 20, 5]):
        assert_search_equals_the_naive_one(model, reference, *inputs, widths)


@torch.no_grad()
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("history_format", BACKBONES)
def test_deep_sparse_catalogs_let_beams_leave_the_batch_at_different_levels(
    make_model, make_reference, make_histories, history_format, copy_pointer, skip
):
    model = make_model(
        (3, 2, 3, 2, 3, 2), 14, kind="backbone", history_format=history_format, copy_pointer=copy_pointer, seed=5
    )
    reference, inputs = make_reference(model), make_histories(model, [2, 3, 0, 3])
    for widths in ([3] * 6, [2, 4, 3, 5, 2, 6]):
        assert_search_equals_the_naive_one(model, reference, *inputs, widths, skip_forced_levels=skip)


@torch.no_grad()
@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("normalize_over", NORMALIZATIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_beam_as_wide_as_the_catalog_ranks_every_sid_like_brute_force(
    make_model, make_reference, make_histories, kind, normalize_over, copy_pointer
):
    model = make_model(
        (4, 3, 5), 22, kind=kind[0], history_format=kind[1], normalize_over=normalize_over, copy_pointer=copy_pointer
    )
    output = assert_search_equals_the_naive_one(
        model, make_reference(model), *make_histories(model, [3, 0, 1]), [22] * 3
    )
    assert [sorted(user) for user in output.item_rows.view(3, 22).tolist()] == [list(range(22))] * 3
    total = output.sequences_scores.view(3, 22).exp().sum(1)
    if normalize_over == "children":
        torch.testing.assert_close(total, torch.ones(3), rtol=0, atol=1e-5)
    else:
        assert (total < 0.99).all()


@torch.no_grad()
@pytest.mark.parametrize("history_format", BACKBONES)
@pytest.mark.parametrize(("model_type", "heads", "kv_heads"), [("qwen2", 4, 2), ("llama", 2, 2), ("qwen3", 4, 1)])
def test_other_backbones_and_grouped_query_heads(
    make_model, make_reference, make_histories, make_sequences, history_format, model_type, heads, kv_heads
):
    model = make_model(
        kind="backbone", history_format=history_format, text_config=shape_of(model_type, heads, kv_heads)
    )
    assert model.backbone.config.model_type == model_type
    reference = make_reference(model)
    assert_search_equals_the_naive_one(model, reference, *make_histories(model, [4, 0, 2]), [4, 5, 6])
    item_codes, mask, labels = make_sequences(model, [3])
    targets = [(item_codes[0, :0], item_codes[0, 0])] + [(item_codes[0, : t + 1], labels[0, t]) for t in range(3)]
    expected = torch.stack([reference.log_likelihood(history, tuple(sid.tolist())) for history, sid in targets])
    torch.testing.assert_close(model(item_codes, mask, labels).loss, -expected.mean(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("kind", MODELS[1:])
def test_results_do_not_depend_on_batch_mates_or_padding(make_model, make_histories, kind, copy_pointer):
    model = make_model(kind=kind[0], history_format=kind[1], copy_pointer=copy_pointer)
    lengths = [5, 1, 0, 3]
    item_codes, mask = make_histories(model, lengths)
    together = search(model, item_codes, mask, num_beams=6, num_return_sequences=6)
    for user, length in enumerate(lengths):
        history = item_codes[user : user + 1, 5 - length :]
        variants = [(history, None)]  # of an empty history, not one column
        for junk in (torch.full((1, 3, 3), 2), torch.full((1, 3, 3), -1)):
            no, yes = [0] * 3, [1] * length
            variants.append((torch.cat([junk, history], 1), torch.tensor([no + yes])))
            variants.append((torch.cat([history, junk], 1), torch.tensor([yes + no])))
            variants.append((torch.cat([junk, history, junk], 1), torch.tensor([no + yes + no])))
        for codes, alone_mask in variants:
            alone = search(model, codes, alone_mask, num_beams=6, num_return_sequences=6)
            rows = slice(user * 6, user * 6 + 6)
            assert alone.sequences.tolist() == together.sequences[rows].tolist()
            torch.testing.assert_close(alone.sequences_scores, together.sequences_scores[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_eager_attention_equals_sdpa(make_model, make_histories, make_sequences, kind, through_modules):
    eager = make_model(kind=kind[0], history_format=kind[1], copy_pointer=True)
    sdpa = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    sdpa.set_attn_implementation("sdpa")
    assert eager.backbone.config._attn_implementation == "eager"
    inputs, batch = make_histories(eager, [4, 1, 0, 3]), make_sequences(eager, [4, 1, 0, 3], padding="both")
    assert_same(search(eager, *inputs, num_beams=7), search(sdpa, *inputs, num_beams=7))
    losses = [model(*batch).loss for model in (eager, sdpa)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)
    gradients = [
        torch.autograd.grad(loss, model.fuser.parameters()) for loss, model in zip(losses, (eager, sdpa), strict=True)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("history_format", BACKBONES)
def test_flash_attention_is_refused_by_a_full_backbone(make_model, history_format):
    # It knows no block-causal mask: training would go on, on other attention than the search's.
    model = make_model(kind="backbone", history_format=history_format)
    with pytest.raises(ValueError, match="does not support Flash Attention"):
        model.set_attn_implementation("flash_attention_2")


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return output


@pytest.fixture
def searched(make_model, make_histories, monkeypatch):
    """What a search of 20 beams reads, in which memory the histories lie, and the largest tensor of its steps."""

    def run(history_format, lengths):
        text_config = shape_of(heads=4, kv_heads=4)
        model = make_model((6, 5, 4), 100, kind="backbone", history_format=history_format, text_config=text_config)
        inputs, tensors = make_histories(model, lengths), LargestTensor()
        reads, histories = [], []

        def note_reads(owner, name, shape_of_call):
            function = getattr(owner, name)

            def noting(*args, **kwargs):
                reads.append((name, *shape_of_call(*args, **kwargs)))
                return function(*args, **kwargs)

            monkeypatch.setattr(owner, name, noting)

        def noting_histories(keys, values, mask, users):
            histories.append(
                [(key.shape, value.shape, key.data_ptr()) for key, value in zip(keys, values, strict=True)]
            )
            return SharedHistory(keys, values, mask, users)

        advance = scorers_sid.BackboneScorer.advance

        def measured(*args):
            with tensors:
                return advance(*args)

        note_reads(model.backbone, "forward", lambda inputs_embeds, **kwargs: inputs_embeds.shape[:2])
        note_reads(FlatTransformer, "read_sequences", lambda flat, tokens, *args, **kwargs: tokens.shape[:1])
        note_reads(FlatTransformer, "read_next", lambda flat, tokens, *args, **kwargs: tokens.shape[:1])
        monkeypatch.setattr(scorers_sid, "SharedHistory", noting_histories)
        monkeypatch.setattr(scorers_sid.BackboneScorer, "advance", measured)
        search(model, *inputs, num_beams=20, skip_forced_levels=False)
        return reads, histories, tensors.largest, model.config.tokens_per_item

    return run


def assert_history_is_shared(histories, largest, tokens, users=3, beams=20, heads=4, width=4):
    assert len(histories) == 2 and histories[0] == histories[1]  # the very same memory at every level
    assert all(keys == values == (users, tokens, heads, width) for keys, values, _ in histories[0])
    # Weights take beams x heads x tokens; one key or value for each would be `width` times that.
    assert users * beams * heads * tokens <= largest < 2 * users * beams * heads * tokens


@pytest.mark.parametrize("history_format", BACKBONES)
def test_flat_history_is_read_once_per_user_without_padding_and_never_copied_to_beams(searched, history_format):
    reads, histories, largest, per_item = searched(history_format, [20, 3, 14])
    assert reads == [("read_sequences", 37 * per_item), ("read_next", 3 * 6), ("read_next", 3 * 20)]
    assert_history_is_shared(histories, largest, 20 * per_item)


@pytest.mark.parametrize("history_format", BACKBONES)
def test_through_modules_too_history_is_read_once_per_user_and_never_copied_to_beams(
    searched, through_modules, history_format
):
    reads, histories, largest, per_item = searched(history_format, [20, 3, 14])
    assert reads == [("forward", 3, 20 * per_item), ("forward", 3 * 6, 1), ("forward", 3 * 20, 1)]
    assert_history_is_shared(histories, largest, 20 * per_item)


@pytest.mark.parametrize("history_format", BACKBONES)
def test_attention_implementation_is_the_models_own_again_after_a_search(
    make_model, make_histories, monkeypatch, history_format, through_modules
):
    model = make_model(kind="backbone", history_format=history_format)
    inputs = make_histories(model, [3, 2])
    during, forward = [], model.backbone.forward

    def recording(**kwargs):
        during.append(model.backbone.config._attn_implementation)
        if len(during) == 5:
            raise RuntimeError("out of luck")
        return forward(**kwargs)

    monkeypatch.setattr(model.backbone, "forward", recording)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        during.clear()
        expected = search(model, *inputs, num_beams=6)
        assert during == [implementation, SHARED_HISTORY, SHARED_HISTORY]
        assert model.backbone.config._attn_implementation == implementation
        with pytest.raises(RuntimeError, match="out of luck"):
            search(model, *inputs, num_beams=6)
        assert during[3:] == [implementation, SHARED_HISTORY]
        assert model.backbone.config._attn_implementation == implementation
        during.clear()
        assert_same(search(model, *inputs, num_beams=6), expected, atol=0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_over_a_shared_history_equals_attention_over_copies_of_it(kv_heads):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    users = torch.tensor([0, 0, 0, 2, 2, 3])  # user 1 has no beam, user 3 no history
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    past_keys, past_values = random(4, 5, kv_heads, 8), random(4, 5, kv_heads, 8)
    past_keys.masked_fill_(~mask[:, :, None, None], 7.0)
    query, keys, values = random(6, 4, 8), random(6, 3, kv_heads, 8), random(6, 3, kv_heads, 8)
    shared = SharedHistory([past_keys + 1, past_keys], [past_values + 1, past_values], mask, users)
    output = attend_shared(query, keys, values, 1, shared, 0.3)
    assert output.shape == (6, 4, 8)
    for row, user in enumerate(users.tolist()):
        for head in range(4):
            kv_head = head * kv_heads // 4
            all_keys = torch.cat([past_keys[user, mask[user], kv_head], keys[row, :, kv_head]])
            all_values = torch.cat([past_values[user, mask[user], kv_head], values[row, :, kv_head]])
            expected = (all_keys @ query[row, head] * 0.3).softmax(0) @ all_values
            torch.testing.assert_close(output[row, head], expected, rtol=1e-5, atol=1e-5)
    module = torch.nn.Module()
    module.layer_idx = 1
    given = (part.transpose(1, 2) for part in (query.unsqueeze(1), keys, values))
    called, weights = shared_history_attention(module, *given, None, 0.3, shared_history=shared)
    assert torch.equal(called, output.unsqueeze(1)) and weights is None


@torch.no_grad()
@pytest.mark.parametrize("history_format", BACKBONES)
def test_a_window_is_fine_as_long_as_the_history_fits_into_it(
    make_model, make_reference, make_histories, history_format
):
    text_config = shape_of("mistral") | {"sliding_window": 12}
    model = make_model(kind="backbone", history_format=history_format, text_config=text_config)
    assert_search_equals_the_naive_one(model, make_reference(model), *make_histories(model, [3, 1]), [4, 5, 6])
    with pytest.raises(ValueError, match=r"knows plain attention alone.*window \(12\) shorter than the history"):
        model.generate(*make_histories(model, [14]), num_beams=3)


@pytest.mark.parametrize("extra", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}, {"sliding_window": 3}])
def test_attention_that_is_not_plain_is_refused_rather_than_ignored(extra):
    past = [torch.zeros(1, 3, 2, 4)]
    shared = SharedHistory(past, past, torch.ones((1, 3), dtype=torch.bool), torch.tensor([0, 0]))
    module = torch.nn.Module()
    module.layer_idx = 0
    rows = torch.zeros(2, 2, 1, 4)
    shared_history_attention(module, rows, rows, rows, None, 1.0, shared_history=shared, sliding_window=4)
    with pytest.raises(ValueError, match="knows plain attention alone, but Module caps"):
        shared_history_attention(module, rows, rows, rows, None, 1.0, shared_history=shared, **extra)


def test_beams_are_grouped_by_user_and_back():
    users = torch.tensor([0, 0, 2, 2, 2])
    shared = SharedHistory([], [], torch.ones((4, 2), dtype=torch.bool), users)
    rows = torch.arange(30.0).view(5, 2, 3)
    grouped = shared.group(rows)
    assert grouped.shape == (4, 2, 3, 3)
    assert torch.equal(grouped[0, :, :2], rows[:2].transpose(0, 1)) and torch.equal(
        grouped[2], rows[2:].transpose(0, 1)
    )
    assert grouped[1].abs().sum() == grouped[3].abs().sum() == grouped[0, :, 2].abs().sum() == 0
    assert torch.equal(shared.ungroup(grouped), rows)
    shared = SharedHistory([], [], torch.ones((2, 2), dtype=torch.bool), torch.tensor([0, 0, 1, 1]))  # nobody has fewer
    assert torch.equal(shared.group(rows[:4])[1], rows[2:4].transpose(0, 1))
    assert torch.equal(shared.ungroup(shared.group(rows[:4])), rows[:4])


@pytest.mark.parametrize("history_format", BACKBONES)
def test_stored_concepts_are_refused_by_a_full_backbone(make_model, history_format):
    for copy_pointer in (False, True):
        model = make_model(kind="backbone", history_format=history_format, copy_pointer=copy_pointer)
        with pytest.raises(ValueError, match="`concepts` are Deco's: a full backbone searches from `item_codes`"):
            model.generate(concepts=torch.zeros((1, 2, 12)), num_beams=3)


@pytest.mark.parametrize("history_format", BACKBONES)
def test_bfloat16_search_returns_valid_sids_with_float32_scores(make_model, make_histories, history_format):
    model = make_model(kind="backbone", history_format=history_format, copy_pointer=True)
    inputs = make_histories(model, [3, 0, 2])
    expected = search(model, *inputs, num_beams=30, num_return_sequences=30)
    output = search(model.to(torch.bfloat16), *inputs, num_beams=30, num_return_sequences=30)
    assert output.sequences_scores.dtype == torch.float32
    assert [sorted(user) for user in output.item_rows.view(3, 30).tolist()] == [list(range(30))] * 3
    assert model.catalog_codes[output.item_rows].tolist() == output.sequences.tolist()
    best = expected.sequences_scores.view(3, 30)[:, 0].exp() - output.sequences_scores.view(3, 30)[:, 0].exp()
    assert (best.abs() < 0.1).all()


@pytest.mark.parametrize("copy_pointer", [False, True])
@pytest.mark.parametrize("history_format", BACKBONES)
def test_nan_weights_never_produce_an_invalid_sid(make_model, make_histories, history_format, copy_pointer):
    model = make_model((5, 4, 6), 12, kind="backbone", history_format=history_format, copy_pointer=copy_pointer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    output = search(model, *make_histories(model, [2, 0, 3]), num_beams=9)
    assert (output.sequences == -1).all() and (output.item_rows == -1).all()
    assert (output.sequences_scores == -torch.inf).all()


@pytest.mark.parametrize("history_format", BACKBONES)
def test_a_full_backbone_serves_no_users_single_sids_and_swapped_catalogs(
    make_model, make_codes, make_histories, history_format
):
    model = make_model(kind="backbone", history_format=history_format)
    inputs = make_histories(model, [3, 2])
    assert model.generate(inputs[0][:0], inputs[1][:0], num_beams=4).shape == (0, 3)
    search(model, *inputs, num_beams=5)
    codes = make_codes((5, 4, 6), 12, seed=7)
    model.set_catalog(codes)
    output = search(model, *inputs, num_beams=12, num_return_sequences=12)
    assert [sorted(user) for user in output.item_rows.view(2, 12).tolist()] == [list(range(12))] * 2
    model.set_catalog(codes[:1])
    output = search(model, *inputs, num_beams=2)
    assert output.sequences.tolist() == [codes[0].tolist(), [-1] * 3] * 2
    assert output.sequences_scores.tolist() == [0.0, -torch.inf] * 2


@pytest.mark.parametrize("history_format", ["fused", "flat"])
def test_the_search_runs_under_autocast(make_model, make_histories, history_format):
    model = make_model(kind="backbone", history_format=history_format)
    histories = make_histories(model, [3, 0, 5])
    wide = {"num_beams": 30, "num_return_sequences": 30, "return_dict_in_generate": True}
    expected = model.generate(*histories, **wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.generate(*histories, **wide)
    exact, rough = (dict(zip(range(90), out.sequences_scores.tolist(), strict=True)) for out in (expected, found))
    assert max(abs(exact[slot] - rough[slot]) for slot in exact) < 0.5
    assert (found.item_rows.view(3, 30).sort().values == torch.arange(30)).all()
