"""The one entry point for all tokenizers, and SID tables made by it."""

import json
from itertools import product

import numpy as np
import pytest

from hf_deco.items import (
    ItemTokenizer,
    Projection,
    QuantizerTraining,
    RQKMeans,
    SIDTable,
    format_report,
    resolve_collisions,
)
from hf_deco.items.tokenizer import METHODS

TRAINING = QuantizerTraining(num_steps=6, batch_size=64, learning_rate=0.05)
SIZES = (8, 6, 5)


@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_valid_codes_decided_by_the_seed(points, method, width):
    first, same, other = (
        ItemTokenizer(SIZES, method, width=width, training=TRAINING, seed=seed).fit(points) for seed in (1, 1, 2)
    )
    codes = first.encode(points)
    assert codes.dtype == np.int32 and codes.shape == (300, 3)
    assert (codes >= 0).all() and (codes < SIZES).all()
    np.testing.assert_array_equal(codes, same.encode(points))
    assert first.version_id == same.version_id != other.version_id
    assert len(np.unique(codes[:, 0])) == 8
    assert first.project(points).shape == (300, width or 6)
    for row in (0, 7, 299):  # an item's codes do not depend on the others
        np.testing.assert_array_equal(first.encode(points[row : row + 1])[0], codes[row])


def test_rq_kmeans_is_what_it_was(points):
    tokenizer = ItemTokenizer(SIZES, seed=3, num_iterations=5).fit(points)
    plain = RQKMeans(SIZES, seed=3, num_iterations=5).fit(points)
    np.testing.assert_array_equal(tokenizer.encode(points), plain.encode(points))
    projected = ItemTokenizer(SIZES, width=3).fit(points)
    expected = RQKMeans(SIZES).fit_encode(Projection.fit(points, 3)(points))
    np.testing.assert_array_equal(projected.encode(points), expected)


def naive_report(codes, points, decoded, sizes, categories):
    rows = [tuple(row) for row in codes.tolist()]
    purities = []
    for level in range(1, len(sizes) + 1):
        shares = []
        for i, row in enumerate(rows):
            others = [j for j, other in enumerate(rows) if j != i and other[:level] == row[:level]]
            if others:
                shares.append(np.mean([categories[j] == categories[i] for j in others]))
        purities.append(np.mean(shares) if shares else None)
    return {
        "utilization": len(set(rows)) / np.prod(sizes),
        "collision_rate_after": np.mean([rows.count(row) > 1 for row in rows]),
        "largest_bucket_after": max(rows.count(row) for row in rows),
        "reconstruction_mse_after": np.square(points - decoded).mean(),
        "prefix_purity": purities,
    }


@pytest.mark.parametrize("method", METHODS)
def test_the_report_against_naive_formulas(points, make_tokenizer, loops, method):
    tokenizer = make_tokenizer(method)
    categories = [f"c{row % 4}" for row in range(300)]
    table = SIDTable.from_tokenizer(tokenizer, range(300), points, collisions="keep", categories=categories)
    np.testing.assert_array_equal(table.codes, tokenizer.encode(points))
    if method == "rq-kmeans":
        decoded = tokenizer.quantizer.decode(table.codes)
    else:
        reference = loops(tokenizer)
        decoded = points - [reference.residual(x, tuple(row)) for x, row in zip(points, table.codes, strict=True)]
    expected = naive_report(table.codes, points, decoded, SIZES, categories)
    for name, value in expected.items():
        assert table.report[name] == pytest.approx(value, rel=1e-4), name
    for before, after in (("utilization_before", "utilization"), ("largest_bucket_before", "largest_bucket_after")):
        assert table.report[before] == table.report[after]
    for level, column in zip(table.report["levels"], table.codes.T, strict=True):
        shares = np.unique(column, return_counts=True)[1] / 300
        assert level["usage"] == len(shares) / level["size"]
        assert level["perplexity"] == pytest.approx(np.prod(shares**-shares))
    assert json.loads(json.dumps(table.report)) == table.report
    assert table.report["method"] == method and "width" not in table.report
    assert format_report(table.report).startswith(f"300 items, codebook sizes (8, 6, 5), {method}\n")


def test_the_report_tells_what_a_projection_keeps(points, make_tokenizer):
    tokenizer = make_tokenizer(width=4)
    report = SIDTable.from_tokenizer(tokenizer, range(300), points, collisions="keep").report
    kept = np.square(tokenizer.project(points)).sum() / np.square(points - points.mean(axis=0)).sum()
    assert report["width"] == 4 and report["projected_variance"] == pytest.approx(kept, rel=1e-4)
    text = f"prefix-basis-rq on 4 directions with {100 * kept:.1f}% of the variance"
    assert format_report(report).splitlines()[0].endswith(text)


@pytest.mark.parametrize("method", METHODS)
def test_build_is_fit_then_from_tokenizer_and_resolves_collisions(points, method):
    ids, popularity = [f"i{row}" for row in range(300)], np.arange(300) % 7
    options = {"width": 4, "training": TRAINING, "seed": 5}
    table = SIDTable.build(ids, points, (8, 8, 8), method=method, popularity=popularity, titles=ids, **options)
    tokenizer = ItemTokenizer((8, 8, 8), method, **options).fit(points)
    again = SIDTable.from_tokenizer(tokenizer, ids, points, popularity=popularity, titles=ids)
    np.testing.assert_array_equal(table.codes, again.codes)
    assert table.report == again.report and table.titles.tolist() == ids and table.seed == 5
    assert table.tokenizer_version == again.tokenizer_version == tokenizer.version_id
    assert len(np.unique(table.codes, axis=0)) == 300
    books = tokenizer.codebooks(table.codes)
    assert [book.shape for book in table.codebooks] == [(8, 4)] * 3
    for ours, theirs in zip(table.codebooks, books, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    before = tokenizer.encode(points)
    expected, moved = resolve_collisions(
        before, tokenizer.project(points), tokenizer.reconstruction, popularity, np.array(ids)
    )
    np.testing.assert_array_equal(table.codes, expected)
    assert table.report["moved_share"] == moved.mean() > 0


def test_a_moved_item_goes_to_the_nearest_free_code_after_its_own_prefix(points, make_tokenizer, loops):
    """With a codebook of its own after every prefix; the rule spelled out over the set of all free IDs."""
    tokenizer = make_tokenizer(sizes=(6, 4, 14))
    reference = loops(tokenizer)
    ids, popularity = [f"{row:03}" for row in range(300)], (np.arange(300) * 7) % 10
    table = SIDTable.from_tokenizer(tokenizer, ids, points, popularity=popularity)
    codes = [tuple(row) for row in tokenizer.encode(points).tolist()]
    free, waiting = set(product(range(6), range(4), range(14))), []
    for item in sorted(range(300), key=lambda i: (-popularity[i], ids[i])):
        if codes[item] in free:
            free.remove(codes[item])
        else:
            waiting.append(item)
    levels_left = []
    for length in (2, 1, 0):
        turned_away = []
        for item in waiting:
            prefix = codes[item][:length]
            if not any(sid[:length] == prefix for sid in free):
                turned_away.append(item)
                continue
            while len(prefix) < 3:
                open_codes = sorted({sid[len(prefix)] for sid in free if sid[: len(prefix)] == prefix})
                distances = reference.distances(points[item], prefix)
                prefix = (*prefix, min(open_codes, key=lambda code: distances[code]))
            codes[item] = prefix
            free.remove(prefix)
            levels_left.append(length)
        waiting = turned_away
    assert {2, 1} <= set(levels_left)
    np.testing.assert_array_equal(table.codes, codes)


@pytest.mark.parametrize("method", METHODS)
def test_save_and_load_encode_alike(points, make_tokenizer, tmp_path, method):
    tokenizer = make_tokenizer(method, width=5)
    tokenizer.save(tmp_path / "tokenizer")
    loaded = ItemTokenizer.load(tmp_path / "tokenizer")
    np.testing.assert_array_equal(loaded.encode(points), tokenizer.encode(points))
    assert (loaded.method, loaded.codebook_sizes, loaded.width) == (method, SIZES, 5)
    assert loaded.version_id == tokenizer.version_id
    assert loaded.projection.explained_variance == tokenizer.projection.explained_variance
    names = {path.name for path in (tmp_path / "tokenizer").iterdir()}
    assert names == {"tokenizer.json", "tokenizer.safetensors"}
    tokenizer.save(tmp_path / "tokenizer")  # replaces


def test_options_of_the_quantiser_are_kept(points, tmp_path):
    tokenizer = ItemTokenizer(SIZES, "basis-rq", training=TRAINING, newton_schulz_steps=12).fit(points)
    tokenizer.save(tmp_path / "tokenizer")
    loaded = ItemTokenizer.load(tmp_path / "tokenizer")
    assert loaded.quantizer.quantizer.config["newton_schulz_steps"] == 12
    assert max(loaded.quantizer.quantizer.orthogonality_error()) < 1e-3
    np.testing.assert_array_equal(loaded.encode(points), tokenizer.encode(points))


def test_load_refuses_files_of_two_tokenizers(points, make_tokenizer, tmp_path):
    make_tokenizer("rq").save(tmp_path / "a")
    make_tokenizer("rq", seed=1).save(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.safetensors").replace(tmp_path / "a" / "tokenizer.safetensors")
    with pytest.raises(ValueError, match="the files are of two tokenizers, or damaged"):
        ItemTokenizer.load(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="tokenizer.safetensors' is truncated or damaged"):
        ItemTokenizer.load(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="tokenizer.safetensors' is missing; .* `ItemTokenizer.save` wrote"):
        ItemTokenizer.load(tmp_path / "b")


def test_versions_are_told_apart(points, make_tokenizer, tmp_path):
    tokenizer, other = make_tokenizer("rq"), make_tokenizer("rq", seed=1)
    table = SIDTable.from_tokenizer(tokenizer, range(300), points, collisions="keep")
    table.select(["3", "5"]).save(tmp_path / "sids")
    loaded = SIDTable.load(tmp_path / "sids")
    assert len(tokenizer.version_id) == 16
    tokenizer.check_version(loaded.tokenizer_version, "the SID table")
    message = f"the SID table was made with tokenizer version {tokenizer.version_id}, but this .* {other.version_id}"
    with pytest.raises(ValueError, match=message):
        other.check_version(loaded.tokenizer_version, "the SID table")
    with pytest.raises(ValueError, match="the index was made with tokenizer version unknown, .* rebuild the index"):
        tokenizer.check_version(None, "the index")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebook_sizes": (8, 1)}, r"`codebook_sizes` \(8, 1\) has a level of size 1"),
        ({"codebook_sizes": (301, 4)}, "asks for 301 codes at the first level, but the 300 items have only 300"),
        ({"width": 7}, "`width` must be between 1 and the embeddings' 6 columns, got 7"),
        ({"width": 0}, "`width` must be at least 1, got 0"),
        ({"seed": -1}, "`seed` must not be negative, got -1"),
    ],
)
def test_what_no_method_accepts(points, method, change, message):
    options = {"codebook_sizes": (8, 4), "training": TRAINING} | change
    with pytest.raises(ValueError, match=message):
        ItemTokenizer(method=method, **options).fit(points)


@pytest.mark.parametrize("method", METHODS)
def test_embeddings_that_no_method_accepts(points, method):
    tokenizer = ItemTokenizer((8, 4), method, training=TRAINING)
    with pytest.raises(ValueError, match="learned nothing yet; call `fit` first"):
        tokenizer.encode(points)
    bad = points.copy()
    bad[17, 2] = np.nan
    for embeddings, message in (
        (bad, "NaN or infinite values in 1 of 300 rows, first in row 17"),
        (np.ones((300, 6)), "no variance|only 1 distinct"),
        (points[:0], "non-empty array"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenizer.fit(embeddings)
    tokenizer.fit(points)
    version = tokenizer.version_id
    for embeddings, message in ((bad, "NaN"), (points[:, :5], "must have width 6 like those .* got 5")):
        with pytest.raises(ValueError, match=message):
            tokenizer.encode(embeddings)
    with pytest.raises(ValueError, match="NaN"):
        tokenizer.fit(bad)
    assert tokenizer.version_id == version


def test_a_later_level_of_a_gradient_method_needs_an_item_a_code(points):
    with pytest.raises(ValueError, match=r"`codebook_sizes` \(8, 64\) has a level of 64 codes for 40 items"):
        ItemTokenizer((8, 64), "rq", training=TRAINING).fit(points[:40])


def test_bad_methods_and_options(points):
    with pytest.raises(ValueError, match="`method` must be one of rq-kmeans, rq, .* got 'vq'"):
        ItemTokenizer((4,), "vq")
    with pytest.raises(ValueError, match="`newton_schulz_steps` is no argument of the method 'rq-kmeans'"):
        ItemTokenizer((4,), newton_schulz_steps=3)
    with pytest.raises(ValueError, match="`ema_decay` must be at least 0 and below 1, got 2"):
        ItemTokenizer((4,), "rq-ema", ema_decay=2)
    with pytest.raises(ValueError, match="`categories` has 2 entries for 300 items"):
        SIDTable.build(range(300), points, (8, 8, 8), categories=["a", "b"])
