"""Metrics as a table to read."""

from __future__ import annotations


def format_metrics(metrics: dict[str, dict[str, float]], cutoffs: list[int]) -> str:
    """Systems as rows, NDCG@k and Recall@k as columns, those of repeat and new targets beside them where both occur.

    Args:
        metrics (`dict`): Metrics of every system, as an [`Evaluator`] returns them.
        cutoffs (`list[int]`): The cutoffs `k`.

    Returns:
        `str`: a Markdown table.
    """
    names = [f"ndcg@{cutoffs[0]}", *(f"recall@{k}" for k in cutoffs)]
    if all(f"{part}/{names[0]}" in row for row in metrics.values() for part in ("repeat", "new")):
        names += [f"{part}/{names[0]}" for part in ("repeat", "new")]
    lines = ["| system | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for system, row in metrics.items():
        lines.append(f"| {system} | " + " | ".join(f"{row[name]:.4f}" for name in names) + " |")
    return "\n".join(lines)
