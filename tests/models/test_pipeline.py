"""`pipeline("sid-retrieval")`: item ids in, ranked items out."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import Dataset
from transformers import pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from hf_deco import DecoProcessor, SIDGenerationConfig, SIDRetrievalPipeline

KINDS = [("deco", "fused"), ("backbone", "flat")]
HISTORIES = [["i4", "i9", "i1"], [], ["i7"], ["i2", "i2", "i30", "i5", "i6"], ["i11", "i12"]]


@pytest.fixture
def build(make_model, make_codes):
    """Model and processor: 26 items of the catalog, of which the last four share SIDs with others, and two more items
    that are known but not retrieved. The processor reads three items of a history."""

    def make(kind=KINDS[0], pointer=True, **kwargs):
        codes = make_codes((4, 3, 5), 24)
        catalog = torch.cat([codes[:22], codes[:3], codes[:1]])
        name, history_format = kind
        model = make_model((4, 3, 5), catalog=catalog, kind=name, history_format=history_format, copy_pointer=pointer)
        ids = [f"i{row}" for row in range(26)] + ["i30", "i31"]
        options = {"titles": [f"Title of {item}" for item in ids], "max_history_length": 3, "num_items": 26, **kwargs}
        processor = DecoProcessor(ids, torch.cat([catalog, codes[22:]]), (4, 3, 5), **options)
        return model, processor

    return make


@pytest.fixture
def folder(build, tmp_path):
    model, processor = build()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    return tmp_path


def expected(model, processor, history, number, deny=(), allow=None):
    """The unfiltered ranking of a wide search, without what is filtered out, by hand."""
    inputs = processor([history])
    output = model.generate(**inputs, num_beams=60, num_return_sequences=60, return_dict_in_generate=True)
    catalog, answer = model.catalog_codes.tolist(), []
    for sid, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        rows = [row for row, codes in enumerate(catalog) if codes == sid and f"i{row}" not in deny]
        rows = [row for row in rows if allow is None or f"i{row}" in allow]
        if rows:
            answer.append((f"i{rows[0]}", score))
    return answer[:number]


def assert_answer(answer, pairs):
    assert [entry["rank"] for entry in answer] == list(range(1, len(pairs) + 1))
    assert [entry["item_id"] for entry in answer] == [item for item, _ in pairs]
    assert [entry["score"] for entry in answer] == pytest.approx([score for _, score in pairs], abs=1e-4)
    assert [entry["title"] for entry in answer] == [f"Title of {item}" for item, _ in pairs]
    assert all(set(entry) == {"rank", "item_id", "score", "title"} for entry in answer)


def assert_same(answers, others):
    """Equal but for the rounding of scores, which depends on where weights lie in memory."""
    for answer, other in zip(answers, others, strict=True):
        assert [entry | {"score": None} for entry in answer] == [entry | {"score": None} for entry in other]
        assert [entry["score"] for entry in answer] == pytest.approx([entry["score"] for entry in other], abs=1e-4)


def test_the_task_is_registered_by_importing_the_package():
    assert "sid-retrieval" in PIPELINE_REGISTRY.get_supported_tasks()
    assert PIPELINE_REGISTRY.check_task("sid-retrieval")[1]["impl"] is SIDRetrievalPipeline


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_alone_answers_as_its_model_and_processor_do(build, tmp_path, kind):
    model, processor = build(kind)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    retrieve = pipeline("sid-retrieval", model=str(tmp_path))
    assert type(retrieve) is SIDRetrievalPipeline and type(retrieve.model) is type(model)
    answers = retrieve(HISTORIES, top_k=6, num_beams=60)
    for history, answer in zip(HISTORIES, answers, strict=True):
        assert_answer(answer, expected(model, processor, history, 6))
    assert type(model).__name__ in repr(retrieve)


def test_one_history_and_a_list_of_one_differ_only_in_nesting(folder):
    retrieve = pipeline("sid-retrieval", model=folder)
    for history in (["i4", "i9"], ("i4", "i9"), []):
        one = retrieve(history, top_k=4)
        assert isinstance(one[0], dict) and len(one) == 4
        assert_same([one], retrieve([history], top_k=4))


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100, None])
def test_batches_change_nothing(folder, batch_size):
    retrieve = pipeline("sid-retrieval", model=folder)
    together = retrieve(HISTORIES, top_k=5, batch_size=batch_size)
    assert [len(answer) for answer in together] == [5] * 5
    assert_same(together, [retrieve(history, top_k=5) for history in HISTORIES])


def test_batches_are_as_large_as_asked_for(folder, monkeypatch):
    sizes = []
    retrieve = pipeline("sid-retrieval", model=folder, batch_size=3)
    monkeypatch.setattr(
        retrieve,
        "_forward",
        lambda inputs, **_: (
            sizes.append(len(inputs["item_codes"]))
            or {"rows": torch.full((sizes[-1], 1), -1), "scores": torch.zeros((sizes[-1], 1))}
        ),
    )
    assert retrieve(HISTORIES) == [[]] * 5 and sizes == [3, 2]
    assert retrieve(HISTORIES, batch_size=2) == [[]] * 5 and sizes == [3, 2, 2, 2, 1]
    pipeline_of_many = retrieve(history for history in HISTORIES)
    assert len(sizes) == 5  # a stream is read when its answers are
    assert list(pipeline_of_many) == [[]] * 5 and sizes[5:] == [3, 2]


class Histories(Dataset):
    def __len__(self):
        return len(HISTORIES)

    def __getitem__(self, index):
        return HISTORIES[index]  # raises IndexError nowhere a loop would need it


def test_generators_and_datasets_are_answered_one_by_one(folder):
    retrieve = pipeline("sid-retrieval", model=folder, top_k=3)
    answers = retrieve(HISTORIES)
    for stream in (
        retrieve(history for history in HISTORIES),
        retrieve(Histories()),
        retrieve(Histories(), batch_size=2),
    ):
        found = [[entry["item_id"] for entry in answer] for answer in stream]
        assert found == [[entry["item_id"] for entry in answer] for answer in answers]


def test_options_come_from_the_call_then_the_pipeline_then_the_checkpoint(build, tmp_path):
    model, processor = build()
    model.generation_config = SIDGenerationConfig(num_beams=9, num_return_sequences=7)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    history = HISTORIES[0]
    assert len(pipeline("sid-retrieval", model=tmp_path)(history)) == 7
    retrieve = pipeline("sid-retrieval", model=tmp_path, top_k=4, exclude_seen=True)
    assert len(retrieve(history)) == 4 and len(retrieve(history, top_k=2)) == 2
    assert not {entry["item_id"] for entry in retrieve(history, top_k=9)} & set(history)
    assert {"i4", "i9"} <= {entry["item_id"] for entry in retrieve(history, top_k=26, exclude_seen=False)}
    given = SIDGenerationConfig(num_return_sequences=3)
    assert len(pipeline("sid-retrieval", model=tmp_path)(history, generation_config=given)) == 3
    assert len(retrieve(history, num_beams=[4, 4, 2], top_k=2)) == 2


def test_the_beam_is_never_narrower_than_top_k(build):
    model, processor = build()
    retrieve = pipeline("sid-retrieval", model=model, processor=processor)
    assert_answer(retrieve(HISTORIES[0], top_k=22, num_beams=2), expected(model, processor, HISTORIES[0], 22))
    assert len(retrieve(HISTORIES[0], top_k=500)) == 22  # all SIDs there are
    with pytest.raises(ValueError, match=r"`num_return_sequences` \(4\) must not exceed `num_beams` \(3 at the last"):
        retrieve(HISTORIES[0], top_k=4, num_beams=[9, 9, 3])


def test_seen_items_are_left_out_by_id_also_those_that_were_too_long_ago_to_be_read(build):
    model, processor = build()
    retrieve = pipeline("sid-retrieval", model=model, processor=processor)
    histories = [["i4", "i9", "i1", "i8", "i20"], ["i30", "i2"], [], ["i0", "i22"]]
    answers = retrieve(histories, exclude_seen=True, top_k=26)
    for history, answer in zip(histories, answers, strict=True):
        assert_answer(answer, expected(model, processor, history, 26, deny=history))
    # i1 and i23 have one SID: the one that was not seen may come.
    assert "i23" in {entry["item_id"] for entry in answers[0]}
    assert {"i0", "i22", "i25"} & {entry["item_id"] for entry in answers[3]} == {"i25"}


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_lists_for_all_and_lists_for_each(build, batch_size):
    model, processor = build()
    retrieve = pipeline("sid-retrieval", model=model, processor=processor, batch_size=batch_size)
    allow = [f"i{row}" for row in range(3, 17)] + ["i31"]  # known, but not in the catalog
    deny = [["i4", "i5"], [], ["i3", "i16", "i31"], ["i2"], [f"i{row}" for row in range(26)]]
    answers = retrieve(HISTORIES, allow_items=allow, deny_items=deny, top_k=9)
    for history, own, answer in zip(HISTORIES, deny, answers, strict=True):
        assert_answer(answer, expected(model, processor, history, 9, deny=own, allow=allow))
    assert answers[4] == []
    answers = retrieve(HISTORIES, allow_items=deny, deny_items=["i4", "i10"], exclude_seen=True, top_k=9)
    for history, own, answer in zip(HISTORIES, deny, answers, strict=True):
        assert_answer(answer, expected(model, processor, history, 9, deny=["i4", "i10", *history], allow=own))
    assert retrieve(HISTORIES[0], allow_items=["i3"])[0]["item_id"] == "i3"
    assert retrieve(HISTORIES[0], allow_items=[]) == [] and retrieve(HISTORIES[0], deny_items=[], top_k=3)
    streamed = list(retrieve((history for history in HISTORIES), allow_items=["i3"]))
    assert [entry["item_id"] for answer in streamed for entry in answer] == ["i3"] * 5


def test_filters_of_the_pipeline_hold_for_all_calls_and_give_way_to_those_of_a_call(build):
    model, processor = build()
    retrieve = pipeline("sid-retrieval", model=model, processor=processor, allow_items=["i3", "i5"], top_k=5)
    assert {entry["item_id"] for entry in retrieve(HISTORIES[0])} == {"i3", "i5"}
    assert {entry["item_id"] for entry in retrieve(HISTORIES[0], allow_items=["i6"])} == {"i6"}
    each = retrieve(HISTORIES[:2], allow_items=[["i7"], ["i8"]])
    assert [entry["item_id"] for answer in each for entry in answer] == ["i7", "i8"]


def test_unknown_ids_are_named_or_dropped(build):
    model, processor = build()
    retrieve = pipeline("sid-retrieval", model=model, processor=processor, top_k=4)
    for options in ({}, {"deny_items": ["x9"]}, {"allow_items": ["i1", "x9"]}, {"deny_items": [["x9"], []]}):
        histories = [["i4", "x9"], ["i1"]] if not options else [["i4"], ["i1"]]
        with pytest.raises(ValueError, match="'x9'"):
            retrieve(histories, **options)
    expected = [retrieve(["i4"])]
    assert_same([retrieve(["i4", "x9"], unknown_items="drop")], expected)
    assert_same([retrieve(["i4"], unknown_items="drop", deny_items=["x9"])], expected)
    lenient = pipeline("sid-retrieval", model=model, processor=processor, top_k=4, unknown_items="drop")
    assert_same([lenient(["i4", "x9"], deny_items=["x8", "i3"])], [retrieve(["i4"], deny_items=["i3"])])


def test_catalogs_without_titles_have_none(build):
    model, processor = build(titles=None)
    answer = pipeline("sid-retrieval", model=model, processor=processor)(["i4"], top_k=2)
    assert [entry["title"] for entry in answer] == [None, None]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ("i4", {}, "A history must be a list of item ids: .* got 'i'"),
        (["i4", ["i5"]], {}, "A history must be a list of item ids: .* got 'i4'"),
        (["i4"], {"top_k": 0}, "`top_k` must be an integer of at least 1, got 0"),
        (["i4"], {"top_k": "3"}, "`top_k` must be an integer of at least 1, got '3'"),
        (["i4"], {"num_beams": 0}, "`num_beams` must be a positive integer"),
        (["i4"], {"batch_size": 0}, "`batch_size` must be an integer of at least 1, got 0"),
        (["i4"], {"deny": ["i5"]}, r"Unknown arguments \['deny'\]; `sid-retrieval` takes `top_k`"),
        (["i4"], {"allow_items": "i5"}, "`allow_items` and `deny_items` must be lists of item ids, got 'i5'"),
        (["i4"], {"deny_items": 5}, "`allow_items` and `deny_items` must be lists of item ids, got 5"),
        (
            ["i4"],
            {"deny_items": [["i5"], []]},
            "`deny_items` holds a list for each of 2 histories, but there are 1 hist",
        ),
        (
            [["i4"], []],
            {"allow_items": [["i5"]]},
            "`allow_items` holds a list for each of 1 histories, but there are 2",
        ),
        ([["i4"], []], {"allow_items": [["i5"], "i6"]}, "must be lists of item ids, got 'i6'"),
        (
            iter([["i4"]]),
            {"allow_items": [["i5"]]},
            "a list for each of 1 histories, but there are a stream of histories",
        ),
        (["i4"], {"exclude_seen": 2}, "`exclude_seen` must be True or False, got 2"),
    ],
)
def test_what_cannot_be_meant_is_refused(build, inputs, options, message):
    retrieve = pipeline("sid-retrieval", model=(pair := build())[0], processor=pair[1])
    with pytest.raises(ValueError, match=message):
        retrieve(inputs, **options)


def test_a_processor_of_other_items_or_none_is_refused(build):
    model, processor = build()
    model.set_catalog(model.catalog_codes[:20])
    with pytest.raises(ValueError, match="The processor's 26 items are not the catalog of the model"):
        pipeline("sid-retrieval", model=model, processor=processor)
    with pytest.raises(ValueError, match="`processor` is missing"):
        SIDRetrievalPipeline(model)


def test_a_saved_pipeline_is_a_checkpoint_and_asks_for_no_trust_here(build, tmp_path):
    model, processor = build()
    retrieve = pipeline("sid-retrieval", model=model.train(), processor=processor, top_k=5)
    assert not retrieve.model.training
    retrieve.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]
    assert stored == {"sid-retrieval": {"impl": "pipeline_sid.SIDRetrievalPipeline", "pt": ["AutoModel"]}}
    assert not hasattr(model.config, "custom_pipelines")  # in the file alone
    again = pipeline("sid-retrieval", model=tmp_path, top_k=5)
    assert type(again) is SIDRetrievalPipeline
    assert_same(again(HISTORIES), retrieve(HISTORIES))
    assert not hasattr(again.model.config, "custom_pipelines")


def test_dtype_and_device_map_reach_the_model(folder):
    whole = pipeline("sid-retrieval", model=folder, top_k=3, dtype=torch.float64, device_map="cpu")
    assert whole.model.dtype == torch.float64 and whole.device.type == "cpu"
    half = pipeline("sid-retrieval", model=folder, top_k=3, dtype="bfloat16", device="cpu")
    assert half.model.dtype == torch.bfloat16 and len(half(HISTORIES[0])) == 3
    single = pipeline("sid-retrieval", model=folder, top_k=3, device="cpu")(HISTORIES[0])
    assert [entry["item_id"] for entry in single] == [entry["item_id"] for entry in whole(HISTORIES[0])]


REMOTE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_deco":
            raise ImportError("this environment lacks hf_deco")

sys.meta_path.insert(0, Absent())
from transformers import pipeline

folder, histories, again = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
try:
    pipeline("sid-retrieval", model=folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("code ran unasked")
options = {"top_k": 5, "exclude_seen": True, "deny_items": ["i3", "i8"]}
retrieve = pipeline("sid-retrieval", model=folder, trust_remote_code=True)
answers = [retrieve(histories, **options)]
str(retrieve.model.config)
retrieve.save_pretrained(again)
answers.append(pipeline(model=again, trust_remote_code=True)(histories, **options))  # the task is the checkpoint's only
modules = {type(part).__module__.split(".")[0] for part in (retrieve, retrieve.model, retrieve.processor)}
assert modules == {"transformers_modules"}, modules
with open(again + "/answers.json", "w") as file:
    json.dump(answers, file)
"""


def test_a_checkpoint_carries_its_pipeline_to_where_the_package_is_not(folder, tmp_path):
    options = {"top_k": 5, "exclude_seen": True, "deny_items": ["i3", "i8"]}
    expected = pipeline("sid-retrieval", model=folder)(HISTORIES, **options)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REMOTE, str(folder), json.dumps(HISTORIES), str(tmp_path / "again")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    for answers in json.loads((tmp_path / "again/answers.json").read_text()):
        assert_same(answers, expected)
