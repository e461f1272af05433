"""Processes that train on parts of a batch agree, and end with the running means of one that trains on all of it.

Threads stand for processes: two real ones would spend half a minute on imports.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_deco.models import vector_quantization
from hf_deco.models.quantization import EMAQuantizer, VectorQuantizer


class Threads:
    """The few functions of `torch.distributed` that are used, between threads."""

    def __init__(self, size):
        self.size, self.barrier, self.tensors, self.rank = size, threading.Barrier(size), {}, threading.local()

    def is_available(self):
        return True

    is_initialized = is_available

    def get_world_size(self):
        return self.size

    def all_reduce(self, tensor):
        total = sum(self._gather(tensor))
        tensor.copy_(total)

    def broadcast(self, tensor, source):
        tensor.copy_(self._gather(tensor)[source])

    def _gather(self, tensor):
        self.tensors[self.rank.value] = tensor.clone()
        self.barrier.wait(timeout=60)
        tensors = [self.tensors[rank] for rank in range(self.size)]
        self.barrier.wait(timeout=60)
        return tensors

    def run(self, function):
        def work(rank):
            self.rank.value = rank
            return function(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(kind, batches):
    quantizer = kind(8, 3, restart_dead_codes=True)
    codes = random(8, 3)
    codes[5:] += 50  # dead
    quantizer.reset(codes)
    for batch in batches:
        quantizer(batch)
    return quantizer.state_dict()


@pytest.fixture
def threads(monkeypatch):
    threads = Threads(2)
    monkeypatch.setattr(vector_quantization, "dist", threads)
    return threads


@pytest.mark.parametrize("kind", [EMAQuantizer, VectorQuantizer])
def test_processes_agree_on_restarts(kind, threads):
    batches = [random(64, 3, seed=step) for step in range(4)]
    first, second = threads.run(lambda rank: train(kind, [batch[rank::2] for batch in batches[:2]]))
    assert first["idle_items"][5:].tolist() == second["idle_items"][5:].tolist() == [128] * 3  # items of both
    first, second = threads.run(lambda rank: train(kind, [batch[rank::2] for batch in batches]))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert (first["codebook"][5:].norm(dim=1) < 10).all()
    if kind is VectorQuantizer:  # nothing moved since: items of the first process
        items = {tuple(row.tolist()) for batch in batches for row in batch[0::2]}
        assert {tuple(row.tolist()) for row in first["codebook"][5:]} <= items


def test_running_means_are_those_of_the_whole_batch(threads, monkeypatch):
    halves = threads.run(lambda rank: train(EMAQuantizer, [random(64, 3)[rank::2]]))
    monkeypatch.undo()
    whole = train(EMAQuantizer, [random(64, 3)])
    for half in halves:
        for name, value in whole.items():
            torch.testing.assert_close(half[name], value, msg=name)
