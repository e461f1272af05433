"""transformers' `Trainer` for models that retrieve: evaluation by generation."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler
from transformers import EvalPrediction, Trainer
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..data.collators import ExampleDataset
from ..evaluation.evaluator import Evaluator


class LengthSampler(Sampler):
    """Groups sequences of like length; the order of an epoch depends on seed and epoch alone, on every process."""

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))

    def set_epoch(self, epoch: int) -> None:
        """Called before every epoch."""
        self.epoch = epoch


class DecoTrainer(Trainer):
    """Trains a model on dense next-item targets and validates it by what it retrieves.

    Everything else is the parent's: mixed precision, accumulation, resume, trackers, distribution through Accelerate.

    Args:
        evaluator ([`Evaluator`]): Held-out examples and metrics of every evaluation during training.
        catalog (`np.ndarray` of shape `(C,)`): Item index of every row of the model's catalog.
        num_beams (`int`): Beam width of those evaluations.
        kwargs: Arguments of [`transformers.Trainer`].
    """

    def __init__(self, *args, evaluator: Evaluator, catalog: np.ndarray, num_beams: int = 10, **kwargs):
        self._catalog = torch.as_tensor(catalog)
        self._search = {"num_beams": num_beams, "num_return_sequences": min(num_beams, max(evaluator.ks))}

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            metrics = evaluator.evaluate_retrieved(prediction.predictions[0])
            return {name: value for name, value in metrics.items() if "/" not in name}  # slices are for tests

        super().__init__(
            *args, eval_dataset=ExampleDataset(evaluator.examples), compute_metrics=compute_metrics, **kwargs
        )

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Retrieve for one batch.

        Returns:
            No loss; item indices `(B, R)` with -1 where fewer were found, and gates `(B,)` of a copy pointer, 0 without
            one; targets `(B,)`.
        """
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("target_items")
        with torch.no_grad():  # in the precision of the weights, also where training is mixed
            retriever = self.accelerator.unwrap_model(model)
            output = retriever.generate(**inputs, **self._search, return_dict_in_generate=True)
        rows = output.item_rows.view(targets.shape[0], -1)
        items = torch.where(rows >= 0, self._catalog.to(rows.device)[rows.clamp(min=0)], -1)
        gates = torch.zeros(len(targets), device=rows.device) if output.gates is None else output.gates.float()
        return None, (items, gates), targets

    def test(self, evaluator: Evaluator, num_beams: int) -> dict[str, float]:
        """Metrics of the present model on other examples.

        Args:
            evaluator ([`Evaluator`]): Examples and metrics.
            num_beams (`int`): Beam width; as many items are ranked as the largest cutoff asks for.

        Returns:
            `dict`: what the evaluator says of the retrieved items and, with a copy pointer, of its gate.

        Raises:
            ValueError: If the beam is narrower than the largest cutoff.
        """
        if num_beams < max(evaluator.ks):
            raise ValueError(
                f"`num_beams` ({num_beams}) is narrower than the largest cutoff ({max(evaluator.ks)}): widen the beam."
            )
        before, metrics = self._search, self.compute_metrics
        self._search = {"num_beams": num_beams, "num_return_sequences": max(evaluator.ks)}
        self.compute_metrics = None
        try:
            items, gates = self.predict(ExampleDataset(evaluator.examples)).predictions
        finally:
            self._search, self.compute_metrics = before, metrics
        found = evaluator.evaluate_retrieved(items)
        if self.accelerator.unwrap_model(self.model).config.copy_pointer:
            found |= evaluator.gate_metrics(gates)
        return found

    def _get_train_sampler(self, train_dataset=None):
        # The parent looks for token lists to measure; windows know their lengths.
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy == "group_by_length":
            batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthSampler(dataset.lengths.tolist(), batch_size, self.args.data_seed or self.args.seed)
        return super()._get_train_sampler(train_dataset)

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)  # predictions have to come in the order of the examples
