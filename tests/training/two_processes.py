"""Training runs in two gloo processes, started as torchrun starts them, and in one to compare with."""

import json
import os
import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

import stablemask.backends.cpu_flash  # noqa: F401 - imported once, here, and not by every child
from stablemask.training import Recipe, run, sharded, train
from stablemask.training.trainer import PretrainingTrainer
from tests import scenes
from tests.training import small

PROCESSES = 2
ONE: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"precision": "bf16"}}
TWO: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, accumulated": {"accumulation": 2},
    "fsdp": {"distribution": "fsdp"},
    "fsdp, accumulated": {"distribution": "fsdp", "accumulation": 2},
    "fsdp, checkpointed": {"distribution": "fsdp", "gradient_checkpointing": True},
    "ddp, bf16": {"precision": "bf16"},
    "fsdp, bf16": {"distribution": "fsdp", "precision": "bf16"},
}
RESUMED = ("ddp", "fsdp")
STOPPED_AT = 7  # the newest checkpoint is of update 5
BLOCKS = 13  # of validation: the last batch of the second process is empty


class Interruption(Exception):
    """In the middle of a run."""


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == STOPPED_AT:
            raise Interruption


@cache  # the parent writes its text, before there are two that would
def plain(folder: Path) -> Recipe:
    return small.recipe(folder, steps=12, log_every=1, eval_tokens=16 * BLOCKS)


def recipe(folder: Path, **settings: Any) -> Recipe:
    base = plain(folder)
    return replace(base, train=replace(base.train, **settings))


def apart(a: list[dict[str, float]], b: list[dict[str, float]]) -> float:
    """The largest difference of losses and of norms of the gradient, as a share of them."""
    assert [line["step"] for line in a] == [line["step"] for line in b]
    names = ("loss", "grad_norm", "valid_loss")
    pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in names if name in x]
    assert len(pairs) == 12 + 12 + 2
    return max(abs(x - y) / abs(y) for x, y in pairs)


def runs(folder: Path) -> dict[str, object]:
    """All runs: in one process, in two, and begun in two and ended in one."""
    torch.set_num_threads(1)
    plain(folder)
    for name, settings in ONE.items():
        work = partial(train, recipe(folder, **settings), folder / name, progress=False)
        assert scenes.forked(work) == 0
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=PROCESSES,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(launch, _process)(folder)
    shutil.copytree(folder / "ddp, stopped", folder / "ddp, ended in one")
    assert scenes.forked(partial(train, recipe(folder), folder / "ddp, ended in one", progress=False)) == 0
    names = [*ONE, *TWO, "ddp, ended in one"]
    return {
        "curves": {name: small.curve(folder / name) for name in names},
        "processes": [
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(PROCESSES)
        ],
    }


def _process(folder: Path) -> None:
    """What each of the two does."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"spread": {}, "resumed": {}, "refused": _refused(folder)}
    trainers: list[PretrainingTrainer] = []
    honest = run._trainer

    def watched(*args: Any) -> PretrainingTrainer:
        trainers.append(honest(*args))
        return trainers[-1]

    run._trainer = watched
    for name, settings in TWO.items():
        train(recipe(folder, **settings), folder / name, progress=False)
        found["spread"][name] = _spread(trainers[-1])
    for name in RESUMED:
        found["resumed"][name] = _resumed(folder, name)
    rank = os.environ["RANK"]
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _spread(trainer: PretrainingTrainer) -> list[str]:
    """How a finished trainer had its parameters."""
    found = {type(trainer.model_wrapped).__name__}
    for parameter in trainer.decoder.parameters():
        if isinstance(parameter, DTensor):
            assert parameter.to_local().numel() < parameter.numel()
            found.add("in parts")
        else:
            found.add("whole")
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) == ("whole" in found)
    return sorted(found)


def _resumed(folder: Path, name: str) -> list[str]:
    """In what a run that was interrupted differs from the one that was not."""
    stopped = folder / f"{name}, stopped"
    begun = recipe(folder, **TWO[name])
    with pytest.raises(Interruption):
        train(begun, stopped, progress=False, callbacks=[Stop()])
    torch.distributed.barrier()
    ended = folder / f"{name}, resumed"
    if os.environ["RANK"] == "0":
        shutil.copytree(stopped, ended)
    torch.distributed.barrier()
    train(begun, ended, progress=False)
    return small.different(small.outcome(ended), small.outcome(folder / name))


def _refused(folder: Path) -> list[str]:
    """What is said if the model is not spread though the recipe asks for it."""
    honest, sharded.fully_shard = sharded.fully_shard, lambda module: module
    with pytest.raises(RuntimeError) as inactive:
        train(recipe(folder, distribution="fsdp"), folder / "refused", progress=False)
    sharded.fully_shard = honest
    with pytest.raises(ValueError, match="processes") as batch:
        train(recipe(folder, batch_size=3), folder / "refused", progress=False)
    return [str(inactive.value), str(batch.value)]


if __name__ == "__main__":
    scenes.main(runs)
