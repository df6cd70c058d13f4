"""Registration, enable and disable, the table in the config, the warning."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

import stablemask.hf
from stablemask import PseudoScores
from stablemask.hf.schema import from_table, to_table
from tests.hf import tiny

PARAMETERS: dict[str, Any] = {"gamma": 0.5, "horizon": 16}


def test_importing_registers_both_functions() -> None:
    assert "stablemask" in AttentionInterface().valid_keys()
    assert "stablemask" in AttentionMaskInterface().valid_keys()


def test_the_name_alone_is_not_enough() -> None:
    model = AutoModelForCausalLM.from_config(tiny.config("llama"), attn_implementation="stablemask")
    with pytest.raises(TypeError, match=r"config\.stablemask: got None"):
        model(tiny.tokens(1, 5))


@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_disable_restores_bit_for_bit(name: str) -> None:
    model, ids = tiny.model(name), tiny.tokens(2, 19)
    before, written = model(ids).logits, model.config.to_json_string()
    kind, attention = type(model.config), model.config._attn_implementation
    stablemask.hf.enable(model, **PARAMETERS)
    assert not torch.equal(model(ids).logits, before)
    stablemask.hf.disable(model)
    assert torch.equal(model(ids).logits, before)
    assert (type(model.config), model.config._attn_implementation) == (kind, attention)
    assert model.config.to_json_string() == written
    with pytest.raises(ValueError, match="not switched on"):
        stablemask.hf.disable(model)


def test_enable_again_changes_the_parameters() -> None:
    model, ids = tiny.model("llama"), tiny.tokens(1, 19)
    stablemask.hf.enable(model, **PARAMETERS)
    first = model(ids).logits
    stablemask.hf.enable(model, gamma=0.25, horizon=16)
    assert not torch.equal(model(ids).logits, first)
    stablemask.hf.enable(model, **PARAMETERS)
    assert torch.equal(model(ids).logits, first)


def test_the_attention_of_an_enabled_model_cannot_be_replaced_in_passing() -> None:
    model = tiny.model("llama")
    stablemask.hf.enable(model, **PARAMETERS)
    with pytest.raises(ValueError, match=r"call stablemask\.hf\.disable"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"call stablemask\.hf\.disable"):
        model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match=r"call stablemask\.hf\.disable"):
        AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa")


def test_copies_of_the_config_and_the_model_have_stablemask_too() -> None:
    model, ids = tiny.model("llama"), tiny.tokens(1, 19)
    stablemask.hf.enable(model, **PARAMETERS)
    expected = model(ids).logits
    unpickled = pickle.loads(pickle.dumps(model.config))  # noqa: S301 - our own bytes
    for config in (copy.deepcopy(model.config), copy.copy(model.config), unpickled):
        again = AutoModelForCausalLM.from_config(config)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again.eval()(ids).logits, expected)
    assert torch.equal(copy.deepcopy(model)(ids).logits, expected)
    stablemask.hf.disable(model)
    assert not torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    "scores",
    [
        PseudoScores(0.5, horizon=16),
        PseudoScores(0.25, horizon=None, headwise=False),
        PseudoScores([0.5, 0.25, 0.0, 1.0], horizon=16, base=-1.5),
        PseudoScores(0.5, horizon=16, base=-math.inf),
    ],
)
def test_the_table_in_the_config_says_everything(scores: PseudoScores) -> None:
    assert from_table(to_table(scores)) == scores


def test_the_table_is_the_documented_one() -> None:
    expected = {"version": 1, "gamma": 0.5, "headwise": True, "horizon": 2048, "base": "-inf"}
    assert to_table(PseudoScores(0.5, horizon=2048, base=-math.inf)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"extra": 1}, "allowed are exactly"),
        ({"gamma": -1.0}, "gamma: got -1.0"),
    ],
)
def test_a_foreign_table_is_an_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_table({**to_table(PseudoScores(0.5, horizon=16)), **change})


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"gamma": -0.5, "horizon": 16}, ValueError, "gamma: got -0.5"),
        ({"gamma": 0.5, "horizon": 0}, ValueError, "horizon: got 0"),
        ({"gamma": [0.5, 0.5], "horizon": 16}, ValueError, "got 2 values for 4 heads"),
        ({"gamma": 0.5}, TypeError, "horizon"),
    ],
)
def test_wrong_parameters_change_nothing(
    parameters: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny.model("llama")
    written = model.config.to_json_string()
    with pytest.raises(error, match=message):
        stablemask.hf.enable(model, **parameters)
    assert model.config.to_json_string() == written


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="allowed is a PreTrainedModel"):
        stablemask.hf.enable(torch.nn.Linear(2, 2), **PARAMETERS)  # type: ignore[arg-type]


def test_pretrained_weights_are_warned_about_once_and_new_ones_not(tmp_path: object) -> None:
    model = tiny.model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stablemask.hf.enable(model, **PARAMETERS)
        stablemask.hf.disable(model)
    model.save_pretrained(str(tmp_path))
    trained = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stablemask.hf.enable(trained, **PARAMETERS, base=-math.inf)
        stablemask.hf.disable(trained)
    with pytest.warns(UserWarning, match=r"trained without StableMask.*AnnealBase"):
        stablemask.hf.enable(trained, **PARAMETERS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stablemask.hf.enable(trained, **PARAMETERS)
