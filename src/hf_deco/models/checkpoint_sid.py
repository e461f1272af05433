"""Opening and saving checkpoints: what is wrong with one is said, as far as possible before a weight is read."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import resolve_revision

from .catalog_sid import CatalogMixin
from .trie import check_codes

CATALOG = "catalog_codes"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"  # beside merged weights: at the root, transformers would apply it to them again
_HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")


class CheckpointModel(CatalogMixin, PreTrainedModel):
    """A model with a catalog, whose checkpoints are safetensors, whole, and fit their configuration, or are refused."""

    _has_pipeline = True  # it answers histories of item ids

    def get_input_embeddings(self):
        return None  # items come as codes or features: there is no table of text tokens

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a checkpoint; see [`PreTrainedModel.from_pretrained`].

        Raises:
            OSError: If a file is missing, its weights are truncated or damaged, or there are only pickled ones.
            ValueError: If the configuration is another model's or holds unknown arguments; if the weights lack some of
                the model's tensors, or hold tensors or a catalog that do not fit the configuration.
        """
        path = os.fspath(pretrained_model_name_or_path)
        with_info = kwargs.pop("output_loading_info", False)
        ignore_mismatched_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        if not kwargs.setdefault("use_safetensors", True):
            raise ValueError("`use_safetensors` must be True: pickled weights can run code when they are read.")
        where = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
        kwargs["revision"] = resolve_revision(path, **where, local_files_only=kwargs.get("local_files_only", False))
        try:
            check_checkpoint(path, cls.config_class, ignore_mismatched_sizes=ignore_mismatched_sizes, **kwargs)
            kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches are reported here
            model, info = super().from_pretrained(path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {path!r} are damaged or truncated ({error}): fetch the checkpoint again."
            ) from error
        _check_tensors(path, info, ignore_mismatched_sizes)
        if model.catalog_codes.device.type != "meta" and model.config.num_items:
            check_codes(model.catalog_codes, model.config.codebook_sizes)
        return (model, info) if with_info else model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save the model, its catalog and its code; see [`PreTrainedModel.save_pretrained`].

        Raises:
            ValueError: If the folder holds an adapter at its root.
        """
        # Here, so that a checkpoint carries the file, but only who saves one reads it.
        from .pipeline_sid import custom_pipelines

        refuse_root_adapter(save_directory)
        before = vars(self.config).pop("custom_pipelines", None)
        try:
            # Without its code a checkpoint has no pipeline of its own.
            if self._has_pipeline and self._auto_class is not None:
                self.config.custom_pipelines = custom_pipelines()
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            vars(self.config).pop("custom_pipelines", None)
            if before is not None:
                self.config.custom_pipelines = before


def check_checkpoint(path: str, config_class, config=None, ignore_mismatched_sizes: bool = False, **kwargs) -> None:
    """Refuse a checkpoint of which configuration and file headers tell that it cannot be loaded.

    Args:
        path (`str`): Folder or repository of the Hub.
        config_class (`type`): Configuration class of the model.
        config ([`SIDRetrievalConfig`], `str` or path, *optional*): The configuration; by default the checkpoint's.
        ignore_mismatched_sizes (`bool`, *optional*): Whether a catalog of another shape is accepted.
        kwargs: Options of `from_pretrained`; those of the Hub and `variant` are used.
    """
    options = {name: kwargs[name] for name in _HUB_OPTIONS if kwargs.get(name) is not None}
    folder = os.path.join(path, options.get("subfolder", ""))
    if os.path.isdir(path) and not os.path.isfile(os.path.join(folder, CONFIG_NAME)):
        raise OSError(f"{folder!r} holds no {CONFIG_NAME}: it is not a checkpoint, or not a whole one.")
    if config is None or isinstance(config, str | os.PathLike):
        config = config_class.from_pretrained(path if config is None else config, **options)
    if config.model_type != config_class.model_type:
        raise ValueError(
            f"`config` is of a {config.model_type!r} model, but this class needs a {config_class.__name__}, whose "
            f"`model_type` is {config_class.model_type!r}."
        )
    with safe_open(find_catalog(path, kwargs.get("variant"), **options), "pt") as weights:
        shape = tuple(weights.get_slice(CATALOG).get_shape()) if CATALOG in weights.keys() else None
    expected = (config.num_items, config.num_codebooks)
    if shape not in (None, expected) and not ignore_mismatched_sizes:
        raise ValueError(
            f"The checkpoint {path!r} does not fit its configuration: its catalog, {CATALOG!r}, has shape {shape}, but "
            f"`num_items` and `num_codebooks` are {expected}."
        )


def refuse_root_adapter(folder: str | os.PathLike) -> None:
    """Raise a `ValueError` where weights would lie beside an adapter, which `from_pretrained` applies to them."""
    if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
        raise ValueError(
            f"{os.fspath(folder)!r} holds {ADAPTER_CONFIG} at its root: `from_pretrained` would apply the adapter to "
            "the weights beside it, to merged ones a second time. Move the adapter's files to `adapter/`."
        )


def find_catalog(path: str, variant: str | None = None, **options) -> str:
    """The safetensors file that holds the catalog, or some other of the weights where none does.

    Args:
        path (`str`): Folder or repository of the Hub.
        variant (`str`, *optional*): Variant of the weights.
        options: Options of the Hub.

    Raises:
        OSError: If there are no weights, or only pickled ones.
    """

    def find(name: str) -> str | None:
        stem, extension = name.rsplit(".", 1)
        name = name if variant is None else f"{stem}.{variant}.{extension}"
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options)

    weights = find(SAFE_WEIGHTS_NAME)
    if weights is not None:
        return weights
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        return cached_file(path, shards.get(CATALOG) or min(shards.values()), **options)
    for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if find(name) is not None:
            raise OSError(
                f"{path!r} holds no {SAFE_WEIGHTS_NAME}, only {name}: pickled weights can run code when they are read. "
                "Convert them to safetensors."
            )
    raise OSError(f"{path!r} holds no {SAFE_WEIGHTS_NAME}: it is not a checkpoint, or not a whole one.")


def _check_tensors(path: str, info: dict, ignore_mismatched_sizes: bool) -> None:
    """Raise a `ValueError` where weights are missing or, unless that is accepted, of other shapes."""
    missing, mismatched = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing:
        raise ValueError(
            f"The checkpoint {path!r} lacks {len(missing)} tensors of the model, such as {missing[:3]}: it is "
            "incomplete, or was saved by another architecture."
        )
    if mismatched and not ignore_mismatched_sizes:
        name, stored, expected = mismatched[0]
        raise ValueError(
            f"The checkpoint {path!r} does not fit its configuration in {len(mismatched)} tensors, such as {name!r}: "
            f"stored with shape {tuple(stored)}, {tuple(expected)} expected."
        )
