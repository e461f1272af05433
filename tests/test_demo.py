"""The demonstration on a small stand-in for the grocery log."""

import json

import numpy as np
import pandas as pd
import pytest

from hf_deco.demo import prepare_grocery, run_demo


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Files like the package's: 60 households, 30 products, one without a name, one hardly bought."""
    folder = tmp_path_factory.mktemp("grocery")
    random = np.random.default_rng(0)
    rows = []
    for household in range(60):
        product = int(random.integers(28))
        for day in np.sort(random.integers(0, 300, size=20)):
            rows.append((household, 100 + product, pd.Timestamp("2017-01-01") + pd.Timedelta(days=int(day))))
            product = (product + 5) % 28 if random.random() < 0.8 else int(random.integers(28))
    rows += [
        (0, 128, pd.Timestamp("2017-02-01")),
        (0, 129, pd.Timestamp("2017-02-01")),
        (0, 129, pd.Timestamp("2017-02-02")),
    ]
    log = pd.DataFrame(rows, columns=["household_id", "product_id", "transaction_timestamp"])
    log["quantity"] = 1
    log.to_parquet(folder / "transactions.parquet")
    kinds = ["BREAD", "MILK", "APPLES", "SOAP", "TEA", "RICE"]
    products = pd.DataFrame({"product_id": np.arange(100, 130)})
    products["product_type"] = [f"{kinds[index % 6]} {index}" for index in range(29)] + [None]
    products["package_size"] = ["1 LB" if index % 2 else None for index in range(30)]
    products["brand"] = ["National" if index % 3 else None for index in range(30)]
    products["department"], products["product_category"] = (
        "GROCERY",
        ["FOOD" if index % 2 else None for index in range(30)],
    )
    products.to_parquet(folder / "products.parquet")
    return folder


def test_the_products_bought_most_are_kept_with_title_and_text(source, tmp_path):
    log_file, item_file = prepare_grocery(tmp_path, 28, source)
    log, items = pd.read_parquet(log_file), pd.read_parquet(item_file)
    assert list(log.columns) == ["user_id", "item_id", "timestamp"] and len(log) == 60 * 20
    assert set(items["item_id"]) == set(range(100, 128)) == set(log["item_id"])  # 128 is rare, 129 has no name
    texts = items.set_index("item_id")
    assert texts.loc[101, "title"] == "MILK 1, 1 LB"
    assert texts.loc[101, "text"] == "MILK 1, 1 LB. National brand. GROCERY > FOOD"
    assert texts.loc[102, "text"] == "APPLES 2. National brand. GROCERY"
    assert texts.loc[103, "text"] == "SOAP 3, 1 LB. GROCERY > FOOD"


def test_the_demonstration_trains_tests_and_recommends(source, tmp_path, capsys):
    options = {"codebook_sizes": [6, 6], "max_steps": 3, "eval_steps": 3, "save_steps": 3, "warmup_steps": 1}
    options |= {"num_beams": 28, "cutoffs": [10, 20], "disable_tqdm": True, "bf16": False}
    metrics = run_demo(str(tmp_path), 28, source, **options)
    assert list(metrics) == ["deco_ce", "popularity", "text_neighbors", "cooccurrence"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    text = capsys.readouterr().out
    assert all(f"| {system} |" in text for system in metrics)
    shown = text.split("Recommended next:\n")[1].split("Bought next:")[0].strip("\n").split("\n")
    assert len(shown) == 10 and all(kind[:1].isdigit() for kind in (line.split()[2] for line in shown))
    assert run_demo(str(tmp_path), 28, source, **options) == metrics  # a second time it only shows
    with pytest.raises(ValueError, match="holds a finished run with another `interactions`"):
        run_demo(str(tmp_path), 20, source, **options)
