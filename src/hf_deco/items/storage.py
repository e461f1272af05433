"""A table of semantic IDs on disk: safetensors, JSON and Parquet in one folder, replaced as a whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .folders import check_files, read_arrays, read_file, read_meta, replace_folder
from .sid_table import SIDTable

FORMAT_VERSION = 1
ARRAYS, META, ITEMS = "sids.safetensors", "sids.json", "items.parquet"
CARD = "README.md"  # may stand beside the table; describes this version of it alone


def save_table(table: SIDTable, folder: Path) -> None:
    """Writes a table to `folder`, whole or not at all; see `replace_folder`.

    Raises:
        ValueError: `folder` is a file or holds anything but a table, which replacing it would destroy.
    """
    replace_folder(folder, lambda fresh: _write_files(table, fresh), {ARRAYS, META, ITEMS, CARD})


def load_table(folder: Path) -> SIDTable:
    """Reads a table from `folder`.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is truncated or of another format version, or the files do not fit together.
    """
    check_files(folder, (META, ARRAYS, ITEMS), "SIDTable.save")
    meta = read_meta(folder / META, FORMAT_VERSION)
    arrays = read_file(folder / ARRAYS, read_arrays)
    item_ids, titles = read_file(folder / ITEMS, _read_items)
    try:
        sizes = meta["codebook_sizes"]
        codebooks = [arrays[f"codebooks.{level}"] for level in range(len(sizes)) if len(arrays) > 1]
        version = meta.get("tokenizer_version")  # tables of older versions have none
        return SIDTable(item_ids, arrays["codes"], sizes, codebooks, meta["report"], titles, meta["seed"], version)
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
    meta |= {"seed": table.seed, "tokenizer_version": table.tokenizer_version, "report": table.report}
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _read_items(path: Path) -> tuple[np.ndarray, list[str] | None]:
    import pyarrow.parquet as pq

    columns = pq.read_table(path, columns=["item_id", "title"])
    titles = columns["title"]
    return np.array(columns["item_id"].to_pylist()), None if titles.null_count == len(titles) else titles.to_pylist()
