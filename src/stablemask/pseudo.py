r"""The method: which logit StableMask adds to every row of causal attention.

The paper fills the upper triangle of the causal score matrix with pseudo scores, applies softmax and masks
again. With rows and columns counted from 1 inside one document, ``C`` the lower triangle of ones and ``N``
the horizon::

    A~  = softmax(A ⊙ C + P) ⊙ C              out = A~ V
    p_j = base − (j − 1)·γ_h                  pseudo score of column j > i, the same in every row i

A pseudo column has no value vector, so all pseudo columns of row i act together, as *one* extra logit with
value zero::

    σ_i  = log Σ_{j=i}^{N−1} exp(base − jγ)   i < N
         = base − iγ + log c + G(cγ) − G(γ)   c = N − i,  G(x) = log((1 − e^{−x})/x),  G(0) = 0
    σ_N  = −∞                                 the last row of the horizon has no pseudo column
    σ_i  = base − iγ                          i > N, beyond the horizon
    σ_i  = base − iγ − log(1 − e^{−γ})        every row, when the horizon is infinite (γ > 0)

    lse'_i = logaddexp(lse_i, σ_i)            out'_i = out_i · exp(lse_i − lse'_i)

``lse`` and ``out`` are those of plain causal attention. Row i keeps the share α_i = exp(lse_i − lse'_i) of
its attention; 1 − α_i is its *pseudo mass*. Because σ depends on nothing but (i, N, γ, base), training,
prefill and cached decoding are one function. N belongs to the model, never to the batch.

Head-wise γ follows ALiBi: γ_h = γ^(8(h+1)/H), h = 0…H−1, with ALiBi's rule for head counts that are no power
of two.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch._C import _functorch, _len_torch_dispatch_stack

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SERIES_BELOW = 0.05
_MAX_TABLES = 16
_MAX_TABLE_ELEMENTS = 1 << 22

_tables: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()


@dataclass(frozen=True)
class PseudoScores:
    """The pseudo scores of a model: one γ per head, the horizon and the base.

    Args:
        gamma: Decay per column, ≥ 0. A sequence gives one value per head and overrides ``headwise``.
        horizon: N, the training length the model was built for; ``None`` means infinite.
        headwise: Spread ``gamma`` over the heads like ALiBi's slopes; otherwise every head uses ``gamma``.
        base: Pseudo score of a hypothetical column 1. ``-inf`` switches StableMask off.

    Examples:
        >>> scores = PseudoScores(0.5, horizon=8)
        >>> scores.gammas(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039], dtype=torch.float64)
        >>> scores.row_logits(torch.arange(8), num_heads=4).shape
        torch.Size([4, 8])
    """

    gamma: float | Sequence[float] = 0.5
    _: KW_ONLY
    horizon: int | None
    headwise: bool = True
    base: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.gamma, Sequence) and not isinstance(self.gamma, (str, bytes)):
            if len(self.gamma) == 0:
                raise ValueError("gamma: got an empty sequence; give one value per head")
            object.__setattr__(self, "gamma", tuple(_finite_decay(g) for g in self.gamma))
        else:
            object.__setattr__(self, "gamma", _finite_decay(self.gamma))
        _check_horizon(self.horizon)
        if not isinstance(self.headwise, bool):
            raise TypeError(f"headwise: got {self.headwise!r}; allowed are True and False")
        object.__setattr__(self, "base", _check_base(self.base))
        self._refuse_divergence(self.gamma if isinstance(self.gamma, tuple) else (self.gamma,))

    def gammas(self, num_heads: int) -> Annotated[Tensor, "H"]:
        """γ of every head, in float64."""
        return torch.tensor(self.gamma_values(num_heads), dtype=torch.float64)

    def gamma_values(self, num_heads: int) -> list[float]:
        """γ of every head, as numbers: for kernels that compute σ themselves."""
        if num_heads < 1:
            raise ValueError(f"num_heads: got {num_heads}; allowed are integers ≥ 1")
        if isinstance(self.gamma, tuple):
            if len(self.gamma) != num_heads:
                raise ValueError(
                    f"gamma: got {len(self.gamma)} values for {num_heads} heads; give one per head"
                )
            values = list(self.gamma)
        elif self.headwise:
            values = [_power(self.gamma, e) for e in _alibi_exponents(num_heads)]  # type: ignore[arg-type] # no sequence here
        else:
            values = [float(self.gamma)] * num_heads  # type: ignore[arg-type] # no sequence here
        self._refuse_divergence(values)
        return values

    def _refuse_divergence(self, gammas: Sequence[object]) -> None:
        if self.horizon is None and 0.0 in gammas and self.base != -math.inf:
            raise ValueError(
                "gamma: got 0 with an infinite horizon, where the pseudo mass diverges; "
                "allowed are gamma > 0, a finite horizon, or base = -inf"
            )

    def row_logits(
        self,
        positions: Annotated[Tensor, "T | B T"],
        num_heads: int,
        dtype: torch.dtype = torch.float32,
    ) -> Annotated[Tensor, "H T | B H T"]:
        """σ of the rows at ``positions`` (0-based), in float32, or in float64 for ``dtype=torch.float64``."""
        gammas = self.gammas(num_heads).to(_compute_device_dtype(positions.device))
        logits = pseudo_logits(gammas.to(positions.device), positions, self.horizon, self.base)
        return logits.to(torch.float64 if dtype == torch.float64 else torch.float32)

    def consecutive_logits(
        self, start: int, stop: int, num_heads: int, *, dtype: torch.dtype, device: torch.device
    ) -> Annotated[Tensor, "H T"]:
        """σ of the rows ``start … stop − 1``, cut from a table kept per (scores, heads, device, dtype).

        At most 16 tables of at most 4 Mi numbers are kept, the least recently used goes first. A table grows
        by doubling, so decoding token by token reuses one.
        """
        if tracing():
            return self.row_logits(torch.arange(start, stop, device=device), num_heads, dtype)
        stop_rounded = 1 << max(stop - 1, 63).bit_length()
        if num_heads * stop_rounded > _MAX_TABLE_ELEMENTS:
            return self.row_logits(torch.arange(start, stop, device=device), num_heads, dtype)
        key = (self, num_heads, device, dtype)
        table = _tables.get(key)
        if table is None or table.shape[1] < stop:
            with torch.inference_mode(mode=False), torch.no_grad():
                table = self.row_logits(torch.arange(stop_rounded, device=device), num_heads, dtype)
            _tables[key] = table
            if len(_tables) > _MAX_TABLES:
                _tables.popitem(last=False)
        _tables.move_to_end(key)
        return table[:, start:stop]

    def counted_logits(
        self, positions: Annotated[Tensor, "B T"], stop: int, num_heads: int, dtype: torch.dtype
    ) -> Annotated[Tensor, "B H T"]:
        """σ of the rows at ``positions``, all of them below ``stop``, from the table."""
        table = self.consecutive_logits(0, stop, num_heads, dtype=dtype, device=positions.device)
        return table[:, positions].transpose(0, 1)

    def dense(
        self, length: int, num_heads: int
    ) -> tuple[Annotated[Tensor, "T T"], Annotated[Tensor, "H T T"]]:
        """The paper's C and P for ``length`` columns, in float64; P is 0 on and below the diagonal."""
        if length < 1:
            raise ValueError(f"length: got {length}; allowed are integers ≥ 1")
        visible = torch.ones(length, length, dtype=torch.float64).tril()
        column = self.base - torch.arange(length, dtype=torch.float64) * self.gammas(num_heads)[:, None]
        pseudo = column[:, None, :].expand(num_heads, length, length)
        return visible, pseudo.masked_fill(visible.bool(), 0.0)


def pseudo_logits(
    gammas: Annotated[Tensor, "H"],
    positions: Annotated[Tensor, "T | B T"],
    horizon: int | None,
    base: float | Annotated[Tensor, "()"] = 0.0,
) -> Annotated[Tensor, "H T | B H T"]:
    """σ for γ and base given as tensors, differentiable in both.

    Gradients are finite also at γ = 0, in empty rows and far beyond the horizon. Computed in float64 and
    returned in the dtype of ``gammas``, at least float32.

    Args:
        gammas: γ of every head, ≥ 0; > 0 when the horizon is infinite and the base is finite.
        positions: 0-based position of every row in its own document.
        horizon: N, or ``None`` for infinite.
        base: A number or a scalar tensor; ``-inf`` switches StableMask off.
    """
    _check_logit_arguments(gammas, positions, horizon, base)
    compute = _compute_device_dtype(gammas.device)
    g = gammas.to(compute)[:, None]
    i = positions.to(torch.int64).unsqueeze(-2) + 1
    decay = i.to(compute) * g
    if horizon is None:
        tail = -(_log_mean_decay(g) + torch.log(torch.where(g > 0, g, 1.0)))
        logits = base - decay + tail
    else:
        count = torch.where(i < horizon, horizon - i, 1).to(compute)
        logits = base - decay + torch.log(count) + _log_mean_decay(count * g) - _log_mean_decay(g)
        logits = logits.masked_fill(i == horizon, -math.inf)
    return logits.to(torch.promote_types(gammas.dtype, torch.float32))


def _log_mean_decay(x: Tensor) -> Tensor:
    """G(x) = log((1 − e^{−x})/x) for x ≥ 0; both sides of the switch are finite, so the gradient is too."""
    near = x.clamp(max=_SERIES_BELOW)
    squared = near * near
    series = -near / 2 + squared / 24 - squared * squared / 2880 + squared**3 / 181440
    far = x.clamp(min=_SERIES_BELOW)
    return torch.where(x < _SERIES_BELOW, series, torch.log(-torch.expm1(-far) / far))


def _alibi_exponents(num_heads: int) -> list[float]:
    """8(h+1)/H for a power of two; else those of the power below, then every other one of the power above."""
    below = 1 << (num_heads.bit_length() - 1)
    exponents = [8.0 * (h + 1) / below for h in range(below)]
    if below < num_heads:
        exponents += [8.0 * (h + 1) / (2 * below) for h in range(2 * below)][::2][: num_heads - below]
    return exponents


def _power(gamma: float, exponent: float) -> float:
    try:
        return float(gamma**exponent)
    except OverflowError:
        raise ValueError(
            f"gamma: {gamma!r} ** {exponent} overflows; use headwise=False or a smaller gamma"
        ) from None


def _finite_decay(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"gamma: got {value!r}; allowed are finite numbers ≥ 0, or a sequence of them")
    if not 0 <= value < math.inf:  # isfinite of a symbolic number breaks a graph
        raise ValueError(f"gamma: got {value!r}; allowed are finite numbers ≥ 0")
    return float(value)


def _check_horizon(horizon: object) -> None:
    if horizon is None:
        return
    if isinstance(horizon, bool) or not isinstance(horizon, int):
        raise TypeError(f"horizon: got {horizon!r}; allowed are integers ≥ 1, or None for infinite")
    if horizon < 1:
        raise ValueError(f"horizon: got {horizon}; allowed are integers ≥ 1, or None for infinite")


def _check_base(base: object) -> float:
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise TypeError(f"base: got {base!r}; allowed is any finite number, or -inf")
    if not base < math.inf:
        raise ValueError(f"base: got {base!r}; allowed is any finite number, or -inf")
    return float(base)


def _check_logit_arguments(gammas: object, positions: object, horizon: object, base: object) -> None:
    if not isinstance(gammas, Tensor) or gammas.ndim != 1 or not gammas.is_floating_point():
        got = f"{gammas.dtype} of shape {tuple(gammas.shape)}" if isinstance(gammas, Tensor) else repr(gammas)
        raise ValueError(f"gammas: got {got}; allowed is a floating-point tensor of shape (H,)")
    if not isinstance(positions, Tensor) or positions.ndim not in (1, 2) or positions.dtype not in INTEGERS:
        got = (
            f"{positions.dtype} of shape {tuple(positions.shape)}"
            if isinstance(positions, Tensor)
            else repr(positions)
        )
        raise ValueError(f"positions: got {got}; allowed is an integer tensor of shape (T,) or (B, T)")
    _check_horizon(horizon)
    if isinstance(base, Tensor):
        if base.ndim != 0:
            raise ValueError(
                f"base: got a tensor of shape {tuple(base.shape)}; allowed is a number or a scalar tensor"
            )
    else:
        _check_base(base)


def _compute_device_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def in_function_transform() -> bool:
    """True inside ``torch.func`` transforms, which see through PyTorch's own operators only."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is not None


def tracing() -> bool:
    """True where a tensor made now must not outlive the call: under compile, fake tensors, a transform."""
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _functorch.peek_interpreter_stack() is not None
    )
