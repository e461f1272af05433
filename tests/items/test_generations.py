import builtins
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from hf_deco.items import generations, index_files
from hf_deco.items.generations import IndexReader, IndexWriter, open_index
from hf_deco.items.index import ItemIndex
from hf_deco.items.packing import PRECISIONS, PackedRows

MADE_BY = {"tokenizer_version": "v1", "model_id": "m"}


def make(number=30, seed=0, precision="int8", **made_by):
    rng = np.random.default_rng(seed)
    codes, vectors = rng.integers(0, 3, (number, 2)), rng.standard_normal((number, 5))
    return ItemIndex.build(range(number), codes, vectors, (3, 3), precision=precision, **MADE_BY | made_by)


def arrays(index):
    rows, ids = index.embeddings, index.item_ids
    return [index.keys, index.offsets, ids.data, ids.offsets, rows.data, rows.scales]


def same(left, right):
    pairs = zip(arrays(left), arrays(right), strict=True)
    return all(ours is theirs is None or ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)


def read(folder, **options):
    return IndexReader(folder, *MADE_BY.values(), **options)


def publish(folder, index, **options):
    with IndexWriter(folder) as writer:
        return writer.publish(index, **options)


def names(folder):
    return {path.name for path in folder.iterdir()}


def in_a_child(work):
    """Exit code of a process that does some work: 0, or 1 where it raises."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


forks = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]


def forking(test):
    for mark in forks:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Waiting for the disk proves nothing here: what counts is that it is asked for, and when."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_published_is_what_is_read(tmp_path, precision, verify):
    index = make(precision=precision)
    published = publish(tmp_path / "deep" / "index", index)
    assert (index.generation, index.base, published.generation, published.base) == (None, None, 1, 1)
    loaded = open_index(str(tmp_path / "deep" / "index"), verify)
    assert same(loaded, index) and loaded.codebook_sizes == (3, 3) and loaded.generation == loaded.base == 1
    assert (loaded.tokenizer_version, loaded.model_id) == ("v1", "m")
    assert (loaded.embeddings.precision, loaded.embeddings.width) == (precision, 5)
    users, sids = np.eye(5)[:2], np.array([[0, 1], [2, 3]])
    answer = loaded.rerank(users, sids, k=4)
    np.testing.assert_array_equal(answer.rows, index.rerank(users, sids, k=4).rows)
    assert answer.generation == 1
    with pytest.raises(ValueError, match="read-only"):
        loaded.keys[0] = 1


def test_the_manifest_says_what_lies_in_the_folder(tmp_path):
    publish(tmp_path, make())
    assert names(tmp_path) == {"CURRENT", "gen-1", ".lock"}
    manifest = json.loads((tmp_path / "gen-1" / "manifest.json").read_text())
    assert names(tmp_path / "gen-1") == {"manifest.json", *(f"{name}.npy" for name in manifest["files"])}
    for name, facts in manifest["files"].items():
        array = np.load(tmp_path / "gen-1" / f"{name}.npy")
        assert (array.dtype.str, list(array.shape)) == (facts["dtype"], facts["shape"])
        assert (tmp_path / "gen-1" / f"{name}.npy").stat().st_size == facts["bytes"]
    assert {name: manifest[name] for name in ("format_version", "generation", "tokenizer_version", "model_id")} == {
        "format_version": 1,
        "generation": 1,
        **MADE_BY,
    }
    assert (manifest["num_items"], manifest["num_sids"], manifest["precision"], manifest["width"]) == (30, 9, "int8", 5)


def test_a_reader_follows_and_keeps_the_one_before(tmp_path):
    first, second = make(seed=0), make(seed=1)
    publish(tmp_path, first)
    reader = read(tmp_path)
    taken = reader.index
    assert reader.refresh() is False and reader.previous is None
    publish(tmp_path, second)
    assert reader.index is taken and reader.refresh() is True
    assert same(reader.index, second) and reader.index.generation == 2 and reader.previous is taken
    assert same(taken, first)


def test_rollback_goes_back_and_skips_what_was_left(tmp_path):
    with IndexWriter(tmp_path) as writer:
        writer.publish(make(seed=0))
        reader = read(tmp_path)
        with pytest.raises(RuntimeError, match="there is nothing before generation 1 to roll back to"):
            reader.rollback()
        writer.publish(make(seed=1))
        reader.refresh()
        assert reader.rollback().generation == 1 and reader.index.generation == 1 and reader.previous is None
        assert reader.refresh() is False and reader.index.generation == 1
        writer.publish(make(seed=2))
        assert reader.refresh() is True
        assert (reader.index.generation, reader.previous.generation) == (3, 1)


def test_a_writer_rolls_all_readers_back_and_goes_on_from_there(tmp_path):
    with IndexWriter(tmp_path) as writer:
        first = writer.publish(make(seed=0))
        with pytest.raises(ValueError, match="generation 1 in .* names none before it"):
            writer.rollback()
        writer.publish(make(seed=1))
        reader = read(tmp_path)
        assert writer.rollback() == 1
        assert reader.refresh() is True and same(reader.index, first) and reader.index.generation == 1
        third = writer.publish(first.update(["new"], [[0, 0]], np.ones((1, 5))))
        assert third.generation == 3 and writer.prune() == [2]
        assert reader.refresh() is True and same(reader.index, third)


def test_rollback_to_a_damaged_generation_changes_nothing(tmp_path):
    publish(tmp_path, make(seed=0))
    publish(tmp_path, make(seed=1))
    flip(tmp_path / "gen-1" / "scales.npy", -1)
    with IndexWriter(tmp_path) as writer, pytest.raises(ValueError, match="the hash of 'scales.npy' is not the one"):
        writer.rollback()
    assert open_index(tmp_path).generation == 2


def test_a_generation_of_another_folder_is_adopted_under_its_number(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    for seed in range(3):
        publish(there, make(seed=seed))
    for path in (there / "gen-3").iterdir():
        path.chmod(0o444)  # as a downloaded one may be
    with IndexWriter(here) as writer:
        adopted = writer.adopt(there)
        assert adopted.generation == 3 and same(adopted, make(seed=2)) and names(here) >= {"CURRENT", "gen-3"}
        assert same(writer.adopt(there), adopted) and names(here) == {"CURRENT", "gen-3", ".lock"}  # nothing more
        with pytest.raises(ValueError, match="generation 3 in .* names none before it"):
            writer.rollback()
        updated = writer.publish(adopted.update(["new"], [[1, 1]], np.ones((1, 5))))
        assert (updated.generation, len(updated)) == (4, 31)
        assert writer.rollback() == 3
    reader = read(here)
    publish(there, make(seed=5))
    with IndexWriter(here) as writer:
        with pytest.raises(ValueError, match="has a generation 4 of its own: publish the index of"):
            writer.adopt(there)
        publish(there, make(seed=6))
        assert writer.adopt(there).generation == 5
        assert reader.refresh() and same(reader.index, make(seed=6))
        assert writer.rollback() == 3
    with pytest.raises(RuntimeError, match="is closed"):
        writer.adopt(there)


def test_a_damaged_generation_is_not_adopted(tmp_path):
    publish(tmp_path / "there", make(seed=0))
    publish(tmp_path / "here", make(seed=1))
    path = tmp_path / "there/gen-1/offsets.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with IndexWriter(tmp_path / "here") as writer:
        with pytest.raises(ValueError, match="is damaged: 'offsets.npy' has"):
            writer.adopt(tmp_path / "there")
        with pytest.raises(FileNotFoundError, match="CURRENT' is missing"):
            writer.adopt(tmp_path / "nowhere")
    assert names(tmp_path / "here") == {"CURRENT", "gen-1", ".lock"} and same(
        open_index(tmp_path / "here"), make(seed=1)
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_copy_that_was_damaged_here_is_not_made_current(tmp_path, named):
    there, here = tmp_path / "there", tmp_path / "here"
    publish(there, make(seed=0))
    with IndexWriter(here) as writer:
        writer.adopt(there)
        if not named:
            (here / "CURRENT").unlink()
        flip(here / "gen-1" / "offsets.npy", -1)
        with pytest.raises(ValueError, match="here/gen-1' is damaged: the hash of 'offsets.npy' is not the one"):
            writer.adopt(there)
    assert (here / "CURRENT").exists() is named


def test_old_generations_go_when_asked_and_never_the_last_two(tmp_path):
    with IndexWriter(tmp_path) as writer:
        for seed in range(4):
            writer.publish(make(seed=seed))
        assert names(tmp_path) >= {"gen-1", "gen-2", "gen-3", "gen-4"}
        for keep in (1, 0, -1):
            with pytest.raises(ValueError, match=f"`keep` must be at least 2, .* got {keep}"):
                writer.prune(keep)
            with pytest.raises(ValueError, match="`keep` must be at least 2"):
                writer.publish(make(), keep=keep)
        assert writer.prune(3) == [1]
        assert writer.publish(make(), keep=2).generation == 5
    assert names(tmp_path) == {"CURRENT", "gen-4", "gen-5", ".lock"}


def test_the_one_before_is_kept_even_where_a_number_lies_between(tmp_path):
    publish(tmp_path, make(seed=0))
    shutil.copytree(tmp_path / "gen-1", tmp_path / "gen-2")  # as of a writer that died before it named it
    with IndexWriter(tmp_path) as writer:
        assert writer.publish(make(seed=1)).generation == 3
        assert writer.prune(3) == []
        shutil.copytree(tmp_path / "gen-1", tmp_path / "gen-7")
        assert writer.publish(make(seed=2)).generation == 8
        assert writer.prune(3) == [1, 2]
        assert writer.prune() == [7]
        assert names(tmp_path) == {"CURRENT", "gen-3", "gen-8", ".lock"}


def test_an_update_of_another_generation_than_the_current_is_refused(tmp_path):
    """A stale copy must not undo what was published since."""
    with IndexWriter(tmp_path) as writer:
        first = writer.publish(make())
        stale = first.update(removed=["1"])
        writer.publish(first.update(removed=["2"]))
        with pytest.raises(ValueError, match="updated from generation 1, but generation 2 is current, whose changes"):
            writer.publish(stale)
        assert open_index(tmp_path).generation == 2
        writer.publish(open_index(tmp_path).update(removed=["1"]))
    assert {"1", "2"}.isdisjoint(open_index(tmp_path).item_ids)
    with IndexWriter(tmp_path / "other") as writer, pytest.raises(ValueError, match="but generation None is current"):
        writer.publish(stale)


@forking
def test_a_second_writer_is_refused_until_the_first_closes(tmp_path):
    writer = IndexWriter(tmp_path)
    with pytest.raises(RuntimeError, match="another writer has .*; an index has one at a time"):
        IndexWriter(tmp_path)
    assert in_a_child(lambda: IndexWriter(tmp_path)) == 1
    writer.close()
    for call in (lambda: writer.publish(make()), writer.prune, writer.rollback):
        with pytest.raises(RuntimeError, match="this writer of .* is closed; make another"):
            call()
    assert in_a_child(lambda: publish(tmp_path, make())) == 0
    assert open_index(tmp_path).generation == 1


def test_folders_that_nothing_was_published_to(tmp_path):
    for call in (lambda: read(tmp_path), lambda: open_index(tmp_path), IndexWriter(tmp_path).prune):
        with pytest.raises(FileNotFoundError, match="CURRENT' is missing; `folder` must be one that an `IndexWriter`"):
            call()


# Dying at every step


class Died(BaseException):
    """Ends a writer, as nothing that it could catch."""


STEPS = ("mkdir", "open", "write", "fsync", "rename", "replace")


def count_steps(monkeypatch, act):
    """Calls `act(number, name)` before every step by which `publish` touches the disk, counted from 0."""
    number = -1

    def stepping(name, call):
        def step(*args, **options):
            nonlocal number
            number += 1
            act(number, name)
            return call(*args, **options)

        return step

    class Stepping:
        """A file whose writes are steps."""

        def __init__(self, file):
            self._file, self.write = file, stepping("write", file.write)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return self._file.__exit__(*error)

    def opening(path, mode="r", *args, **options):
        file = builtins.open(path, mode, *args, **options)
        return Stepping(file) if "x" in mode else file

    monkeypatch.setattr(index_files, "open", stepping("open", opening), raising=False)
    for name in ("fsync", "rename", "replace", "mkdir"):
        monkeypatch.setattr(os, name, stepping(name, getattr(os, name)))


def steps_of_a_publication(monkeypatch, tmp_path):
    """The names of all steps of a second publication."""
    steps = []
    publish(tmp_path, make(seed=0))
    with IndexWriter(tmp_path) as writer, monkeypatch.context() as patch:
        count_steps(patch, lambda number, name: steps.append(name))
        writer.publish(make(seed=1))
    assert set(steps) == set(STEPS)
    return steps


def assert_whole(folder, before, after, reader):
    """An old or new generation is there, whole; a reader takes it; and the next writer can go on."""
    found = open_index(folder)
    assert same(found, before) or same(found, after)
    assert reader.refresh() is same(found, after)
    assert same(reader.index, found)
    last = make(seed=2)
    publish(folder, last, keep=2)
    assert reader.refresh() and same(reader.index, last)
    assert not [name for name in names(folder) if name not in ("CURRENT", ".lock") and not name.startswith("gen-")]
    assert len(names(folder)) == 4
    return same(found, after)


@pytest.mark.parametrize("error", [Died, OSError])
def test_a_writer_that_fails_at_any_step_leaves_a_whole_generation(tmp_path, monkeypatch, error):
    steps = steps_of_a_publication(monkeypatch, tmp_path / "count")
    before, after, outcomes = make(seed=0), make(seed=1), []
    for last in range(len(steps)):

        def act(number, name, last=last):
            if number == last:
                raise error(28, "No space left on device")

        folder = tmp_path / str(last)
        publish(folder, before)
        reader = read(folder)
        with IndexWriter(folder) as writer, monkeypatch.context() as patch:
            count_steps(patch, act)
            with pytest.raises(error):
                writer.publish(after)
        assert not [name for name in names(folder) if name.startswith((".gen", ".CURRENT"))]
        outcomes.append(assert_whole(folder, before, after, reader))
    assert outcomes == [number > steps.index("replace") for number in range(len(steps))]


def test_what_is_named_is_on_the_disk_before(tmp_path, monkeypatch):
    steps = steps_of_a_publication(monkeypatch, tmp_path)
    steps = [step for step, before in zip(steps, [None, *steps], strict=False) if (step, before) != ("write", "write")]
    file = ["open", "write", "fsync"]
    assert steps == ["mkdir", *file * 7, "fsync", "rename", "fsync", *file, "replace", "fsync"]


@forking
def test_a_writer_that_is_killed_at_any_step_leaves_a_whole_generation(tmp_path, monkeypatch):
    """Nothing is cleaned up then, and the lock must not outlive the process."""
    steps = steps_of_a_publication(monkeypatch, tmp_path / "count")
    before, after, outcomes = make(seed=0), make(seed=1), []
    for last in range(len(steps)):
        folder = tmp_path / str(last)
        publish(folder, before)
        reader = read(folder)

        def work(folder=folder, last=last):
            writer = IndexWriter(folder)
            count_steps(monkeypatch, lambda number, name: number == last and os.kill(os.getpid(), signal.SIGKILL))
            writer.publish(after)

        assert in_a_child(work) == -signal.SIGKILL
        outcomes.append(assert_whole(folder, before, after, reader))
    assert outcomes == [number > steps.index("replace") for number in range(len(steps))]


@forking
@pytest.mark.parametrize("milliseconds", [20, 33, 51, 78])
def test_a_process_that_publishes_without_end_is_killed_at_any_time(tmp_path, milliseconds):
    indexes = [make(200, seed) for seed in range(4)]
    publish(tmp_path, indexes[0])
    reader = read(tmp_path)

    def work():
        with IndexWriter(tmp_path) as writer:
            threading.Timer(milliseconds / 1000, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            while True:
                for index in indexes:
                    writer.publish(index, keep=2)

    assert in_a_child(work) == -signal.SIGKILL
    found = open_index(tmp_path)
    assert same(found, indexes[(found.generation - 2) % 4] if found.generation > 1 else indexes[0])
    publish(tmp_path, make(seed=9), keep=2)
    assert reader.refresh() and same(reader.index, make(seed=9)) and len(names(tmp_path)) == 4


# Damage


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


ARRAYS = ("keys", "offsets", "item_ids", "item_id_offsets", "embeddings", "scales")


@pytest.fixture
def damaged(tmp_path):
    """A reader at generation 1, and a folder whose generation 2 a test damages."""
    publish(tmp_path, make(seed=0))
    reader = read(tmp_path)
    publish(tmp_path, make(seed=1))
    return reader, tmp_path / "gen-2"


def assert_refused(reader, error, message):
    index, previous = reader.index, reader.previous
    for _ in range(2):
        with pytest.raises(error, match=message):
            reader.refresh()
        assert reader.index is index and reader.previous is previous
    publish(reader.folder, make(seed=2))  # the next good one is taken
    assert reader.refresh() and reader.index.generation == 3 and reader.previous is index


@pytest.mark.parametrize("name", ARRAYS)
def test_a_flipped_bit_anywhere_is_refused(damaged, name):
    reader, folder = damaged
    path = folder / f"{name}.npy"
    original = path.read_bytes()
    for position in (0, 9, len(original) // 2, len(original) - 1):
        path.write_bytes(original)
        flip(path, position)
        with pytest.raises(ValueError, match=f"the index in .* is damaged: the hash of '{name}.npy' is not the one"):
            reader.refresh()
    assert_refused(reader, ValueError, "is damaged")


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_or_longer_file_is_refused(damaged, name, verify):
    reader, folder = damaged
    reader.verify = verify
    path = folder / f"{name}.npy"
    original = path.read_bytes()
    for content in (b"", original[:-1], original + b"\0"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"'{name}.npy' has {len(content)} bytes, not the {len(original)} that"):
            reader.refresh()
    assert_refused(reader, ValueError, "is damaged")


def test_without_hashes_headers_and_structure_are_checked_all_the_same(damaged):
    reader, folder = damaged
    reader.verify = False
    for name, old, new, message in (
        ("keys", b"}", b" ", r"keys.npy' is truncated or damaged \("),
        ("keys", b"NUMPY", b"NUMPX", r"keys.npy' is truncated or damaged \("),
        ("keys", b"<u8", b"<i8", r"'keys.npy' holds int64 of \(9,\), not <u8 of \[9\]"),
        ("scales", b"(30,)", b"(99,)", r"'scales.npy' holds float32 of \(99,\), not <f4 of \[30\]"),
        ("offsets", b"\x1e\0\0\0", b"\x1f\0\0\0", "`offsets` must give each of the 9 SIDs a range"),
    ):
        content = (folder / f"{name}.npy").read_bytes()
        assert content.count(old) == 1
        (folder / f"{name}.npy").write_bytes(content.replace(old, new))
        with pytest.raises(ValueError, match=message):
            reader.refresh()
        assert reader.index.generation == 1
        (folder / f"{name}.npy").write_bytes(content)
    assert reader.refresh()


@pytest.mark.parametrize("name", [*(f"{name}.npy" for name in ARRAYS), "manifest.json"])
def test_a_missing_file_is_refused(damaged, name):
    reader, folder = damaged
    (folder / name).unlink()
    assert_refused(reader, FileNotFoundError, name)


@pytest.mark.parametrize("position", [0, 100, -1])
def test_a_damaged_manifest_is_refused(damaged, position):
    reader, folder = damaged
    flip(folder / "manifest.json", position)
    assert_refused(reader, ValueError, "manifest.json' is truncated or damaged: its hash is not the one")


def test_a_damaged_current_is_refused_and_can_be_repaired(damaged):
    reader, folder = damaged
    path = folder.parent / "CURRENT"
    original = path.read_bytes()
    for content in (b"", original[:20], b"[]", b'{"generation": 2}', b"\xff\xfe", original.replace(b": 2", b': "2"')):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="CURRENT' is truncated or damaged"):
            reader.refresh()
        assert reader.index.generation == 1
        with IndexWriter(folder.parent) as writer:
            for call in (lambda: writer.publish(make()), writer.prune):  # noqa: B023
                with pytest.raises(ValueError, match="CURRENT' is truncated or damaged"):
                    call()
    path.write_bytes(original)
    assert reader.refresh() and names(folder.parent) == {"CURRENT", "gen-1", "gen-2", ".lock"}


def test_files_of_two_generations_do_not_mix(damaged):
    reader, folder = damaged
    shutil.copy(folder.parent / "gen-1" / "embeddings.npy", folder / "embeddings.npy")
    assert_refused(reader, ValueError, "the hash of 'embeddings.npy' is not the one that was published")


def republish(folder, change, arrays=None):
    """Writes the manifest anew, with its hash, as a writer with a defect might."""
    for name, array in (arrays or {}).items():
        np.save(folder / f"{name}.npy", array)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        content = (folder / f"{name}.npy").read_bytes()
        facts |= {"bytes": len(content), "sha256": index_files.hashlib.sha256(content).hexdigest()}
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    current = json.loads((folder.parent / "CURRENT").read_text())
    current["manifest_sha256"] = index_files.hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    (folder.parent / "CURRENT").write_text(json.dumps(current))


@pytest.mark.parametrize(
    ("change", "replaced", "message"),
    [
        ({"format_version": 2}, {}, "manifest.json' has format version 2, this version reads 1"),
        ({"generation": 1}, {}, "manifest.json' is of generation 1, not 2"),
        ({"precision": "int4"}, {}, r"'embeddings.npy' holds int8 of \(30, 5\), not |u1 of"),
        ({"precision": "int2"}, {}, "manifest.json' does not describe an index"),
        ({"width": 6}, {}, r"`data` of int8 rows of width 6 must be int8 of shape \(N, 6\)"),
        ({"width": "5"}, {}, "`data` of int8 rows of width 5 must be"),
        ({"codebook_sizes": [1, 1]}, {}, "`keys` must be SIDs within `codebook_sizes`"),
        ({"files": {}}, {}, "manifest.json' does not describe an index"),
        ({}, {"scales": np.ones(30)}, r"'scales.npy' holds float64 of \(30,\), not <f4"),
        ({}, {"scales": np.ones(29, dtype=np.float32)}, r"'scales.npy' holds float32 of \(29,\), not <f4 of \[30\]"),
        ({}, {"scales": np.full(30, np.nan, dtype=np.float32)}, "`scales` holds NaN or infinite values"),
        ({}, {"offsets": np.full(10, 3)}, "`offsets` must give each of the 9 SIDs a range"),
        ({}, {"item_id_offsets": np.arange(31)[::-1]}, "`offsets` must ascend from 0"),
        ({}, {"embeddings": np.asfortranarray(np.ones((30, 5), dtype=np.int8))}, r"not \|i1 of \[30, 5\]"),
        ({}, {"embeddings": np.array([None] * 5, dtype=object)}, r"holds object of \(5,\)"),
    ],
)
def test_what_a_faulty_writer_published_is_refused(damaged, change, replaced, message):
    reader, folder = damaged
    republish(folder, lambda manifest: manifest.update(change), replaced)
    assert_refused(reader, ValueError, message)


def test_a_generation_of_another_tokenizer_or_model_is_refused(tmp_path):
    publish(tmp_path, make())
    with pytest.raises(ValueError, match="made with model 'm', but is asked by model 'other'"):
        IndexReader(tmp_path, "v1", "other")
    reader = read(tmp_path)
    publish(tmp_path, make(tokenizer_version="v2"))
    assert_refused(reader, ValueError, "made with tokenizer version 'v2', but is asked by tokenizer version 'v1'")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_machine_that_multiplies_wrongly_is_found_out(tmp_path, monkeypatch, precision):
    publish(tmp_path, make(precision=precision))
    reader = read(tmp_path)
    publish(tmp_path, make(seed=1, precision=precision))
    with monkeypatch.context() as patch:
        fast = PackedRows.scores
        patch.setattr(PackedRows, "scores", lambda self, rows, user: 1.01 * fast(self, rows, user))
        with pytest.raises(ValueError, match="is damaged: its self-test failed: scores"):
            reader.refresh()
        assert reader.index.generation == 1
    assert reader.refresh()


# Reading while writing


def test_readers_answer_from_whole_generations_while_others_are_published(tmp_path):
    """Generation `g` holds `g` items with scores of their own, so a mixed one would show."""
    published = 20

    def build(generation):
        vectors = np.arange(1, generation + 1)[:, None] * [1.0, 0.0]
        return ItemIndex.build(range(generation), [[0]] * generation, vectors, (1,), **MADE_BY, precision="fp16")

    publish(tmp_path, build(1))
    reader, failures, seen, done = read(tmp_path), [], set(), threading.Event()

    def query():
        try:
            while not done.is_set():
                answer = reader.index.rerank([[1.0, 0.0]], [[0]], k=published + 1)
                number = answer.generation
                expected = [*range(number, 0, -1)] + [-np.inf] * (published + 1 - number)
                if answer.scores[0].tolist() != expected:
                    failures.append((number, answer))
                seen.add(number)
        except BaseException as error:
            failures.append(error)

    def follow():
        try:
            while not done.is_set():
                reader.refresh()
                time.sleep(0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for work in (query, query, follow)]
    for thread in threads:
        thread.start()
    with IndexWriter(tmp_path) as writer:
        for generation in range(2, published + 1):
            assert writer.publish(build(generation), keep=2).generation == generation
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    reader.refresh()
    assert reader.index.generation == published and seen


def test_a_generation_deleted_while_it_is_read_gives_way_to_the_next(tmp_path, monkeypatch):
    with IndexWriter(tmp_path) as writer:
        writer.publish(make(seed=0))
        reader = read(tmp_path)
        writer.publish(make(seed=1))
        opened = []

        def slow(folder, generation, *args):
            if not opened:
                for seed in (2, 3):
                    writer.publish(make(seed=seed), keep=2)
            opened.append(generation)
            return index_files.read_index(folder, generation, *args)

        monkeypatch.setattr(generations, "read_index", slow)
        assert reader.refresh() and opened == [2, 4] and same(reader.index, make(seed=3))
