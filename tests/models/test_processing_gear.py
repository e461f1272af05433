"""GEAR's processor: users and items by name to what the model reads, saved and loaded, and what it refuses."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from gear_models import make_gear
from remote_code import import_closure
from transformers import AutoProcessor

from hf_deco import GearConfig, GearProcessor
from hf_deco.models.categories_gear import Category

FEATURES = {
    "item_features": [Category("brand", buckets=7), Category("department", ("food", "garden", "tools"))],
    "user_features": [
        Category("age", ("20", "30", "40", "50")),
        Category("income", ("low", "middle", "high")),
        Category("town", buckets=6),
    ],
}
BEHAVIORS = [{"name": "clicks", "length": 5}, {"name": "conversions", "length": 3}]
ITEMS = ["apple", "bulb", "hammer", "żółw 🐢", "item,5"]
CONTENT = torch.arange(25.0).view(5, 5)
CATEGORIES = torch.tensor([[11, 0], [-1, 1], [9, 2], [3, 3], [-1, -1]])


def build(**options):
    given = {
        **FEATURES,
        "behaviors": BEHAVIORS,
        "embedding_model": "minilm",
        "text_columns": ["title", "text"],
    } | options
    return GearProcessor(ITEMS, CONTENT, CATEGORIES, **given)


def assert_same(processor, expected):
    assert processor.item_ids == expected.item_ids
    assert torch.equal(processor.content, expected.content) and processor.content.dtype == torch.float32
    assert torch.equal(processor.item_categories, expected.item_categories)
    for name in (*FEATURES, "behaviors", "embedding_model", "text_columns", "unknown_items"):
        assert getattr(processor, name) == getattr(expected, name), name


def test_users_become_a_table_of_distinct_items_and_rows_of_it():
    inputs = build()(
        [
            {"clicks": ["hammer", "apple", "hammer"], "conversions": ["hammer"]},
            {"conversions": ["żółw 🐢", "apple"]},
            {},
        ],
        [{"age": 30, "town": "Łódź"}, None, {"income": "high", "age": 31}],
    )
    assert set(inputs) == set(GearProcessor.model_input_names)
    assert torch.equal(inputs["content"], CONTENT[[0, 2, 3]]) and torch.equal(inputs["item_ids"], CATEGORIES[[0, 2, 3]])
    assert [rows.tolist() for rows in inputs["behaviors"]] == [
        [[1, 0, 1], [-1, -1, -1], [-1, -1, -1]],
        [[1, -1], [2, 0], [-1, -1]],
    ]
    town = Category("town", buckets=6).encode(["Łódź"])[0]
    assert inputs["user_ids"].tolist() == [[1, -1, town], [-1, -1, -1], [4, 2, -1]] and town > 2**40


def test_only_the_latest_items_of_a_behaviour_are_read():
    clicks = ["apple", "bulb", "hammer", "item,5", "bulb", "bulb", "apple"]
    inputs = build()([{"clicks": clicks, "conversions": clicks}])
    for rows, length in zip(inputs["behaviors"], (5, 3), strict=True):
        latest = [ITEMS.index(item) for item in clicks[-length:]]
        assert torch.equal(inputs["content"][rows[0]], CONTENT[latest])


def test_nobody_has_done_anything():
    model, processor = make_gear(), build()
    inputs = processor([{}, {"clicks": []}])
    assert inputs["content"].shape == (0, 5) and [rows.shape for rows in inputs["behaviors"]] == [(2, 0), (2, 0)]
    model.set_catalog(torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 1, 0]]))
    found = model.generate(**inputs, num_beams=2, num_return_sequences=2, return_dict_in_generate=True)
    assert found.sequences_scores.isfinite().all() and torch.equal(found.sequences[:2], found.sequences[2:])
    none = processor([])
    assert none["user_ids"].shape == (0, 3) and model.generate(**none, num_beams=2).shape == (0, 3)


def test_unknown_items_of_a_history_are_named_or_dropped():
    histories = [{"clicks": ["apple", "pear", "bulb"]}]
    with pytest.raises(ValueError, match="`items` holds 1 ids that are none of the 5 known items: 'pear'. Leave them"):
        build()(histories)
    for inputs in (build()(histories, unknown_items="drop"), build(unknown_items="drop")(histories)):
        assert torch.equal(inputs["content"][inputs["behaviors"][0][0]], CONTENT[:2])


def test_items_are_read_by_id():
    inputs = build().item_inputs(["hammer", "apple"])
    assert torch.equal(inputs["content"], CONTENT[[2, 0]]) and torch.equal(inputs["item_ids"], CATEGORIES[[2, 0]])
    assert torch.equal(build().item_inputs()["content"], CONTENT)
    with pytest.raises(ValueError, match="'pear'"):
        build(unknown_items="drop").item_inputs(["pear"])  # to drop one would shift the others


def test_an_update_adds_items_changes_known_ones_and_leaves_the_old_processor():
    processor = build()
    content = torch.full((3, 5), 7.0) + torch.arange(3)[:, None]
    later = processor.update(["saw", "bulb", "rake"], content, [{"department": "tools", "brand": "acme"}, {}, None])
    assert_same(processor, build())
    assert list(later.item_ids) == [*ITEMS, "saw", "rake"]
    assert torch.equal(later.content, torch.cat([CONTENT[:1], content[1:2], CONTENT[2:], content[[0, 2]]]))
    acme = Category("brand", buckets=7).encode(["acme"])[0]
    assert later.item_categories.tolist() == [
        *[CATEGORIES[0].tolist(), [-1, -1]],
        *CATEGORIES[2:].tolist(),
        *[[acme, 2], [-1, -1]],
    ]
    assert later.update([], torch.empty(0, 5)).item_ids == later.item_ids
    assert processor.update(["bulb"], content[:1]).item_ids == processor.item_ids


@pytest.mark.parametrize("values", [(["x", "y"], None), (None, 5)])
def test_a_feature_encodes_missing_known_and_unseen_values(values):
    feature = Category("kind", *values)
    found = feature.encode(["x", None, math.nan, "y", "z", "x"])
    assert found[1] == found[2] == -1 and found[0] == found[5] and len({found[0], found[3], found[4]}) == 3
    assert min(found[0], found[3], found[4]) >= 0
    if values[0]:
        assert found == [0, -1, -1, 1, 2, 0] and feature.encode(["z", "zz"]) == [2, 2]
    assert Category(**json.loads(json.dumps(feature.to_dict()))) == feature
    assert feature.entry["size"] == (2 if values[0] else 5)


def test_whole_numbers_read_alike_however_they_are_stored():
    numbers = Category("size", ("1", "2", "2.5"))
    assert numbers.encode([1, 1.0, "1", 2.5, "2.5", True]) == [0, 0, 0, 2, 2, 3]


def test_values_of_a_feature_are_taken_as_they_read():
    feature = Category("age", values=[1, 2.0, np.float32(3), "x"])
    assert feature == Category("age", ("1", "2", "3", "x"))
    assert feature.encode([1, "2", 3.0, "x", 4]) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"feature `age` needs distinct `values`, at least one, got \('1', '1'\)"):
        Category("age", values=[1, 1.0])


@pytest.mark.parametrize("feature", [Category("size", ("3", "2.5", "True")), Category("size", buckets=9)])
def test_scalars_of_other_libraries_read_as_pythons(feature):
    scalars = [np.float32(3), np.int64(3), np.array(3), torch.tensor(3), torch.tensor(3.0), np.float16(2.5), np.True_]
    assert feature.encode(scalars) == feature.encode([3, 3, 3, 3, 3, 2.5, True])
    missing = [None, math.nan, np.float32("nan"), torch.tensor(math.nan), pd.NA, pd.NaT]
    assert feature.encode(missing) == [-1] * len(missing)


@pytest.mark.parametrize(
    "value",
    [[3], (3,), {3}, frozenset([3]), {"a": 3}, np.array([3]), np.array([1, 2]), torch.tensor([3]), pd.Series([3])],
)
def test_a_feature_names_itself_where_a_value_is_many(value):
    for feature in (Category("size", ("3",)), Category("size", buckets=9)):
        with pytest.raises(ValueError, match="feature `size` has one value an item or user, got"):
            feature.encode([3, value])


@pytest.mark.parametrize("auto_class", [GearProcessor, AutoProcessor])
def test_what_is_saved_is_loaded_with_its_code_alone(auto_class, tmp_path):
    build().save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is GearProcessor and repr(loaded) == repr(build())
    assert_same(loaded, build())
    assert_same(GearProcessor.from_pretrained(tmp_path, unknown_items="drop"), build(unknown_items="drop"))
    files = {path.name for path in tmp_path.iterdir()}
    assert files - {"catalog.safetensors", "processor_config.json"} == import_closure("processing_gear")


@pytest.mark.parametrize("damage", ["truncated", "no tensor", "no option"])
def test_a_damaged_folder_is_an_oserror(damage, tmp_path):
    build().save_pretrained(tmp_path)
    tensors, config = tmp_path / "catalog.safetensors", tmp_path / "processor_config.json"
    if damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif damage == "no tensor":
        tensors.write_bytes(tensors.read_bytes().replace(b'"content"', b'"kontent"'))
    else:
        config.write_text(config.read_text().replace('"behaviors"', '"behaviours"'))
    with pytest.raises(OSError, match="The processor files of .* are damaged or incomplete"):
        GearProcessor.from_pretrained(tmp_path)


def test_a_model_that_reads_other_features_is_told():
    config = make_gear().config
    build().check_config(config)
    for change in ({"behaviors": BEHAVIORS[:1]}, {"user_features": FEATURES["user_features"][:2]}):
        with pytest.raises(ValueError, match=f"The processor's `{next(iter(change))}` are not those of the model"):
            build(**change).check_config(config)
    with pytest.raises(ValueError, match=r"`content_size` are not those of the model \(5, not 384\)"):
        build().check_config(GearConfig())


@pytest.mark.parametrize(
    ("histories", "users", "message"),
    [
        ([["apple"]], None, r"`histories` must hold a mapping from clicks, conversions to item ids .* got \['apple'\]"),
        ([{}, {"clicks": "apple"}], None, "`histories` must hold a list of item ids for 'clicks', got 'apple'"),
        ([{"conversions": None}], None, "`histories` must hold a list of item ids for 'conversions', got None"),
        ([{"clicks": 3}], None, "`histories` must hold a list of item ids for 'clicks', got 3"),
        (
            [{"click": ["apple"]}],
            None,
            "`histories` names 'click', which this model does not read; did you mean 'clicks'",
        ),
        ([{}], [{"agee": 3}], "`users` names 'agee', which this model does not read; did you mean 'age'"),
        ([{}], [{"sex": 3}], "`users` names 'sex', .* known are age, income, town"),
        ([{}], ["old"], "`users` must hold mappings from names of features to values, or None, got 'old'"),
        ([{}], [{"age": [20]}], r"feature `age` has one value an item or user, got \[20\]"),
        ([{}, {}], [None], "`users` must hold features, or None, for each of 2 users, got 1"),
    ],
)
def test_bad_users_are_named(histories, users, message):
    with pytest.raises(ValueError, match=message):
        build()(histories, users)


@pytest.mark.parametrize(
    ("items", "content", "features", "message"),
    [
        (["a", "a"], torch.ones(2, 5), None, r"`items` must be distinct, .* got 2 \(1 distinct\), 2 and 2"),
        (["a"], torch.ones(2, 5), None, r"`items` must be distinct, with a row of `content`"),
        (["a"], torch.ones(1, 4), None, r"`content` must have shape \(num_items, 5\), got \(1, 4\)"),
        (["a"], torch.full((1, 5), torch.inf), None, "`content` holds NaN or infinite values"),
        (["a"], torch.ones(1, 5), [{"brandt": 1}], "`features` names 'brandt', .* did you mean 'brand'"),
    ],
)
def test_bad_new_items_are_named(items, content, features, message):
    with pytest.raises(ValueError, match=message):
        build().update(items, content, features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_ids": [*ITEMS[:4], "apple"]}, "`item_ids` must be unique; 1 are repeated, such as 'apple'"),
        ({"content": CONTENT[:4]}, r"must have shapes \(5, 5\) and \(5, 2\), got \(4, 5\) and \(5, 2\)"),
        ({"item_categories": CATEGORIES[:, :1]}, r"must have shapes .* got \(5, 5\) and \(5, 1\)"),
        ({"content": CONTENT.log()}, "`content` holds NaN or infinite values, first in row 0"),
        ({"unknown_items": "keep"}, "`unknown_items` must be one of error, drop, got 'keep'"),
        ({"item_features": [{"name": "x"}] * 2}, "feature `x` needs either `values` or a positive number of `buckets`"),
        ({"item_features": [{"name": "x", "values": ["a"], "buckets": 2}] * 2}, "feature `x` needs either"),
        ({"item_features": [{"name": "x", "buckets": 0}] * 2}, "feature `x` needs either"),
        ({"item_features": [{"name": "x", "values": ["a", "a"]}] * 2}, "feature `x` needs distinct `values`"),
        ({"item_features": [{"name": "x", "values": []}] * 2}, "feature `x` needs distinct `values`"),
        ({"behaviors": [{"name": "clicks"}]}, r"`behaviors` 'clicks' needs length \(at least 1\), got"),
        ({"behaviors": [{"name": "clicks", "length": 0}]}, r"`behaviors` 'clicks' needs length \(at least 1\), got"),
        (
            {"behaviors": BEHAVIORS[:1] * 2},
            r"`behaviors` must each have a `name` of their own, got \['clicks', 'clicks'",
        ),
        ({"item_categories": CATEGORIES + 0.7}, "`item_categories` must be integers, .* got torch.float32"),
        (
            {"item_categories": torch.tensor([[99, 0]] * 4 + [[99, 4]])},
            r"`item_categories` of feature `department` must be at least -1 \(missing\), and at most 3, got 4",
        ),
        (
            {"item_categories": torch.tensor([[99, 0]] * 4 + [[-2, 0]])},
            r"`item_categories` of feature `brand` must be at least -1 \(missing\), got -2",
        ),
    ],
)
def test_processors_that_cannot_be_are_refused(change, message):
    given = {"item_ids": ITEMS, "content": CONTENT, "item_categories": CATEGORIES, **FEATURES, "behaviors": BEHAVIORS}
    with pytest.raises(ValueError, match=message):
        GearProcessor(**given | change)
