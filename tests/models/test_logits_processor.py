import math

import pytest
import torch
from transformers import LogitsProcessorList, Qwen2Config, Qwen2ForCausalLM

from hf_deco import SIDTrie, TrieLogitsProcessor

SIZES = (5, 3, 4)


@pytest.fixture
def codes(make_codes):
    return make_codes(SIZES, 22)


def naive(codes, input_ids, scores, prompt_length, offsets):
    result = torch.full_like(scores, -math.inf)
    for row, tokens in enumerate(input_ids[:, prompt_length:].tolist()):
        prefix = [token - offset for token, offset in zip(tokens, offsets, strict=False)]
        for sid in codes.tolist():
            if sid[: len(prefix)] == prefix:
                token = sid[len(prefix)] + offsets[len(prefix)]
                result[row, token] = scores[row, token]
    return result


@pytest.mark.parametrize("prompt_length", [0, 3])
@pytest.mark.parametrize("offsets", [None, [0, 5, 8], [7, 1, 20]])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_only_valid_next_tokens_keep_their_scores(codes, prompt_length, offsets, level):
    generator = torch.Generator().manual_seed(level)
    prefixes = codes[torch.randint(0, 22, (9,), generator=generator)].long()
    prefixes[::3, 0] = (prefixes[::3, 0] + 1) % 5  # some other prefixes, in the catalog or not
    prefixes[1, 0] = -40  # a token below its level
    prefixes[2, :2] = torch.tensor([4, 9])  # and one above
    first = [0, 0, 0] if offsets is None else offsets
    tokens = prefixes[:, :level] + torch.tensor(first)[:level]
    prompt = torch.randint(0, 24, (9, prompt_length), generator=generator)
    input_ids, scores = torch.cat([prompt, tokens], 1), torch.randn((9, 26), generator=generator)
    given = scores.clone()
    processor = TrieLogitsProcessor(SIDTrie(codes, SIZES), prompt_length, offsets)
    expected = naive(codes, input_ids, scores, prompt_length, first)
    assert torch.equal(processor(input_ids, scores), expected)
    assert torch.equal(scores, given)
    if level:
        assert (expected[1] == -math.inf).all()  # a dead prefix has no continuation
    assert (expected > -math.inf).any()


def test_tokens_past_the_last_level_and_short_prompts_are_refused(codes):
    processor = TrieLogitsProcessor(SIDTrie(codes, SIZES), prompt_length=2)
    for length, asked in ((5, 4), (1, 0)):
        with pytest.raises(ValueError, match=f"asked for code {asked} of SIDs with 3 levels.*`prompt_length`"):
            processor(torch.zeros((2, length), dtype=torch.long), torch.zeros((2, 9)))


def test_offsets_for_other_than_every_level_are_refused(codes):
    with pytest.raises(ValueError, match="must list 3 offsets, one per level, got 2"):
        TrieLogitsProcessor(SIDTrie(codes, SIZES), level_offsets=[0, 5])


@torch.no_grad()
def test_stock_beam_search_with_it_ranks_the_catalog_like_brute_force(codes, randomise_weights):
    offsets, prompt_length = [0, 5, 8], 4
    config = Qwen2Config(
        vocab_size=sum(SIZES), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = randomise_weights(Qwen2ForCausalLM(config)).eval()
    prompts = torch.tensor([[1, 6, 9, 3], [11, 0, 4, 7]])
    processor = TrieLogitsProcessor(SIDTrie(codes, SIZES), prompt_length, offsets)
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        logits_processor=LogitsProcessorList([processor]),
        num_beams=24,
        num_return_sequences=22,
        max_new_tokens=3,
        do_sample=False,
        renormalize_logits=True,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sids = codes.tolist()
    for user in range(2):
        scored = []
        for sid in sids:
            score, tokens = 0.0, prompts[user].tolist()
            for level in range(3):
                valid = sorted({other[level] for other in sids if other[:level] == sid[:level]})
                logits = model(torch.tensor([tokens])).logits[0, -1]
                log_probs = logits[torch.tensor(valid) + offsets[level]].log_softmax(0)
                score += log_probs[valid.index(sid[level])].item()
                tokens = [*tokens, sid[level] + offsets[level]]
            scored.append((score, tokens))
        scored.sort(reverse=True)
        rows = slice(user * 22, user * 22 + 22)
        assert output.sequences[rows].tolist() == [tokens for _, tokens in scored]
        expected = torch.tensor([score for score, _ in scored])
        torch.testing.assert_close(output.sequences_scores[rows], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(expected.exp().sum(), torch.tensor(1.0), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("num_beams", [30, 7, 3])
def test_stock_generate_with_it_finds_what_a_flat_full_backbone_finds(make_model, make_histories, num_beams):
    sizes, offsets = (5, 4, 6), [0, 5, 9]
    ours = make_model(sizes, 30, kind="backbone", history_format="flat", seed=2)
    shape = ours.backbone.config.to_dict() | {"vocab_size": sum(sizes), "tie_word_embeddings": False}
    shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    stock = Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
    weights = {f"model.{name}": tensor for name, tensor in ours.backbone.state_dict().items()}
    weights["model.embed_tokens.weight"] = torch.cat([table.weight for table in ours.fuser.tables])
    weights["lm_head.weight"] = torch.cat([head.weight for head in ours.heads])
    stock.load_state_dict(weights)

    item_codes, mask = make_histories(ours, [4, 2, 1])
    expected = ours.generate(
        item_codes, mask, num_beams=num_beams, num_return_sequences=num_beams, return_dict_in_generate=True
    )
    prompts, prompt_length = (item_codes + torch.tensor(offsets)).flatten(1), 12
    output = stock.generate(
        prompts,
        attention_mask=mask.repeat_interleave(3, 1),
        logits_processor=LogitsProcessorList([TrieLogitsProcessor(ours.trie, prompt_length, offsets)]),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=3,
        do_sample=False,
        renormalize_logits=True,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert (output.sequences[:, prompt_length:] - torch.tensor(offsets)).tolist() == expected.sequences.tolist()
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
