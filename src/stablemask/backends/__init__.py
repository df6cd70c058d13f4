"""The table of back ends: name → module, imported when first asked for, and their order of preference.

A back end is a module with two functions::

    why_not(call) -> str | None              why it cannot serve exactly this call; None: it can
    run(call)     -> (out, lse')             exact, with exact gradients for every tensor that needs one

and, if calls of inference may be repeated without asking ``why_not`` again (see ``_repeats``)::

    infer(call)   -> out                     where nobody traces or differentiates

which says that for one query ``why_not`` does not depend on the number of keys, as long as there are any.

Back ends import neither the reference nor each other.
"""

from types import ModuleType

import torch

NAMES = ("triton", "cuda_flash", "cpu_flash", "flex", "portable", "reference")
_PREFERENCE = {
    "cpu": ("cpu_flash", "portable", "reference", "flex", "triton", "cuda_flash"),
    "cuda": ("cuda_flash", "triton", "flex", "portable", "reference", "cpu_flash"),
}
_PREFERENCE_ELSEWHERE = ("portable", "reference", "flex", "triton", "cuda_flash", "cpu_flash")


class BackendUnavailable(ValueError):
    """The back end asked for cannot serve exactly this call; the message says why."""


def preference(device: torch.device) -> tuple[str, ...]:
    """Back ends in the order in which they are tried on a device: the fastest first."""
    return _PREFERENCE.get(device.type, _PREFERENCE_ELSEWHERE)


def module(name: str) -> ModuleType:
    """The back end's module. Plain import statements, so that torch.compile can follow them."""
    if name == "reference":
        from stablemask.backends import reference

        return reference
    if name == "cpu_flash":
        from stablemask.backends import cpu_flash

        return cpu_flash
    if name == "cuda_flash":
        from stablemask.backends import cuda_flash

        return cuda_flash
    if name == "portable":
        from stablemask.backends import portable

        return portable
    if name == "flex":
        from stablemask.backends import flex

        return flex
    if name == "triton":
        from stablemask.backends import triton

        return triton
    raise ValueError(f"backend: got {name!r}; allowed are {', '.join(NAMES)}, or None for the fastest")
