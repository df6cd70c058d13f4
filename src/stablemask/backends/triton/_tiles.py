"""Tile sizes per architecture.

A static table: the first call is not a search, and every configuration can be compiled ahead of time.
``benchmarks/compile_gate.py`` compiles the table and fails on spilled registers or too much shared memory.
"""

from typing import Literal, NamedTuple

import torch

Kernel = Literal["forward", "dkdv", "dq"]

WIDTHS = (64, 128, 256)
MAX_WIDTH = WIDTHS[-1]
DELTA_ROWS = 64
DELTA_WARPS = 4


class Tile(NamedTuple):
    """Query rows and keys of a tile, and how the compiler is to run it."""

    rows: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One tile for every kernel."""

    forward: Tile
    dkdv: Tile
    dq: Tile


Entries = dict[tuple[int, int], Tiles]  # (bits of the dtype, widest head)

_INTERPRETER: Entries = {
    (bits, width): Tiles(Tile(32, 16, 1, 1), Tile(16, 32, 1, 1), Tile(32, 16, 1, 1))
    for bits in (16, 32)
    for width in WIDTHS
}
# Rare on GPUs: wide heads, and float32, which has no exact matrix instructions.
_NVIDIA_RARE: Entries = {
    (16, 256): Tiles(Tile(64, 32, 8, 2), Tile(16, 64, 8, 1), Tile(32, 32, 8, 1)),
    (32, 64): Tiles(Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
    (32, 128): Tiles(Tile(32, 16, 8, 1), Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    (32, 256): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_AMD_RARE: Entries = {
    (16, 256): Tiles(Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
    (32, 64): Tiles(Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
    (32, 128): Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(32, 16, 4, 1)),
    (32, 256): Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
TABLE: dict[str, Entries] = {
    "interpreter": _INTERPRETER,
    "sm_80": _NVIDIA_RARE
    | {
        (16, 64): Tiles(Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(64, 64, 4, 2)),
        (16, 128): Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 1), Tile(64, 64, 8, 2)),
    },
    # 99 KiB of shared memory: also 8.9 and 12.x, and what is not known
    "sm_86": _NVIDIA_RARE
    | {
        (16, 64): Tiles(Tile(128, 64, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
        (16, 128): Tiles(Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
    },
    "sm_90": _NVIDIA_RARE
    | {
        (16, 64): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 1), Tile(64, 64, 4, 3)),
        (16, 128): Tiles(Tile(64, 64, 4, 3), Tile(32, 64, 8, 2), Tile(64, 64, 4, 2)),
    },
    "sm_100": _NVIDIA_RARE
    | {
        (16, 64): Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 1), Tile(64, 64, 4, 2)),
        (16, 128): Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    },
    "gfx942": _AMD_RARE
    | {
        (16, 64): Tiles(Tile(128, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
        (16, 128): Tiles(Tile(128, 32, 4, 1), Tile(16, 64, 4, 1), Tile(64, 32, 4, 1)),
    },
    "amd": _AMD_RARE
    | {
        (16, 64): Tiles(Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
        (16, 128): Tiles(Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
}


def tiles_for(device: torch.device, dtype: torch.dtype, width: int) -> Tiles:
    """The entry for a head of this width: that of the narrowest class which holds it."""
    entries = TABLE[architecture(device)]
    return entries[8 * dtype.itemsize, next(w for w in WIDTHS if width <= w)]


def architecture(device: torch.device) -> str:
    """The key of the table for a device; what the table does not know gets the entry that asks for least."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return name if name in TABLE else "amd"
    major, minor = torch.cuda.get_device_capability(device)
    return {(8, 0): "sm_80", (9, 0): "sm_90"}.get((major, minor), "sm_100" if major == 10 else "sm_86")
