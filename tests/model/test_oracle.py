"""The logits of every kind of model equal those of the decoder written again in ``dense``."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stablemask.model import StableMaskForCausalLM
from tests.model import dense, tiny

LENGTHS = (tiny.HORIZON - 4, tiny.HORIZON, tiny.HORIZON + 8)
VARIANTS: list[dict[str, Any]] = [
    {"gated": False, "hidden_act": "relu"},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"num_attention_heads": 6, "num_key_value_heads": 3},
    {"sliding_window": 5},
    {"sliding_window": 5, "position": "alibi"},
    {"gamma": [0.9, 0.0, 0.01, 3.0]},
    {"gamma": 0.3, "headwise": False, "base": 1.5},
    {"gamma": 0.7, "horizon": "infinite"},
    {"remedy": "artificial_token", "artificial_zero": True, "artificial_tokens": 2},
    {"position": "sinusoidal", "remedy": "artificial_token"},
    {"rope_theta": 100.0, "rms_norm_eps": 1e-3},
]


def deviation(
    model: StableMaskForCausalLM, expected_of: StableMaskForCausalLM, ids: Tensor, **inputs: Any
) -> float:
    settings = expected_of.config.to_dict()
    expected = torch.stack([dense.logits(expected_of.state_dict(), settings, row) for row in ids])
    with torch.no_grad():
        return tiny.difference(model(ids, **inputs).logits, expected)


@pytest.mark.parametrize(("position", "remedy"), tiny.EVERY)
def test_logits_are_those_of_the_dense_decoder(position: str, remedy: str) -> None:
    model = tiny.model(position, remedy)
    for length in LENGTHS:
        assert deviation(model, model, tiny.tokens(2, length)) < tiny.EXACT


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_settings_mean_what_they_say(settings: dict[str, Any]) -> None:
    model = tiny.model(**settings)
    assert deviation(model, model, tiny.tokens(1, LENGTHS[-1])) < tiny.EXACT


def test_float32_is_close() -> None:
    model = tiny.model().float()
    assert deviation(model, model, tiny.tokens(2, LENGTHS[-1])) < 1e-5


@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "none"])
def test_rows_shifted_by_one_are_found(position: str) -> None:
    model, ids = tiny.model(position), tiny.tokens(1, LENGTHS[0])
    shifted = torch.arange(1, LENGTHS[0] + 1).unsqueeze(0)
    assert deviation(model, model, ids, position_ids=shifted) > 1e-3


def test_a_horizon_taken_from_the_batch_is_found() -> None:
    ids = tiny.tokens(1, LENGTHS[0])
    assert deviation(tiny.model(horizon=LENGTHS[0]), tiny.model(), ids) > 1e-3


def test_heads_in_reverse_order_are_found() -> None:
    scores = tiny.model().config.scores
    assert scores is not None
    reverse = scores.gammas(4).flip(0).tolist()
    assert deviation(tiny.model(gamma=reverse), tiny.model(), tiny.tokens(1, LENGTHS[0])) > 1e-3


def test_key_only_alibi_is_found() -> None:
    """slope · j instead of slope · (j − i): the same under plain softmax, another model under StableMask."""
    model, ids = tiny.model("alibi"), tiny.tokens(1, LENGTHS[0])
    slopes = torch.tensor(dense.alibi(4), dtype=torch.float64)
    keys = slopes[:, None, None] * torch.arange(LENGTHS[0])
    causal = torch.ones(LENGTHS[0], LENGTHS[0], dtype=torch.bool).tril()
    plain = tiny.model("none")
    plain.load_state_dict(model.state_dict())
    mask = keys.expand(4, LENGTHS[0], -1).masked_fill(~causal, -torch.inf).unsqueeze(0)
    assert deviation(plain, model, ids, attention_mask=mask) > 1e-3
