"""FlatGR as transformers alone would serve it: `generate` of a causal language model over code tokens."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ...models.modeling_backbone import BackboneForSIDRetrieval


class StockGenerate:
    """The weights of a FlatGR in a stock `Qwen2ForCausalLM`, constrained by `prefix_allowed_tokens_fn`.

    Level `k`'s code `c` is token `c + V_1 + .. + V_{k-1}`. With the same weights, `renormalize_logits` and no length
    penalty, stock beam search ranks as ours does; it expands the history to all beams before it reads it, scores the
    whole vocabulary, and asks a Python function for the valid tokens of every beam.

    Args:
        model ([`BackboneForSIDRetrieval`]): A Qwen2-type model with flat history, without copy pointer.

    Raises:
        ValueError: If the model is another one.
    """

    def __init__(self, model: BackboneForSIDRetrieval):
        config = model.config
        if config.history_format != "flat" or config.text_config.model_type != "qwen2" or config.tie_code_tables:
            raise ValueError("`model` must be a FlatGR on a Qwen2 backbone with tables of its own.")
        if config.copy_pointer or config.normalize_over != "children":
            raise ValueError("`model` must score valid children, without a copy pointer.")
        shape = config.text_config.to_dict() | {"vocab_size": sum(config.codebook_sizes), "tie_word_embeddings": False}
        shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
        self.language_model = Qwen2ForCausalLM(Qwen2Config(**shape)).to(model.device, model.dtype).eval()
        self.language_model.model.load_state_dict(model.backbone.state_dict(), strict=False)
        with torch.no_grad():
            tables = torch.cat([table.weight for table in model.fuser.tables])
            self.language_model.model.embed_tokens.weight.copy_(tables)
            self.language_model.lm_head.weight.copy_(torch.cat([head.weight for head in model.heads]))
        sizes = torch.tensor(config.codebook_sizes)
        self.offsets = (sizes.cumsum(0) - sizes).to(model.device)
        self.trie, self._allowed = model.trie, {}

    def _allowed_tokens(self, prefix: tuple[int, ...]) -> list[int]:
        """Valid next tokens of a prefix of tokens; kept, as a server would."""
        if prefix not in self._allowed:
            codes = torch.tensor(prefix, dtype=torch.long) - self.offsets[: len(prefix)].cpu()
            node = int(self.trie.node_paths(codes)[-1]) if prefix else 0
            _, children = self.trie.children(len(prefix), node)
            self._allowed[prefix] = (children + int(self.offsets[len(prefix)])).tolist()
        return self._allowed[prefix]

    @torch.inference_mode()
    def generate(self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor, num_beams: int):
        """SIDs `(B * num_beams, K)` and their log-probabilities, best first for every user.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories, padded on the left.
            attention_mask (`torch.LongTensor` of shape `(B, T)`): 1 for items, 0 for padding.
            num_beams (`int`): Beam width, at most the number of items.
        """
        tokens = (item_codes + self.offsets).flatten(1)
        length, levels = tokens.shape[1], self.trie.num_codebooks
        output = self.language_model.generate(
            tokens,
            attention_mask=attention_mask.repeat_interleave(levels, 1),
            prefix_allowed_tokens_fn=lambda _, sentence: self._allowed_tokens(tuple(sentence[length:].tolist())),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=levels,
            do_sample=False,
            renormalize_logits=True,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return output.sequences[:, length:] - self.offsets, output.sequences_scores
