"""Learning from a full-backbone model along the gold prefixes (Eq. 9, 10)."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import AutoConfig, AutoModel

from ..models.configuration_deco import SIDRetrievalConfig
from ..models.modeling_sid import SIDRetrievalModel, TargetScores
from .trainer import DecoTrainer

_SAMPLE = 512  # training sequences on which the two terms are weighed


def distillation_loss(student: TargetScores, teacher: TargetScores, temperature: float = 1.0) -> torch.Tensor:
    """`tau^2 sum_k KL(q_tau^k || p_tau^k)`, averaged over targets; both distributions over the children of gold
    prefixes.

    Under a copy pointer they are those of the whole mixture.

    Args:
        student ([`TargetScores`]): Scores of the model that learns.
        teacher ([`TargetScores`]): Scores of the frozen model, for the same targets and catalog.
        temperature (`float`, *optional*, defaults to 1.0): Softens both distributions.

    Raises:
        ValueError: If the two did not score the same levels of the same targets.
    """
    same = len(student.levels) == len(teacher.levels)
    if not same or not all(torch.equal(a.rows, b.rows) for a, b in zip(student.levels, teacher.levels, strict=True)):
        raise ValueError("The teacher scored other targets than the student: their catalogs or options differ.")
    total = torch.zeros((), device=student.targets.codes.device)
    for scores, learned, taught in zip(
        student.levels, student.level_log_probs(), teacher.level_log_probs(), strict=True
    ):
        log_p, log_q = scores.normalized(learned / temperature), scores.normalized(taught / temperature)
        total = total + (log_q.exp() * (log_q - log_p)).sum()
    return temperature**2 * total / len(student.targets)


def check_teacher(path: str | os.PathLike, student: SIDRetrievalConfig) -> None:
    """Raise an error where the configuration of a checkpoint tells that it cannot teach a student of this one.

    Raises:
        OSError: If there is no such checkpoint.
        ValueError: If it is another kind of model, has other SIDs, normalises over other codes, or reads less.
    """
    teacher = AutoConfig.from_pretrained(path)
    if not isinstance(teacher, SIDRetrievalConfig):
        raise ValueError(f"`teacher` {str(path)!r} is a {teacher.model_type}, not a model that scores semantic IDs.")
    if teacher.codebook_sizes != student.codebook_sizes:
        raise ValueError(
            f"`teacher` {str(path)!r} has SIDs of {teacher.codebook_sizes} codes, the student of "
            f"{student.codebook_sizes}: train both on one SID table."
        )
    if teacher.normalize_over != student.normalize_over:
        raise ValueError(
            f"`teacher` {str(path)!r} normalises over {teacher.normalize_over}, the student over "
            f"{student.normalize_over}: set `normalize_over` to the teacher's."
        )
    if teacher.max_history_length < student.max_history_length:
        raise ValueError(
            f"`teacher` {str(path)!r} reads {teacher.max_history_length} items of a history, fewer than the student's "
            f"`max_history_length` ({student.max_history_length})."
        )


def load_teacher(path: str | os.PathLike, student: SIDRetrievalModel) -> SIDRetrievalModel:
    """Open a checkpoint as a frozen teacher, in evaluation mode.

    Raises:
        ValueError: If its SIDs, its catalog or its options do not fit the student's, see [`check_teacher`].
    """
    check_teacher(path, student.config)
    teacher = AutoModel.from_pretrained(path)
    if not torch.equal(teacher.catalog_codes.cpu(), student.catalog_codes.cpu()):
        raise ValueError(
            f"`teacher` {str(path)!r} carries another catalog ({teacher.config.num_items} items, the student "
            f"{student.config.num_items}): train both on one SID table and one split."
        )
    return teacher.requires_grad_(False).eval()


def init_from_teacher(student: SIDRetrievalModel, teacher: SIDRetrievalModel) -> None:
    """Start the student's backbone and history tokens from the teacher's.

    Raises:
        ValueError: If they are not of one shape.
    """
    init_from(student, teacher, ("fuser", "backbone"), "init_from_teacher")


def init_from(model: SIDRetrievalModel, other: SIDRetrievalModel, parts: tuple[str, ...], option: str) -> None:
    """Start parts of a model, and its start state, from another's; `option` is what asked for it."""
    for name in parts:
        mine, theirs = getattr(model, name), getattr(other, name).state_dict()
        if {key: value.shape for key, value in mine.state_dict().items()} != {
            key: value.shape for key, value in theirs.items()
        }:
            raise ValueError(
                f"`{option}` needs one shape of `{name}`: choose the sizes and the history format of the model that it "
                "names."
            )
        mine.load_state_dict(theirs)
    model.start_state.data.copy_(other.start_state.data)


class DistillationTrainer(DecoTrainer):
    """Trains on `w_ce CE + w_kd KD`.

    The weights are fixed before the first step, `w_ce = 1 / (3 mean_ce)` and `w_kd = 2 / (3 mean_kd)`, the means being
    what the untrained student gives on a fixed sample; they are kept in the model's configuration (`distillation`).

    Args:
        teacher ([`SIDRetrievalModel`]): Frozen model, see [`load_teacher`].
        temperature (`float`, *optional*, defaults to 1.0): Temperature `tau`.
        objective (`str`, *optional*, defaults to `"ce+kd"`): `"kd"` leaves the observed items out.
        kwargs: Arguments of [`DecoTrainer`].
    """

    def __init__(self, *args, teacher: SIDRetrievalModel, temperature: float = 1.0, objective: str = "ce+kd", **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.temperature = teacher.to(self.args.device), temperature
        ce, kd = self._initial_terms(self.train_dataset)
        self.weights = {"ce": 1 / (3 * ce) if objective == "ce+kd" else 0.0, "kd": 2 / (3 * kd)}
        self.model.config.distillation = {
            "temperature": temperature,
            "ce_weight": self.weights["ce"],
            "kd_weight": self.weights["kd"],
        }

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """`w_ce CE + w_kd KD` of a batch."""
        output = model(**inputs, return_target_scores=True)
        ce, kd = output.loss, self._distill(output.target_scores, inputs)
        loss = self.weights["ce"] * ce + self.weights["kd"] * kd
        return (loss, output) if return_outputs else loss

    def _distill(self, student: TargetScores, inputs: dict) -> torch.Tensor:
        with torch.no_grad(), self.accelerator.autocast():
            taught = self.teacher.score_targets(**inputs)
        return distillation_loss(student, taught, self.temperature)

    @torch.no_grad()
    def _initial_terms(self, dataset: Dataset) -> tuple[float, float]:
        """Mean of both terms over the first sequences, the student untrained and without dropout."""
        sample = Subset(dataset, range(min(_SAMPLE, len(dataset))))
        training, sums, count = self.model.training, torch.zeros(2), 0
        self.model.eval()
        for batch in DataLoader(sample, batch_size=64, collate_fn=self.data_collator):
            batch = self._prepare_inputs(batch)
            with self.accelerator.autocast():
                scores = self.model.score_targets(**batch)
                ce = -scores.log_likelihood().mean()
                kd = self._distill(scores, batch)
            sums += torch.stack([ce, kd]).float().cpu() * len(scores.targets)
            count += len(scores.targets)
        self.model.train(training)
        ce, kd = (sums / count).tolist()
        if kd <= 0:
            raise ValueError("The untrained student already equals the teacher: there is nothing to distill.")
        return ce, kd
