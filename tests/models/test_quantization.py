"""Residual quantisers: every method behind the one interface, against naive formulas and an independent library."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_deco.models.codebook_search import kmeans
from hf_deco.models.quantization import METHODS, ResidualQuantizer

SIZES, WIDTH = (7, 5, 6, 4), 10


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def build(method, sizes=SIZES, width=WIDTH, seed=0, **kwargs):
    """A quantiser whose every tensor is random: codes apart, maps away from the identity, scales of either sign."""
    quantizer = ResidualQuantizer(sizes, width, method, **kwargs)
    with torch.no_grad():
        quantizer.mean.copy_(random(width, seed=seed + 90))
        for level, part in enumerate(quantizer.levels):
            part.reset(random(sizes[level], width, seed=seed + level) / (level + 1))
            if hasattr(part, "basis"):
                part.basis.add_(0.2 * random(width, width, seed=seed + 10 + level))
        for level, (scale, bias) in enumerate(zip(quantizer.scales, quantizer.biases, strict=True)):
            scale.add_(0.7 * random(*scale.shape, seed=seed + 20 + level))
            bias.add_(0.2 * random(*bias.shape, seed=seed + 30 + level))
    return quantizer


def affine_of(quantizer, codes):
    """Composite scale and bias `(d,)` of the level after these codes, by Equation 5 as it is written."""
    scales = [quantizer.scales[k][code].double() for k, code in enumerate(codes)]
    biases = [quantizer.biases[k][code].double() for k, code in enumerate(codes)]
    ones = torch.ones(quantizer.mean.shape[0], dtype=torch.float64)
    gamma = torch.stack([ones, *scales]).prod(0)
    beta = sum((biases[k] * torch.stack([ones, *scales[k + 1 :]]).prod(0) for k in range(len(codes))), 0 * ones)
    return gamma, beta


def naive(quantizer, item):
    """Codes, quantised `(d,)` and loss of one item in float64."""
    residual = item.double() - quantizer.mean.double()
    quantized, codes, loss = quantizer.mean.double(), [], 0
    weight = quantizer.config["commitment_weight"] + (quantizer.config["method"] != "rq-ema")
    for codebook in quantizer.codebooks():
        codebook = codebook.double()
        if quantizer.config["method"] == "prefix-basis-rq":
            gamma, beta = affine_of(quantizer, codes)
            codebook = gamma * codebook + beta
        squares = (residual - codebook).square().sum(1)
        codes.append(int(squares.argmin()))
        loss = loss + weight * squares.amin()
        residual, quantized = residual - codebook[codes[-1]], quantized + codebook[codes[-1]]
    return codes, quantized, loss


@pytest.mark.parametrize("method", METHODS)
def test_codes_quantised_and_loss_are_the_naive_ones(method):
    quantizer, x = build(method, commitment_weight=0.3).eval(), 2 * random(60, WIDTH, seed=50)
    quantized, codes, loss = quantizer(x)
    with torch.no_grad():
        expected = [naive(quantizer, item) for item in x]
    assert codes.tolist() == [item[0] for item in expected] and codes.dtype == torch.long
    torch.testing.assert_close(quantized.double(), torch.stack([item[1] for item in expected]), rtol=0, atol=1e-4)
    torch.testing.assert_close(loss.double(), torch.stack([item[2] for item in expected]).mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_decode_gives_exactly_what_was_quantised(method, training):
    quantizer, x = build(method).train(training), random(300, WIDTH, seed=50)
    twin = copy.deepcopy(quantizer)  # a training pass moves the running means
    quantized, codes, _ = quantizer(x)
    assert torch.equal(twin.decode(codes), quantized)
    assert torch.equal(twin.decode(codes.int()), quantized)
    assert torch.equal(twin.encode(x), codes)


@pytest.mark.parametrize("batch_size", [1, 13])
@pytest.mark.parametrize("method", METHODS)
def test_codes_do_not_depend_on_the_batch(method, batch_size, monkeypatch):
    quantizer = build(method, (31, 17, 9), 32).eval()
    # Half of the items lie half-way between two codes, up to rounding.
    codebook = quantizer.codebooks()[0]
    between = (codebook[:, None] + codebook)[torch.triu(torch.ones(31, 31, dtype=torch.bool), 1)][:300] / 2
    x = torch.cat([between + quantizer.mean, random(300, 32, seed=50)])
    codes = quantizer.encode(x)
    assert torch.equal(torch.cat([quantizer.encode(part) for part in x.split(batch_size)]), codes)
    monkeypatch.setattr("hf_deco.models.quantization.CHUNK_ROWS", 37)
    assert torch.equal(quantizer.encode(x), codes)
    assert torch.equal(quantizer(x).codes, codes)


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded_quantiser_gives_the_same_codes(method, tmp_path):
    quantizer, x = build(method, restart_dead_codes=True), random(200, WIDTH, seed=50)
    for step in range(3):
        quantizer(random(40, WIDTH, seed=60 + step))
    save_file(quantizer.state_dict(), tmp_path / "quantizer.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(quantizer.config))
    loaded = ResidualQuantizer(**json.loads((tmp_path / "config.json").read_text())).eval()
    loaded.encode(x)  # a kept codebook must not survive the loading
    loaded.load_state_dict(load_file(tmp_path / "quantizer.safetensors"))
    assert torch.equal(loaded.encode(x), quantizer.eval().encode(x))
    assert torch.equal(loaded.decode(loaded.encode(x)), quantizer.decode(quantizer.encode(x)))
    assert loaded.config == quantizer.config
    # And training goes on in the same way.
    more = random(40, WIDTH, seed=70)
    assert torch.equal(loaded.train()(more).loss, quantizer.train()(more).loss)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, quantizer.state_dict()[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_autocast_changes_nothing(method):
    quantizer, x = build(method, (64, 32, 16), 24).eval(), random(4000, 24, seed=50)
    outside = quantizer(x)
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantizer(x)
        assert torch.equal(quantizer.encode(x), outside.codes)
        assert torch.equal(quantizer.decode(outside.codes), outside.quantized)
    for one, other in zip(outside, inside, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    rounded = quantizer.encode(x.bfloat16())
    assert not torch.equal(rounded, outside.codes)  # what half precision would do


@pytest.mark.parametrize("method", METHODS)
def test_straight_through_gradient_is_the_identity(method):
    quantizer, x, weights = build(method), random(5, WIDTH, seed=50).requires_grad_(), random(5, WIDTH, seed=51)
    (quantizer(x).quantized * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    assert all(parameter.grad is None for parameter in quantizer.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_commitment_reaches_the_input_at_every_level(method):
    quantizer, x = build(method, commitment_weight=0.3).eval(), random(50, WIDTH, seed=50).requires_grad_()
    _, codes, loss = quantizer(x)
    loss.backward()
    left = [x.detach() - quantizer.mean]
    for depth in range(1, len(SIZES) + 1):
        expected = torch.stack([partial(quantizer, row[:depth].tolist()) for row in codes])
        left.append(x.detach() - quantizer.mean - expected)
    torch.testing.assert_close(x.grad, 0.3 * 2 / 50 * sum(left[1:]), rtol=1e-4, atol=1e-5)


def partial(quantizer, codes):
    """What the first codes of a sequence stand for, without the mean."""
    total = torch.zeros(quantizer.mean.shape[0], dtype=torch.float64)
    with torch.no_grad():
        for level, code in enumerate(codes):
            row = quantizer.codebooks()[level][code].double()
            if quantizer.config["method"] == "prefix-basis-rq":
                gamma, beta = affine_of(quantizer, codes[:level])
                row = gamma * row + beta
            total = total + row
    return total.float()


@pytest.mark.parametrize("method", ["rq", "simvq", "basis-rq"])
def test_no_gradient_passes_from_one_level_to_the_codes_before(method):
    quantizer, x = build(method), random(50, WIDTH, seed=50)
    quantizer(x).loss.backward()
    alone = copy.deepcopy(quantizer.levels[0])
    alone.zero_grad()
    alone(x - quantizer.mean).loss.backward()
    for one, other in zip(quantizer.levels[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_prefix_tables_learn_from_all_levels_after_them():
    quantizer, x = build("prefix-basis-rq").double(), random(50, WIDTH, seed=50).double()
    _, codes, loss = quantizer(x)
    loss.backward()
    # The loss again, by Equation 5 and autograd.
    twin = copy.deepcopy(quantizer)
    twin.zero_grad()
    total = 0
    for item, row in zip(x, codes.tolist(), strict=True):
        residual = item - twin.mean
        for level, code in enumerate(row):
            gamma, beta = affine_of(twin, row[:level])
            chosen = gamma * twin.levels[level].effective_codebook()[code] + beta
            total = total + (residual - chosen).square().sum() / len(x)
            residual = residual - chosen.detach()
    total.backward()
    for (name, one), other in zip(quantizer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    assert [scale.shape for scale in quantizer.scales] == [(7, WIDTH), (5, WIDTH), (6, WIDTH)]
    assert [bias.shape for bias in quantizer.biases] == [(7, WIDTH), (5, WIDTH), (6, WIDTH)]
    used = torch.zeros(7, dtype=torch.bool)
    used[codes[:, 0]] = True
    assert torch.equal(quantizer.scales[0].grad.abs().sum(1) > 0, used)


def test_prefix_without_effect_is_basis_rq():
    x = random(200, WIDTH, seed=50)
    plain, prefix = build("basis-rq").eval(), ResidualQuantizer(SIZES, WIDTH, "prefix-basis-rq").eval()
    missing = prefix.load_state_dict(plain.state_dict(), strict=False)
    assert sorted(missing.missing_keys) == [f"{table}.{k}" for table in ("biases", "scales") for k in range(3)]
    for one, other in zip(plain(x), prefix(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(plain.encode(x), prefix.encode(x))


def test_plain_rq_agrees_with_an_independent_implementation():
    library = pytest.importorskip("vector_quantize_pytorch")
    quantizer, x = build("rq").eval(), random(400, WIDTH, seed=50)
    other = library.ResidualVQ(dim=WIDTH, codebook_size=SIZES, rotation_trick=False).eval()
    for level, layer in enumerate(other.layers):
        layer.codebook = quantizer.levels[level].codebook.detach()
    quantized, codes, losses = other((x - quantizer.mean)[None])
    ours = quantizer(x)
    assert torch.equal(ours.codes, codes[0])
    torch.testing.assert_close(ours.quantized, quantized[0] + quantizer.mean, rtol=0, atol=1e-5)


def test_simvq_agrees_with_an_independent_implementation():
    library = pytest.importorskip("vector_quantize_pytorch")
    quantizer, x = build("simvq", (7, 7, 7), commitment_weight=0.25).eval(), random(400, WIDTH, seed=50)
    other = library.ResidualSimVQ(dim=WIDTH, num_quantizers=3, codebook_size=7, rotation_trick=False).eval()
    with torch.no_grad():
        for layer, level in zip(other.layers, quantizer.levels, strict=True):
            layer.frozen_codebook.copy_(level.codebook)
            layer.code_transform.weight.copy_(level.basis.T)
    quantized, codes, losses = other((x - quantizer.mean)[None])
    ours = quantizer(x)
    assert torch.equal(ours.codes, codes[0])
    torch.testing.assert_close(ours.quantized, quantized[0] + quantizer.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.loss, WIDTH * losses.sum(), rtol=1e-5, atol=0)  # theirs is a mean over dimensions


def test_ema_agrees_with_an_independent_implementation():
    library = pytest.importorskip("vector_quantize_pytorch")
    quantizer = build("rq-ema", ema_decay=0.9, center=False)
    quantizer.mean.zero_()
    other = library.ResidualVQ(dim=WIDTH, codebook_size=SIZES, decay=0.9, eps=1e-12, rotation_trick=False).train()
    for level, layer in enumerate(other.layers):
        layer.codebook = quantizer.levels[level].codebook
        layer._codebook.embed_avg.copy_(layer._codebook.embed)
        layer._codebook.cluster_size.fill_(1)
    for step in range(4):
        x = random(100, WIDTH, seed=60 + step)
        quantized, codes, _ = other(x[None])
        ours = quantizer(x)
        assert torch.equal(ours.codes, codes[0])
        torch.testing.assert_close(ours.quantized, quantized[0], rtol=0, atol=1e-5)
    for level, layer in enumerate(other.layers):
        torch.testing.assert_close(quantizer.levels[level].codebook, layer.codebook, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_kmeans_start_follows_the_residuals(method):
    x = random(400, WIDTH, seed=50) * torch.linspace(2, 0.1, WIDTH) + 5
    quantizer = build(method, center=True, restart_dead_codes=True)
    quantizer.init_from_data(x, seed=3)
    torch.testing.assert_close(quantizer.mean, x.mean(0))
    generator = torch.Generator().manual_seed(3)
    residual = x[torch.randperm(400, generator=generator)[: 32 * 7]] - x.mean(0)
    for size, codebook in zip(SIZES, quantizer.codebooks(), strict=True):
        centroids = kmeans(residual, size, generator)
        torch.testing.assert_close(codebook, centroids, rtol=1e-4, atol=1e-5)
        residual = residual - centroids[torch.cdist(residual, centroids).argmin(1)]
    errors = [(x - quantizer.decode(quantizer.encode(x))).square().mean().item()]
    quantizer.init_from_data(x, "uniform")
    errors.append((x - quantizer.decode(quantizer.encode(x))).square().mean().item())
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("init", ["kmeans", "uniform"])
@pytest.mark.parametrize("method", METHODS)
def test_start_forgets_all_that_was_before(method, init):
    x = random(100, WIDTH, seed=50)
    used = build(method, restart_dead_codes=True)
    fresh = ResidualQuantizer(SIZES, WIDTH, method, restart_dead_codes=True)
    used(x)
    used.init_from_data(x, init, seed=1)
    torch.manual_seed(5)  # the global generator has no part in it
    fresh.init_from_data(x, init, seed=1)
    for name, value in used.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    fresh.init_from_data(x, init, seed=2)
    assert not torch.equal(fresh.codebooks()[0], used.codebooks()[0])


@pytest.mark.parametrize("method", METHODS)
def test_uniform_start_is_the_same_for_all_methods(method):
    x = random(100, WIDTH, seed=50)
    quantizer, plain = ResidualQuantizer(SIZES, WIDTH, method), ResidualQuantizer(SIZES, WIDTH, "rq")
    quantizer.init_from_data(x, "uniform", seed=4)
    plain.init_from_data(x, "uniform", seed=4)
    for one, other in zip(quantizer.codebooks(), plain.codebooks(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        assert 0.05 < one.abs().max() <= 0.1001


def test_mean_stays_zero_where_centring_is_off():
    quantizer = ResidualQuantizer(SIZES, WIDTH, center=False)
    quantizer.init_from_data(random(100, WIDTH) + 5)
    assert torch.equal(quantizer.mean, torch.zeros(WIDTH))


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_error(method):
    x = random(600, WIDTH, seed=50) @ random(WIDTH, WIDTH, seed=51)
    quantizer = ResidualQuantizer((16, 8, 8), WIDTH, method)
    quantizer.init_from_data(x, "uniform")
    parameters = list(quantizer.parameters())
    assert bool(parameters) == (method != "rq-ema")
    optimizer = torch.optim.Adam(parameters or [torch.zeros(1)], lr=3e-2)
    errors = []
    for _ in range(80):
        optimizer.zero_grad()
        quantized, _, loss = quantizer(x)
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
        errors.append((x - quantized).square().mean().item())
    assert errors[-1] < 0.7 * errors[0]


def test_diagnostics_and_the_group_without_weight_decay():
    for method in METHODS:
        quantizer = ResidualQuantizer((4, 4), 128, method)
        has_basis = method in ("basis-rq", "prefix-basis-rq")
        assert quantizer.orthogonality_error() == pytest.approx([0.64, 0.64] if has_basis else [], abs=5e-3)
        names = quantizer.no_decay_parameters()
        maps = [] if method in ("rq", "rq-ema") else ["levels.0.basis", "levels.1.basis"]
        assert sorted(names) == maps + (["scales.0"] if method == "prefix-basis-rq" else [])
        assert set(names) <= set(dict(quantizer.named_parameters()))
    quantizer = ResidualQuantizer((4, 4), 128, newton_schulz_steps=12)
    assert max(quantizer.orthogonality_error()) < 1e-6


def test_config_is_plain_json():
    quantizer = ResidualQuantizer(
        (4, 3), 5, "rq-ema", commitment_weight=0.2, ema_decay=0.9, restart_dead_codes=True, center=False
    )
    assert json.loads(json.dumps(quantizer.config)) == {
        "codebook_sizes": [4, 3],
        "width": 5,
        "method": "rq-ema",
        "newton_schulz_steps": 5,
        "commitment_weight": 0.2,
        "ema_decay": 0.9,
        "restart_dead_codes": True,
        "center": False,
    }
    assert "ema_decay=0.9" in repr(quantizer)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (((), 4), "`codebook_sizes` is empty"),
        (((8, 1), 4), "`codebook_sizes` must be an integer of at least 2, got 1"),
        (((8, 2.5), 4), "`codebook_sizes` must be an integer of at least 2, got 2.5"),
        (((8, 4), 0), "`width` must be an integer of at least 1, got 0"),
        (((8, 4), 4, "opq"), "`method` must be one of rq, rq-ema, simvq, basis-rq, prefix-basis-rq, got 'opq'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResidualQuantizer(*arguments)


@pytest.mark.parametrize(
    "option,message",
    [
        ({"ema_decay": 1.0}, "`ema_decay` must be at least 0 and below 1, got 1.0"),
        ({"newton_schulz_steps": 2.5}, "`newton_schulz_steps` must be an integer of at least 0, got 2.5"),
        ({"commitment_weight": -0.1}, "`commitment_weight` must not be negative, got -0.1"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_bad_options_are_refused_by_every_method(method, option, message):
    with pytest.raises(ValueError, match=message):
        ResidualQuantizer(SIZES, WIDTH, method, **option)


def bad_rows(value, row):
    x = random(30, WIDTH)
    x[row, 2] = value
    return x


BAD_INPUTS = [
    (bad_rows(torch.nan, 29), "`x` holds NaN or infinite values, first in row 29"),
    (bad_rows(-torch.inf, 4), "`x` holds NaN or infinite values, first in row 4"),
    (random(30, WIDTH + 1), rf"`x` must have shape \(num_items, {WIDTH}\), got \(30, {WIDTH + 1}\)"),
    (random(WIDTH), rf"`x` must have shape \(num_items, {WIDTH}\), got \({WIDTH},\)"),
    (torch.ones(30, WIDTH, dtype=torch.int32), "`x` must be a tensor of floats, got torch.int32"),
]
BAD_SAMPLES = [
    *BAD_INPUTS,
    (torch.zeros(0, WIDTH), "`x` must have at least 1 rows, got 0"),
    (random(6, WIDTH), "`x` has 6 rows, fewer than the 7 codes of a level"),
    (random(1, WIDTH).repeat(30, 1), "`x` has zero variance: its 30 rows are all alike"),
]


def unchanged(quantizer, before):
    return all(torch.equal(before[name], value) for name, value in quantizer.state_dict().items())


@pytest.mark.parametrize("x,message", BAD_INPUTS)
@pytest.mark.parametrize("method", METHODS)
def test_bad_inputs_are_refused_and_change_nothing(method, x, message):
    quantizer = build(method, restart_dead_codes=True)
    quantizer(random(200, WIDTH))  # some codes are idle now
    before = copy.deepcopy(quantizer.state_dict())
    for function in (quantizer, quantizer.encode):
        with pytest.raises(ValueError, match=message):
            function(x)
    with pytest.raises(ValueError, match="`x` must have at least 1 rows, got 0"):
        quantizer(torch.zeros(0, WIDTH))
    assert quantizer.encode(torch.zeros(0, WIDTH)).shape == (0, 4)
    assert unchanged(quantizer, before)


@pytest.mark.parametrize("init", ["kmeans", "uniform"])
@pytest.mark.parametrize("x,message", BAD_SAMPLES)
@pytest.mark.parametrize("method", METHODS)
def test_bad_samples_are_refused_and_change_nothing(method, x, message, init):
    quantizer = build(method, restart_dead_codes=True)
    before = copy.deepcopy(quantizer.state_dict())
    with pytest.raises(ValueError, match=message):
        quantizer.init_from_data(x, init)
    with pytest.raises(ValueError, match="`init` must be one of kmeans, uniform, got 'random'"):
        quantizer.init_from_data(random(30, WIDTH), "random")
    assert unchanged(quantizer, before)


def test_sample_too_large_to_be_squared_changes_nothing():
    quantizer = build("basis-rq")
    before = copy.deepcopy(quantizer.state_dict())
    with pytest.raises(ValueError, match="too large to be squared"):
        quantizer.init_from_data(1e25 * random(30, WIDTH))
    with pytest.raises(ValueError, match="too large to be averaged"):
        quantizer.init_from_data(random(30, WIDTH).abs().double() * 1e300, "uniform")
    assert unchanged(quantizer, before)


@pytest.mark.parametrize(
    "codes,message",
    [
        ([[0, 0, 0, 0], [0, 5, 0, 0]], r"`codes` has 1 rows outside the codebook sizes \[7, 5, 6, 4\], first row 1"),
        ([[-1, 0, 0, 0]], "`codes` has 1 rows outside"),
        ([[0, 0, 0]], r"`codes` must be integers of shape \(num_items, 4\), got torch.int64 of shape \(1, 3\)"),
        ([[0.0, 0, 0, 0]], r"`codes` must be integers of shape \(num_items, 4\), got torch.float32"),
    ],
)
def test_bad_codes_are_refused(codes, message):
    with pytest.raises(ValueError, match=message):
        build("prefix-basis-rq").decode(torch.tensor(codes))


def test_codebook_that_diverged_is_named():
    quantizer = build("rq")
    with torch.no_grad():
        quantizer.levels[1].codebook[2] = torch.nan
    with pytest.raises(ValueError, match="the codebook holds NaN, as after a training that diverged"):
        quantizer.encode(random(30, WIDTH))
