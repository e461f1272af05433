from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hf_deco.items import packing
from hf_deco.items.packing import PackedRows, int4_dots, int4_dots_reference, int8_dots, pack_int4, unpack_int4


def by_bits(byte):
    """The two signed integers of a byte, low half first, by counting."""
    return [half - 16 if half > 7 else half for half in (byte % 16, byte // 16)]


def quantized(vector, largest):
    """Integers and scale of one embedding, one value at a time."""
    scale = np.float32(max(abs(value) for value in vector)) / np.float32(largest)
    return [round(float(np.float32(value) / scale)) if scale else 0 for value in vector], scale


def integer_dot(left, right):
    return sum(int(a) * int(b) for a, b in zip(left, right, strict=True))


def test_every_pair_of_values_goes_into_its_byte_and_back():
    pairs = np.array(list(product(range(-8, 8), repeat=2)))
    packed = pack_int4(pairs)
    assert packed.dtype == np.uint8 and packed.shape == (256, 1)
    assert [by_bits(byte) for byte in packed[:, 0].tolist()] == pairs.tolist()
    assert len(np.unique(packed)) == 256
    back = unpack_int4(packed, 2)
    assert back.dtype == np.int8 and back.tolist() == pairs.tolist()


@given(st.data(), st.integers(1, 9), st.integers(0, 5))
@settings(deadline=None)
def test_any_width_is_packed_bit_for_bit(data, width, rows):
    values = data.draw(hnp.arrays(np.int64, (rows, width), elements=st.integers(-8, 7)))
    packed = pack_int4(values)
    assert packed.shape == (rows, (width + 1) // 2)
    for row, integers in zip(packed.tolist(), values.tolist(), strict=True):
        assert [half for byte in row for half in by_bits(byte)] == integers + [0] * (width % 2)
    np.testing.assert_array_equal(unpack_int4(packed, width), values)


@pytest.mark.parametrize("value", [-9, 8])
def test_what_four_bits_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match=rf"`values` must lie in -8..7 to fit four bits, got .*{value}"):
        pack_int4(np.array([[0, value]]))


def test_only_matrices_of_integers_are_packed():
    with pytest.raises(ValueError, match=r"`values` must be integers of shape \(n, d\), got float64 of shape \(1, 1\)"):
        pack_int4(np.array([[0.5]]))
    with pytest.raises(ValueError, match=r"got int64 of shape \(2,\)"):
        pack_int4(np.array([1, 2]))


@pytest.mark.parametrize("dots", [int4_dots, int4_dots_reference])
@given(data=st.data(), width=st.integers(1, 40), rows=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_int4_dots_are_those_of_python_integers(dots, data, width, rows):
    draw = st.integers(-8, 7) | st.sampled_from((-8, 7))
    values = data.draw(hnp.arrays(np.int8, (rows, width), elements=draw))
    query = data.draw(hnp.arrays(np.int8, width, elements=draw))
    got = dots(pack_int4(values), pack_int4(query[None])[0])
    assert got.tolist() == [integer_dot(row, query) for row in values]


@pytest.mark.parametrize("width", [1, 7, 128, 1040, 1041, 4096])
def test_dots_are_exact_at_the_largest_values_of_any_width(width):
    signs = np.where(np.random.default_rng(0).random((3, width)) < 0.5, -1, 1)
    signs[0] = 1
    rows, query = (127 * signs).astype(np.int8), np.full(width, 127, dtype=np.int8)
    rows[0, -1] = 126  # the exact sum is odd, which rounding would show
    assert int8_dots(rows, query).astype(int).tolist() == [integer_dot(row, query) for row in rows]
    rows, query = (-8 * signs).astype(np.int8).clip(-8, 7), np.full(width, -8, dtype=np.int8)
    packed, wanted = (pack_int4(rows), pack_int4(query[None])[0]), [integer_dot(row, query) for row in rows]
    assert int4_dots(*packed).astype(int).tolist() == wanted
    assert int4_dots_reference(*packed).astype(int).tolist() == wanted


@pytest.mark.parametrize(("precision", "largest"), [("int8", 127), ("int4", 7)])
def test_rows_are_quantised_alone_by_their_largest_value(precision, largest):
    embeddings = np.random.default_rng(1).standard_normal((50, 7)).astype(np.float32)
    embeddings[3], embeddings[4], embeddings[5, 1:] = 0, -0.0, 0
    rows = PackedRows.pack(embeddings, precision)
    expected = [quantized(vector, largest) for vector in embeddings.tolist()]
    assert rows.integers().tolist() == [integers for integers, _ in expected]
    np.testing.assert_array_equal(rows.scales, np.array([scale for _, scale in expected], dtype=np.float32))
    assert rows.integers()[5].tolist() == [largest * int(np.sign(embeddings[5, 0]))] + [0] * 6
    assert rows.unpack().dtype == np.float32 and not rows.unpack()[3:5].any()
    np.testing.assert_allclose(rows.unpack(), embeddings, atol=0.51 * rows.scales.max())
    np.testing.assert_array_equal(rows.take(np.array([7, 2])).unpack(), rows.unpack()[[7, 2]])
    np.testing.assert_array_equal(PackedRows.pack(embeddings[20:], precision).data, rows.data[20:])


def test_subnormal_and_huge_rows_stay_within_their_integers():
    tiny, huge = np.float32(1e-45), np.finfo(np.float32).max
    rows = PackedRows.pack(np.array([[tiny, 0], [186 * tiny, 1 * tiny], [huge, -huge]], dtype=np.float32), "int8")
    assert rows.integers().tolist() == [[0, 0], [127, 1], [127, -127]]
    assert np.isfinite(rows.scales).all()


def test_fp16_rows_are_rounded_once():
    embeddings = np.array([[1 / 3, -65504.0], [1e-9, 65519.0]], dtype=np.float32)
    rows = PackedRows.pack(embeddings, "fp16")
    assert rows.scales is None and rows.data.dtype == np.float16
    assert rows.unpack().tolist() == embeddings.astype(np.float16).astype(np.float32).tolist()
    with pytest.raises(ValueError, match="`embeddings` reach 65520, but fp16 ends at 65504; normalise them"):
        PackedRows.pack(np.float32([[1, -65520]]), "fp16")


@pytest.mark.parametrize("precision", packing.PRECISIONS)
def test_scores_are_a_naive_loops_and_do_not_depend_on_the_other_rows(precision, monkeypatch):
    rng = np.random.default_rng(2)
    rows = PackedRows.pack(rng.standard_normal((40, 5)), precision)
    user = rng.standard_normal(5).astype(np.float32)
    if precision == "fp16":
        naive = [float(np.dot(vector.astype(np.float64), user.astype(np.float64))) for vector in rows.data]
    else:
        query, scale = quantized(user.tolist(), {"int8": 127, "int4": 7}[precision])
        products = [integer_dot(integers, query) for integers in rows.integers()]
        naive = [np.float32(p) * (s * scale) for p, s in zip(products, rows.scales, strict=True)]
    wanted = np.array([39, 0, 0, *range(10)])
    scores = rows.scores(wanted, user)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, np.array(naive)[wanted], rtol=1e-5 if precision == "fp16" else 0, atol=1e-6)
    np.testing.assert_allclose(rows.reference_scores(user), naive, rtol=1e-6, atol=0)
    monkeypatch.setattr(packing, "_BLOCK", 3)
    np.testing.assert_array_equal(rows.scores(wanted, user), scores)
    assert [rows.scores(wanted[[n]], user).item() for n in range(len(wanted))] == scores.tolist()
    assert rows.scores(wanted[:0], user).shape == (0,)


def test_packing_in_blocks_is_packing_at_once(monkeypatch):
    embeddings = np.random.default_rng(3).standard_normal((10, 3))
    whole = [PackedRows.pack(embeddings, precision) for precision in packing.PRECISIONS]
    monkeypatch.setattr(packing, "_BLOCK", 4)
    for rows in whole:
        again = PackedRows.pack(embeddings, rows.precision)
        np.testing.assert_array_equal(again.data, rows.data)
        np.testing.assert_array_equal(again.unpack(), rows.unpack())


def test_parts_that_do_not_fit_are_refused():
    data, scales = np.zeros((2, 3), dtype=np.int8), np.ones(2, dtype=np.float32)
    with pytest.raises(ValueError, match="`precision` must be one of fp16, int8, int4, got 'int2'"):
        PackedRows.pack(np.ones((2, 3)), "int2")
    with pytest.raises(ValueError, match=r"`data` of int8 rows of width 4 must be int8 of shape \(N, 4\), got int8"):
        PackedRows(data, scales, 4, "int8")
    with pytest.raises(ValueError, match=r"`data` of int4 rows of width 5 must be uint8 of shape \(N, 3\), got int8"):
        PackedRows(data, scales, 5, "int4")
    with pytest.raises(ValueError, match="`scales` must be given for int8 and int4, and only there; this is int8"):
        PackedRows(data, None, 3, "int8")
    with pytest.raises(ValueError, match=r"`scales` must be float32 of shape \(2,\), got float32 of shape \(1,\)"):
        PackedRows(data, scales[:1], 3, "int8")
    with pytest.raises(ValueError, match="`scales` holds NaN or infinite values"):
        PackedRows(data, np.float32([1, np.nan]), 3, "int8").check_finite()
    for value in (np.inf, -np.inf, np.nan):
        with pytest.raises(ValueError, match="`data` holds NaN or infinite values"):
            PackedRows(np.float16([[1.0], [value]]), None, 1, "fp16").check_finite()
    for precision in packing.PRECISIONS:
        PackedRows.pack([[-65504.0, 65504.0, 0.0, 1e-8]], precision).check_finite()
    with pytest.raises(ValueError, match="`embeddings` holds NaN or infinite values in 1 of 2 rows, first in row 1"):
        PackedRows.pack([[1.0], [np.nan]])


@pytest.mark.skipif(packing.numkong is None, reason="NumKong is not installed")
def test_numkong_is_what_answers_where_it_is_installed(monkeypatch):
    rows, query = pack_int4(np.arange(-8, 8).reshape(4, 4)), pack_int4(np.array([[1, -2, 3, -4]]))[0]
    monkeypatch.setattr(packing, "int4_dots_reference", None)
    assert int4_dots(rows, query).tolist() == [integer_dot(v, [1, -2, 3, -4]) for v in np.arange(-8, 8).reshape(4, 4)]


def test_the_reference_answers_where_numkong_is_not_installed(monkeypatch):
    rows, query = pack_int4(np.arange(-8, 8).reshape(4, 4)), pack_int4(np.array([[1, -2, 3, -4]]))[0]
    monkeypatch.setattr(packing, "numkong", None)
    assert int4_dots(rows, query).tolist() == [integer_dot(v, [1, -2, 3, -4]) for v in np.arange(-8, 8).reshape(4, 4)]
