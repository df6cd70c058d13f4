"""The table of architectures, measured: ``python -m tests.hf.survey`` writes it, a test compares it.

Supported are those of ``tiny.SUPPORTED``, on which every law is tested; what stands beside them is found by
running them. Refused are the other causal language models of transformers that never ask for a registered
attention.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import stablemask.hf.architectures
from stablemask.hf.architectures import probe, reason_in_config, record
from stablemask.hf.interface import Rows
from tests.hf import tiny

TABLE = Path(stablemask.hf.architectures.__file__).with_suffix(".json")

Line = dict[str, object]


def model_class(name: str) -> Any:
    return AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[name]]


def refused(name: str) -> Line:
    """The line of an architecture that cannot run StableMask."""
    config = CONFIG_MAPPING[name]()
    return {"supported": False, "remark": reason_in_config(config) or str(probe(model_class(name), config))}


def supported(name: str) -> Line:
    """The line of an architecture that can, with what a user of it should know."""
    config = tiny.config(name)
    reason = probe(model_class(name), config)
    if reason is not None:
        raise AssertionError(f"{name}: {reason}")
    calls = record(model_class(name), config)
    remarks = []
    if any(isinstance(call.mask, Rows) and call.mask.window is not None for call in calls):
        remarks.append("sliding window")
    if any(call.options.get("softcap") is not None for call in calls):
        remarks.append("softcap, on the real scores")
    if any(call.options.get("s_aux") is not None for call in calls):
        remarks.append("its own learned sinks, beside the pseudo scores")
    if any("position_ids" not in call.options for call in calls):
        remarks.append("rows are always counted: position_ids do not reach its attention")
    if mixes_packed_documents(name):
        remarks.append("no packed sequences: without StableMask it lets them mix")
    if misplaces_left_padding(name):
        remarks.append("left padding in a plain forward needs position_ids, as without StableMask")
    return {"supported": True, "remark": "; ".join(remarks)}


def mixes_packed_documents(name: str) -> bool:
    """Whether the stock model lets a packed document see the one before it."""
    first, second = tiny.tokens(1, 10), tiny.tokens(1, 10, seed=2)
    positions = torch.arange(10).repeat(2).unsqueeze(0)
    packed = logits(name, torch.cat([first, second], 1), position_ids=positions)
    return differ(packed[:, 10:], logits(name, second))


def misplaces_left_padding(name: str) -> bool:
    """Whether the stock model gives left-padded tokens other positions than unpadded ones."""
    ids = tiny.tokens(1, 10)
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = (torch.arange(15) >= 5).long().unsqueeze(0)
    return differ(logits(name, padded, attention_mask=mask)[:, 5:], logits(name, ids))


def logits(name: str, ids: Tensor, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = tiny.model(name)(input_ids=ids, use_cache=False, **inputs).logits
    return out


def differ(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm() / b.norm()) > 1e-3


def survey() -> dict[str, Line]:
    """The whole table, by model type."""
    lines = {name: supported(name) for name in tiny.SUPPORTED}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name not in lines and not model_class(name)._can_set_attn_implementation():
            lines[name] = refused(name)
    return dict(sorted(lines.items()))


if __name__ == "__main__":
    TABLE.write_text(json.dumps(survey(), indent=2) + "\n", encoding="utf-8")
