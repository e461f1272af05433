"""Tables and pictures of a comparison of item tokenizers.

    python recipes/tokenizer_report.py recipes/results/tokenizers.json

prints the tables anew; `compare_tokenizers.py` does all of it at its end.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hf_deco.training.results import read_rows

# Heading, metric of a row, and how a mean and a deviation of it are written.
COLUMNS: tuple[tuple[str, Callable, str], ...] = (
    ("util %", lambda m: 100 * m["utilization"], "{:.2f}"),
    ("collisions %", lambda m: 100 * m["collision_rate_after"], "{:.1f}"),
    ("MSE e-3", lambda m: 1000 * m["mse"], "{:.3f}"),
    ("largest bucket", lambda m: m["largest_bucket_after"], "{:.0f}"),
)
CHANGED = ("SIDs changed %", lambda m: 100 * m["changed_share"], "{:.1f}")
TOY_COLUMNS = (
    ("util %", lambda m: 100 * m["utilization"], "{:.1f}"),
    ("perplexity", lambda m: m["perplexity"], "{:.0f}"),
    ("MSE", lambda m: m["mse"], "{:.4f}"),
)


def summarise(rows: list[dict]) -> str:
    """Every part of a study as a table: mean and, after ±, the deviation over seeds."""
    parts = []
    for dataset in _values(rows, lambda row: row["dataset"] if row["protocol"] == "static" else None):
        for shape in ("progressive", "uniform"):
            found = [r for r in rows if (r["dataset"], r["config"].get("sizes")) == (dataset, shape)]
            if found:
                sizes = tuple(found[0]["config"]["codebook_sizes"])
                parts += [f"## {dataset}, {shape} sizes {sizes}", _table(found, (*COLUMNS, *_level_columns(found)))]
    for protocol in _values(rows, lambda row: row["protocol"] if row["protocol"].startswith("drift/") else None):
        found = [row for row in rows if row["protocol"] == protocol]
        strength = found[0]["config"]["stream"]["strength"]
        title = f"## {found[0]['dataset']}, {protocol}, strength {strength:g}"
        parts += [title, _table(found, (*COLUMNS, *_level_columns(found), CHANGED))]
    toy = [row for row in rows if row["protocol"] == "toy"]
    return "\n\n".join([*parts, "## Appendix A's toy", _table(toy, TOY_COLUMNS)] if toy else parts)


def _values(rows: list[dict], of: Callable) -> list[str]:
    return list(dict.fromkeys(value for value in map(of, rows) if value is not None))


def _level_columns(rows: list[dict]) -> tuple:
    """Perplexity as a share of the size, and purity, of every level."""
    sizes = rows[0]["config"]["codebook_sizes"]
    columns = [
        (f"perplexity {k + 1} %", lambda m, k=k: 100 * m["perplexity"][k] / sizes[k], "{:.0f}")
        for k in range(len(sizes))
    ]
    if rows[0]["metrics"]["prefix_purity"]:
        columns += [(f"purity {k + 1} %", lambda m, k=k: 100 * m["prefix_purity"][k], "{:.1f}") for k in range(2)]
    return tuple(columns)


def _table(rows: list[dict], columns) -> str:
    head = ["tokenizer", "seeds", *(name for name, *_ in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for system in _values(rows, lambda row: row["system"]):
        found = [row for row in rows if row["system"] == system]
        cells = [_cell([value(row["metrics"]) for row in found], form) for _, value, form in columns]
        lines.append("| " + " | ".join([system, str(len(found)), *cells]) + " |")
    return "\n".join(lines)


def _cell(values: list[float], form: str) -> str:
    mean = form.format(statistics.mean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def _figure(rows: int, columns: int, size: tuple[float, float]):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_study(rows: list[dict], path: Path) -> None:
    """Draw collisions against error: a panel a data set at rest, and a panel a drift below."""
    static = [row for row in rows if row["protocol"] == "static" and "/" not in row["system"]]
    panels = {dataset: [r for r in static if r["dataset"] == dataset] for dataset in _values(static, _dataset)}
    drifts = {name: [r for r in rows if r["protocol"] == name] for name in _values(rows, _drift)}
    figure, axes = _figure(2, max(len(panels), len(drifts)), (4.2, 3.6))
    colors = {system: f"C{index}" for index, system in enumerate(_values(rows, lambda r: _method(r["system"])))}
    for row_of_axes, content in zip(axes, (panels, drifts), strict=True):
        for axis in row_of_axes[len(content) :]:
            axis.set_axis_off()
        for axis, (title, found) in zip(row_of_axes, content.items(), strict=False):
            _draw_panel(axis, title, found, colors)
    labels = {"●": "progressive sizes", "○": "uniform sizes"}
    figure.suptitle(
        ", ".join(f"{mark} {text}" for mark, text in labels.items()) + "; lower left is better", fontsize=10
    )
    figure.savefig(path, dpi=130, format="png")


def _dataset(row: dict) -> str:
    return row["dataset"]


def _drift(row: dict) -> str | None:
    return row["protocol"] if row["protocol"].startswith("drift/") else None


def _shape(row: dict) -> str:
    return row["config"].get("sizes", "progressive")


def _method(system: str) -> str:
    return system.split("/")[0]


def _draw_panel(axis, title: str, rows: list[dict], colors: dict[str, str]) -> None:
    for system in _values(rows, lambda row: row["system"]):
        for shape in _values(rows, lambda row: row["config"].get("sizes", "progressive")):
            found = [
                r["metrics"] for r in rows if (r["system"], r["config"].get("sizes", "progressive")) == (system, shape)
            ]
            x, y = (statistics.mean(m[name] for m in found) for name in ("mse", "collision_rate_after"))
            face = colors[_method(system)] if shape == "progressive" else "none"
            axis.scatter(1000 * x, 100 * y, s=36, edgecolors=colors[_method(system)], facecolors=face)
            if shape == "progressive":
                axis.annotate(system, (1000 * x, 100 * y), textcoords="offset points", xytext=(5, 4), fontsize=7)
    axis.set(title=title, xlabel="MSE, 1e-3", ylabel="items that share a SID, %")
    axis.margins(0.3, 0.2)
    axis.grid(alpha=0.3)


def plot_toy(points: np.ndarray, panels: dict[str, dict], path: Path) -> None:
    """Draw the toy's first two coordinates: points, codes in use, and dead codes."""
    columns = (len(panels) + 1) // 2
    figure, axes = _figure(2, columns, (3.4, 3.4))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (system, panel) in zip(axes.flat, panels.items(), strict=False):
        codebook, used = panel["codebook"], panel["used"]
        axis.scatter(*points[:3000, :2].T, s=2, color="0.8")
        axis.scatter(*codebook[used, :2].T, s=6, color="tab:blue", label=f"{used.sum()} in use")
        axis.scatter(*codebook[~used, :2].T, s=6, color="tab:red", label=f"{(~used).sum()} dead")
        axis.set(title=system, xticks=[], yticks=[])
        axis.legend(fontsize=7, loc="upper right")
    figure.savefig(path, dpi=130, format="png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="JSON file of the study")
    print(summarise(read_rows(parser.parse_args().rows)))
