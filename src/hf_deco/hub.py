"""A checkpoint folder to the Hub: model, catalog, processor, code, index, adapter and card in one commit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, PROCESSOR_NAME

from .items.generations import CURRENT, INDEX_FOLDER, current_generation, open_index
from .models.checkpoint_sid import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    CATALOG,
    check_checkpoint,
    find_catalog,
    refuse_root_adapter,
)
from .models.configuration_deco import SIDRetrievalConfig
from .models.configuration_gear import GearConfig
from .models.modeling_gear import GearForSIDRetrieval
from .models.processing_deco import DecoProcessor
from .models.processing_gear import GearProcessor

# Pickles, and what only a trainer that goes on needs.
PICKLES = ["*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"]
LEFT_BEHIND = [*DEFAULT_IGNORE_PATTERNS, *PICKLES, "trainer_state.json", "*__pycache__*"]
# What a repository's earlier commits may hold and would be read beside the new weights.
REPLACED = ["*.safetensors", "*.safetensors.index.json", ADAPTER_CONFIG, f"{ADAPTER_FOLDER}/*", f"{INDEX_FOLDER}/*"]


def push_checkpoint(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    commit_message: str = "Upload checkpoint",
    token: str | None = None,
) -> CommitInfo:
    """Push a checkpoint folder to a model repository of the Hub, in one commit.

    Everything in the folder goes along: weights with their catalog, processor, code, `adapter/`, the current generation
    of `index/`, and the card where there is a `README.md`. Pickles, a trainer's state and other generations stay
    behind. Weights, adapters and generations of an earlier commit which do not go along are deleted from the
    repository.

    Args:
        folder (`str` or path): The checkpoint, as `save_pretrained` of model and processor wrote it.
        repo_id (`str`): Repository, `"organisation/name"`; created where there is none.
        revision (`str`, *optional*): Branch, created where there is none; the main one by default.
        private (`bool`, *optional*): Whether a new repository is private; as the organisation has it by default.
        commit_message (`str`, *optional*): First line of the commit.
        token (`str`, *optional*): Token of the Hub; the one that is logged in by default.

    Returns:
        [`huggingface_hub.CommitInfo`]: `oid` is the revision that `from_pretrained` takes.

    Raises:
        OSError: If the folder is no whole checkpoint.
        ValueError: If its parts do not go together, others could not load it, or there is no token. Nothing is pushed
            then.
    """
    check_folder(folder)
    files = {file.relative_to(folder).as_posix(): file for file in sorted(Path(folder).rglob("*")) if file.is_file()}
    names = list(_without_old_generations(Path(folder), filter_repo_objects(files, ignore_patterns=LEFT_BEHIND)))
    api = HfApi(token=token)
    if token is None and get_token() is None:
        raise ValueError("`token` is missing: log in by `hf auth login`, set the variable HF_TOKEN, or give one.")
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    stale = filter_repo_objects(api.list_repo_files(repo_id, revision=revision), allow_patterns=REPLACED)
    # Not `upload_folder`, which spreads a large folder over several commits.
    return api.create_commit(
        repo_id,
        [
            *(CommitOperationAdd(name, files[name]) for name in names),
            *(CommitOperationDelete(name) for name in stale if name not in names),
        ],
        commit_message=commit_message,
        revision=revision,
    )


def check_folder(folder: str | os.PathLike) -> None:
    """Make sure that a folder is a checkpoint that others can load as it is.

    Raises:
        OSError: If a file is missing or damaged, or the weights are pickled.
        ValueError: If the configuration is another model's, the catalog does not fit it, the processor or the index, an
            adapter lies beside the weights or is incomplete, or the folder lacks its code.
    """
    path = os.fspath(folder)
    if not os.path.isfile(os.path.join(path, CONFIG_NAME)):
        raise OSError(f"`folder` {path!r} holds no {CONFIG_NAME}: it is not a checkpoint, or not a whole one.")
    refuse_root_adapter(path)
    config = AutoConfig.from_pretrained(path)
    if isinstance(config, SIDRetrievalConfig):
        _check_retrieval(path, config)
    elif isinstance(config, GearConfig):
        _check_gear(path, config)
    else:
        raise ValueError(
            f"`folder` {path!r} holds a {config.model_type!r} model, not one of hf_deco that retrieves items: push "
            "it by its own `push_to_hub`."
        )
    for name in (CONFIG_NAME, PROCESSOR_NAME):
        _check_code(Path(path), name)
    adapter = Path(path, ADAPTER_FOLDER)
    if adapter.exists() and not all((adapter / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        raise ValueError(f"{str(adapter)!r} must hold both {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}.")


def _check_retrieval(path: str, config: SIDRetrievalConfig) -> None:
    """Check weights and processor of a model that reads histories of item ids."""
    try:
        check_checkpoint(path, type(config), config)
        with safe_open(find_catalog(path), "pt") as weights:
            catalog = weights.get_tensor(CATALOG)
    except SafetensorError as error:
        raise OSError(f"The weights of {path!r} are damaged, or hold no catalog ({error}).") from error
    DecoProcessor.from_pretrained(path).check_catalog(catalog)


def _check_gear(path: str, config: GearConfig) -> None:
    """Check weights, processor and index of GEAR. The weights are read: only they tell whose the index is."""
    model, processor = GearForSIDRetrieval.from_pretrained(path), GearProcessor.from_pretrained(path)
    processor.check_config(config)
    index = open_index(Path(path, INDEX_FOLDER))
    index.check_made_for(model.tokenizer_version, config.model_type)
    if not np.array_equal(model.catalog_codes.numpy(), index.item_codes()):
        raise ValueError(
            f"The catalog of the model in {path!r} is not that of its index: call "
            "`model.set_catalog(index.item_codes(), index.tokenizer_version)`, and save it again."
        )
    unknown = [
        item for item, row in zip(index.item_ids, processor.item_ids.find(index.item_ids), strict=True) if row < 0
    ]
    if unknown:
        raise ValueError(
            f"The processor in {path!r} lacks {len(unknown)} items of the index, such as {unknown[0]!r}: give it those "
            "by `update`, and save it again."
        )


def _without_old_generations(folder: Path, names: Iterable[str]) -> Iterable[str]:
    """The names of files, without those of `index/` that are not of its current generation."""
    index = folder / INDEX_FOLDER
    current = current_generation(index) if (index / CURRENT).exists() else None
    kept = (f"{INDEX_FOLDER}/{CURRENT}", f"{INDEX_FOLDER}/gen-{current}/")
    return (
        name for name in names if current is None or not name.startswith(f"{INDEX_FOLDER}/") or name.startswith(kept)
    )


def _check_code(folder: Path, name: str) -> None:
    """Raise a `ValueError` where the code of the classes that a JSON file names does not lie beside it."""
    classes = json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map", {})
    lacking = None if classes else "the code of its classes"
    try:
        for reference in classes.values():
            get_relative_import_files(folder / f"{reference.split('.')[0]}.py")  # opens all that are needed
    except FileNotFoundError as error:
        lacking = Path(error.filename).name
    if lacking:
        raise ValueError(
            f"`folder` {str(folder)!r} lacks {lacking}, so nobody could load it without this package: load model and "
            "processor, and save them again."
        )
