"""Requests and batches of a stream: in the order of time, and of nothing that had not happened yet."""

import numpy as np
import pytest
import torch

from hf_deco.data.events import read_event_log, read_item_texts
from hf_deco.data.gear_batches import GearCollator
from hf_deco.data.requests import Requests
from hf_deco.data.roles import read_roles


@pytest.fixture(scope="module")
def log(stream_folder):
    roles = read_roles(stream_folder / "log.yaml")
    return read_event_log(roles, read_item_texts(roles.items), np.load(stream_folder / "embeddings.npy"))


def test_every_event_is_in_one_request_and_requests_are_in_the_order_of_time(log):
    requests = Requests(log, (100, 100), num_positives=100)
    assert (np.diff(requests.times) >= 0).all() and len(requests) == len(set(log.requests.tolist())) == 240
    seen = sorted(event for number in range(240) for event in np.flatnonzero(log.requests == number).tolist())
    assert seen == list(range(len(log.items)))
    for number in range(0, 240, 7):
        request, mine = requests[number], log.requests == number
        positive = request.labels > 0
        assert set(request.candidates[positive]) == set(log.items[mine]) and request.shown[positive].all()
        for item, label, weight in zip(request.candidates, request.labels, request.weights, strict=True):
            events = mine & (log.items == item)
            assert label == log.grades[events].max(initial=0)
            assert weight == pytest.approx(log.weights[events].sum())


def test_a_history_is_all_that_came_before_and_nothing_else(log):
    requests = Requests(log, (5, 3))
    for number in range(0, 240, 5):
        request = requests[number]
        before = (log.users == request.user) & (log.times < requests.times[number])
        assert request.behaviors[0].tolist() == log.items[before].tolist()[-5:]
        assert request.behaviors[1].tolist() == log.items[before & (log.grades == 2)].tolist()[-3:]
    assert [len(sequence) for sequence in requests[0].behaviors] == [0, 0]


def test_candidates_without_an_event_were_shown_or_popular_by_then(log):
    requests = Requests(log, (5, 3), num_positives=2, num_negatives=4, num_popular=3, seed=1)
    for number in range(30, 240, 5):
        request = requests[number]
        bought = set(log.items[log.requests == number])
        assert len(set(request.candidates)) == len(request.candidates) == 2 + 4 + 3
        assert (request.labels > 0).tolist() == [True] * 2 + [False] * 7
        others = request.candidates[2:]
        assert not bought & set(others)
        shown = log.shown_items[log.shown_periods == request.period]
        assert set(others[request.shown[2:]]) <= set(shown) and request.shown[2:].sum() == 4
        assert set(others[~request.shown[2:]]) <= set(log.items[log.times < requests.times[number]])
    first = requests[0]  # nothing is popular yet
    assert first.shown[2:].all()


def test_a_request_is_the_same_whatever_was_made_before_it(log):
    requests = Requests(log, (5, 3), 1, 2, 2, seed=3)
    whole = [requests[number] for number in range(60)]
    again = Requests(log, (5, 3), 1, 2, 2, seed=3)[59]
    for name in ("candidates", "labels", "weights", "shown"):
        assert np.array_equal(getattr(whole[59], name), getattr(again, name))
    other = [Requests(log, (5, 3), 1, 2, 2, seed=4)[number].candidates.tolist() for number in range(60)]
    assert other != [request.candidates.tolist() for request in whole]
    with pytest.raises(IndexError, match="request 240 of 240"):
        requests[240]


def test_an_impression_of_one_user_is_no_candidate_of_another(log):
    from dataclasses import replace

    log = replace(log, shown_users=np.where(np.arange(len(log.shown_items)) % 2, 7, -1))
    requests = Requests(log, (5, 3), num_negatives=30)
    everyone = log.shown_users < 0
    for number in range(0, 240, 3):
        request = requests[number]
        pool = log.shown_items[(log.shown_periods == request.period) & (everyone | (log.shown_users == request.user))]
        negatives = request.candidates[request.shown & (request.labels == 0)]
        assert set(negatives) == set(pool) - set(log.items[log.requests == number])


def test_a_batch_points_into_a_table_of_its_distinct_items(log):
    requests = Requests(log, (5, 3), 2, 2, 1)
    some = [requests[number] for number in (0, 100, 101)]
    batch = GearCollator(log)(some)
    distinct = {item for request in some for part in (*request.behaviors, request.candidates) for item in part.tolist()}
    table = torch.from_numpy(log.content[sorted(distinct)])
    assert torch.equal(batch["content"], table)
    assert torch.equal(batch["item_ids"], torch.from_numpy(log.item_categories[sorted(distinct)]))
    for place, request in enumerate(some):
        for rows, items in zip(
            (*batch["behaviors"], batch["candidates"]), (*request.behaviors, request.candidates), strict=True
        ):
            row = rows[place]
            assert torch.equal(batch["content"][row[row >= 0]], torch.from_numpy(log.content[items]))
        count = len(request.candidates)
        assert batch["labels"][place, :count].tolist() == request.labels.tolist()
        assert batch["impressed"][place, :count].tolist() == (request.labels > 0).tolist()
        assert not batch["impressed"][place, count:].any()
        assert torch.equal(batch["weights"][place, :count], torch.from_numpy(request.weights))
        assert batch["user_ids"][place].tolist() == log.user_categories[request.user].tolist()
    assert GearCollator(log, min_grade=0)(some)["impressed"].sum() == sum(request.shown.sum() for request in some)
    assert "weights" not in GearCollator(log, weighted=False)(some)
    codes = np.arange(2 * len(log.item_ids)).reshape(-1, 2)
    assert GearCollator(log)(some, codes)["item_codes"].tolist() == codes[sorted(distinct)].tolist()


def test_items_of_the_same_sid_become_candidates(log):
    collator, requests = GearCollator(log, num_same_sid=2), Requests(log, (5, 3), 2, 2)
    some = [requests[150], requests[151]]
    assert collator(some)["candidates"].shape == (2, 4)  # there is no catalog yet
    codes = np.arange(20) % 4  # the first 20 items of the log
    collator.set_catalog(np.stack([codes, codes], 1))
    batch = collator(some)
    items = {tuple(content.tolist()): number for number, content in enumerate(log.content)}
    for place, request in enumerate(some):
        rows = batch["candidates"][place][4:]
        extra = [items[tuple(batch["content"][row].tolist())] for row in rows[rows >= 0]]
        sids = {int(item) % 4 for item in request.candidates[request.labels > 0] if item < 20}
        assert len(extra) == 2 and all(item < 20 and item % 4 in sids for item in extra)
        assert not set(extra) & set(request.candidates.tolist())
        assert not batch["labels"][place][4:].any() and not batch["impressed"][place][4:].any()
    again = collator(some)
    assert torch.equal(again["candidates"], batch["candidates"])


def test_users_who_ask_have_no_candidates(log):
    nothing = np.array([], dtype=int)
    batch = GearCollator(log).users(
        [3, 0], [(np.array([1, 2]), np.array([], dtype=int)), (np.array([2]), np.array([5]))]
    )
    assert set(batch) == {"content", "item_ids", "user_ids", "behaviors"}
    assert [part.tolist() for part in batch["behaviors"]] == [[[0, 1], [1, -1]], [[-1], [2]]]
    nobody = GearCollator(log).users([3], [(nothing, nothing)])
    assert nobody["content"].shape == (0, 6) and [part.shape for part in nobody["behaviors"]] == [(1, 0)] * 2
