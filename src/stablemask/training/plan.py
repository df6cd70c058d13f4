"""What a run would take: parameters, memory, operations and time, without training."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from stablemask.data.config import SMALLEST_BPE
from stablemask.data.tokenizer import named_tokenizer
from stablemask.model import StableMaskForCausalLM
from stablemask.model.sizes import parameter_counts
from stablemask.training.progress import clock
from stablemask.training.recipe import Recipe

_KNOWN_VOCABULARIES = {"gpt2": 50257}
# The share of the rate of matrix products that a whole training step reaches, as measured on CPU cores.
_SHARE = 0.6
# Many short tries: a busy machine disturbs most of them, and the best is what counts.
_MEASURED_FOR = 0.3  # seconds at least
_TRIES = 20
_SHORTEST = 0.002
_LOGIT_ROWS = 256  # of a chunk of the vocabulary loss, at least


@dataclass(frozen=True)
class Plan:
    """What a recipe comes to on so many processes.

    Attributes:
        parameters: Of each part of the model.
        updates: Of the run; None where that depends on the length of the text.
        tokens: In an update.
        memory: Bytes of one process: weights, gradients, optimizer, activations.
        operations: Multiplications and additions in an update, over all processes: those of the layers'
            products and of causal attention, backward pass included.
        rate: The same a second, for one process, that this machine is expected to reach.
        processes: How many work at once.
    """

    parameters: Mapping[str, int]
    updates: int | None
    tokens: int
    memory: Mapping[str, int]
    operations: int
    rate: float
    processes: int

    @property
    def seconds_per_update(self) -> float:
        """Expected time of an update, if every process has a machine like this one."""
        return self.operations / self.rate / self.processes

    def lines(self) -> list[str]:
        """The plan for a reader."""
        counts = {**self.parameters, "total": sum(self.parameters.values())}
        memory = {**self.memory, "total": sum(self.memory.values())}
        seconds = self.seconds_per_update
        run = "depends on the length of the text" if self.updates is None else clock(seconds * self.updates)
        return [
            "parameters",
            *(f"  {part:<24}{count:>18,}" for part, count in counts.items()),
            f"memory of a process, about ({self.processes} in all)",
            *(f"  {part:<24}{size / 2**20:>14,.0f} MiB" for part, size in memory.items()),
            "an update",
            f"  {'tokens':<24}{self.tokens:>18,}",
            f"  {'operations':<24}{self.operations:>18.3e}",
            f"  {'time on this machine':<24}{seconds:>16.2f} s, at {self.rate / 1e9:,.0f} G operations/s",
            "the run",
            f"  {'updates':<24}{'?' if self.updates is None else format(self.updates, ','):>18}",
            f"  {'time, without validation':<24}{run:>18}",
        ]


def plan(recipe: Recipe, processes: int = 1) -> Plan:
    """What a recipe would take. Builds the model without memory and reads no text.

    Examples:
        >>> plan(load_recipe("recipes/tiny.toml")).tokens
        4096
    """
    train = recipe.train
    if processes < 1 or train.sequences % (train.accumulation * processes):
        raise ValueError(
            f"processes: got {processes}; allowed: divisors of {train.sequences // train.accumulation}, the "
            "sequences of a piece of an update"
        )
    config = recipe.config(vocabulary_size(recipe.data.tokenizer))
    with torch.device("meta"):
        model = StableMaskForCausalLM(config)
    tokens = train.sequences * train.length
    return Plan(
        parameters=parameter_counts(model),
        updates=None if train.steps is None and train.tokens is None else train.updates(0),
        tokens=tokens,
        memory=_memory(recipe, model, processes),
        operations=tokens * operations_per_token(model, train.length),
        rate=_SHARE * _rate(config.hidden_size, config.intermediate_size, train.precision),
        processes=processes,
    )


def operations_per_token(model: StableMaskForCausalLM, length: int) -> int:
    """Of a forward and backward pass over sequences of a length."""
    config = model.config
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    keys = length if config.sliding_window is None else min(length, config.sliding_window)
    width = config.num_attention_heads * config.width_of_head
    return 6 * matrices + 6 * config.num_hidden_layers * keys * width


def vocabulary_size(tokenizer: str) -> int:
    """Entries of a tokenizer that a recipe names, whether it has been trained or not."""
    if tokenizer == "bytes":
        return SMALLEST_BPE
    if tokenizer.startswith("bpe:"):
        return int(tokenizer.removeprefix("bpe:"))
    return _KNOWN_VOCABULARIES.get(tokenizer) or len(named_tokenizer(tokenizer))


def _memory(recipe: Recipe, model: StableMaskForCausalLM, processes: int) -> dict[str, int]:
    """Bytes of one process. Activations are those that a layer keeps for its backward pass."""
    train, config = recipe.train, model.config
    parameters = sum(p.numel() for p in model.parameters())
    shards = processes if train.distribution == "fsdp" else 1
    size = 2 if train.precision == "bf16" else 4
    rows = train.sequences // (train.accumulation * processes) * train.length
    width = config.hidden_size
    layer = (10 * width + 4 * config.intermediate_size) * size
    layers = config.num_hidden_layers
    kept = layers * width * size + layer if train.gradient_checkpointing else layers * layer
    logits = 3 * 4 * max(_LOGIT_ROWS * config.vocab_size, rows * width)  # of a chunk, three times
    copies = size * parameters // shards if train.precision == "bf16" else 0
    return {
        "weights": 4 * parameters // shards + copies,
        "gradients": 4 * parameters // shards,
        "optimizer": 8 * parameters // shards,
        "activations": rows * (kept + 4 * width * size) + logits,
    }


@cache
def _rate(width: int, inner: int, precision: str) -> float:
    """Operations a second in products of a model's own widths, measured now."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rows = 256 if device == "cpu" else 8192
    a = torch.ones(rows, width, dtype=dtype, device=device)
    b = torch.ones(width, inner, dtype=dtype, device=device)
    repeats, tries, best = 1, 0, math.inf
    end = time.perf_counter() + _MEASURED_FOR
    while tries < _TRIES or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(repeats):
            product = a @ b
        float(product[0, 0])  # wait for it
        seconds = time.perf_counter() - begin
        best, tries = min(best, seconds / repeats), tries + 1
        if seconds < _SHORTEST:
            repeats *= 2
    return 2 * rows * width * inner / best
