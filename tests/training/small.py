"""Runs of a second or two, runs that break off, and all that a run has come to."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from stablemask.data import DataConfig
from stablemask.training import ModelConfig, Recipe, TrainConfig, checkpoints
from stablemask.training.run import MODEL
from stablemask.training.trainer import METRICS

STEPS = 24
_DOCUMENTS = 60
# Of a line of metrics, what tells of the machine and not of the model.
_TIMES = ("seconds", "valid_seconds", "tokens_per_second")


def recipe(folder: Path, **train: Any) -> Recipe:
    """A small decoder on a small corpus in a folder; it validates and saves several times."""
    text = folder / "text.jsonl"
    texts = [f"document {n} of {'many ' * (n % 11)}words" * 4 for n in range(_DOCUMENTS)]
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return Recipe(
        name="small",
        model=ModelConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            remedy="stablemask",
        ),
        data=DataConfig(str(text), tokenizer="bytes", held_out=0.2, cache=str(folder / "cache")),
        train=replace(
            TrainConfig(
                steps=STEPS,
                length=16,
                batch_size=4,
                learning_rate=1e-2,
                warmup_steps=3,
                log_every=2,
                eval_every=6,
                eval_tokens=256,
                save_every=5,
            ),
            **train,
        ),
    )


class Updates(TrainerCallback):
    """Notes the updates that are computed, and breaks off after one."""

    def __init__(self, last: int | None = None) -> None:
        self.seen: list[int] = []
        self.last = last

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.seen.append(state.global_step)
        if state.global_step == self.last:
            raise KeyboardInterrupt


def curve(run: Path) -> list[dict[str, float]]:
    """The lines of metrics, without times."""
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in _TIMES} for line in lines]


def outcome(run: Path) -> dict[str, str]:
    """Every bit that a finished run has come to, in parts with a name."""
    newest = checkpoints.find(run)[0]
    states = {
        part: torch.load(newest / f"{part}.pt", weights_only=True) for part in ("optimizer", "scheduler")
    }
    found: dict[str, str] = {}
    for name, tree in {"model": load_file(run / MODEL / "model.safetensors"), **states}.items():
        found |= _digests(tree, name)
    return found | {"checkpoint": newest.name, "curve": json.dumps(curve(run))}


def different(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """The parts in which two outcomes differ."""
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


def _digests(tree: Any, name: str) -> dict[str, str]:
    if isinstance(tree, Tensor):
        content = tree.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return {name: f"{tree.dtype} {tuple(tree.shape)} {hashlib.blake2b(content).hexdigest()}"}
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found: dict[str, str] = {}
        for key, value in pairs:
            found |= _digests(value, f"{name}.{key}")
        return found
    return {name: repr(tree)}
