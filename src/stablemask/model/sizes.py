"""The sizes of the paper by name, and the count of a model's parameters."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from stablemask.model.configuration import StableMaskConfig

_COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES: Mapping[str, Mapping[str, int]] = {
    "71m": dict(zip(_COLUMNS, (512, 1536, 6, 8), strict=True)),
    "160m": dict(zip(_COLUMNS, (768, 2048, 12, 12), strict=True)),
    "400m": dict(zip(_COLUMNS, (1024, 2816, 24, 16), strict=True)),
    "1.4b": dict(zip(_COLUMNS, (2048, 5632, 24, 16), strict=True)),
}
_PARTS = {
    "embed_tokens": "token embeddings",
    "positions": "positions",
    "artificial": "artificial tokens",
    "self_attn": "attention",
    "mlp": "feed-forward",
    "layernorm": "normalisation",
    "norm": "normalisation",
    "lm_head": "output layer",
}


def named_config(size: str, **settings: Any) -> StableMaskConfig:
    """The configuration of a named size; any setting may be given beside it or overridden.

    Examples:
        >>> named_config("71m", horizon=512).hidden_size
        512
    """
    if size not in SIZES:
        raise ValueError(f"size: got {size!r}; allowed: {', '.join(SIZES)}")
    return StableMaskConfig(**{**SIZES[size], **settings})


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Parameters of each part of a model; what is shared counts once, where it is met first."""
    counts = dict.fromkeys(_PARTS.values(), 0)
    for name, parameter in model.named_parameters():
        part = next(part for key, part in _PARTS.items() if key in name)
        counts[part] += parameter.numel()
    return {part: count for part, count in counts.items() if count}


def describe(model: nn.Module) -> None:
    """Print the parameters of a model, part by part."""
    counts = parameter_counts(model)
    for part, count in [*counts.items(), ("total", sum(counts.values()))]:
        print(f"{part:<18}{count:>16,}")  # noqa: T201 - printing is its purpose
