"""The losses of GEAR against sums over pairs and samples, in float64."""

import math

import pytest
import torch

from hf_deco.models.losses_gear import generator_loss, generator_weights, lambda_loss


def naive_gain(label, gain):
    return float(label) if gain == "linear" else 2.0 ** float(label) - 1


def naive_list(scores, labels, sigma, gain):
    """Eq. 8 of one list without padding, pair by pair; None where no item is preferred to another."""
    places = sorted(range(len(scores)), key=lambda item: -scores[item])  # stable: equal scores by place
    discount = {item: 1 / math.log2(2 + place) for place, item in enumerate(places)}
    gains = [naive_gain(label, gain) for label in labels]
    best = sum(value / math.log2(2 + place) for place, value in enumerate(sorted(gains, reverse=True)))
    total, pairs = 0.0, 0
    for i in range(len(scores)):
        for j in range(len(scores)):
            if labels[i] > labels[j]:
                swap = abs(gains[i] - gains[j]) * abs(discount[i] - discount[j]) / best
                difference = sigma * (scores[i] - scores[j])
                total += (math.log1p(math.exp(-difference)) if difference > -500 else -difference) * swap
                pairs += 1
    return total if pairs else None


def naive_loss(scores, labels, mask, sigma=1.0, gain="linear"):
    lists = [
        naive_list(score[there].tolist(), label[there].tolist(), sigma, gain)
        for score, label, there in zip(scores.double(), labels.double(), mask, strict=True)
    ]
    lists = [value for value in lists if value is not None]
    return sum(lists) / max(1, len(lists))


def random_lists(seed, num_lists=6, length=7):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_lists, length, generator=generator) * 3
    scores[:, 2] = scores[:, 4]  # equal scores
    labels = torch.randint(0, 4, (num_lists, length), generator=generator).float()
    mask = torch.rand(num_lists, length, generator=generator) < 0.8
    mask[0], mask[1] = True, False
    labels[2] = 3.0
    return scores, labels, mask


@pytest.mark.parametrize("gain", ["linear", "exp2"])
@pytest.mark.parametrize("sigma", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_lambda_loss_is_the_sum_over_pairs(gain, sigma, seed):
    scores, labels, mask = random_lists(seed)
    expected = naive_loss(scores, labels, mask, sigma, gain)
    assert expected > 0.1
    assert lambda_loss(scores, labels, mask, sigma, gain).item() == pytest.approx(expected, rel=1e-5)
    assert lambda_loss(scores.double(), labels, mask, sigma, gain).item() == pytest.approx(expected, rel=1e-6)
    assert lambda_loss(scores, labels.long(), mask, sigma, gain).item() == pytest.approx(expected, rel=1e-5)
    everything = torch.ones_like(mask)
    expected = naive_loss(scores, labels, everything, sigma, gain)
    assert lambda_loss(scores, labels, None, sigma, gain).item() == pytest.approx(expected, rel=1e-5)


def test_two_items_in_the_wrong_order():
    loss = lambda_loss(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 0.0]]))
    assert loss.item() == pytest.approx(1.3132617 * (1 - 0.6309298), rel=1e-6)  # log(1 + e) and 1 - 1 / log2(3)


def test_the_gradient_is_that_of_the_pairs_with_ranks_and_weights_held():
    scores, labels, mask = random_lists(5)
    scores = scores.double().requires_grad_()
    lambda_loss(scores, labels, mask).backward()
    analytic = scores.grad.clone()
    for row, column in [(0, 0), (0, 3), (3, 5), (4, 1)]:
        step = torch.zeros_like(scores)
        step[row, column] = 1e-6  # too little to change a rank: only the logistic part moves
        after, before = (naive_loss(scores.detach() + sign * step, labels, mask) for sign in (1, -1))
        assert analytic[row, column].item() == pytest.approx((after - before) / 2e-6, abs=1e-6)
    assert (analytic[~mask] == 0).all() and (analytic[2] == 0).all() and analytic.abs().sum() > 0


@pytest.mark.parametrize("distance", [1e2, 1e4, 1e8])
def test_a_pair_that_is_far_in_the_wrong_order_keeps_its_gradient(distance):
    scores = torch.tensor([[0.0, distance]], requires_grad=True)
    loss = lambda_loss(scores, torch.tensor([[1.0, 0.0]]))
    loss.backward()
    weight = 1 - 1 / math.log2(3)
    assert loss.item() == pytest.approx(distance * weight, rel=1e-5)
    assert scores.grad.tolist() == [pytest.approx([-weight, weight], rel=1e-5)]


@pytest.mark.parametrize("gain", ["linear", "exp2"])
def test_labels_the_size_of_revenues_do_not_overflow(gain):
    scores = torch.tensor([[0.3, -1.0, 2.0, 0.0]], requires_grad=True)
    labels = torch.tensor([[200.0, 199.0, 0.5, 0.0]])  # 2^200 is infinite in float32
    loss = lambda_loss(scores, labels, gain=gain)
    assert loss.item() == pytest.approx(naive_loss(scores, labels, torch.ones_like(labels).bool(), gain=gain), rel=1e-5)
    loss.backward()
    assert scores.grad.isfinite().all() and scores.grad.abs().sum() > 0
    extreme = lambda_loss(scores, torch.tensor([[3e38, 1e38, 0.0, 1.0]]), gain=gain)
    beyond = lambda_loss(scores, torch.tensor([[3e300, 1e300, 0.0, 1.0]], dtype=torch.float64), gain=gain)
    assert extreme.isfinite() and extreme.item() == pytest.approx(beyond.item(), rel=1e-5)


def test_linear_gain_does_not_see_the_currency():
    scores, labels, mask = random_lists(7)
    expected = lambda_loss(scores, labels, mask)
    for scale in (1e-30, 1e-3, 1e30):
        torch.testing.assert_close(lambda_loss(scores, labels * scale, mask), expected)


def test_small_labels_keep_their_digits_under_an_exponential_gain():
    scores, labels, mask = random_lists(8)
    expected = naive_loss(scores, labels, mask)  # 2^y - 1 is in proportion to y where y is small
    assert lambda_loss(scores, labels * 1e-6, mask, gain="exp2").item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("label", [0.0, 2.0])
def test_lists_without_a_preference_are_zero_and_do_not_count(label):
    scores = torch.randn(3, 5, requires_grad=True)
    loss = lambda_loss(scores, torch.full((3, 5), label))
    assert loss.item() == 0
    loss.backward()
    assert (scores.grad == 0).all()
    labels = torch.full((3, 5), label)
    labels[1, 2] = 5.0
    torch.testing.assert_close(lambda_loss(scores, labels), lambda_loss(scores[1:2], labels[1:2]))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 1)])
def test_lists_too_short_for_a_pair_are_zero(shape):
    scores = torch.ones(shape, requires_grad=True)
    loss = lambda_loss(scores, torch.ones(shape))
    assert loss.item() == 0 and loss.requires_grad


def test_what_lies_under_the_mask_is_never_read():
    scores, labels, mask = random_lists(9)
    expected = lambda_loss(scores, labels, mask)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        spoilt = scores.masked_fill(~mask, garbage).requires_grad_()
        loss = lambda_loss(spoilt, labels.masked_fill(~mask, garbage), mask)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert spoilt.grad.isfinite().all()


def test_the_order_of_a_list_does_not_matter():
    scores, labels, mask = random_lists(10)
    scores[:, 2] += 0.01  # no equal scores, whose ranks are by place
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        lambda_loss(scores[:, order], labels[:, order], mask[:, order]), lambda_loss(scores, labels, mask)
    )


def test_autocast_leaves_the_losses_in_full_precision():
    scores, labels, mask = random_lists(11)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lambda_loss(scores, labels, mask), lambda_loss(scores, labels, mask).float())
        assert lambda_loss(scores.bfloat16(), labels, mask).dtype == torch.float32


@pytest.mark.parametrize(("bad", "told"), [(-1.0, "-1.0"), (torch.nan, "nan"), (torch.inf, "inf")])
def test_bad_labels_are_named(bad, told):
    labels = torch.ones(2, 3)
    labels[1, 2] = bad
    with pytest.raises(
        ValueError, match=rf"`labels` must be finite and not negative, got {told} at \[1, 2\] and 0 more"
    ):
        lambda_loss(torch.zeros(2, 3), labels)


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match=r"must have the same shape \(lists, items\), got \(2, 3\), \(2, 4\)"):
        lambda_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="`gain` must be 'linear' or 'exp2', got 'log'"):
        lambda_loss(torch.zeros(2, 3), torch.zeros(2, 3), gain="log")


def test_generator_loss_is_the_sum_over_samples_and_levels():
    generator = torch.Generator().manual_seed(0)
    sizes, samples = (4, 3), 5
    logits = [torch.randn(samples, size, generator=generator).requires_grad_() for size in sizes]
    codes = torch.stack([torch.randint(0, size, (samples,), generator=generator) for size in sizes], 1)
    values, impressed = torch.tensor([0.0, 1.5, 3e4, 7.0, 2.0]), torch.tensor([True, True, True, False, True])
    expected = 0.0
    for sample in range(samples):
        weight = math.log(1 + values[sample].item()) if impressed[sample] else 0.0
        for level in range(len(sizes)):
            row = logits[level][sample].double()
            expected -= weight * (row[codes[sample, level]].exp() / row.exp().sum()).log().item()
    loss = generator_loss(logits, codes, generator_weights(values, impressed))
    assert loss.item() == pytest.approx(expected / samples, rel=1e-5)
    loss.backward()
    for level in logits:
        assert (level.grad[[0, 3]] == 0).all() and (level.grad[[1, 2, 4]] != 0).all()
    assert generator_loss([row[:0] for row in logits], codes[:0], values[:0]).item() == 0


def test_weights_of_samples():
    impressed = torch.tensor([[True, False], [True, True]])
    values = torch.tensor([[math.e - 1, torch.nan], [0.0, 3.4e38]])
    torch.testing.assert_close(
        generator_weights(values, impressed), torch.tensor([[1.0, 0.0], [0.0, math.log(3.4e38)]])
    )
    assert torch.equal(generator_weights(None, impressed), impressed.float())


@pytest.mark.parametrize(
    ("bad", "told"), [(-0.5, "-0.5"), (torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")]
)
def test_bad_weights_are_refused_where_they_count(bad, told):
    weights = torch.tensor([[1.0, 2.0], [bad, 1.0]])
    with pytest.raises(ValueError, match=rf"`weights` must be finite and not negative, got {told} at \[1, 0\]"):
        generator_weights(weights, torch.ones(2, 2, dtype=torch.bool))
    hidden = torch.tensor([[True, True], [False, True]])
    torch.testing.assert_close(generator_weights(weights, hidden)[1], torch.tensor([0.0, math.log(2)]))
    with pytest.raises(ValueError, match=r"`weights` must have the shape of `impressed`, \(2, 2\), got \(2,\)"):
        generator_weights(weights[:, 0], hidden)
