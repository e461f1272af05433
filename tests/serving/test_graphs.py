"""An engine that replays fixed shapes answers as one that does not."""

import pytest
import torch

from hf_deco import DecoProcessor, SIDGenerationConfig
from hf_deco.models.pointer_sid import CopyState
from hf_deco.serving import graphs
from hf_deco.serving.engine import Concepts, RetrievalEngine
from hf_deco.serving.graphs import CapturedFunction, GraphedRetrieval

HISTORIES = [["i3", "i1", "i4", "i1", "i5"], [], ["i9"], ["i2", "i6", "i5"], ["i3"] * 8, ["i8", "i9"], ["i7"]]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Rerun:
    """In the place of a CUDA graph: runs the function again, on the inputs that were set aside for it."""

    def __init__(self, function, inputs):
        self.function, self.inputs = function, [given.clone() for given in inputs]

    def __call__(self, *inputs):
        for own, given in zip(self.inputs, inputs, strict=True):
            assert own.shape == given.shape
            own.copy_(given)
        return self.function(*self.inputs)


@pytest.fixture
def make_engine(make_model):
    def build(num_items=40, device="cpu", cuda_graphs=False, **options):
        model = make_model((6, 5, 4), num_items, max_history_length=6, **options)
        processor = DecoProcessor([f"i{row}" for row in range(num_items)], model.catalog_codes, (6, 5, 4), 6)
        set_up = {"dtype": torch.float32, "compile": False, "max_batch_size": 3, "warm_up": False}
        return RetrievalEngine(model, processor, device=device, cuda_graphs=cuda_graphs, **set_up)

    return build


@pytest.fixture
def make_replaying(make_engine, monkeypatch):
    """Engines that would hold CUDA graphs."""
    monkeypatch.setattr(graphs, "CapturedFunction", Rerun)

    def build(**options):
        engine = make_engine(**options)
        engine.graphs = GraphedRetrieval(engine.model, engine.processor.max_history_length)
        return engine

    return build


def assert_same(found, expected):
    assert found.rows.tolist() == expected.rows.tolist()
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("history_format", ["fused", "flat"])
@pytest.mark.parametrize("normalize_over", ["children", "vocabulary"])
def test_fixed_shapes_give_the_same_answers(make_engine, make_replaying, normalize_over, history_format):
    options = {"normalize_over": normalize_over, "history_format": history_format}
    engine, replaying = make_engine(**options), make_replaying(**options)
    assert engine.graphs is None
    for k, num_beams in ((7, 20), (1, 4), (40, 40)):
        found, expected = (other.retrieve(HISTORIES, k=k, num_beams=num_beams) for other in (replaying, engine))
        assert_same(found, expected)
    concepts = replaying.concepts(HISTORIES)
    torch.testing.assert_close(concepts.vectors, engine.concepts(HISTORIES).vectors, rtol=1e-5, atol=1e-5)
    assert_same(replaying.search(concepts, k=3), engine.search(concepts, k=3))
    # Batches of 3, 3 and 1 users: two sizes of each.
    sizes = {(name, shapes[0][0]) for name, *shapes in replaying.graphs.captured}
    beams = ("20", "4", "40", "100")
    assert sizes == {(name, size) for size in (1, 4) for name in ("concepts", *(f"search {width}" for width in beams))}


def test_filters_are_searched_for_without_graphs(make_engine, make_replaying):
    engine, replaying = make_engine(), make_replaying()
    for options in ({"exclude_seen": True}, {"deny_rows": [3, 5]}, {"allow_rows": [1, 2, 3, 9]}):
        assert_same(replaying.retrieve(HISTORIES, k=5, **options), engine.retrieve(HISTORIES, k=5, **options))
    assert {name for name, *_ in replaying.graphs.captured} == {"concepts"}
    concepts = engine.concepts(HISTORIES)
    assert_same(replaying.search(concepts, k=5, deny_rows=[7]), engine.search(concepts, k=5, deny_rows=[7]))


def test_the_checkpoints_own_exclude_seen_does_not_count(make_engine, make_replaying):
    plain, engine, replaying = make_engine(), make_engine(), make_replaying()
    for other in (engine, replaying):
        other.model.generation_config = SIDGenerationConfig(exclude_seen=True)
    seen = plain.retrieve(HISTORIES, k=40)
    assert {3, 1, 4, 5} <= set(seen.rows[0].tolist())  # what the first user has seen
    for options in ({}, {"deny_rows": [7]}, {"exclude_seen": True}):
        expected = plain.retrieve(HISTORIES, k=9, **options)
        for other in (engine, replaying):
            assert_same(other.retrieve(HISTORIES, k=9, **options), expected)
            if "exclude_seen" not in options:
                assert_same(other.search(other.concepts(HISTORIES), k=9, **options), expected)


@pytest.mark.parametrize("shape", [(2, 5, 12), (2, 2, 7), (2, 12)])
def test_concepts_of_other_shapes_are_refused_by_both(make_engine, make_replaying, shape):
    for engine in (make_engine(), make_replaying()):
        with pytest.raises(ValueError, match=r"`concepts` must have shape \(batch, 2, 12\), got \(2, "):
            engine.search(Concepts(torch.zeros(shape)), k=3)


def test_a_pointers_state_is_refused_by_both(make_engine, make_replaying):
    copies = CopyState(item_codes=torch.zeros((2, 1, 3)), weights=torch.zeros((2, 1)), gate=torch.zeros(2))
    for engine in (make_engine(), make_replaying()):
        with pytest.raises(ValueError, match="`copies` must be given with `concepts` if, and only if"):
            engine.search(Concepts(torch.zeros(2, 2, 12), copies), k=3)


def test_a_catalog_smaller_than_the_answer_is_filled_up(make_engine, make_replaying):
    engine, replaying = make_engine(num_items=10), make_replaying(num_items=10)
    found = replaying.retrieve(HISTORIES, k=15, num_beams=15)
    assert_same(found, engine.retrieve(HISTORIES, k=15, num_beams=15))
    assert found.rows.shape == (7, 15) and (found.rows[:, 10:] == -1).all()


def test_a_new_catalog_is_captured_anew(make_engine, make_replaying):
    engine, replaying = make_engine(), make_replaying()
    replaying.retrieve(HISTORIES, k=5)
    before = dict(replaying.graphs.captured)
    for other in (engine, replaying):
        other.model.set_catalog(other.model.catalog_codes.flip(0))
    assert_same(replaying.retrieve(HISTORIES, k=5), engine.retrieve(HISTORIES, k=5))
    assert replaying.graphs.captured.keys() == before.keys()
    assert not set(replaying.graphs.captured.values()) & set(before.values())


def test_a_catalog_replaced_during_a_call_is_that_of_the_next(make_engine, make_replaying, monkeypatch):
    engine, replaying, search = make_engine(), make_replaying(), graphs.search_concepts
    concepts, others = engine.concepts(HISTORIES), (engine.model.catalog_codes + 1) % torch.tensor([6, 5, 4])
    expected = engine.search(concepts.select(slice(0, 3)), k=5)

    def replace_first(model, *inputs):
        model.set_catalog(others)
        return search(model, *inputs)

    monkeypatch.setattr(graphs, "search_concepts", replace_first)
    assert_same(replaying.search(concepts.select(slice(0, 3)), k=5), expected)
    monkeypatch.setattr(graphs, "search_concepts", search)
    engine.model.set_catalog(others)
    assert_same(replaying.search(concepts, k=5), engine.search(concepts, k=5))


def test_the_oldest_graphs_make_room(make_replaying, monkeypatch):
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    replaying = make_replaying()
    concepts = replaying.concepts([["i1"]])
    for num_beams in (10, 11, 12):
        replaying.search(concepts, k=2, num_beams=num_beams)
    assert [name for name, *_ in replaying.graphs.captured] == ["search 11", "search 12"]


def test_graphs_are_refused_where_they_cannot_be(make_engine):
    with pytest.raises(
        ValueError, match="`cuda_graphs` needs a CUDA device, and a Deco .* plain Qwen2 .* got cpu and Deco"
    ):
        make_engine(cuda_graphs=True)


@on_cuda
def test_a_captured_function_is_replayed_on_new_inputs():
    first, second = (torch.arange(4.0, device="cuda") + shift for shift in (0, 5))
    captured = CapturedFunction(lambda numbers: (numbers * 2, numbers.sum()), (first,))
    outputs = [captured(numbers) for numbers in (first, second)]
    assert [found.tolist() for found, _ in outputs] == [[0, 2, 4, 6], [10, 12, 14, 16]]
    assert [total.item() for _, total in outputs] == [6, 26]


@on_cuda
@pytest.mark.parametrize("normalize_over", ["children", "vocabulary"])
def test_cuda_graphs_give_the_answers_of_the_processor(make_engine, normalize_over):
    engine = make_engine(normalize_over=normalize_over)
    graphed = make_engine(normalize_over=normalize_over, device="cuda", cuda_graphs=True)
    assert graphed.graphs is not None
    for _ in range(2):
        found, expected = (other.retrieve(HISTORIES, k=7, num_beams=20) for other in (graphed, engine))
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-3, atol=1e-3)
        assert (found.rows == expected.rows).float().mean() > 0.9  # near scores may change places
    assert all(isinstance(captured, CapturedFunction) for captured in graphed.graphs.captured.values())
