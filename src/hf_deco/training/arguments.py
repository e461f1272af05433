"""Every option of a training run, in one dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from ..models.configuration_deco import DECODER_INPUTS


def option(default, help: str, **kwargs):
    """A dataclass field with its help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **kwargs})
    return field(default=default, metadata={"help": help, **kwargs})


def own_options(kind: type[TrainingArguments]) -> set[str]:
    """Names of the options that a class of arguments adds to, or changes of, transformers' own."""
    bases = [base for base in kind.__mro__ if issubclass(base, TrainingArguments) and base is not TrainingArguments]
    return {name for base in bases for name in base.__annotations__}


@dataclass
class DecoTrainingArguments(TrainingArguments):
    """
    Options of a Deco run: where the log is, how it is split and tokenised, what is trained, how it is judged.

    All of [`transformers.TrainingArguments`] can be set beside these; some of its defaults are other ones here: batches
    of 256 users, a learning rate of 1e-3 with warm-up and cosine decay, evaluation and a checkpoint every epoch, the
    best checkpoint by validation NDCG@10 at the end.
    """

    interactions: str | None = option(None, "Log of interactions: CSV, Parquet or JSON Lines.")
    items: str | None = option(None, "Item table: CSV, Parquet or JSON Lines.")
    user_column: str = option("user_id", "Column of the log with user ids.")
    item_column: str = option("item_id", "Column of log and item table with item ids.")
    timestamp_column: str = option("timestamp", "Column of the log with times: unix seconds to nanoseconds, or dates.")
    text_columns: list[str] = option(["text"], "Columns of the item table that describe an item; joined.")
    title_column: str = option("title", "Column of the item table with the name to show.")
    unknown_items: str = option("error", "Items of the log without a row in the table: `error` or `drop`.")
    drop_duplicates: bool = option(False, "Remove exact duplicates of user, item and time.")
    collapse_repeats: bool = option(False, "Collapse consecutive repeats of an item by a user.")
    k_core: int = option(0, "Keep users and items with at least so many interactions, repeatedly; 0 keeps all.")

    protocol: str = option("temporal", "Split: `temporal` (latest 10 %% test) or `leave_one_out`.")
    cold_targets: str = option("miss", "Targets outside the training catalog: `miss` or `drop`.")

    sids: str | None = option(None, "Folder of a SID table to use; built from the embeddings when not given.")
    embeddings: str | None = option(
        None, "NumPy file (N, d) with one row per row of the item table; encoded from the texts when not given."
    )
    embedding_model: str = option(
        "sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers model, name or path, for the texts."
    )
    codebook_sizes: list[int] = option([2048, 2048, 2048, 2048], "Codes per SID level.")
    collisions: str = option("resolve", "Of SIDs that are built: `resolve`, one for each item; `keep`, items share.")

    search_in: str = option("decoder", "Where the beam search runs: the light `decoder` (Deco) or the `backbone` (GR).")
    history_format: str = option(
        "fused", "What the backbone reads: `fused`, a token per item, or `flat`, one per code."
    )
    backbone: str = option("M", "Scratch backbone: S (2 x 128), M (4 x 384) or L (8 x 640).")
    decoder_width: int = option(256, "Width of the light decoder, a multiple of 64.")
    decoder_layers: int = option(2, "Layers of the light decoder.")
    decoder_input: str = option("last_state", "What the decoder reads of a history: " + ", ".join(DECODER_INPUTS) + ".")
    tie_code_tables: bool = option(False, "One table per level for output, prefix and history.")
    num_concepts: int = option(2, "Concept vectors M.")
    normalize_over: str = option("children", "What a code competes with: `children` or `vocabulary`.")
    dropout: float = option(0.3, "Dropout of fuser and backbone.")
    decoder_dropout: float = option(0.0, "Dropout of the light decoder.")
    copy_pointer: bool = option(False, "Mix in a pointer over the history, for logs in which users come back to items.")
    reranker: bool = option(False, "Tell items that share a SID apart by their embeddings.")
    rerank_size: int = option(96, "Width of the vectors by which the reranker does so.")
    max_history_length: int = option(20, "Items of a history that are read, the latest T.")
    init_code_tables: str = option(
        "content", "Code tables start from the tokenizer's centroids (`content`) or at `random`."
    )

    teacher: str | None = option(None, "Checkpoint to distill from; none trains with cross-entropy alone.")
    temperature: float = option(1.0, "Temperature of the distillation.")
    objective: str = option("ce+kd", "What a teacher's student learns: `ce+kd`, or `kd` alone.")
    init_from_teacher: bool = option(False, "Start backbone and history tokens from the teacher's.")

    validation_beams: int = option(10, "Beam width of validation, which picks the checkpoint.")
    validation_examples: int = option(5000, "Validation users drawn once, at most; 0 takes all.")
    num_beams: int = option(100, "Beam width of the test.")
    cutoffs: list[int] = option([10, 50, 100], "Cutoffs k of NDCG@k and Recall@k.")
    early_stopping_patience: int = option(
        10, "Evaluations without a better NDCG@10 before training stops; 0 never stops."
    )
    system: str | None = option(None, "Name in the results; made from the options when not given.")
    results_file: str | None = option(None, "JSON file of result rows to add this run to.")

    output_dir: str | None = option("runs/deco", "Folder of the run.")
    learning_rate: float = option(1e-3, "Peak learning rate.")
    weight_decay: float = option(0.01, "Weight decay.")
    warmup_steps: float = option(0.05, "Steps of linear warm-up (below 1: share of all steps).")
    lr_scheduler_type: str = option("cosine", "Schedule after warm-up.")
    num_train_epochs: float = option(30.0, "Passes over the training sequences.")
    per_device_train_batch_size: int = option(256, "Training sequences per step and process.")
    per_device_eval_batch_size: int = option(128, "Users per search and process.")
    eval_strategy: str = option("epoch", "When to validate.")
    save_strategy: str = option("epoch", "When to keep a checkpoint.")
    save_total_limit: int | None = option(1, "Checkpoints kept beside the best one.")
    logging_steps: float = option(20, "Steps between log lines.")
    report_to: None | str | list[str] = option("none", "Trackers, such as `tensorboard`.")
    load_best_model_at_end: bool = option(True, "End with the best checkpoint.")
    metric_for_best_model: str | None = option("ndcg@10", "Validation metric that picks the checkpoint.")
    greater_is_better: bool | None = option(True, "Whether a larger metric is better.")
    restore_callback_states_from_checkpoint: bool = option(True, "Go on with the patience that a stopped run had left.")
    remove_unused_columns: bool = option(False, "Kept off: the collator reads all columns.")

    def __post_init__(self):
        if not torch.accelerator.is_available():
            self.use_cpu = True  # the parent refuses bf16 on a machine without accelerator unless told so
        super().__post_init__()
        self._check_lists()
        for name, allowed in self._choices().items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.num_beams < max(self.cutoffs):
            raise ValueError(
                f"`num_beams` ({self.num_beams}) is narrower than the largest of `cutoffs` "
                f"({max(self.cutoffs)}): widen it."
            )
        if self.decoder_width < 64 or self.decoder_width % 64:
            raise ValueError(
                f"`decoder_width` must be a positive multiple of 64, the width of a head, got {self.decoder_width}."
            )
        for name, lowest in (
            ("decoder_layers", 1),
            ("rerank_size", 1),
            ("k_core", 0),
            ("validation_examples", 0),
            ("early_stopping_patience", 0),
        ):
            if getattr(self, name) < lowest:
                raise ValueError(f"`{name}` must be at least {lowest}, got {getattr(self, name)}.")
        if self.validation_beams < 10:
            raise ValueError(f"`validation_beams` must be at least 10 for NDCG@10, got {self.validation_beams}.")
        if self.temperature <= 0:
            raise ValueError(f"`temperature` must be positive, got {self.temperature}.")
        if self.init_from_teacher and self.teacher is None:
            raise ValueError("`init_from_teacher` is set, but no `teacher` is named.")
        if self.reranker:
            self._check_reranker()
        if self.system is None:
            self.system = self._default_system()

    @staticmethod
    def _choices() -> dict[str, tuple[str, ...]]:
        """Options that take one of a few words."""
        return {
            "protocol": ("temporal", "leave_one_out"),
            "unknown_items": ("error", "drop"),
            "cold_targets": ("miss", "drop"),
            "collisions": ("resolve", "keep"),
            "search_in": ("decoder", "backbone"),
            "history_format": ("fused", "flat"),
            "backbone": ("S", "M", "L"),
            "decoder_input": DECODER_INPUTS,
            "objective": ("ce+kd", "kd"),
            "normalize_over": ("children", "vocabulary"),
            "init_code_tables": ("content", "random"),
        }

    def _check_reranker(self) -> None:
        """What a reranking head needs."""
        if self.search_in != "decoder":
            raise ValueError("`reranker` reads on in the light decoder: set `search_in` to decoder, or leave it out.")
        if self.teacher is not None:
            raise ValueError("`reranker` learns beside cross-entropy alone: leave out `teacher`, or the reranker.")
        if self.sids is None and self.collisions != "keep":
            raise ValueError(
                "`reranker` tells items of one SID apart, but `collisions` is 'resolve', which leaves none together: "
                "set it to keep."
            )

    def _check_lists(self) -> None:
        """Lists that hold what they should; a YAML file may hold anything."""
        for name in ("cutoffs", "codebook_sizes"):
            value = getattr(self, name)
            if not isinstance(value, list) or not value or any(type(entry) is not int or entry < 1 for entry in value):
                raise ValueError(f"`{name}` must be a list of positive integers, got {value!r}.")
        if not isinstance(self.text_columns, list) or not self.text_columns:
            raise ValueError(f"`text_columns` must be a list of column names, got {self.text_columns!r}.")

    def _default_system(self) -> str:
        """The field's name of what these options train."""
        distilled = self.teacher is not None
        if self.search_in == "backbone":
            return ("fused_gr" if self.history_format == "fused" else "flat_gr") + ("/kd" if distilled else "")
        if self.history_format == "flat":
            return "deco_flat" if distilled else "deco_flat/ce"
        return "deco" if distilled else "deco_ce"
