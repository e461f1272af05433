import json
from pathlib import Path

import numpy as np
import pytest

from hf_deco.items import RQKMeans, SIDTable, folders, quality_report, resolve_collisions, storage


@pytest.fixture(scope="module")
def catalog():
    """Item ids, embeddings with copies, popularity and titles of 200 items."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((200, 5)).astype(np.float32)
    embeddings[100:150] = embeddings[:50]
    ids = [f"item-{row}" for row in rng.permutation(200)]
    return ids, embeddings, rng.integers(0, 9, 200), [f"Title {row}" for row in range(199)] + [None]


@pytest.fixture(scope="module")
def table(catalog):
    ids, embeddings, popularity, titles = catalog
    return SIDTable.build(ids, embeddings, (8, 6, 6), popularity=popularity, titles=titles, seed=3)


def assert_equal(left, right):
    assert left.item_ids.tolist() == right.item_ids.tolist()
    assert left.codes.dtype == right.codes.dtype == np.int32
    np.testing.assert_array_equal(left.codes, right.codes)
    assert (left.codebook_sizes, left.report, left.seed) == (right.codebook_sizes, right.report, right.seed)
    assert len(left.codebooks) == len(right.codebooks)
    for ours, theirs in zip(left.codebooks, right.codebooks, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (left.titles is None) == (right.titles is None)
    assert left.titles is None or left.titles.tolist() == right.titles.tolist()


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_build_is_kmeans_then_resolution_then_report(catalog, table):
    ids, embeddings, popularity, titles = catalog
    quantizer = RQKMeans((8, 6, 6), seed=3)
    before = quantizer.fit_encode(embeddings)
    codes, moved = resolve_collisions(before, embeddings, quantizer.codebooks, popularity, np.array(ids))
    report = {"method": "rq-kmeans"} | quality_report(before, codes, embeddings, quantizer.codebooks, moved)
    expected = SIDTable(ids, codes, (8, 6, 6), quantizer.codebooks, report, [*titles[:-1], ""], 3)
    assert_equal(table, expected)
    assert len(table) == 200 and len(np.unique(table.codes, axis=0)) == 200
    assert table.report["moved_share"] >= 0.25  # the 50 copies at least


def test_build_may_keep_collisions(catalog):
    ids, embeddings, *_ = catalog
    table = SIDTable.build(ids, embeddings, (8, 2), collisions="keep")
    np.testing.assert_array_equal(table.codes, RQKMeans((8, 2)).fit_encode(embeddings))
    assert table.report["collision_rate_after"] == 1.0 and table.report["moved_share"] == 0.0
    assert table.titles is None


def test_without_popularity_the_smaller_item_id_keeps_its_sid():
    table = SIDTable.build(["b", "a", "c"], [[0.0], [0.0], [9.0]], (2, 2))
    plain = RQKMeans((2, 2)).fit_encode([[0.0], [0.0], [9.0]])
    assert table.codes[1].tolist() == plain[1].tolist()
    assert table.codes[0, 0] == plain[0, 0] and table.codes[0, 1] != plain[0, 1]


def test_save_and_load_give_the_same_table(table, tmp_path):
    table.save(tmp_path / "deep" / "sids")
    assert_equal(SIDTable.load(str(tmp_path / "deep" / "sids")), table)
    assert set(files(tmp_path / "deep" / "sids")) == {"sids.safetensors", "sids.json", "items.parquet"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sids"]


def test_save_and_load_a_table_without_codebooks_titles_and_report(tmp_path):
    # Column-major codes, as a data frame gives them, are a trap for a writer of raw memory.
    table = SIDTable([7, 12, 5], np.asfortranarray([[0, 1], [2, 3], [1, 0]]), (4, 4))
    table.save(tmp_path / "sids")
    loaded = SIDTable.load(tmp_path / "sids")
    assert_equal(loaded, table)
    assert loaded.item_ids.tolist() == ["7", "12", "5"] and loaded.codes.tolist() == [[0, 1], [2, 3], [1, 0]]


def test_save_replaces_an_older_table(table, tmp_path):
    table.save(tmp_path / "sids")
    newer = table.select(table.item_ids[:3])
    newer.save(tmp_path / "sids")
    assert_equal(SIDTable.load(tmp_path / "sids"), newer)
    assert [path.name for path in tmp_path.iterdir()] == ["sids"]


@pytest.mark.parametrize("failing", ["_write_files", "_swap"])
def test_interrupted_save_leaves_the_older_table(table, tmp_path, monkeypatch, failing):
    table.save(tmp_path / "sids")
    older = files(tmp_path / "sids")
    module = storage if failing == "_write_files" else folders
    original = getattr(module, failing)

    def interrupted(*arguments):
        if failing == "_write_files":
            original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.select(table.item_ids[:3]).save(tmp_path / "sids")
    assert files(tmp_path / "sids") == older
    assert [path.name for path in tmp_path.iterdir()] == ["sids"]


def test_save_interrupted_between_its_renames(table, tmp_path, monkeypatch):
    folder = tmp_path / "sids"
    table.save(folder)
    older, rename = files(folder), Path.rename

    def fail_for_the_fresh_folder(path, target):
        if path.name.startswith("."):
            raise OSError("disk gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_fresh_folder)
    with pytest.raises(OSError, match="disk gone"):
        table.select(table.item_ids[:3]).save(folder)
    assert files(folder) == older
    monkeypatch.undo()

    folder.rename(tmp_path / "sids.previous")  # what a killed process leaves
    with pytest.raises(FileNotFoundError, match=r"interrupted save left the one before in '.*sids\.previous'"):
        SIDTable.load(folder)
    assert_equal(SIDTable.load(tmp_path / "sids.previous"), table)
    table.save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["sids"]


def test_save_never_deletes_files_that_are_not_its_own(table, tmp_path):
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(ValueError, match=r"holds other files \(model.safetensors\)"):
        table.save(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        table.save(tmp_path / "model.safetensors")
    assert files(tmp_path) == {"model.safetensors": b"precious"}


@pytest.mark.parametrize("name", ["sids.safetensors", "sids.json", "items.parquet"])
def test_load_names_the_missing_or_truncated_file(table, tmp_path, name):
    table.save(tmp_path / "sids")
    path = tmp_path / "sids" / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"{name}' is truncated or damaged"):
        SIDTable.load(tmp_path / "sids")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}' is missing"):
        SIDTable.load(tmp_path / "sids")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "sids.json' has format version 99, this version reads 1"),
        ({"codebook_sizes": [8, 6]}, "do not belong together: `codes` must be integers of shape"),
        ({"codebook_sizes": [8, 6, 7]}, r"do not belong together: `codebooks` of shapes .* \(8, 6, 7\)"),
        ({"codebook_sizes": [8, 6, 6, 6]}, "lacks 'codebooks.3'"),
    ],
)
def test_load_refuses_other_metadata(table, tmp_path, change, message):
    table.save(tmp_path / "sids")
    path = tmp_path / "sids" / "sids.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        SIDTable.load(tmp_path / "sids")


def test_load_refuses_items_of_another_table(table, tmp_path):
    table.save(tmp_path / "sids")
    table.select(table.item_ids[:3]).save(tmp_path / "other")
    (tmp_path / "other" / "items.parquet").replace(tmp_path / "sids" / "items.parquet")
    with pytest.raises(ValueError, match="do not belong together: `codes` has 200 rows for 3 `item_ids`"):
        SIDTable.load(tmp_path / "sids")


def test_select_keeps_order_and_leaves_the_report_out(table):
    wanted = table.item_ids[[150, 3, 77]]
    part = table.select(wanted)
    assert part.item_ids.tolist() == wanted.tolist()
    np.testing.assert_array_equal(part.codes, table.codes[[150, 3, 77]])
    assert part.titles.tolist() == ["Title 150", "Title 3", "Title 77"]
    assert part.report == {} and part.codebooks[1] is table.codebooks[1]
    with pytest.raises(ValueError, match="names 'a', 'b', 'c', 'd', 'e' and 1 more not in this table of 200 items"):
        table.select(list("abcdef"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_ids": ["a", "b", "a", "b"]}, "`item_ids` names 'a', 'b' more than once"),
        ({"item_ids": ["a", None, "b", "c"]}, r"got None in row 1 \(1 such values\)"),
        ({"item_ids": [1.0, 2.0, 3.0, 4.0]}, r"must be strings or integers, got .*1\.0.* in row 0"),
        ({"item_ids": []}, r"non-empty one-dimensional array, got shape \(0,\)"),
        ({"embeddings": np.eye(3)}, "`embeddings` has 3 rows for 4 items"),
        ({"codebook_sizes": (5, 5)}, "asks for 5 codes at the first level, but .* only 4 distinct"),
        ({"codebook_sizes": (3, 1)}, r"allow 3 semantic IDs for 4 items; give larger sizes"),
        ({"popularity": [1, 2]}, r"`popularity` must have shape \(4,\)"),
        ({"titles": ["one"]}, "`titles` has 1 entries for 4 items"),
        ({"collisions": "drop"}, '`collisions` must be "resolve" or "keep", got \'drop\''),
    ],
)
def test_build_refuses_bad_input(change, message):
    good = {"item_ids": list("abcd"), "embeddings": np.eye(4), "codebook_sizes": (2, 2)}
    SIDTable.build(**good)
    with pytest.raises(ValueError, match=message):
        SIDTable.build(**{**good, **change})


def test_the_default_sizes_are_too_large_for_a_small_catalog():
    with pytest.raises(ValueError, match="asks for 2048 codes at the first level, .* give at most 4 there"):
        SIDTable.build(list("abcd"), np.eye(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": [[0, 0]]}, "`codes` has 1 rows for 2 `item_ids`"),
        ({"codes": [[0, 0], [0, 2]]}, "`codes` has 1 rows outside"),
        ({"codebook_sizes": (2, 0)}, "`codebook_sizes` must be a sequence of positive integers"),
        ({"codebooks": [np.eye(2)]}, "do not fit `codebook_sizes`"),
        ({"codebooks": [np.eye(2), np.ones((2, 3))]}, "do not fit `codebook_sizes`"),
        ({"codebooks": [np.ones(2), np.ones(2)]}, "do not fit `codebook_sizes`"),
    ],
)
def test_table_refuses_parts_that_do_not_fit(change, message):
    good = {"item_ids": ["a", "b"], "codes": [[0, 0], [1, 1]], "codebook_sizes": (2, 2), "codebooks": [np.eye(2)] * 2}
    SIDTable(**good)
    with pytest.raises(ValueError, match=message):
        SIDTable(**{**good, **change})
