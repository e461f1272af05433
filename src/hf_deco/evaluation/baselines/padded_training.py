"""Deco's training step as it is usually written: everything at every position, padding included."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...models.decoder_sid import DecoderContext
from ...models.modeling_deco import DecoForSIDRetrieval


def padded_loss(
    model: DecoForSIDRetrieval,
    item_codes: torch.LongTensor,
    attention_mask: torch.LongTensor,
    labels: torch.LongTensor,
) -> torch.Tensor:
    """The loss of a model with `normalize_over="vocabulary"`, without users' first items.

    Backbone, concept head, decoder and all heads run on the padded batch; positions without a target are left out by
    the loss alone.

    Args:
        model ([`DecoForSIDRetrieval`]): The model.
        item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories.
        attention_mask (`torch.LongTensor` of shape `(B, T)`): 1 for items, 0 for padding.
        labels (`torch.LongTensor` of shape `(B, T, K)`): SID of the item after each position, -100 for none.
    """
    hidden = model.backbone(
        inputs_embeds=model._tokens(item_codes), attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    concepts = model.concept_head(hidden).flatten(0, 1)  # (B T, M, w)
    targets = labels.flatten(0, 1)  # (B T, K)
    states = model.decoder(DecoderContext(concepts), targets[:, :-1].clamp(min=0))  # (B T, K, w)
    loss = concepts.new_zeros((), dtype=torch.float32)
    for level, head in enumerate(model.heads):
        loss = loss + F.cross_entropy(head(states[:, level]).float(), targets[:, level])
    return loss
