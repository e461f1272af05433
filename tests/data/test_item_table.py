"""Reading item tables: every source, ids as strings, joined texts, and refusals that say what to do."""

import json

import datasets
import pandas as pd
import pytest

from hf_deco.data import read_items


@pytest.fixture
def rows():
    return {"item_id": ["00123", "NA", "b"], "text": ["A soap", "A comb.", "A brush"], "title": ["Soap", "Comb", None]}


def _write(rows, path):
    table = pd.DataFrame(rows)
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in table.astype(object).to_dict("records")))
    return path


def _source(rows, kind, tmp_path):
    if kind == "frame":
        return pd.DataFrame(rows, index=[7, 8, 9])
    if kind == "dataset":
        return datasets.Dataset.from_dict(rows)
    return _write(rows, tmp_path / f"items.{kind}")


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "json", "frame", "dataset"])
def test_every_source_gives_the_same_table(rows, kind, tmp_path):
    table = read_items(_source(rows, kind, tmp_path))

    assert len(table) == 3
    assert table.item_ids.tolist() == ["00123", "NA", "b"]  # zeros kept, "NA" is a name
    assert table.texts.tolist() == ["A soap", "A comb.", "A brush"]
    assert table.titles.tolist() == ["Soap", "Comb", ""]


def test_path_as_string_and_upper_case_extension(rows, tmp_path):
    path = _write(rows, tmp_path / "items.csv").rename(tmp_path / "ITEMS.CSV")
    assert read_items(str(path)).item_ids.tolist() == ["00123", "NA", "b"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "frame", "dataset"])
def test_integer_ids_become_their_digits(kind, tmp_path):
    rows = {"item_id": [123, 45, 2**60 + 1], "text": ["a", "b", "c"]}
    assert read_items(_source(rows, kind, tmp_path)).item_ids.tolist() == ["123", "45", "1152921504606846977"]


def test_text_columns_join_into_sentences_without_empty_ones():
    rows = pd.DataFrame(
        {
            "sku": ["a", "b", "c", "d"],
            "name": ["Soap", "Comb.", None, "Why?"],
            "brand": ["Acme", "", "  Zeta  ", None],
            "price": [3, 4, 5, 6],
        }
    )
    table = read_items(rows, item_column="sku", text_columns=("name", "brand", "price"))
    assert table.texts.tolist() == ["Soap. Acme. 3", "Comb. 4", "Zeta. 5", "Why? 6"]
    assert table.titles is None


def test_a_title_column_may_be_a_text_column_too(rows):
    rows["title"] = ["Soap", "Comb", "Brush"]
    table = read_items(pd.DataFrame(rows), text_columns=["title"])
    assert table.texts.tolist() == table.titles.tolist() == ["Soap", "Comb", "Brush"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"item_column": "asin"}, r"column `asin` is not in .*\['item_id', 'text', 'title'\].*`item_column`"),
        ({"text_columns": ["text", "brand"]}, r"column `brand` is not in .*`text_columns`"),
        ({"title_column": "name"}, r"column `name` is not in .*`title_column`"),
        ({"text_columns": "text"}, r"`text_columns` is 'text'; pass a sequence"),
        ({"text_columns": ()}, r"`text_columns` is \(\); pass a sequence"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "frame", "dataset"])
def test_wrong_columns_are_refused(rows, options, message, kind, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_items(_source(rows, kind, tmp_path), **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"item_id": ["a", "b", "a", "c", "c", "c"], "text": ["x"] * 6},
            r"`item_id` names 2 items more than once \(first few: 'a', 'c'\)",
        ),
        (
            {"item_id": ["a", "b", "c"], "text": ["x", " ", None]},
            r"2 of 3 items have no text in `text_columns`=\('text',\) \(first few: 'b', 'c'\)",
        ),
        (
            {"item_id": ["a", None], "text": ["x", "y"]},
            r"`item_id` has null or empty ids in 1 of 2 rows, first in row 1",
        ),
        ({"item_id": ["", "b"], "text": ["x", "y"]}, r"`item_id` has null or empty ids in 1 of 2 rows, first in row 0"),
        ({"item_id": [1.0, 2.0], "text": ["x", "y"]}, r"`item_id` holds floats \(first value 1.0\)"),
        ({"item_id": ["a", "b"], "text": ["x", ["y", "z"]]}, r"`text` holds lists, first in row 1: \['y', 'z'\]"),
        ({"item_id": [], "text": []}, r"`source` has no rows"),
    ],
)
def test_bad_rows_are_refused(rows, message):
    table = pd.DataFrame(rows)
    table.index += 5  # row numbers in messages count from the top, whatever the index says
    with pytest.raises(ValueError, match=message):
        read_items(table)


def test_sources_that_cannot_be_read(rows, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`source` is '.*nothing\.csv', and there is no such file"):
        read_items(tmp_path / "nothing.csv")
    with pytest.raises(ValueError, match=r"items\.xlsx'; only \.csv, \.parquet, \.jsonl, \.json files"):
        read_items(tmp_path / "items.xlsx")
    with pytest.raises(TypeError, match=r"`source` is a DatasetDict; pass .* one split"):
        read_items(datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}))


def test_json_lines_that_are_not_objects(tmp_path):
    path = tmp_path / "items.json"
    path.write_text(json.dumps([{"item_id": "a", "text": "x"}]))
    with pytest.raises(ValueError, match=r"line 1 of '.*items\.json' is not a JSON object; write one object a line"):
        read_items(path)
    path.write_text('{"item_id": "a", "text": "x"}\n\n{"item_id": "b", \n')
    with pytest.raises(ValueError, match=r"line 3 of '.*items\.json' is not a JSON object"):
        read_items(path)
