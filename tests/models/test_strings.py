import copy

import numpy as np
import pytest

from hf_deco.models import strings_sid
from hf_deco.models.strings_sid import PackedStrings

NAMES = ["apple", "", "żółw 🐢", "\0", "apple ", "日本", "x" * 1000, "Apple", "e\u0301", "é"]


def naive_hash(text):
    """FNV-1a as its authors state it."""
    value = 14695981039346656037
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def test_packed_strings_read_like_a_list():
    packed = PackedStrings.pack(NAMES)
    assert len(packed) == 10 and list(packed) == NAMES and packed == NAMES and NAMES == packed
    for row in range(-10, 10):
        assert packed[row] == NAMES[row] and packed[np.int64(row)] == NAMES[row]
    for part in (slice(2, 5), slice(None, None, -2), slice(8, 99)):
        assert packed[part] == NAMES[part]
    for row in (10, -11):
        with pytest.raises(IndexError, match=f"There are 10 strings, none at {row}"):
            packed[row]
    assert packed != NAMES[:-1] and packed != [*NAMES[:-1], "e"] and packed != "apple"
    assert "é" in packed and "APPLE" not in packed and 3 not in packed
    assert packed.index("日本") == 5 and packed.count("") == 1
    assert copy.deepcopy(packed) == packed
    assert repr(packed) == "PackedStrings(['apple', '', 'żółw 🐢', ...], length=10)"
    assert repr(PackedStrings.pack(["a"])) == "PackedStrings(['a'], length=1)"


def test_nothing_packed_is_an_empty_sequence():
    packed = PackedStrings.pack([])
    assert len(packed) == 0 and list(packed) == [] and packed.find(["a"]) == [-1] and packed.repeated() == []


def test_hashes_are_those_of_the_definition(monkeypatch):
    monkeypatch.setattr(strings_sid, "_BLOCK", 3)  # several blocks, the last not full
    packed = PackedStrings.pack(NAMES)
    hashes, rows = packed._sorted_hashes()
    assert sorted(rows.tolist()) == list(range(10))
    assert hashes.tolist() == sorted(hashes.tolist()) == [naive_hash(NAMES[row]) for row in rows]


@pytest.mark.parametrize("bits", [64, 2, 0])
def test_strings_are_found_also_where_hashes_collide(monkeypatch, bits):
    """Fewer bits, down to none, make strings share a hash."""
    whole, single = strings_sid._hash_all, strings_sid._hash
    mask = 2**bits - 1
    monkeypatch.setattr(strings_sid, "_hash_all", lambda *packed: whole(*packed) & np.uint64(mask))
    monkeypatch.setattr(strings_sid, "_hash", lambda text: single(text) & mask)
    packed = PackedStrings.pack(NAMES)
    wanted = [*NAMES[::-1], "pear", "apple", "e", "日"]
    assert packed.find(wanted) == [*range(9, -1, -1), -1, 0, -1, -1]
    assert packed.repeated() == []
    twice = PackedStrings.pack(["b", "a", "c", "a", "b", "a"])
    assert sorted(twice.repeated()) == ["a", "a", "b"]
    assert twice.find(["a", "b", "c", "d"]) == [1, 0, 2, -1]


def test_many_strings_are_found_as_by_a_dictionary():
    random = np.random.default_rng(0)
    names = [str(number) for number in random.choice(10**6, 20_000, replace=False)]
    row_of = {name: row for row, name in enumerate(names)}
    wanted = [str(number) for number in random.integers(0, 10**6, 5_000)]
    assert PackedStrings.pack(names).find(wanted) == [row_of.get(name, -1) for name in wanted]


@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 9], [0, 2, 1, 3]])
def test_offsets_that_tell_no_strings_apart_are_refused(offsets):
    with pytest.raises(ValueError, match="`offsets` must ascend from 0 to at most the length of `data`"):
        PackedStrings(np.zeros(4, dtype=np.uint8), np.array(offsets, dtype=np.int64))
