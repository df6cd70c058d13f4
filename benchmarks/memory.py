"""Peak memory of forward and backward, each in a fresh process: ``python -m benchmarks.memory --help``.

A process warms up on a short call, notes its resident size, makes q, k, v and the gradient, runs forward and
backward once and reports how far its largest resident size rose above the noted one: inputs, outputs and
everything in between. Afterwards it holds the last rows, and the gradients of the last keys, which no other
rows reach, against the float64 reference.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from stablemask import PseudoScores, stable_attention
from stablemask.testing import Example, Results, attend, compare, evaluate, plain_errors

HEADS, WIDTH = 4, 64

Subject = Literal["sdpa", "stablemask", "reference"]
DType = Literal["float32", "bfloat16"]

_CHECKED_ROWS = 256
_WARM_UP_LENGTH = 256
_MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """The peak memory of one forward and backward, in MiB, measured in this process.

    Args:
        subject: ``sdpa`` is plain causal attention, ``reference`` the dense form of the paper.
        length: T.
        dtype: Of q, k and v.
    """

    subject: Subject = "stablemask"
    length: int = 32_768
    dtype: DType = "float32"

    @property
    def case(self) -> str:
        """Named as the cases of time are."""
        return f"memory/T{self.length}/D{WIDTH}/{self.dtype}/fwd+bwd"


# The dense form is there for contrast, at a length where it fits into 8 GiB.
RUNS = (
    Run("stablemask", 32_768, "float32"),
    Run("stablemask", 32_768, "bfloat16"),
    Run("stablemask", 4_096, "float32"),
    Run("reference", 4_096, "float32"),
)


@dataclass(frozen=True)
class Peak:
    """What a process reports. ``worst_error`` is the largest share of an error budget, 0 for SDPA itself."""

    mib: float
    worst_error: float


def peak_of(run: Run) -> Peak:
    """The report of a fresh process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        "--subject",
        run.subject,
        "--length",
        str(run.length),
    ]
    done = subprocess.run(
        [*command, "--dtype", run.dtype],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode != 0:
        raise RuntimeError(f"{run} failed:\n{done.stderr}")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def measure(run: Run) -> Peak:
    """Measure in this process, which must not have held more memory before."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[run.dtype]
    scores = PseudoScores(0.5, horizon=run.length)
    generator = torch.Generator().manual_seed(0)
    _forward_and_backward(_tensors(_WARM_UP_LENGTH, dtype, generator), _operation(run.subject, scores))
    resident, highest = resident_bytes(), highest_bytes()
    tensors = _tensors(run.length, dtype, generator)
    results = _forward_and_backward(tensors, _operation(run.subject, scores))
    peak = highest_bytes()
    if peak <= highest:
        raise RuntimeError(
            f"length: got {run.length}, whose memory drowns in that of starting up; take a longer one"
        )
    worst_error = 0.0 if run.subject == "sdpa" else _worst_error(tensors, results, scores)
    return Peak((peak - resident) / _MIB, worst_error)


def _tensors(length: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """q, k, v and the gradient of out."""
    return {
        name: torch.randn(1, HEADS, length, WIDTH, generator=generator, dtype=dtype).requires_grad_(
            name != "grad"
        )
        for name in ("q", "k", "v", "grad")
    }


def _operation(subject: Subject, scores: PseudoScores) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if subject == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    backend = "reference" if subject == "reference" else None
    return lambda q, k, v: stable_attention(q, k, v, scores, backend=backend)


def _forward_and_backward(
    tensors: dict[str, Tensor], operation: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Results:
    q, k, v, grad = tensors.values()
    out = operation(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _worst_error(tensors: dict[str, Tensor], results: Results, scores: PseudoScores) -> float:
    q, k, v, grad = (t.detach() for t in tensors.values())
    rows = slice(-_CHECKED_ROWS, None)
    example = Example(q[:, :, rows], k, v, scores, grad_out=grad[:, :, rows])
    expected = evaluate(lambda e: attend(e, "reference"), example.double(), ("q", "k", "v"))
    last = {name: t[:, :, rows] for name, t in results.items()}
    exact = {name: t[:, :, rows] for name, t in expected.items()}
    found = compare(last, exact, plain_errors(example), dtype=q.dtype)
    return max(d.error / d.budget for d in found if d.name in last)


def resident_bytes() -> int:
    """What this process holds in memory now."""
    return _status("VmRSS")


def highest_bytes() -> int:
    """The most that this process ever held. ``ru_maxrss`` would count what its parent held, too."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: no {name}; peak memory is measured on Linux only")


if __name__ == "__main__":
    peak = measure(tyro.cli(Run))
    print(json.dumps({"mib": peak.mib, "worst_error": peak.worst_error}))
