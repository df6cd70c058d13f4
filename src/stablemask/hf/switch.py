"""Switching StableMask on and off in models of transformers."""

import math
import warnings
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stablemask.hf import architectures
from stablemask.hf.config import is_switched, switched_class
from stablemask.hf.schema import to_table
from stablemask.pseudo import PseudoScores


def enable(
    model: PreTrainedModel,
    *,
    gamma: float | Sequence[float],
    horizon: int | None,
    headwise: bool = True,
    base: float = 0.0,
) -> None:
    """Switch StableMask on in a model, or change its parameters.

    Nothing but the config changes: no weight, no module, no hook. Weights trained without StableMask give
    other results with it, above all in early rows; ``AnnealBase`` trains them into it.

    Args:
        model: A causal language model of transformers.
        gamma: Decay of the pseudo scores per position; a sequence gives one value per head.
        horizon: The length the model is trained for; None means infinite. It is not taken from
            ``max_position_embeddings``, which may be extended later.
        headwise: Spread ``gamma`` over the heads like ALiBi's slopes.
        base: Pseudo score of a hypothetical column 1; −∞ is exactly plain attention.

    Raises:
        ValueError: The architecture does not support it; the message says why.

    Examples:
        >>> model = LlamaForCausalLM(config)
        >>> stablemask.hf.enable(model, gamma=0.5, horizon=2048)
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: got {type(model).__name__}; allowed is a PreTrainedModel of transformers "
            "(of a PEFT model: model.get_base_model())"
        )
    scores = PseudoScores(gamma, horizon=horizon, headwise=headwise, base=base)
    config = model.config
    if not is_switched(config):
        architectures.check(model)
    scores.gammas(config.num_attention_heads)
    if model.name_or_path and not is_switched(config) and base != -math.inf:
        warnings.warn(
            f"model: the weights of {model.name_or_path} were trained without StableMask, which changes "
            "their early rows most. Train them into it: base=-inf, which stablemask.hf.AnnealBase raises",
            UserWarning,
            stacklevel=2,
        )
    config.stablemask = to_table(scores)
    if not is_switched(config):
        config.__class__ = switched_class(type(config))


def disable(model: PreTrainedModel) -> None:
    """Switch StableMask off: the model is again what it was before ``enable``, bit for bit."""
    config = model.config
    if not is_switched(config):
        raise ValueError("model: StableMask is not switched on in it")
    del config.stablemask
    config.__class__ = config.stock_class
    if "_attn_implementation_internal" not in vars(config):
        config._attn_implementation = model.get_correct_attn_implementation(None)


def load(
    path: str,
    *,
    gamma: float | Sequence[float] | None = None,
    horizon: int | EllipsisType | None = ...,
    headwise: bool = True,
    base: float = 0.0,
    **kwargs: Any,
) -> PreTrainedModel:
    """Open a causal language model with StableMask.

    Args:
        path: A folder or a name on the hub. One that was saved with StableMask has its own parameters.
        gamma: As in ``enable``.
        horizon: As in ``enable``.
        headwise: As in ``enable``.
        base: As in ``enable``.
        **kwargs: For ``AutoModelForCausalLM.from_pretrained``: dtype, device_map, revision and so on.

    Examples:
        >>> model = stablemask.hf.load("a-folder", gamma=0.5, horizon=2048)
    """
    if "attn_implementation" in kwargs:
        raise ValueError(
            f"attn_implementation: got {kwargs['attn_implementation']!r}; the attention is StableMask"
        )
    config, _ = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **kwargs)
    if is_switched(config):
        if gamma is not None or horizon is not ... or not headwise or base != 0.0:
            raise ValueError(
                f"gamma, horizon, headwise, base: {path} has its own; change them with enable afterwards"
            )
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)
    if gamma is None or isinstance(horizon, EllipsisType):
        raise ValueError(f"gamma, horizon: {path} was not saved with StableMask; both must be given")
    architectures.check_config(config)
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    enable(model, gamma=gamma, horizon=horizon, headwise=headwise, base=base)
    return model
