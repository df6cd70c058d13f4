"""Activation outliers, and what they cost when weights and activations become 8-bit integers (W8A8).

Bondarenko et al. (2023) trace the outliers that break quantization to heads that want to attend to nothing.
Two figures per layer measure them: the largest |activation|, and the kurtosis, which is 3 for a normal
distribution. The third is what counts: the perplexity of the quantized model beside its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

TokenIds = Annotated[Tensor, "B T"]
Granularity = Literal["tensor", "token"]

_LARGEST_INTEGER = 127


@dataclass(frozen=True)
class Activations:
    """The output of one layer, which is the residual stream after it, over all texts.

    Attributes:
        largest: max |x|.
        position: Where it is, as the 0-based position of its token.
        kurtosis: E[(x − μ)⁴] / σ⁴ over all tokens and dimensions.
    """

    largest: float
    position: int
    kurtosis: float


class QuantizationGap(NamedTuple):
    """Perplexity of a model as it is, and with quantized weights and activations."""

    perplexity: float
    quantized: float

    @property
    def increase(self) -> float:
        """By which share of itself the perplexity rises."""
        return self.quantized / self.perplexity - 1


def measure_activations(model: PreTrainedModel, texts: Sequence[TokenIds]) -> list[Activations]:
    """Outliers in the output of every layer.

    Examples:
        >>> worst = max(measure_activations(model, [input_ids]), key=lambda layer: layer.kurtosis)
    """
    layers = find_layers(model)
    sums = [_Moments() for _ in layers]
    with ExitStack() as undo:
        for layer, moments in zip(layers, sums, strict=True):
            undo.callback(layer.register_forward_hook(moments.see).remove)
        with torch.no_grad():
            for ids in texts:
                model(input_ids=ids, use_cache=False)
    return [moments.result() for moments in sums]


def measure_quantization(
    model: PreTrainedModel,
    texts: Sequence[TokenIds],
    *,
    activations: Granularity = "tensor",
    on_text: Callable[[], object] = lambda: None,
) -> QuantizationGap:
    """Perplexity before and after every linear layer of the decoder is quantized to W8A8.

    Args:
        model: A causal language model; it is left as it was.
        texts: Tokens, each tensor evaluated on its own.
        activations: One scale for all activations that enter a linear layer, or one for each token. With one
            for all, an outlier in one token takes the precision of every other: this is where sinks hurt.
        on_text: Called after every text, twice in total, for progress.
    """
    with quantized(model, activations=activations) as rounded:
        after = perplexity(rounded, texts, on_text)
    return QuantizationGap(perplexity(model, texts, on_text), after)


def perplexity(
    model: PreTrainedModel, texts: Sequence[TokenIds], on_text: Callable[[], object] = lambda: None
) -> float:
    """exp of the mean negative log-likelihood of all tokens but the first of each text."""
    total, count = 0.0, 0
    for ids in texts:
        if ids.shape[1] < 2:
            raise ValueError(f"texts: got {ids.shape[1]} tokens; allowed: texts of two or more")
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
        predicted = ids[:, 1:].numel()
        total, count = total + float(losses) * predicted, count + predicted
        on_text()
    return math.exp(total / count)


@contextmanager
def quantized(model: PreTrainedModel, *, activations: Granularity = "tensor") -> Iterator[PreTrainedModel]:
    """The model with W8A8 linear layers inside of its decoder layers, as they were afterwards.

    Integers are symmetric, from −127 to 127: a scale per output of a weight, a scale per call or per token of
    the activations, found from what enters. Products are those of the integers; they are added in floating
    point. Embeddings, normalisations, attention and the output layer keep their precision.
    """
    if activations not in ("tensor", "token"):
        raise ValueError(f"activations: got {activations!r}; allowed: tensor, token")
    layers = nn.ModuleList(find_layers(model))
    linear = [module for module in layers.modules() if isinstance(module, nn.Linear | Conv1D)]
    if any(weight.ndim > 2 for weight in layers.parameters()):
        got = f"{type(model).__name__}, with experts in one tensor"
        raise ValueError(f"model: got {got}; allowed: models whose weights are those of linear layers")
    dims = (0, 1, 2) if activations == "tensor" else (-1,)
    kept = [module.weight for module in linear]
    with ExitStack() as undo:
        for module in linear:
            per_output = (0,) if isinstance(module, Conv1D) else (1,)
            rounded = round_to_integers(module.weight.detach(), per_output)
            undo.callback(setattr, module, "weight", module.weight)
            module.weight = nn.Parameter(rounded, requires_grad=False)
            undo.callback(module.register_forward_pre_hook(_rounding(dims)).remove)
        yield model
    assert all(module.weight is weight for module, weight in zip(linear, kept, strict=True))


def round_to_integers(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x as integers times a scale, one scale for all entries along ``dims``."""
    dims = tuple(d for d in dims if d < x.ndim)
    largest = x.abs().amax(dims, keepdim=True)
    scale = torch.where(largest > 0, largest / _LARGEST_INTEGER, 1.0)
    return (x / scale).round() * scale


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model."""
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"model: got {type(model).__name__}; allowed: models with a list of {count} layers")


class _Moments:
    """Sums of powers of everything that a layer puts out, in float64, and the largest of it."""

    def __init__(self) -> None:
        self.count, self.largest, self.position = 0, 0.0, 0
        self.powers = torch.zeros(4, dtype=torch.float64)

    def see(self, _module: nn.Module, _inputs: object, output: Any) -> None:
        hidden = cast("Tensor", output[0] if isinstance(output, tuple) else output).detach()  # (B, T, width)
        per_token = hidden.abs().amax(-1).amax(0)
        if float(per_token.max()) > self.largest:
            self.largest, self.position = float(per_token.max()), int(per_token.argmax())
        self.count += hidden.numel()
        exact = hidden.double().flatten()
        self.powers += torch.stack([exact.pow(n).sum() for n in (1, 2, 3, 4)]).cpu()

    def result(self) -> Activations:
        if not self.count:
            raise ValueError("texts: got none; allowed: at least one")
        mean, second, third, fourth = (self.powers / self.count).tolist()
        variance = second - mean**2
        central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        kurtosis = central / variance**2 if variance > 0 else math.nan
        return Activations(self.largest, self.position, kurtosis)


def _rounding(dims: tuple[int, ...]) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (round_to_integers(inputs[0], dims), *inputs[1:])

    return hook
