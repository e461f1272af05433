"""How good semantic IDs are: use of the codes, collisions, reconstruction, and levels that leave nothing to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .collisions import prefix_ids
from .embedding import check_embeddings
from .reconstruction import Reconstruction, as_reconstruction
from .rq_kmeans import CHUNK_ROWS, check_codes


def quality_report(
    codes_before, codes_after, embeddings, codebooks: Sequence[np.ndarray] | Reconstruction, moved, categories=None
) -> dict:
    """Measures semantic IDs before and after collision resolution (the same codes twice where none was needed).

    Args:
        codes_before (array-like of shape `(N, K)`): what the quantiser chose.
        codes_after (array-like of shape `(N, K)`): the IDs in use.
        embeddings (array-like of shape `(N, d)`): the embeddings behind them.
        codebooks (sequence of K arrays of shape `(V_k, d)`, or a [`Reconstruction`]): the centroids of each level, or
            a quantiser whose codes mean something else after other prefixes.
        moved (array-like of shape `(N,)`, bool): which items collision resolution moved.
        categories (sequence of N `str`, *optional*): what items are; empty where it is not known.

    Returns:
        `dict` that `json.dumps` accepts. Keys that do not end in `_before` describe `codes_after`:

        - `num_items`, `codebook_sizes`;
        - `utilization_before`, `utilization`: distinct IDs in use / possible IDs;
        - `collision_rate_before`, `collision_rate_after`: share of items that share their ID with another item;
        - `largest_bucket_before`, `largest_bucket_after`: most items on one ID;
        - `moved_share`: share of items moved;
        - `levels`: for each `level` (from 1) its `size`, codes `used`, `usage` (used / size), `perplexity`
          (the exponential of the entropy of the codes, `size` at best) and `prefixes` (distinct IDs cut off after it);
        - `reconstruction_mse_before`, `reconstruction_mse_after`: (embedding - what the codes stand for)^2, mean over
          entries;
        - `explained_variance_before`: for each level, the share of the variance explained by the levels up to it;
        - `forced_share`: for each level, the share of items whose prefix leaves one valid code, which costs no model
          work; `forced_share_overall` is its mean over levels;
        - `prefix_purity`, with `categories` only: for each level, how often another item with the same prefix up to it
          has the same category: the mean over items that have both company and a category, `None` where none has.

    Raises:
        ValueError: the arguments do not fit together.
    """
    books = as_reconstruction(codebooks)
    sizes = books.codebook_sizes
    codes_before, codes_after = np.asarray(codes_before), np.asarray(codes_after)
    check_codes(codes_before, sizes)
    check_codes(codes_after, sizes)
    embeddings = check_embeddings(embeddings, len(codes_before))
    moved = np.asarray(moved, dtype=bool)
    if not len(codes_before) == len(codes_after) == len(moved):
        raise ValueError(
            "`codes_before`, `codes_after` and `moved` must have one row an item, "
            f"got {len(codes_before)}, {len(codes_after)} and {len(moved)} rows."
        )
    nodes = prefix_ids(codes_after)
    buckets_before, buckets_after = np.bincount(prefix_ids(codes_before)[-1]), np.bincount(nodes[-1])
    errors_before = _errors(codes_before, embeddings, books)
    forced = _forced_share(nodes)
    purity = {} if categories is None else {"prefix_purity": _prefix_purity(nodes, categories)}
    return {
        "num_items": len(codes_after),
        "codebook_sizes": list(sizes),
        "utilization_before": len(buckets_before) / math.prod(sizes),
        "utilization": len(buckets_after) / math.prod(sizes),
        "collision_rate_before": _collision_rate(buckets_before),
        "collision_rate_after": _collision_rate(buckets_after),
        "largest_bucket_before": int(buckets_before.max()),
        "largest_bucket_after": int(buckets_after.max()),
        "moved_share": float(moved.mean()),
        "levels": [_level_usage(k, size, codes_after[:, k], nodes[k]) for k, size in enumerate(sizes)],
        "reconstruction_mse_before": errors_before[-1],
        "reconstruction_mse_after": _errors(codes_after, embeddings, books)[-1],
        "explained_variance_before": _explained(errors_before, embeddings),
        "forced_share": forced,
        "forced_share_overall": sum(forced) / len(forced),
    } | purity


def check_categories(categories, num_items: int) -> None:
    """Raises `ValueError` unless there is one category an item."""
    if len(categories) != num_items:
        raise ValueError(f"`categories` has {len(categories)} entries for {num_items} items; give one an item.")


def format_report(report: dict) -> str:
    """A quality report, of `quality_report` or `ItemTokenizer.report`, as a small text table."""
    about = f", {report['method']}" if "method" in report else ""
    if "width" in report:
        about += f" on {report['width']} directions with {report['projected_variance']:.1%} of the variance"
    lines = [
        f"{report['num_items']:,} items, codebook sizes {tuple(report['codebook_sizes'])}{about}",
        f"collisions  {report['collision_rate_before']:.2%} of items before, {report['collision_rate_after']:.2%} after"
        f" (largest bucket before {report['largest_bucket_before']:,}, {report['moved_share']:.2%} of items moved)",
        f"mse         {report['reconstruction_mse_before']:.4g} before, {report['reconstruction_mse_after']:.4g} after",
        f"IDs in use  {report['utilization']:.3g} of those possible",
        f"{'level':>5} {'used':>7} {'size':>7} {'usage':>7} "
        f"{'perplexity':>11} {'prefixes':>10} {'explained':>10} {'forced':>7}",
    ]
    columns = (report["levels"], report["explained_variance_before"], report["forced_share"])
    for level, explained, forced in zip(*columns, strict=True):
        lines.append(
            f"{level['level']:>5} {level['used']:>7,} {level['size']:>7,} {level['usage']:>7.1%} "
            f"{level['perplexity']:>11,.1f} {level['prefixes']:>10,} {explained:>10.1%} {forced:>7.1%}"
        )
    if "prefix_purity" in report:
        shares = " ".join("-" if share is None else f"{share:.1%}" for share in report["prefix_purity"])
        lines.append(f"purity      {shares} of the others with an item's prefix have its category, by level")
    return "\n".join(lines)


def _collision_rate(buckets: np.ndarray) -> float:
    return float(buckets[buckets > 1].sum() / buckets.sum())


def _level_usage(level: int, size: int, column: np.ndarray, nodes: np.ndarray) -> dict:
    counts = np.bincount(column, minlength=size)
    shares = counts[counts > 0] / len(column)
    return {
        "level": level + 1,
        "size": size,
        "used": len(shares),
        "usage": len(shares) / size,
        "perplexity": float(np.exp(-(shares * np.log(shares)).sum())),
        "prefixes": int(nodes.max()) + 1,
    }


def _errors(codes: np.ndarray, embeddings: np.ndarray, books: Reconstruction) -> list[float]:
    """Mean squared entry of the residual after each level."""
    sums = np.zeros(codes.shape[1])
    for start in range(0, len(codes), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        residuals = list(books.residuals(embeddings[rows], codes[rows]))
        sums += [np.square(residual).sum(dtype=np.float64) for residual in residuals[1:]]
    return (sums / embeddings.size).tolist()


def _explained(errors: list[float], embeddings: np.ndarray) -> list[float]:
    mean = embeddings.mean(axis=0, dtype=np.float64)
    square = sum(np.square(embeddings[s : s + CHUNK_ROWS] - mean).sum() for s in range(0, len(embeddings), CHUNK_ROWS))
    variance = float(square) / embeddings.size
    return [1 - error / variance if variance else 0.0 for error in errors]  # no variance: nothing to explain


def _forced_share(nodes: list[np.ndarray]) -> list[float]:
    """Share of items whose prefix of length `k - 1` has one child, for each level `k`."""
    parents = [np.zeros_like(nodes[0]), *nodes[:-1]]
    shares = []
    for parent, child in zip(parents, nodes, strict=True):
        _, one_item_a_child = np.unique(child, return_index=True)
        num_children = np.bincount(parent[one_item_a_child])
        shares.append(float((num_children[parent] == 1).mean()))
    return shares


def _prefix_purity(nodes: list[np.ndarray], categories) -> list[float | None]:
    """For each level, the mean over items of the share of others with their prefix that have their category."""
    check_categories(categories, len(nodes[0]))
    _, labels = np.unique([str(category) for category in categories], return_inverse=True)
    known = np.array([bool(category) for category in categories])
    return [_agreement(node[known], labels[known]) for node in nodes]


def _agreement(node: np.ndarray, labels: np.ndarray) -> float | None:
    if not node.size:
        return None
    company = np.bincount(node)[node] - 1
    _, pair, count = np.unique(node * (int(labels.max()) + 1) + labels, return_inverse=True, return_counts=True)
    alike = count[pair] - 1
    return float((alike[company > 0] / company[company > 0]).mean()) if (company > 0).any() else None
