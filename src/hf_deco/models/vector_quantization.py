"""One codebook: how it is made, learned, searched and kept alive."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .codebook_search import nearest_codes
from .orthogonal_basis import newton_schulz, orthogonality_error, singular_value_after

# Codes start within [-0.1, 0.1], as in the paper's Appendix A.
UNIFORM_RANGE = 0.1
# Weight of a code in the running means below which it keeps its place: the ratio of two tiny sums means nothing.
SMALLEST_EMA_WEIGHT = 1e-6
# A code is dead when so many items a code went by without one for it; a code in even use misses these once in e^16.
DEAD_AFTER_ITEMS_PER_CODE = 16
# Scales nearer to zero than this are taken as this where an item is mapped back to the code that would hit it.
SMALLEST_SCALE = 0.1


@dataclass
class QuantizerOutput:
    """What a quantiser returns; also unpacks as `quantized, codes, loss`.

    Args:
        quantized (`torch.Tensor` of shape `(B, d)`): What the codes stand for, float32 (float64 in a float64
            quantiser). Its gradient passes to the input as it is (straight-through).
        codes (`torch.LongTensor` of shape `(B, K)`): Codes, `(B,)` of a single codebook.
        loss (`torch.Tensor`): Scalar; summed over levels and dimensions, averaged over the batch (Eq. 9).
    """

    quantized: torch.Tensor
    codes: torch.LongTensor
    loss: torch.Tensor

    def __iter__(self):
        return iter((self.quantized, self.codes, self.loss))


class VectorQuantizer(nn.Module):
    """Vanilla VQ: a codebook that is learned by gradient.

    The loss is `|sg(x) - c|^2 + eta |x - sg(c)|^2`, so a gradient reaches the chosen codes only.

    Args:
        codebook_size (`int`): Codes `V`, at least 2.
        width (`int`): Width `d` of a code.
        commitment_weight (`float`, *optional*, defaults to 0.1): `eta`.
        restart_dead_codes (`bool`, *optional*, defaults to `False`): In training, move codes that none of the last
            `16 V` items chose to the items of the batch that are farthest from their codes. This happens at the start
            of a forward pass, hence run no other forward pass between one and its backward pass. Processes of a
            distributed training agree on it, as on running means.

    Raises:
        ValueError: If a size or weight is out of range.
    """

    def __init__(
        self, codebook_size: int, width: int, *, commitment_weight: float = 0.1, restart_dead_codes: bool = False
    ):
        super().__init__()
        check_integer("codebook_size", codebook_size, 2)
        check_integer("width", width, 1)
        if not commitment_weight >= 0:
            raise ValueError(f"`commitment_weight` must not be negative, got {commitment_weight}.")
        self.codebook_size, self.width, self.commitment_weight = codebook_size, width, commitment_weight
        self.restart_dead_codes = restart_dead_codes
        self._make_tables()
        if restart_dead_codes:
            self.register_buffer("idle_items", torch.zeros(codebook_size, dtype=torch.long))
        self.reset(torch.empty(codebook_size, width).uniform_(-UNIFORM_RANGE, UNIFORM_RANGE))

    def _make_tables(self) -> None:
        self.codebook = nn.Parameter(torch.empty(self.codebook_size, self.width))

    @torch.no_grad()
    def reset(self, codes: torch.Tensor) -> None:
        """Start anew from codes `(V, d)`, as `effective_codebook` returns them."""
        self.codebook.copy_(codes)
        if self.restart_dead_codes:
            self.idle_items.zero_()

    def effective_codebook(self) -> torch.Tensor:
        """The codes `(V, d)` that inputs are compared with, float32 or float64."""
        return full_precision(self.codebook)

    def choose(self, x, scale=None, bias=None, codebook=None) -> tuple[torch.LongTensor, torch.Tensor]:
        """Nearest codes `(B,)` of inputs `(B, d)`, and what they stand for, `(B, d)`.

        With `scale` and `bias` `(B, d)`, every input has a codebook of its own, `scale * codebook + bias`. Who calls
        often gives what `effective_codebook` returned.
        """
        codebook = self.effective_codebook() if codebook is None else codebook
        codes = nearest_codes(x.detach(), codebook.detach(), scale, bias)
        return codes, self.look_up(codes, scale, bias, codebook)

    def look_up(self, codes, scale=None, bias=None, codebook=None) -> torch.Tensor:
        """What codes `(B,)` stand for, `(B, d)`, with the gradient to all that makes it."""
        rows = F.embedding(codes, self.effective_codebook() if codebook is None else codebook)
        return rows if scale is None else scale * rows + bias

    def step(self, x, scale=None, bias=None) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor]:
        """`choose`, the loss, and in training what learns without gradient; inputs are checked already."""
        if self.training and self.restart_dead_codes:
            self._restart(x.detach(), scale, bias)
        codes, rows = self.choose(x, scale, bias)
        if self.training:
            self._observe(x.detach(), codes)
        return codes, rows, self._loss(x, rows)

    def forward(self, x: torch.Tensor) -> QuantizerOutput:
        """Quantise inputs `(B, d)`.

        Raises:
            ValueError: If the input is empty, has another width, or holds NaN or infinite values.
        """
        check_input(x, self.width, min_rows=1)
        with torch.autocast(x.device.type, enabled=False):
            codes, rows, loss = self.step(x.to(full_precision(self.codebook).dtype))
        return QuantizerOutput(straight_through(x, rows), codes, loss)

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> torch.LongTensor:
        """Codes `(B,)` of inputs `(B, d)`; errors as for `forward`, but there may be no inputs."""
        check_input(x, self.width)
        with torch.autocast(x.device.type, enabled=False):
            return self.choose(x.to(full_precision(self.codebook).dtype))[0]

    @torch.no_grad()
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """What codes `(B,)` stand for, `(B, d)`."""
        check_codes(codes[:, None], [self.codebook_size])
        with torch.autocast(codes.device.type, enabled=False):
            return self.look_up(codes.long())

    def _loss(self, x, rows) -> torch.Tensor:
        commitment = (x - rows.detach()).square().sum(1).mean()
        return (x.detach() - rows).square().sum(1).mean() + self.commitment_weight * commitment

    @torch.no_grad()
    def _observe(self, x, codes) -> None:
        if self.restart_dead_codes:
            hits = sum_over_processes(torch.bincount(codes, minlength=self.codebook_size))
            self.idle_items.add_(hits.sum()).masked_fill_(hits > 0, 0)

    @torch.no_grad()
    def _restart(self, x, scale, bias) -> None:
        dead = (self.idle_items >= DEAD_AFTER_ITEMS_PER_CODE * self.codebook_size).nonzero()[:, 0]
        if not len(dead):
            return
        _, rows = self.choose(x, scale, bias)
        farthest = (x - rows).square().sum(1).topk(min(len(dead), len(x))).indices
        targets = x[farthest]
        if scale is not None:
            scale, bias = scale[farthest], bias[farthest]
            targets = (targets - bias) / torch.where(scale < 0, -1.0, 1.0).mul(scale.abs().clamp(min=SMALLEST_SCALE))
        dead = dead[: len(farthest)]
        self._move(dead, targets)
        self.idle_items[dead] = 0
        if is_distributed():  # the first process' items for all
            for tensor in self.state_dict().values():
                dist.broadcast(tensor, 0)

    def _move(self, codes, targets) -> None:
        self.codebook[codes] = targets.to(self.codebook.dtype)


class EMAQuantizer(VectorQuantizer):
    """A codebook of running means: it has no gradient, and moves at the end of a forward pass in training.

        n_c <- lambda n_c + (1 - lambda) #{i: c_i = c},    m_c <- lambda m_c + (1 - lambda) sum_{i: c_i = c} x_i,
        c = m_c / n_c

    The loss is the commitment alone.

    Args:
        ema_decay (`float`, *optional*, defaults to 0.99): `lambda`, from 0 to below 1.
        **kwargs: As for [`VectorQuantizer`].
    """

    def __init__(self, codebook_size: int, width: int, *, ema_decay: float = 0.99, **kwargs):
        check_decay(ema_decay)
        super().__init__(codebook_size, width, **kwargs)
        self.ema_decay = ema_decay

    def _make_tables(self) -> None:
        self.register_buffer("codebook", torch.empty(self.codebook_size, self.width))
        self.register_buffer("ema_counts", torch.empty(self.codebook_size))
        self.register_buffer("ema_sums", torch.empty(self.codebook_size, self.width))

    @torch.no_grad()
    def reset(self, codes: torch.Tensor) -> None:
        super().reset(codes)
        self.ema_counts.fill_(1)
        self.ema_sums.copy_(codes)

    def _loss(self, x, rows) -> torch.Tensor:
        return self.commitment_weight * (x - rows.detach()).square().sum(1).mean()

    @torch.no_grad()
    def _observe(self, x, codes) -> None:
        super()._observe(x, codes)
        x = x.to(self.ema_sums.dtype)
        counts = sum_over_processes(torch.bincount(codes, minlength=self.codebook_size)).to(self.ema_counts.dtype)
        sums = sum_over_processes(torch.zeros_like(self.ema_sums).index_add_(0, codes, x))
        self.ema_counts.lerp_(counts, 1 - self.ema_decay)
        self.ema_sums.lerp_(sums, 1 - self.ema_decay)
        alive = self.ema_counts > SMALLEST_EMA_WEIGHT
        means = self.ema_sums / self.ema_counts.clamp(min=SMALLEST_EMA_WEIGHT)[:, None]
        self.codebook.copy_(torch.where(alive[:, None], means, self.codebook))

    def _move(self, codes, targets) -> None:
        super()._move(codes, targets)
        self.ema_counts[codes] = 1
        self.ema_sums[codes] = targets.to(self.ema_sums.dtype)


class MappedQuantizer(VectorQuantizer):
    """A codebook seen through a learned square matrix, so that a gradient reaches all codes: `C_hat = C A`.

    In evaluation mode without gradients `C_hat` is kept between calls, until what it is made of changes.
    """

    _cache = None

    def _make_tables(self) -> None:
        super()._make_tables()
        self.basis = nn.Parameter(torch.empty(self.width, self.width))

    def _map(self) -> torch.Tensor:
        raise NotImplementedError

    def _initial_scale(self) -> float:
        """`_map()` of the identity, which it starts from, is this times the identity."""
        return 1.0

    @torch.no_grad()
    def reset(self, codes: torch.Tensor) -> None:
        super().reset(codes / self._initial_scale())
        self.basis.zero_().fill_diagonal_(1)

    def effective_codebook(self) -> torch.Tensor:
        if self.training or torch.is_grad_enabled():
            return self._mapped()
        sources = (self.codebook, self.basis)
        # Compared by value: fused optimizers change tensors without changing their version counters.
        if self._cache is None or not all(map(_same, self._cache[0], sources)):
            self._cache = tuple(source.detach().clone() for source in sources), self._mapped()
        return self._cache[1]

    def _mapped(self) -> torch.Tensor:
        with torch.autocast(self.codebook.device.type, enabled=False):
            return full_precision(self.codebook) @ self._map()

    def _move(self, codes, targets) -> None:
        super()._move(codes, targets @ torch.linalg.pinv(self._map()))


class SimVQ(MappedQuantizer):
    """SimVQ: a frozen codebook under a learned linear map, `C_hat = C W`; `W` starts as the identity."""

    def _make_tables(self) -> None:
        super()._make_tables()
        del self.codebook
        self.register_buffer("codebook", torch.empty(self.codebook_size, self.width))

    def _map(self) -> torch.Tensor:
        return full_precision(self.basis)


class BasisVQ(MappedQuantizer):
    """BasisVQ: a learned codebook on a learned, nearly orthogonal basis, `C_hat = C h(W)` (Eq. 3, 4).

    `h` is [`newton_schulz`], always in float32 or float64. `W` starts as the identity. `h` does not depend on the scale
    of `W`, so weight decay on it would only raise its learning rate.

    Args:
        newton_schulz_steps (`int`, *optional*, defaults to 5): The paper's number; 12 for a rotation.
        **kwargs: As for [`VectorQuantizer`].
    """

    def __init__(self, codebook_size: int, width: int, *, newton_schulz_steps: int = 5, **kwargs):
        check_integer("newton_schulz_steps", newton_schulz_steps, 0)
        self.newton_schulz_steps = newton_schulz_steps  # `reset` needs it
        super().__init__(codebook_size, width, **kwargs)

    def _map(self) -> torch.Tensor:
        return newton_schulz(self.basis, self.newton_schulz_steps)

    def _initial_scale(self) -> float:
        return singular_value_after(self.width, self.newton_schulz_steps)

    @torch.no_grad()
    def orthogonality_error(self) -> float:
        """`|h(W)^T h(W) - I|_F / sqrt(d)`."""
        return orthogonality_error(self._map())


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_processes(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the processes of a distributed training, in place; itself where there is one process."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def _same(kept: torch.Tensor, source: torch.Tensor) -> bool:
    return kept.dtype == source.dtype and kept.device == source.device and torch.equal(kept, source)


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float32, or in float64 where it is already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def straight_through(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Exactly `rows`, with the gradient of `x`."""
    return rows.detach() + (x - x.detach()).to(rows.dtype)


def check_integer(name: str, value, least: int) -> None:
    """Raise `ValueError` unless a value is an integer not below the least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")


def check_decay(ema_decay: float) -> None:
    """Raise `ValueError` unless a decay of running means is at least 0 and below 1."""
    if not 0 <= ema_decay < 1:
        raise ValueError(f"`ema_decay` must be at least 0 and below 1, got {ema_decay}.")


def check_input(x: torch.Tensor, width: int, min_rows: int = 0, name: str = "x") -> None:
    """Raise `ValueError` unless an input is finite and of shape `(B, width)`, with at least `min_rows` rows."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise ValueError(f"`{name}` must be a tensor of floats, got {getattr(x, 'dtype', type(x).__name__)}.")
    if x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"`{name}` must have shape (num_items, {width}), got {tuple(x.shape)}.")
    if len(x) < min_rows:
        raise ValueError(f"`{name}` must have at least {min_rows} rows, got {len(x)}.")
    for start in range(0, len(x), 2**16):
        bad = (~x[start : start + 2**16].isfinite().all(1)).nonzero()[:, 0]
        if len(bad):
            raise ValueError(
                f"`{name}` holds NaN or infinite values, first in row {start + int(bad[0])}; drop or mend such rows."
            )


def check_codes(codes: torch.Tensor, codebook_sizes: list[int]) -> None:
    """Raise `ValueError` unless codes are integers `(B, K)`, each from 0 to below the size of its level."""
    if codes.ndim != 2 or codes.shape[1] != len(codebook_sizes) or codes.is_floating_point() or codes.is_complex():
        raise ValueError(
            f"`codes` must be integers of shape (num_items, {len(codebook_sizes)}), "
            f"got {codes.dtype} of shape {tuple(codes.shape)}."
        )
    sizes = torch.as_tensor(codebook_sizes, device=codes.device)
    bad = ((codes < 0) | (codes >= sizes)).any(1).nonzero()[:, 0]
    if len(bad):
        raise ValueError(
            f"`codes` has {len(bad)} rows outside the codebook sizes {list(codebook_sizes)}, first row {int(bad[0])}: "
            f"{codes[bad[0]].tolist()}."
        )
