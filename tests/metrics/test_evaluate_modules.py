"""The metrics as modules of `evaluate`, against plain loops over ragged lists."""

import math
import sys

import evaluate
import numpy as np
import pytest
import torch

from hf_deco import metrics
from hf_deco.evaluation import Evaluator
from hf_deco.metrics.ndcg_at_k.ndcg_at_k import NDCGAtK
from hf_deco.metrics.recall_at_k.recall_at_k import RecallAtK

K = [1, 3, 10]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of its own, and no network."""
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", str(folder / "modules"))
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", str(folder / "metrics"))
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        patch.setattr("socket.socket.connect", None)  # whoever connects gets a TypeError
        yield folder


@pytest.fixture(params=["ndcg_at_k", "recall_at_k"])
def name(request):
    return request.param


def naive(name, predictions, references, k):
    """Mean over examples of 1, or of 1 / log2(place + 1) with places from 1 on, where the item is among the first k."""
    total = 0.0
    for items, wanted in zip(predictions, references, strict=True):
        for place, item in enumerate(items[:k], start=1):
            if item == wanted:
                total += 1 if name == "recall_at_k" else 1 / math.log2(place + 1)
                break
    return total / len(references)


def ragged(seed, num_examples=50):
    """Lists of 0 to 12 different items, and one relevant item for each."""
    draw = np.random.default_rng(seed)
    predictions = [draw.permutation(20)[: draw.integers(13)].tolist() for _ in range(num_examples)]
    return predictions, draw.integers(20, size=num_examples).tolist()


def key(name, k):
    return f"{name.removesuffix('_at_k')}@{k}"


@pytest.mark.parametrize("as_id", [int, "item-{}".format], ids=["integers", "strings"])
@pytest.mark.parametrize("seed", range(3))
def test_ragged_lists_equal_plain_loops(name, seed, as_id):
    predictions, references = ragged(seed)
    expected = {key(name, k): naive(name, predictions, references, k) for k in K}
    predictions, references = [[as_id(item) for item in items] for items in predictions], list(map(as_id, references))
    metric = metrics.load(name, keep_in_memory=True)
    assert metric.compute(predictions=predictions, references=references, k=K) == pytest.approx(expected)
    assert min(expected.values()) < max(expected.values())


def test_batches_and_single_examples_add_up_on_disk(name):
    predictions, references = ragged(5)
    metric = metrics.load(name)
    metric.add_batch(predictions=predictions[:20], references=references[:20])
    for items, wanted in zip(predictions[20:30], references[20:30], strict=True):
        metric.add(prediction=items, reference=wanted)
    metric.add_batch(predictions=predictions[30:], references=references[30:])
    assert metric.compute(k=(3,)) == pytest.approx({key(name, 3): naive(name, predictions, references, 3)})


def test_arrays_and_tensors_are_taken_and_ten_is_the_default(name):
    predictions, references = np.array([[1, 2, 3], [4, 5, 6]]), np.array([3, 7])
    expected = {key(name, 10): naive(name, predictions.tolist(), references.tolist(), 10)}
    metric = metrics.load(name, keep_in_memory=True)
    assert metric.compute(predictions=predictions, references=references) == pytest.approx(expected)
    again = metric.compute(predictions=torch.tensor(predictions), references=torch.tensor(references))
    assert again == pytest.approx(expected)


def test_nothing_found_and_nothing_wanted_never_meet(name):
    metric = metrics.load(name, keep_in_memory=True)
    assert metric.compute(predictions=[[-1, 4], [-1]], references=[-1, -1], k=2) == {key(name, 2): 0.0}
    assert metric.compute(predictions=[[None, "a"], [None]], references=[None, None], k=2) == {key(name, 2): 0.0}
    assert metric.compute(predictions=[[], [-1, 4]], references=[4, 4], k=1) == {key(name, 1): 0.0}
    assert metric.compute(predictions=[[None, "a"]], references=["a"], k=2)[key(name, 2)] > 0


def test_both_combined_equal_the_evaluator_overall_and_by_slice(log_folder):
    """The same figures as the evaluation of this package, slices included."""
    from hf_deco.data import leave_one_out_split, read_interactions

    split = leave_one_out_split(read_interactions(log_folder / "interactions.parquet"))
    evaluator = Evaluator(split.test, split.item_counts, split.catalog, ks=(3, 10))
    draw = np.random.default_rng(0)
    targets = split.test.targets
    retrieved = np.stack([draw.permutation(split.catalog)[:10] for _ in targets])
    expected = evaluator.evaluate_retrieved(retrieved)
    groups = []
    place = {item: i for i, item in enumerate(sorted(split.catalog, key=lambda item: -split.item_counts[item]))}
    for row, target in enumerate(targets.tolist()):
        seen = split.test.histories.select(np.array([row])).items.tolist()
        third = ("head", "torso", "tail")[3 * place[target] // len(place)]
        groups.append(["repeat" if target in seen else "new", "warm", third])
    both = evaluate.combine([metrics.load("ndcg_at_k", "slices"), metrics.load("recall_at_k", "slices")])
    for rows in (slice(0, 33), slice(33, None)):
        both.add_batch(predictions=retrieved[rows], references=targets[rows], groups=groups[rows])
    found = both.compute(k=[3, 10])
    assert found == pytest.approx({name: value for name, value in expected.items() if "@" in name})
    assert {name.split("/")[0] for name in found if "/" in name} >= {"new", "warm", "head", "torso", "tail"}


def test_groups_may_be_given_at_the_end_and_a_group_counts_an_example_once(name):
    metric = metrics.load(name, keep_in_memory=True)
    groups = [["a", "a"], ["a", "b"], []]
    found = metric.compute(predictions=[[1], [2], [3]], references=[1, 1, 1], k=1, groups=groups)
    one = key(name, 1)
    assert found == pytest.approx({one: 1 / 3, f"a/{one}": 1 / 2, f"b/{one}": 0.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"predictions": [[1]], "references": [1, 2]}, r"predictions \(1\) and references \(2\)"),
        ({"predictions": [[1.5]], "references": [1]}, r"an item id must be a string or an integer, got 1\.5 \(float\)"),
        ({"predictions": [[1]], "references": [1], "k": 0}, r"`ks` is \(0,\); pass at least one cutoff"),
        ({"predictions": [[1]], "references": [1], "groups": []}, r"`groups` has 0 lists for 1 `references`"),
        ({"predictions": [[1]]}, "`references` is missing"),
        ({"references": [1]}, "`predictions` is missing"),
    ],
)
def test_what_does_not_fit_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        metrics.load(name, keep_in_memory=True).compute(**arguments)


def test_a_slice_metric_asks_for_its_groups(name):
    with pytest.raises(ValueError, match="inputs are missing: \\['groups'\\]"):
        metrics.load(name, "slices", keep_in_memory=True).compute(predictions=[[1]], references=[1])


def test_evaluate_loads_the_folder_and_the_copied_file_uses_this_package(name, cache):
    from pathlib import Path

    metric = evaluate.load(str(Path(metrics.__file__).parent / name), keep_in_memory=True)
    copied = sys.modules[type(metric).__module__]
    assert cache in Path(copied.__file__).parents
    assert copied.compute_ranking is sys.modules["hf_deco.metrics.ranking"].compute_ranking
    assert metric.name == name and "k (`int`" in metric.inputs_description


def test_the_classes_work_without_loading():
    predictions, references = ragged(7)
    for metric in (NDCGAtK(keep_in_memory=True), RecallAtK(keep_in_memory=True)):
        found = metric.compute(predictions=predictions, references=references, k=3)
        kind = "ndcg_at_k" if isinstance(metric, NDCGAtK) else "recall_at_k"
        assert found == pytest.approx({key(kind, 3): naive(kind, predictions, references, 3)})


def test_names_and_a_missing_library_are_told(monkeypatch):
    with pytest.raises(ValueError, match="`name` must be one of ndcg_at_k, recall_at_k, got 'mrr'"):
        metrics.load("mrr")
    with pytest.raises(ValueError, match="`config_name` must be 'default' or 'slices', got 'slice'"):
        metrics.load("ndcg_at_k", "slice")
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hf_deco\[metrics\]'"):
        metrics.load("ndcg_at_k")
