"""Every option of a GEAR run on a stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import TrainingArguments

from ..items.packing import PRECISIONS
from ..models.configuration_gear import GAINS, QUANTIZERS
from .arguments import option

GROCERY = "completejourney"
# Ablations of a run, and the options that make them.
ABLATIONS = {
    "rq": {"quantizer_method": "rq"},
    "basis_rq": {"quantizer_method": "basis-rq"},
    "no_reranker": {"reranker": False},
    "no_weight": {"weighted": False},
    "frozen_sids": {"frozen_sids": True},
    "no_refresh": {"refresh_index": False},
}
_LOWEST = {"per_device_train_batch_size": 1, "num_positives": 1, "num_negatives": 0, "num_popular": 0}
_LOWEST |= {
    "num_same_sid": 0,
    "min_grade": 0,
    "ltr_steps": 0,
    "rq_steps": 0,
    "eval_users": 0,
    "per_sid_limit": 1,
    "min_purchases": 1,
}


@dataclass
class GearTrainingArguments(TrainingArguments):
    """
    Options of a GEAR run: the log and its roles, the model, the schedule, what is left out of it, how it is judged.

    All of [`transformers.TrainingArguments`] can be set beside these, but for those that a stream leaves no choice in:
    it is read once, in one order, and evaluated at the end of every period.
    """

    log: str = option(GROCERY, f"Roles of the log's tables, a YAML file; or `{GROCERY}`, the installed grocery log.")
    data_dir: str = option("runs/gear/data", "Folder of tables and embeddings made for the runs, which share them.")
    min_purchases: int = option(10, "Of the grocery log: products bought fewer times are left out.")
    embeddings: str | None = option(
        None, "NumPy file (N, d) with one row per row of the item table; encoded from the texts when not given."
    )
    embedding_model: str = option(
        "sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers model, name or path, for the texts."
    )

    history_lengths: list[int] = option([60, 30], "Items of every behaviour's sequence that are read, the latest.")
    num_positives: int = option(8, "Candidates of a request with an event, at most.")
    num_negatives: int = option(2, "Candidates of a request that were shown without an event, at most.")
    num_popular: int = option(4, "Candidates of a request that were popular at the time, without an event.")
    num_same_sid: int = option(8, "Candidates of a request that share the SID of one with an event, at most.")
    min_grade: int = option(1, "Lowest grade of a candidate that the generator learns to spell; 0 for all shown.")

    codebook_sizes: list[int] = option([128, 64, 32], "Codes per SID level.")
    quantizer_method: str = option("prefix-basis-rq", "How codebooks are made: " + ", ".join(QUANTIZERS) + ".")
    feature_size: int = option(16, "Width of the embedding of a categorical feature.")
    tower_hidden_size: int = option(128, "Width of the first hidden layer of both towers.")
    tower_size: int = option(64, "Width of what both towers put out.")
    code_size: int = option(64, "Width of a code.")
    decoder_layers: int = option(2, "Layers of the decoder.")
    num_heads: int = option(4, "Heads of its attentions.")
    head_dim: int = option(32, "Width of a head.")
    intermediate_size: int = option(128, "Width inside its gated feed-forward networks.")
    initializer_range: float = option(0.05, "Standard deviation of fresh weights.")
    gain: str = option("linear", "What a label is worth in the ranking losses: `linear` or `exp2`.")
    loss_weights: list[float] = option([1.0, 1.0, 10.0, 1.0], "Weights of L_LTR, L_RQ, L_Gen and L_Rerank.")

    ltr_steps: int = option(100, "Steps of the first stage, which trains the two towers alone.")
    rq_steps: int = option(50, "Steps of the second stage, which trains the quantizer with them.")
    reranker: bool = option(True, "Train the reranking head and rank by it; else colliding items are cut at random.")
    weighted: bool = option(True, "Weigh the generator's loss by the business value.")
    frozen_sids: bool = option(False, "Freeze all SIDs when the generator begins.")
    refresh_index: bool = option(True, "Publish the index at the end of every period; else only once.")
    precision: str = option("int8", "What the index keeps vectors in: " + ", ".join(PRECISIONS) + ".")

    num_beams: list[int] = option([32, 32, 64], "Beam width of every level in evaluations.")
    per_sid_limit: int = option(8, "Items of one SID in a result, at most.")
    eval_users: int = option(256, "Users of a period that are evaluated, drawn, at most; 0 takes all.")
    cutoffs: list[int] = option([10, 50], "Cutoffs k of Recall@k and NDCG@k.")
    system: str | None = option(None, "Name in the results; made from the options when not given.")
    results_file: str | None = option(None, "JSON file of result rows to add this run to.")

    output_dir: str | None = option("runs/gear/run", "Folder of the run.")
    learning_rate: float = option(3e-3, "Learning rate.")
    tower_rate: float = option(
        0.002, "Factor of the learning rate of the layers whose hidden states are quantised: SIDs should not run away."
    )
    quantizer_rate: float = option(0.05, "Factor of that of the quantizer and of the embeddings of items' features.")
    max_grad_norm: float = option(
        100.0, "Longest gradient; the generator's is long, and a low limit would leave the others little."
    )
    warmup_steps: float = option(50, "Steps of linear warm-up.")
    lr_scheduler_type: str = option("constant_with_warmup", "Schedule of the learning rate.")
    per_device_train_batch_size: int = option(32, "Requests per step and process.")
    save_strategy: str = option("steps", "When to keep a checkpoint.")
    save_steps: float = option(500, "Steps between checkpoints.")
    save_total_limit: int | None = option(2, "Checkpoints kept.")
    logging_steps: float = option(20, "Steps between log lines.")
    report_to: None | str | list[str] = option("none", "Trackers, such as `tensorboard`.")
    remove_unused_columns: bool = option(False, "Kept off: a batch is made of whole requests.")
    ignore_data_skip: bool = option(True, "Kept on: the stream itself goes on where it was.")
    ddp_find_unused_parameters: bool | None = option(True, "Kept on: a stage leaves parameters unused.")

    def __post_init__(self):
        if not torch.accelerator.is_available():
            self.use_cpu = True  # the parent refuses bf16 on a machine without accelerator unless told so
        if self.accelerator_config is None:  # every process reads the stream and takes its own batches
            self.accelerator_config = {"dispatch_batches": False, "split_batches": False}
        super().__post_init__()
        for name, lowest in _LOWEST.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"`{name}` must be at least {lowest}, got {getattr(self, name)}.")
        for name, allowed in (("quantizer_method", QUANTIZERS), ("gain", GAINS), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        for name in ("tower_rate", "quantizer_rate"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` must be finite and not negative, got {getattr(self, name)}.")
        self._check_lists()
        self._check_stream()
        if self.system is None:
            self.system = self._default_system()

    def _check_lists(self) -> None:
        """Lists that hold what they should; a YAML file may hold anything."""
        for name in ("history_lengths", "codebook_sizes", "num_beams", "cutoffs"):
            value = getattr(self, name)
            if not isinstance(value, list) or not value or any(type(entry) is not int or entry < 1 for entry in value):
                raise ValueError(f"`{name}` must be a list of positive integers, got {value!r}.")
        if len(self.num_beams) != len(self.codebook_sizes):
            raise ValueError(
                f"`num_beams` {self.num_beams} must have a width for each of {len(self.codebook_sizes)} levels."
            )
        weights = self.loss_weights
        if len(weights) != 4 or any(not isinstance(weight, int | float) or not weight >= 0 for weight in weights):
            raise ValueError(f"`loss_weights` must be four numbers of at least 0, got {weights!r}.")

    def _check_stream(self) -> None:
        """Options of the parent that a stream has no use for."""
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"`gradient_accumulation_steps` is {self.gradient_accumulation_steps}, but a step may not span two "
                "periods of the stream: enlarge `per_device_train_batch_size` instead."
            )
        if self.dataloader_num_workers:
            raise ValueError(
                f"`dataloader_num_workers` is {self.dataloader_num_workers}, but every worker would read the whole "
                "stream: set it to 0."
            )
        for name, kept in (("ignore_data_skip", True), ("remove_unused_columns", False)):
            if getattr(self, name) is not kept:
                raise ValueError(f"`{name}` must stay {kept} for a stream.")

    def _default_system(self) -> str:
        """The name of what these options train: `gear` and what differs."""
        named = [
            name
            for name, options in ABLATIONS.items()
            if all(getattr(self, option) == value for option, value in options.items())
        ]
        return "/".join(["gear", *named])
