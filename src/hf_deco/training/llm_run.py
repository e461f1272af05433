"""A run on a pretrained language model: grounding, then recommendation training with LoRA, then the merge."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, set_seed

from ..data.items import ItemTable
from ..items.sid_table import SIDTable
from ..models.checkpoint_sid import ADAPTER_FOLDER
from ..models.configuration_deco import SIDRetrievalConfig
from ..models.modeling_sid import SIDRetrievalModel
from ..models.pretrained_sid import causal_lm_config
from ..models.processing_deco import DecoProcessor
from .checkpoints import check_same_catalog, find_checkpoint
from .distillation import init_from
from .grounding import GroundingCollator, GroundingTrainer, ItemTexts, add_text, load_tokenizer
from .llm_arguments import LLMTrainingArguments
from .lora import SIDPeftModel, add_lora, check_targets, load_adapter, merge_adapter
from .preparation import (
    ScratchModels,
    fit_to_items,
    model_class,
    model_options,
    prepare_embeddings,
    prepare_log,
    prepare_sids,
)
from .results import changed_arguments, write_json
from .run import check_ahead, train

GROUNDING_FILE = "grounding.json"  # beside a grounded model: its options and figures
# What both kinds of model share, and what Deco has beside it.
_SHARED_PARTS, _DECO_PARTS = ("fuser", "backbone"), ("concept_head", "decoder")


def train_llm(args: LLMTrainingArguments) -> dict[str, dict[str, float]]:
    """Ground a language model in a catalog, train it to recommend, merge, and test.

    `output_dir` ends as that of [`train`] does, `model/` holding the merged weights and `model/adapter/` what LoRA
    learnt; beside them lie `grounding/`, the first stage's resumable checkpoints, and `grounded/`, its model, from
    which the second stage started: the base that the adapter belongs to.

    Args:
        args ([`LLMTrainingArguments`]): All options.

    Returns:
        `dict`: test metrics as of [`train`]; after grounding alone, its metrics, as `grounding`.

    Raises:
        OSError, ValueError: For options, models, files or data that no run could use; before anything is written.
    """
    folder = Path(args.output_dir)
    begun = args.stage != "recommendation" and any((folder / name).exists() for name in ("grounding", "grounded"))
    if args.resume_from_checkpoint is None and begun:
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds an earlier run: set `resume_from_checkpoint` to last to go on with "
            "it, or name another folder."
        )
    if args.stage != "grounding":
        return train(args, LLMModels)
    set_seed(args.seed)
    models = LLMModels(args)
    items, _, split = prepare_log(args)
    check_ahead(args, len(items), models)
    embeddings = prepare_embeddings(args, items, resume=models.begun())
    sids = prepare_sids(args, items, split, embeddings, resume=models.begun())
    return {"grounding": models.ground(items, sids, split.catalog)}


class LLMModels(ScratchModels):
    """How a run comes by a model with a pretrained backbone, and hands it over merged.

    Args:
        args ([`LLMTrainingArguments`]): Sizes and options.
    """

    def __init__(self, args: LLMTrainingArguments):
        super().__init__(args)
        self.grounded = Path(args.output_dir) / "grounded"
        self.stage_args = grounding_arguments(args)
        self._base: tuple | None = None

    def config(self, codebook_sizes: tuple[int, ...]) -> SIDRetrievalConfig:
        args = self.args
        text_config = causal_lm_config(args.backbone)
        if args.stage != "recommendation":
            load_tokenizer(args.backbone)
        if args.start_from is not None:
            text_config = _check_start(args.start_from, codebook_sizes).text_config
        with torch.device("meta"):
            check_targets(AutoModel.from_config(text_config), args.lora_targets, "lora_targets")
        return model_class(args).config_class(text_config=text_config, **model_options(args, codebook_sizes))

    def begun(self) -> bool:
        if self.args.stage == "recommendation" or self.args.resume_from_checkpoint != "last":
            return False
        return self.grounded.exists() or find_checkpoint(self.stage_args) is not None

    def build(
        self, items: ItemTable, sids: SIDTable, catalog: np.ndarray, embeddings: np.ndarray
    ) -> tuple[SIDRetrievalModel, DecoProcessor]:
        if self.args.stage == "both":
            self.ground(items, sids, catalog)
        set_seed(self.args.seed)  # the second stage is the same, whether the first was run now or before
        model, processor = self._make_base(sids, catalog)
        if self.args.train_backbone == "lora":
            model = self._add_lora(model)
        return model, processor

    def save(self, trainer, folder: Path) -> SIDRetrievalModel:
        model = trainer.accelerator.unwrap_model(trainer.model)
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # of all processes
        if not trainer.is_world_process_zero():
            return model
        if not isinstance(model, SIDPeftModel):
            model.save_pretrained(folder, state_dict=state_dict)
            return model
        # Merged into a base of its own: the one that was trained may lie in pieces on several devices.
        model.save_pretrained(folder / ADAPTER_FOLDER, state_dict=state_dict)
        base, _ = self._make_base(*self._base)
        merged = merge_adapter(load_adapter(base, folder / ADAPTER_FOLDER))
        merged.config.distillation = model.config.distillation
        merged.save_pretrained(folder)
        return merged

    def ground(self, items: ItemTable, sids: SIDTable, catalog: np.ndarray) -> dict[str, float]:
        """Run the first stage, unless it is done; its model then lies in `grounded/`.

        Returns:
            `dict`: figures of its best checkpoint, on items that it saw and, where some were held out, on those.
        """
        args = self.stage_args
        if self.grounded.exists():
            return _check_grounded(self.grounded, self.args)
        if args.resume_from_checkpoint not in (None, "last"):
            raise ValueError(
                f"`resume_from_checkpoint` is {args.resume_from_checkpoint!r}, but the grounding of "
                f"{args.output_dir!r} is not finished: set it to last."
            )
        checkpoint = find_checkpoint(args)
        if checkpoint is not None:
            check_same_catalog(checkpoint, sids, catalog)
        set_seed(args.seed)
        model, processor = self._make_base(sids, catalog, grounded=False)
        if args.grounding_backbone == "lora":
            model = self._add_lora(model)
        tokenizer = load_tokenizer(args.backbone)
        grounding = add_text(model, args.backbone, tokenizer, train_text=args.grounding_backbone == "full")
        parts = split_items(args, items.texts[catalog], sids.codes[catalog])
        args.eval_on_start = checkpoint is None
        trainer = GroundingTrainer(
            model=grounding,
            args=args,
            train_dataset=parts.pop("train"),
            eval_dataset=parts,
            data_collator=GroundingCollator(tokenizer, args.grounding_text_length, model.config.tokens_per_item),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        metrics = _plain(trainer.evaluate())
        self._save_grounded(trainer, processor, metrics)
        return metrics

    def _save_grounded(self, trainer: GroundingTrainer, processor: DecoProcessor, metrics: dict[str, float]) -> None:
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.is_world_process_zero():
            model = trainer.accelerator.unwrap_model(trainer.model).retriever
            prefix = "retriever."
            own = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
            temporary = self.grounded.with_name(f".{self.grounded.name}")
            if isinstance(model, SIDPeftModel):
                model.save_pretrained(temporary / ADAPTER_FOLDER, state_dict=own)
                base, _ = self._make_base(*self._base, grounded=False)
                model = merge_adapter(load_adapter(base, temporary / ADAPTER_FOLDER))
                own = None
            model.save_pretrained(temporary, state_dict=own)
            processor.save_pretrained(temporary)
            record = {"options": _grounding_options(self.args), "metrics": metrics}
            write_json(temporary / GROUNDING_FILE, record | {"log": trainer.state.log_history})
            temporary.replace(self.grounded)
        trainer.accelerator.wait_for_everyone()

    def _add_lora(self, model: SIDRetrievalModel) -> SIDPeftModel:
        args = self.args
        return add_lora(model, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets, args.backbone)

    def _make_base(
        self, sids: SIDTable, catalog: np.ndarray, grounded: bool = True
    ) -> tuple[SIDRetrievalModel, DecoProcessor]:
        """The model that a stage starts from: grounded, from another checkpoint, or fresh on the language model."""
        args, self._base = self.args, (sids, catalog)
        start = self.grounded if grounded and args.stage == "both" else args.start_from
        kind, options = model_class(args), model_options(args, sids.codebook_sizes)
        if start is None:
            model = kind.from_backbone(args.backbone, dtype=torch.float32, **options)
            return model, fit_to_items(args, model, sids, catalog)
        started = AutoModel.from_pretrained(start, dtype=torch.float32)
        config = kind.config_class(text_config=started.config.text_config, **options)
        model = kind._from_config(config, dtype=torch.float32)
        processor = fit_to_items(args, model, sids, catalog)
        if not torch.equal(model.catalog_codes, started.catalog_codes):
            raise ValueError(
                f"`start_from` {str(start)!r} carries another catalog ({started.config.num_items} items, this run "
                f"{model.config.num_items}): set `sids` to its SID table, and split the log as it was split."
            )
        both_deco = all(hasattr(owner, part) for owner in (model, started) for part in _DECO_PARTS)
        init_from(model, started, _SHARED_PARTS + (_DECO_PARTS if both_deco else ()), "start_from")
        return model, processor


def grounding_arguments(args: LLMTrainingArguments) -> LLMTrainingArguments:
    """Options of the first stage's trainer."""
    stage = copy.copy(args)
    stage.output_dir = str(Path(args.output_dir) / "grounding")
    stage.num_train_epochs, stage.max_steps = args.grounding_epochs, -1
    stage.learning_rate = args.grounding_learning_rate
    stage.per_device_train_batch_size = args.grounding_batch_size
    stage.eval_strategy = stage.save_strategy = "epoch"
    stage.warmup_steps, stage.train_sampling_strategy = 0.05, "random"
    stage.metric_for_best_model, stage.greater_is_better = "eval_seen_recall@10", True
    stage.load_best_model_at_end, stage.push_to_hub = True, False
    return stage


def split_items(args: LLMTrainingArguments, texts: np.ndarray, codes: np.ndarray) -> dict[str, ItemTexts]:
    """Items of the catalog to ground on (`train`), and to validate on: some of those (`seen`), and held-out ones."""
    order = np.random.default_rng(args.seed).permutation(len(texts))
    heldout = int(args.grounding_holdout * len(texts))
    rows = {"train": np.sort(order[heldout:]), "seen": np.sort(order[heldout:][: args.grounding_examples])}
    if heldout:
        rows["heldout"] = np.sort(order[:heldout][: args.grounding_examples])
    return {name: ItemTexts(texts, codes, chosen) for name, chosen in rows.items()}


def _grounding_options(args: LLMTrainingArguments) -> dict:
    """What a grounded model depends on."""
    names = ("backbone", "start_from", "seed", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    chosen = changed_arguments(args)
    return {name: chosen[name] for name in sorted(chosen) if name in names or name.startswith("grounding_")}


def _check_grounded(folder: Path, args: LLMTrainingArguments) -> dict[str, float]:
    """Metrics of the first stage that is done; a `ValueError` where it was run with other options."""
    record = json.loads((folder / GROUNDING_FILE).read_text(encoding="utf-8"))
    options = _grounding_options(args)
    for name in sorted(options.keys() | record["options"].keys()):
        if options.get(name) != record["options"].get(name):
            raise ValueError(
                f"`output_dir` {args.output_dir!r} holds a model grounded with another `{name}` "
                f"({record['options'].get(name)!r}, not {options.get(name)!r}): name another folder."
            )
    return record["metrics"]


def _check_start(path: str, codebook_sizes: tuple[int, ...]) -> SIDRetrievalConfig:
    """Configuration of a checkpoint to start from; a `ValueError` where it does not fit."""
    config = AutoConfig.from_pretrained(path)
    if not isinstance(config, SIDRetrievalConfig):
        raise ValueError(f"`start_from` {path!r} is a {config.model_type}, not a model that retrieves by semantic IDs.")
    if config.codebook_sizes != codebook_sizes:
        raise ValueError(
            f"`start_from` {path!r} has SIDs of {config.codebook_sizes} codes, this run of {codebook_sizes}: set "
            "`sids` to its SID table."
        )
    return config


def _plain(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without the trainer's prefix and its timings."""
    names = ("sid_loss", "text_loss", "recall@10")
    return {name.removeprefix("eval_"): value for name, value in metrics.items() if name.endswith(names)}
