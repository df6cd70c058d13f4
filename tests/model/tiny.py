"""Models small enough for a test, with weights large enough that every part of them matters."""

from typing import Any

import torch
from torch import Tensor

from stablemask.model import StableMaskConfig, StableMaskForCausalLM
from stablemask.model.configuration import POSITIONS, REMEDIES

HORIZON = 12
VOCABULARY = 48
EVERY = [(position, remedy) for position in POSITIONS for remedy in REMEDIES]
EACH = [*((p, "stablemask") for p in POSITIONS), *(("rope", r) for r in REMEDIES if r != "stablemask")]
"""Every position encoding and every remedy, but not every pair."""
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "stablemask": {"horizon": HORIZON},
    "artificial_token": {"artificial_tokens": 3},
    "t5": {"t5_buckets": 8, "t5_max_distance": 16},
}


def config(position: str = "rope", remedy: str = "stablemask", **settings: Any) -> StableMaskConfig:
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "initializer_range": 0.35,
        "pad_token_id": 0,
        "position": position,
        "remedy": remedy,
    }
    own = OWN_SETTINGS.get(position, {}) | OWN_SETTINGS.get(remedy, {})
    return StableMaskConfig(**{**small, **own, **settings})


def model(
    position: str = "rope", remedy: str = "stablemask", *, seed: int = 0, **settings: Any
) -> StableMaskForCausalLM:
    """In float64 and in evaluation mode; parameters that start at 0 or 1 are moved away from there."""
    torch.manual_seed(seed)
    built = StableMaskForCausalLM(config(position, remedy, **settings))
    for name, parameter in built.named_parameters():
        if name.endswith(("sinks", "toeplitz", "norm.weight", "layernorm.weight")):
            torch.nn.init.normal_(parameter, 1.0, 0.5)
    return built.double().eval()


def tokens(batch: int, length: int, *, seed: int = 1) -> Tensor:
    """Tokens from 1 on: 0 is padding."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference in relation to the size of the second."""
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


EXACT = 1e-10
"""Two orders of the same float64 sums agree to this; nothing wrong does."""
