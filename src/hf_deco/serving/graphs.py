"""Retrieval by CUDA graphs: one for the prefill and one for the search, of every shape that is asked for.

A graph is launched as a whole, whatever the number of operations in it. Batches are padded to a power of two, and
histories to the longest that the model reads, so that few graphs serve all traffic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ..models.modeling_deco import DecoForSIDRetrieval
from ..models.static_search_sid import read_concepts, search_concepts

_MOST_GRAPHS = 32  # each holds its memory; beyond these the oldest is dropped
_RUNS_BEFORE = 3  # of a function, before it is captured: libraries choose and allocate what they need
_CAPTURING = threading.Lock()  # a process captures one graph at a time, whatever engine asks for it


class CapturedFunction:
    """A function of tensors of fixed shapes, as one CUDA graph.

    Args:
        function: Maps tensors to a tuple of tensors, on the device alone.
        inputs (`tuple[torch.Tensor, ...]`): Inputs of the shapes that it is called with. Their device is the graph's,
            whichever is current.
    """

    def __init__(self, function: Callable[..., tuple[torch.Tensor, ...]], inputs: tuple[torch.Tensor, ...]):
        self.inputs = [given.clone() for given in inputs]
        self.device = self.inputs[0].device
        with _CAPTURING, torch.cuda.device(self.device):
            self._capture(function)

    def _capture(self, function: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_RUNS_BEFORE):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.cuda.device(self.device):  # copies and graph go to this device's current stream, in order
            for own, given in zip(self.inputs, inputs, strict=True):
                own.copy_(given)
            self.graph.replay()
            return tuple(found.clone() for found in self.outputs)  # the next call writes over them


class GraphedRetrieval:
    """Concepts and searches of a Deco, each of whose shapes is captured when first asked for.

    Threads may share it: one computes at a time.

    Args:
        model ([`DecoForSIDRetrieval`]): A model that `is_static`, in evaluation mode on a CUDA device. Its catalog may
            be replaced.
        max_history_length (`int`): Items of a history that are read.
    """

    def __init__(self, model: DecoForSIDRetrieval, max_history_length: int):
        self.model, self.width = model, max_history_length
        self.trie, self.captured, self.lock = model.trie, {}, threading.Lock()

    def concepts(self, item_codes: torch.LongTensor, lengths: torch.LongTensor) -> torch.Tensor:
        """Concepts `(U, M, w)` of histories `(U, T, K)` that are padded on the right, `lengths` `(U,)` of which
        exist."""
        number, missing = lengths.shape[0], _missing(lengths.shape[0])
        item_codes = F.pad(item_codes, (0, 0, 0, self.width - item_codes.shape[1], 0, missing))
        (found,) = self._call("concepts", self._concepts, item_codes, F.pad(lengths, (0, missing)))
        return found[:number]

    def search(self, concepts: torch.Tensor, num_beams: int) -> tuple[torch.LongTensor, torch.FloatTensor]:
        """Catalog rows and scores of the SIDs that a search with so many beams finds, both `(U, n)`, best first; -1 and
        `-inf` where a user has no more."""
        number, missing = concepts.shape[0], _missing(concepts.shape[0])
        padded = F.pad(concepts, (0, 0, 0, 0, 0, missing))
        rows, scores = self._call(f"search {num_beams}", partial(self._search, num_beams), padded)
        return rows[:number], scores[:number]

    def _concepts(self, item_codes: torch.LongTensor, lengths: torch.LongTensor) -> tuple[torch.Tensor]:
        return (read_concepts(self.model, item_codes, lengths),)

    def _search(self, num_beams: int, concepts: torch.Tensor) -> tuple[torch.LongTensor, torch.FloatTensor]:
        trie = self.trie  # of the call, though the model's may be replaced meanwhile
        beams = search_concepts(self.model, concepts, [num_beams] * trie.num_codebooks, trie)
        rows = trie.item_rows[trie.item_offsets[beams.nodes]]
        return rows.masked_fill(beams.scores == -torch.inf, -1), beams.scores

    def _call(self, name: str, function: Callable, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key = name, *(given.shape for given in inputs)
        with self.lock:
            trie = self.model.trie
            if self.trie is not trie:  # graphs read the arrays of the one that they were captured with
                self.trie, self.captured = trie, {}
            if key not in self.captured:
                while len(self.captured) >= _MOST_GRAPHS:
                    self.captured.pop(next(iter(self.captured)))
                self.captured[key] = CapturedFunction(function, inputs)
            return self.captured[key](*inputs)


def _missing(number: int) -> int:
    """Users that a batch lacks to the next power of two."""
    return (1 << max(0, number - 1).bit_length()) - number
