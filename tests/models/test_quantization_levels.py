"""One codebook: how each kind makes, learns, keeps and revives its codes."""

import copy

import pytest
import torch
import torch.nn.functional as F

from hf_deco.models.quantization import BasisVQ, EMAQuantizer, SimVQ, VectorQuantizer

KINDS = [VectorQuantizer, EMAQuantizer, SimVQ, BasisVQ]
MAPPED = [SimVQ, BasisVQ]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(kind, size=6, width=4, seed=0, **kwargs):
    """A quantiser with random codes and, where there is one, a random basis."""
    quantizer = kind(size, width, **kwargs)
    quantizer.reset(random(size, width, seed=seed))
    with torch.no_grad():
        if kind in MAPPED:
            quantizer.basis.add_(0.3 * random(width, width, seed=seed + 1))
    return quantizer


def naive_codebook(quantizer):
    if isinstance(quantizer, SimVQ):
        return quantizer.codebook @ quantizer.basis
    if not isinstance(quantizer, BasisVQ):
        return quantizer.codebook
    basis = quantizer.basis / quantizer.basis.square().sum().sqrt()
    for _ in range(quantizer.newton_schulz_steps):
        basis = 0.5 * basis @ (3 * torch.eye(len(basis)) - basis.T @ basis)
    return quantizer.codebook @ basis


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_what_the_definition_says(kind):
    quantizer, x = build(kind, commitment_weight=0.3).eval(), random(50, 4, seed=9)
    codebook = naive_codebook(quantizer).detach()
    squares = (x[:, None] - codebook).square().sum(-1)
    output = quantizer(x)
    quantized, codes, loss = output
    assert quantized is output.quantized and codes is output.codes and loss is output.loss
    assert torch.equal(codes, squares.argmin(1)) and torch.equal(quantizer.encode(x), codes)
    torch.testing.assert_close(quantized, codebook[codes])
    assert torch.equal(quantizer.decode(codes), quantized)
    weight = 0.3 if kind is EMAQuantizer else 1.3
    torch.testing.assert_close(loss, weight * squares.amin(1).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradients_are_those_of_equation_9(kind):
    quantizer, x = build(kind, commitment_weight=0.3), random(50, 4, seed=9).requires_grad_()
    codebook = naive_codebook(quantizer).clone()  # running means move in the call
    _, codes, loss = quantizer(x)
    loss.backward()
    rows = codebook[codes]
    expected = 0.3 * 2 * (x - rows).detach() / 50
    torch.testing.assert_close(x.grad, expected)
    if kind is EMAQuantizer:
        assert not list(quantizer.parameters())
        return
    parameters = dict(quantizer.named_parameters())
    assert set(parameters) == {VectorQuantizer: {"codebook"}, SimVQ: {"basis"}, BasisVQ: {"basis", "codebook"}}[kind]
    gradients = torch.autograd.grad((x.detach() - rows).square().sum(1).mean(), list(parameters.values()))
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_gradient_is_the_identity(kind):
    quantizer, x, weights = build(kind), random(5, 4, seed=9).requires_grad_(), random(5, 4, seed=10)
    (quantizer(x).quantized * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    assert all(parameter.grad is None for parameter in quantizer.parameters())


@pytest.mark.parametrize("kind,moves", [(VectorQuantizer, False), (SimVQ, True), (BasisVQ, True)])
def test_gradient_reaches_unused_codes_only_through_a_map(kind, moves):
    quantizer = build(kind, size=20)
    x = quantizer.effective_codebook().detach()[:3] + 0.05 * random(3, 4, seed=9)
    before = quantizer.effective_codebook().detach().clone()
    _, codes, loss = quantizer(x)
    unused = torch.ones(20, dtype=torch.bool)
    unused[codes] = False
    assert unused.sum() >= 17
    loss.backward()
    torch.optim.SGD(quantizer.parameters(), lr=0.5).step()
    moved = (quantizer.effective_codebook() - before).norm(dim=1) > 1e-4
    assert moved[codes].all()
    assert moved[unused].all() if moves else not moved[unused].any()


def test_ema_update_follows_its_formula():
    quantizer = EMAQuantizer(5, 3, ema_decay=0.8)
    codebook = random(5, 3)
    codebook[4] = 100  # never chosen
    quantizer.reset(codebook)
    counts, sums = [1.0] * 5, [row.clone() for row in codebook]
    for step in range(4):
        x = random(30, 3, seed=step + 1)
        expected = [int((row - codebook).square().sum(1).argmin()) for row in x]
        quantized, codes, _ = quantizer(x)
        assert codes.tolist() == expected
        assert torch.equal(quantized, codebook[codes])  # with the codes before the update
        for code in range(5):
            chosen = x[[index for index, other in enumerate(expected) if other == code]]
            counts[code] = 0.8 * counts[code] + 0.2 * len(chosen)
            sums[code] = 0.8 * sums[code] + 0.2 * chosen.sum(0)
        codebook = torch.stack([total / count for total, count in zip(sums, counts, strict=True)])
        torch.testing.assert_close(quantizer.codebook, codebook)
        codebook = quantizer.codebook.clone()
    torch.testing.assert_close(codebook[4], torch.full((3,), 100.0))


def test_ema_code_that_nobody_chooses_keeps_its_place():
    quantizer = EMAQuantizer(2, 3, ema_decay=0.5)
    quantizer.reset(torch.tensor([[0.0, 0, 0], [9, 9, 9]]))
    for step in range(200):
        quantizer(0.1 * random(10, 3, seed=step))
    torch.testing.assert_close(quantizer.codebook[1], torch.full((3,), 9.0))
    quantizer(torch.full((4, 3), 10.0))  # and lives again
    torch.testing.assert_close(quantizer.codebook[1], torch.full((3,), 10.0))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_moves_in_evaluation(kind):
    quantizer = build(kind, restart_dead_codes=True).eval()
    before = copy.deepcopy(quantizer.state_dict())
    for step in range(20):
        quantizer(random(40, 4, seed=step))
    assert all(torch.equal(before[name], value) for name, value in quantizer.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_dead_codes_move_to_the_farthest_items(kind):
    quantizer = build(kind, restart_dead_codes=True)
    with torch.no_grad():
        codebook = quantizer.effective_codebook().detach().clone()
        codebook[[2, 5]] += 50  # too far to be chosen
        quantizer.reset(codebook)
    # Codes are chosen by the items at their places, so only these two are idle.
    near = codebook[[0, 1, 3, 4]].repeat(24, 1)
    quantizer(near)  # 96 items, 16 for each of 6 codes
    assert torch.equal(quantizer.idle_items, torch.tensor([0, 0, 96, 0, 0, 96]))
    torch.testing.assert_close(quantizer.effective_codebook(), codebook)
    outliers = torch.stack([codebook[0] + 7, codebook[1] - 9])
    codes = quantizer(torch.cat([near[:4], outliers])).codes
    assert codes.tolist() == [0, 1, 3, 4, 5, 2]  # the farthest outlier went to the first dead code
    expected = codebook.clone()
    expected[2], expected[5] = outliers[1], outliers[0]
    torch.testing.assert_close(quantizer.effective_codebook().detach(), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(quantizer.idle_items, torch.zeros(6, dtype=torch.long))


@pytest.mark.parametrize("kind", [VectorQuantizer, BasisVQ])
def test_restart_undoes_the_basis_scale_and_bias(kind):
    quantizer = build(kind, size=3, restart_dead_codes=True)
    with torch.no_grad():
        quantizer.idle_items[1] = 48
        quantizer._restart(
            x := random(1, 4, seed=3),
            scale := torch.tensor([[-0.5, 2.0, 0.5, 1.0]]),
            bias := random(1, 4, seed=5),
        )
        torch.testing.assert_close(quantizer.look_up(torch.tensor([1]), scale, bias), x, rtol=1e-4, atol=1e-4)


def test_more_dead_codes_than_items_wait_for_the_next_batch():
    quantizer = build(VectorQuantizer, restart_dead_codes=True)
    with torch.no_grad():
        quantizer.idle_items.fill_(96)
        before = quantizer.codebook.clone()
        quantizer._restart(x := 5 + random(2, 4, seed=3), None, None)
    assert (quantizer.codebook != before).any(1).tolist() == [True, True] + [False] * 4
    assert sorted(quantizer.codebook[:2].tolist()) == sorted(x.tolist())
    assert quantizer.idle_items.tolist() == [0, 0, 96, 96, 96, 96]


def test_restart_trains_on_by_gradient():
    quantizer = build(BasisVQ, size=16, restart_dead_codes=True)
    quantizer.reset(50 + random(16, 4))
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        quantizer(random(64, 4, seed=step)).loss.backward()
        optimizer.step()
    assert len(quantizer(random(400, 4, seed=99)).codes.unique()) == 16


@pytest.mark.parametrize("kind", MAPPED)
def test_mapped_codebook_is_kept_until_it_changes(kind, monkeypatch):
    quantizer, x = build(kind), random(8, 4, seed=9)
    calls = []
    mapped = kind._mapped
    monkeypatch.setattr(kind, "_mapped", lambda self: calls.append(1) or mapped(self))
    for _ in range(3):
        quantizer.encode(x)
    assert len(calls) == 3  # training: always anew
    quantizer.eval()
    for _ in range(3):
        quantizer.decode(quantizer.encode(x))
    assert len(calls) == 4
    quantizer(x)  # with gradients: anew, and what is kept stays
    quantizer.encode(x)
    assert len(calls) == 5


def change_by(optimizer):
    def change(quantizer):
        quantizer(random(20, 4, seed=4)).loss.backward()
        optimizer(quantizer.parameters()).step()

    return change


CHANGES = {
    "sgd": change_by(lambda parameters: torch.optim.SGD(parameters, lr=0.3)),
    "fused_adamw": change_by(lambda parameters: torch.optim.AdamW(parameters, lr=0.3, fused=True)),
    "load": lambda quantizer: quantizer.load_state_dict(build(type(quantizer), seed=5).state_dict()),
    "assign": lambda quantizer: quantizer.load_state_dict(build(type(quantizer), seed=5).state_dict(), assign=True),
    "data": lambda quantizer: quantizer.basis.data.add_(1),
    "reset": lambda quantizer: quantizer.reset(random(6, 4, seed=7)),
    "double": lambda quantizer: quantizer.double(),
    "bfloat16": lambda quantizer: quantizer.bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MAPPED)
def test_kept_codebook_is_never_stale(kind, change):
    quantizer = build(kind).eval()
    with torch.no_grad():
        before = quantizer.effective_codebook()
    CHANGES[change](quantizer)
    with torch.no_grad():
        kept = quantizer.effective_codebook()
        fresh = kind(6, 4)
        fresh.to(quantizer.basis.dtype).load_state_dict(quantizer.state_dict())
        assert torch.equal(kept, fresh.effective_codebook())
        assert kept.dtype == (torch.float64 if change == "double" else torch.float32)
        assert kept.dtype != before.dtype or not torch.equal(kept, before)
        twin = copy.deepcopy(quantizer)
        twin.basis.add_(1)
        assert not torch.equal(twin.effective_codebook(), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind):
    quantizer, x = build(kind, size=30, width=16), random(4000, 16, seed=9)
    codebook = quantizer.effective_codebook().detach()
    # The test means something only where bfloat16 is wrong.
    halves = (codebook.square().sum(1) - 2 * (x.bfloat16() @ codebook.bfloat16().T)).argmin(1)
    quantizer.eval()
    outside = quantizer(x)
    assert not torch.equal(halves, outside.codes)
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantizer(x)
        assert torch.equal(quantizer.encode(x), outside.codes)
        assert torch.equal(quantizer.decode(outside.codes), outside.quantized)
    for one, other in zip(outside, inside, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_inputs_give_full_precision(kind):
    quantizer, x = build(kind).eval(), random(9, 4).bfloat16().requires_grad_()
    quantized, codes, _ = quantizer(x)
    assert quantized.dtype == torch.float32 and torch.equal(codes, quantizer.encode(x.float()))
    quantized.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_basis_reports_its_orthogonality_error():
    assert BasisVQ(4, 128).orthogonality_error() == pytest.approx(0.64, abs=5e-3)
    assert BasisVQ(4, 128, newton_schulz_steps=12).orthogonality_error() < 1e-6
    quantizer = build(BasisVQ, newton_schulz_steps=3)
    basis = torch.linalg.solve(quantizer.codebook[:4], naive_codebook(quantizer)[:4]).detach().double()
    error = torch.linalg.matrix_norm(basis.T @ basis - torch.eye(4)) / 2
    assert quantizer.orthogonality_error() == pytest.approx(error.item(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_start_near_zero_and_by_the_seed(kind):
    torch.manual_seed(3)
    quantizer = kind(50, 8)
    torch.manual_seed(3)
    assert torch.equal(kind(50, 8).effective_codebook(), quantizer.effective_codebook())
    codebook = quantizer.effective_codebook().detach()
    assert 0.09 < codebook.max() <= 0.1001 and -0.09 > codebook.min() >= -0.1001


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((1, 4), "`codebook_size` must be an integer of at least 2, got 1"),
        ((2.5, 4), "`codebook_size` must be an integer of at least 2, got 2.5"),
        ((4, 0), "`width` must be an integer of at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_sizes_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(*arguments)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="`commitment_weight` must not be negative, got -1"):
        VectorQuantizer(4, 4, commitment_weight=-1)
    with pytest.raises(ValueError, match="`commitment_weight` must not be negative, got nan"):
        VectorQuantizer(4, 4, commitment_weight=float("nan"))
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"`ema_decay` must be at least 0 and below 1, got {decay}"):
            EMAQuantizer(4, 4, ema_decay=decay)
    with pytest.raises(ValueError, match="`newton_schulz_steps` must be an integer of at least 0, got -1"):
        BasisVQ(4, 4, newton_schulz_steps=-1)


@pytest.mark.parametrize(
    "x,message",
    [
        (torch.tensor([[0.0, 1, 2, torch.nan]]), "`x` holds NaN or infinite values, first in row 0"),
        (F.pad(torch.tensor([[torch.inf]]), (0, 3, 2, 0)), "`x` holds NaN or infinite values, first in row 2"),
        (torch.zeros(3, 5), r"`x` must have shape \(num_items, 4\), got \(3, 5\)"),
        (torch.zeros(4), r"`x` must have shape \(num_items, 4\), got \(4,\)"),
        (torch.zeros(3, 4, dtype=torch.long), "`x` must be a tensor of floats, got torch.int64"),
        ([[0.0] * 4], "`x` must be a tensor of floats, got list"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_inputs_are_refused_and_change_nothing(kind, x, message):
    quantizer = build(kind, restart_dead_codes=True)
    quantizer(random(300, 4))  # some codes are idle now
    before = copy.deepcopy(quantizer.state_dict())
    for function in (quantizer, quantizer.encode):
        with pytest.raises(ValueError, match=message):
            function(x)
    with pytest.raises(ValueError, match="`x` must have at least 1 rows, got 0"):
        quantizer(torch.zeros(0, 4))
    assert quantizer.encode(torch.zeros(0, 4)).shape == (0,)
    assert all(torch.equal(before[name], value) for name, value in quantizer.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_bad_codes_are_refused(kind):
    quantizer = build(kind)
    for codes in (torch.tensor([0, 6]), torch.tensor([0, -1])):
        with pytest.raises(ValueError, match=r"`codes` has 1 rows outside the codebook sizes \[6\], first row 1"):
            quantizer.decode(codes)
    with pytest.raises(ValueError, match=r"`codes` must be integers of shape \(num_items, 1\), got torch.float32"):
        quantizer.decode(torch.zeros(2))
