"""Retrieval for traffic: one checkpoint, its fastest settings, and users' states that can be kept."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AutoModel

from ..models.filters_sid import ItemSet
from ..models.inference_sid import EAGER, FEW_ROWS, Kernels
from ..models.modeling_sid import SIDRetrievalModel
from ..models.pointer_sid import CopyState
from ..models.processing_deco import DecoProcessor, check_pair
from ..models.static_search_sid import is_static
from .graphs import GraphedRetrieval


@dataclass(frozen=True)
class Concepts:
    """The complete state of `U` users: all that a search needs of their histories.

    Attributes:
        vectors (`torch.Tensor` of shape `(U, M, w)`): Concepts; 1 KiB a user in bfloat16 at M 2, w 256.
        copies ([`CopyState`], *optional*): The copy pointer's part, of models that have one: SIDs of the history,
            weights, and gate.
    """

    vectors: torch.Tensor
    copies: CopyState | None = None

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def select(self, users: torch.LongTensor | slice) -> Concepts:
        """The state of some users: a slice, or their numbers `(u,)`."""
        if not isinstance(users, slice) and getattr(users, "ndim", 0) != 1:
            raise ValueError(f"`users` must be a slice or a tensor of one dimension, got {users!r}.")
        copies = None
        if self.copies is not None:
            copies = CopyState(**{name: state[users] for name, state in self.copies.items()})
        return Concepts(self.vectors[users], copies)

    @classmethod
    def join(cls, parts: list[Concepts]) -> Concepts:
        """The users of several, one behind the other; histories of a pointer are padded on the left to one length."""
        if not parts:
            raise ValueError("`parts` is empty: there are no users to join.")
        vectors = torch.cat([part.vectors for part in parts])
        if any(part.copies is None for part in parts):
            return cls(vectors)
        width = max(part.copies.weights.shape[1] for part in parts)
        codes, weights = [], []
        for part in parts:
            missing = width - part.copies.weights.shape[1]
            codes.append(torch.nn.functional.pad(part.copies.item_codes, (0, 0, missing, 0), value=-1))
            weights.append(torch.nn.functional.pad(part.copies.weights, (missing, 0)))
        gate = torch.cat([part.copies.gate for part in parts])
        return cls(vectors, CopyState(item_codes=torch.cat(codes), weights=torch.cat(weights), gate=gate))


@dataclass(frozen=True)
class Retrieved:
    """What a search found, best first for every user.

    Attributes:
        rows (`torch.LongTensor` of shape `(U, k)`): Catalog rows, -1 where there are no more items.
        scores (`torch.FloatTensor` of shape `(U, k)`): Log-probabilities, `-inf` there.
    """

    rows: torch.LongTensor
    scores: torch.FloatTensor


class RetrievalEngine:
    """A model and its processor, set up to answer many users fast.

    Results are those of `model.generate`. Users are answered in micro-batches of like history length. Threads may share
    an engine.

    Args:
        model ([`SIDRetrievalModel`]): The model; put into evaluation mode and, where `dtype` says so, converted.
        processor ([`DecoProcessor`]): Its processor.
        device (`torch.device` or `str`, *optional*): Where to compute. By default an accelerator where there is one.
        dtype (`torch.dtype`, *optional*): Of weights and states. By default bfloat16 where the processor computes in it
            (AVX-512 BF16, AMX, most GPUs), else float32.
        compile (`bool`, *optional*): Whether the steps between matrix products are compiled, which takes seconds on the
            first start. By default where a C++ compiler is found; always on demand.
        num_threads (`int`, *optional*): Threads of torch, for the whole process. torch's own choice by default.
        max_batch_size (`int`, *optional*, defaults to 32): Users computed at once.
        cuda_graphs (`bool`, *optional*, defaults to `False`): Whether what a Deco without copy pointer and reranking
            head, of plain Qwen2 transformers, computes without filters is captured as CUDA graphs, see
            [`GraphedRetrieval`]. The functions that are captured are tested on the CPU; the capture itself has not been
            run on a GPU yet, so it has to be asked for.
        warm_up (`bool`, *optional*, defaults to `True`): Run a small search first, so that no user waits for it.

    Raises:
        ValueError: If model and processor do not hold one catalog, or an argument makes no sense.
        RuntimeError: If compiling was asked for and did not happen.

    Example:
        ```python
        >>> engine = RetrievalEngine.from_pretrained("runs/mine/model")  # doctest: +SKIP
        >>> concepts = engine.concepts([["i3", "i10"], ["i8"]])  # doctest: +SKIP
        >>> engine.search(concepts, k=5).rows.shape  # doctest: +SKIP
        torch.Size([2, 5])

        ```
    """

    def __init__(
        self,
        model: SIDRetrievalModel,
        processor: DecoProcessor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        compile: bool | None = None,
        num_threads: int | None = None,
        max_batch_size: int = 32,
        cuda_graphs: bool = False,
        warm_up: bool = True,
    ):
        check_pair(model, processor)
        for name, value in (("num_threads", num_threads), ("max_batch_size", max_batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.device = preferred_device() if device is None else torch.device(device)
        self.dtype = preferred_dtype(self.device) if dtype is None else dtype
        self.model, self.processor = model.eval().to(self.device, self.dtype), processor
        self.compiled = has_compiler() if compile is None else compile
        self.model.kernels = Kernels.compiled() if self.compiled else EAGER
        self.max_batch_size, self.graphs = max_batch_size, None
        if cuda_graphs:
            if self.device.type != "cuda" or not is_static(self.model):
                raise ValueError(
                    "`cuda_graphs` needs a CUDA device, and a Deco without copy pointer and reranking head, whose "
                    "decoder reads the last state and whose backbone and decoder are plain Qwen2 transformers; got "
                    f"{self.device} and {type(self.model).__name__}. Leave it out."
                )
            self.graphs = GraphedRetrieval(self.model, processor.max_history_length)
        if warm_up:
            self.warm_up()

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike, *, revision: str | None = None, token: str | None = None, **options
    ) -> RetrievalEngine:
        """Open a checkpoint folder, or a repository of the Hub at a revision; `options` are arguments of the class."""
        where = {"revision": revision, "token": token}
        where = {name: value for name, value in where.items() if value is not None}
        return cls(AutoModel.from_pretrained(path, **where), DecoProcessor.from_pretrained(path, **where), **options)

    @torch.inference_mode()
    def warm_up(self, num_beams: int = 100) -> None:
        """Search for some users and for one, so that everything is compiled and allocated.

        Raises:
            RuntimeError: If compiling was asked for and nothing was compiled.
        """
        length, items = self.processor.max_history_length, self.processor.item_ids
        users = min(self.max_batch_size, FEW_ROWS // min(length, num_beams) + 1)
        histories = [
            [items[(user + place) % self.processor.num_items] for place in range(length)] for user in range(users)
        ]
        for batch in (histories, histories[:1]):
            self.retrieve(batch, k=num_beams, num_beams=num_beams)
        wanted = self.compiled and users * length > FEW_ROWS and self.model._flat_backbone() is not None
        if wanted and _num_graphs() == 0:
            raise RuntimeError("`compile` is set, but torch compiled nothing: set it to False, or see torch's log.")

    @torch.inference_mode()
    def concepts(self, histories: list[list[str]]) -> Concepts:
        """State of users that the search starts from; compute it when a history changes, and keep it.

        Args:
            histories (`list[list[str]]`): Item ids of every user, oldest first.

        Raises:
            ValueError: If an item is unknown, or the model keeps more of a history than a concept.
        """
        order, batches = self._batches(histories)
        return Concepts.join([self._encode(rows) for rows in batches]).select(order)

    @torch.inference_mode()
    def search(self, concepts: Concepts, k: int = 10, num_beams: int = 100, **filters) -> Retrieved:
        """Items of users whose state is known; the backbone is not touched.

        Args:
            concepts ([`Concepts`]): What `concepts` gave.
            k (`int`, *optional*, defaults to 10): Items per user.
            num_beams (`int`, *optional*, defaults to 100): Beam width; never narrower than `k`.
            filters: `allow_rows` and `deny_rows` for all users at once, an [`ItemSet`] or a flat list of catalog rows.

        Raises:
            ValueError: If `k` or `num_beams` is not positive, or a filter does not fit the catalog.
        """
        options = self._options(k, num_beams, filters)
        found = []
        for users in range(0, len(concepts), self.max_batch_size):
            part = concepts.select(slice(users, users + self.max_batch_size))
            found.append(self._generate(options, concepts=part.vectors, copies=part.copies))
        return _joined(found, k)

    @torch.inference_mode()
    def retrieve(
        self, histories: list[list[str]], k: int = 10, num_beams: int = 100, exclude_seen: bool = False, **filters
    ) -> Retrieved:
        """Items of users, from their histories.

        Args:
            histories (`list[list[str]]`): Item ids of every user, oldest first; an empty one is a new user.
            k, num_beams, filters: As in `search`.
            exclude_seen (`bool`, *optional*, defaults to `False`): Leave out the items of a user's own history, by
                id. The checkpoint's own generation option of this name does not count.

        Raises:
            ValueError: If an item is unknown, or an argument makes no sense.
        """
        options, found, num_items = self._options(k, num_beams, filters), [], self.processor.num_items
        order, batches = self._batches(histories)
        for rows in batches:
            if exclude_seen:  # by id, where the model would go by SID
                seen = self.model.item_set([[row for row in history if row < num_items] for history in rows])
                denied = [options["deny_rows"], seen] if "deny_rows" in options else [seen]
            else:
                denied = options.get("deny_rows")
            inputs = self._inputs(rows) if self.graphs is None else {"concepts": self._encode(rows).vectors}
            found.append(self._generate(options | {"deny_rows": denied}, **inputs))
        found = _joined(found, k)
        return Retrieved(found.rows[order], found.scores[order])

    def item_ids(self, retrieved: Retrieved) -> list[list[str]]:
        """Ids of what was found, for every user; shorter than `k` where there were no more items."""
        return [[self.processor.item_ids[row] for row in user if row >= 0] for user in retrieved.rows.tolist()]

    def _options(self, k: int, num_beams: int, filters: dict) -> dict:
        """Arguments of `generate`, with filters made once for all micro-batches."""
        for name, value in (("k", k), ("num_beams", num_beams)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        options = {"num_beams": max(k, num_beams), "num_return_sequences": k, "return_dict_in_generate": True}
        options["exclude_seen"] = False  # not by SID, whatever the checkpoint's default: `retrieve` does it by id
        for name, rows in filters.items():
            if name not in ("allow_rows", "deny_rows"):
                raise ValueError(f"unknown argument `{name}`: filters are `allow_rows` and `deny_rows`.")
            if rows is not None:
                items = rows if isinstance(rows, ItemSet) else ItemSet(rows, self.model.trie, name)
                if items.num_users is not None:
                    raise ValueError(f"`{name}` must be one list for all users, got one for each of {items.num_users}.")
                options[name] = items
        return options

    def _generate(self, options: dict, **inputs) -> Retrieved:
        filtered = options.get("allow_rows") is not None or options.get("deny_rows") is not None
        if self.graphs is not None and not filtered:
            self.model._check_state(**inputs)
            return self._replay(options["num_return_sequences"], options["num_beams"], inputs["concepts"])
        output = self.model.generate(**inputs, **options)
        shape = (-1, options["num_return_sequences"])
        return Retrieved(output.item_rows.view(shape).cpu(), output.sequences_scores.view(shape).cpu())

    def _replay(self, k: int, num_beams: int, concepts: torch.Tensor) -> Retrieved:
        rows, scores = self.graphs.search(concepts.to(self.device), num_beams)
        missing = (0, max(0, k - rows.shape[1]))  # a small catalog has fewer
        rows, scores = F.pad(rows[:, :k], missing, value=-1), F.pad(scores[:, :k], missing, value=-torch.inf)
        return Retrieved(rows.cpu(), scores.cpu())

    def _encode(self, rows: list[list[int]]) -> Concepts:
        if self.graphs is not None:
            inputs = self._inputs(rows, padding_side="right")
            return Concepts(self.graphs.concepts(inputs["item_codes"], inputs["attention_mask"].sum(1)))
        output = self.model.encode(**self._inputs(rows))
        if output.concepts is None:
            raise ValueError("A full backbone keeps no concepts: `retrieve` searches from histories.")
        return Concepts(output.concepts, output.copies)

    def _inputs(self, rows: list[list[int]], padding_side: str = "left") -> dict:
        inputs = self.processor(item_rows=rows, padding_side=padding_side)
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    def _batches(self, histories: list[list[str]]) -> tuple[torch.LongTensor, list[list[list[int]]]]:
        """Item rows of histories in micro-batches, by length, so that those of one cost alike; and where each user's
        answer lies among those of all batches. Unknown items are found here, before anything is computed."""
        rows = [self.processor.rows_of(history) for history in histories]
        order = sorted(range(len(rows)), key=lambda user: len(rows[user]))
        starts = range(0, max(1, len(order)), self.max_batch_size)
        batches = [[rows[user] for user in order[start : start + self.max_batch_size]] for start in starts]
        return torch.tensor(order, dtype=torch.long).argsort(), batches


def _joined(parts: list[Retrieved], k: int) -> Retrieved:
    if not parts:
        return Retrieved(torch.zeros((0, k), dtype=torch.long), torch.zeros((0, k)))
    return Retrieved(torch.cat([part.rows for part in parts]), torch.cat([part.scores for part in parts]))


def preferred_device() -> torch.device:
    """The accelerator of this machine, or its processor."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def preferred_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it, else float32."""
    if device.type == "cpu":
        fast = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    else:
        fast = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def has_compiler() -> bool:
    """Whether `torch.compile` finds what it needs to compile for this machine."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        return False
    return True


def _num_graphs() -> int:
    """Graphs that torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
