"""Every architecture against the same stock model with a dense float64 attention that is not ours."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import stablemask.hf
from stablemask.hf.interface import Rows
from tests.hf import oracle, tiny

HORIZON = 16
LENGTHS = [9, HORIZON, 29]
TOLERANCE = 1e-6  # of the norm; models round to float32 inside, whatever their dtype


def off_by(model: PreTrainedModel, length: int, **wrong: object) -> float:
    """How far the model with StableMask is from the oracle, relative to what StableMask changes at all."""
    ids = tiny.tokens(2, length)
    expected = oracle.logits(model, ids, oracle.Paper(horizon=HORIZON))
    with torch.no_grad():
        stock = model(input_ids=ids, use_cache=False).logits
        stablemask.hf.enable(model, **({"gamma": 0.5, "horizon": HORIZON} | wrong))
        got = model(input_ids=ids, use_cache=False).logits
    stablemask.hf.disable(model)
    return float((got - expected).norm() / (stock - expected).norm())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_logits_are_those_of_the_dense_computation(name: str, length: int) -> None:
    assert off_by(tiny.model(name, dtype=torch.float64), length) <= TOLERANCE


def shifted(positions: Callable[[Rows, Tensor | None], Tensor]) -> Callable[[Rows, Tensor | None], Tensor]:
    return lambda rows, position_ids: positions(rows, position_ids) + 1


@pytest.mark.parametrize("control", ["shifted positions", "horizon of the batch", "reversed heads"])
@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_a_wrong_model_is_found(name: str, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(name, dtype=torch.float64)
    wrong: dict[str, object] = {}
    if control == "shifted positions":
        monkeypatch.setattr(Rows, "positions", shifted(Rows.positions))
    elif control == "horizon of the batch":
        wrong = {"horizon": 9}
    else:
        wrong = {"gamma": oracle.SLOPES[model.config.num_attention_heads][::-1]}
    assert off_by(model, 9, **wrong) > 1000 * TOLERANCE
