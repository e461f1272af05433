"""Item tokenizers: embeddings to semantic IDs by any of six methods, with a projection before them if wanted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..models.quantization import METHODS as GRADIENT_METHODS
from .embedding import check_embeddings
from .folders import check_files, read_arrays, read_file, read_meta, replace_folder
from .gradient_rq import GradientRQ
from .projection import Projection
from .quality import quality_report
from .quantizer_training import QuantizerTraining
from .reconstruction import AdditiveCodebooks, Reconstruction
from .rq_kmeans import RQKMeans, check_codebook_sizes

METHODS = ("rq-kmeans", *GRADIENT_METHODS)
FORMAT_VERSION = 1
ARRAYS, META = "tokenizer.safetensors", "tokenizer.json"


class ItemTokenizer:
    """Spells item embeddings as semantic IDs.

    `"rq-kmeans"` trains by k-means, in a second; the other methods by gradient, see [`ResidualQuantizer`]. Those can
    also learn from a stream, see [`StreamingTokenizer`].

    Args:
        codebook_sizes (sequence of `int`, length K): codes per level, at least 2 each.
        method (`str`): one of `METHODS`.
        width (`int`, *optional*): embeddings are centred and projected onto so many principal directions first. What
            the tokenizer reports and hands out as codebooks then lies in that space.
        training ([`QuantizerTraining`], *optional*): how a gradient method is trained.
        num_iterations (`int`): k-means iterations a level, for `"rq-kmeans"`.
        seed (`int`): decides all that is random.
        verbose (`bool`): show progress.
        options: further arguments of [`ResidualQuantizer`], for gradient methods.

    Raises:
        ValueError: an argument is malformed.
    """

    def __init__(
        self,
        codebook_sizes: Sequence[int],
        method: str = "rq-kmeans",
        *,
        width: int | None = None,
        training: QuantizerTraining | None = None,
        num_iterations: int = 25,
        seed: int = 0,
        verbose: bool = False,
        **options,
    ):
        sizes = check_codebook_sizes(codebook_sizes)
        if min(sizes) < 2:
            raise ValueError(
                f"`codebook_sizes` {sizes} has a level of size 1, which tells nothing apart and lengthens every ID; "
                "leave that level out."
            )
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}.")
        if width is not None and width < 1:
            raise ValueError(f"`width` must be at least 1, got {width}.")
        if method == "rq-kmeans":
            if options:
                raise ValueError(f"`{next(iter(options))}` is no argument of the method 'rq-kmeans'.")
            self.quantizer = RQKMeans(sizes, num_iterations=num_iterations, seed=seed, verbose=verbose)
        else:
            self.quantizer = GradientRQ(sizes, method, training=training, seed=seed, verbose=verbose, **options)
        self.codebook_sizes, self.method, self.width, self.seed = sizes, method, width, seed
        self.projection: Projection | None = None
        self._fitted = False

    def fit(self, embeddings, checkpoint: Path | None = None) -> ItemTokenizer:
        """Learns from embeddings `(N, d)`, and returns itself.

        Args:
            embeddings (array-like of shape `(N, d)`): the catalog; not changed.
            checkpoint (`Path`, *optional*): file by which the training of a gradient method goes on after a stop; see
                [`QuantizerTrainer.fit`].

        Raises:
            ValueError: the embeddings are malformed, or do not suit the sizes. What was learned before stays.
        """
        embeddings = check_embeddings(embeddings)
        projection = None if self.width is None else Projection.fit(embeddings, self.width)
        points = embeddings if projection is None else projection(embeddings)
        if isinstance(self.quantizer, GradientRQ):
            self.quantizer.fit(points, checkpoint)
        else:
            self.quantizer.fit(points)
        self.projection, self._fitted = projection, True
        return self

    def project(self, embeddings) -> np.ndarray:
        """Embeddings `(n, d)` as the quantiser sees them: `(n, width)`, or as they are without a projection.

        Raises:
            ValueError: they are malformed or of another width, or there is nothing learned yet.
        """
        if not self._fitted:
            raise ValueError("this tokenizer has learned nothing yet; call `fit` first.")
        embeddings = check_embeddings(embeddings)
        if embeddings.shape[1] != self.embedding_width:
            raise ValueError(
                f"`embeddings` must have width {self.embedding_width} like those the tokenizer learned from, got "
                f"{embeddings.shape[1]}."
            )
        return embeddings if self.projection is None else self.projection(embeddings)

    def encode(self, embeddings) -> np.ndarray:
        """Codes of embeddings: `(n, d)` to `(n, K)` int32; errors as for `project`."""
        return self.quantizer.encode(self.project(embeddings))

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings that go in."""
        return self._quantizer_width if self.projection is None else len(self.projection.mean)

    @property
    def _quantizer_width(self) -> int:
        quantizer = self.quantizer
        return len(quantizer.quantizer.mean) if isinstance(quantizer, GradientRQ) else quantizer.codebooks[0].shape[1]

    @property
    def reconstruction(self) -> Reconstruction:
        """How codes approximate projected embeddings, exactly."""
        gradient = isinstance(self.quantizer, GradientRQ)
        return self.quantizer if gradient else AdditiveCodebooks(self.quantizer.codebooks)

    def codebooks(self, codes: np.ndarray) -> list[np.ndarray]:
        """Codebooks `(V_k, width)` whose chosen rows add up to what codes stand for; see [`GradientRQ.codebooks`]."""
        return self.quantizer.codebooks(codes) if isinstance(self.quantizer, GradientRQ) else self.quantizer.codebooks

    def report(self, before: np.ndarray, after: np.ndarray, points: np.ndarray, moved, categories=None) -> dict:
        """`quality_report` of codes for projected embeddings, with the `method` and, if there is one, the projection's
        `width` and the share of the variance that it keeps, `projected_variance`."""
        about = {"method": self.method}
        if self.projection is not None:
            about |= {"width": self.width, "projected_variance": self.projection.explained_variance}
        return about | quality_report(before, after, points, self.reconstruction, moved, categories)

    @property
    def version_id(self) -> str:
        """Names what was learned, by its content: 16 hexadecimal digits, the same for tokenizers that are the same."""
        digest = hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode())
        for name, array in sorted(self.arrays().items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return digest.hexdigest()[:16]

    def check_version(self, version_id: str | None, user: str) -> None:
        """Raises `ValueError` unless `user`, such as "the index", was made with this very tokenizer.

        Args:
            version_id (`str`, *optional*): the one that it was made with, as `SIDTable.tokenizer_version` tells;
                `None` where it is not known, which is an error too.
            user (`str`): its name in the message.
        """
        if version_id != self.version_id:
            raise ValueError(
                f"{user} was made with tokenizer version {version_id or 'unknown'}, but this tokenizer is version "
                f"{self.version_id}: its codes mean other items. Encode the items anew and rebuild {user}, or load "
                "the tokenizer it was made with."
            )

    def _identity(self) -> dict:
        identity = {"method": self.method, "codebook_sizes": list(self.codebook_sizes), "options": {}}
        if isinstance(self.quantizer, GradientRQ):
            identity |= {"options": self.quantizer.options, "scale": self.quantizer.scale}
        return identity

    def arrays(self) -> dict[str, np.ndarray]:
        """All that was learned, by name."""
        quantizer, arrays = self.quantizer, {}
        if self.projection is not None:
            arrays |= {"projection.mean": self.projection.mean, "projection.components": self.projection.components}
        if isinstance(quantizer, GradientRQ):
            state = quantizer.quantizer.state_dict().items()
            arrays |= {f"quantizer.{name}": value.numpy() for name, value in state}
        else:
            arrays |= {f"codebooks.{level}": book for level, book in enumerate(quantizer.codebooks)}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def meta(self) -> dict:
        """What `from_parts` needs beside the arrays, as JSON values."""
        meta = self._identity() | {"seed": self.seed, "width": self.width, "version_id": self.version_id}
        if self.projection is not None:
            meta["explained_variance"] = self.projection.explained_variance
        return meta

    @classmethod
    def from_parts(cls, meta: Mapping, arrays: Mapping[str, np.ndarray]) -> ItemTokenizer:
        """The tokenizer whose `meta` and `arrays` these are.

        Raises:
            ValueError: they do not belong together.
        """
        try:
            tokenizer = cls(
                meta["codebook_sizes"], meta["method"], width=meta["width"], seed=meta["seed"], **meta["options"]
            )
            if meta["width"] is not None:
                parts = arrays["projection.mean"], arrays["projection.components"], meta["explained_variance"]
                tokenizer.projection = Projection(*parts)
            if isinstance(tokenizer.quantizer, GradientRQ):
                start = "quantizer."
                state = {name.removeprefix(start): arrays[name] for name in arrays if name.startswith(start)}
                tokenizer.quantizer.load(state, meta["scale"])
            else:
                tokenizer.quantizer.codebooks = [arrays[f"codebooks.{k}"] for k in range(len(meta["codebook_sizes"]))]
            tokenizer._fitted = True
            version = tokenizer.version_id
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"the tokenizer's parts do not belong together: {error}.") from error
        if version != meta["version_id"]:
            raise ValueError(
                f"the tokenizer's arrays are those of version {version}, but {meta['version_id']} was written beside "
                "them: the files are of two tokenizers, or damaged."
            )
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer to a folder of its own, whole or not at all; see `replace_folder`."""
        arrays, meta = self.arrays(), {"format_version": FORMAT_VERSION} | self.meta()

        def write(fresh: Path) -> None:
            from safetensors.numpy import save_file

            save_file(arrays, str(fresh / ARRAYS))
            (fresh / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")

        replace_folder(Path(folder), write, {ARRAYS, META})

    @classmethod
    def load(cls, folder: str | Path) -> ItemTokenizer:
        """Reads a tokenizer that `save` wrote.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or they do not belong together.
        """
        folder = Path(folder)
        check_files(folder, (META, ARRAYS), "ItemTokenizer.save")
        return cls.from_parts(read_meta(folder / META, FORMAT_VERSION), read_file(folder / ARRAYS, read_arrays))
