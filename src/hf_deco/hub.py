"""A checkpoint folder to the Hub: model, catalog, processor, code, adapter and card in one commit."""

from __future__ import annotations

import json
import os
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, PROCESSOR_NAME

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
from .models.processing_deco import DecoProcessor

# Pickles, and what only a trainer that goes on needs.
PICKLES = ["*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"]
LEFT_BEHIND = [*DEFAULT_IGNORE_PATTERNS, *PICKLES, "trainer_state.json", "*__pycache__*"]
# What a repository's earlier commits may hold and would be read beside the new weights.
REPLACED = ["*.safetensors", "*.safetensors.index.json", ADAPTER_CONFIG, f"{ADAPTER_FOLDER}/*"]


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

    Everything in the folder goes along: weights with their catalog, processor, code, `adapter/`, and the card where
    there is a `README.md`. Pickles and a trainer's state stay behind. Weights and adapters of an earlier commit which
    the folder does not have are deleted from the repository.

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
    names = list(filter_repo_objects(files, ignore_patterns=LEFT_BEHIND))
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
        ValueError: If the configuration is another model's, the catalog does not fit it or the processor, an adapter
            lies beside the weights or is incomplete, or the folder lacks its code.
    """
    path = os.fspath(folder)
    if not os.path.isfile(os.path.join(path, CONFIG_NAME)):
        raise OSError(f"`folder` {path!r} holds no {CONFIG_NAME}: it is not a checkpoint, or not a whole one.")
    refuse_root_adapter(path)
    config = AutoConfig.from_pretrained(path)
    if not isinstance(config, SIDRetrievalConfig):
        raise ValueError(
            f"`folder` {path!r} holds a {config.model_type!r} model, not one of hf_deco that retrieves items by a "
            "processor: push it by its own `push_to_hub`."
        )
    try:
        check_checkpoint(path, type(config), config)
        with safe_open(find_catalog(path), "pt") as weights:
            catalog = weights.get_tensor(CATALOG)
    except SafetensorError as error:
        raise OSError(f"The weights of {path!r} are damaged, or hold no catalog ({error}).") from error
    DecoProcessor.from_pretrained(path).check_catalog(catalog)
    for name in (CONFIG_NAME, PROCESSOR_NAME):
        _check_code(Path(path), name)
    adapter = Path(path, ADAPTER_FOLDER)
    if adapter.exists() and not all((adapter / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        raise ValueError(f"{str(adapter)!r} must hold both {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}.")


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
