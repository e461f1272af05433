"""Grounding: what both prompts are, what both losses are, that they fall, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hf_deco import DecoForSIDRetrieval
from hf_deco.training.grounding import (
    READ_PROMPT,
    WRITE_PROMPT,
    GroundingCollator,
    ItemTexts,
    add_text,
    grounding_metrics,
    load_tokenizer,
)
from hf_deco.training.llm_arguments import LLMTrainingArguments
from hf_deco.training.llm_run import split_items
from hf_deco.training.lora import add_lora

SIZES = (4, 5, 3)
DECODER = {"model_type": "qwen2", "vocab_size": 1, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
DECODER |= {"num_attention_heads": 2, "num_key_value_heads": 1}


class Letters:
    """A tokenizer whose tokens are the characters, by their number."""

    bos_token_id, eos_token_id = None, 3

    def __call__(self, text, add_special_tokens, truncation=False, max_length=None):
        texts = [text] if isinstance(text, str) else text
        ids = [[ord(letter) for letter in entry][:max_length] for entry in texts]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}


def letters(text):
    return [ord(letter) for letter in text]


@pytest.fixture
def make_grounding(make_language_model, make_codes, randomise_weights, item_texts, tmp_path):
    """A grounding model with clear probabilities, its language model, tokenizer, texts and codes."""

    def make(tie=True, train_text=True, randomised=True, lora=False, **options):
        language_model = make_language_model(tmp_path, item_texts, tie=tie)
        codes = make_codes(SIZES, 20)
        retriever = DecoForSIDRetrieval.from_backbone(
            str(tmp_path),
            num_codebooks=3,
            codebook_size=list(SIZES),
            code_embedding_size=6,
            decoder_config=DECODER,
            **options,
        )
        retriever.set_catalog(codes)
        if randomised:
            backbone = {name: value.clone() for name, value in retriever.backbone.state_dict().items()}
            randomise_weights(retriever)
            retriever.backbone.load_state_dict(backbone)
        tokenizer = load_tokenizer(str(tmp_path))
        if lora:
            retriever = add_lora(retriever, rank=2)
        grounding = add_text(retriever, str(tmp_path), tokenizer, train_text)
        return grounding.eval(), language_model, tokenizer, np.array(item_texts[:20], dtype=object), codes.numpy()

    return make


def features(texts, codes, rows):
    dataset = ItemTexts(texts, codes, np.array(rows))
    return [dataset[index] for index in range(len(dataset))]


def test_the_prompts_of_both_directions(make_codes):
    texts, codes = np.array(["ab", "c"], dtype=object), np.array([[1, 2, 0], [3, 0, 1]])
    batch = GroundingCollator(Letters(), text_length=10, tokens_per_item=2)(features(texts, codes, [0, 1]))
    read, write = [letters(part) for part in READ_PROMPT], [letters(part) for part in WRITE_PROMPT]
    longer = read[0] + letters(" ab") + read[1]
    shorter = read[0] + letters(" c") + read[1]
    assert batch["text_ids"].tolist() == [longer, shorter + [0]]
    assert batch["text_mask"].tolist() == [[1] * len(longer), [1] * len(shorter) + [0]]
    room = write[0] + [0, 0] + write[1]
    assert batch["written_ids"].tolist() == [room + letters(" ab") + [3], room + letters(" c") + [3, 0]]
    quiet = [-100] * len(room)
    assert batch["written_labels"].tolist() == [quiet + letters(" ab") + [3], quiet + letters(" c") + [3, -100]]
    slots = [False] * len(write[0]) + [True, True] + [False] * (len(write[1]) + 4)
    assert batch["item_slots"].tolist() == [slots, slots]
    assert batch["written_mask"].sum(1).tolist() == [len(room) + 4, len(room) + 3]
    assert batch["item_codes"].tolist() == codes.tolist()


def test_long_texts_are_cut(make_codes):
    texts, codes = np.array(["abcdef"], dtype=object), np.array([[1, 2, 0]])
    batch = GroundingCollator(Letters(), text_length=3)(features(texts, codes, [0]))
    kept = batch["written_labels"][0]
    assert kept[kept != -100].tolist() == letters(" ab") + [3]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("history_format", ["fused", "flat"])
def test_both_losses_are_those_of_a_plain_computation(make_grounding, make_reference, tie, history_format):
    grounding, language_model, tokenizer, texts, codes = make_grounding(tie=tie, history_format=history_format)
    model = grounding.retriever
    collator = GroundingCollator(tokenizer, 64, model.config.tokens_per_item)
    rows = [3, 11, 7]
    with torch.no_grad():
        output = grounding(**collator(features(texts, codes, rows)))
        sid, text, counts = [], [], []
        reference = make_reference(model)
        embed = language_model.get_input_embeddings()
        for row in rows:
            # Text to SID: the language model's last state, the concept, every code among its valid ones.
            prompt = tokenizer(f"{READ_PROMPT[0]} {texts[row]}")["input_ids"] + tokenizer(READ_PROMPT[1])["input_ids"]
            state = language_model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            head = model.concept_head
            concepts = head.concept_proj(state).reshape(model.config.num_concepts, -1)
            concepts = head.adapter_down_proj(F.silu(head.adapter_up_proj(concepts)))
            sid.append(-reference.log_prob(concepts, tuple(codes[row].tolist())))
            # SID to text: the language model's own loss on the same prompt, the item's token put in.
            before, after = (tokenizer(part)["input_ids"] for part in WRITE_PROMPT)
            written = tokenizer(f" {texts[row]}")["input_ids"] + [tokenizer.eos_token_id]
            tokens = reference.tokens(torch.as_tensor(codes[row])[None])
            prompt = torch.cat([embed(torch.tensor(before)), tokens, embed(torch.tensor(after + written))])[None]
            labels = torch.tensor([[-100] * (len(before) + len(tokens) + len(after)) + written])
            text.append(language_model(inputs_embeds=prompt, labels=labels).loss * len(written))
            counts.append(len(written))
    sid, text = torch.stack(sid), torch.stack(text)
    assert torch.allclose(output.sid_nll, sid, atol=1e-4)
    assert torch.allclose(output.text_nll, text, atol=1e-3)
    assert output.num_tokens.tolist() == counts
    assert torch.allclose(output.loss, sid.mean() + text.sum() / sum(counts), atol=1e-4)


def test_an_item_alone_and_in_a_batch_have_the_same_losses(make_grounding):
    grounding, _, tokenizer, texts, codes = make_grounding()
    texts = texts + np.array(["", " and many more words"] * 10, dtype=object)
    collator = GroundingCollator(tokenizer, 64)
    with torch.no_grad():
        together = grounding(**collator(features(texts, codes, range(6))))
        for row in range(6):
            alone = grounding(**collator(features(texts, codes, [row])))
            assert torch.allclose(together.sid_nll[row], alone.sid_nll[0], atol=1e-4)
            assert torch.allclose(together.text_nll[row], alone.text_nll[0], atol=1e-3)


@pytest.mark.parametrize("copy_pointer", [False, True])
def test_what_is_found_from_a_text_is_ranked_by_the_same_probabilities(make_grounding, copy_pointer):
    grounding, _, tokenizer, texts, codes = make_grounding(copy_pointer=copy_pointer)
    collator = GroundingCollator(tokenizer, 64)
    with torch.no_grad():
        pairs = {"texts": texts[[4] * 20], "codes": codes, "rows": range(20)}  # one text, every SID
        output = grounding(**collator(features(**pairs)))
    found = grounding.retrieve(output.concepts[:1], 20)
    assert found.tolist() == [output.sid_nll.argsort().tolist()]
    assert torch.exp(-output.sid_nll).sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("lora, train_text, tie", list(itertools.product([True, False], repeat=3)))
def test_only_what_is_meant_to_train_does(make_grounding, lora, train_text, tie):
    grounding, _, tokenizer, texts, codes = make_grounding(tie=tie, train_text=train_text, lora=lora)
    grounding.train()
    optimizer = torch.optim.SGD([p for p in grounding.parameters() if p.requires_grad], lr=1.0)
    before = {name: value.detach().clone() for name, value in grounding.named_parameters()}
    batch = GroundingCollator(tokenizer, 64)(features(texts, codes, range(20)))
    for _ in range(2):  # LoRA's first factor has no gradient while the second is zero
        optimizer.zero_grad()
        grounding(**batch).loss.backward()
        optimizer.step()
    moved = {name for name, value in grounding.named_parameters() if not torch.equal(value, before[name])}
    prefix = "retriever.base_model.model." if lora else "retriever."
    expected = {name for name in before if name.startswith(prefix) and not name.startswith(f"{prefix}backbone.")}
    expected -= {f"{prefix}start_state"}  # no history is read here
    expected |= {name for name in before if "backbone." in name and (".lora_" in name or not lora)}
    expected |= {name for name in before if name.startswith(("embed_tokens", "lm_head")) and train_text}
    constant = {name for name in expected if name.endswith("k_proj.bias")}  # softmax does not see them
    assert moved - constant == expected - constant


def test_both_losses_fall_and_sids_are_found_from_texts(make_grounding):
    grounding, _, tokenizer, texts, codes = make_grounding(randomised=False)
    grounding.train()
    batch = GroundingCollator(tokenizer, 64)(features(texts, codes, range(20)))
    optimizer = torch.optim.AdamW(grounding.parameters(), lr=3e-3)
    rows = grounding.retriever.trie.rows(batch["item_codes"])
    outputs = []
    for _ in range(70):
        outputs.append(grounding(**batch))
        optimizer.zero_grad()
        outputs[-1].loss.backward()
        optimizer.step()
    first, last = outputs[0], outputs[-1]
    assert last.sid_nll.mean() < first.sid_nll.mean() * 0.75
    assert last.text_nll.sum() < first.text_nll.sum() / 2
    found = grounding.eval().retrieve(last.concepts.detach(), 2)
    assert (found == rows[:, None]).any(1).float().mean() >= 0.5  # chance is 0.1


def test_metrics_are_means_over_items_and_tokens():
    from transformers import EvalPrediction

    found = np.array([[4, 1], [0, 2]])
    values = (np.array([2.0, 4.0]), np.array([6.0, 10.0]), np.array([2, 6]), found)
    metrics = grounding_metrics(EvalPrediction(predictions=values, label_ids=np.array([1, 5])))
    assert metrics == {"sid_loss": 3.0, "text_loss": 2.0, "recall@10": 0.5}


def test_held_out_items_are_not_trained_on():
    args = LLMTrainingArguments(grounding_holdout=0.2, grounding_examples=5, output_dir="runs/nowhere", seed=3)
    texts, codes = np.array([str(item) for item in range(50)], dtype=object), np.arange(100).reshape(50, 2)
    parts = split_items(args, texts, codes)
    rows = {name: set(part.rows.tolist()) for name, part in parts.items()}
    assert len(rows["train"]) == 40 and len(rows["seen"]) == len(rows["heldout"]) == 5
    assert rows["seen"] <= rows["train"] and not rows["heldout"] & rows["train"]
    item = parts["heldout"][0]
    assert item["text"] == str(parts["heldout"].rows[0]) and item["codes"][0] == 2 * int(item["text"])
    again = split_items(args, texts, codes)
    assert all(np.array_equal(part.rows, again[name].rows) for name, part in parts.items())
    everything = split_items(LLMTrainingArguments(output_dir="runs/nowhere"), texts, codes)
    assert set(everything) == {"train", "seen"} and len(everything["train"]) == 50


def test_text_parts_that_do_not_fit_are_refused(make_grounding, make_language_model, item_texts, tmp_path):
    grounding, _, tokenizer, _, _ = make_grounding()
    make_language_model(tmp_path / "wide", item_texts, hidden_size=64)
    with pytest.raises(ValueError, match="text embeddings of width 64, but the model's backbone, .*, is 32 wide"):
        add_text(grounding.retriever, str(tmp_path / "wide"), tokenizer, train_text=False)
    tokenizer.add_tokens([f"<{number}>" for number in range(500)])
    with pytest.raises(ValueError, match=r"has 8\d\d tokens, its text embeddings 3\d\d rows"):
        add_text(grounding.retriever, str(tmp_path), tokenizer, train_text=False)
    (tmp_path / "wide/tokenizer.json").unlink()
    (tmp_path / "wide/tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="`backbone` .*wide' has no tokenizer, which grounding needs"):
        load_tokenizer(str(tmp_path / "wide"))


@pytest.mark.parametrize("tie", [True, False])
def test_a_language_heads_cap_on_logits_is_kept(make_grounding, tie):
    grounding, language_model, tokenizer, texts, codes = make_grounding(tie=tie)
    batch = GroundingCollator(tokenizer, 64)(features(texts, codes, [2]))
    grounding.retriever.config.text_config.final_logit_softcapping = 2.0
    with torch.no_grad():
        found = grounding(**batch).text_nll
        tokens = language_model.get_input_embeddings()(batch["written_ids"])
        item = grounding.retriever.fuser(batch["item_codes"][:, None], [None] * 3)
        tokens = torch.where(batch["item_slots"][..., None], item, tokens)
        logits = 2 * torch.tanh(language_model(inputs_embeds=tokens).logits[0, :-1] / 2)
        expected = F.cross_entropy(logits, batch["written_labels"][0, 1:], reduction="sum", ignore_index=-100)
    assert torch.allclose(found, expected, atol=1e-3)
