"""Training, validation and test from one log, by time or by each user's last two items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .interactions import Interactions
from .sequences import Examples, Sequences, cut


@dataclass(frozen=True, eq=False)
class Split:
    """A log taken apart.

    Args:
        protocol (`str`): `"temporal"` or `"leave_one_out"`.
        train ([`Sequences`]): each user's training events, of users with at least one.
        validation ([`Examples`]), test ([`Examples`]): what to predict from what.
        item_counts (`np.ndarray` of shape `(N,)`): training interactions of each item, int64.
        catalog (`np.ndarray` of shape `(C,)`): the items a model chooses among, ascending item indices, int64.
        num_interactions (`tuple[int, int, int]`): interactions that fall in training, validation and test.
        borders (`tuple[int, int]`, *optional*): unix seconds at which validation and test begin; None unless by time.
    """

    protocol: str
    train: Sequences
    validation: Examples
    test: Examples
    item_counts: np.ndarray
    catalog: np.ndarray
    num_interactions: tuple[int, int, int]
    borders: tuple[int, int] | None = None


def temporal_split(interactions: Interactions, test_share: float = 0.1, validation_share: float = 0.1) -> Split:
    """Split at two moments that hold for all users, as the Deco paper does.

    Of `n` interactions in order of time, counted from 0, test begins at the time of number `floor((1 - test_share) n)`
    and validation at that of number `floor((1 - test_share) (1 - validation_share) n)`. A moment belongs wholly to the
    part that it opens: interactions of one timestamp stay together, and a held-out part may exceed its share.

    A user's target is the last interaction in the held-out part, the history everything before it, also inside that
    part. A user whose target is the first event ever leaves a model nothing to go by and gives no example. The catalog
    is the items seen in training; a target need not be among them.

    Args:
        interactions ([`Interactions`]): the log, `n` rows.
        test_share (`float`, *optional*, defaults to 0.1): share of all interactions, the latest, that are test.
        validation_share (`float`, *optional*, defaults to 0.1): share of the rest, the latest, that is validation.

    Returns:
        [`Split`].

    Raises:
        ValueError: a share is not between 0 and 1, or a part of the split would be empty.
    """
    for name, share in (("test_share", test_share), ("validation_share", validation_share)):
        if not 0 < share < 1:
            raise ValueError(f"`{name}` is {share}; a share lies between 0 and 1.")
    times = np.sort(interactions.timestamp)
    before_test = 1 - test_share
    validation_from = _time_at(times, before_test * (1 - validation_share))
    test_from = _time_at(times, before_test)
    in_train = interactions.timestamp < validation_from
    in_test = interactions.timestamp >= test_from
    in_validation = ~in_train & ~in_test
    advice = "give a longer log or other shares, or use `leave_one_out_split`"
    for part, rows in (("training", in_train), ("validation", in_validation)):
        if not rows.any():
            raise ValueError(
                f"no interaction falls in {part}: {len(times):,} interactions at {len(np.unique(times)):,} different "
                f"times are too few to split with `test_share`={test_share} and `validation_share`={validation_share}; "
                f"{advice}."
            )
    validation, test = (_last_in(interactions, rows) for rows in (in_validation, in_test))
    _refuse_no_examples(validation, test, advice)
    item_counts = np.bincount(interactions.item_index[in_train], minlength=interactions.num_items)
    return Split(
        protocol="temporal",
        train=_sequences_of(interactions, in_train),
        validation=validation,
        test=test,
        item_counts=item_counts,
        catalog=np.flatnonzero(item_counts),
        num_interactions=(int(in_train.sum()), int(in_validation.sum()), int(in_test.sum())),
        borders=(validation_from, test_from),
    )


def leave_one_out_split(interactions: Interactions) -> Split:
    """Split off each user's last item for test and the one before it for validation.

    Users with fewer than three interactions are trained on and never asked about: with their last two items held out
    they would have no history left. The catalog is all items that occur in the log, so no target is outside it.

    Args:
        interactions ([`Interactions`]): the log.

    Returns:
        [`Split`].

    Raises:
        ValueError: no user has three interactions.
    """
    starts, lengths = _runs(interactions)
    users = np.flatnonzero(lengths >= 3)
    if len(users) == 0:
        raise ValueError(
            f"none of {interactions.num_users:,} users has the 3 interactions that leave-one-out needs; give a longer "
            "log, and check that `user_column` names users."
        )
    test_rows = (starts + lengths - 1)[users]
    in_train = np.ones(len(interactions), dtype=bool)
    in_train[test_rows] = in_train[test_rows - 1] = False
    return Split(
        protocol="leave_one_out",
        train=_sequences_of(interactions, in_train),
        validation=_examples_at(interactions, test_rows - 1),
        test=_examples_at(interactions, test_rows),
        item_counts=np.bincount(interactions.item_index[in_train], minlength=interactions.num_items),
        catalog=np.unique(interactions.item_index),
        num_interactions=(int(in_train.sum()), len(users), len(users)),
    )


def _time_at(times: np.ndarray, share: float) -> int:
    # The 1e-9 undoes the rounding of the product: 0.9 * 0.9 * 100 must count as 81, whichever way it was rounded.
    return int(times[int(share * len(times) + 1e-9)])


def _runs(interactions: Interactions) -> tuple[np.ndarray, np.ndarray]:
    """First row and number of rows of each user, both `(U,)`."""
    lengths = np.bincount(interactions.user_index, minlength=interactions.num_users)
    return np.cumsum(lengths) - lengths, lengths


def _sequences_of(interactions: Interactions, rows: np.ndarray) -> Sequences:
    """Each user's events among `rows`, of users that have any."""
    lengths = np.bincount(interactions.user_index[rows], minlength=interactions.num_users)
    users = np.flatnonzero(lengths)
    lengths = lengths[users]
    return cut(interactions.item_index[rows], np.cumsum(lengths) - lengths, lengths, users)


def _last_in(interactions: Interactions, rows: np.ndarray) -> Examples:
    """Each user's last event among `rows` as target, where an event comes before it."""
    rows = np.flatnonzero(rows)
    user_index = interactions.user_index[rows]
    is_last = np.append(user_index[1:] != user_index[:-1], True)
    targets = rows[is_last]
    starts, _ = _runs(interactions)
    return _examples_at(interactions, targets[targets > starts[user_index[is_last]]])


def _examples_at(interactions: Interactions, rows: np.ndarray) -> Examples:
    """The events at `rows` as targets, everything before them of the same user as histories."""
    user_index = interactions.user_index[rows]
    starts = _runs(interactions)[0][user_index]
    histories = cut(interactions.item_index, starts, rows - starts, user_index)
    return Examples(histories, interactions.item_index[rows], user_index)


def _refuse_no_examples(validation: Examples, test: Examples, advice: str) -> None:
    for part, examples in (("validation", validation), ("test", test)):
        if len(examples) == 0:
            raise ValueError(f"no user with a {part} interaction has an earlier one to predict it from; {advice}.")
