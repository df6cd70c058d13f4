"""The models that are compared, all with the same weights, and the float64 truth they are held against.

``stock`` is transformers' Llama with PyTorch's own attention, ``enabled`` the same after
``stablemask.hf.enable``, ``decoder`` is ``StableMaskForCausalLM``. The truth is stock Llama once more, in
float64, under an attention that forms the paper's A⊙C + P, softmax, ⊙C as dense matrices.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import stablemask.hf
from stablemask.model import StableMaskConfig, StableMaskForCausalLM

Subject = Literal["stock", "decoder", "enabled"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
Tokens = Annotated[Tensor, "B T"]
Results = dict[str, Tensor]

_DENSE = "dense_paper"


def make_model(
    subject: Subject, config: StableMaskConfig, *, dtype: torch.dtype = torch.float32, dense: bool = False
) -> PreTrainedModel:
    """A model with the weights that every subject has.

    Args:
        subject: Which model.
        config: Sizes, and the parameters of StableMask.
        dtype: Of the weights; they are drawn in float32.
        dense: Give a Llama the dense attention, with the config's pseudo scores if it is ``enabled``.
    """
    torch.manual_seed(0)
    decoder = StableMaskForCausalLM(config)
    if subject == "decoder":
        nn.Module.to(decoder, dtype)
        return decoder
    llama = LlamaForCausalLM(_llama_config(config))
    llama.load_state_dict(decoder.state_dict())
    del decoder
    if dense:
        AttentionInterface.register(_DENSE, _dense_attention)
        AttentionMaskInterface.register(_DENSE, lambda **_: None)
        llama.config.paper = config.scores if subject == "enabled" else None
        llama.set_attn_implementation(_DENSE)
    elif subject == "enabled":
        scores = config.scores
        assert scores is not None
        stablemask.hf.enable(llama, gamma=scores.gamma, horizon=scores.horizon, headwise=scores.headwise)
    nn.Module.to(llama, dtype)
    return llama


def draw_tokens(config: StableMaskConfig, batch: int, length: int) -> Tokens:
    """Random tokens from a fixed seed."""
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def training_step(
    model: PreTrainedModel, tokens: Tokens, *, optimizer: bool
) -> Callable[[], Annotated[Tensor, ""]]:
    """Forward and backward; with the optimizer also clipping and AdamW, as the Trainer calls them.

    The learning rate is 0: every operation is done, and the model stays where it is for the next call.
    """
    model.train()
    adam = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True) if optimizer else None

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if adam is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
        return loss.detach()

    return step


def cached_step(model: PreTrainedModel, tokens: Tokens) -> Callable[[], Tensor]:
    """The last token through the model, all others being in its cache; returns the logits."""
    model.eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    last = tokens[:, -1:]

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=last, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def uncached_step(model: PreTrainedModel, tokens: Tokens) -> Callable[[], Tensor]:
    """All tokens through the model, as without a cache for every new one; returns the last logits."""
    model.eval()

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
        return logits

    return step


class Truth:
    """Loss, gradients and logits in float64, and the errors of the stock model, which set the budget.

    A result may be twice as far from the truth as that of the stock model in float32 is from its own, and
    two units of rounding more. Gradients are compared kind by kind: of all query projections, and so on.
    """

    def __init__(self, config: StableMaskConfig, tokens: Tokens) -> None:
        self.config = config
        self.tokens = tokens

    def training_error(self, model: PreTrainedModel) -> float:
        """The largest error of loss, logits and gradients as a share of its budget."""
        return self._worst(_training_results(model, self.tokens), *self._training)

    def decoding_error(self, step: Callable[[], Tensor]) -> float:
        """The same for the logits that a step of decoding returns."""
        return self._worst({"logits": step()}, *self._decoding)

    @staticmethod
    def _worst(actual: Results, exact: Results, stock_errors: dict[str, float]) -> float:
        errors = relative_errors(actual, exact)
        eps = torch.finfo(torch.float32).eps
        return max(error / (2 * max(stock_errors[name], eps) + 2 * eps) for name, error in errors.items())

    @cached_property
    def _training(self) -> tuple[Results, dict[str, float]]:
        def exact(subject: Subject) -> Results:
            return _exact_results(self._dense(subject), self.tokens)

        stock = _training_results(make_model("stock", self.config), self.tokens)
        return exact("enabled"), relative_errors(stock, exact("stock"))

    @cached_property
    def _decoding(self) -> tuple[Results, dict[str, float]]:
        def exact(subject: Subject) -> Results:
            return {"logits": uncached_step(self._dense(subject), self.tokens)()}

        stock = {"logits": cached_step(make_model("stock", self.config), self.tokens)()}
        return exact("enabled"), relative_errors(stock, exact("stock"))

    def _dense(self, subject: Subject) -> PreTrainedModel:
        return make_model(subject, self.config, dtype=torch.float64, dense=True)


def relative_errors(actual: Results, exact: Results) -> dict[str, float]:
    """‖x − exact‖ / ‖exact‖ of each; infinite for what is missing or has another shape."""
    errors = {}
    for name, right in exact.items():
        x = actual.get(name)
        if x is None or x.shape != right.shape or not bool(x.isfinite().all()):
            errors[name] = math.inf
        else:
            errors[name] = float((x.double() - right).norm() / right.norm())
    return errors


def _training_results(model: PreTrainedModel, tokens: Tokens) -> Results:
    results = {"loss": training_step(model, tokens, optimizer=False)()}
    return results | _gradients(model) | {"logits": _logits(model.eval(), tokens)}


def _exact_results(model: PreTrainedModel, tokens: Tokens) -> Results:
    """The same in float64 throughout: the loss of transformers rounds logits to float32."""
    logits = _logits(model, tokens, grad=True)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return {"loss": loss.detach(), **_gradients(model), "logits": logits.detach()}


def _logits(model: PreTrainedModel, tokens: Tokens, *, grad: bool = False) -> Tensor:
    with torch.set_grad_enabled(grad):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _gradients(model: PreTrainedModel) -> Results:
    """By kind of parameter; the model gives them up."""
    kinds = defaultdict(list)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        kinds[name.split(".")[-2]].append(parameter.grad.flatten())
    gradients = {kind: torch.cat(parts) for kind, parts in kinds.items()}
    model.zero_grad()
    return gradients


def _llama_config(config: StableMaskConfig) -> LlamaConfig:
    widths = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    same = (*widths, *counts, "rms_norm_eps")
    llama = LlamaConfig(
        **{name: getattr(config, name) for name in same},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
    )
    llama._attn_implementation = "sdpa"  # noqa: SLF001
    return llama


def _dense_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[Tensor, None]:
    """The equation over all N columns, of which the sequence has the first."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    length, heads = query.shape[2], query.shape[1]
    scores = module.config.paper
    products = query @ key.mT * scaling
    if scores is None:
        above = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = products.masked_fill(above, -math.inf).softmax(-1)
    else:
        assert scores.horizon is not None
        visible, pseudo = scores.dense(scores.horizon, heads)
        visible = visible[:length, :length]
        columns = nn.functional.pad(products * visible, (0, scores.horizon - length))
        weights = (columns + pseudo[:, :length]).softmax(-1)[..., :length] * visible
    return (weights @ value).transpose(1, 2).contiguous(), None
