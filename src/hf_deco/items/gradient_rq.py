"""Residual quantisers learned by gradient, behind the interface of residual k-means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..models.codebook_search import squared_distances
from ..models.quantization import METHODS, ResidualQuantizer
from .embedding import check_embeddings
from .projection import check_variance
from .quantizer_training import QuantizerTrainer, QuantizerTraining
from .rq_kmeans import check_codebook_sizes, check_codes, check_enough_items


class GradientRQ:
    """A [`ResidualQuantizer`] for NumPy arrays of any scale, with its training.

    Embeddings are divided by the power of two next to their root mean square distance from the mean, so that one
    learning rate suits all; a power of two, because that changes no code and no bit of a reconstruction.

    Args:
        codebook_sizes (sequence of `int`, length K): codes per level, at least 2 each.
        method (`str`): one of `hf_deco.models.quantization.METHODS`.
        training ([`QuantizerTraining`], *optional*): steps, rates, initialisation.
        seed (`int`): seed of the initialisation and of the batches.
        verbose (`bool`): show a progress bar.
        options: further arguments of [`ResidualQuantizer`], such as `newton_schulz_steps`.

    Attributes:
        quantizer ([`ResidualQuantizer`]): `None` before `fit`; in evaluation mode on the CPU after it.
        scale (`float`): what embeddings are divided by.

    Raises:
        ValueError: an argument is malformed.
    """

    def __init__(
        self,
        codebook_sizes: Sequence[int],
        method: str = "basis-rq",
        *,
        training: QuantizerTraining | None = None,
        seed: int = 0,
        verbose: bool = False,
        **options,
    ):
        self.codebook_sizes = check_codebook_sizes(codebook_sizes)
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}.")
        if seed < 0:
            raise ValueError(f"`seed` must not be negative, got {seed}.")
        ResidualQuantizer(self.codebook_sizes, 1, method, **options)  # refuses options before there is data
        self.method, self.options = method, options
        self.training = training or QuantizerTraining()
        self.seed, self.verbose = seed, verbose
        self.quantizer: ResidualQuantizer | None = None
        self.scale = 1.0

    def fit(self, embeddings, checkpoint: Path | None = None) -> GradientRQ:
        """Initialises and trains on embeddings `(N, d)`, and returns itself.

        Args:
            embeddings (array-like of shape `(N, d)`): the catalog; not changed.
            checkpoint (`Path`, *optional*): see [`QuantizerTrainer.fit`].

        Raises:
            ValueError: the embeddings are malformed, all alike, or fewer than a level has codes.
        """
        embeddings = check_embeddings(embeddings)
        check_variance(embeddings)
        check_enough_items(embeddings, self.codebook_sizes)
        if len(embeddings) < max(self.codebook_sizes):
            raise ValueError(
                f"`codebook_sizes` {self.codebook_sizes} has a level of {max(self.codebook_sizes)} codes for "
                f"{len(embeddings)} items; give at most one code an item."
            )
        scale = _power_of_two(embeddings)
        points = torch.from_numpy(embeddings / np.float32(scale))
        quantizer = ResidualQuantizer(self.codebook_sizes, points.shape[1], self.method, **self.options)
        quantizer.init_from_data(points, self.training.init, self.seed)
        trainer = QuantizerTrainer(quantizer, self.training, self.seed)
        trainer.fit(points, checkpoint, self.verbose)
        self.quantizer, self.scale = quantizer.cpu().eval(), scale
        return self

    def load(self, state: Mapping[str, np.ndarray], scale: float) -> None:
        """Takes over the state of a `quantizer` that was trained before, and its `scale`.

        Raises:
            RuntimeError: the state is of another quantiser.
        """
        quantizer = ResidualQuantizer(self.codebook_sizes, len(state["mean"]), self.method, **self.options)
        quantizer.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
        self.quantizer, self.scale = quantizer.eval(), scale

    def encode(self, embeddings) -> np.ndarray:
        """Codes of embeddings: `(N, d)` to `(N, K)` int32; an item's do not depend on the others."""
        return self.quantizer.encode(self._scaled(check_embeddings(embeddings))).numpy().astype(np.int32)

    def decode(self, codes) -> np.ndarray:
        """Embeddings that codes stand for: `(N, K)` to `(N, d)` float32."""
        codes = np.asarray(codes)
        check_codes(codes, self.codebook_sizes)
        return self.quantizer.decode(torch.as_tensor(codes)).numpy() * np.float32(self.scale)

    @torch.no_grad()
    def residuals(self, embeddings: np.ndarray, codes: np.ndarray) -> Iterator[np.ndarray]:
        """See [`Reconstruction`]; the mean counts as part of the first level."""
        residual = self._scaled(embeddings) - self.quantizer.mean
        yield residual.numpy() * np.float32(self.scale)
        for rows in self._contributions(codes):
            residual = residual - rows
            yield residual.numpy() * np.float32(self.scale)

    @torch.no_grad()
    def distances(self, residual: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """See [`Reconstruction`]."""
        level, prefix = codes.shape[1], (None, None)
        for source, column in enumerate(torch.as_tensor(codes).long().T):
            prefix = self.quantizer._extend(prefix, source, column)
        codebook = self.quantizer.levels[level].effective_codebook()
        return squared_distances(self._scaled(residual), codebook, *prefix).numpy()

    @torch.no_grad()
    def codebooks(self, codes: np.ndarray) -> list[np.ndarray]:
        """Codebooks `(V_k, d)` whose chosen rows add up to what the codes stand for.

        Where a code means something else after other prefixes (`"prefix-basis-rq"`), they do so on average: a row is
        the mean of what the code adds over the items `codes` `(N, K)` that have it, and of a code that none has, what
        it would add under the items' mean scale and bias.
        """
        mean, books = self.quantizer.mean, [book.detach() for book in self.quantizer.codebooks()]
        if self.method == "prefix-basis-rq":
            books = self._mean_codebooks(torch.as_tensor(codes).long(), books)
        books[0] = books[0] + mean
        return [book.numpy() * np.float32(self.scale) for book in books]

    def _mean_codebooks(self, codes: torch.Tensor, books: list[torch.Tensor]) -> list[torch.Tensor]:
        prefix, means = (None, None), []
        for level, (rows, book) in enumerate(zip(self._contributions(codes), books, strict=True)):
            if prefix[0] is not None:
                book = prefix[0].mean(0) * book + prefix[1].mean(0)
            counts = torch.bincount(codes[:, level], minlength=len(book))[:, None]
            sums = torch.zeros_like(book, dtype=torch.float64).index_add_(0, codes[:, level], rows.double())
            means.append(torch.where(counts > 0, (sums / counts.clamp(min=1)).to(book.dtype), book))
            prefix = self.quantizer._extend(prefix, level, codes[:, level])
        return means

    def _contributions(self, codes) -> Iterator[torch.Tensor]:
        """What each column of codes `(n, l)` adds, `(n, d)`."""
        prefix = (None, None)
        for level, column in enumerate(torch.as_tensor(codes).long().T):
            yield self.quantizer.levels[level].look_up(column, *prefix)
            prefix = self.quantizer._extend(prefix, level, column)

    def _scaled(self, embeddings: np.ndarray) -> torch.Tensor:
        width = len(self.quantizer.mean)
        if embeddings.shape[1] != width:
            raise ValueError(f"`embeddings` must have width {width} like the codebooks, got {embeddings.shape[1]}.")
        return torch.from_numpy(embeddings / np.float32(self.scale))


def _power_of_two(embeddings: np.ndarray) -> float:
    """The power of two next to the root mean square distance of embeddings from their mean."""
    mean = embeddings.mean(axis=0, dtype=np.float64)
    square = sum(np.square(rows - mean).sum() for rows in np.array_split(embeddings, len(embeddings) // 8192 + 1))
    return 2.0 ** round(0.5 * math.log2(square / len(embeddings)))
