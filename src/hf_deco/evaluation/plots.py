"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path


def plot_training(log_history: list[dict], path: str | Path) -> None:
    """Draw training loss and validation NDCG@10 over steps.

    Args:
        log_history (`list[dict]`): What [`transformers.Trainer`] logged (`trainer.state.log_history`).
        path (`str` or `Path`): PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    left.set(xlabel="step", ylabel="training loss (nats per item)")
    right = left.twinx()
    right.set_ylabel("validation NDCG@10")
    lines = []
    for axis, key, color, style in ((left, "loss", "tab:blue", "-"), (right, "eval_ndcg@10", "tab:orange", "o-")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            lines += axis.plot(*zip(*points, strict=True), style, color=color, markersize=4, label=axis.get_ylabel())
    left.grid(alpha=0.3)
    left.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.savefig(path, dpi=130, format="png")


def plot_tradeoff(points: dict[str, tuple[float, float]], path: str | Path) -> None:
    """Draw systems in the plane of throughput and accuracy.

    Args:
        points (`dict[str, tuple[float, float]]`): Users per second and NDCG@10 of every system.
        path (`str` or `Path`): PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set(xlabel="users per second", ylabel="NDCG@10", xscale="log")
    for system, (speed, accuracy) in points.items():
        axis.scatter(speed, accuracy, s=36)
        axis.annotate(system, (speed, accuracy), textcoords="offset points", xytext=(6, 4))
    axis.margins(0.15)
    axis.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=130, format="png")


def plot_lines(
    lines: dict[str, list[tuple[float, float]]], x_label: str, y_label: str, path: str | Path, scale: str = "log"
) -> None:
    """Draw a line of points for every system.

    Args:
        lines (`dict[str, list[tuple[float, float]]]`): Points of every system.
        x_label, y_label (`str`): What the axes show.
        path (`str` or `Path`): PNG file to write.
        scale (`str`): Scale of both axes, `"log"` or `"linear"`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set(xlabel=x_label, ylabel=y_label, xscale=scale, yscale=scale)
    for system, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=system)
    axis.grid(alpha=0.3, which="both")
    if lines:
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130, format="png")
