"""Residual quantisers behind one interface: plain, EMA, SimVQ, BasisRQ and prefix-aware BasisRQ."""

import torch
import torch.nn.functional as F
from torch import nn

from .codebook_search import MAX_POINTS_PER_CODE, chunk_size, kmeans, nearest_codes
from .vector_quantization import (
    UNIFORM_RANGE,
    BasisVQ,
    EMAQuantizer,
    QuantizerOutput,
    SimVQ,
    VectorQuantizer,
    check_codes,
    check_decay,
    check_input,
    check_integer,
    full_precision,
    straight_through,
)

METHODS = ("rq", "rq-ema", "simvq", "basis-rq", "prefix-basis-rq")
INITS = ("kmeans", "uniform")
# Rows encoded at once; an accelerator takes more.
CHUNK_ROWS = 2048


class ResidualQuantizer(nn.Module):
    """Spells an embedding as one code a level, each for what the levels before left over.

        x_1 = x - mean,    c_l = argmin_c |x_l - C_l[c]|^2,    x_{l+1} = x_l - sg(C_l[c_l]),
        quantized = mean + sum_l C_l[c_l]

    | method | the codebook `C_l` | gradient reaches |
    |---|---|---|
    | `"rq"` | a parameter | chosen codes |
    | `"rq-ema"` | running means of the inputs | nothing: call the module in training mode |
    | `"simvq"` | frozen codes through a learned linear map | the map |
    | `"basis-rq"` | `C_hat = C h(W)`, `h(W)` nearly orthogonal ([`BasisVQ`]) | all codes, through `W` |
    | `"prefix-basis-rq"` | `gamma * C_hat + beta` | all codes, and `Gamma`, `B` of the codes before |

    Prefix-aware BasisRQ looks up a scale and a bias for every code but the last and composes them level by level
    (Eq. 5): `beta <- beta * Gamma_k[c_k] + B_k[c_k]`, `gamma <- gamma * Gamma_k[c_k]`. There is one table for a level
    that is looked up, not one for every level that uses it. It starts as BasisRQ (`Gamma` 1, `B` 0).

    No method is safe from codes that nobody chooses when the embeddings' mean is far from the origin. Call
    `init_from_data` before training: it sets the mean to subtract and starts each level from k-means.

    Args:
        codebook_sizes (sequence of `int`, length K): Codes per level, at least 2 each.
        width (`int`): Width `d` of the embeddings.
        method (`str`, *optional*, defaults to `"basis-rq"`): One of `METHODS`.
        newton_schulz_steps (`int`, *optional*, defaults to 5): For the two BasisRQs; see [`newton_schulz`].
        commitment_weight (`float`, *optional*, defaults to 0.1): `eta` of the loss (Eq. 9).
        ema_decay (`float`, *optional*, defaults to 0.99): For `"rq-ema"`.
        restart_dead_codes (`bool`, *optional*, defaults to `False`): See [`VectorQuantizer`].
        center (`bool`, *optional*, defaults to `True`): Whether `init_from_data` sets the mean to subtract.

    Attributes:
        config (`dict`): The arguments above, as plain JSON values.
        mean (`torch.Tensor` of shape `(d,)`): Subtracted first and added last; zero before `init_from_data`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        codebook_sizes,
        width: int,
        method: str = "basis-rq",
        *,
        newton_schulz_steps: int = 5,
        commitment_weight: float = 0.1,
        ema_decay: float = 0.99,
        restart_dead_codes: bool = False,
        center: bool = True,
    ):
        super().__init__()
        codebook_sizes = list(codebook_sizes)
        if not codebook_sizes:
            raise ValueError("`codebook_sizes` is empty; give the number of codes of each level.")
        for size in codebook_sizes:
            check_integer("codebook_sizes", size, 2)
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}.")
        check_integer("newton_schulz_steps", newton_schulz_steps, 0)
        check_decay(ema_decay)
        self.config = {
            "codebook_sizes": codebook_sizes,
            "width": width,
            "method": method,
            "newton_schulz_steps": newton_schulz_steps,
            "commitment_weight": commitment_weight,
            "ema_decay": ema_decay,
            "restart_dead_codes": restart_dead_codes,
            "center": center,
        }
        self.levels = nn.ModuleList(self._make_level(size) for size in codebook_sizes)
        sources = codebook_sizes[:-1] if method == "prefix-basis-rq" else []
        self.scales = nn.ParameterList(torch.ones(size, width) for size in sources)
        self.biases = nn.ParameterList(torch.zeros(size, width) for size in sources)
        self.register_buffer("mean", torch.zeros(width))

    def _make_level(self, size: int) -> VectorQuantizer:
        config = self.config
        common = {name: config[name] for name in ("commitment_weight", "restart_dead_codes")}
        if config["method"] == "rq":
            return VectorQuantizer(size, config["width"], **common)
        if config["method"] == "rq-ema":
            return EMAQuantizer(size, config["width"], ema_decay=config["ema_decay"], **common)
        if config["method"] == "simvq":
            return SimVQ(size, config["width"], **common)
        return BasisVQ(size, config["width"], newton_schulz_steps=config["newton_schulz_steps"], **common)

    def forward(self, x: torch.Tensor) -> QuantizerOutput:
        """Quantise embeddings `(B, d)`; codes are `(B, K)`.

        In training mode this also updates what learns without gradient: running means, and restarts of dead codes.

        Raises:
            ValueError: If the input is empty, has another width, or holds NaN or infinite values.
        """
        check_input(x, self.mean.shape[0], min_rows=1)
        with torch.autocast(x.device.type, enabled=False):
            residual = self._centred(x)
            quantized, codes, loss, prefix = full_precision(self.mean), [], 0, (None, None)
            for level, quantizer in enumerate(self.levels):
                chosen, rows, term = quantizer.step(residual, *prefix)
                residual = residual - rows.detach()
                quantized, loss = quantized + rows, loss + term
                prefix = self._extend(prefix, level, chosen)
                codes.append(chosen)
        return QuantizerOutput(straight_through(x, quantized), torch.stack(codes, 1), loss)

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> torch.LongTensor:
        """Codes `(B, K)` of embeddings `(B, d)`, in chunks; an item's codes do not depend on the others.

        Raises:
            ValueError: As for `forward`, but there may be no embeddings.
        """
        check_input(x, self.mean.shape[0])
        codes = torch.empty((len(x), len(self.levels)), dtype=torch.long, device=x.device)
        codebooks, chunk = self.codebooks(), chunk_size(CHUNK_ROWS, x.device)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(x), chunk):
                here = slice(start, start + chunk)
                residual, prefix = self._centred(x[here]), (None, None)
                for level, quantizer in enumerate(self.levels):
                    codes[here, level], rows = quantizer.choose(residual, *prefix, codebooks[level])
                    residual = residual - rows
                    prefix = self._extend(prefix, level, codes[here, level])
        return codes

    @torch.no_grad()
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """Embeddings `(B, d)` that codes `(B, K)` stand for: exactly the `quantized` of `forward`.

        Raises:
            ValueError: If the codes are no integers, of another shape, or beyond a codebook.
        """
        check_codes(codes, self.config["codebook_sizes"])
        codes = codes.long()
        quantized, prefix = full_precision(self.mean).expand(len(codes), -1), (None, None)
        with torch.autocast(codes.device.type, enabled=False):
            for level, quantizer in enumerate(self.levels):
                quantized = quantized + quantizer.look_up(codes[:, level], *prefix)
                prefix = self._extend(prefix, level, codes[:, level])
        return quantized

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        mean = full_precision(self.mean)
        return x.to(mean.dtype) - mean

    def _extend(self, prefix, level: int, codes: torch.LongTensor):
        """Composite scale and bias `(B, d)` of the next level (Eq. 5), or `(None, None)`."""
        if level >= len(self.scales):
            return None, None
        scale = F.embedding(codes, full_precision(self.scales[level]))
        bias = F.embedding(codes, full_precision(self.biases[level]))
        return (scale, bias) if prefix[0] is None else (prefix[0] * scale, prefix[1] * scale + bias)

    @torch.no_grad()
    def init_from_data(self, x: torch.Tensor, init: str = "kmeans", seed: int = 0) -> None:
        """Start anew from a sample of embeddings `(S, d)`: mean, codebooks, bases, scales, biases and counts.

        Args:
            x (`torch.Tensor` of shape `(S, d)`): The sample. The mean is that of all rows; k-means takes at most 32
                rows for every code of the largest level.
            init (`str`, *optional*, defaults to `"kmeans"`): `"kmeans"` on what each level is left with, or
                `"uniform"`: codes within [-0.1, 0.1], whatever the embeddings' scale.
            seed (`int`, *optional*, defaults to 0): Seed of either.

        Raises:
            ValueError: If the sample has fewer rows than a level has codes, all its rows are alike, or it is malformed.
                Nothing has changed then.
        """
        if init not in INITS:
            raise ValueError(f"`init` must be one of {', '.join(INITS)}, got {init!r}.")
        check_input(x, self.mean.shape[0], min_rows=1)
        sizes = self.config["codebook_sizes"]
        if len(x) < max(sizes):
            raise ValueError(
                f"`x` has {len(x)} rows, fewer than the {max(sizes)} codes of a level; give more rows or smaller "
                f"`codebook_sizes` than {sizes}."
            )
        if not (x != x[0]).any():
            raise ValueError(f"`x` has zero variance: its {len(x)} rows are all alike, so codes could not differ.")
        generator = torch.Generator().manual_seed(seed)
        x = x.to(full_precision(self.mean).dtype)
        mean = x.mean(0) if self.config["center"] else torch.zeros_like(x[0])
        if not mean.isfinite().all():
            raise ValueError("`x` holds values too large to be averaged; scale the embeddings.")
        codebooks = self._initial_codebooks(x, mean, init, generator)
        for quantizer, codes in zip(self.levels, codebooks, strict=True):
            quantizer.reset(codes)
        for scale, bias in zip(self.scales, self.biases, strict=True):
            scale.fill_(1)
            bias.zero_()
        self.mean.copy_(mean)

    def _initial_codebooks(self, x, mean, init: str, generator: torch.Generator) -> list[torch.Tensor]:
        sizes, width = self.config["codebook_sizes"], len(mean)
        if init == "uniform":
            return [UNIFORM_RANGE * (2 * torch.rand(size, width, generator=generator) - 1) for size in sizes]
        sample = torch.randperm(len(x), generator=generator)[: MAX_POINTS_PER_CODE * max(sizes)]
        residual, codebooks = x[sample.to(x.device)] - mean, []
        for size in sizes:
            codebooks.append(kmeans(residual, size, generator))
            residual = residual - codebooks[-1][nearest_codes(residual, codebooks[-1])]
        return codebooks

    @torch.no_grad()
    def codebooks(self) -> list[torch.Tensor]:
        """Codes `(V_k, d)` of every level, before the prefix' scale and bias; the mean is apart in `mean`."""
        return [quantizer.effective_codebook() for quantizer in self.levels]

    def orthogonality_error(self) -> list[float]:
        """`|h(W)^T h(W) - I|_F / sqrt(d)` of every level; empty for methods without an orthogonal basis."""
        return [quantizer.orthogonality_error() for quantizer in self.levels if isinstance(quantizer, BasisVQ)]

    def no_decay_parameters(self) -> list[str]:
        """Names of the parameters that weight decay would harm: maps `W`, and scales, whose place of rest is 1."""
        return [name for name, _ in self.named_parameters() if name.endswith(".basis") or name.startswith("scales.")]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())
