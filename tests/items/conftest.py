"""Tokenizers trained for a few steps, with prefixes that matter, and what their codes stand for, by loops."""

import numpy as np
import pytest
import torch

from hf_deco.items import ItemTokenizer, QuantizerTraining

GRADIENT_METHODS = ("rq", "rq-ema", "simvq", "basis-rq", "prefix-basis-rq")


@pytest.fixture(scope="session")
def points():
    """Embeddings of 300 items around 12 centres, off the origin."""
    rng = np.random.default_rng(0)
    centres = 3 * rng.standard_normal((12, 6))
    return (centres[rng.integers(0, 12, 300)] + rng.standard_normal((300, 6)) + 5).astype(np.float32)


@pytest.fixture(scope="session")
def make_tokenizer(points):
    def make(method="prefix-basis-rq", sizes=(8, 6, 5), **options):
        if method != "rq-kmeans":
            options.setdefault("training", QuantizerTraining(num_steps=6, batch_size=64, learning_rate=0.05))
        tokenizer = ItemTokenizer(sizes, method, **options).fit(points)
        if method == "prefix-basis-rq":
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for tables, mean in (
                    (tokenizer.quantizer.quantizer.scales, 1.0),
                    (tokenizer.quantizer.quantizer.biases, 0),
                ):
                    for table in tables:
                        table.copy_(mean + 0.3 * torch.randn(table.shape, generator=generator))
        return tokenizer

    return make


class Loops:
    """A gradient tokenizer's arithmetic in float64, one item and one code at a time."""

    def __init__(self, tokenizer):
        quantizer = tokenizer.quantizer.quantizer
        self.scale = tokenizer.quantizer.scale
        self.mean = quantizer.mean.double().numpy() * self.scale
        self.books = [book.detach().double().numpy() * self.scale for book in quantizer.codebooks()]
        self.scales = [table.detach().double().numpy() for table in quantizer.scales]
        self.biases = [table.detach().double().numpy() * self.scale for table in quantizer.biases]

    def codebook(self, prefix):
        """The codebook `(V, d)` after a prefix."""
        scale, bias = np.ones_like(self.mean), np.zeros_like(self.mean)
        if self.scales:
            for level, code in enumerate(prefix):
                bias = bias * self.scales[level][code] + self.biases[level][code]
                scale = scale * self.scales[level][code]
        return scale * self.books[len(prefix)] + bias

    def residual(self, embedding, prefix):
        """What a prefix leaves of an embedding `(d,)`."""
        residual = embedding.astype(np.float64) - self.mean
        for level, code in enumerate(prefix):
            residual = residual - self.codebook(prefix[:level])[code]
        return residual

    def distances(self, embedding, prefix):
        return np.square(self.codebook(prefix) - self.residual(embedding, prefix)).sum(axis=1)

    def encode(self, embedding):
        prefix = ()
        while len(prefix) < len(self.books):
            prefix = (*prefix, int(self.distances(embedding, prefix).argmin()))
        return prefix


@pytest.fixture(scope="session")
def loops():
    return Loops
