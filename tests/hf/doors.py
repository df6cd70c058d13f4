"""The two ways to a model with StableMask, tiny: an enabled Llama and the decoder of this package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import stablemask.hf
from tests.hf import tiny
from tests.model import tiny as own

DOORS = ("enabled llama", "decoder")
HORIZON = 20
LENGTH = 24
STEPS = 12


def enabled(architecture: str, *, gamma: Any = 0.5, base: float = 0.0) -> PreTrainedModel:
    """A tiny model of transformers with StableMask."""
    made = tiny.model(architecture)
    stablemask.hf.enable(made, gamma=gamma, horizon=HORIZON, base=base)
    return made


def model(door: str, *, base: float = 0.0, **settings: Any) -> PreTrainedModel:
    """In float32; ``settings`` are those of the decoder's configuration."""
    if door == "decoder":
        return own.model(**({"horizon": HORIZON, "base": base} | settings)).float()
    return enabled("llama", base=base)


def tokens(batch: int) -> Tensor:
    """Tokens of both vocabularies."""
    return own.tokens(batch, LENGTH)


def trainer(model: Any, folder: Path, callbacks: Sequence[TrainerCallback] = (), **options: Any) -> Trainer:
    """A run on eight sequences, seen again and again."""
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(
        model,
        TrainingArguments(str(folder), **(settings | options)),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens(8)],
        callbacks=list(callbacks),
    )


def losses(run: Trainer) -> Tensor:
    """The loss of every update."""
    return torch.tensor([line["loss"] for line in run.state.log_history if "loss" in line])


def losses_fall(losses: Tensor, to: float = 0.7) -> bool:
    """Whether a run that sees the same few sequences again and again learns them."""
    return bool(torch.isfinite(losses).all() and losses[-3:].max() < to * losses[0])


def reopen(folder: Path) -> PreTrainedModel:
    """The model in a saved folder."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()
