"""transformers' `Trainer` on a stream: one pass in the order of time, stages by step, evaluation of what comes next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from ..data.gear_batches import GearCollator
from ..evaluation.next_period import NextPeriodEvaluator
from ..items.generations import open_index
from .gear_index import IndexPublisher
from .gear_stream import RequestStream
from .results import write_json

STREAM_FILE, FROZEN_FILE = "stream.json", "frozen_sids.npy"
LOSSES = ("ltr", "rq", "gen", "rerank")


class ScheduleCallback(TrainerCallback):
    """The progressive schedule: towers, then the quantiser with them, then all; and what happens at its joints."""

    def __init__(self, trainer: GearTrainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.enter_step(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        stream, step = self.trainer.stream, state.global_step
        stream.advance()
        if step in stream.period_ends and step > self.trainer.joint_from and stream.next_period(step) is not None:
            control.should_evaluate = True


class GearTrainer(Trainer):
    """Trains GEAR on a stream of requests.

    At the end of every period, as soon as the generator learns, `evaluate` publishes the index and asks the model for
    the period that comes next, of which nothing has been trained on. A checkpoint holds where the stream stands.

    Args:
        stream ([`RequestStream`]): Requests to train on.
        collator ([`GearCollator`]): Makes batches of them, when they are trained on and not before: same-SID negatives
            come from the catalog of that moment.
        evaluator ([`NextPeriodEvaluator`]): Judges.
        publisher ([`IndexPublisher`]): Keeps catalog and index.
        kwargs: Arguments of [`transformers.Trainer`]; `args` are [`GearTrainingArguments`].

    Attributes:
        frozen_codes (`np.ndarray` of shape `(N, K)`, *optional*): SIDs of all items, once they are frozen.
    """

    def __init__(
        self,
        *,
        stream: RequestStream,
        collator: GearCollator,
        evaluator: NextPeriodEvaluator,
        publisher: IndexPublisher,
        **kwargs,
    ):
        super().__init__(train_dataset=stream, **kwargs)
        self.stream, self.collator, self.evaluator, self.publisher = stream, collator, evaluator, publisher
        self.rq_from = self.args.ltr_steps
        self.joint_from = self.args.ltr_steps + self.args.rq_steps
        self.frozen_codes: np.ndarray | None = None
        self._sums: dict[str, tuple[float, int]] = {}
        if self.model.config.num_items:
            self.collator.set_catalog(self.model.catalog_codes.cpu().numpy())
        self.add_callback(ScheduleCallback(self))

    def enter_step(self, step: int) -> None:
        """Set the model's stage for a step, after what the first step of a stage begins with."""
        model = self.accelerator.unwrap_model(self.model)
        if step == self.rq_from:
            items = self._items(self.stream.log.num_known(self.stream.period_at(step)))
            model.init_quantizer(*items, init="kmeans", seed=self.args.seed)
        if step == self.joint_from and self.args.frozen_sids:
            items = self._items(len(self.stream.log.item_ids))
            training = model.training
            self.frozen_codes = model.eval().encode_items(*items).codes.cpu().numpy()
            model.train(training)
        model.set_stage("ltr" if step < self.rq_from else "rq" if step < self.joint_from else "joint")

    def _items(self, number: int) -> list:
        return [part.to(self.args.device) for part in self.collator.items(number).values()]

    def get_train_dataloader(self) -> DataLoader:
        """Batches of the stream as they come: it makes them itself."""
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=1, collate_fn=_as_batch))

    def _prepare_inputs(self, inputs):
        # Only now: the loader has read ahead, past the publication of an index.
        return super()._prepare_inputs(self.collator(inputs["requests"], self.frozen_codes))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The weighted loss of the stage; its parts are logged beside it."""
        output = model(**inputs)
        for name in LOSSES:
            if (loss := getattr(output, f"{name}_loss")) is not None:
                total, number = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + loss.detach(), number + 1
        return (output.loss, output) if return_outputs else output.loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the means of the parts of the loss since the last time."""
        if "loss" in logs:
            logs |= {f"loss_{name}": float(total / number) for name, (total, number) in self._sums.items()}
            self._sums = {}
        super().log(logs, start_time)

    def create_optimizer(self, model=None):
        """The parent's optimizer; what makes SIDs has groups of its own, of learning rates of its own."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer, rates = super().create_optimizer(model), self._sid_rates()
        groups = []
        for group in optimizer.param_groups:
            for rate in sorted({rates.get(id(weight), 1.0) for weight in group["params"]}):
                weights = [weight for weight in group["params"] if rates.get(id(weight), 1.0) == rate]
                groups.append(group | {"params": weights, "lr": rate * group["lr"]})
        optimizer.param_groups[:] = groups
        return optimizer

    def _sid_rates(self) -> dict[int, float]:
        """Factor of the learning rate of every parameter, by its `id`, that makes SIDs.

        Adam moves a row of an embedding table by some 30 learning rates whenever it has a gradient, however small, so
        rare rows would carry items from SID to SID: tables are held back with the quantizer.
        """
        model = self.accelerator.unwrap_model(self.model)
        slow = [*model.item_features.parameters(), *model.quantizer.parameters()]
        rates = {id(weight): self.args.quantizer_rate for weight in slow}
        return rates | {id(weight): self.args.tower_rate for weight in model.item_tower.hidden_parameters()}

    def get_decay_parameter_names(self, model) -> list[str]:
        """The parent's, without those that weight decay would harm."""
        spared = set(self.accelerator.unwrap_model(model).no_decay_parameters())
        return [name for name in super().get_decay_parameter_names(model) if name not in spared]

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Publish, and evaluate the period that comes next.

        Returns:
            `dict`: on the main process, metrics under `eval_`, with the number of the period as `eval_period`, the
            share of items whose SID has changed as `eval_sids_changed`, and the sizes of catalog and directory.
        """
        step = self.state.global_step
        period = self.stream.next_period(step)
        if period is None:
            raise ValueError("`evaluate` needs a period that has not been trained on; the stream is over.")
        found = self._judge(period)
        self.accelerator.wait_for_everyone()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _judge(self, period: int) -> dict[str, float]:
        model = self.accelerator.unwrap_model(self.model)
        facts, vectors = {"period": period}, None
        if self.args.refresh_index or not model.config.num_items:
            published = self.publisher.publish(model, self.stream.log.num_known(period), self.frozen_codes)
            if published is not None:
                vectors = published.vectors
                facts["items_added"] = published.added
                if published.changed is not None:
                    facts["sids_changed"] = published.changed
        if not self.is_world_process_zero():
            return facts
        index = open_index(self.publisher.folder)
        facts |= {"num_items": len(index), "num_sids": index.num_sids}
        sizes = np.diff(index.offsets)
        facts["colliding"] = float(sizes[sizes > 1].sum() / len(index))
        return facts | self.evaluator(model, index, period, vectors)

    def _save_checkpoint(self, model, trial) -> None:
        """The parent's checkpoint, begun with where the stream stands: what makes one whole is written last."""
        if self.is_world_process_zero():
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            write_json(folder / STREAM_FILE, self.stream.state_dict())
            if self.frozen_codes is not None:
                np.save(folder / FROZEN_FILE, self.frozen_codes)
        super()._save_checkpoint(model, trial)


def _as_batch(batches: list) -> dict:
    return {"requests": batches[0]}
