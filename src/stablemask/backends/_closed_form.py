"""σ in closed form, inside a Triton kernel: the formulas of ``stablemask.pseudo``."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _near(x):
    # G(x) for x < 1, of min(x, 1) elsewhere
    x = tl.minimum(x, 1.0)
    xx = x * x
    return -0.5 * x + xx * (1.0 / 24) - xx * xx * (1.0 / 2880) + xx * xx * xx * (1.0 / 181440)


@triton.jit
def _far(x):
    # log(1 − e^−x) for x ≥ 1, of max(x, 1) elsewhere
    return tl.log(1.0 - tl.exp(-tl.maximum(x, 1.0)))


@triton.jit
def closed_form(position, gamma, base, horizon):
    """σ of the rows at 0-based ``position`` [BM]; ``horizon`` None is infinite."""
    i = position + 1
    log_gamma = tl.log(tl.where(gamma > 0, gamma, 1.0))
    one = tl.where(gamma < 1, _near(gamma), _far(gamma) - log_gamma)  # G(γ)
    sigma = base - i.to(tl.float32) * gamma
    if horizon is None:
        sigma = sigma - log_gamma - one
    else:
        count = tl.where(i < horizon, horizon - i, 1).to(tl.float32)
        x = count * gamma
        # log c + G(cγ); where x ≥ 1 log c cancels against −log(cγ)
        columns = tl.where(x < 1, tl.log(count) + _near(x), _far(x) - log_gamma)
        sigma = tl.where(i == horizon, float("-inf"), sigma + columns - one)
    return sigma


@lru_cache(maxsize=64)
def gammas_on(gammas: tuple[float, ...], device: torch.device) -> Tensor:
    """γ of the heads as a tensor that kernels read; kept between calls."""
    with torch.inference_mode(mode=False):
        return torch.tensor(gammas, dtype=torch.float32, device=device)
