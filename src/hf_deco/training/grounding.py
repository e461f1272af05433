"""Grounding: a language model learns what items' semantic IDs mean, and a light decoder what texts mean.

Both directions at once: the language model reads an item's text and the light decoder writes its SID, through the
concept head; and the language model reads the item's own token, the fuser's, and writes the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.utils import ModelOutput

from ..models.decoder_sid import DecoderContext
from ..models.modeling_deco import DecoForSIDRetrieval
from ..models.modeling_sid import TargetScores
from ..models.pointer_sid import CopyState
from ..models.scoring_sid import Targets, score_level

READ_PROMPT = ("Item:", "\nSemantic ID:")  # around the text, which a space begins
WRITE_PROMPT = ("Semantic ID:", "\nItem:")  # around the item's token; the text follows
RECALL_AT = 10
_IGNORED = -100


@dataclass
class GroundingOutput(ModelOutput):
    """
    Losses of a batch in both directions.

    Args:
        loss (`torch.FloatTensor`): Mean over items of `sid_nll`, plus mean over tokens of `text_nll`.
        sid_nll (`torch.FloatTensor` of shape `(B,)`): `-log p(SID | text)` of every item.
        text_nll (`torch.FloatTensor` of shape `(B,)`): `-log p(text | SID)` of every item, summed over its tokens.
        num_tokens (`torch.LongTensor` of shape `(B,)`): Those tokens.
        concepts (`torch.FloatTensor` of shape `(B, M, w)`): Concepts of the texts.
    """

    loss: torch.FloatTensor | None = None
    sid_nll: torch.FloatTensor | None = None
    text_nll: torch.FloatTensor | None = None
    num_tokens: torch.LongTensor | None = None
    concepts: torch.FloatTensor | None = None


class GroundingModel(nn.Module):
    """
    A retriever with what its backbone needs to read and write text. Only the retriever is kept after grounding.

    Args:
        retriever ([`DecoForSIDRetrieval`]): The model, or its LoRA wrapper.
        embed_tokens (`nn.Module`): Text embeddings of the language model.
        lm_head (`nn.Module`): Its language head.
        train_text (`bool`): Whether those two train.
    """

    def __init__(self, retriever: DecoForSIDRetrieval, embed_tokens: nn.Module, lm_head: nn.Module, train_text: bool):
        super().__init__()
        self.retriever = retriever
        self.embed_tokens = embed_tokens.requires_grad_(train_text)
        tied = lm_head.weight is embed_tokens.weight  # saved once: safetensors holds no tensor twice
        self.lm_head = None if tied else lm_head.requires_grad_(train_text)
        self._no_split_modules = retriever._no_split_modules

    def activation_checkpointing_enable(self, **kwargs) -> None:
        """Called by the trainer where activations are to be computed again."""
        self.retriever.activation_checkpointing_enable(**kwargs)

    def forward(
        self,
        text_ids: torch.LongTensor,
        text_mask: torch.LongTensor,
        item_codes: torch.LongTensor,
        written_ids: torch.LongTensor,
        written_mask: torch.LongTensor,
        written_labels: torch.LongTensor,
        item_slots: torch.BoolTensor,
    ) -> GroundingOutput:
        """Losses in both directions.

        Args:
            text_ids (`torch.LongTensor` of shape `(B, L)`): Prompts that end after the text, padded on the right.
            text_mask (`torch.LongTensor` of shape `(B, L)`): 1 for tokens, 0 for padding.
            item_codes (`torch.LongTensor` of shape `(B, K)`): SIDs.
            written_ids (`torch.LongTensor` of shape `(B, S)`): Prompts with room for the item, and the texts.
            written_mask (`torch.LongTensor` of shape `(B, S)`): 1 for tokens, 0 for padding.
            written_labels (`torch.LongTensor` of shape `(B, S)`): The text's tokens, -100 elsewhere.
            item_slots (`torch.BoolTensor` of shape `(B, S)`): Where the item's tokens stand.
        """
        concepts = self.encode_text(text_ids, text_mask)
        sid_nll = -self._sid_log_likelihood(concepts, item_codes)
        text_nll, num_tokens = self._text_nll(item_codes, written_ids, written_mask, written_labels, item_slots)
        loss = sid_nll.mean() + text_nll.sum() / num_tokens.sum().clamp(min=1)
        return GroundingOutput(loss, sid_nll, text_nll, num_tokens, concepts)

    def encode_text(self, text_ids: torch.LongTensor, text_mask: torch.LongTensor) -> torch.Tensor:
        """Concepts `(B, M, w)` of texts, from the states of their last tokens."""
        states = self._read(self.embed_tokens(text_ids), text_mask)
        last = text_mask.sum(1) - 1
        return self.retriever.concept_head(states[torch.arange(len(last), device=last.device), last])

    def _read(self, tokens: torch.Tensor, mask: torch.LongTensor) -> torch.Tensor:
        return self.retriever.backbone(inputs_embeds=tokens, attention_mask=mask, use_cache=False).last_hidden_state

    def _sid_log_likelihood(self, concepts: torch.Tensor, item_codes: torch.LongTensor) -> torch.Tensor:
        """`log p(SID | concepts)`, `(B,)`; of the light decoder alone, where there is a copy pointer too."""
        model, rows = self.retriever, torch.arange(len(item_codes), device=item_codes.device)
        trie, normalize_over = model.trie, model.config.normalize_over
        targets = Targets.locate(rows, torch.zeros_like(rows), item_codes, trie, normalize_over)
        levels = [
            score_level(found, model.heads[level].weight, trie, level, scored, targets, normalize_over)
            for level, (scored, found) in enumerate(model.decoder.target_states(DecoderContext(concepts), targets))
            if scored.numel()
        ]
        return TargetScores(targets, levels).log_likelihood()

    def _text_nll(self, item_codes, written_ids, written_mask, labels, item_slots):
        """`-log p(text | item)` and the number of tokens, both `(B,)`."""
        tokens = self.embed_tokens(written_ids)
        items = self.retriever._tokens(item_codes.unsqueeze(1)).to(tokens.dtype)
        tokens = tokens.masked_scatter(item_slots.unsqueeze(-1), items)
        states, following = self._read(tokens, written_mask)[:, :-1], labels[:, 1:]
        rows, columns = (following != _IGNORED).nonzero(as_tuple=True)
        states = states[rows, columns]
        logits = F.linear(states, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(states)
        cap = getattr(self.retriever.config.text_config, "final_logit_softcapping", None)  # Gemma's
        logits = logits.float() if cap is None else cap * torch.tanh(logits.float() / cap)
        nll = F.cross_entropy(logits, following[rows, columns], reduction="none")
        return nll.new_zeros(len(labels)).index_add(0, rows, nll), torch.bincount(rows, minlength=len(labels))

    @torch.no_grad()
    def retrieve(self, concepts: torch.Tensor, num_beams: int) -> torch.LongTensor:
        """Catalog rows `(B, num_beams)` of the items that fit concepts best, -1 where there are fewer."""
        copies = None
        if self.retriever.config.copy_pointer:  # there is no history to copy from
            users = concepts.shape[0]
            copies = CopyState(
                item_codes=self.retriever.catalog_codes[:1].long().expand(users, 1, -1),
                weights=concepts.new_zeros((users, 1)),
                gate=concepts.new_zeros(users),
            )
        output = self.retriever.generate(
            concepts=concepts,
            copies=copies,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            return_dict_in_generate=True,
        )
        return output.item_rows.view(concepts.shape[0], -1)


class ItemTexts(Dataset):
    """Items of a catalog with their texts.

    Args:
        texts (`np.ndarray` of shape `(C,)`): Text of every item.
        codes (`np.ndarray` of shape `(C, K)`): Its SID.
        rows (`np.ndarray` of shape `(n,)`): Those to take.
    """

    def __init__(self, texts: np.ndarray, codes: np.ndarray, rows: np.ndarray):
        self.texts, self.codes, self.rows = texts, codes, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[index]
        return {"text": self.texts[row], "codes": self.codes[row]}


class GroundingCollator:
    """Makes both prompts of every item.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): The language model's.
        text_length (`int`): Tokens of a text that are kept.
        tokens_per_item (`int`): Tokens that the backbone reads of an item.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text_length: int, tokens_per_item: int = 1):
        self.tokenizer, self.text_length, self.tokens_per_item = tokenizer, text_length, tokens_per_item
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        before, self.read_after = (self._encode(part) for part in READ_PROMPT)
        self.read_before = begin + before
        before, self.write_after = (self._encode(part) for part in WRITE_PROMPT)
        self.write_before = begin + before

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        """Collate.

        Returns:
            What [`GroundingModel`] reads; everything is padded on the right.
        """
        texts = self.tokenizer(
            [f" {feature['text']}" for feature in features],
            add_special_tokens=False,
            truncation=True,
            max_length=self.text_length,
        )["input_ids"]
        text_ids, text_mask = _pad([self.read_before + text + self.read_after for text in texts])
        room = self.write_before + [0] * self.tokens_per_item + self.write_after
        written_ids, written_mask = _pad([room + text + self.end for text in texts])
        columns, start = torch.arange(written_ids.shape[1]), len(self.write_before)
        labels = written_ids.masked_fill((written_mask == 0) | (columns < len(room)), _IGNORED)
        return {
            "text_ids": text_ids,
            "text_mask": text_mask,
            "item_codes": torch.as_tensor(np.stack([feature["codes"] for feature in features])).long(),
            "written_ids": written_ids,
            "written_mask": written_mask,
            "written_labels": labels,
            "item_slots": ((columns >= start) & (columns < start + self.tokens_per_item)).repeat(len(features), 1),
        }


def _pad(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the right with token 0, and their mask."""
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros((len(rows), width), dtype=torch.long), torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row, dtype=torch.long), 1
    return ids, mask


class GroundingTrainer(Trainer):
    """Trains a [`GroundingModel`], and validates it by both losses and by the SIDs that it finds from texts.

    Args:
        num_beams (`int`): Beam width of validation, at least 10.
        kwargs: Arguments of [`transformers.Trainer`].
    """

    def __init__(self, *args, num_beams: int = RECALL_AT, **kwargs):
        self._num_beams = num_beams
        super().__init__(*args, compute_metrics=grounding_metrics, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Read and write one batch.

        Returns:
            No loss; losses and numbers of tokens of every item, and the catalog rows found from its text; its own rows.
        """
        inputs = self._prepare_inputs(inputs)
        grounding = self.accelerator.unwrap_model(model)
        with torch.no_grad():
            output = grounding(**inputs)
            found = grounding.retrieve(output.concepts, self._num_beams)
        rows = grounding.retriever.trie.rows(inputs["item_codes"])
        return None, (output.sid_nll, output.text_nll, output.num_tokens, found[:, :RECALL_AT]), rows


def grounding_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Both losses, in nats per SID and per token, and how often an item is among the ten found from its text."""
    sid_nll, text_nll, num_tokens, found = prediction.predictions
    return {
        "sid_loss": float(sid_nll.mean()),
        "text_loss": float(text_nll.sum() / max(1, num_tokens.sum())),
        f"recall@{RECALL_AT}": float((found == prediction.label_ids[:, None]).any(1).mean()),
    }


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a language model; a `ValueError` where it has none."""
    reason = "it knows no token of a text"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # Where there are no files, transformers makes an empty tokenizer of the model's kind.
        if set(tokenizer("item", add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}:
            return tokenizer
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ValueError(
        f"`backbone` {name!r} has no tokenizer, which grounding needs to read texts ({reason}): save one beside it, or "
        "set `stage` to recommendation."
    )


def add_text(
    retriever: DecoForSIDRetrieval, name: str, tokenizer: PreTrainedTokenizerBase, train_text: bool
) -> GroundingModel:
    """A retriever with text embeddings and language head of the model that its backbone comes from.

    Args:
        retriever ([`DecoForSIDRetrieval`]): The model, or its LoRA wrapper.
        name (`str`): The language model, folder or name on the Hub.
        tokenizer ([`PreTrainedTokenizerBase`]): Its tokenizer.
        train_text (`bool`): Whether they train.

    Raises:
        ValueError: If they do not fit the backbone or the tokenizer.
    """
    language_model = AutoModelForCausalLM.from_pretrained(name, dtype=retriever.dtype)
    embed_tokens, lm_head = language_model.get_input_embeddings(), language_model.get_output_embeddings()
    rows, width = embed_tokens.weight.shape
    if width != retriever.config.text_config.hidden_size:
        raise ValueError(
            f"`backbone` {name!r} has text embeddings of width {width}, but the model's backbone, of `start_from`, is "
            f"{retriever.config.text_config.hidden_size} wide: name the language model that it comes from."
        )
    if len(tokenizer) > rows:
        raise ValueError(
            f"The tokenizer of `backbone` {name!r} has {len(tokenizer)} tokens, its text embeddings {rows} rows: they "
            "do not belong together."
        )
    return GroundingModel(retriever, embed_tokens, lm_head, train_text)
