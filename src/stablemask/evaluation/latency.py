"""The price of StableMask in generation: ratios to the same weights without it, by prompt and output.

* baseline: plain attention, with a cache.
* SM-I: StableMask with a cache, which it needs nothing new for, as σ depends on the position alone.
* SM: StableMask without a cache, as the paper's first form has to do it: all of the text again every time.

All three generate the same number of tokens from the same prompt, interleaved by the rule of ``measuring``.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import stablemask.hf
from stablemask.evaluation.models import training_length
from stablemask.hf.config import is_switched
from stablemask.measuring import Comparison, Rule, compare, cuda_clock, threads
from stablemask.model import StableMaskConfig, StableMaskForCausalLM
from stablemask.model.configuration import REMEDIES

OnRound = Callable[[int], object]
Tokens = Annotated[Tensor, "B T"]


@dataclass(frozen=True)
class Latency:
    """How to measure latency.

    Args:
        prompts: Lengths of the prompt.
        outputs: Tokens generated after it.
        batch_size: Prompts at once.
        rounds: Of the ratio to StableMask without a cache; that of SM-I goes on until it is narrow.
        max_seconds: … but not much longer than this.
        num_threads: Of the processor; its time is then what counts.
    """

    prompts: tuple[int, ...] = (16, 64, 256)
    outputs: tuple[int, ...] = (16, 64)
    batch_size: int = 1
    rounds: int = 20
    max_seconds: float = 60.0
    num_threads: int = 1

    def __post_init__(self) -> None:
        """Refuse what no model could make right."""
        for name, values in (("prompts", self.prompts), ("outputs", self.outputs)):
            if not values or min(values) < 1:
                raise ValueError(f"{name}: got {values}; allowed: positive integers, at least one")
        for name, least in (("batch_size", 1), ("rounds", 2), ("num_threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: from {least} on")


def latency(
    model: PreTrainedModel,
    *,
    prompt: int,
    output: int,
    setting: Latency = Latency(),
    on_round: OnRound | None = None,
) -> Iterator[tuple[str, float]]:
    """Time the generation of ``output`` tokens after a prompt.

    Args:
        model: With StableMask or without; the other of the two is made from its weights.
        prompt: Tokens of the prompt.
        output: Tokens generated.
        setting: Batch, rounds and threads.
        on_round: Called after every round.

    Yields:
        ``seconds/baseline``; ``ratio/SM-I`` and ``ratio/SM``, to the baseline; ``ratio/A/A``, the baseline to
        itself, which is the noise; and with ``/low`` and ``/high`` behind it the 95 % interval of each.

    Raises:
        ArithmeticError: With a cache StableMask does not compute what it computes without.
    """
    baseline, ours = twins(model)
    generator = torch.Generator().manual_seed(0)
    size = (setting.batch_size, prompt)
    ids = torch.randint(baseline.config.vocab_size, size, generator=generator).to(model.device)
    check_cache(baseline, ours, ids)
    on_gpu = model.device.type == "cuda"
    clock = cuda_clock if on_gpu else time.process_time

    def against(candidate: Callable[[], object], rule: Rule) -> Comparison:
        return compare(
            lambda: generate(baseline, ids, output), candidate, clock=clock, rule=rule, on_round=on_round
        )

    rounds = setting.rounds
    with threads(setting.num_threads):
        cached = against(
            lambda: generate(ours, ids, output),
            Rule(min_rounds=rounds, max_rounds=5 * rounds, max_seconds=setting.max_seconds),
        )
        whole = against(
            lambda: generate(ours, ids, output, use_cache=False), Rule(min_rounds=rounds, max_rounds=rounds)
        )
    yield "seconds/baseline", cached.baseline_seconds
    for name, ratio in (("SM-I", cached.ratio), ("SM", whole.ratio), ("A/A", cached.noise)):
        yield f"ratio/{name}", ratio.median
        yield f"ratio/{name}/low", ratio.low
        yield f"ratio/{name}/high", ratio.high


@torch.inference_mode()
def generate(model: PreTrainedModel, ids: Tokens, output: int, *, use_cache: bool = True) -> Tokens:
    """The prompt and the ``output`` most likely tokens after it, one after the other."""
    cache = DynamicCache(config=model.config) if use_cache else None
    new = ids
    for _ in range(output):
        inputs = new if use_cache else ids
        out = model(input_ids=inputs, past_key_values=cache, use_cache=use_cache, logits_to_keep=1)
        new = out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
    return ids


def twins(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model without StableMask and with it, on the same weights; one of the two is the model itself."""
    if isinstance(model.config, StableMaskConfig):
        if model.config.remedy not in ("none", "stablemask"):
            raise ValueError(f"model: got remedy {model.config.remedy!r}; allowed: 'none' and 'stablemask'")
        if model.config.remedy == "stablemask":
            return _with_remedy(model, remedy="none"), model
        return model, _with_remedy(model, remedy="stablemask", horizon=training_length(model))
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    if is_switched(model.config):
        stablemask.hf.disable(twin)
        return twin, model
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # the weights know nothing of it; their speed does not care
        stablemask.hf.enable(twin, gamma=0.5, horizon=training_length(model))
    return model, twin


@torch.inference_mode()
def check_cache(baseline: PreTrainedModel, ours: PreTrainedModel, ids: Tokens) -> None:
    """Refuse to time something wrong: cached steps may differ from one pass as they do without StableMask."""
    plain, error = (_cache_error(model, ids) for model in (baseline, ours))
    budget = 2 * plain + 32 * torch.finfo(ours.dtype).eps
    if not error <= budget:
        raise ArithmeticError(
            f"latency: with a cache the logits are off by {error:.2g}, allowed {budget:.2g}"
        )


def _cache_error(model: PreTrainedModel, ids: Tokens, steps: int = 4) -> float:
    """Relative difference of the last logits, token by token against all at once."""
    text = generate(model, ids, steps)
    cache, logits = DynamicCache(config=model.config), torch.empty(0)
    for piece in text.split([ids.shape[1], *[1] * steps], 1):
        out = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits.double()
    whole = model(input_ids=text, use_cache=False, logits_to_keep=1).logits.double()
    return float((logits - whole).norm() / whole.norm())


def _with_remedy(model: PreTrainedModel, **settings: Any) -> StableMaskForCausalLM:
    belongs = REMEDIES["stablemask"].settings
    kept = {name: value for name, value in model.config.to_dict().items() if name not in belongs}
    with torch.device("meta"):
        twin = StableMaskForCausalLM(StableMaskConfig.from_dict({**kept, **settings}))
    nn.Module.to(twin, model.dtype)
    twin.load_state_dict(model.state_dict(), assign=True)
    nn.Module.eval(twin)
    return twin
