"""Training: options, the one `Trainer`, and a whole run."""

from .arguments import DecoTrainingArguments
from .run import evaluate, train
from .trainer import DecoTrainer

__all__ = ["DecoTrainer", "DecoTrainingArguments", "evaluate", "train"]
