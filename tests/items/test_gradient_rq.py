"""Gradient quantisers: training that can be stopped, and what codes stand for."""

import numpy as np
import pytest
import torch

from hf_deco.items import QuantizerTraining
from hf_deco.items.gradient_rq import GradientRQ
from hf_deco.items.quantizer_training import QuantizerTrainer
from hf_deco.models.quantization import METHODS, ResidualQuantizer

TRAINING = QuantizerTraining(num_steps=9, batch_size=64, learning_rate=0.05, save_steps=4)


def state(quantizer):
    return {name: value.numpy().copy() for name, value in quantizer.quantizer.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def stop_at(monkeypatch, step):
    """Training is interrupted in its step number `step`."""
    original, steps = QuantizerTrainer.step, []

    def interrupted(self, batch, learning_rate):
        steps.append(learning_rate)
        if len(steps) == step:
            raise KeyboardInterrupt
        return original(self, batch, learning_rate)

    monkeypatch.setattr(QuantizerTrainer, "step", interrupted)
    return steps


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_stopped_and_gone_on_with_is_as_if_never_stopped(points, tmp_path, monkeypatch, method, restart):
    def make():
        return GradientRQ((8, 6, 5), method, training=TRAINING, seed=1, restart_dead_codes=restart)

    whole = make().fit(points)
    checkpoint = tmp_path / "deep" / "training.safetensors"
    stop_at(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        make().fit(points, checkpoint)
    monkeypatch.undo()
    steps = stop_at(monkeypatch, 99)
    resumed = make().fit(points, checkpoint)
    assert len(steps) == 5  # of nine, four were kept
    assert_same(state(whole), state(resumed))
    assert [path.name for path in checkpoint.parent.iterdir()] == ["training.safetensors"]
    monkeypatch.undo()
    assert_same(state(whole), state(make().fit(points)))
    other = GradientRQ((8, 6, 5), method, training=TRAINING, seed=2, restart_dead_codes=restart).fit(points)
    assert any(not np.array_equal(value, state(other)[name]) for name, value in state(whole).items())


def test_a_checkpoint_of_another_training_is_refused_and_stays(points, tmp_path):
    checkpoint = tmp_path / "training.safetensors"
    GradientRQ((8, 6), "rq", training=TRAINING).fit(points, checkpoint)
    before = checkpoint.read_bytes()
    others = [
        (GradientRQ((8, 6), "rq", training=TRAINING, seed=1), points),
        (GradientRQ((8, 5), "rq", training=TRAINING), points),
        (GradientRQ((8, 6), "basis-rq", training=TRAINING), points),
        (GradientRQ((8, 6), "rq", training=QuantizerTraining(num_steps=10, batch_size=64)), points),
        (GradientRQ((8, 6), "rq", training=TRAINING), points[::-1]),
    ]
    for quantizer, embeddings in others:
        with pytest.raises(ValueError, match="training.safetensors' is of a training with other embeddings or options"):
            quantizer.fit(embeddings, checkpoint)
        assert quantizer.quantizer is None
    checkpoint.write_bytes(before[:-30])
    with pytest.raises(ValueError, match="training.safetensors' is damaged .*; delete it to start anew"):
        GradientRQ((8, 6), "rq", training=TRAINING).fit(points, checkpoint)


def test_batches_are_whole_and_every_epoch_takes_other_items():
    training = QuantizerTraining(num_steps=1, batch_size=30)
    trainer = QuantizerTrainer(ResidualQuantizer((2,), 3), training, seed=4)
    batches = [trainer._batch_rows(step, 100).tolist() for step in range(6)]
    assert all(len(set(batch)) == 30 for batch in batches)
    for epoch in (batches[:3], batches[3:]):
        assert len({row for batch in epoch for row in batch}) == 90
    assert batches[:3] != batches[3:]
    assert trainer._batch_rows(1, 100).tolist() == batches[1]  # whatever came before
    assert sorted(trainer._batch_rows(0, 7).tolist()) == list(range(7))  # fewer items than a batch


def test_a_step_is_adam_with_decay_on_codes_but_not_on_maps_and_scales(points):
    training = QuantizerTraining(weight_decay=0.5, learning_rate=0.01)
    quantizer = ResidualQuantizer((8, 6), 6, "prefix-basis-rq")
    quantizer.init_from_data(torch.from_numpy(points))
    before = {name: value.detach().clone() for name, value in quantizer.named_parameters()}
    gradients = torch.autograd.grad(quantizer(torch.from_numpy(points)).loss, quantizer.parameters(), allow_unused=True)
    assert QuantizerTrainer(quantizer, training).step(torch.from_numpy(points), 0.01) > 0
    exempt = ["levels.0.basis", "levels.1.basis", "scales.0"]
    for (name, value), gradient in zip(quantizer.named_parameters(), gradients, strict=True):
        decayed = before[name] * (1 if name in exempt else 1 - 0.01 * 0.5)
        expected = decayed - 0.01 * gradient / (gradient.abs() + 1e-8)  # Adam's first step
        torch.testing.assert_close(value.detach(), expected, msg=name, atol=1e-5, rtol=1e-4)


def test_the_learning_rate_falls_along_half_a_cosine(points, monkeypatch):
    rates = stop_at(monkeypatch, 99)
    GradientRQ((4, 2), "rq", training=QuantizerTraining(num_steps=4, learning_rate=0.1)).fit(points)
    np.testing.assert_allclose(rates, 0.05 * (1 + np.cos(np.pi * np.arange(4) / 4)))


@pytest.mark.parametrize("method", METHODS)
def test_the_scale_of_embeddings_changes_nothing(points, method):
    plain, large = (GradientRQ((8, 6), method, training=TRAINING).fit(factor * points) for factor in (1, 1024))
    assert large.scale == 1024 * plain.scale
    np.testing.assert_array_equal(plain.encode(points), large.encode(1024 * points))
    codes = plain.encode(points)
    np.testing.assert_array_equal(1024 * plain.decode(codes), large.decode(codes))
    deviation = np.sqrt(np.square(points - points.mean(axis=0)).sum(axis=1).mean()) / plain.scale
    assert 2**-0.5 <= deviation <= 2**0.5


@pytest.mark.parametrize("method", METHODS)
def test_codes_residuals_and_distances_against_loops(points, make_tokenizer, loops, method):
    tokenizer = make_tokenizer(method)
    quantizer, reference = tokenizer.quantizer, loops(tokenizer)
    codes = tokenizer.encode(points)
    assert codes.dtype == np.int32 and codes.shape == (300, 3)
    some = range(0, 300, 17)
    assert [tuple(codes[row].tolist()) for row in some] == [reference.encode(points[row]) for row in some]
    arbitrary = np.random.default_rng(0).integers(0, (8, 6, 5), (300, 3))
    residuals = list(quantizer.residuals(points, arbitrary))
    assert len(residuals) == 4
    np.testing.assert_allclose(quantizer.decode(arbitrary) + residuals[-1], points, atol=1e-4)
    for row in some:
        for level in range(4):
            prefix = tuple(arbitrary[row, :level].tolist())
            np.testing.assert_allclose(residuals[level][row], reference.residual(points[row], prefix), atol=1e-4)
            if level < 3:
                found = quantizer.distances(residuals[level][[row]], arbitrary[[row], :level])[0]
                expected = reference.distances(points[row], prefix) / quantizer.scale**2
                np.testing.assert_allclose(found - found[0], expected - expected[0], atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_codebooks_add_up_to_what_codes_stand_for(points, make_tokenizer, loops, method):
    tokenizer = make_tokenizer(method)
    codes = tokenizer.encode(points)
    books = tokenizer.codebooks(codes)
    assert [book.shape for book in books] == [(8, 6), (6, 6), (5, 6)]
    sums = sum(book[column] for book, column in zip(books, codes.T, strict=True))
    decoded = tokenizer.quantizer.decode(codes)
    if method != "prefix-basis-rq":
        np.testing.assert_allclose(sums, decoded, atol=1e-4)
        return
    np.testing.assert_allclose(sums.mean(axis=0), decoded.mean(axis=0), atol=1e-4)
    reference = loops(tokenizer)
    for level, code in ((0, 3), (1, 2), (2, 4)):
        added = [reference.codebook(tuple(row[:level]))[code] for row in codes.tolist() if row[level] == code]
        expected = np.mean(added, axis=0) + (reference.mean if level == 0 else 0)
        np.testing.assert_allclose(books[level][code], expected, atol=1e-4)


def test_a_code_that_no_item_has_stands_for_what_it_would_add_on_average(make_tokenizer, loops):
    tokenizer = make_tokenizer()
    reference = loops(tokenizer)
    codes = np.array([[0, 1, 2], [3, 1, 2]])
    mean_of_scales = (reference.scales[0][0] + reference.scales[0][3]) / 2
    mean_of_biases = (reference.biases[0][0] + reference.biases[0][3]) / 2
    expected = mean_of_scales * reference.books[1][5] + mean_of_biases
    np.testing.assert_allclose(tokenizer.codebooks(codes)[1][5], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "`num_steps` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"save_steps": -1}, "`save_steps` must be at least 1, got -1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive, got 0.0"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be positive, got nan"),
        ({"weight_decay": -0.1}, "`weight_decay` must not be negative, got -0.1"),
        ({"init": "random"}, "`init` must be one of kmeans, uniform, got 'random'"),
    ],
)
def test_bad_training(change, message):
    with pytest.raises(ValueError, match=message):
        QuantizerTraining(**change)


def test_several_processes_are_refused(points, monkeypatch):
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 2)
    with pytest.raises(ValueError, match="trained by one process, and there are 2: build the SIDs first"):
        GradientRQ((4, 2), "rq", training=TRAINING).fit(points)
