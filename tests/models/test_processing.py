import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_deco import DecoProcessor
from hf_deco.models import processor_sid

ITEMS = ["apple", "pear", "soap", "żółw 🐢", "", "item,5"]
CODES = [[0, 1], [0, 2], [7, 3], [7, 0], [3, 3], [0, 0]]


def build(**kwargs):
    return DecoProcessor(ITEMS, torch.tensor(CODES), **{"codebook_sizes": (8, 4), "max_history_length": 3, **kwargs})


def assert_same(processor, expected):
    assert (processor.item_ids, processor.titles) == (expected.item_ids, expected.titles)
    assert torch.equal(processor.item_codes, expected.item_codes) and processor.item_codes.dtype == torch.int32
    for name in ("codebook_sizes", "max_history_length", "num_items", "padding_side", "unknown_items"):
        assert getattr(processor, name) == getattr(expected, name), name
    sids = torch.tensor([*CODES, [1, 1], [-1, -1]])
    assert processor.batch_decode(sids) == expected.batch_decode(sids)


def test_histories_become_codes_and_a_mask_padded_on_the_left():
    inputs = build()([["pear"], ["soap", "apple"], []], return_tensors="pt")
    assert set(inputs) == {"item_codes", "attention_mask"}
    assert inputs["item_codes"].tolist() == [[[0, 0], [0, 2]], [[7, 3], [0, 1]], [[0, 0], [0, 0]]]
    assert inputs["attention_mask"].tolist() == [[0, 1], [1, 1], [0, 0]]
    assert inputs["item_codes"].dtype == inputs["attention_mask"].dtype == torch.int64


def test_only_the_latest_items_of_a_long_history_are_read():
    history = ["pear", "soap", "apple", "apple", "żółw 🐢"]
    inputs = build()([history, ["soap"]])
    assert inputs["item_codes"].tolist() == [[[0, 1], [0, 1], [7, 0]], [[0, 0], [0, 0], [7, 3]]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("histories", [[[]], [[], []]])
def test_histories_without_items_are_one_masked_position(histories):
    inputs = build()(histories)
    assert inputs["item_codes"].tolist() == [[[0, 0]]] * len(histories)
    assert inputs["attention_mask"].tolist() == [[0]] * len(histories)


def test_unknown_items_are_counted_and_named():
    with pytest.raises(ValueError, match=r"2 ids that are none of the 6 known items: 'plum', 'Apple'\."):
        build()([["pear"], ["apple", "plum", "Apple"]])
    with pytest.raises(ValueError, match="7 ids .*'a', 'b', 'c', 'd', 'e'\\."):
        build()([list("abcdefg")])


@pytest.mark.parametrize("histories", ["apple", ["apple", "pear"], [["apple"], "pear"]])
def test_a_string_in_place_of_a_history_is_refused(histories):
    with pytest.raises(ValueError, match="one list of item ids per user"):
        build()(histories)


def test_other_tensors_than_pytorchs_are_refused():
    with pytest.raises(ValueError, match="`return_tensors` must be 'pt', got 'np'"):
        build()([["apple"]], return_tensors="np")


def test_histories_are_padded_on_the_right_on_request():
    histories = [["pear"], ["soap", "apple", "pear", "pear"], []]
    expected = {
        "item_codes": [[[0, 2], [0, 0], [0, 0]], [[0, 1], [0, 2], [0, 2]], [[0, 0], [0, 0], [0, 0]]],
        "attention_mask": [[1, 0, 0], [1, 1, 1], [0, 0, 0]],
    }
    for inputs in (build()(histories, padding_side="right"), build(padding_side="right")(histories)):
        assert {name: tensor.tolist() for name, tensor in inputs.items()} == expected
    left = build(padding_side="right")(histories, padding_side="left")
    assert left["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_of_the_padding_does_not_change_what_is_retrieved(make_model, side):
    model = make_model(copy_pointer=True)
    processor = DecoProcessor([str(row) for row in range(30)], model.catalog_codes, model.config.codebook_sizes)
    histories = [["3"], ["7", "1", "4"], []]
    found = [
        model.generate(**processor(users, padding_side=side), num_beams=30, num_return_sequences=30)
        for users in (histories, *([history] for history in histories))
    ]
    assert torch.equal(found[0], torch.cat(found[1:]))


def test_rows_stand_for_item_ids():
    processor = build()
    expected = processor([["pear"], ["soap", "apple", "pear", "pear"], []])
    for rows in ([[1], [2, 0, 1, 1], []], [torch.tensor([1]), np.array([2, 0, 1, 1]), ()]):
        inputs = processor(item_rows=rows)
        assert torch.equal(inputs["item_codes"], expected["item_codes"])
        assert torch.equal(inputs["attention_mask"], expected["attention_mask"])
    table = torch.tensor([[1, 0], [2, 5]])
    assert processor(item_rows=table)["item_codes"].tolist() == [[[0, 2], [0, 1]], [[7, 3], [0, 0]]]
    with pytest.raises(ValueError, match=r"`item_rows` holds 3 rows that are none of the 6 known items: 6, -1, 6\."):
        processor(item_rows=[[0, 6, -1, 6]])
    with pytest.raises(TypeError, match="float"):
        processor(item_rows=[[0.5]])


def test_integers_in_histories_are_ids():
    processor = DecoProcessor([20, 3], torch.tensor([[1], [0]]), (2,))
    assert processor.item_ids == ["20", "3"]
    assert processor([[3, "20"]])["item_codes"].tolist() == [[[0], [1]]]


@pytest.mark.parametrize("arguments", [{}, {"histories": [["apple"]], "item_rows": [[0]]}])
def test_either_ids_or_rows_are_given(arguments):
    with pytest.raises(ValueError, match="Give either `histories` of item ids, or the same as `item_rows`"):
        build()(**arguments)


def test_unknown_items_are_dropped_on_request_before_the_latest_are_taken():
    histories = [["plum", "pear"], ["soap", "kiwi", "apple", "pear", "fig", "fig", "fig"], ["plum"]]
    expected = build()([["pear"], ["soap", "apple", "pear"], []])
    for inputs in (build()(histories, unknown_items="drop"), build(unknown_items="drop")(histories)):
        assert torch.equal(inputs["item_codes"], expected["item_codes"])
        assert torch.equal(inputs["attention_mask"], expected["attention_mask"])
    rows = build()(item_rows=[[6, 1], [2, -1, 0, 1, 99], [-1]], unknown_items="drop")
    assert torch.equal(rows["item_codes"], expected["item_codes"])
    processor = build(unknown_items="drop", titles=list("ABCDEF"))
    assert processor.rows_of(["plum", "soap"]) == [2] and processor.rows_of(["soap"], "error") == [2]
    for ask in (lambda: processor(histories, unknown_items="error"), lambda: processor.title("plum")):
        with pytest.raises(ValueError, match="'plum'"):
            ask()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"padding_side": "middle"}, "`padding_side` must be one of left, right, got 'middle'"),
        ({"unknown_items": "ignore"}, "`unknown_items` must be one of error, drop, got 'ignore'"),
    ],
)
def test_unknown_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        build(**option)
    with pytest.raises(ValueError, match=message):
        build()([["apple"]], **option)


def test_no_users_are_no_histories():
    inputs = build()([])
    assert inputs["item_codes"].shape == (0, 1, 2) and inputs["attention_mask"].shape == (0, 1)


def test_sids_become_item_ids_and_fillers_none():
    processor = build()
    sids = torch.tensor([[7, 0], [0, 1], [-1, -1], [1, 1], [3, 3], [0, 2], [8, 0]])
    assert processor.batch_decode(sids) == ["żółw 🐢", "apple", None, None, "", "pear", None]
    assert processor.batch_decode(sids.tolist()) == processor.batch_decode(sids)
    assert processor.decode(torch.tensor([7, 3])) == "soap"
    assert processor.decode([-1, -1]) is None
    with pytest.raises(ValueError, match="SIDs of 2 codes"):
        processor.batch_decode(torch.tensor([[0, 1, 0]]))


def test_sids_of_users_become_lists_of_item_ids():
    sids = torch.tensor([[[7, 0], [-1, -1]], [[0, 1], [3, 3]]])
    assert build().batch_decode(sids) == [["żółw 🐢", None], ["apple", ""]]
    assert build().batch_decode(sids.flatten(0, 1)) == ["żółw 🐢", None, "apple", ""]
    assert build().batch_decode(torch.zeros((0, 2), dtype=torch.long)) == []


def test_every_item_survives_encoding_and_decoding():
    processor = build(max_history_length=10)
    codes = processor([ITEMS])["item_codes"]
    assert processor.batch_decode(codes[0]) == ITEMS


def test_items_that_share_a_sid_decode_to_the_first():
    processor = DecoProcessor(["a", "b", "c"], torch.tensor([[1], [0], [1]]), (2,))
    assert processor.batch_decode(torch.tensor([[0], [1]])) == ["b", "a"]
    assert processor([["c", "a"]])["item_codes"].tolist() == [[[1], [1]]]


def test_items_behind_the_catalog_are_read_but_never_retrieved():
    processor = build(num_items=4)
    assert processor([["", "apple"]])["item_codes"].tolist() == [[[3, 3], [0, 1]]]
    assert processor.batch_decode(torch.tensor(CODES)) == [*ITEMS[:4], None, None]
    for number in (0, 7, -1):
        with pytest.raises(ValueError, match=r"`num_items` must lie in 1\.\.6"):
            build(num_items=number)


def test_titles_are_looked_up_by_item():
    assert build(titles=list("ABCDEF")).title("soap") == "C"
    assert build().title("soap") is None
    with pytest.raises(ValueError, match="'plum'"):
        build(titles=list("ABCDEF")).title("plum")


def test_repeated_ids_are_counted_and_named():
    with pytest.raises(ValueError, match="must be unique; 2 are repeated, such as 'b'"):
        DecoProcessor(["a", "b", "b", "b"], torch.zeros((4, 1), dtype=torch.long), (2,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_codes": CODES[:5]}, "`item_codes` has 5 rows for 6 `item_ids`"),
        ({"titles": ["A"]}, "`titles` has 1 rows for 6 `item_ids`"),
        ({"codebook_sizes": (7, 4)}, r"level 1 must lie in 0\.\.6, got 0\.\.7"),
        ({"codebook_sizes": (8, 4, 2)}, r"shape \(items, 3\)"),
        ({"item_codes": [[0.5, 1.0]] * 6}, "must hold integers"),
        ({"item_codes": [[2**32, 0]] * 6}, "level 1 must lie in"),
    ],
)
def test_catalogs_that_do_not_fit_together_are_refused(change, message):
    arguments = {"item_ids": ITEMS, "item_codes": CODES, "codebook_sizes": (8, 4), **change}
    with pytest.raises(ValueError, match=message):
        DecoProcessor(**arguments)


@pytest.mark.parametrize("options", [{}, {"padding_side": "right", "unknown_items": "drop"}])
@pytest.mark.parametrize("titles", [None, ["Äpfel", "", "x\ny", "\0", "t" * 300, "日本"]])
@pytest.mark.parametrize("num_items", [None, 4])
def test_processor_comes_back_from_disk(tmp_path, titles, num_items, options):
    processor = build(titles=titles, num_items=num_items, **options)
    written = processor.save_pretrained(tmp_path / "new" / "folder")
    assert sorted(written) == sorted(str(path) for path in (tmp_path / "new" / "folder").iterdir())
    loaded = DecoProcessor.from_pretrained(tmp_path / "new" / "folder")
    assert_same(loaded, processor)
    assert loaded.title("soap") == (None if titles is None else "x\ny")
    assert_same(copy.deepcopy(processor), processor)


def test_options_can_be_replaced_while_loading(tmp_path):
    build().save_pretrained(tmp_path)
    options = {"max_history_length": 2, "padding_side": "right", "unknown_items": "drop"}
    loaded = DecoProcessor.from_pretrained(tmp_path, **options)
    assert {name: getattr(loaded, name) for name in options} == options


def test_a_processor_saved_before_it_had_options_gets_the_defaults(tmp_path):
    build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "processor_config.json").read_text())
    for name in ("padding_side", "unknown_items", "auto_map"):
        del config[name]
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    assert_same(DecoProcessor.from_pretrained(tmp_path), build())


def test_ids_that_cannot_be_told_apart_are_an_oserror(tmp_path):
    build().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "catalog.safetensors")
    tensors["item_ids.offsets"][2] = 10**6
    save_file(tensors, tmp_path / "catalog.safetensors")
    with pytest.raises(OSError, match="damaged: `item_ids` cannot be told apart"):
        DecoProcessor.from_pretrained(tmp_path)


def test_saving_again_replaces_the_old_processor(tmp_path):
    build(titles=list("ABCDEF")).save_pretrained(tmp_path)
    other = DecoProcessor(["x"], torch.tensor([[3]]), (5,), 7)
    other.save_pretrained(tmp_path)
    loaded = DecoProcessor.from_pretrained(tmp_path)
    assert (loaded.item_ids, loaded.titles, loaded.codebook_sizes, loaded.max_history_length) == (["x"], None, (5,), 7)
    code = ["processing_deco.py", "processor_sid.py", "strings_sid.py", "trie.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["catalog.safetensors", "processor_config.json", *code]
    )


@pytest.mark.parametrize("point", ["during the write", "before the swap"])
def test_a_save_that_fails_leaves_the_old_files_whole_and_nothing_else(tmp_path, monkeypatch, point):
    build().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def torn(tensors, path):
        path.write_bytes(b"half a fi")
        raise OSError("disk full")

    def failing(*args):
        raise OSError("disk full")

    if point == "during the write":
        monkeypatch.setattr(processor_sid, "save_file", torn)
    else:
        monkeypatch.setattr(processor_sid.os, "replace", failing)
    with pytest.raises(OSError, match="disk full"):
        DecoProcessor(["x"], torch.tensor([[3]]), (5,)).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_same(DecoProcessor.from_pretrained(tmp_path), build())


@pytest.mark.parametrize("name", ["processor_config.json", "catalog.safetensors"])
def test_a_missing_file_is_an_oserror_that_names_it(tmp_path, name):
    build().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(OSError, match=name):
        DecoProcessor.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["processor_config.json", "catalog.safetensors"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
def test_a_truncated_file_is_an_oserror_that_says_so(tmp_path, name, kept):
    build().save_pretrained(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(OSError, match="damaged or incomplete"):
        DecoProcessor.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "key", ["codebook_sizes", "max_history_length", "item_codes", "item_ids.bytes", "item_ids.offsets"]
)
def test_files_that_lack_an_entry_are_an_oserror_that_names_it(tmp_path, key):
    build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "processor_config.json").read_text())
    tensors = load_file(tmp_path / "catalog.safetensors")
    (config if key in config else tensors).pop(key)
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "catalog.safetensors")
    with pytest.raises(OSError, match=f"damaged or incomplete.*{key}"):
        DecoProcessor.from_pretrained(tmp_path)


def test_retrieval_from_item_ids_to_item_ids(make_model, make_codes):
    codes = make_codes((5, 4, 6), 30)
    model = make_model((5, 4, 6), catalog=codes)
    processor = DecoProcessor([f"item {row}" for row in range(30)], codes, (5, 4, 6))
    inputs = processor([["item 3", "item 17"], []])
    output = model.generate(**inputs, num_beams=30, num_return_sequences=30, return_dict_in_generate=True)
    items = processor.batch_decode(output.sequences)
    assert items == [f"item {row}" for row in output.item_rows.tolist()]
    assert sorted(items[:30]) == sorted(items[30:]) == sorted(processor.item_ids)
