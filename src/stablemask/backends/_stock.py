"""What follows where a stock flash kernel is fed (out', lse') in place of (out, lse).

Its backward computes dS = P (dP − rowsum(dout ⊙ out)) with P = exp(S − lse), so out' and lse' make it exact
for the attention with the sink. It has no gradient of lse and knows nothing of σ: both are added here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# (dout, q, k, v, out', lse') → (dq, dk, dv)
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def through_lse(
    backward: Backward, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """dS = P · dlse: what the backward kernel computes for v = e₁, dout = dlse · e₁ and out = 0."""
    first = torch.zeros_like(v)
    first[..., 0] = 1.0
    grad = torch.zeros_like(out)
    grad[..., 0] = grad_lse.to(grad.dtype)
    dq, dk, _ = backward(grad, q, k, first, torch.zeros_like(out), lse)
    return dq, dk


def sink_gradient(
    sink: Tensor, grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """dσ_i = exp(σ_i − lse'_i) · (dlse'_i − rowsum(dout ⊙ out')_i)."""
    row = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    if grad is not None:
        row = row - (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    mass = torch.exp(sink - lse).masked_fill(sink == -torch.inf, 0.0)
    return (mass * row).sum_to_size(sink.shape)
