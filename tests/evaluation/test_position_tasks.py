"""Position tasks: what is asked, what can be learned, and what cannot."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from stablemask.evaluation import position_tasks as module
from stablemask.evaluation.position_tasks import (
    ENCODINGS,
    RELATIVE,
    REMEDIES,
    TASKS,
    Encoding,
    Setting,
    Task,
    accuracy,
    ceiling,
    configuration,
    position_task,
    printed,
    sequences,
    train,
)
from stablemask.model import StableMaskForCausalLM

LENGTH = 16
QUICK = Setting(layers=2, width=32, heads=4, steps=120, batch_size=16, learning_rate=1e-2)


def learned(task: Task, position: str, remedy: str = "none", **options: Any) -> dict[str, float]:
    given = {"length": LENGTH, "setting": QUICK, **options}
    return dict(position_task(task, Encoding(position, remedy), **given))


def test_sequences_of_each_task() -> None:
    ids, labels = sequences("mapping", torch.arange(4), 4, 4)
    assert (ids.tolist(), labels.tolist()) == ([[0, 0, 0, 0]], [[1, 2, 3, 4]])
    ids, labels = sequences("odd_even", torch.arange(4), 5, 4)
    assert (ids.tolist(), labels.tolist()) == ([[0] * 5], [[1, 2, 1, 2, 1]])
    ids, labels = sequences("identification", torch.tensor([2, 0]), 3, 4)
    assert ids.tolist() == [[0, 0, 9], [9, 0, 0]]
    assert labels.tolist() == [[-100, -100, 3], [1, -100, -100]]


def test_the_rows_of_the_table() -> None:
    assert len(set(ENCODINGS)) == 6 + len(RELATIVE) * len(REMEDIES) == 21
    for row, values in printed()["accuracy"].items():
        assert Encoding(row) in ENCODINGS
        assert set(values) == set(TASKS)


@pytest.mark.parametrize("task", ["mapping", "odd_even"])
@pytest.mark.parametrize("position", [*RELATIVE, "none"])
def test_a_relative_encoding_alone_stays_below_its_ceiling(task: Task, position: str) -> None:
    """Asserted of trained weights, and of random ones that are large enough to tell anything apart."""
    limit = ceiling(task, Encoding(position), LENGTH)
    assert limit == (1 / LENGTH if task == "mapping" else 1 / 2)
    values = learned(task, position)
    assert max(values["accuracy"], values["accuracy_beyond"]) <= limit
    model = StableMaskForCausalLM(configuration(Encoding(position), LENGTH, QUICK)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 1.0)
    assert accuracy(model, task, torch.arange(LENGTH), LENGTH) <= limit


@pytest.mark.parametrize("position", ["rope", "alibi"])
@pytest.mark.parametrize("task", TASKS)
def test_stablemask_goes_far_above_the_ceiling(task: Task, position: str) -> None:
    steps = 350 if task == "odd_even" else 90
    setting = replace(QUICK, steps=steps, learning_rate=5e-3 if task == "odd_even" else 1e-2)
    values = learned(task, position, "stablemask", setting=setting)
    assert values["accuracy"] > 0.6
    assert ceiling(task, Encoding(position, "stablemask"), LENGTH) is None


def test_a_table_of_positions_solves_every_task_and_ends_with_it() -> None:
    for task in TASKS:
        values = learned(task, "learned", setting=replace(QUICK, steps=50))
        assert values["accuracy"] == 1.0
        assert "accuracy_beyond" not in values


def test_an_odd_length_has_its_own_ceiling() -> None:
    assert ceiling("odd_even", Encoding("rope"), 7) == 4 / 7
    assert ceiling("identification", Encoding("rope"), 7) is None


def test_accuracy_counts_the_positions_asked() -> None:
    """A model whose output layer always says "4", or always "2"."""
    model = StableMaskForCausalLM(configuration(Encoding("none"), LENGTH, QUICK)).double().eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    for token, task, positions, share in (
        (4, "mapping", torch.arange(LENGTH), 1 / LENGTH),
        (4, "identification", torch.arange(LENGTH), 1 / LENGTH),
        (4, "identification", torch.tensor([3, 5]), 1 / 2),
        (2, "odd_even", torch.arange(LENGTH, 2 * LENGTH), 1 / 2),
        (LENGTH + 1, "mapping", torch.arange(LENGTH, 2 * LENGTH), 1 / LENGTH),
    ):
        model.model.norm.weight.data.fill_(1.0)
        model.lm_head.weight.data.zero_()
        hidden = model.model(torch.zeros(1, 1, dtype=torch.long), use_cache=False).last_hidden_state[0, 0]
        model.lm_head.weight.data[token] = hidden
        if task == "identification":  # [ABE] is the row that is asked
            abe = torch.full((1, 1), 2 * LENGTH + 1)
            model.lm_head.weight.data[token] = model.model(abe, use_cache=False).last_hidden_state[0, 0]
        assert math.isclose(accuracy(model, task, positions, LENGTH), share)  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ENCODINGS, ids="+".join)
def test_the_zeros_that_sequences_share_can_be_read_once(encoding: Encoding) -> None:
    """The loss of identification and its gradients, against the sequences written out."""
    torch.manual_seed(0)
    setting = Setting(width=16, heads=2)
    model = StableMaskForCausalLM(configuration(encoding, LENGTH, setting)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    positions = torch.tensor([5, 0, 15, 1])
    ids, labels = sequences("identification", positions, LENGTH, LENGTH)
    losses = [
        torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits.mT, labels),
        module._loss(model, "identification", positions, LENGTH),
    ]
    assert torch.allclose(losses[1], losses[0], rtol=1e-10)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for given, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.allclose(given, expected, rtol=1e-8, atol=1e-12)


def test_seeds_differ_and_repeat() -> None:
    short = Setting(width=16, heads=2, steps=3)
    losses = [learned("identification", "rope", seed=s, setting=short)["loss"] for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_training_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    train("mapping", Encoding("rope"), LENGTH, 0, Setting(width=16, heads=2, steps=1), "cpu")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("task", "length", "message"), [("maps", 8, "task: got 'maps'"), ("mapping", 1, "length: got 1")]
)
def test_wrong_arguments(task: Any, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learned(task, "rope", length=length)
