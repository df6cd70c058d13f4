"""Peak memory of training a model, in a fresh process: ``python -m benchmarks.model_memory --help``.

The process notes its size before there is a model, trains one step on a short sequence and one on the whole
batch, and reports how far its largest size rose above the noted one: weights, gradients, the optimizer's
state, activations and logits. Afterwards it holds one sequence against the float64 truth.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks._models import Subject, Truth, draw_tokens, make_model, training_step
from benchmarks.memory import Peak, highest_bytes, resident_bytes
from stablemask.model.sizes import named_config

_WARM_UP_LENGTH = 16
_CHECKED_LENGTH = 128
_MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """The peak memory of one training step, in MiB, measured in this process.

    Args:
        subject: ``stock`` is Llama with PyTorch's attention, ``enabled`` the same with StableMask,
            ``decoder`` our own model.
        size: A named size.
        length: Tokens of a sequence.
        batch: Sequences.
    """

    subject: Subject = "decoder"
    size: str = "71m"
    length: int = 512
    batch: int = 8

    @property
    def case(self) -> str:
        """Named as the cases of time are."""
        return f"memory/{self.size}/B{self.batch}/T{self.length}/float32"


RUNS = (Run("decoder"), Run("enabled"))


def peak_of(run: Run) -> Peak:
    """The report of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.model_memory", "--subject", run.subject, "--size", run.size]
    done = subprocess.run(
        [*command, "--length", str(run.length), "--batch", str(run.batch)],
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
    config = named_config(run.size, horizon=run.length)
    before = resident_bytes()
    model = make_model(run.subject, config)
    training_step(model, draw_tokens(config, 1, _WARM_UP_LENGTH), optimizer=False)()
    highest = highest_bytes()
    training_step(model, draw_tokens(config, run.batch, run.length), optimizer=True)()
    peak = highest_bytes()
    if peak <= highest:
        raise RuntimeError(
            f"length, batch: got {run.length}, {run.batch}, whose memory drowns in that of making the model; "
            "take larger ones"
        )
    if run.subject == "stock":
        return Peak((peak - before) / _MIB, 0.0)
    tokens = draw_tokens(config, 1, min(run.length, _CHECKED_LENGTH))
    return Peak((peak - before) / _MIB, Truth(config, tokens).training_error(model))


if __name__ == "__main__":
    found = measure(tyro.cli(Run))
    print(json.dumps({"mib": found.mib, "worst_error": found.worst_error}))
