"""Deco: a backbone that reads the history once, and a light decoder that spells semantic IDs from its concept."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_deco import DecoConfig
from .generation_sid import SIDGenerationConfig, SIDGenerationMixin
from .scoring_sid import gold_log_probs
from .trie import SIDTrie, check_codes

# Histories of a batch are read in groups of like length; groups smaller than this cost more than the padding they save.
_ROWS_PER_GROUP = 32


@dataclass
class DecoOutput(ModelOutput):
    """
    Output of [`DecoForSIDRetrieval`].

    Args:
        loss (`torch.FloatTensor`, *optional*): Mean over targets of the negative log-likelihood of a target's SID,
            where `labels` were given.
        concepts (`torch.FloatTensor` of shape `(B, M, w)`): Concepts of the whole histories, the complete serving
            state.
        num_targets (`torch.LongTensor`, *optional*): Targets in the loss.
    """

    loss: torch.FloatTensor | None = None
    concepts: torch.FloatTensor | None = None
    num_targets: torch.LongTensor | None = None


class CodeFuser(nn.Module):
    """Fuses the codes of an item into one token: `x = MLP([E_1(c_1); ..; E_K(c_K)])` (Eq. 3)."""

    def __init__(self, config: DecoConfig):
        super().__init__()
        width, hidden_size = config.code_embedding_size, config.text_config.hidden_size
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in config.codebook_sizes)
        self.up_proj = nn.Linear(width * config.num_codebooks, hidden_size)
        self.down_proj = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, item_codes: torch.LongTensor) -> torch.Tensor:
        """Map codes `(..., K)` to tokens `(..., d)`."""
        embedded = torch.cat([table(item_codes[..., level]) for level, table in enumerate(self.tables)], -1)
        return self.dropout(self.down_proj(F.silu(self.up_proj(embedded))))


class ConceptHead(nn.Module):
    """Condenses a backbone state into concepts: `z = reshape(W_z h)`, `u = psi(z)` (Eq. 5)."""

    def __init__(self, config: DecoConfig):
        super().__init__()
        hidden_size, width = config.text_config.hidden_size, config.decoder_config.hidden_size
        self.num_concepts = config.num_concepts
        self.concept_proj = nn.Linear(hidden_size, config.num_concepts * hidden_size)
        self.adapter_up_proj = nn.Linear(hidden_size, width)
        self.adapter_down_proj = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map states `(..., d)` to adapted concepts `(..., M, w)`."""
        concepts = self.concept_proj(states).unflatten(-1, (self.num_concepts, -1))
        return self.adapter_down_proj(F.silu(self.adapter_up_proj(concepts)))


class CodeDecoder(nn.Module):
    """The light decoder: a causal transformer over `u_1..u_M, e_1(c_1), ..`, with a head per level (Eq. 6)."""

    def __init__(self, config: DecoConfig):
        super().__init__()
        width, sizes = config.decoder_config.hidden_size, config.codebook_sizes
        self.normalize_over = config.normalize_over
        self.transformer = _transformer(config.decoder_config)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes[:-1])
        self.heads = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        add_residual_dropout(self.transformer, config.decoder_dropout)

    def forward(self, concepts: torch.Tensor, codes: torch.LongTensor) -> torch.Tensor:
        """States of all prefixes of a SID.

        Args:
            concepts (`torch.Tensor` of shape `(R, M, w)`): Adapted concepts.
            codes (`torch.LongTensor` of shape `(R, L)`): First codes of the SIDs, `L < K`.

        Returns:
            `torch.Tensor` of shape `(R, L + 1, w)`: state after `0 .. L` codes.
        """
        prefix = [self.tables[level](codes[:, level]) for level in range(codes.shape[1])]
        tokens = torch.cat([concepts, torch.stack(prefix, 1)], 1) if prefix else concepts
        return self.transformer(inputs_embeds=tokens, use_cache=False).last_hidden_state[:, concepts.shape[1] - 1 :]

    def sid_log_probs(self, concepts: torch.Tensor, codes: torch.LongTensor, trie: SIDTrie) -> torch.Tensor:
        """Log-probability of every code of given SIDs.

        A level with a single valid code has probability 1 under `"children"`: its prefix is neither scored, nor read
        where no later level branches.

        Args:
            concepts (`torch.Tensor` of shape `(R, M, w)`): Adapted concepts.
            codes (`torch.LongTensor` of shape `(R, K)`): SIDs of the catalog.
            trie ([`SIDTrie`]): The catalog.

        Returns:
            `torch.Tensor` of shape `(R, K)`, float32.
        """
        paths = trie.node_paths(codes)
        if (paths[:, -1] < 0).any():
            missing = codes[paths[:, -1] < 0]
            raise ValueError(
                f"`labels` hold {missing.shape[0]} SIDs that are not in the catalog, such as {missing[0].tolist()}."
            )
        nodes = F.pad(paths[:, :-1], (1, 0))  # (R, K) node before each level
        branching = torch.ones_like(nodes, dtype=torch.bool)
        if self.normalize_over == "children":
            branching = torch.stack([trie.num_children(k, nodes[:, k]) > 1 for k in range(trie.num_codebooks)], 1)
        levels = torch.arange(1, trie.num_codebooks + 1, device=codes.device)
        depth = (branching * levels).amax(1)  # levels that need a state
        log_probs = torch.zeros(codes.shape, dtype=torch.float32, device=codes.device)
        order = depth.argsort(stable=True)
        sizes = torch.bincount(depth, minlength=trie.num_codebooks + 1).tolist()
        pieces = []  # (rows, states) by depth
        for length, rows in enumerate(order.split(sizes)):
            if length and rows.numel():
                pieces.append((rows, self(concepts[rows], codes[rows, : length - 1])))
        for level in range(trie.num_codebooks):
            chosen = [
                (rows[branching[rows, level]], states[branching[rows, level], level])
                for rows, states in pieces
                if states.shape[1] > level
            ]
            if not chosen:
                continue
            rows, states = torch.cat([rows for rows, _ in chosen]), torch.cat([states for _, states in chosen])
            if rows.numel():
                weight = self.heads[level].weight
                gold = gold_log_probs(
                    states, weight, trie, level, nodes[rows, level], paths[rows, level], self.normalize_over
                )
                log_probs = log_probs.index_put((rows, torch.tensor(level, device=rows.device)), gold)
        return log_probs


class DecoderScorer:
    """Runs a beam search in the light decoder, with its own cache of keys and values."""

    def __init__(self, decoder: CodeDecoder, concepts: torch.Tensor):
        self.decoder, self.concepts = decoder, concepts
        self.cache = DynamicCache(config=decoder.transformer.config)

    def start(self) -> torch.Tensor:
        return self._read(self.concepts)

    def advance(self, parents: torch.LongTensor, codes: torch.LongTensor, level: int) -> torch.Tensor:
        self.cache.reorder_cache(parents)
        return self._read(self.decoder.tables[level](codes).unsqueeze(1))

    def head(self, level: int) -> torch.Tensor:
        return self.decoder.heads[level].weight

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        output = self.decoder.transformer(inputs_embeds=tokens, cache=self.cache, use_cache=True)
        return output.last_hidden_state[:, -1]


class DecoPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and catalog of Deco models."""

    config: DecoConfig
    base_model_prefix = "model"
    main_input_name = "item_codes"
    input_modalities = ("text",)
    generation_config_class = SIDGenerationConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, DecoForSIDRetrieval):
            init.normal_(module.start_state, mean=0.0, std=1.0)  # the scale of a normalised backbone state
            init.zeros_(module.catalog_codes)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a checkpoint; see [`PreTrainedModel.from_pretrained`].

        Raises:
            OSError: If a file is missing, or its weights are truncated or damaged.
            ValueError: If the weights lack some of the model's tensors, or hold tensors or a catalog that do not fit
                its configuration.
        """
        with_info = kwargs.pop("output_loading_info", False)
        ignore_mismatched_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches are reported here
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {pretrained_model_name_or_path!r} are damaged or truncated ({error}): fetch the "
                "checkpoint again."
            ) from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path!r} lacks {len(missing)} tensors of the model, such as "
                f"{missing[:3]}: it is incomplete, or was saved by another architecture."
            )
        mismatched = sorted(info["mismatched_keys"])
        if mismatched and not ignore_mismatched_sizes:
            name, stored, expected = mismatched[0]
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path!r} does not fit its configuration in {len(mismatched)} "
                f"tensors, such as {name!r}: stored with shape {tuple(stored)}, {tuple(expected)} expected."
            )
        if model.catalog_codes.device.type != "meta" and model.config.num_items:
            check_codes(model.catalog_codes, model.config.codebook_sizes)
        return (model, info) if with_info else model


class DecoForSIDRetrieval(DecoPreTrainedModel, SIDGenerationMixin):
    """Deco: reads a history of items once, and retrieves the next items by a beam search in a light decoder.

    The codes of all items are a buffer of the model (`catalog_codes`), so a checkpoint is whole; `set_catalog` swaps
    them.

    A history without items is defined: its concept comes from a learned `start_state` in place of the backbone's,
    trained to predict the first item of every sequence. It answers with what the log's sequences begin with, the best
    that can be said about a user of whom nothing is known.

    Args:
        config ([`DecoConfig`]): Sizes and options.

    Example:
        ```python
        >>> import torch
        >>> from hf_deco import DecoConfig, DecoForSIDRetrieval
        >>> model = DecoForSIDRetrieval(DecoConfig.from_preset("S", num_codebooks=2, codebook_size=16)).eval()
        >>> model.set_catalog(torch.tensor([[0, 1], [0, 2], [7, 3]]))
        >>> history = torch.tensor([[[0, 1], [7, 3]]])
        >>> model.generate(history, num_beams=3, num_return_sequences=2).shape
        torch.Size([2, 2])

        ```
    """

    def __init__(self, config: DecoConfig):
        super().__init__(config)
        self.fuser = CodeFuser(config)
        self.backbone = _transformer(config.text_config)
        self.concept_head = ConceptHead(config)
        self.decoder = CodeDecoder(config)
        self.start_state = nn.Parameter(torch.empty(config.text_config.hidden_size))
        self.register_buffer("catalog_codes", torch.zeros((config.num_items, config.num_codebooks), dtype=torch.int32))
        self._trie: SIDTrie | None = None
        add_residual_dropout(self.backbone, config.dropout)
        self.post_init()

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._trie = None  # the catalog may be another one

    def get_input_embeddings(self):
        return None  # histories are codes: there is no table of text tokens

    @property
    def trie(self) -> SIDTrie:
        """Trie of the catalog, on the model's device; built when first asked for."""
        if self.config.num_items == 0:
            raise ValueError("The model carries no catalog: call `model.set_catalog(codes)` first.")
        if self._trie is None:
            self._trie = SIDTrie(self.catalog_codes, self.config.codebook_sizes)
        self._trie = self._trie.to(self.catalog_codes.device)
        return self._trie

    def set_catalog(self, codes: torch.Tensor) -> None:
        """Replace the catalog; weights stay as they are.

        Args:
            codes (`torch.Tensor` or array of shape `(N, K)`): SID of every item, row `i` for item row `i`.

        Raises:
            ValueError: If the codes do not fit the model's codebooks. The old catalog then stays.
        """
        codes = torch.as_tensor(codes)
        check_codes(codes, self.config.codebook_sizes)
        trie = SIDTrie(codes.to(self.catalog_codes.device), self.config.codebook_sizes)
        self.catalog_codes = codes.to(device=self.catalog_codes.device, dtype=torch.int32).clone()
        self.config.num_items, self._trie = codes.shape[0], trie

    @torch.no_grad()
    def init_code_tables(self, codebooks: list) -> None:
        """Start the code tables from content: similar codes begin with similar vectors, in all three roles.

        A level's centroids are centred and turned onto their leading principal directions, then scaled to a root mean
        square of 0.2 for the rows that the fuser reads and of `initializer_range` for decoder embeddings and output
        class vectors.

        Args:
            codebooks (`list` of `K` arrays of shape `(V_k, d_content)`): Centroids of the tokenizer.

        Raises:
            ValueError: If they do not fit the model's codebooks.
        """
        shapes = [tuple(book.shape) for book in codebooks]
        if any(len(shape) != 2 for shape in shapes) or [shape[0] for shape in shapes] != list(
            self.config.codebook_sizes
        ):
            raise ValueError(
                f"`codebooks` have shapes {shapes}, but the model's levels have {self.config.codebook_sizes} codes."
            )
        small = self.config.initializer_range
        for level, book in enumerate(codebooks):
            content = torch.as_tensor(book, dtype=torch.float32)
            roles = [(self.fuser.tables[level].weight, 0.2), (self.decoder.heads[level].weight, small)]
            if level < len(self.decoder.tables):
                roles.append((self.decoder.tables[level].weight, small))
            for weight, scale in roles:
                weight.copy_(principal_rows(content, weight.shape[1], scale))

    def encode_history(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Backbone states of all history items.

        Histories are read in groups of like length, trimmed to the longest of the group: little work is spent on
        padding.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories, padded on either side.
            attention_mask (`torch.LongTensor` of shape `(B, T)`, *optional*): 1 for items, 0 for padding.

        Returns:
            `torch.Tensor` of shape `(B, T, d)`: states, zero at padding.
        """
        mask = self._check_inputs(item_codes, attention_mask)
        lengths = mask.sum(1)
        order = lengths.argsort(stable=True)
        order = order[lengths[order] > 0]
        hidden_size = self.config.text_config.hidden_size
        if not order.numel():
            return self.start_state.new_zeros((*mask.shape, hidden_size))
        states = None
        for rows in order.split(_ROWS_PER_GROUP):
            columns = mask[rows].any(0).nonzero()
            start, end = int(columns[0]), int(columns[-1]) + 1
            group_mask = mask[rows, start:end]
            tokens = self.fuser(item_codes[rows, start:end].clamp(min=0))
            full = bool(group_mask.all())
            hidden = self.backbone(
                inputs_embeds=tokens, attention_mask=None if full else group_mask, use_cache=False
            ).last_hidden_state
            hidden = hidden.masked_fill(~group_mask.unsqueeze(-1), 0)
            if states is None:
                states = hidden.new_zeros((*mask.shape, hidden_size))
            states[rows, start:end] = hidden
        return states

    def encode_concepts(
        self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Concepts `(B, M, w)` of whole histories, the complete serving state of each user (Eq. 5)."""
        mask = self._check_inputs(item_codes, attention_mask)
        return self._last_concepts(self.encode_history(item_codes, attention_mask), mask)

    def forward(
        self,
        item_codes: torch.LongTensor,
        attention_mask: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
    ) -> DecoOutput:
        """Concepts of histories and, given targets, the dense training loss.

        Every labelled position is a target: `-sum_k log p(c_k | c_<k, z_t)`, averaged over targets. The first item of
        each sequence is one more target, predicted from the start state.

        Args:
            item_codes (`torch.LongTensor` of shape `(B, T, K)`): Histories.
            attention_mask (`torch.LongTensor` of shape `(B, T)`, *optional*): 1 for items, 0 for padding.
            labels (`torch.LongTensor` of shape `(B, T, K)`, *optional*): SID of the item after each position, -100
                where there is no target.
        """
        mask = self._check_inputs(item_codes, attention_mask)
        states = self.encode_history(item_codes, attention_mask)
        if labels is None:
            return DecoOutput(concepts=self._last_concepts(states, mask))
        if labels.shape != item_codes.shape:
            raise ValueError(
                f"`labels` must have the shape of `item_codes`, {tuple(item_codes.shape)}, got {tuple(labels.shape)}."
            )
        labelled = labels[..., 0] != -100
        known = mask.any(1)
        first_items = item_codes[known, mask[known].to(torch.int8).argmax(1)]
        start_states = self.start_state.to(states.dtype).expand(first_items.shape[0], -1)
        target_states = torch.cat([states[labelled], start_states])
        codes = torch.cat([labels[labelled], first_items]).long()
        if codes.shape[0] == 0:
            raise ValueError("`labels` hold no target: every position is -100.")
        log_probs = self.decoder.sid_log_probs(self.concept_head(target_states), codes, self.trie)
        return DecoOutput(loss=-log_probs.sum(1).mean(), num_targets=torch.tensor(codes.shape[0], device=codes.device))

    def _last_concepts(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        start_state = self.start_state.to(states.dtype)
        if not mask.shape[1]:
            return self.concept_head(start_state.expand(mask.shape[0], -1))
        positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = (mask * positions).amax(1)  # 0 for an empty history
        chosen = states[torch.arange(states.shape[0], device=mask.device), (last - 1).clamp(min=0)]
        chosen = torch.where((last > 0).unsqueeze(1), chosen, start_state)
        return self.concept_head(chosen)

    def _make_scorer(self, item_codes, attention_mask, concepts) -> DecoderScorer:
        if concepts is None:
            concepts = self.encode_concepts(item_codes, attention_mask)
        expected = (self.config.num_concepts, self.config.decoder_config.hidden_size)
        if concepts.dim() != 3 or tuple(concepts.shape[1:]) != expected:
            raise ValueError(
                f"`concepts` must have shape (batch, {expected[0]}, {expected[1]}), got {tuple(concepts.shape)}."
            )
        return DecoderScorer(self.decoder, concepts.to(self.dtype))

    def _check_inputs(self, item_codes: torch.LongTensor, attention_mask: torch.LongTensor | None) -> torch.Tensor:
        """The boolean attention mask `(B, T)`, after shapes are checked."""
        if item_codes.dim() != 3 or item_codes.shape[2] != self.config.num_codebooks:
            raise ValueError(
                f"`item_codes` must have shape (batch, items, {self.config.num_codebooks}), got "
                f"{tuple(item_codes.shape)}."
            )
        if attention_mask is None:
            return torch.ones(item_codes.shape[:2], dtype=torch.bool, device=item_codes.device)
        if attention_mask.shape != item_codes.shape[:2]:
            raise ValueError(
                f"`attention_mask` must have shape {tuple(item_codes.shape[:2])}, got {tuple(attention_mask.shape)}."
            )
        return attention_mask.bool()


def principal_rows(content: torch.Tensor, width: int, scale: float) -> torch.Tensor:
    """Rows `(V, d)` centred, on their `width` leading principal directions, scaled to a root mean square of `scale`.

    Directions that do not exist are left zero. Rows that are all alike, which have no directions, stay zero.
    """
    centred = content - content.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    rows = F.pad(centred @ directions[:width].T, (0, max(0, width - directions.shape[0])))
    return rows * (scale / rows.square().mean().sqrt().clamp(min=1e-12))


def add_residual_dropout(transformer: nn.Module, probability: float) -> None:
    """Drop entries of what attention and feed-forward add to the residual stream, while training.

    Decoder-only models of transformers have no such dropout; hooks add it without touching parameter names.

    Raises:
        ValueError: If the model's output projections are not named as in Llama and its descendants.
    """
    if probability == 0:
        return
    projections = [module for name, module in transformer.named_modules() if name.endswith(("o_proj", "down_proj"))]
    if not projections:
        raise ValueError(
            f"`dropout` needs layers with `o_proj` and `down_proj`; {type(transformer).__name__} has none. Set it to 0."
        )
    for projection in projections:
        projection.register_forward_hook(lambda module, _, output: F.dropout(output, probability, module.training))


def _transformer(config) -> nn.Module:
    """A decoder-only model without its text embeddings: it reads `inputs_embeds` alone."""
    model = AutoModel.from_config(config)
    model.embed_tokens = None
    return model


__all__ = ["DecoForSIDRetrieval", "DecoOutput", "DecoPreTrainedModel"]
