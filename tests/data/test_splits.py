"""Splits on handmade logs as whole arrays, and on random logs against a plain-Python split."""

import numpy as np
import pandas as pd
import pytest

from hf_deco.data import leave_one_out_split, read_interactions, temporal_split


def _log(rows):
    return read_interactions(pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"]))


def _lists(sequences):
    return [items.tolist() for items in sequences]


def _random_log(seed, users=15, items=20, events=200, times=60):
    draw = np.random.default_rng(seed)
    columns = (draw.integers(high, size=events).tolist() for high in (users, items, times))
    return _log([(f"u{user}", f"i{item}", time) for user, item, time in zip(*columns, strict=True)])


def _by_user(log):
    """Each user's (item, time) events in order."""
    events = [[] for _ in range(log.num_users)]
    for user, item, time in zip(log.user_index, log.item_index.tolist(), log.timestamp.tolist(), strict=True):
        events[user].append((item, time))
    return events


def _by_example(examples):
    """{user: (history, target)}"""
    rows = zip(examples.user_index.tolist(), _lists(examples.histories), examples.targets.tolist(), strict=True)
    return {user: (history, target) for user, history, target in rows}


# Users u=0 v=1 w=2 x=3 y=4 z=5, items a=0 b=1 c=2 d=3 e=4 f=5 in order of first appearance.
TRAIN = "ua ub uc vb vc wc wa xd ud va wb ua vd wd ub vb wa uc vc wc ud va wb vd".split()
HANDMADE = [(user, item, time) for time, (user, item) in enumerate(TRAIN)] + [
    ("w", "e", 25),  # number 24: shares the time of number 25 and so the part
    ("v", "b", 25),  # number 25 = floor(0.9 * 0.9 * 31): validation begins
    ("y", "a", 26),  # nothing before it: no example
    ("u", "f", 27),  # number 27 = floor(0.9 * 31): test begins; in the history of u's target
    ("u", "b", 28),
    ("z", "c", 29),  # nothing before it
    ("y", "b", 30),
]


def test_handmade_temporal_split():
    split = temporal_split(_log(HANDMADE))

    assert split.protocol == "temporal"
    assert split.borders == (25, 27)
    assert split.num_interactions == (24, 3, 4)
    assert split.train.user_index.tolist() == [0, 1, 2, 3]
    assert split.train.offsets.tolist() == [0, 8, 16, 23, 24]
    train = [[0, 1, 2, 3, 0, 1, 2, 3], [1, 2, 0, 3, 1, 2, 0, 3], [2, 0, 1, 3, 0, 2, 1], [3]]
    assert _lists(split.train) == train
    assert _by_example(split.validation) == {1: (train[1], 1), 2: (train[2], 4)}
    assert _by_example(split.test) == {0: ([*train[0], 5], 1), 4: ([0], 1)}
    assert split.item_counts.tolist() == [6, 6, 6, 6, 0, 0]
    assert split.catalog.tolist() == [0, 1, 2, 3]


def test_handmade_leave_one_out_split():
    rows = [("u", item, time) for time, item in enumerate("abcad")]
    rows += [("v", "b", 0), ("v", "e", 1), ("w", "b", 9), ("x", "c", 3), ("x", "b", 1), ("x", "a", 2)]
    split = leave_one_out_split(_log(rows))

    assert split.protocol == "leave_one_out"
    assert split.borders is None
    assert split.num_interactions == (7, 2, 2)
    assert split.train.user_index.tolist() == [0, 1, 2, 3]
    assert _lists(split.train) == [[0, 1, 2], [1, 4], [1], [1]]  # v and w are too short to ask about
    assert _by_example(split.validation) == {0: ([0, 1, 2], 0), 3: ([1], 0)}
    assert _by_example(split.test) == {0: ([0, 1, 2, 0], 3), 3: ([1, 0], 2)}
    assert split.item_counts.tolist() == [1, 4, 1, 0, 1]
    assert split.catalog.tolist() == [0, 1, 2, 3, 4]  # also d, which is only ever held out


def test_the_catalog_leaves_out_items_that_nobody_touched():
    log = _log(HANDMADE)
    log = log._keep(log.item_index != 2, "leaving one item out")
    assert leave_one_out_split(log).catalog.tolist() == [0, 1, 3, 4, 5]
    assert temporal_split(log).catalog.tolist() == [0, 1, 3]
    assert len(temporal_split(log).item_counts) == 6


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("test_tenths", "validation_tenths"), [(1, 1), (2, 3)])
def test_random_temporal_split_equals_plain_python(seed, test_tenths, validation_tenths):
    log = _random_log(seed, users=40)
    split = temporal_split(log, test_share=test_tenths / 10, validation_share=validation_tenths / 10)

    times = sorted(log.timestamp.tolist())
    test_from = times[(10 - test_tenths) * len(times) // 10]
    validation_from = times[(10 - test_tenths) * (10 - validation_tenths) * len(times) // 100]
    assert split.borders == (validation_from, test_from)
    train, validation, test, seen = {}, {}, {}, []
    for user, events in enumerate(_by_user(log)):
        early = [item for item, time in events if time < validation_from]
        seen += early
        if early:
            train[user] = early
        for part, begin, end in ((validation, validation_from, test_from), (test, test_from, 10**9)):
            inside = [place for place, (_, time) in enumerate(events) if begin <= time < end]
            if inside and inside[-1] > 0:
                part[user] = ([item for item, _ in events[: inside[-1]]], events[inside[-1]][0])
    assert dict(zip(split.train.user_index.tolist(), _lists(split.train), strict=True)) == train
    assert _by_example(split.validation) == validation
    assert _by_example(split.test) == test
    assert split.item_counts.tolist() == [seen.count(item) for item in range(log.num_items)]
    assert split.catalog.tolist() == sorted(set(seen))
    assert split.num_interactions == (
        sum(time < validation_from for time in times),
        sum(validation_from <= time < test_from for time in times),
        sum(time >= test_from for time in times),
    )


@pytest.mark.parametrize("seed", range(12))
def test_temporal_training_never_sees_a_later_event(seed):
    # Items are named after the time of their event, so an index tells when it happened.
    draw = np.random.default_rng(seed)
    times = draw.permutation(300) if seed % 2 else draw.integers(50, size=300)
    log = _log([(f"u{draw.integers(30)}", f"at{time}", int(time)) for time in times])
    split = temporal_split(log)
    time_of = np.array([int(name[2:]) for name in log.items])
    validation_from, test_from = split.borders

    assert time_of[split.train.items].max() < validation_from
    assert time_of[split.catalog].max() < validation_from
    assert time_of[np.flatnonzero(split.item_counts)].max() < validation_from
    assert (time_of[split.validation.targets] >= validation_from).all()
    assert (time_of[split.validation.targets] < test_from).all()
    assert (time_of[split.test.targets] >= test_from).all()
    for examples in (split.validation, split.test):
        assert examples.histories.lengths.min() >= 1
        for history, target in zip(examples.histories, examples.targets, strict=True):
            assert time_of[history].max() <= time_of[target]


@pytest.mark.parametrize("seed", range(8))
def test_random_leave_one_out_split_equals_plain_python(seed):
    log = _random_log(seed, users=60)
    split = leave_one_out_split(log)
    train, validation, test = {}, {}, {}
    for user, events in enumerate(_by_user(log)):
        items = [item for item, _ in events]
        train[user] = items
        if len(items) >= 3:
            train[user], validation[user], test[user] = items[:-2], (items[:-2], items[-2]), (items[:-1], items[-1])
    assert len(test) < log.num_users  # some users are too short
    assert dict(zip(split.train.user_index.tolist(), _lists(split.train), strict=True)) == train
    assert _by_example(split.validation) == validation
    assert _by_example(split.test) == test
    assert split.item_counts.tolist() == np.bincount(sum(train.values(), []), minlength=log.num_items).tolist()


@pytest.mark.parametrize("events", range(10, 131, 10))
def test_shares_that_floats_cannot_hold_count_like_fractions(events):
    log = _log([("u", "a", time) for time in range(events)])
    # 0.9 * 0.9 and 1 - 0.1 are not exact; floor must still be taken of 81 / 100 and 90 / 100.
    assert temporal_split(log).borders == (81 * events // 100, 9 * events // 10)
    assert temporal_split(log, 0.3, 0.3).borders == (49 * events // 100, 7 * events // 10)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("u", "a", 5)] * 40, r"no interaction falls in training: 40 interactions at 1 different times are too few"),
        (
            [("u", "a", 1)] * 5 + [("u", "a", 2)] * 5,
            r"no interaction falls in validation: 10 interactions at 2 .*longer log",
        ),
        ([("u", "a", 1), ("u", "b", 2), ("v", "a", 3)], r"no interaction falls in validation"),
        (
            [(f"u{time}", "a", time) for time in range(40)],
            r"no user with a validation interaction has an earlier one .* `leave_one_out_split`",
        ),
        (
            [("u", "a", time) for time in range(18)] + [("v", "a", 18), ("w", "a", 19)],
            r"no user with a test interaction has an earlier one",
        ),
    ],
)
def test_logs_too_short_for_a_temporal_split(rows, message):
    with pytest.raises(ValueError, match=message):
        temporal_split(_log(rows))


def test_logs_too_short_for_leave_one_out():
    with pytest.raises(ValueError, match=r"none of 2 users has the 3 interactions .* give a longer log"):
        leave_one_out_split(_log([("u", "a", 1), ("u", "b", 2), ("v", "a", 3)]))


@pytest.mark.parametrize("share", [0, 1, -0.1, 10])
def test_shares_lie_between_zero_and_one(share):
    log = _log(HANDMADE)
    with pytest.raises(ValueError, match=rf"`test_share` is {share}; a share lies between 0 and 1"):
        temporal_split(log, test_share=share)
    with pytest.raises(ValueError, match=rf"`validation_share` is {share}; a share lies between 0 and 1"):
        temporal_split(log, validation_share=share)
