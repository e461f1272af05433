"""What an index is given and asked, as arrays of the right kind, or an error that names the argument."""

from __future__ import annotations

import numpy as np
import torch

from ..models.strings_sid import PackedStrings
from .embedding import check_embeddings
from .rq_kmeans import check_codes
from .sid_keys import sid_keys
from .sid_table import check_item_ids


def check_items(item_ids, codes, embeddings, sizes: tuple[int, ...]) -> tuple:
    """Ids as an array and packed, keys and embeddings of items, or `ValueError`."""
    item_ids, codes = check_item_ids(item_ids), to_numpy(codes)
    check_codes(codes, sizes)
    if len(codes) != len(item_ids):
        raise ValueError(f"`codes` has {len(codes)} rows for {len(item_ids)} `item_ids`.")
    try:
        names = PackedStrings.pack(item_ids.tolist())
    except UnicodeEncodeError as error:
        raise ValueError(f"`item_ids` holds {error.object!r}, which is no valid text.") from error
    return item_ids, names, sid_keys(codes, sizes), check_embeddings(to_numpy(embeddings), len(item_ids))


def check_denied(deny_rows, num_users: int, num_rows: int) -> list[np.ndarray]:
    """Rows that each user may not be given, of none by default."""
    if deny_rows is None:
        return [np.empty(0, dtype=np.int64)] * num_users
    if len(deny_rows) != num_users:
        raise ValueError(f"`deny_rows` must hold a list of rows for each of {num_users} users, got {len(deny_rows)}.")
    denied = []
    for number, rows in enumerate(deny_rows):
        rows = to_numpy(rows)
        rows = as_integers(rows, "deny_rows") if rows.size else np.empty(0, dtype=np.int64)
        if rows.ndim != 1 or rows.size and not -1 <= rows.min() <= rows.max() < num_rows:
            raise ValueError(
                f"`deny_rows` must hold a list of rows 0..{num_rows - 1}, or -1 for none, for each user, got "
                f"{rows.tolist()} for user {number}."
            )
        denied.append(rows)
    return denied


def to_numpy(values) -> np.ndarray:
    """Values of NumPy, of torch on any device, or lists; NumPy has no bfloat16."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    return (values.detach().float() if values.is_floating_point() else values).cpu().numpy()


def as_integers(values, name: str) -> np.ndarray:
    """Integers of any kind as int64."""
    values = to_numpy(values)
    if values.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers, got {values.dtype}.")
    return values.astype(np.int64, copy=False)


def as_floats(values, name: str) -> np.ndarray:
    """Vectors `(n, d)` of any precision as finite float32."""
    with np.errstate(over="ignore"):  # reported below
        values = np.ascontiguousarray(to_numpy(values), dtype=np.float32)
    if values.ndim != 2:
        raise ValueError(f"`{name}` must have shape (n, width), got {values.shape}.")
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        raise ValueError(f"`{name}` holds NaN or infinite values in {bad.size} rows, first in row {bad[0]}.")
    return values


def some(names: np.ndarray) -> str:
    """A few of many names, for an error."""
    shown = ", ".join(map(repr, names[:5].tolist()))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def check_log_probs(log_probs, shape: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities `(B, S)` as float32, after a check.

    Raises:
        ValueError: Their shape is not that of the candidates, or one is NaN or above 0.
    """
    log_probs = np.asarray(to_numpy(log_probs), dtype=np.float32)
    if log_probs.shape != tuple(shape):
        raise ValueError(
            f"`log_probs` must have a value for every candidate SID, {tuple(shape)}, got {log_probs.shape}."
        )
    if not (log_probs <= 1e-3).all():
        raise ValueError(f"`log_probs` must be logarithms of probabilities, at most 0, got {log_probs.max()}.")
    return log_probs
