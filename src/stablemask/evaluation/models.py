"""Opening a model for evaluation: any causal language model of transformers."""

import hashlib
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from stablemask.model import StableMaskConfig

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def open_model(path: str, *, device: str, dtype: Dtype) -> PreTrainedModel:
    """A model for evaluation: a folder, or a name on the hub."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    opened: PreTrainedModel = model.eval()
    torch.nn.Module.to(opened, device)
    return opened


def open_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved beside the model."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return tokenizer


def training_length(model: PreTrainedModel) -> int:
    """The horizon of its pseudo scores; without one, the number of positions its configuration names."""
    config = model.config
    if isinstance(config, StableMaskConfig):
        horizon: object = config.horizon
    else:
        horizon = getattr(config, "stablemask", {}).get("horizon")
    length = horizon if isinstance(horizon, int) else getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ValueError(  # noqa: TRY004 - the argument is wrong, not its type
            f"length: {type(model).__name__} does not say its training length; give it"
        )
    return length


def fingerprint(model: PreTrainedModel) -> str:
    """A short name for exactly these weights and this configuration."""
    total = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def describe(path: str) -> str:
    """What a table calls the model: the last part of its path, or the run's name for RUN/model."""
    folder = Path(path)
    return (folder.parent.name if folder.name == "model" else "") or folder.name or path
