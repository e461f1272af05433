"""Ragged sequences against lists of lists."""

import numpy as np
import pytest

from hf_deco.data import Examples, Sequences


def _sequences(lists):
    lengths = [len(items) for items in lists]
    flat = np.array([item for items in lists for item in items], dtype=np.int64)
    return Sequences(np.concatenate([[0], np.cumsum(lengths)]), flat, np.arange(len(lists)) * 10)


def _lists(sequences):
    return [items.tolist() for items in sequences]


LISTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def test_reads_like_a_list():
    sequences = _sequences(LISTS)
    assert len(sequences) == 4
    assert _lists(sequences) == LISTS  # iteration ends
    assert sequences[-1].tolist() == [5, 6, 7, 8]
    assert sequences.lengths.tolist() == [3, 0, 1, 4]
    for index in (4, -5):
        with pytest.raises(IndexError, match=rf"sequence {index} of 4"):
            sequences[index]


def test_truncate_keeps_the_last_items():
    short = _sequences(LISTS).truncate(2)
    assert short.offsets.tolist() == [0, 2, 2, 3, 5]
    assert short.items.tolist() == [2, 3, 4, 7, 8]
    assert short.user_index.tolist() == [0, 10, 20, 30]
    with pytest.raises(ValueError, match=r"`max_length` is 0; keep at least 1 item"):
        short.truncate(0)


def test_select_by_index_and_by_mask():
    sequences = _sequences(LISTS)
    chosen = sequences.select(np.array([3, 0, 3, 1]))
    assert _lists(chosen) == [[5, 6, 7, 8], [1, 2, 3], [5, 6, 7, 8], []]
    assert chosen.user_index.tolist() == [30, 0, 30, 10]
    assert _lists(sequences.select(np.array([False, True, True, False]))) == [[], [4]]
    assert len(sequences.select(np.zeros(4, dtype=bool))) == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_equal_lists(seed):
    draw = np.random.default_rng(seed)
    lists = [draw.integers(100, size=length).tolist() for length in draw.integers(0, 7, size=30)]
    sequences = _sequences(lists)
    for length in (1, 3, 10):
        assert _lists(sequences.truncate(length)) == [items[-length:] for items in lists]
    index = draw.integers(30, size=50)
    assert _lists(sequences.select(index)) == [lists[i] for i in index]


def test_examples_move_histories_targets_and_users_together():
    examples = Examples(_sequences(LISTS), np.array([9, 8, 7, 6]), np.array([0, 10, 20, 30]))
    chosen = examples.select(np.array([3, 1])).truncate(1)
    assert _lists(chosen.histories) == [[8], []]
    assert chosen.targets.tolist() == [6, 8]
    assert chosen.user_index.tolist() == chosen.histories.user_index.tolist() == [30, 10]
    assert len(chosen) == 2
    assert _lists(examples.histories) == LISTS
