"""Compile the Triton kernels for GPUs that are not here: ``python -m benchmarks.compile_gate --help``.

Every tile of the shipped table is compiled for sm_80, sm_90, sm_100 and gfx942. A variant is BAD if it spills
registers, needs more shared memory than a block may have, or (16-bit) uses no matrix instructions.

Per architecture and head width 64 and 128, in bfloat16: every kernel with and without ALiBi and a window, σ
computed; with packed documents; with padding; the forward kernel with σ given. The variant with ALiBi and a
window also in float16 and float32. Left out, as fewer or the same registers: other combinations of these, and
attention without a causal mask. Left out for time: heads wider than 128 and the other architectures of the
table (``--architectures`` and ``--widths`` add them).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import triton
import tyro
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stablemask.backends.triton import _tiles
from stablemask.backends.triton._backward import delta_kernel, dkdv_kernel, dq_kernel
from stablemask.backends.triton._forward import forward_kernel
from stablemask.backends.triton._tiles import Tile

KernelName = Literal["forward", "delta", "dkdv", "dq"]
DType = Literal["bf16", "fp16", "fp32"]

KERNELS = {"forward": forward_kernel, "delta": delta_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel}
GATED = ("sm_80", "sm_90", "sm_100", "gfx942")
# The entry "sm_86" serves every NVIDIA architecture with 99 KiB of shared memory, "amd" every other AMD one.
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "amd": GPUTarget("hip", "gfx90a", 64),
}
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "amd": 64 << 10,
}
BITS = {"bf16": 16, "fp16": 16, "fp32": 32}

_LIKE_INPUTS = frozenset({"Q", "K", "V", "OUT", "GRAD", "DQ", "DK", "DV_OUT"})
_TYPES = dict.fromkeys(("LSE", "GRAD_LSE", "DELTA", "SINK", "GAMMAS", "SLOPES"), "*fp32")
_TYPES |= dict.fromkeys(("ROWS", "KEYS"), "*i32") | dict.fromkeys(("base", "scale"), "fp32")
_TYPES |= dict.fromkeys(("H", "group", "Tq", "Tk", "window", "horizon"), "i32")
_STRIDE = re.compile(r"[a-z]+_[bht]")
_DIVISIBLE = [["tt.divisibility", 16]]
_MATRIX_INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma_|v_wmma_)")


@dataclass(frozen=True)
class Variant:
    """One compilation."""

    architecture: str
    kernel: KernelName
    width: int
    tile: Tile
    dtype: DType = "bf16"
    alibi: bool = False
    window: bool = False
    sink: Literal["computed", "given"] = "computed"
    structure: Literal["none", "documents", "padding"] = "none"

    def constants(self) -> dict[str, int | bool | None]:
        """Arguments whose value the compiler knows: tile sizes, and None for what a call does not have."""
        block = max(16, 1 << (self.width - 1).bit_length())
        known: dict[str, int | bool | None] = {"D": self.width, "DV": self.width, "CAUSAL": True}
        known |= {"BLOCK_D": block, "BLOCK_DV": block, "BM": self.tile.rows, "BN": self.tile.keys}
        known["HOLES"] = self.structure == "padding"
        absent = {"SLOPES": not self.alibi, "window": not self.window}
        absent["SINK"] = self.sink == "computed"
        absent |= dict.fromkeys(("GAMMAS", "horizon"), self.sink == "given")
        absent |= dict.fromkeys(("ROWS", "KEYS"), self.structure == "none")
        known |= {name: None for name, is_absent in absent.items() if is_absent}
        return {name: value for name, value in known.items() if name in KERNELS[self.kernel].arg_names}

    def source(self) -> ASTSource:
        """The kernel as it is launched: strides and addresses are multiples of 16, except those of σ."""
        constants, signature, attributes = self.constants(), {}, {}
        names = KERNELS[self.kernel].arg_names
        for i, name in enumerate(names):
            if name in constants:
                signature[name] = "constexpr"
                continue
            stride = _STRIDE.fullmatch(name) is not None
            signature[name] = "*" + self.dtype if name in _LIKE_INPUTS else "i32" if stride else _TYPES[name]
            if signature[name].startswith("*") or (stride and not name.startswith("sink")):
                attributes[i,] = _DIVISIBLE
        values = {(names.index(name),): value for name, value in constants.items()}
        return ASTSource(fn=KERNELS[self.kernel], signature=signature, constexprs=values, attrs=attributes)

    def __str__(self) -> str:
        extras = [name for name in ("alibi", "window") if getattr(self, name)]
        extras += ["σ given"] if self.sink == "given" else []
        extras += [self.structure] if self.structure != "none" else []
        tile = "×".join(map(str, self.tile[:2])) + f" w{self.tile.warps} s{self.tile.stages}"
        name = f"{self.architecture:7} {self.kernel:8} {self.width:4} {self.dtype:5}"
        return f"{name} {tile:14} {' + '.join(extras):22}"


@dataclass(frozen=True)
class Report:
    """What the compiler made of a variant; ``complaints`` is empty where all is well."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: int
    seconds: float
    complaints: tuple[str, ...]


def compile_variant(variant: Variant) -> Report:
    """Compile and judge one variant."""
    begin = time.perf_counter()
    options = {"num_warps": variant.tile.warps, "num_stages": variant.tile.stages, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(variant.source(), target=TARGETS[variant.architecture], options=options)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the verdict on the variant
        seconds = time.perf_counter() - begin
        return Report(0, 0, 0, 0, seconds, (f"{type(error).__name__}: {str(error)[:200]}",))
    registers, spilled = _nvidia_usage(compiled) if "cubin" in compiled.asm else _amd_usage(compiled)
    text = compiled.asm["ptx"] if "ptx" in compiled.asm else compiled.asm["amdgcn"]
    matrix = len(_MATRIX_INSTRUCTION.findall(text))
    shared, limit = int(compiled.metadata.shared), SHARED_BYTES[variant.architecture]
    complaints = []
    if spilled:
        complaints.append(f"{spilled} bytes of registers are spilled")
    if shared > limit:
        complaints.append(f"{shared} bytes of shared memory, allowed: {limit}")
    if not matrix and BITS[variant.dtype] == 16 and variant.kernel != "delta":
        complaints.append("no matrix instruction")
    return Report(registers, spilled, shared, matrix, time.perf_counter() - begin, tuple(complaints))


def _nvidia_usage(compiled: Any) -> tuple[int, int]:
    """Registers of a thread and its stack in bytes, which holds nothing but what is spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


def _amd_usage(compiled: Any) -> tuple[int, int]:
    """Vector registers of a lane, and what lies in its private memory in bytes."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:?\s+(\d+)", compiled.asm["amdgcn"])
        assert found is not None, name
        return int(found[1])

    return number("vgpr_count"), 4 * number("vgpr_spill_count") + number("private_segment_fixed_size")


def variants(architectures: tuple[str, ...], widths: tuple[int, ...]) -> Iterator[Variant]:
    """The variants that the module's docstring lists."""
    for architecture in architectures:
        for width in widths:
            tiles = _tiles.TABLE[architecture][16, width]
            delta = Tile(_tiles.DELTA_ROWS, 0, _tiles.DELTA_WARPS, 1)
            yield Variant(architecture, "delta", width, delta)
            yield Variant(architecture, "forward", width, tiles.forward, sink="given")
            kernels: tuple[_tiles.Kernel, ...] = ("forward", "dkdv", "dq")
            for kernel in kernels:
                tile: Tile = getattr(tiles, kernel)
                for alibi in (False, True):
                    for window in (False, True):
                        yield Variant(architecture, kernel, width, tile, alibi=alibi, window=window)
                yield Variant(architecture, kernel, width, tile, structure="documents")
                yield Variant(architecture, kernel, width, tile, structure="padding")
                yield Variant(architecture, kernel, width, tile, "fp16", alibi=True, window=True)
                tile = getattr(_tiles.TABLE[architecture][32, width], kernel)
                yield Variant(architecture, kernel, width, tile, "fp32", alibi=True, window=True)


@dataclass(frozen=True)
class Options:
    """Compile the shipped tiles of the Triton kernels; the exit code is 1 if one of them is BAD.

    Args:
        architectures: Entries of the tile table.
        widths: Widths of a head.
        jobs: Compilations at a time.
        output: File for one JSON line per variant; "-" is standard output, after the table.
    """

    architectures: tuple[str, ...] = GATED
    widths: tuple[int, ...] = (64, 128)
    jobs: int = 2
    output: str = "-"


@dataclass
class _Run:
    lines: list[str] = field(default_factory=list)
    bad: int = 0


def gate(options: Options) -> int:
    """Compile everything, print a line as each is done; the number of BAD variants."""
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    begin, run = time.perf_counter(), _Run()
    todo = list(variants(options.architectures, options.widths))
    print(f"{'':66} registers  spilled   shared  matrix  seconds")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for variant, report in zip(todo, pool.map(compile_variant, todo), strict=True):
            numbers = (
                report.registers,
                report.spilled_bytes,
                report.shared_bytes,
                report.matrix_instructions,
            )
            figures = "".join(f"{n:9}" for n in numbers)
            verdict = "BAD: " + "; ".join(report.complaints) if report.complaints else "ok"
            print(f"{variant}{figures}{report.seconds:8.1f}  {verdict}", flush=True)
            run.bad += bool(report.complaints)
            record = {**asdict(variant), "tile": variant.tile._asdict(), **asdict(report)}
            run.lines.append(json.dumps({**record, "triton": triton.__version__}))
    text = "\n".join(run.lines) + "\n"
    if options.output == "-":
        print(text, end="")
    else:
        Path(options.output).write_text(text, encoding="utf-8")
    seconds = time.perf_counter() - begin
    print(f"{len(todo)} variants, {run.bad} bad, {seconds:.0f} s, Triton {triton.__version__}")
    return run.bad


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(1 if gate(tyro.cli(Options)) else 0)
