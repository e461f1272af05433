"""Sequences and examples as the tensors that a model reads."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from .sequences import Examples, Sequences


class SequenceWindows(Dataset):
    """Training sequences, cut into windows of at most `T` transitions that cover each transition once.

    Windows are counted from the end, so that the latest ones are full; sequences of one item hold no transition and
    give none.

    Args:
        sequences ([`Sequences`]): Item indices of every training sequence.
        max_history_length (`int`): Transitions per window, `T`.
    """

    def __init__(self, sequences: Sequences, max_history_length: int):
        self.items = np.asarray(sequences.items)
        transitions = np.maximum(np.diff(sequences.offsets) - 1, 0)
        windows = -(-transitions // max_history_length)
        sequence = np.repeat(np.arange(len(windows)), windows)
        before = np.cumsum(windows) - windows
        from_end = np.arange(len(sequence)) - before[sequence]  # 0 for the last window of a sequence
        self.ends = sequences.offsets[1:][sequence] - from_end * max_history_length
        first = sequences.offsets[:-1][sequence]
        self.starts = np.maximum(self.ends - max_history_length - 1, first)
        self.from_start = self.starts == first

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict:
        return {"items": self.items[self.starts[index] : self.ends[index]], "from_start": bool(self.from_start[index])}

    @property
    def lengths(self) -> np.ndarray:
        """Items in every window, `(len(self),)`."""
        return self.ends - self.starts


class ExampleDataset(Dataset):
    """Held-out examples, each a history and its target.

    Args:
        examples ([`Examples`]): Histories, cut to the latest `T` items already, and targets.
    """

    def __init__(self, examples: Examples):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict:
        return {"items": self.examples.histories[index], "target": int(self.examples.targets[index])}


class SIDCollator:
    """Pads a batch of item sequences on the left and looks up their codes.

    Sequences without a target are for training: inputs are all items but the last, labels all but the first.

    Args:
        codes (array of shape `(N, K)`): SID of every item index.
        catalog_rows (array of shape `(N,)`, *optional*): Row in the model's catalog of every item index, -1 outside it;
            for models that tell items of one SID apart.
    """

    def __init__(self, codes: np.ndarray, catalog_rows: np.ndarray | None = None):
        self.codes = torch.as_tensor(np.asarray(codes)).long()
        self.catalog_rows = None if catalog_rows is None else torch.as_tensor(np.asarray(catalog_rows)).long()

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        """Collate.

        Returns:
            `item_codes (B, T, K)`, `attention_mask (B, T)`, `labels (B, T, K)` with -100 at padding, and `from_start
            (B,)`, whether a sequence begins with its user's first item; for examples with a target, `target_items (B,)`
            in place of the last two. With `catalog_rows` a training batch has `target_rows (B, T + 1)` too, those of
            all its items, -1 at padding.
        """
        sequences = [torch.as_tensor(np.ascontiguousarray(feature["items"])).long() for feature in features]
        if "target" in features[0]:
            rows, mask = self._pad(sequences, 1)
            return {
                "item_codes": self.codes[rows] * mask.unsqueeze(-1),
                "attention_mask": mask,
                "target_items": torch.tensor([feature["target"] for feature in features]),
            }
        rows, there = self._pad(sequences, 2)
        mask = there[:, :-1]
        batch = {
            "item_codes": self.codes[rows[:, :-1]] * mask.unsqueeze(-1),
            "attention_mask": mask,
            "labels": self.codes[rows[:, 1:]].masked_fill(mask.unsqueeze(-1) == 0, -100),
            "from_start": torch.tensor([feature.get("from_start", True) for feature in features]),
        }
        if self.catalog_rows is not None:
            batch["target_rows"] = self.catalog_rows[rows].masked_fill(there == 0, -1)
        return batch

    def _pad(self, sequences: list[torch.Tensor], least: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Item indices and mask, `(B, W)` each, `W` no less than `least`."""
        width = max(least, max(len(items) for items in sequences))
        rows = torch.zeros((len(sequences), width), dtype=torch.long)
        mask = torch.zeros((len(sequences), width), dtype=torch.long)
        for row, items in enumerate(sequences):
            if len(items):
                rows[row, -len(items) :], mask[row, -len(items) :] = items, 1
        return rows, mask
