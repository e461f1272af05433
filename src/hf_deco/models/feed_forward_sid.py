"""A network of two layers, which several models have in several places."""

import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    """Two layers with SiLU between them."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int):
        super().__init__()
        self.up_proj = nn.Linear(in_size, hidden_size)
        self.down_proj = nn.Linear(hidden_size, out_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))
