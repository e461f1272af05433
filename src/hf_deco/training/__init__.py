"""Training: options, the one `Trainer`, and a whole run."""

from .arguments import DecoTrainingArguments
from .gear import train_gear
from .gear_arguments import GearTrainingArguments
from .run import evaluate, train
from .trainer import DecoTrainer

__all__ = ["DecoTrainer", "DecoTrainingArguments", "GearTrainingArguments", "evaluate", "train", "train_gear"]
