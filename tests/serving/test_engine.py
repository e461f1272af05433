"""The engine answers as `generate` does, from histories and from kept states."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from hf_deco import DecoProcessor
from hf_deco.models import inference_sid
from hf_deco.models.filters_sid import ItemSet
from hf_deco.models.inference_sid import EAGER
from hf_deco.serving import engine as serving_engine
from hf_deco.serving.engine import Concepts, RetrievalEngine, has_compiler, preferred_device, preferred_dtype

HISTORIES = [["i3", "i1", "i4", "i1", "i5"], [], ["i9"], ["i2", "i6", "i5"], ["i3"] * 8, ["i8", "i9"], ["i7"]]


@pytest.fixture
def make_engine(make_model):
    def build(copy_pointer=False, **options):
        model = make_model((6, 5, 4), 40, copy_pointer=copy_pointer, max_history_length=6)
        processor = DecoProcessor([f"i{row}" for row in range(40)], model.catalog_codes, (6, 5, 4), 6)
        options = {"dtype": torch.float32, "compile": False, "max_batch_size": 3} | options
        return RetrievalEngine(model, processor, **options)

    return build


def expected(engine, histories, k, num_beams, **options):
    """One call of `generate` per user."""
    rows, scores = [], []
    for history in histories:
        output = engine.model.generate(
            **engine.processor([history]),
            num_beams=num_beams,
            num_return_sequences=k,
            return_dict_in_generate=True,
            **options,
        )
        rows.append(output.item_rows)
        scores.append(output.sequences_scores)
    return torch.stack(rows), torch.stack(scores)


@pytest.mark.parametrize("copy_pointer", [False, True])
def test_users_are_answered_as_by_generate_each_alone(make_engine, copy_pointer):
    engine = make_engine(copy_pointer)
    rows, scores = expected(engine, HISTORIES, 7, 20)
    from_histories = engine.retrieve(HISTORIES, k=7, num_beams=20)
    from_concepts = engine.search(engine.concepts(HISTORIES), k=7, num_beams=20)
    for found in (from_histories, from_concepts):
        assert found.rows.tolist() == rows.tolist()
        torch.testing.assert_close(found.scores, scores)
    names = [[f"i{row}" for row in user] for user in rows.tolist()]
    assert engine.item_ids(from_histories) == names


@pytest.mark.parametrize("copy_pointer", [False, True])
def test_concepts_are_kept_picked_and_joined(make_engine, copy_pointer):
    engine = make_engine(copy_pointer)
    whole = engine.search(engine.concepts(HISTORIES), k=5)
    concepts = Concepts.join([engine.concepts(HISTORIES[:1]), engine.concepts(HISTORIES[1:])])
    assert len(concepts) == len(HISTORIES) and concepts.vectors.shape == (7, 2, 12)
    again = engine.search(concepts.select(torch.tensor([6, 0])), k=5)
    assert again.rows.tolist() == whole.rows[[6, 0]].tolist()
    torch.testing.assert_close(again.scores, whole.scores[[6, 0]])


def test_a_beam_is_never_narrower_than_what_is_asked_for(make_engine):
    engine = make_engine()
    found = engine.retrieve(HISTORIES[:2], k=45, num_beams=1)
    assert (found.rows >= 0).sum(1).tolist() == [40, 40]  # the whole catalog
    assert [len(items) for items in engine.item_ids(found)] == [40, 40]
    torch.testing.assert_close(found.scores.exp().sum(1), torch.ones(2))


def test_filters_hold_for_all_users(make_engine):
    engine = make_engine()
    allowed = [row for row in range(40) if row % 2]
    rows, scores = expected(engine, HISTORIES, 6, 20, allow_rows=allowed, deny_rows=[3, 5])
    kept = ItemSet(allowed, engine.model.trie)
    for found in (
        engine.retrieve(HISTORIES, k=6, num_beams=20, allow_rows=kept, deny_rows=[3, 5]),
        engine.search(engine.concepts(HISTORIES), k=6, num_beams=20, allow_rows=allowed, deny_rows=[3, 5]),
    ):
        assert found.rows.tolist() == rows.tolist()
        torch.testing.assert_close(found.scores, scores)
    seen = engine.retrieve(HISTORIES, k=40, exclude_seen=True)
    for user, history in enumerate(HISTORIES):
        rest = set(range(40)) - {int(item[1:]) for item in history[-6:]}
        assert set(seen.rows[user].tolist()) - {-1} == rest


def test_of_items_that_share_a_sid_those_not_seen_may_come(make_model):
    model = make_model((3, 3), catalog=[[0, 1], [0, 1], [2, 2]], max_history_length=2)
    processor = DecoProcessor(["a", "b", "c"], model.catalog_codes, (3, 3), 2)
    engine = RetrievalEngine(model, processor, dtype=torch.float32, compile=False)
    found = engine.retrieve([["a"], ["a", "c", "b"], []], k=2, exclude_seen=True, deny_rows=[2])
    assert engine.item_ids(found) == [["b"], [], ["a"]]


def test_no_users(make_engine):
    engine = make_engine()
    assert engine.retrieve([], k=3).rows.shape == engine.search(engine.concepts([]), k=3).scores.shape == (0, 3)


def test_a_full_backbone_retrieves_but_keeps_no_concepts(make_model):
    model = make_model((6, 5, 4), 40, kind="backbone", max_history_length=6)
    processor = DecoProcessor([f"i{row}" for row in range(40)], model.catalog_codes, (6, 5, 4), 6)
    engine = RetrievalEngine(model, processor, dtype=torch.float32, compile=False, max_batch_size=2)
    rows, scores = expected(engine, HISTORIES, 5, 20)
    found = engine.retrieve(HISTORIES, k=5, num_beams=20)
    assert found.rows.tolist() == rows.tolist()
    torch.testing.assert_close(found.scores, scores)
    with pytest.raises(ValueError, match="A full backbone keeps no concepts"):
        engine.concepts(HISTORIES)


def test_settings_fit_the_machine_and_can_be_set(make_engine, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert preferred_dtype(torch.device("cpu")) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False})
    assert preferred_dtype(torch.device("cpu")) == torch.float32
    engine = make_engine(dtype=None, device="cpu", warm_up=False)
    assert engine.dtype == engine.model.dtype == torch.float32 and engine.model.kernels is EAGER
    assert make_engine(dtype=torch.bfloat16).concepts(HISTORIES[:1]).vectors.dtype == torch.bfloat16
    assert preferred_device().type == ("cuda" if torch.cuda.is_available() else preferred_device().type)
    threads = torch.get_num_threads()
    try:
        make_engine(num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_engine_answers_as_the_eager_one(make_engine, monkeypatch):
    monkeypatch.setattr(inference_sid, "FEW_ROWS", 1)
    engine, compiled = make_engine(), make_engine(compile=None)
    assert compiled.compiled and compiled.model.kernels is not EAGER
    plain, fast = (found.retrieve(HISTORIES, k=6, num_beams=20) for found in (engine, compiled))
    assert plain.rows.tolist() == fast.rows.tolist()
    torch.testing.assert_close(plain.scores, fast.scores)


def test_what_was_not_compiled_is_told(make_engine, monkeypatch):
    monkeypatch.setattr(serving_engine, "FEW_ROWS", 17)  # three users of six items are more
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setitem(torch._dynamo.utils.counters["stats"], "unique_graphs", 0)
    with pytest.raises(RuntimeError, match="`compile` is set, but torch compiled nothing"):
        make_engine(compile=True)
    monkeypatch.setattr(serving_engine, "FEW_ROWS", 18)  # nothing was to be compiled
    make_engine(compile=True)


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_threads_are_answered_as_one(make_model, model_type):
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"model_type": model_type, "vocab_size": 1, "bos_token_id": None, "eos_token_id": None}
    model = make_model((6, 5, 4), 40, kind="backbone", text_config=shape | {"num_key_value_heads": 2})
    processor = DecoProcessor([f"i{row}" for row in range(40)], model.catalog_codes, (6, 5, 4))
    engine = RetrievalEngine(model, processor, dtype=torch.float32, compile=False, max_batch_size=2, warm_up=False)
    attention, start = model.backbone.config._attn_implementation, Barrier(6)

    def ask(turn):
        start.wait()
        return [engine.retrieve(HISTORIES, k=5, deny_rows=[turn % 2]).rows.tolist() for _ in range(3)]

    with ThreadPoolExecutor(6) as threads:
        rows = list(threads.map(ask, range(6)))
    expected = [engine.retrieve(HISTORIES, k=5, deny_rows=[turn]).rows.tolist() for turn in (0, 1)]
    assert rows == [[expected[turn % 2]] * 3 for turn in range(6)]
    assert model.backbone.config._attn_implementation == attention


def test_opens_a_checkpoint(make_engine, tmp_path):
    engine = make_engine()
    engine.model.save_pretrained(tmp_path)
    engine.processor.save_pretrained(tmp_path)
    opened = RetrievalEngine.from_pretrained(tmp_path, dtype=torch.float32, compile=False, max_batch_size=4)
    assert opened.retrieve(HISTORIES, k=6).rows.tolist() == engine.retrieve(HISTORIES, k=6).rows.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda make: make(max_batch_size=0), "`max_batch_size` must be at least 1, got 0"),
        (lambda make: make(num_threads=0), "`num_threads` must be at least 1, got 0"),
        (lambda make: make().retrieve([["i1"]], k=0), "`k` must be at least 1, got 0"),
        (lambda make: make().retrieve([["i1"]], num_beams=0), "`num_beams` must be at least 1, got 0"),
        (lambda make: make().retrieve([["i1"]], allow=[1]), "unknown argument `allow`"),
        (lambda make: make().retrieve([["i1"]], allow_rows=[[1]]), "`allow_rows` must be one list for all users"),
        (
            lambda make: make().concepts([["i1"]]).select(0),
            "`users` must be a slice or a tensor of one",
        ),
        (lambda make: Concepts.join([]), "`parts` is empty"),
        (lambda make: make().retrieve([["i1"]], deny_rows=[40]), "`deny_rows` must hold rows of the catalog"),
        (lambda make: make().retrieve([["i1"], ["nothing"]]), "'nothing'"),
        (lambda make: make().retrieve(["i1", "i2"]), "`items` must be a list of item ids, got the string 'i1'"),
    ],
)
def test_bad_arguments_are_named(make_engine, call, message):
    with pytest.raises(ValueError, match=message):
        call(make_engine)
