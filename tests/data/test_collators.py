import random

import numpy as np
import pytest
import torch

from hf_deco.data.collators import ExampleDataset, SequenceWindows, SIDCollator
from hf_deco.data.sequences import Examples, Sequences

CODES = np.array([[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]], dtype=np.int32)


def build(*lists):
    lengths = [len(items) for items in lists]
    items = np.array([item for items in lists for item in items], dtype=np.int64)
    return Sequences(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), items, np.arange(len(lists)))


def windows(sequences, max_history_length):
    dataset = SequenceWindows(sequences, max_history_length)
    return [dataset[index]["items"].tolist() for index in range(len(dataset))]


def test_windows_overlap_by_one_item_and_are_counted_from_the_end():
    sequences = build([1, 2, 3, 4, 5, 6, 7, 8], [9], [10, 11], [], [12, 13, 14, 15])
    assert windows(sequences, 3) == [[5, 6, 7, 8], [2, 3, 4, 5], [1, 2], [10, 11], [12, 13, 14, 15]]
    assert windows(sequences, 1) == [
        [7, 8], [6, 7], [5, 6], [4, 5], [3, 4], [2, 3], [1, 2], [10, 11], [14, 15], [13, 14], [12, 13],
    ]  # fmt: skip
    assert windows(sequences, 100) == [[1, 2, 3, 4, 5, 6, 7, 8], [10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("seed", range(30))
def test_every_transition_is_in_exactly_one_window(seed):
    rng = random.Random(seed)
    limit, counter, lists = rng.randint(1, 9), 0, []
    for _ in range(rng.randint(1, 12)):
        length = rng.choice((0, 1, 2, limit, limit + 1, limit + 2, rng.randint(0, 40)))
        lists.append(list(range(counter, counter + length)))  # no item twice: a transition is known by its items
        counter += length
    cut = windows(build(*lists), limit)
    transitions = sorted(pair for window in cut for pair in zip(window, window[1:], strict=False))
    assert transitions == [pair for items in lists for pair in zip(items, items[1:], strict=False)]
    assert all(2 <= len(window) <= limit + 1 for window in cut)
    latest = {window[-1]: window for window in cut}
    for items in lists:
        if len(items) > limit:
            assert latest[items[-1]] == items[-limit - 1 :]  # the latest window of a long sequence is full


def test_sequences_without_transitions_give_no_window():
    assert windows(build([3], [], [4]), 5) == []


def test_examples_are_histories_with_their_targets():
    dataset = ExampleDataset(Examples(build([3, 1], [], [2]), np.array([4, 0, 1]), np.arange(3)))
    assert len(dataset) == 3
    assert [(row["items"].tolist(), row["target"]) for row in map(dataset.__getitem__, range(3))] == [
        ([3, 1], 4),
        ([], 0),
        ([2], 1),
    ]
    assert all(type(dataset[index]["target"]) is int for index in range(3))


def assert_batch(batch, expected):
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert batch[name].dtype == (torch.bool if name == "from_start" else torch.int64)
        assert batch[name].tolist() == values, name


def test_training_batch_shifts_labels_by_one_and_pads_on_the_left():
    sequences = build([0, 1, 2, 3], [4, 2], [1])
    batch = SIDCollator(CODES)([{"items": sequences[index]} for index in range(3)])
    pad, hidden = [0, 0], [-100, -100]
    assert_batch(
        batch,
        {
            "item_codes": [[[0, 5], [1, 6], [2, 7]], [pad, pad, [4, 9]], [pad, pad, pad]],
            "attention_mask": [[1, 1, 1], [0, 0, 1], [0, 0, 0]],
            "labels": [[[1, 6], [2, 7], [3, 8]], [hidden, hidden, [2, 7]], [hidden, hidden, hidden]],
            "from_start": [True, True, True],
        },
    )


def test_rows_of_the_catalog_stand_beside_the_windows_that_they_are_of():
    """The row of the item after column `t` is in column `t + 1`. Item 3 is outside the catalog, item 4 its first."""
    collate = SIDCollator(CODES, np.array([1, 2, 3, -1, 0]))
    sequences = build([0, 1, 2, 3], [4, 2], [1])
    batch = collate([{"items": sequences[index]} for index in range(3)])
    rows = batch.pop("target_rows")
    assert rows.tolist() == [[1, 2, 3, -1], [-1, -1, 0, 3], [-1, -1, -1, 2]]
    plain = SIDCollator(CODES)([{"items": sequences[index]} for index in range(3)])
    assert_batch(batch, {name: values.tolist() for name, values in plain.items()})
    assert collate([{"items": sequences[2]}])["target_rows"].tolist() == [[-1, 2]]
    assert "target_rows" not in collate([{"items": sequences[0], "target": 1}])


def test_held_out_batch_carries_whole_histories_and_targets():
    dataset = ExampleDataset(Examples(build([3, 1], [], [2]), np.array([4, 0, 1]), np.arange(3)))
    batch = SIDCollator(CODES)([dataset[index] for index in range(3)])
    assert_batch(
        batch,
        {
            "item_codes": [[[3, 8], [1, 6]], [[0, 0], [0, 0]], [[0, 0], [2, 7]]],
            "attention_mask": [[1, 1], [0, 0], [0, 1]],
            "target_items": [4, 0, 1],
        },
    )


def test_batch_of_empty_histories_is_one_masked_position_wide():
    dataset = ExampleDataset(Examples(build([], []), np.array([4, 0]), np.arange(2)))
    batch = SIDCollator(CODES)([dataset[0], dataset[1]])
    assert_batch(batch, {"item_codes": [[[0, 0]], [[0, 0]]], "attention_mask": [[0], [0]], "target_items": [4, 0]})


def test_windows_through_the_collator_reach_every_transition_as_input_and_label():
    sequences = build([0, 1, 2, 3, 4, 0, 2], [3, 3])
    dataset = SequenceWindows(sequences, 4)
    batch = SIDCollator(CODES)([dataset[index] for index in range(len(dataset))])
    mask = batch["attention_mask"].bool()
    pairs = sorted(zip(batch["item_codes"][mask][:, 0].tolist(), batch["labels"][mask][:, 0].tolist(), strict=True))
    assert pairs == sorted([(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2), (3, 3)])
    assert batch["item_codes"].shape == (3, 4, 2)


@pytest.mark.parametrize("history_format", ["fused", "flat"])
@pytest.mark.parametrize("kind", ["deco", "backbone"])
def test_models_take_both_kinds_of_batches(make_model, kind, history_format):
    model = make_model((5, 10), catalog=CODES, kind=kind, history_format=history_format)
    training = SIDCollator(CODES)([{"items": np.array([0, 1, 2])}, {"items": np.array([4, 2])}])
    output = model(**training, return_target_scores=True)
    assert len(output.target_scores.targets) == 3 + 2 and output.loss.isfinite()
    held_out = SIDCollator(CODES)([{"items": np.array([0, 1]), "target": 3}])
    targets = held_out.pop("target_items")
    concepts = model(**held_out).concepts
    assert concepts is None if kind == "backbone" else concepts.shape == (len(targets), 2, 12)
    assert model.generate(**held_out, num_beams=5).shape == (5 * len(targets), 2)
