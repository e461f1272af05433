"""What GEAR knows of items and users, and the two towers that turn it into vectors."""

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_gear import GearConfig
from .vector_quantization import check_input

MISSING = -1  # a categorical value that is not known; a row of no item
# Odd constants with scattered bits, as signed 64-bit integers.
_MIX, _MIX_AGAIN = -7046029254386353131, -4658895280553007687


def hash_ids(ids: torch.LongTensor, feature: int, size: int) -> torch.LongTensor:
    """Rows `0 .. size - 1` that values of a feature are scattered to, the same on every machine.

    Args:
        ids (`torch.LongTensor` of shape `(...)`): Values.
        feature (`int`): Column of the feature: each has a function of its own.
        size (`int`): Number of rows.
    """
    mixed = (ids + (feature + 1)) * _MIX
    mixed = (mixed ^ (mixed >> 32)) * _MIX_AGAIN
    return (mixed ^ (mixed >> 29)).remainder(size)


class CategoricalEmbeddings(nn.Module):
    """Embeddings of categorical features, a table each; missing and unseen values are vectors of zeros.

    Args:
        features (`list[dict]`): `name`, `size` and `hashed` of every feature, as in [`GearConfig`].
        width (`int`): Width of an embedding.
        name (`str`): Name of the argument in error messages.
    """

    def __init__(self, features: list[dict], width: int, name: str):
        super().__init__()
        self.features, self.width, self.name = features, width, name
        self.tables = nn.ModuleList(nn.Embedding(feature["size"] + 1, width, padding_idx=0) for feature in features)

    def forward(self, ids: torch.LongTensor | None, num_rows: int, device: torch.device) -> torch.Tensor:
        """Embeddings `(R, F, width)` of values `(R, F)`; without values, all are missing.

        Raises:
            ValueError: If values are no integers, of another shape, or below -1.
        """
        if ids is None:
            ids = torch.full((num_rows, len(self.tables)), MISSING, device=device)
        shape = (num_rows, len(self.tables))
        if tuple(ids.shape) != shape or ids.is_floating_point():
            raise ValueError(f"`{self.name}` must be integers of shape {shape}, got {ids.dtype} {tuple(ids.shape)}.")
        if ids.numel() and int(ids.min()) < MISSING:
            column = int(ids.amin(0).argmin())
            raise ValueError(
                f"`{self.name}` must be {MISSING} (missing) or not negative, got {int(ids.min())} for feature "
                f"{self.features[column]['name']!r}."
            )
        rows = [self._rows(ids[:, column].long(), column) for column in range(len(self.tables))]
        embedded = [table(row) for table, row in zip(self.tables, rows, strict=True)]
        return torch.stack(embedded, 1) if embedded else self._nothing(num_rows, device)

    def _rows(self, ids: torch.LongTensor, column: int) -> torch.LongTensor:
        feature = self.features[column]
        if feature.get("hashed", False):
            return torch.where(ids < 0, 0, 1 + hash_ids(ids, column, feature["size"]))
        return torch.where(ids >= feature["size"], 0, 1 + ids)

    def _nothing(self, num_rows: int, device: torch.device) -> torch.Tensor:
        return torch.zeros((num_rows, 0, self.width), device=device)


class ItemFeatures(nn.Module):
    """An item's features side by side, `[content; E_1(v_1); ..; E_F(v_F)]`: what towers and memory read of it."""

    def __init__(self, config: GearConfig):
        super().__init__()
        self.content_size, self.content_scale = config.content_size, config.content_scale
        self.categories = CategoricalEmbeddings(config.item_features, config.feature_size, "item_ids")

    def forward(self, content: torch.Tensor, item_ids: torch.LongTensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Features `(N, W)` of content embeddings `(N, d)` and categorical values `(N, F)`.

        Raises:
            ValueError: If an input has another shape, or holds what it must not.
        """
        check_input(content, self.content_size, name="content")
        categories = self.categories(item_ids, len(content), content.device)
        return torch.cat([content.to(dtype) * self.content_scale, categories.flatten(1).to(dtype)], 1)


class ItemTower(nn.Module):
    """Item tower: features to a hidden state, which is quantised, and on to the output.

    *Choices*: the paper quantises "intermediate hidden embeddings" of a tower that gives 96 numbers, in codes of 128.
    Here the last hidden layer is as wide as a code, so nothing has to be projected; a projection that the commitment
    loss alone trains would shrink to zero. For the same reason hidden states have length 1. The output also reads the
    features past the hidden state (`wide_proj`): items of one SID have nearly the same hidden state, and what tells
    them apart can then be learnt fast while SIDs stay where they are.
    """

    def __init__(self, config: GearConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.item_feature_width, config.tower_hidden_size)
        self.down_proj = nn.Linear(config.tower_hidden_size, config.code_size)
        self.wide_proj = nn.Linear(config.item_feature_width, config.tower_hidden_size)
        self.out_proj = nn.Linear(config.code_size + config.tower_hidden_size, config.tower_size)

    def hidden_parameters(self) -> list[nn.Parameter]:
        """What makes hidden states, and so SIDs."""
        return [*self.up_proj.parameters(), *self.down_proj.parameters()]

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `(N, code_size)` and outputs `(N, tower_size)` of features `(N, W)`, never in half precision by
        autocast: codes would change."""
        with torch.autocast(features.device.type, enabled=False):
            hidden = F.normalize(self.down_proj(F.silu(self.up_proj(features))), dim=1)
            # The output reads numbers of the size that layers are initialised for.
            read = torch.cat([hidden * hidden.shape[1] ** 0.5, F.silu(self.wide_proj(features))], 1)
            return hidden, self.out_proj(read)


class UserTower(nn.Module):
    """User tower: categorical features and the mean item of every sequence, through two hidden layers.

    *Choice*: the paper does not say what its user tower reads.
    """

    def __init__(self, config: GearConfig):
        super().__init__()
        width = len(config.user_features) * config.feature_size + len(config.behaviors) * config.item_feature_width
        self.up_proj = nn.Linear(width, config.tower_hidden_size)
        self.down_proj = nn.Linear(config.tower_hidden_size, config.code_size)
        self.out_proj = nn.Linear(config.code_size, config.tower_size)

    def forward(
        self, features: torch.Tensor, user_embeddings: torch.Tensor, behaviors: list[torch.LongTensor]
    ) -> torch.Tensor:
        """Outputs `(B, tower_size)`.

        Args:
            features (`torch.Tensor` of shape `(N, W)`): Features of items.
            user_embeddings (`torch.Tensor` of shape `(B, G, e)`): Embeddings of the users' categorical features.
            behaviors (`list` of `torch.LongTensor` of shape `(B, T_s)`): Rows of items, -1 for padding.
        """
        parts = [user_embeddings.flatten(1), *(masked_mean(features, rows) for rows in behaviors)]
        return self.out_proj(F.silu(self.down_proj(F.silu(self.up_proj(torch.cat(parts, 1))))))


def masked_mean(vectors: torch.Tensor, rows: torch.LongTensor) -> torch.Tensor:
    """Mean `(B, w)` of the vectors `(N, w)` at rows `(B, T)` that are not -1; zeros where there are none."""
    if not (len(vectors) and rows.shape[1]):
        return vectors.new_zeros((len(rows), vectors.shape[1]))
    mask = (rows >= 0).to(vectors.dtype)
    shares = mask / mask.sum(1, keepdim=True).clamp(min=1)
    return F.embedding_bag(rows.clamp(min=0), vectors, mode="sum", per_sample_weights=shares)


def check_rows(name: str, rows: torch.LongTensor, num_items: int, num_users: int | None, longest: int | None) -> None:
    """Raise a `ValueError` unless rows `(B, T)` are -1 or rows of a table of items, and no more than may be."""
    if rows.dim() != 2 or rows.is_floating_point() or (num_users is not None and len(rows) != num_users):
        users = "users" if num_users is None else num_users
        raise ValueError(f"`{name}` must be integers of shape ({users}, items), got {rows.dtype} {tuple(rows.shape)}.")
    if longest is not None and rows.shape[1] > longest:
        raise ValueError(f"`{name}` may have {longest} items, got {rows.shape[1]}: keep the latest.")
    if rows.numel() and not -1 <= int(rows.min()) <= int(rows.max()) < num_items:
        raise ValueError(
            f"`{name}` must be rows of the batch's {num_items} items, or -1 for padding, got {int(rows.min())} to "
            f"{int(rows.max())}."
        )
