"""Tied code tables and what the decoder reads: search against dense scores, dense scores against single targets."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel

from hf_deco import DecoConfig
from hf_deco.models.decoder_sid import CrossAttention

SIZES = (5, 4, 6)
VARIANTS = [
    ("deco", {"tie_code_tables": True, "history_format": "fused"}),
    ("deco", {"tie_code_tables": True, "history_format": "flat"}),
    ("backbone", {"tie_code_tables": True, "history_format": "fused"}),
    ("backbone", {"tie_code_tables": True, "history_format": "flat"}),
    ("deco", {"decoder_input": "item_states_prefix", "history_format": "fused"}),
    ("deco", {"decoder_input": "item_states_prefix", "history_format": "flat", "copy_pointer": True}),
    ("deco", {"decoder_input": "item_states_cross", "history_format": "fused"}),
    ("deco", {"decoder_input": "item_states_cross", "history_format": "flat", "tie_code_tables": True}),
    ("deco", {"decoder_input": "token_states_cross", "history_format": "flat"}),
]
every_variant = pytest.mark.parametrize(
    "kind, options", VARIANTS, ids=["-".join([kind, *map(str, options.values())]) for kind, options in VARIANTS]
)


def batch_of(model, lengths=(4, 1, 0, 6), seed=3):
    """Histories of catalog items, padded on the left, and a next item behind each position."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    draws = torch.randint(0, model.config.num_items, (len(lengths), width + 1), generator=generator)
    codes = model.catalog_codes[draws].long()
    mask = torch.zeros((len(lengths), width), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return codes[:, :-1] * mask.unsqueeze(-1), mask, codes[:, 1:].masked_fill(mask.unsqueeze(-1) == 0, -100)


def score_alone(model, history, target):
    """Log-probability of one target after one history, in a batch of its own without padding."""
    if not len(history):
        scores = model.score_targets(target[None, None], torch.ones(1, 1), torch.full((1, 1, len(SIZES)), -100))
        return scores.log_likelihood()[0]
    labels = torch.full_like(history, -100)
    labels[-1] = target
    return model.score_targets(history[None], None, labels[None]).log_likelihood()[-1]


@every_variant
def test_a_wide_search_ranks_the_catalog_like_scores_of_single_targets(make_model, kind, options):
    model = make_model(SIZES, 24, kind=kind, **options)
    item_codes, mask, _ = batch_of(model)
    output = model.generate(item_codes, mask, num_beams=24, num_return_sequences=24, return_dict_in_generate=True)
    catalog = model.catalog_codes.long()
    for user in range(len(mask)):
        history = item_codes[user][mask[user].bool()]
        expected = torch.stack([score_alone(model, history, codes) for codes in catalog])
        order = expected.argsort(descending=True)
        assert output.item_rows.view(-1, 24)[user].tolist() == order.tolist()
        torch.testing.assert_close(output.sequences_scores.view(-1, 24)[user], expected[order], atol=2e-5, rtol=1e-5)
        assert abs(expected.exp().sum() - 1) < 1e-4
    unskipped = model.generate(item_codes, mask, num_beams=5, num_return_sequences=5, skip_forced_levels=False)
    assert torch.equal(unskipped, model.generate(item_codes, mask, num_beams=5, num_return_sequences=5))


@every_variant
def test_the_dense_loss_is_the_mean_of_single_targets_and_reaches_every_parameter(make_model, kind, options):
    complete = list(itertools.product(*map(range, SIZES)))
    model = make_model(SIZES, catalog=complete, kind=kind, **options)
    item_codes, mask, labels = batch_of(model)
    expected = []
    for user in range(len(mask)):
        history, wanted = item_codes[user][mask[user].bool()], labels[user][mask[user].bool()]
        if len(history):
            expected.append(score_alone(model, history[:0], history[0]))
        expected += [score_alone(model, history[: end + 1], wanted[end]) for end in range(len(history))]
    output = model(item_codes, mask, labels)
    torch.testing.assert_close(output.loss, -torch.stack(expected).mean(), atol=1e-5, rtol=1e-5)
    output.loss.backward()
    skipped = {"concept_head.concept_proj.weight", "concept_head.concept_proj.bias"}
    unread = skipped if options.get("decoder_input") == "item_states_prefix" else set()
    for name, parameter in model.named_parameters():
        assert name in unread or (parameter.grad is not None and parameter.grad.abs().sum() > 0), name


@every_variant
def test_checkpoints_of_variants_reload_exactly(make_model, kind, options, tmp_path):
    model = make_model(SIZES, 24, kind=kind, **options)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    item_codes, mask, _ = batch_of(model)
    assert torch.equal(model.generate(item_codes, mask, num_beams=6), again.generate(item_codes, mask, num_beams=6))


@pytest.mark.parametrize("kind", ["deco", "backbone"])
def test_a_tied_model_has_one_table_a_level(make_model, kind):
    tied, untied = (make_model(SIZES, 24, kind=kind, tie_code_tables=tie) for tie in (True, False))
    rows = [name for name, value in tied.named_parameters() if value.dim() == 2 and value.shape[0] in SIZES]
    assert sorted(name.split(".")[-2] for name in rows if "heads" in name) == ["0", "1", "2"]
    assert not any("tables" in name for name in tied.state_dict())
    assert any("tables" in name for name in untied.state_dict())


def test_a_tied_history_reads_normalised_rows(make_model):
    model = make_model(SIZES, 24, tie_code_tables=True)
    codes = model.catalog_codes[:2].long()[None]
    rows = [head.weight[codes[..., level]] for level, head in enumerate(model.heads)]
    normal = torch.cat([row / (row.square().mean(-1, keepdim=True) + 1.2e-7).sqrt() for row in rows], -1)
    expected = model.fuser.down_proj(F.silu(model.fuser.up_proj(normal)))
    torch.testing.assert_close(model._tokens(codes), expected)


def test_content_starts_a_tied_table_once(make_model):
    model = make_model(SIZES, 24, tie_code_tables=True)
    model.init_code_tables([torch.randn(size, 8) for size in SIZES])
    for head in model.heads:
        assert abs(head.weight.square().mean().sqrt() - model.config.initializer_range) < 1e-6


@pytest.mark.parametrize("decoder_input", ["item_states_prefix", "item_states_cross"])
def test_decoders_that_read_the_history_have_no_stored_concepts(make_model, decoder_input):
    model = make_model(SIZES, 24, decoder_input=decoder_input)
    item_codes, mask, _ = batch_of(model)
    with pytest.raises(ValueError, match=f"`decoder_input` '{decoder_input}' a concept is not all"):
        model.encode(item_codes, mask)
    with pytest.raises(ValueError, match="`concepts` are not all that `decoder_input`"):
        model.generate(concepts=torch.zeros(2, 2, 12))


def test_what_the_decoder_reads_has_to_fit_the_history():
    with pytest.raises(StrictDataclassError, match="'token_states_cross' reads the code tokens of a flat history"):
        DecoConfig.from_preset("S", decoder_input="token_states_cross")
    with pytest.raises(StrictDataclassError, match="`decoder_input` must be one of last_state"):
        DecoConfig.from_preset("S", decoder_input="everything")


def test_cross_attention_is_attention_over_the_memory_that_exists():
    torch.manual_seed(0)
    layer = CrossAttention(8, 2)
    stream, memory = torch.randn(3, 2, 8), torch.randn(3, 4, 8)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]]).bool()
    query = layer.query_proj(layer.norm(stream)).unflatten(-1, (2, 4))
    key, value = (part.unflatten(-1, (2, 4)) for part in layer.key_value_proj(memory).chunk(2, -1))
    scores = torch.einsum("rlhd,rshd->rhls", query, key) / 2
    weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    expected = stream + layer.out_proj(torch.einsum("rhls,rshd->rlhd", weights, value).flatten(2))
    torch.testing.assert_close(layer(stream, memory, mask), expected)
