"""Training of a residual quantiser by gradient: one step, many steps, and going on after a stop as if it never was."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..models.quantization import INITS, ResidualQuantizer


@dataclass(frozen=True)
class QuantizerTraining:
    """How a quantiser is trained by gradient.

    Args:
        num_steps (`int`): Adam steps.
        batch_size (`int`): items a step, all of them where there are fewer; batches are whole.
        learning_rate (`float`): of the first step; it falls to zero along a half cosine. For embeddings of unit mean
            squared norm, to which [`GradientRQ`] scales all others.
        weight_decay (`float`): decoupled, and on what `ResidualQuantizer.no_decay_parameters` does not name.
        init (`str`): `"kmeans"`, the codebooks of a k-means a level, or `"uniform"`.
        save_steps (`int`): steps between checkpoints, where one is asked for.

    Raises:
        ValueError: a value is out of range.
    """

    num_steps: int = 1500
    batch_size: int = 2048
    learning_rate: float = 1e-2
    weight_decay: float = 0.0
    init: str = "kmeans"
    save_steps: int = 250

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"`learning_rate` must be positive, got {self.learning_rate}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"`weight_decay` must not be negative, got {self.weight_decay}.")
        if self.init not in INITS:
            raise ValueError(f"`init` must be one of {', '.join(INITS)}, got {self.init!r}.")


class QuantizerTrainer:
    """Takes Adam steps on a quantiser, which stays on the device that Accelerate chooses.

    Args:
        quantizer ([`ResidualQuantizer`]): trained in place.
        training ([`QuantizerTraining`]): rates and sizes.
        seed (`int`): seed of the batches.

    Raises:
        ValueError: several processes were launched.
    """

    def __init__(self, quantizer: ResidualQuantizer, training: QuantizerTraining, seed: int = 0):
        from accelerate import Accelerator

        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            raise ValueError(
                "a quantiser is trained by one process, and there are "
                f"{self.accelerator.num_processes}: build the SIDs first, without `accelerate launch`."
            )
        self.training, self.seed = training, seed
        self.quantizer = quantizer.to(self.accelerator.device)
        self.parameters = dict(quantizer.named_parameters())
        self.optimizer = self._make_optimizer() if self.parameters else None

    def _make_optimizer(self):
        exempt = set(self.quantizer.no_decay_parameters())
        groups = [
            {"params": [value for name, value in self.parameters.items() if name not in exempt]},
            {"params": [value for name, value in self.parameters.items() if name in exempt], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        decay = self.training.weight_decay
        return self.accelerator.prepare(torch.optim.AdamW(groups, lr=self.training.learning_rate, weight_decay=decay))

    def step(self, batch: torch.Tensor, learning_rate: float) -> float:
        """One step on a batch `(b, d)`; returns its loss.

        Raises:
            ValueError: the loss is not finite; parameters have not moved then, running means may have.
        """
        self.quantizer.train()
        loss = self.quantizer(batch.to(self.accelerator.device)).loss
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(f"the loss is not finite ({value}): scale the embeddings, or lower `learning_rate`.")
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()
        self.quantizer.eval()
        return value

    def fit(self, points: torch.Tensor, checkpoint: Path | None = None, show_progress: bool = False) -> None:
        """Trains for `num_steps` on points `(N, d)`, from the start or from where a checkpoint was left.

        Args:
            points (`torch.Tensor` of shape `(N, d)`): what is quantised.
            checkpoint (`Path`, *optional*): file that is written every `save_steps` steps, and gone on with where it
                exists. Stopped and gone on with, training gives exactly what it gives in one go.
            show_progress (`bool`): show a progress bar.

        Raises:
            ValueError: the checkpoint is of another training, or damaged.
        """
        from tqdm.auto import tqdm

        training = self.training
        identity = None if checkpoint is None else self._identity(points)
        done = self._resume(checkpoint, identity)
        steps = tqdm(range(done, training.num_steps), initial=done, total=training.num_steps, disable=not show_progress)
        for step in steps:
            rate = training.learning_rate * 0.5 * (1 + math.cos(math.pi * step / training.num_steps))
            loss = self.step(points[self._batch_rows(step, len(points))], rate)
            if step % 20 == 0:
                steps.set_postfix(loss=f"{loss:.4g}")
            if checkpoint is not None and (step + 1) % training.save_steps == 0:
                self._save(checkpoint, identity, step + 1)

    def _batch_rows(self, step: int, num_points: int) -> torch.Tensor:
        """Rows of a step's batch: every epoch shuffles anew, and what does not fill a batch waits for another epoch."""
        size = min(self.training.batch_size, num_points)
        epoch, batch = divmod(step, num_points // size)
        if getattr(self, "_epoch", None) != (epoch, num_points):
            self._epoch = (epoch, num_points)
            self._order = torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(num_points))
        return self._order[batch * size : (batch + 1) * size]

    def state(self) -> dict[str, torch.Tensor]:
        """All that a later step depends on: the quantiser, and Adam's moments and step count of every parameter."""
        tensors = {f"quantizer.{name}": value for name, value in self.quantizer.state_dict().items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Goes back to a `state`."""
        start = "quantizer."
        self.quantizer.load_state_dict({k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)})
        for name, parameter in self.parameters.items():
            start = f"optimizer.{name}."
            found = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
            # Adam keeps its step count on the CPU.
            moved = {k: v.clone() if k == "step" else v.to(parameter.device, copy=True) for k, v in found.items()}
            self.optimizer.state.pop(parameter, None)
            if moved:
                self.optimizer.state[parameter] = moved

    def _identity(self, points: torch.Tensor) -> str:
        """Names a training: the quantiser's arguments, the rates and sizes, the seed and the data."""
        options = {name: value for name, value in asdict(self.training).items() if name != "save_steps"}
        text = json.dumps([self.quantizer.config, options, self.seed, list(points.shape)])
        return hashlib.sha256(text.encode() + points.cpu().numpy().tobytes()).hexdigest()

    def _save(self, path: Path, identity: str, step: int) -> None:
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(self.state(), str(temporary), metadata={"identity": identity, "step": str(step)})
        os.replace(temporary, path)

    def _resume(self, path: Path | None, identity: str | None) -> int:
        """Loads a checkpoint if there is one; returns the steps done."""
        from safetensors import SafetensorError, safe_open

        if path is None or not path.is_file():
            return 0
        try:
            with safe_open(str(path), "pt") as file:
                metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"the checkpoint {str(path)!r} is damaged ({error}); delete it to start anew.") from error
        if not metadata or metadata.get("identity") != identity:
            raise ValueError(
                f"the checkpoint {str(path)!r} is of a training with other embeddings or options; delete it to start "
                "anew, or give the same ones."
            )
        self.load_state(tensors)
        return int(metadata["step"])
