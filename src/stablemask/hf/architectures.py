"""Which architectures of transformers StableMask runs in, which not, and why.

The table is ``architectures.json``. ``python -m tests.hf.survey`` writes it from what it measures of every
architecture in it, and a test compares the two. An architecture that is not in it is tried when it is
switched on.
"""

import copy
import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from stablemask.hf.interface import AttentionLayer, Rows, stablemask_mask

_PROBE = "stablemask_probe"
_HONOURED = {"dropout", "scaling", "position_ids", "softcap", "s_aux", "sliding_window"}
_WITHOUT_EFFECT = {
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "is_causal",
}


class Architecture(NamedTuple):
    """One line of the table."""

    name: str
    supported: bool
    remark: str


@cache
def table() -> tuple[Architecture, ...]:
    """Every architecture that was tried, by the model type in its config."""
    lines = json.loads(files(__package__).joinpath("architectures.json").read_text(encoding="utf-8"))
    return tuple(Architecture(name, **line) for name, line in sorted(lines.items()))


def check_config(config: PreTrainedConfig) -> None:
    """Raise ValueError, with the reason, where a config alone rules StableMask out."""
    reason = reason_in_config(config)
    if reason is not None:
        raise ValueError(f"model: {config.model_type} cannot run StableMask: {reason}")


def check(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, unless StableMask runs in this model."""
    check_config(model.config)
    if any(part.config is not model.config for part in model.modules() if isinstance(part, PreTrainedModel)):
        raise ValueError(
            "model: its parts have configs of their own; switch StableMask on in its language model"
        )
    if model.config.model_type not in {line.name for line in table()}:
        reason = probe(type(model), model.config)
        if reason is not None:
            raise ValueError(f"model: {model.config.model_type} cannot run StableMask: {reason}")


def reason_in_config(config: PreTrainedConfig) -> str | None:
    """Why a config alone rules StableMask out, or None."""
    for line in table():
        if line.name == config.model_type and not line.supported:
            return line.remark
    if config.get_text_config() is not config:
        return "it is made of several models; switch StableMask on in its language model"
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "its decoder attends to an encoder"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is cut into chunks"
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        return "its config does not say how many attention heads it has"
    return None


class Call(NamedTuple):
    """One call of the registered attention: its mask, its number of query heads, its other options."""

    mask: object
    heads: int
    options: dict[str, object]


def probe(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Why StableMask cannot run in a model, or None: one forward of it without weights, on the meta device.

    Every layer must call the registered attention, with a mask made by the registered mask function, with all
    heads and without any option that StableMask does not know.
    """
    if not model_class._can_set_attn_implementation():
        return "it computes attention itself and never calls a registered one"
    try:
        calls = record(model_class, config)
    except Exception as error:  # noqa: BLE001 - whatever stopped the trial, it did not succeed
        return f"a trial forward of it raised {type(error).__name__}: {error}"
    if len(calls) != config.num_hidden_layers:
        return f"its {config.num_hidden_layers} layers call the registered attention {len(calls)} times"
    if not all(isinstance(call.mask, Rows) for call in calls):
        return "it does not make its mask through the registered mask function"
    if any(call.heads != config.num_attention_heads for call in calls):
        return f"some layers have another number of heads than its config, {config.num_attention_heads}"
    options = {name for call in calls for name, value in call.options.items() if value is not None}
    unknown = options - _HONOURED - _WITHOUT_EFFECT
    if unknown:
        return f"its attention takes options that StableMask does not know: {', '.join(sorted(unknown))}"
    return None


def record(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> list[Call]:
    """How the layers of a model call the registered attention in one forward."""
    AttentionInterface.register(_PROBE, _record)
    AttentionMaskInterface.register(_PROBE, stablemask_mask)
    config = copy.deepcopy(config)
    config._attn_implementation = _PROBE
    config._experts_implementation = None  # not one that looks at values: there are none here
    config._stablemask_calls = []
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with torch.device("meta"), torch.no_grad():
        model: Any = model_class(config)
        model.eval().to(torch.bfloat16)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    calls: list[Call] = config._stablemask_calls
    return calls


def _record(
    module: AttentionLayer, query: Tensor, _key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    module.config._stablemask_calls.append(Call(attention_mask, query.shape[1], options))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
