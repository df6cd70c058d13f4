"""Outliers and quantization, against definitions written out and integers multiplied as integers."""

import math

import pytest
import torch
from torch import nn

from stablemask.analysis.outliers import (
    find_layers,
    measure_activations,
    measure_quantization,
    perplexity,
    quantized,
    round_to_integers,
)
from tests.hf import tiny as stock
from tests.model.tiny import model, tokens


def test_activations_are_those_of_the_residual_stream() -> None:
    built = model()
    texts = [tokens(1, 9), tokens(2, 7, seed=2)]
    found = measure_activations(built, texts)
    with torch.no_grad():
        states = [built(ids, output_hidden_states=True).hidden_states for ids in texts]
    after_first = torch.cat([s[1].flatten() for s in states])
    centred = after_first - after_first.mean()
    assert found[0].largest == pytest.approx(float(after_first.abs().max()))
    assert found[0].kurtosis == pytest.approx(float(centred.pow(4).mean() / centred.pow(2).mean() ** 2))
    assert len(found) == 2


def test_an_outlier_is_found_where_it_was_put() -> None:
    built = model()
    plain = measure_activations(built, [tokens(1, 40)])

    def put(_module: nn.Module, _inputs: object, out: torch.Tensor) -> torch.Tensor:
        out[:, 17, 3] += 1000.0
        return out

    built.model.layers[0].register_forward_hook(put)
    found = measure_activations(built, [tokens(1, 40)])
    assert (found[0].position, found[1].position) == (17, 17)
    assert 900 < found[0].largest < 1100
    assert found[0].kurtosis > 20 * plain[0].kurtosis


def test_normal_numbers_have_kurtosis_3() -> None:
    built = model()
    noise = torch.randn(1, 60, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    built.model.layers[1].register_forward_hook(lambda *_: 5.0 + 2.0 * noise)
    assert measure_activations(built, [tokens(1, 60)])[1].kurtosis == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize("kind", ["tensor", "token"])
@pytest.mark.parametrize("make", [model, lambda: stock.model("gpt2", dtype=torch.float64)])
def test_the_product_is_that_of_integers(kind: str, make: object) -> None:
    built = make()  # type: ignore[operator]
    linear = next(m for m in find_layers(built)[0].modules() if type(m).__name__ in ("Linear", "Conv1D"))
    x = torch.randn(2, 5, linear.weight.shape[0 if type(linear).__name__ == "Conv1D" else 1]).double()
    weight = linear.weight.detach() if type(linear).__name__ == "Conv1D" else linear.weight.detach().T
    x_scale = (x.abs().amax() if kind == "tensor" else x.abs().amax(-1, keepdim=True)) / 127
    w_scale = weight.abs().amax(0) / 127
    integers = (x / x_scale).round().long() @ (weight / w_scale).round().long()
    expected = integers.double() * x_scale * w_scale
    if getattr(linear, "bias", None) is not None:
        expected = expected + linear.bias
    with quantized(built, activations=kind):  # type: ignore[arg-type]
        got = linear(x)
    assert torch.allclose(got, expected)
    assert not torch.allclose(got, linear(x), atol=1e-6), "it changed nothing"


def test_perplexity_and_its_gap() -> None:
    built = model()
    texts = [tokens(1, 30), tokens(1, 12, seed=5)]
    losses = [float(built(ids, labels=ids).loss.detach()) * (ids.shape[1] - 1) for ids in texts]
    assert perplexity(built, texts) == pytest.approx(math.exp(sum(losses) / 40))
    before = {name: p.clone() for name, p in built.named_parameters()}
    calls: list[int] = []
    gap = measure_quantization(built, texts, on_text=lambda: calls.append(1))
    assert gap.perplexity == pytest.approx(perplexity(built, texts))
    assert gap.quantized != gap.perplexity
    assert gap.increase == pytest.approx(gap.quantized / gap.perplexity - 1)
    assert len(calls) == 4
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in built.named_parameters())
    assert not any(m._forward_pre_hooks for m in built.modules())


@torch.no_grad()
def test_one_outlier_takes_the_precision_of_every_token() -> None:
    built = model()
    texts = [tokens(2, 60)]

    def put(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = inputs[0].clone()
        hidden[:, 0] *= 3000.0  # one token, before a linear layer
        return (hidden,)

    error = {}
    for outlier in (False, True):
        down = built.model.layers[0].mlp.down_proj
        hook = down.register_forward_pre_hook(put) if outlier else None
        plain = built(texts[0]).logits[:, 1:]
        for kind in ("tensor", "token"):
            with quantized(built, activations=kind):  # type: ignore[arg-type]
                error[outlier, kind] = float((built(texts[0]).logits[:, 1:] - plain).norm() / plain.norm())
        if hook is not None:
            hook.remove()
    assert error[True, "tensor"] > 2 * error[False, "tensor"]
    assert error[True, "token"] < 2 * error[False, "token"]


def test_rounding_by_hand() -> None:
    x = torch.tensor([[127.0, 1.4, -63.6], [0.0, 0.0, 0.0]])
    assert round_to_integers(x, (0, 1)).tolist() == [[127.0, 1.0, -64.0], [0.0, 0.0, 0.0]]
    assert torch.allclose(round_to_integers(x, (0,))[0], x[0])


@pytest.mark.parametrize("name", sorted(stock.SUPPORTED))
def test_every_supported_architecture_has_its_layers_found(name: str) -> None:
    built = stock.model(name)
    assert len(measure_activations(built, [stock.tokens(1, 6)])) == stock.LAYERS
    if name in ("gpt_oss", "mixtral"):
        with pytest.raises(ValueError, match="experts in one tensor"):
            measure_quantization(built, [stock.tokens(1, 6)])
    else:
        gap = measure_quantization(built, [stock.tokens(1, 6)])
        assert 0 < abs(gap.increase) < 0.5


def test_errors() -> None:
    with pytest.raises(ValueError, match="activations: got 'row'"), quantized(model(), activations="row"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="texts: got 1 tokens"):
        perplexity(model(), [tokens(1, 1)])
    with pytest.raises(ValueError, match="texts: got none"):
        measure_activations(model(), [])
