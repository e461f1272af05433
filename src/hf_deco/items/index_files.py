"""An index as the files of one folder: NumPy arrays, and a manifest with the hash of each."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np

from ..models.strings_sid import PackedStrings
from .folders import read_file
from .index import ItemIndex
from .packing import PackedRows
from .sid_keys import key_codes

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_DTYPES = {"keys": "<u8", "offsets": "<i8", "item_ids": "|u1", "item_id_offsets": "<i8"}
_ROW_DTYPES = {
    "fp16": {"embeddings": "<f2"},
    "int8": {"embeddings": "|i1", "scales": "<f4"},
    "int4": {"embeddings": "|u1", "scales": "<f4"},
}


def write_index(index: ItemIndex, folder: Path, generation: int) -> str:
    """Writes an index into an empty folder, and waits until the disk has it.

    Returns:
        `str`: the SHA-256 of the manifest, which covers all.
    """
    ids, rows, files = index.item_ids, index.embeddings, {}
    arrays = {"keys": index.keys, "offsets": index.offsets, "embeddings": rows.data, "scales": rows.scales}
    arrays |= {"item_ids": ids.data, "item_id_offsets": ids.offsets}
    for name, dtype in (_DTYPES | _ROW_DTYPES[rows.precision]).items():
        array = np.ascontiguousarray(arrays[name], dtype=dtype)
        with open(folder / f"{name}.npy", "xb") as file:
            hashing = _HashingFile(file)
            np.lib.format.write_array(hashing, array, allow_pickle=False)
            _sync(file)
        files[name] = {"dtype": dtype, "shape": list(array.shape), **hashing.facts()}
    meta = {"format_version": FORMAT_VERSION, "generation": generation} | _meta(index)
    manifest = json.dumps(meta | {"files": files}, indent=2).encode() + b"\n"
    write_synced(folder / MANIFEST, manifest)
    sync_folder(folder)
    return hashlib.sha256(manifest).hexdigest()


def read_index(folder: Path, generation: int, manifest_sha256: str, verify: bool = True) -> ItemIndex:
    """Reads an index that `write_index` wrote, into memory.

    Args:
        folder (`Path`): its folder.
        generation (`int`): its number.
        manifest_sha256 (`str`): what `write_index` returned.
        verify (`bool`): compare the hash of every array with the manifest. Sizes, types, shapes, structure and the
            manifest's own hash are checked in any case.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is truncated, damaged or of another index, or the self-test fails.
    """
    meta = _read_manifest(folder, generation, manifest_sha256)
    try:
        dtypes = _DTYPES | _ROW_DTYPES[meta["precision"]]
        arrays = {name: _read(folder, name, dtype, meta["files"][name], verify) for name, dtype in dtypes.items()}
        rows = PackedRows(arrays["embeddings"], arrays.get("scales"), meta["width"], meta["precision"])
        rows.check_finite()
        strings = PackedStrings(arrays["item_ids"], arrays["item_id_offsets"])
        identity = meta["codebook_sizes"], meta["tokenizer_version"], meta["model_id"], generation, generation
        index = ItemIndex(arrays["keys"], arrays["offsets"], strings, rows, *identity)
        self_test(index)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / MANIFEST)!r} does not describe an index ({error!r}).") from error
    except ValueError as error:
        raise ValueError(f"the index in {str(folder)!r} is damaged: {error}") from error
    return index


def self_test(index: ItemIndex) -> None:
    """Looks up SIDs from all over an index and scores some of their items, against slow arithmetic.

    Raises:
        ValueError: they differ, so that this index, or this machine, is not to be trusted with users.
    """
    sids = np.unique(np.linspace(0, index.num_sids - 1, 8).astype(np.int64))
    starts, ends = index.find_codes(key_codes(index.keys[sids], index.codebook_sizes))
    if (starts != index.offsets[sids]).any() or (ends != index.offsets[sids + 1]).any():
        raise ValueError("its self-test failed: SIDs are not found where they stand.")
    rows = np.unique(np.minimum(starts + np.arange(4)[:, None], ends - 1))
    some = index.embeddings.take(rows)
    for user in some.unpack()[:4]:
        fast, slow = index.embeddings.scores(rows, user), some.reference_scores(user)
        tolerance = 0 if some.scales is not None else 1e-3 * np.abs(slow).max()
        if not (np.abs(fast - slow) <= tolerance).all():
            raise ValueError(f"its self-test failed: scores {fast[:3]} where {slow[:3]} are right.")
    index.ids(rows[None])


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file, and waits until the disk has it."""
    with open(path, "xb") as file:
        file.write(content)
        _sync(file)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in a folder; where the system has no such call, nothing."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashingFile:
    """A file that is written to, and the hash of what was written."""

    def __init__(self, file):
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    def facts(self) -> dict:
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}


def _meta(index: ItemIndex) -> dict:
    meta = {"tokenizer_version": index.tokenizer_version, "model_id": index.model_id}
    meta |= {"codebook_sizes": list(index.codebook_sizes), "num_items": len(index), "num_sids": index.num_sids}
    return meta | {"precision": index.embeddings.precision, "width": index.embeddings.width}


def _read_manifest(folder: Path, generation: int, sha256: str) -> dict:
    """The manifest of a generation, after comparing its hash, number and format version.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is damaged, or of another generation or format.
    """
    path = folder / MANIFEST
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise ValueError(f"{str(path)!r} is truncated or damaged: its hash is not the one that was published.")
    meta = json.loads(raw)
    if meta.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format version {meta.get('format_version')!r}, this version reads {FORMAT_VERSION}."
        )
    if meta.get("generation") != generation:
        raise ValueError(f"{str(path)!r} is of generation {meta.get('generation')!r}, not {generation}.")
    return meta


def _read(folder: Path, name: str, dtype: str, facts: dict, verify: bool) -> np.ndarray:
    """One array; the size is compared before anything is allocated, and what is hashed is what is used."""
    path = folder / f"{name}.npy"
    if (size := path.stat().st_size) != facts["bytes"]:
        raise ValueError(f"{path.name!r} has {size} bytes, not the {facts['bytes']} that were published.")
    raw = path.read_bytes()
    if verify and hashlib.sha256(raw).hexdigest() != facts["sha256"]:
        raise ValueError(f"the hash of {path.name!r} is not the one that was published.")
    shape, fortran, stored, start = read_file(path, lambda _: _parse_header(raw))
    if stored != np.dtype(dtype) or list(shape) != facts["shape"] or fortran:
        raise ValueError(f"{path.name!r} holds {stored} of {shape}, not {dtype} of {facts['shape']}.")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def _parse_header(raw: bytes) -> tuple:
    """Shape, whether it is column-major, dtype and start of the array in the content of a `.npy` file."""
    stream = io.BytesIO(raw)
    np.lib.format.read_magic(stream)
    return *np.lib.format.read_array_header_1_0(stream), stream.tell()


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())
