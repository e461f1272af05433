"""GEAR: tokenizer, generator and reranker in one model, trained together on a stream."""

import hashlib
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import ModelOutput

from .checkpoint_sid import CheckpointModel
from .configuration_gear import LOSS_WEIGHTS, GearConfig
from .decoder_gear import GearDecoder
from .encoding_gear import GearEncodingMixin
from .features_gear import CategoricalEmbeddings, ItemFeatures, ItemTower, UserTower, check_rows
from .generation_config_sid import SIDGenerationConfig
from .generation_gear import GearGenerationMixin
from .losses_gear import check_non_negative, generator_loss, generator_weights, lambda_loss
from .memory_gear import MemoryEncoder
from .quantization import ResidualQuantizer
from .trie import check_codes
from .vector_quantization import UNIFORM_RANGE, VectorQuantizer

# What is trained at every stage (the paper's progressive warm-up); a later stage trains all that an earlier one does.
STAGES = {"ltr": ("ltr",), "rq": ("ltr", "rq"), "joint": tuple(LOSS_WEIGHTS)}


@dataclass
class GearOutput(ModelOutput):
    """
    Losses of a batch, each before its weight; those that the stage leaves out are None.

    Args:
        loss (`torch.FloatTensor`): Their weighted sum (Eq. 12).
        ltr_loss (`torch.FloatTensor`, *optional*): LambdaLoss of the two towers (Eq. 8).
        rq_loss (`torch.FloatTensor`, *optional*): Codebook and commitment loss (Eq. 9).
        gen_loss (`torch.FloatTensor`, *optional*): Weighted cross-entropy of the generator (Eq. 10).
        rerank_loss (`torch.FloatTensor`, *optional*): LambdaLoss of the reranker (Eq. 11).
        item_codes (`torch.LongTensor` of shape `(N, K)`, *optional*): SIDs of the batch's items.
    """

    loss: torch.FloatTensor | None = None
    ltr_loss: torch.FloatTensor | None = None
    rq_loss: torch.FloatTensor | None = None
    gen_loss: torch.FloatTensor | None = None
    rerank_loss: torch.FloatTensor | None = None
    item_codes: torch.LongTensor | None = None


class GearForSIDRetrieval(CheckpointModel, GearEncodingMixin, GearGenerationMixin):
    """
    GEAR: an item tower whose hidden states are quantised into SIDs, a user tower, a generator of SIDs that reads a
    user's features and behaviour, and a reranker that reads one token further and tells items of a SID apart.

    A batch holds a table of its distinct items, `content` and `item_ids`; `behaviors` and `candidates` are rows of that
    table. SIDs are made from the items as they are now: the tokenizer learns with the rest. Items that share a SID keep
    it.

    Args:
        config ([`GearConfig`]): Sizes and options.

    Attributes:
        stage (`str`): What `forward` trains; see `set_stage`.

    Example:
        ```python
        >>> import torch
        >>> from hf_deco import GearConfig, GearForSIDRetrieval
        >>> model = GearForSIDRetrieval(GearConfig(content_size=8, codebook_size=[16, 4])).eval()
        >>> content = torch.randn(40, 8)
        >>> items = model.encode_items(content)
        >>> model.set_catalog(items.codes)
        >>> behaviors = [torch.tensor([[3, 17]]), torch.tensor([[-1]])]  # two clicks, no conversion
        >>> output = model.generate(
        ...     content, behaviors=behaviors, rerank=True, num_return_sequences=2, return_dict_in_generate=True
        ... )
        >>> output.sequences.shape, output.rerank_vectors.shape
        (torch.Size([2, 2]), torch.Size([2, 96]))

        ```
    """

    config: GearConfig
    base_model_prefix = "model"
    main_input_name = "content"
    _has_pipeline = False  # its inputs are features
    generation_config_class = SIDGenerationConfig

    def __init__(self, config: GearConfig):
        super().__init__(config)
        self.item_features = ItemFeatures(config)
        self.user_features = CategoricalEmbeddings(config.user_features, config.feature_size, "user_ids")
        self.item_tower, self.user_tower = ItemTower(config), UserTower(config)
        self.quantizer = ResidualQuantizer(
            config.codebook_sizes,
            config.code_size,
            config.quantizer,
            newton_schulz_steps=config.newton_schulz_steps,
            commitment_weight=config.commitment_weight,
            restart_dead_codes=config.restart_dead_codes,
        )
        self.memory_encoder, self.decoder = MemoryEncoder(config), GearDecoder(config)
        self._add_catalog()
        self.stage = "joint"
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, MemoryEncoder | GearDecoder):
            init.normal_(module.start_token, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, VectorQuantizer):
            init_level(module)
        elif isinstance(module, ResidualQuantizer):
            init.zeros_(module.mean)
        elif isinstance(module, nn.ParameterList):
            for parameter in module:
                init.constant_(parameter, float(module is self.quantizer.scales))  # biases are 0
        elif isinstance(module, GearForSIDRetrieval):
            init.zeros_(module.catalog_codes)

    def set_stage(self, stage: str) -> None:
        """Choose what `forward` trains.

        Args:
            stage (`str`): `"ltr"`, the two towers; `"rq"`, those and the quantiser; or `"joint"`, all, as at first. A
                stage is not saved: it follows from the step of the training.

        Raises:
            ValueError: If there is no such stage.
        """
        if stage not in STAGES:
            raise ValueError(f"`stage` must be one of {', '.join(STAGES)}, got {stage!r}.")
        self.stage = stage

    @property
    def tokenizer_version(self) -> str:
        """Fingerprint of all weights that decide an item's vector and codes: 64 hexadecimal digits."""
        digest = hashlib.sha256(f"{self.config.content_scale}".encode())
        for part in (self.item_features, self.item_tower, self.quantizer):
            for name, tensor in sorted(part.state_dict().items()):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def set_catalog(self, codes: torch.Tensor, version: str | None = None) -> None:
        """Replace the catalog; weights stay as they are.

        Args:
            codes (`torch.Tensor` or array of shape `(N, K)`): SID of every item, row `i` for item row `i`.
            version (`str`, *optional*): Version of the tokenizer that spelt them; the present one by default. It is
                kept as `config.catalog_version`, which tells a catalog that the model has outgrown.

        Raises:
            ValueError: If the codes do not fit the model's codebooks. The old catalog then stays.
        """
        super().set_catalog(codes)
        self.config.catalog_version = self.tokenizer_version if version is None else version

    def no_decay_parameters(self) -> list[str]:
        """Names of the parameters that weight decay would harm; see [`ResidualQuantizer.no_decay_parameters`]."""
        return [f"quantizer.{name}" for name in self.quantizer.no_decay_parameters()]

    def forward(
        self,
        content: torch.Tensor,
        item_ids: torch.LongTensor | None = None,
        user_ids: torch.LongTensor | None = None,
        behaviors: list[torch.LongTensor] | None = None,
        candidates: torch.LongTensor | None = None,
        labels: torch.Tensor | None = None,
        impressed: torch.BoolTensor | None = None,
        weights: torch.Tensor | None = None,
        item_codes: torch.LongTensor | None = None,
    ) -> GearOutput:
        """Losses of a batch of requests, those of the model's stage whose weight is not 0.

        *Choices* where the paper is silent: the quantiser learns from all items of the batch's table; the reranker
        scores every candidate by the vector of its own SID.

        Args:
            content, item_ids, user_ids, behaviors: Users and items, as for `encode_memory`.
            candidates (`torch.LongTensor` of shape `(B, C)`): Rows of the items of every request, -1 for padding.
            labels (`torch.Tensor` of shape `(B, C)`): How much each is preferred, from 0.
            impressed (`torch.BoolTensor` of shape `(B, C)`, *optional*): Candidates that the generator learns to spell;
                needed where it is trained.
            weights (`torch.Tensor` of shape `(B, C)`, *optional*): Their business value (the paper's secpm); the loss
                is multiplied by `log(1 + weight)`. Without it, by 1.
            item_codes (`torch.LongTensor` of shape `(N, K)`, *optional*): SIDs in the place of those that the model's
                own tokenizer would give, which then does not learn.

        Raises:
            ValueError: If an input is missing, has another shape, or holds what it must not.
        """
        features, user_embeddings, behaviors = self._read_users(content, item_ids, user_ids, behaviors)
        active = self._active_losses(item_codes, len(content))
        there = self._check_candidates(candidates, labels, len(content), len(user_embeddings))
        shown, sample_weights = self._check_samples(impressed, weights, there) if "gen" in active else (None, None)
        hidden, vectors = self.item_tower(features)
        vectors, losses = vectors[candidates.clamp(min=0)], {}
        if "ltr" in active:
            users = self.user_tower(features, user_embeddings, behaviors)
            losses["ltr"] = self._lambda_loss(torch.einsum("bw,bcw->bc", users, vectors), labels, there)
        if "rq" in active:
            _, item_codes, losses["rq"] = self.quantizer(hidden)
        elif self.stage == "joint" and item_codes is None:
            item_codes = self.quantizer.encode(hidden.detach())
        if "gen" in active or "rerank" in active:
            memory = self.memory_encoder(features, user_embeddings, behaviors)
            codes = item_codes.long()[candidates.clamp(min=0)]
            read = there if "rerank" in active else shown
            states = self.decoder(memory, read.nonzero()[:, 0], codes[read])
            if "gen" in active:
                logits = [head(states[shown[read], level]) for level, head in enumerate(self.decoder.heads)]
                losses["gen"] = generator_loss(logits, codes[shown], sample_weights[shown])
            if "rerank" in active:
                losses["rerank"] = self._rerank_loss(states[:, -1], vectors, labels, there)
        total = sum(self.config.loss_weights[name] * loss for name, loss in losses.items())
        return GearOutput(loss=total, item_codes=item_codes, **{f"{name}_loss": loss for name, loss in losses.items()})

    def _rerank_loss(self, states: torch.Tensor, vectors: torch.Tensor, labels, there) -> torch.Tensor:
        """Loss of the reranker (Eq. 11), given the states `(R, w)` behind the SIDs of all candidates `(B, C)`."""
        products = (self.decoder.rerank_head(states) * vectors[there]).sum(1)
        scores = products.new_zeros(there.shape).index_put(there.nonzero(as_tuple=True), products)
        return self._lambda_loss(scores, labels, there)

    def _lambda_loss(self, scores: torch.Tensor, labels: torch.Tensor, mask: torch.BoolTensor) -> torch.Tensor:
        return lambda_loss(scores, labels, mask, self.config.sigma, self.config.gain)

    def _active_losses(self, item_codes: torch.LongTensor | None, num_items: int) -> list[str]:
        """Names of the losses to be computed, after given SIDs are checked."""
        active = [name for name in STAGES[self.stage] if self.config.loss_weights[name] > 0]
        if item_codes is not None:
            if len(item_codes) != num_items:
                raise ValueError(f"`item_codes` must have a row for each of {num_items} items, got {len(item_codes)}.")
            check_codes(item_codes, self.config.codebook_sizes)
            active = [name for name in active if name != "rq"]
        if not active:
            raise ValueError(
                f"Nothing to train in stage {self.stage!r} with `loss_weights` {self.config.loss_weights}."
            )
        return active

    def _check_candidates(self, candidates, labels, num_items: int, num_users: int) -> torch.BoolTensor:
        """The candidates `(B, C)` that exist, after they and their labels are checked."""
        if candidates is None or labels is None:
            raise ValueError("`forward` computes losses and needs `candidates` and `labels`; to search, `generate`.")
        if not num_items:
            raise ValueError("`content` is empty: a batch to train on needs items.")
        check_rows("candidates", candidates, num_items, num_users, None)
        if labels.shape != candidates.shape:
            raise ValueError(
                f"`labels` must have the shape of `candidates`, {tuple(candidates.shape)}, got {tuple(labels.shape)}."
            )
        check_non_negative("labels", labels, candidates >= 0)
        return candidates >= 0

    def _check_samples(self, impressed, weights, there: torch.BoolTensor) -> tuple[torch.BoolTensor, torch.Tensor]:
        """The candidates `(B, C)` that the generator learns to spell, and what they weigh in its loss."""
        if impressed is None or impressed.shape != there.shape:
            found = None if impressed is None else tuple(impressed.shape)
            raise ValueError(f"`impressed` must have the shape of `candidates`, {tuple(there.shape)}, got {found}.")
        shown = impressed.bool() & there
        return shown, generator_weights(weights, shown)


def init_level(level: VectorQuantizer) -> None:
    """Start a level of a quantiser that no checkpoint has filled, as `reset` does, sparing what one has."""
    init.uniform_(level.codebook, -UNIFORM_RANGE, UNIFORM_RANGE)
    for name, tensor in [*level.named_parameters(recurse=False), *level.named_buffers(recurse=False)]:
        if name == "basis":
            init.eye_(tensor)
        elif name == "ema_sums":
            init.copy_(tensor, level.codebook)
        elif name != "codebook":  # counts
            init.constant_(tensor, float(name == "ema_counts"))


__all__ = ["GearForSIDRetrieval"]
