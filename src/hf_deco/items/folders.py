"""Folders that are replaced as a whole or not at all, and read with errors that name the file."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np


def replace_folder(folder: Path, write_files: Callable[[Path], None], file_names: set[str]) -> None:
    """Has files written to a sibling of `folder`, which then takes its place.

    A folder already there is renamed to `<folder>.previous` first and deleted last, so that a process killed between
    the two renames leaves it whole there.

    Args:
        folder (`Path`): where the files go.
        write_files (callable): writes them into the folder that it is given.
        file_names (set of `str`): the files that make up what is stored; a folder with any other is not replaced.

    Raises:
        ValueError: `folder` is a file or holds other files, which replacing it would destroy.
    """
    folder = folder.absolute()
    _check_replaceable(folder, file_names)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        fresh.mkdir()
        write_files(fresh)
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_files(folder: Path, names: Iterable[str], writer: str) -> None:
    """Raises `FileNotFoundError` unless a folder that `writer` wrote has all its files."""
    for path in (folder / name for name in names):
        if not path.is_file():
            previous = _previous(folder.absolute())
            hint = f" An interrupted save left the one before in {str(previous)!r}." if previous.is_dir() else ""
            raise FileNotFoundError(f"{str(path)!r} is missing; `folder` must be one that `{writer}` wrote.{hint}")


def read_meta(path: Path, format_version: int) -> dict:
    """Reads a JSON object that names its format version; raises `ValueError` for another one."""
    meta = read_file(path, lambda path: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(meta, dict) or meta.get("format_version") != format_version:
        version = meta.get("format_version") if isinstance(meta, dict) else None
        raise ValueError(f"{str(path)!r} has format version {version!r}, this version reads {format_version}.")
    return meta


def read_file(path: Path, reader: Callable):
    """What `reader` makes of a file; raises `ValueError` where it is damaged."""
    try:
        return reader(path)
    except Exception as error:  # each format has exceptions of its own; what they mean here is the same
        raise ValueError(f"{str(path)!r} is truncated or damaged ({error}); save it again.") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(str(path))


def _check_replaceable(folder: Path, file_names: set[str]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"`folder` {str(folder)!r} is a file; give a folder.")
    foreign = sorted({path.name for path in folder.iterdir()} - file_names)
    if foreign:
        raise ValueError(f"`folder` {str(folder)!r} holds other files ({foreign[0]}); give it a folder of its own.")


def _previous(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.previous")


def _swap(fresh: Path, folder: Path) -> None:
    previous = _previous(folder)
    if not folder.exists():
        fresh.rename(folder)
    else:
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
        try:
            fresh.rename(folder)
        except BaseException:
            previous.rename(folder)
            raise
    shutil.rmtree(previous, ignore_errors=True)
