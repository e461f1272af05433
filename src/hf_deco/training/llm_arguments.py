"""Options of a run on a pretrained language model."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import DecoTrainingArguments, option

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class LLMTrainingArguments(DecoTrainingArguments):
    """
    Options of a run whose backbone is a pretrained language model: all of [`DecoTrainingArguments`], and how items and
    language are grounded in each other and how the backbone is adapted.

    Options without `grounding_` in their names are those of recommendation training; grounding shares its seed, its
    precision, its accumulation and its checkpointing of activations.
    """

    backbone: str = option("Qwen/Qwen2.5-0.5B", "Decoder-only language model: a folder, or a name on the Hub.")
    stage: str = option("both", "What is run: `grounding`, `recommendation`, or `both`, one after the other.")
    start_from: str | None = option(
        None, "Checkpoint to start from, such as `grounded` of another run; by default the language model."
    )
    train_backbone: str = option("lora", "How the backbone learns to recommend: `lora` or `full`.")
    lora_rank: int = option(16, "Rank of LoRA.")
    lora_alpha: float = option(32.0, "Scale of LoRA: its update counts alpha / rank times.")
    lora_dropout: float = option(0.05, "Dropout of what LoRA reads.")
    lora_targets: list[str] = option(TARGETS, "Layers of the backbone that get LoRA.")

    grounding_backbone: str = option(
        "lora", "How the backbone learns in grounding: `lora`, or `full`, text embeddings and language head included."
    )
    grounding_epochs: float = option(3.0, "Passes over the item texts.")
    grounding_learning_rate: float = option(5e-4, "Peak learning rate of grounding.")
    grounding_batch_size: int = option(32, "Items per step and process in grounding.")
    grounding_text_length: int = option(96, "Tokens of an item's text that are read and written.")
    grounding_examples: int = option(1000, "Items that grounding is validated on, at most.")
    grounding_holdout: float = option(
        0.0, "Share of the catalog that is kept out of grounding, to see how it does on unseen texts."
    )

    dropout: float = option(0.0, "Dropout of fuser and backbone.")
    learning_rate: float = option(3e-4, "Peak learning rate of recommendation training.")
    num_train_epochs: float = option(10.0, "Passes over the training sequences.")
    per_device_train_batch_size: int = option(64, "Training sequences per step and process.")
    per_device_eval_batch_size: int = option(64, "Users, or items of grounding, per search and process.")
    output_dir: str | None = option("runs/llm", "Folder of the run.")

    def __post_init__(self):
        super().__post_init__()
        for name, lowest in (("lora_rank", 1), ("grounding_batch_size", 1), ("grounding_text_length", 1)):
            if getattr(self, name) < lowest:
                raise ValueError(f"`{name}` must be at least {lowest}, got {getattr(self, name)}.")
        for name in ("lora_alpha", "grounding_epochs", "grounding_learning_rate", "grounding_examples"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        for name in ("lora_dropout", "grounding_holdout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must lie in [0, 1), got {getattr(self, name)}.")
        if not isinstance(self.lora_targets, list) or not self.lora_targets:
            raise ValueError(f"`lora_targets` must be a list of layer names, got {self.lora_targets!r}.")
        if self.reranker:
            raise ValueError("`reranker` is for scratch backbones: leave it out.")
        if self.init_from_teacher:
            raise ValueError("`init_from_teacher` is for scratch backbones: name the teacher in `start_from`.")
        if self.stage != "recommendation":
            self._check_grounding()

    def _check_grounding(self) -> None:
        """What the light decoder can write from a text."""
        if self.search_in != "decoder":
            raise ValueError(
                "`search_in` is 'backbone', but in grounding a light decoder writes the SIDs: set `stage` to "
                "recommendation and, for a grounded backbone, `start_from` to a grounded Deco checkpoint."
            )
        if self.decoder_input != "last_state":
            raise ValueError(
                f"`decoder_input` is {self.decoder_input!r}, but a text gives the decoder a concept alone: set it to "
                "last_state, or `stage` to recommendation."
            )
        if self.deepspeed_plugin is not None and self.stage == "both":  # it takes the options of one trainer
            raise ValueError(
                "Under `deepspeed` each stage needs a launch of its own: set `stage` to grounding, then to "
                "recommendation with `start_from`."
            )

    @staticmethod
    def _choices() -> dict[str, tuple[str, ...]]:
        choices = DecoTrainingArguments._choices()
        del choices["backbone"]
        ways = ("lora", "full")
        return choices | {
            "stage": ("both", "grounding", "recommendation"),
            "train_backbone": ways,
            "grounding_backbone": ways,
        }
