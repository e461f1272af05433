"""The grocery log as a stream, on a small stand-in for the package's files."""

import numpy as np
import pandas as pd
import pytest

from hf_deco.data.events import read_event_log, read_item_texts
from hf_deco.data.grocery import prepare_grocery_stream
from hf_deco.data.roles import read_roles


@pytest.fixture
def source(tmp_path):
    """Product 1 is bought twice, 2 once, 3 has no name, 4 is on display alone."""
    folder = tmp_path / "source"
    folder.mkdir()
    columns = ["household_id", "product_id", "basket_id", "sales_value", "transaction_timestamp", "week"]
    rows = [
        (7, 1, 50, 1.5, "2017-01-02", 1),
        (7, 2, 50, 2.0, "2017-01-02", 1),
        (8, 1, 51, 3.0, "2017-01-09", 2),
        (8, 3, 51, 1.0, "2017-01-09", 2),
    ]
    log = pd.DataFrame(rows, columns=columns)
    log["transaction_timestamp"] = pd.to_datetime(log["transaction_timestamp"])
    log["retail_disc"], log["coupon_disc"], log["coupon_match_disc"] = [0.0, 0.5, 0.0, 0.0], 0.0, [0.0, 0.0, 0.1, 0.0]
    log.to_parquet(folder / "transactions.parquet")
    products = pd.DataFrame({"product_id": [1, 2, 3, 4], "product_type": ["TEA", "RICE", None, "SOAP"]})
    products["package_size"], products["brand"] = ["1 LB", None, None, None], "National"
    products["department"], products["product_category"], products["manufacturer_id"] = "GROCERY", "FOOD", 9
    products.to_parquet(folder / "products.parquet")
    names = ("age", "income", "home_ownership", "marital_status", "household_size", "household_comp", "kids_count")
    pd.DataFrame({"household_id": [8], **{name: ["x"] for name in names}}).to_parquet(folder / "demographics.parquet")
    shown = pd.DataFrame({"product_id": [1, 1, 2, 4], "store_id": [5, 6, 5, 5], "week": [2, 2, 1, 1]})
    shown.to_parquet(folder / "promotions.parquet")
    return folder


def read(roles):
    roles = read_roles(roles)
    items = read_item_texts(roles.items)
    return items, read_event_log(roles, items, np.zeros((len(items), 2)))


def test_purchases_discounts_displays_and_demographics_have_their_roles(source, tmp_path):
    items, log = read(prepare_grocery_stream(tmp_path / "data", 1, source))
    assert items.item_ids.tolist() == ["1", "2"]
    assert items.texts.tolist() == ["TEA, 1 LB. National brand. GROCERY > FOOD", "RICE. National brand. GROCERY > FOOD"]
    assert log.behaviors == ("clicks", "conversions") and log.grades.tolist() == [1, 2, 2]
    assert log.weights.tolist() == [1.5, 2.0, 3.0] and log.periods.tolist() == [1, 1, 2]
    assert log.requests.tolist() == [0, 0, 1] and log.user_ids.tolist() == ["7", "8"]
    assert (log.user_categories[0] == -1).all() and (log.user_categories[1] == 0).all()
    assert list(zip(log.shown_items.tolist(), log.shown_periods.tolist(), strict=True)) == [(1, 1), (0, 2)]
    assert (log.shown_users == -1).all()
    assert [feature.name for feature in log.item_features][-1] == "item_id" and len(log.user_features) == 7


def test_rare_products_are_left_out_and_tables_are_made_once(source, tmp_path):
    items, log = read(prepare_grocery_stream(tmp_path / "data", 2, source))
    assert items.item_ids.tolist() == ["1"] and log.weights.tolist() == [1.5, 3.0]
    (source / "transactions.parquet").unlink()
    assert read(prepare_grocery_stream(tmp_path / "data", 2, source))[0].item_ids.tolist() == ["1"]
