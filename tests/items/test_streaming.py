"""Learning from a stream, versions, and errors that leave everything as it was."""

import json

import numpy as np
import pytest

from hf_deco.items import EmbeddingDrift, SIDTable, StreamingTokenizer
from hf_deco.items.quantizer_training import QuantizerTrainer
from hf_deco.models.quantization import METHODS


@pytest.fixture
def make_stream(points, make_tokenizer):
    def make(method="prefix-basis-rq", **options):
        tokenizer = make_tokenizer(method, width=5)
        return StreamingTokenizer(tokenizer, np.arange(200), points[:200], learning_rate=0.05, **options)

    return make


def stream_of(points, kind="shifted_mean"):
    return EmbeddingDrift(points, kind, strength=2.0).batches(5, 40)


def everything(stream):
    """All that a stream is made of, as one comparable value."""
    arrays = {name: value.numpy() for name, value in stream._trainer.state().items()}
    arrays |= {"points": stream._points[: len(stream._item_ids)], "codes": stream.table.codes}
    arrays |= stream.tokenizer.arrays()
    parts = {name: (value.shape, value.tobytes()) for name, value in arrays.items()}
    return parts, stream._item_ids, stream.version, stream.version_id, stream.table.item_ids.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_changed_items_are_exactly_those_whose_codes_differ(points, make_stream, method):
    stream = make_stream(method)
    known = {str(row): points[row] for row in range(200)}
    first = stream.tokenizer
    np.testing.assert_array_equal(stream.table.codes, first.encode(points[:200]))
    assert stream.version == 1 and stream.version_id == stream.table.tokenizer_version == first.version_id
    for rows, batch in stream_of(points):
        assert np.isfinite(stream.partial_fit(rows, batch))
        known |= dict(zip(map(str, rows), batch, strict=True))
    np.testing.assert_array_equal(stream.encode(points), first.encode(points))  # nothing is published yet
    assert len(stream.table) == 200
    before = {item: tuple(row) for item, row in zip(stream.table.item_ids, stream.table.codes.tolist(), strict=True)}

    update = stream.publish()
    assert update.version == stream.version == 2
    assert update.version_id == stream.version_id == stream.tokenizer.version_id != first.version_id
    after = {item: tuple(stream.encode(x[None])[0].tolist()) for item, x in known.items()}
    table = stream.table
    assert {item: tuple(row) for item, row in zip(table.item_ids, table.codes.tolist(), strict=True)} == after
    assert set(update.added.tolist()) == set(known) - set(before) and len(update.added) > 0
    changed = {item for item in before if before[item] != after[item]}
    assert set(update.changed.tolist()) == changed and len(update.changed) == len(changed)
    assert 0 < len(changed)
    assert table.report["num_items"] == len(known)
    first.check_version(first.version_id, "the index")
    with pytest.raises(ValueError, match="the index was made with tokenizer version"):
        stream.tokenizer.check_version(first.version_id, "the index")

    unchanged = stream.publish()
    assert (unchanged.version, unchanged.version_id) == (3, update.version_id)
    assert not len(unchanged.added) and not len(unchanged.changed)


def test_what_it_was_given_is_not_touched(points, make_tokenizer):
    tokenizer, embeddings = make_tokenizer(), points.copy()
    version = tokenizer.version_id
    stream = StreamingTokenizer(tokenizer, np.arange(300), embeddings)
    stream.partial_fit(np.arange(50), 2 * points[:50])
    stream.publish()
    assert tokenizer.version_id == version != stream.version_id
    np.testing.assert_array_equal(embeddings, points)


def test_it_follows_a_mean_that_leaves(points, make_tokenizer):
    drift = EmbeddingDrift(points, "shifted_mean", strength=3.0)
    stream = StreamingTokenizer(make_tokenizer("rq"), np.arange(300), points, learning_rate=0.05)
    for rows, batch in drift.batches(60, 100):
        stream.partial_fit(rows, batch)
    stale = SIDTable.from_tokenizer(stream.tokenizer, range(300), drift.at(1), collisions="keep")
    stream.publish()
    fresh = SIDTable.from_tokenizer(stream.tokenizer, range(300), drift.at(1), collisions="keep")
    errors = [table.report["reconstruction_mse_after"] for table in (stale, fresh)]
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded_in_the_middle_it_goes_on_as_if_never_stopped(points, make_stream, tmp_path, method):
    whole, broken = make_stream(method, batch_size=16), make_stream(method, batch_size=16)
    for step, (rows, batch) in enumerate(stream_of(points)):
        assert whole.partial_fit(rows, batch) == broken.partial_fit(rows, batch)
        if step == 2:
            whole.publish()
            broken.publish()
        broken.save(tmp_path / "stream")
        broken = StreamingTokenizer.load(tmp_path / "stream")
        assert everything(broken) == everything(whole)
        assert broken.table.report == whole.table.report
        for ours, theirs in zip(broken.table.codebooks, whole.table.codebooks, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    left, right = whole.publish(), broken.publish()
    assert (left.version, left.version_id) == (right.version, right.version_id) == (3, whole.version_id)
    assert left.changed.tolist() == right.changed.tolist() and left.added.tolist() == right.added.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["stream"]


def test_long_batches_are_several_steps(points, make_stream, monkeypatch):
    stream, sizes, original = make_stream(batch_size=64), [], QuantizerTrainer.step
    losses = []

    def counted(self, batch, learning_rate):
        sizes.append((len(batch), learning_rate))
        losses.append(original(self, batch, learning_rate))
        return losses[-1]

    monkeypatch.setattr(QuantizerTrainer, "step", counted)
    assert stream.partial_fit(np.arange(150), points[:150]) == pytest.approx(np.mean(losses))
    assert sizes == [(64, 0.05), (64, 0.05), (22, 0.05)]


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_batch_changes_nothing(points, make_stream, method):
    stream = make_stream(method)
    stream.partial_fit(["a", "b"], points[:2])
    before = everything(stream)
    nan, huge = points[:3].copy(), points[:3].copy()
    nan[1, 0], huge[1] = np.nan, 1e30
    for item_ids, embeddings, message in (
        ([], points[:0], "`item_ids` must be a non-empty"),
        (["c"], points[:0], "`embeddings` must be a non-empty array"),
        (["c", "d", "e"], nan, "NaN or infinite values in 1 of 3 rows, first in row 1"),
        (["c", "d", "e"], points[:3, :5], "must have width 6 like those the tokenizer learned from, got 5"),
        (["c", "d"], points[:3], "`embeddings` has 3 rows for 2 items"),
        (["c", "d", "c"], points[:3], "`item_ids` names 'c' more than once"),
        ([1.5], points[:1], "must be strings or integers"),
        (["c", "d", "e"], huge, "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            stream.partial_fit(item_ids, embeddings)
        assert everything(stream) == before
    for embeddings, message in ((points[:0], "non-empty"), (nan, "NaN"), (points[:, :3], "width 6")):
        with pytest.raises(ValueError, match=message):
            stream.encode(embeddings)
    assert everything(stream) == before


def test_a_batch_that_fails_half_way_is_taken_back(points, make_stream, monkeypatch):
    stream, original, calls = make_stream("rq-ema", batch_size=16), QuantizerTrainer.step, []
    stream.partial_fit(np.arange(20), points[:20])
    before = everything(stream)

    def interrupted(self, batch, learning_rate):
        calls.append(len(batch))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, batch, learning_rate)

    monkeypatch.setattr(QuantizerTrainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.partial_fit(np.arange(250), points[:250])
    assert everything(stream) == before


def test_kmeans_and_tokenizers_without_training_are_refused(points, make_tokenizer):
    with pytest.raises(ValueError, match="the method 'rq-kmeans', which cannot learn from a stream; choose"):
        StreamingTokenizer(make_tokenizer("rq-kmeans"), np.arange(300), points)
    with pytest.raises(ValueError, match="`learning_rate` must be positive"):
        StreamingTokenizer(make_tokenizer(), np.arange(300), points, learning_rate=0)
    with pytest.raises(ValueError, match="`embeddings` has 300 rows for 2 items"):
        StreamingTokenizer(make_tokenizer(), [1, 2], points)


def test_load_refuses_what_does_not_belong_together(points, make_stream, tmp_path):
    stream = make_stream()
    stream.save(tmp_path / "stream")
    meta = tmp_path / "stream" / "stream.json"
    content = json.loads(meta.read_text())
    for change, message in (
        ({"format_version": 9}, "has format version 9, this version reads 1"),
        ({"tokenizer": content["tokenizer"] | {"scale": 1024.0}}, "do not belong together: the tokenizer's arrays"),
        ({"tokenizer": content["tokenizer"] | {"codebook_sizes": [8, 6]}}, "do not belong together"),
        ({"options": {"speed": 1}}, "do not belong together"),
    ):
        meta.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            StreamingTokenizer.load(tmp_path / "stream")
    meta.write_text(json.dumps(content))
    longer = make_stream()
    longer.partial_fit(["new"], points[:1])
    longer.save(tmp_path / "longer")
    (tmp_path / "longer" / "items.parquet").replace(tmp_path / "stream" / "items.parquet")
    with pytest.raises(ValueError, match="201 items, but embeddings of 200"):
        StreamingTokenizer.load(tmp_path / "stream")
    with pytest.raises(FileNotFoundError, match="items.parquet' is missing"):
        StreamingTokenizer.load(tmp_path / "longer")
    with pytest.raises(ValueError, match="holds other files"):
        stream.save(tmp_path)
