"""The best scores of every user."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_deco.models.selection_sid import pad_per_user, ranks, top_per_user

NAN, INF = math.nan, math.inf
SCORES = st.one_of(
    st.sampled_from([-INF, INF, NAN, 0.0, -0.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38]),
    st.floats(width=32),
    st.integers(-3, 3).map(float),
)


def test_values_are_padded_per_user():
    users = torch.tensor([0, 0, 2, 3, 3, 3])
    nothing = [-INF] * 3
    padded = pad_per_user(torch.tensor([-1.0, -5.0, -2.0, -3.0, -INF, -4.0]), users, 5, -INF)
    assert padded.tolist() == [[-1, -5, -INF], nothing, [-2, -INF, -INF], [-3, -INF, -4], nothing]
    padded = pad_per_user(torch.arange(6) + 2**60, users, 4, -1)
    assert padded.tolist() == [[2**60, 2**60 + 1, -1], [-1] * 3, [2**60 + 2, -1, -1], [2**60 + k for k in (3, 4, 5)]]
    assert ranks(users, 5).tolist() == [0, 1, 0, 0, 1, 2]


@given(st.lists(st.lists(SCORES, max_size=12), min_size=1, max_size=5), st.integers(1, 14))
@settings(deadline=None)
def test_the_best_of_every_user_come_best_first_and_equal_ones_in_order(per_user, number):
    scores = torch.tensor([score for user in per_user for score in user], dtype=torch.float32)
    users = torch.tensor([user for user, given in enumerate(per_user) for _ in given], dtype=torch.long)
    expected = []
    for user in range(len(per_user)):
        own = [place for place in range(len(scores)) if users[place] == user and scores[place] > -INF]
        expected += sorted(own, key=lambda place: -scores[place].item())[:number]  # stable
    assert top_per_user(scores, users, len(per_user), number).tolist() == expected


def test_equal_scores_of_a_long_list_keep_their_order():
    scores = torch.tensor([0.5, 0.25] * 1000)
    users = torch.arange(2).repeat_interleave(1000)
    assert top_per_user(scores, users, 2, 300).tolist() == [*range(0, 600, 2), *range(1000, 1600, 2)]
