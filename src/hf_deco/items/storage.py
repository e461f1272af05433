"""A table of semantic IDs on disk: safetensors, JSON and Parquet in one folder, replaced as a whole or not at all."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import numpy as np

from .sid_table import SIDTable

FORMAT_VERSION = 1
ARRAYS, META, ITEMS = "sids.safetensors", "sids.json", "items.parquet"


def save_table(table: SIDTable, folder: Path) -> None:
    """Writes a table to `folder`.

    The files are written to a sibling folder that is then renamed. A table already there is renamed to
    `<folder>.previous` first and deleted last, so that a process killed between the two renames leaves it whole there.

    Raises:
        ValueError: `folder` is a file or holds anything but a table, which replacing it would destroy.
    """
    folder = folder.absolute()
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        fresh.mkdir()
        _write_files(table, fresh)
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_table(folder: Path) -> SIDTable:
    """Reads a table from `folder`.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is truncated or of another format version, or the files do not fit together.
    """
    for path in (folder / META, folder / ARRAYS, folder / ITEMS):
        if not path.is_file():
            previous = _previous(folder.absolute())
            hint = f" An interrupted save left the table before in {str(previous)!r}." if previous.is_dir() else ""
            raise FileNotFoundError(f"{str(path)!r} is missing; `folder` must be one that `SIDTable.save` wrote.{hint}")
    meta = _read(folder / META, lambda path: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        version = meta.get("format_version") if isinstance(meta, dict) else None
        raise ValueError(f"{str(folder / META)!r} has format version {version!r}, this version reads {FORMAT_VERSION}.")
    arrays = _read(folder / ARRAYS, _read_arrays)
    item_ids, titles = _read(folder / ITEMS, _read_items)
    try:
        sizes = meta["codebook_sizes"]
        codebooks = [arrays[f"codebooks.{level}"] for level in range(len(sizes)) if len(arrays) > 1]
        return SIDTable(item_ids, arrays["codes"], sizes, codebooks, meta["report"], titles, meta["seed"])
    except KeyError as error:
        raise ValueError(f"the table in {str(folder)!r} lacks {error}; save it again.") from error
    except ValueError as error:
        files = f"{META}, {ARRAYS} and {ITEMS}"
        raise ValueError(f"{files} in {str(folder)!r} do not belong together: {error}") from error


def _write_files(table: SIDTable, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import save_file

    arrays = {"codes": table.codes} | {f"codebooks.{level}": book for level, book in enumerate(table.codebooks)}
    # The writer takes the memory as it lies, whatever the strides say.
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, str(folder / ARRAYS))
    titles = [None] * len(table) if table.titles is None else table.titles.tolist()
    columns = {"item_id": pa.array(table.item_ids.tolist(), pa.string()), "title": pa.array(titles, pa.string())}
    pq.write_table(pa.table(columns), folder / ITEMS)
    meta = {"format_version": FORMAT_VERSION, "num_items": len(table), "codebook_sizes": list(table.codebook_sizes)}
    meta |= {"seed": table.seed, "report": table.report}
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _read(path: Path, reader):
    try:
        return reader(path)
    except Exception as error:  # each format has exceptions of its own; what they mean here is the same
        raise ValueError(f"{str(path)!r} is truncated or damaged ({error}); save the table again.") from error


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(str(path))


def _read_items(path: Path) -> tuple[np.ndarray, list[str] | None]:
    import pyarrow.parquet as pq

    columns = pq.read_table(path, columns=["item_id", "title"])
    titles = columns["title"]
    return np.array(columns["item_id"].to_pylist()), None if titles.null_count == len(titles) else titles.to_pylist()


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"`folder` {str(folder)!r} is a file; give a folder.")
    foreign = sorted({path.name for path in folder.iterdir()} - {ARRAYS, META, ITEMS})
    if foreign:
        raise ValueError(
            f"`folder` {str(folder)!r} holds other files ({foreign[0]}); give the table a folder of its own."
        )


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
