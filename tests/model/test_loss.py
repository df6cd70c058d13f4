"""The loss without logits is the loss with them, gradients included, and the logits never stand whole."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

from stablemask.model import StableMaskForCausalLM
from stablemask.model.loss import OutputLayer, summed_loss
from tests.model import tiny

ROWS, WIDTH, VOCABULARY = 37, 8, 101


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (
        torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[[0, 5, 6, 36]] = -100
    return hidden, weight, labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000, None])
def test_loss_and_gradients_are_those_of_the_logits(chunk: int | None) -> None:
    hidden, weight, labels = problem(torch.float64)
    expected = whole(hidden, weight, labels)
    grads = torch.autograd.grad(expected / 33, [hidden, weight])
    given = summed_loss(hidden, weight, labels, chunk=chunk)
    assert tiny.difference(given.detach(), expected.detach()) < 1e-14
    for got, right in zip(torch.autograd.grad(given / 33, [hidden, weight]), grads, strict=True):
        assert tiny.difference(got, right) < 1e-14


@pytest.mark.parametrize("learned", [(True, False), (False, True), (False, False)])
def test_what_is_not_learned_gets_no_gradient(learned: tuple[bool, bool]) -> None:
    hidden, weight, labels = problem(torch.float64)
    right = torch.autograd.grad(whole(hidden, weight, labels), [hidden, weight])
    leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip((hidden, weight), learned, strict=True)]
    loss = summed_loss(*leaves, labels, chunk=10)
    assert loss.requires_grad == any(learned)
    if any(learned):
        loss.backward()
    for leaf, grad, wanted in zip(leaves, right, learned, strict=True):
        assert (leaf.grad is not None) == wanted
        assert leaf.grad is None or tiny.difference(leaf.grad, grad) < 1e-14


def test_rows_without_a_label_count_for_nothing_even_where_they_are_not_numbers() -> None:
    hidden, weight, labels = problem(torch.float64)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    loss = summed_loss(hidden, weight, labels, chunk=7)
    loss.backward()
    kept = labels != -100
    expected = whole(hidden[kept].detach(), weight.detach(), labels[kept])
    assert tiny.difference(loss.detach(), expected) < 1e-14
    assert hidden.grad is not None
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert hidden.grad[~kept].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_with_logits(dtype: torch.dtype) -> None:
    """Against float64 on the same inputs; chunks add up in float32, as one product does inside."""
    hidden, weight, labels = problem(dtype)
    precise = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = torch.autograd.grad(whole(*precise, labels), precise)
    plain = torch.autograd.grad(
        F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum"), [hidden, weight]
    )
    given = torch.autograd.grad(summed_loss(hidden, weight, labels, chunk=10), [hidden, weight])
    for got, usual, right in zip(given, plain, exact, strict=True):
        assert got.dtype == dtype
        error, budget = ((t.double() - right).norm() / right.norm() for t in (got, usual))
        assert error <= 1.5 * budget + torch.finfo(dtype).eps / 4


def test_autocast_is_that_of_a_linear_layer() -> None:
    hidden, weight, labels = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
        given = summed_loss(hidden, weight, labels, chunk=1000)
    assert torch.allclose(given, expected, rtol=1e-6)
    assert given.dtype == torch.float32
    given.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def largest_of_a_step(model: StableMaskForCausalLM, ids: Tensor, *, skip_logits: bool) -> int:
    with Largest() as largest:
        model(ids, labels=ids, skip_logits=skip_logits).loss.backward()
    return largest.numel


def test_no_tensor_is_as_large_as_the_logits() -> None:
    vocabulary = 3001
    model, ids = tiny.model(vocab_size=vocabulary), tiny.tokens(5, 200)
    assert largest_of_a_step(model, ids, skip_logits=False) >= ids.numel() * vocabulary
    assert largest_of_a_step(model, ids, skip_logits=True) == 256 * vocabulary


def test_the_model_trains_with_it() -> None:
    model, ids = tiny.model(), tiny.tokens(3, 11)
    labels = ids.clone()
    labels[0, :4] = -100
    for options in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}):
        model.zero_grad()
        logits = model.eval()(ids).logits
        summed = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        expected = summed / int(options.get("num_items_in_batch", 3 * 10 - 3))
        expected.backward()
        right = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        given = model.train()(ids, labels=labels, **options)
        assert given.logits is None
        given.loss.backward()
        assert tiny.difference(given.loss.detach(), expected.detach()) < tiny.EXACT
        for name, parameter in model.named_parameters():
            assert tiny.difference(parameter.grad, right[name]) < tiny.EXACT, name


@torch.no_grad()
def test_shifted_labels_and_another_ignored_label() -> None:
    model, ids = tiny.model().train(), tiny.tokens(2, 9)
    shifted = F.pad(ids[:, 1:], (0, 1), value=0)
    given = model(ids, labels=ids, shift_labels=shifted, ignore_index=0).loss
    assert tiny.difference(given, model(ids, labels=ids).loss) < tiny.EXACT


def test_logits_are_there_for_who_asks() -> None:
    model, ids = tiny.model(), tiny.tokens(2, 9)
    assert model.train()(ids).logits is not None
    assert model.train()(ids, labels=ids, skip_logits=False).logits is not None
    assert model.eval()(ids, labels=ids, skip_logits=True).logits is None


@torch.no_grad()
def test_another_loss_or_output_layer_is_obeyed() -> None:
    model, ids = tiny.model().train(), tiny.tokens(2, 9)
    right = model(ids, labels=ids, skip_logits=False).loss
    model.loss_function = lambda **given: 2 * ForCausalLMLoss(**given)
    assert tiny.difference(model(ids, labels=ids).loss, 2 * right) < tiny.EXACT

    class Doubled(torch.nn.Module):
        def __init__(self, inner: OutputLayer) -> None:
            super().__init__()
            self.weight = inner.weight
            self.inner = inner

        def forward(self, hidden: Tensor) -> Tensor:
            doubled: Tensor = 2 * self.inner(hidden)
            return doubled

    model = tiny.model().train()
    model.lm_head = Doubled(model.lm_head)
    expected = ForCausalLMLoss(
        2 * model.lm_head.inner(model.model(ids).last_hidden_state), ids, tiny.VOCABULARY
    )
    assert tiny.difference(model(ids, labels=ids).loss, expected) < tiny.EXACT


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own doing
def test_it_compiles_in_one_piece() -> None:
    hidden, weight, labels = problem(torch.float64)
    compiled = torch.compile(
        lambda *given: summed_loss(*given, chunk=10), fullgraph=True, backend="aot_eager"
    )
    expected = torch.autograd.grad(summed_loss(hidden, weight, labels), [hidden, weight])
    given = torch.autograd.grad(compiled(hidden, weight, labels), [hidden, weight])
    for got, right in zip(given, expected, strict=True):
        assert tiny.difference(got, right) < 1e-14
