"""The stream as a data set: once, in order, and from where it stopped."""

import numpy as np
import pytest

from hf_deco.data.events import read_event_log, read_item_texts
from hf_deco.data.requests import Requests
from hf_deco.data.roles import read_roles
from hf_deco.training.gear_stream import RequestStream


@pytest.fixture(scope="module")
def requests(stream_folder):
    roles = read_roles(stream_folder / "log.yaml")
    log = read_event_log(roles, read_item_texts(roles.items), np.load(stream_folder / "embeddings.npy"))
    return Requests(log, (6, 4), 2, 2, 2)


def numbers(batches):
    return [[request.number for request in batch] for batch in batches]


@pytest.mark.parametrize("batch_size, processes", [(10, 1), (7, 1), (13, 2), (3, 4), (39, 1), (100, 3)])
def test_every_request_comes_once_in_order_and_no_batch_spans_two_periods(requests, batch_size, processes):
    stream = RequestStream(requests, batch_size, processes)
    batches = list(stream)
    assert sum(numbers(batches), []) == list(range(240))
    assert all(len({request.period for request in batch}) == 1 for batch in batches)
    assert len(batches) == stream.num_steps * processes
    assert all(0 < len(batch) <= batch_size + 1 for batch in batches)
    # a step's batches are of one period, and the step that ends it is told
    for step in range(stream.num_steps):
        shares = batches[step * processes : (step + 1) * processes]
        assert {request.period for batch in shares for request in batch} == {stream.period_at(step)}
    ends = [step + 1 for step in range(stream.num_steps - 1) if stream.period_at(step) != stream.period_at(step + 1)]
    assert stream.period_ends == {step: period for period, step in enumerate([*ends, stream.num_steps])}
    assert [stream.next_period(step) for step in (ends[0] - 1, ends[0], stream.num_steps)] == [0, 1, None]


def test_a_stream_goes_on_at_the_request_where_it_stopped(requests):
    whole, stream = numbers(RequestStream(requests, 7)), RequestStream(requests, 7)
    reader = iter(stream)
    for _ in range(12):
        next(reader)
    for _ in range(10):  # the loader has read ahead
        stream.advance()
    state = stream.state_dict()
    assert state["step"] == 10 and state["request"] == whole[10][0]
    again = RequestStream(requests, 7)
    again.load_state_dict(state)
    assert numbers(again) == whole[10:]


def test_a_stream_is_never_read_twice(requests):
    stream = RequestStream(requests, 50)
    for _ in list(stream):
        stream.advance()
    assert stream.step == stream.num_steps == 6 and list(stream) == []


def test_another_stream_does_not_go_on(requests):
    state = RequestStream(requests, 7).state_dict()
    others = [RequestStream(requests, 8), RequestStream(requests, 7, 2)]
    others += [RequestStream(Requests(requests.log, (6, 4), *drawn), 7) for drawn in ((3, 2, 2), (2, 2, 2, 1))]
    for other in others:
        with pytest.raises(ValueError, match="the checkpoint was trained on another stream"):
            other.load_state_dict(state)


def test_a_period_with_fewer_requests_than_processes_is_refused(requests):
    with pytest.raises(ValueError, match="period 0 has 40 requests for 41 processes"):
        RequestStream(requests, 7, 41)
