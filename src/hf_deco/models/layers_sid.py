"""Parts of the models: how items become tokens, and what transformers' decoder-only models need around them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel

from .configuration_deco import SIDRetrievalConfig

# Histories of a batch are read in groups of like length; groups smaller than this cost more than the padding they save.
ROWS_PER_GROUP = 32


def look_up(codes: torch.LongTensor, level: int, own: nn.ModuleList | None, tied: torch.Tensor | None) -> torch.Tensor:
    """Rows of codes of a level: of a table of one's own, or of a tied one, normalised to a root mean square of 1."""
    if tied is None:
        return own[level](codes)
    return F.rms_norm(F.embedding(codes, tied), tied.shape[1:])


class CodeFuser(nn.Module):
    """Fuses the codes of an item into one token: `x = MLP([E_1(c_1); ..; E_K(c_K)])` (Eq. 3)."""

    def __init__(self, config: SIDRetrievalConfig):
        super().__init__()
        tied, hidden_size = config.tie_code_tables, config.text_config.hidden_size
        width = config.output_width if tied else config.code_embedding_size
        sizes = config.codebook_sizes
        self.tables = None if tied else nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.up_proj = nn.Linear(width * config.num_codebooks, hidden_size)
        self.down_proj = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, item_codes: torch.LongTensor, tied: list[torch.Tensor | None]) -> torch.Tensor:
        """Map codes `(B, T, K)` to tokens `(B, T, d)`; `tied` holds every level's table, None where it is its own."""
        rows = [look_up(item_codes[..., level], level, self.tables, table) for level, table in enumerate(tied)]
        embedded = torch.cat(rows, -1)
        return self.dropout(self.down_proj(F.silu(self.up_proj(embedded))))


class CodeTokens(nn.Module):
    """Makes one token of every code, each level with a table of its own: the flat history."""

    def __init__(self, config: SIDRetrievalConfig):
        super().__init__()
        hidden_size, sizes, self.in_proj = config.text_config.hidden_size, config.codebook_sizes, None
        tied = config.tie_code_tables
        self.tables = None if tied else nn.ModuleList(nn.Embedding(size, hidden_size) for size in sizes)
        if tied and config.output_width != hidden_size:
            self.in_proj = nn.Linear(config.output_width, hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def token(self, level: int, codes: torch.LongTensor, tied: torch.Tensor | None) -> torch.Tensor:
        """Tokens `(..., d)` of codes `(...)` of one level, without dropout."""
        rows = look_up(codes, level, self.tables, tied)
        return rows if self.in_proj is None else self.in_proj(rows)

    def forward(self, item_codes: torch.LongTensor, tied: list[torch.Tensor | None]) -> torch.Tensor:
        """Map codes `(B, T, K)` to tokens `(B, T K, d)`; `tied` as in [`CodeFuser`]."""
        tokens = [self.token(level, item_codes[..., level], table) for level, table in enumerate(tied)]
        return self.dropout(torch.stack(tokens, 2).flatten(1, 2))


def groups_of_like_length(mask: torch.BoolTensor) -> list[tuple[torch.LongTensor, int, int]]:
    """Rows of a mask `(B, T)` in groups of like length: row numbers, and the columns that hold all their items.

    Rows without items are in no group. An accelerator gets one group: small products and the waits for lengths would
    cost it more than padding does.
    """
    lengths = mask.sum(1)
    order = lengths.argsort(stable=True)
    order = order[lengths[order] > 0]
    groups = []
    size = ROWS_PER_GROUP if mask.device.type == "cpu" else max(1, len(order))
    for rows in order.split(size) if order.numel() else ():
        columns = mask[rows].any(0).nonzero()
        groups.append((rows, int(columns[0]), int(columns[-1]) + 1))
    return groups


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
        projection.register_forward_hook(partial(drop, probability))


def drop(probability: float, module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """Forward hook: dropout of a module's output, in training."""
    return F.dropout(output, probability, module.training)


def make_transformer(config) -> nn.Module:
    """A decoder-only model without its text embeddings: it reads `inputs_embeds` alone."""
    return drop_text_embedding(AutoModel.from_config(config))


def drop_text_embedding(transformer: nn.Module) -> nn.Module:
    """The same model without its table of text tokens, whatever the model calls it."""
    table = transformer.get_input_embeddings()
    for module in list(transformer.modules()):
        for child_name, child in list(module._modules.items()):
            if child is not None and child is table:
                setattr(module, child_name, None)
    return transformer
