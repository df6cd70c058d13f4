"""The two ways to a model with StableMask, tiny: an enabled Llama and the decoder of this package."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import stablemask.hf
from tests.hf import tiny
from tests.model import tiny as own

DOORS = ("enabled llama", "decoder")
HORIZON = 20
LENGTH = 24


def model(door: str, *, base: float = 0.0, **settings: Any) -> PreTrainedModel:
    """In float32; ``settings`` are those of the decoder's configuration."""
    if door == "decoder":
        return own.model(**({"horizon": HORIZON, "base": base} | settings)).float()
    llama = tiny.model("llama")
    stablemask.hf.enable(llama, gamma=0.5, horizon=HORIZON, base=base)
    return llama


def tokens(batch: int) -> Tensor:
    """Tokens of both vocabularies."""
    return own.tokens(batch, LENGTH)


def losses_fall(losses: Tensor, to: float = 0.7) -> bool:
    """Whether a run that sees the same few sequences again and again learns them."""
    return bool(torch.isfinite(losses).all() and losses[-3:].max() < to * losses[0])


def reopen(folder: Path) -> PreTrainedModel:
    """The model in a saved folder."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()
