"""NDCG@k and Recall@k as modules of `evaluate`, for any recommender that returns lists of items."""

from __future__ import annotations

from pathlib import Path

NAMES = ("ndcg_at_k", "recall_at_k")


def load(name: str, config_name: str | None = None, **kwargs):
    """Load a metric of this package with `evaluate.load`, without network.

    Args:
        name (`str`): `"ndcg_at_k"` or `"recall_at_k"`.
        config_name (`str`, *optional*): `"slices"` for a metric that also takes `groups`, the names of the slices that
            each example is in; its results hold every slice as well.
        kwargs: Any other argument of `evaluate.load`, such as `keep_in_memory`, `num_process` or `experiment_id`.

    Returns:
        `evaluate.Metric`

    Raises:
        ValueError: If there is no such metric or configuration.
        ModuleNotFoundError: If `evaluate` is not installed.

    Example:
        ```python
        >>> from hf_deco import metrics
        >>> ndcg = metrics.load("ndcg_at_k", keep_in_memory=True)
        >>> ndcg.compute(predictions=[["milk", "tea"], ["soap"]], references=["tea", "rice"], k=[1, 10])
        {'ndcg@1': 0.0, 'ndcg@10': 0.31546487678572877}

        ```
    """
    if name not in NAMES:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}, got {name!r}.")
    if config_name not in (None, "default", "slices"):
        raise ValueError(f"`config_name` must be 'default' or 'slices', got {config_name!r}.")
    try:
        import evaluate
    except ModuleNotFoundError as error:
        if error.name != "evaluate":
            raise
        message = "The metrics need `evaluate`: pip install 'hf_deco[metrics]'."
        raise ModuleNotFoundError(message, name="evaluate") from None
    return evaluate.load(str(Path(__file__).parent / name), config_name, **kwargs)
