"""GEAR's encoder: groups of user features and sequences of items, as one memory of keys and values."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_gear import GearConfig
from .feed_forward_sid import FeedForward


@dataclass
class GearMemory:
    """What the decoder is told of `B` users: keys and values of the cross-attention of all its layers.

    Attributes:
        states (`torch.Tensor` of shape `(B, T, w)`): Tokens.
        mask (`torch.BoolTensor` of shape `(B, T)`): Tokens that exist; at least one of every user.
    """

    states: torch.Tensor
    mask: torch.BoolTensor


class MemoryEncoder(nn.Module):
    """One token for every group of user features and for every item of a sequence: `H = [H_g; H_c; H_e]`.

    *Choices* where the paper is silent: a learned token stands first, so that a user of whom nothing is known has a
    memory; an item's token gets an embedding of its place, counted from the latest; tokens are normalised, for they are
    keys and values as they are.
    """

    def __init__(self, config: GearConfig):
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        self.groups, self.lengths = config.feature_groups, [behavior["length"] for behavior in config.behaviors]
        self.start_token = nn.Parameter(torch.empty(width))
        self.group_projs = nn.ModuleList(
            FeedForward(len(group) * config.feature_size, hidden, width) for group in self.groups
        )
        self.behavior_projs = nn.ModuleList(FeedForward(config.item_feature_width, hidden, width) for _ in self.lengths)
        self.places = nn.ModuleList(nn.Embedding(length, width) for length in self.lengths)
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(
        self, features: torch.Tensor, user_embeddings: torch.Tensor, behaviors: list[torch.LongTensor]
    ) -> GearMemory:
        """Encode `B` users; arguments as for [`UserTower`]."""
        num_users = len(user_embeddings)
        start = self.start_token.expand(num_users, 1, -1)
        groups = [
            projection(user_embeddings[:, group].flatten(1)).unsqueeze(1)
            for projection, group in zip(self.group_projs, self.groups, strict=True)
        ]
        always = torch.ones((num_users, 1 + len(groups)), dtype=torch.bool, device=features.device)
        tokens, masks = [start, *groups], [always]
        for index, rows in enumerate(behaviors):
            if rows.shape[1]:
                tokens.append(self._behavior(index, features, rows))
                masks.append(rows >= 0)
        return GearMemory(self.norm(torch.cat(tokens, 1)), torch.cat(masks, 1))

    def _behavior(self, index: int, features: torch.Tensor, rows: torch.LongTensor) -> torch.Tensor:
        """Tokens `(B, T_s, w)` of a sequence, zero at padding."""
        mask = rows >= 0
        if not len(features):
            return features.new_zeros((*rows.shape, self.start_token.shape[0]))
        # Every item once, however often it stands in the sequences.
        projected = F.embedding(rows.clamp(min=0), self.behavior_projs[index](features))
        behind = mask.flip(1).cumsum(1).flip(1) - mask.long()  # items that are later
        return (projected + self.places[index](behind.clamp(max=self.lengths[index] - 1))) * mask.unsqueeze(2)
