"""How a transformer reads SID prefixes in a beam search.

In two forms with the same results: over flat tokens, for Qwen2-type models, and through transformers' own modules and
caches, for any other.
"""

import torch
from transformers import DynamicCache

from .attention_sid import CONFIGURED_ATTENTION, SharedHistory, attention_over_shared_history
from .beam_search_sid import PrefixStates
from .decoder_sid import CodeDecoder, DecoderContext
from .inference_sid import EAGER, FlatTransformer, Kernels, Layout


class DecoderScorer:
    """Scores codes in the light decoder.

    Args:
        decoder ([`CodeDecoder`]): The decoder.
        context ([`DecoderContext`]): What it is told of `U` histories.
        kernels ([`Kernels`], *optional*): Elementwise functions of the flat form.
    """

    def __init__(self, decoder: CodeDecoder, context: DecoderContext, kernels: Kernels = EAGER):
        self.decoder, self.context, self.flat = decoder, context, None
        if context.mask is None and context.memory is None and FlatTransformer.supports(decoder.transformer):
            self.flat = FlatTransformer(decoder.transformer, kernels)

    def start(self) -> PrefixStates:
        tokens = self.context.tokens
        num_users, length, _ = tokens.shape
        users = torch.arange(num_users, device=tokens.device)
        if self.flat is None:
            return self._through_modules(users, tokens, [], [])
        layout = Layout.grid(torch.full_like(users, length), length)
        read = self.flat.read_sequences(tokens.flatten(0, 1), layout, last_only=True)
        return PrefixStates(read.states, users, read.keys, read.values)

    def advance(
        self, states: PrefixStates, rows: torch.LongTensor, codes: torch.LongTensor, level: int
    ) -> PrefixStates:
        states, tokens = states.select(rows), self.decoder.prefix_tokens(level, codes)
        if self.flat is None:
            return self._through_modules(states.users, tokens.unsqueeze(1), states.keys, states.values)
        positions = torch.full_like(codes, self.context.tokens.shape[1] + level)
        hidden, keys, values = self.flat.read_next(tokens, positions, states.keys, states.values)
        return PrefixStates(hidden, states.users, keys, values)

    def head(self, level: int) -> torch.Tensor:
        return self.decoder.heads[level].weight

    def _through_modules(self, users: torch.LongTensor, tokens: torch.Tensor, keys, values) -> PrefixStates:
        context = self.context
        if context.mask is not None or context.memory is not None:  # what else is told is in the cache
            context = context.select(users)
        cache = fill_cache(DynamicCache(), keys, values)  # without a configuration: all positions are counted and kept
        hidden = self.decoder.read(context, tokens, cache=cache, use_cache=True)[:, -1]
        return PrefixStates(hidden, users, *cached(cache))


class BackboneScorer:
    """Scores codes in the backbone, over histories that are kept once per user and shared by all of its beams.

    Args:
        model (`BackboneForSIDRetrieval`): The model.
        item_codes (`torch.LongTensor` of shape `(U, T, K)`): Histories, of one column at least.
        mask (`torch.BoolTensor` of shape `(U, T)`): Items that exist.

    Attributes:
        item_states (`torch.Tensor` of shape `(U, T, d)`): Backbone states of the items, zero at padding; None in the
            flat form of a model without copy pointer, where nothing reads them.
    """

    def __init__(self, model, item_codes: torch.LongTensor, mask: torch.BoolTensor):
        self.model, self.item_states = model, None
        self.flat = model._flat_backbone()
        if self.flat is None:
            self._read_through_modules(item_codes, mask)
            return
        read = model._read_sequences(self.flat, item_codes, mask, last_only=model.pointer is None)
        if model.pointer is not None:
            self.item_states = model._item_states(model._unpack(read, mask))
        self.last_states, self.keys, self.values = read.last_states(model.start_state), read.keys, read.values
        self.mask, self.lengths = read.layout.mask(), read.layout.lengths

    def start(self) -> PrefixStates:
        users = torch.arange(self.mask.shape[0], device=self.mask.device)
        return PrefixStates(self.last_states, users, [], [])

    def advance(
        self, states: PrefixStates, rows: torch.LongTensor, codes: torch.LongTensor, level: int
    ) -> PrefixStates:
        states, tokens = states.select(rows), self.model.prefix_tokens(level, codes)
        users, positions = states.users, self.lengths[states.users] + level
        shared = SharedHistory(self.keys, self.values, self.mask, users)
        if self.flat is not None:
            hidden, keys, values = self.flat.read_next(tokens, positions, states.keys, states.values, shared)
            return PrefixStates(hidden, users, keys, values)
        transformer = self.model.backbone
        cache = fill_cache(DynamicCache(config=transformer.config), states.keys, states.values)
        with attention_over_shared_history(transformer):
            output = transformer(
                inputs_embeds=tokens.unsqueeze(1),
                position_ids=positions.unsqueeze(1),
                cache=cache,
                use_cache=True,
                shared_history=shared,
            )
        return PrefixStates(output.last_hidden_state[:, -1], users, *cached(cache))

    def head(self, level: int) -> torch.Tensor:
        return self.model.heads[level].weight

    def _read_through_modules(self, item_codes: torch.LongTensor, mask: torch.BoolTensor) -> None:
        model, per_item = self.model, self.model.config.tokens_per_item
        self.mask = mask.repeat_interleave(per_item, 1)
        history = DynamicCache()  # without a configuration: a sliding window would drop the oldest items
        with CONFIGURED_ATTENTION:
            output = model.backbone(
                inputs_embeds=model._tokens(item_codes), attention_mask=self.mask, cache=history, use_cache=True
            )
        # Padding is never read, but 0 times NaN would be NaN.
        padding = ~self.mask[:, :, None, None]
        self.keys = [layer.keys.transpose(1, 2).masked_fill(padding, 0) for layer in history.layers]
        self.values = [layer.values.transpose(1, 2).masked_fill(padding, 0) for layer in history.layers]
        columns = torch.arange(self.mask.shape[1], device=mask.device)
        self.lengths = (self.mask * columns).amax(1) + 1  # the place behind the last token; padding before it counts
        states = model._item_states(output.last_hidden_state)
        self.item_states = states.masked_fill(~mask.unsqueeze(-1), 0)
        self.last_states = model._last_states(self.item_states, mask)


def fill_cache(cache: DynamicCache, keys: list[torch.Tensor], values: list[torch.Tensor]) -> DynamicCache:
    """A cache of transformers that holds these keys and values of every layer; none at all where there are none."""
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key, value, index)
    return cache


def cached(cache: DynamicCache) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of every layer that a cache of transformers holds."""
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
