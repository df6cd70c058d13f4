"""A kernel that stores nothing but σ."""

import triton
import triton.language as tl

from stablemask.backends._closed_form import closed_form


@triton.jit(do_not_specialize=("gamma", "base", "horizon"))
def sigma_kernel(POSITIONS, SIGMA, gamma, base, horizon, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(SIGMA + index, closed_form(tl.load(POSITIONS + index), gamma, base, horizon))
