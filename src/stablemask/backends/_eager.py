"""An operator in eager code, without the dispatch and the registered autograd that only compilers need.

A call through PyTorch's dispatcher with a gradient registered in Python costs a quarter of a millisecond, an
``autograd.Function`` a tenth of that, and the function itself nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stablemask.pseudo import tracing

Function = Callable[..., tuple[Tensor, ...]]


def make_eager(
    operator: Function, forward: Function, setup: Callable[..., None], differentiate: Callable[..., Any]
) -> Function:
    """What calls ``operator``, or does the same by a shorter way where nobody is watching.

    Args:
        operator: As registered; its first argument is a tensor.
        forward: Its implementation.
        setup: Its ``setup_context``.
        differentiate: Its backward.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            """With ``setup_context`` PyTorch would inspect the signature of this at every call."""
            output = forward(*inputs)
            setup(ctx, inputs, output)
            return output

        backward = staticmethod(differentiate)

    def call(*inputs: Any) -> tuple[Tensor, ...]:
        if watched(inputs[0]):
            return operator(*inputs)
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
            found: tuple[Tensor, ...] = Eager.apply(*inputs)  # type: ignore[no-untyped-call]
            return found
        return forward(*inputs)

    return call


def watched(q: Tensor) -> bool:
    """Whether a compiler or a subclass of tensors has to see the operator, and not what it is made of."""
    return tracing() or type(q) is not Tensor


def watched_backward(q: Tensor) -> bool:
    """The same of the operator of the backward, which has to be there to refuse a second derivative."""
    return torch.is_grad_enabled() or watched(q)
