"""LoRA on a model's backbone, everything else in full; and adapters that know the base they were trained on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import cached_file

from ..models.checkpoint_sid import ADAPTER_WEIGHTS
from ..models.modeling_sid import SIDRetrievalModel
from .checkpoints import BASE_FILE, fingerprint
from .llm_arguments import TARGETS
from .results import write_json

_ADAPTER = "default"
_MODEL = "base_model.model."  # what peft puts before the names of the model's tensors


class SIDPeftModel(PeftModel):
    """
    A model with LoRA on its backbone, in which every tensor outside the backbone trains in full.

    peft's `modules_to_save` knows no raw parameters and no lists of modules, and copies what it wraps. Here the tensors
    outside the backbone (fuser, concept head, decoder or heads, start state, pointer) stay what they are, and lie in
    the adapter's file under their own names, where plain `PeftModel.from_pretrained` finds them too. Beside it,
    `adapter_base.json` describes the base; an adapter is not loaded onto another one.

    Args:
        model ([`SIDRetrievalModel`]): The base; LoRA layers are put into it.
        peft_config ([`peft.LoraConfig`]): Options of the adapter, see [`add_lora`].
        kwargs: Other arguments of [`peft.PeftModel`].
    """

    def __init__(self, model: SIDRetrievalModel, peft_config: LoraConfig, adapter_name: str = _ADAPTER, **kwargs):
        base = describe_base(model)
        super().__init__(model, peft_config, adapter_name, **kwargs)
        self.base = base
        for name, parameter in self.named_parameters():
            if not name.startswith(f"{_MODEL}backbone."):
                parameter.requires_grad_(not peft_config.inference_mode)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the merged model, or those that train; there are no text embeddings to exclude."""
        counted = [
            parameter.numel()
            for name, parameter in self.named_parameters()
            if (parameter.requires_grad if only_trainable else ".lora_" not in name)
        ]
        return sum(counted)

    def adapter_tensors(self, state_dict: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """What an adapter's file holds, by its names there.

        Args:
            state_dict (`dict`, *optional*): Tensors of the whole model, where they are gathered from several processes.
        """
        state_dict = self.state_dict() if state_dict is None else state_dict
        names = [name for name in state_dict if name.startswith(_MODEL) and not name.endswith("catalog_codes")]
        inside = f"{_MODEL}backbone."
        names = [name for name in names if ".lora_" in name or not name.startswith(inside)]
        return {name.replace(f".{_ADAPTER}.", "."): state_dict[name].detach() for name in names}

    def save_pretrained(
        self, save_directory: str | os.PathLike, state_dict: dict | None = None, is_main_process: bool = True, **unused
    ) -> None:
        """Write the adapter: LoRA and the tensors outside the backbone, its configuration, and what its base is."""
        if not is_main_process:
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.adapter_tensors(state_dict).items()}
        save_file(tensors, folder / f".{ADAPTER_WEIGHTS}", metadata={"format": "pt"})
        os.replace(folder / f".{ADAPTER_WEIGHTS}", folder / ADAPTER_WEIGHTS)
        config = self.peft_config[_ADAPTER]
        training, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(folder)
        finally:
            config.inference_mode = training
        write_json(folder / BASE_FILE, self.base)

    def load_adapter(self, model_id: str | os.PathLike, adapter_name: str = _ADAPTER, **kwargs):
        """Read an adapter of this base, see [`load_adapter`]."""
        where = {name: kwargs[name] for name in ("subfolder", "revision") if kwargs.get(name)}
        check_base(self.base, model_id, **where)
        self._check_tensors(model_id, where)
        return super().load_adapter(str(model_id), adapter_name, **kwargs)

    def _check_tensors(self, path, where: dict) -> None:
        """Raise a `ValueError` where the adapter's file does not hold exactly the tensors of this model."""
        try:
            with safe_open(cached_file(str(path), ADAPTER_WEIGHTS, **where), "pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except SafetensorError as error:
            raise OSError(f"The adapter {str(path)!r} is damaged or truncated ({error}): fetch it again.") from error
        expected = {name: tuple(tensor.shape) for name, tensor in self.adapter_tensors().items()}
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        if wrong:
            raise ValueError(
                f"The adapter {str(path)!r} does not fit the model in {len(wrong)} tensors, such as {wrong[0]!r}: "
                f"{found.get(wrong[0])} there, {expected.get(wrong[0])} in the model. Build the base with the options "
                "that the adapter was trained with."
            )


def add_lora(
    model: SIDRetrievalModel,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.05,
    targets: Sequence[str] = TARGETS,
    base_name: str | None = None,
) -> SIDPeftModel:
    """Put LoRA on layers of the backbone, and nowhere else; all tensors outside the backbone train in full.

    Args:
        model ([`SIDRetrievalModel`]): The base; it is changed.
        rank (`int`, *optional*, defaults to 16): Rank of the update, `W + alpha / rank * B A`.
        alpha (`float`, *optional*, defaults to 32): Its scale.
        dropout (`float`, *optional*, defaults to 0.05): Dropout of what the update reads.
        targets (`Sequence[str]`, *optional*): Names of the backbone's layers; by default all projections of Llama and
            its descendants.
        base_name (`str`, *optional*): Where the base came from, for those who will load the adapter.

    Raises:
        ValueError: If the rank is not positive, or the backbone has no layer of one of these names.
    """
    if rank < 1:
        raise ValueError(f"`rank` must be at least 1, got {rank}.")
    check_targets(model.backbone, targets, "targets")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        # Anchored: the light decoder has layers of the same names.
        target_modules=rf"backbone\.(.*\.)?({'|'.join(map(re.escape, targets))})",
        base_model_name_or_path=base_name,
    )
    return SIDPeftModel(model, config)


def check_targets(backbone: nn.Module, targets: Sequence[str], option: str) -> None:
    """Raise a `ValueError`, about this option, where the backbone has no layer of one of these names."""
    names = [name for name, module in backbone.named_modules() if not isinstance(module, nn.ModuleList)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(
                f"`{option}` names {target!r}, but the backbone, a {type(backbone).__name__}, has no such layer."
            )


def load_adapter(
    model: SIDRetrievalModel, path: str | os.PathLike, subfolder: str | None = None, is_trainable: bool = False
) -> SIDPeftModel:
    """Put a trained adapter onto its base.

    Args:
        model ([`SIDRetrievalModel`]): The base, with the backbone that the adapter was trained on; it is changed.
        path (`str` or path): Folder of the adapter, or a repository of the Hub.
        subfolder (`str`, *optional*): Folder inside it; `"adapter"` where it lies beside merged weights.
        is_trainable (`bool`, *optional*): Whether it is to be trained on.

    Raises:
        ValueError: If the adapter is another base's, which includes its own merged weights; before it is read, and
            before the model is changed.
        OSError: If there is no adapter, or it is damaged.
    """
    where = {} if subfolder is None else {"subfolder": subfolder}
    check_base(describe_base(model), path, **where)
    config = LoraConfig.from_pretrained(str(path), **where)
    config.inference_mode = not is_trainable
    adapted = SIDPeftModel(model, config)
    adapted.load_adapter(path, is_trainable=is_trainable, **where)
    return adapted


def merge_adapter(model: SIDPeftModel) -> SIDRetrievalModel:
    """The model with the updates added to its weights, without LoRA layers.

    Raises:
        ValueError: If a merged weight would not be finite.
    """
    return model.merge_and_unload(safe_merge=True)


def describe_base(model: SIDRetrievalModel) -> dict:
    """What tells one base from another: its kind, its sizes, and fingerprints of its backbone and its catalog."""
    text_config = model.config.text_config
    return {
        "model_type": model.config.model_type,
        "backbone": {
            "model_type": text_config.model_type,
            "hidden_size": text_config.hidden_size,
            "num_hidden_layers": text_config.num_hidden_layers,
        },
        "codebook_sizes": list(model.config.codebook_sizes),
        "backbone_sha256": fingerprint(model.backbone.state_dict()),
        "catalog_sha256": fingerprint({"catalog_codes": model.catalog_codes}),
    }


def check_base(base: dict, path: str | os.PathLike, **where) -> None:
    """Raise a `ValueError` where an adapter was trained on another base than [`describe_base`] says."""
    file = cached_file(str(path), BASE_FILE, _raise_exceptions_for_missing_entries=False, **where)
    if file is None:
        raise ValueError(
            f"{str(path)!r} holds no {BASE_FILE}: it is no adapter that this package saved, so nothing tells what base "
            "it belongs to."
        )
    trained = json.loads(Path(file).read_text(encoding="utf-8"))
    for name in ("model_type", "backbone", "codebook_sizes"):
        if trained[name] != base[name]:
            raise ValueError(
                f"The adapter {str(path)!r} was trained for another base: its `{name}` is {trained[name]}, the "
                f"model's {base[name]}. Build the base that it was trained on."
            )
    if trained["backbone_sha256"] != base["backbone_sha256"]:
        raise ValueError(
            f"The adapter {str(path)!r} was trained on other backbone weights than the model has. Load it onto the "
            "base that it was trained on; a merged checkpoint, which it may lie beside, holds it already."
        )
