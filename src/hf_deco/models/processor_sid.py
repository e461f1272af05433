"""What processors share: they know items by their ids, and are saved as JSON and tensors beside their code."""

import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import ProcessorMixin
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import PROCESSOR_NAME, cached_file

from .strings_sid import PackedStrings

CATALOG_FILE = "catalog.safetensors"
UNKNOWN_ITEMS = ("error", "drop")
_HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")


class ItemProcessor(ProcessorMixin):
    """A processor that knows items by their ids.

    A class of this kind supplies `_saved`, its configuration and tensors, `_from_saved`, which makes it of them, and
    `_settable`, the names of what `from_pretrained` may be told in place of the checkpoint's.

    Attributes:
        item_ids ([`PackedStrings`] of length `N`): Item ids, all different.
        unknown_items (`str`): What becomes of items that are not known: `"error"` or `"drop"`.
    """

    _settable: tuple[str, ...] = ("unknown_items",)

    def _know_items(self, item_ids, unknown_items: str) -> None:
        """Set both attributes, or raise a `ValueError`."""
        self.item_ids = packed(item_ids)
        self.unknown_items = one_of("unknown_items", unknown_items, UNKNOWN_ITEMS)
        if repeated := self.item_ids.repeated():
            raise ValueError(f"`item_ids` must be unique; {len(repeated)} are repeated, such as {repeated[0]!r}.")

    def rows_of(self, items: list[str], unknown_items: str | None = None) -> list[int]:
        """Rows of item ids.

        Args:
            items (`list[str]`): Item ids.
            unknown_items (`str`, *optional*): `"error"`, or `"drop"` to leave out ids that are not known; the
                processor's own by default.

        Raises:
            ValueError: If ids are not known, and not dropped; names them. If `items` is a string.
        """
        if isinstance(items, str):
            raise ValueError(f"`items` must be a list of item ids, got the string {items!r}.")
        items = [str(item) for item in items]
        rows = self.item_ids.find(items)
        unknown = [repr(item) for item, row in zip(items, rows, strict=True) if row < 0]
        return [row for row in rows if row >= 0] if self._drops("items", unknown, unknown_items) else rows

    def _drops(self, name: str, unknown: list[str], policy: str | None) -> bool:
        """Whether unknown items are to be left out of an argument; an error where there are some and they are not."""
        policy = one_of("unknown_items", policy or self.unknown_items, UNKNOWN_ITEMS)
        if unknown and policy == "error":
            what = "ids that are none" if name == "items" else "rows that are none"
            raise ValueError(
                f"`{name}` holds {len(unknown)} {what} of the {len(self.item_ids)} known items: "
                f"{', '.join(unknown[:5])}. Leave them out, by `unknown_items='drop'` or yourself, or use a checkpoint "
                "whose item table has them."
            )
        return policy == "drop"

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> list[str]:
        """Write `processor_config.json`, `catalog.safetensors` and the code; each replaces its old version whole or
        not.

        Args:
            save_directory (`str` or path): The folder; made where there is none.
            push_to_hub (`bool`, *optional*): Whether the processor goes to the Hub as well.
            kwargs: Arguments of `push_to_hub`; `repo_id` is the folder's name by default.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        options, tensors = self._saved()
        config = {"processor_class": type(self).__name__, **options}
        with tempfile.TemporaryDirectory(prefix=".processor", dir=folder) as temporary:
            code = (custom_object_save(self, temporary, config) or []) if self._auto_class else []
            save_file(tensors | string_tensors("item_ids", self.item_ids), Path(temporary, CATALOG_FILE))
            Path(temporary, PROCESSOR_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            names = [*(Path(file).name for file in code), CATALOG_FILE, PROCESSOR_NAME]
            for name in names:
                os.replace(Path(temporary, name), folder / name)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)
        return [str(folder / name) for name in names]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs):
        """Load a processor from a folder or a repository of the Hub.

        Args:
            pretrained_model_name_or_path (`str` or path): Where from.
            kwargs: Hub options; and what the class lets one set in place of the checkpoint's, such as `unknown_items`.

        Raises:
            OSError: If a file is missing or damaged.
            ValueError: If they are those of another class.
        """
        path = str(pretrained_model_name_or_path)
        loading = {name: kwargs[name] for name in _HUB_OPTIONS if kwargs.get(name) is not None}
        files = [cached_file(path, name, **loading) for name in (PROCESSOR_NAME, CATALOG_FILE)]
        try:
            config = json.loads(Path(files[0]).read_text(encoding="utf-8"))
            tensors = load_file(files[1])
            saved_by = config.get("processor_class", cls.__name__)
            config |= {name: kwargs[name] for name in cls._settable if name in kwargs}
            return cls._from_saved(config, tensors)
        except (SafetensorError, json.JSONDecodeError, KeyError) as error:
            if isinstance(error, KeyError) and saved_by != cls.__name__:
                raise ValueError(
                    f"{path!r} holds a {saved_by}, which is no {cls.__name__}: open it with `AutoProcessor`."
                ) from error
            raise OSError(f"The processor files of {path!r} are damaged or incomplete ({error!r}).") from error


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """An option, or a `ValueError` where it is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}.")
    return value


def packed(strings) -> PackedStrings:
    """Strings as [`PackedStrings`], which they may be."""
    return strings if isinstance(strings, PackedStrings) else PackedStrings.pack(strings)


def string_tensors(name: str, strings: PackedStrings) -> dict[str, torch.Tensor]:
    """Strings as tensors of that name."""
    return {f"{name}.bytes": torch.from_numpy(strings.data), f"{name}.offsets": torch.from_numpy(strings.offsets)}


def read_strings(name: str, tensors: dict[str, torch.Tensor]) -> PackedStrings:
    """What `string_tensors` made tensors of; an `OSError` where they are damaged."""
    data, offsets = tensors[f"{name}.bytes"].numpy(), tensors[f"{name}.offsets"].numpy()
    try:
        return PackedStrings(data, offsets)
    except ValueError as error:
        raise OSError(f"The processor files are damaged: `{name}` cannot be told apart ({error}).") from error
