"""What GEAR makes of items and users outside training: vectors, semantic IDs, memories."""

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from .features_gear import check_rows
from .memory_gear import GearMemory
from .vector_quantization import check_codes

# Items encoded at once, always so many: the rounding of a matrix product depends on its shape, and codes on rounding.
ENCODE_ROWS = 512


@dataclass
class ItemEncoding(ModelOutput):
    """
    What an index keeps of items.

    Args:
        vectors (`torch.FloatTensor` of shape `(N, tower_size)`): Outputs of the item tower.
        codes (`torch.LongTensor` of shape `(N, K)`): SIDs.
    """

    vectors: torch.FloatTensor | None = None
    codes: torch.LongTensor | None = None


class GearEncodingMixin:
    """Encodes items and users; the model supplies `config` and its parts."""

    @torch.no_grad()
    def encode_items(self, content: torch.Tensor, item_ids: torch.LongTensor | None = None) -> ItemEncoding:
        """Vectors and SIDs of items, in one pass.

        What an item gets does not depend on the others: a catalog too large for one call may be given in parts.

        Args:
            content (`torch.Tensor` of shape `(N, d)`): Content embeddings.
            item_ids (`torch.LongTensor` of shape `(N, F)`, *optional*): Categorical features; missing by default.

        Raises:
            ValueError: If an input has another shape, or holds what it must not.
        """
        hidden, vectors = self._item_states(content, item_ids)
        return ItemEncoding(vectors=vectors, codes=self.quantizer.encode(hidden))

    @torch.no_grad()
    def init_quantizer(
        self, content: torch.Tensor, item_ids: torch.LongTensor | None = None, init: str = "kmeans", seed: int = 0
    ) -> None:
        """Start the quantiser from the hidden states that a sample of items has now, after the towers' own stage.

        Args:
            content, item_ids: As for `encode_items`.
            init, seed: As for [`ResidualQuantizer.init_from_data`].

        Raises:
            ValueError: If there are fewer items than codes of a level, or they are all alike.
        """
        self.quantizer.init_from_data(self._item_states(content, item_ids)[0], init, seed)

    def _item_states(self, content: torch.Tensor, item_ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and outputs of items, float32, in pieces of one size."""
        features = self._features(content, item_ids)
        hidden = features.new_empty((len(features), self.config.code_size), dtype=torch.float32)
        vectors = features.new_empty((len(features), self.config.tower_size), dtype=torch.float32)
        piece = features.new_zeros((ENCODE_ROWS, features.shape[1]))
        for start in range(0, len(features), ENCODE_ROWS):
            here = slice(start, start + ENCODE_ROWS)
            count = len(features[here])
            piece[:count] = features[here]
            states, outputs = self.item_tower(piece)
            hidden[here], vectors[here] = states[:count], outputs[:count]
        return hidden, vectors

    @torch.no_grad()
    def encode_users(
        self,
        content: torch.Tensor,
        item_ids: torch.LongTensor | None = None,
        user_ids: torch.LongTensor | None = None,
        behaviors: list[torch.LongTensor] | None = None,
    ) -> torch.Tensor:
        """Outputs `(B, tower_size)` of the user tower; arguments as for `encode_memory`."""
        return self.user_tower(*self._read_users(content, item_ids, user_ids, behaviors))

    @torch.no_grad()
    def encode_memory(
        self,
        content: torch.Tensor,
        item_ids: torch.LongTensor | None = None,
        user_ids: torch.LongTensor | None = None,
        behaviors: list[torch.LongTensor] | None = None,
    ) -> GearMemory:
        """What the decoder reads of users.

        Args:
            content (`torch.Tensor` of shape `(N, d)`): Content embeddings of the items that they have dealt with.
            item_ids (`torch.LongTensor` of shape `(N, F)`, *optional*): Those items' categorical features.
            user_ids (`torch.LongTensor` of shape `(B, G)`, *optional*): Users' categorical features, -1 where missing.
            behaviors (`list` of `torch.LongTensor` of shape `(B, T_s)`): Rows of those items, oldest first, -1 for
                padding on either side; a tensor for every sequence of the configuration.

        Returns:
            [`GearMemory`] with states `(B, T, w)`.

        Raises:
            ValueError: If an input has another shape, or holds what it must not.
        """
        return self.memory_encoder(*self._read_users(content, item_ids, user_ids, behaviors))

    @torch.no_grad()
    def rerank_vectors(self, memory: GearMemory, sequences: torch.LongTensor) -> torch.Tensor:
        """Vectors that rank the items of given SIDs, by their product with the items' own.

        Args:
            memory ([`GearMemory`]): Memories of `B` users.
            sequences (`torch.LongTensor` of shape `(B, R, K)`): SIDs of every user; -1 for none.

        Returns:
            `torch.Tensor` of shape `(B, R, tower_size)`: `u_rerank` of every SID, zeros for none.

        Raises:
            ValueError: If the SIDs are not those of so many users, or not codes.
        """
        expected = (len(memory.states), self.config.num_codebooks)
        if sequences.dim() != 3 or (sequences.shape[0], sequences.shape[2]) != expected:
            raise ValueError(
                f"`sequences` must have shape ({expected[0]}, SIDs, {expected[1]}), got {tuple(sequences.shape)}."
            )
        there = (sequences >= 0).all(2)
        users, codes = there.nonzero()[:, 0], sequences[there]
        if len(codes):
            check_codes(codes, self.config.codebook_sizes)
        vectors = memory.states.new_zeros((*there.shape, self.config.tower_size), dtype=torch.float32)
        vectors[there] = self.decoder.rerank_head(self.decoder(memory, users, codes)[:, -1]).float()
        return vectors

    def _features(self, content: torch.Tensor, item_ids: torch.LongTensor | None) -> torch.Tensor:
        return self.item_features(content, item_ids, self.item_tower.up_proj.weight.dtype)

    def _read_users(self, content, item_ids, user_ids, behaviors) -> tuple[torch.Tensor, torch.Tensor, list]:
        """Features of items `(N, W)` and of users `(B, G, e)`, and the sequences, checked."""
        expected = self.config.behaviors
        if behaviors is None or len(behaviors) != len(expected):
            names = ", ".join(behavior["name"] for behavior in expected)
            found = None if behaviors is None else len(behaviors)
            raise ValueError(f"`behaviors` must hold a tensor for each of {names}, got {found}.")
        num_users = len(behaviors[0])
        for rows, behavior in zip(behaviors, expected, strict=True):
            check_rows(f"behaviors[{behavior['name']!r}]", rows, len(content), num_users, behavior["length"])
        users = self.user_features(user_ids, num_users, content.device)
        features = self._features(content, item_ids)
        return features, users.to(features.dtype), behaviors
