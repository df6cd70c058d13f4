"""The configuration refuses what makes no sense, names it, and survives a round trip."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from stablemask import PseudoScores
from stablemask.model import SIZES, StableMaskConfig, StableMaskForCausalLM, StableMaskModel, named_config
from stablemask.model.sizes import parameter_counts
from tests.model import tiny

BAD: list[tuple[str, dict[str, Any]]] = [
    ("position", {"position": "rotary"}),
    ("remedy", {"remedy": "register"}),
    ("hidden_act", {"hidden_act": "swiglu"}),
    ("vocab_size", {"vocab_size": 0}),
    ("num_attention_heads", {"num_attention_heads": 0}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("hidden_size", {"hidden_size": 21, "head_dim": None}),
    ("head_dim", {"head_dim": 5}),
    ("hidden_size", {"hidden_size": 21, "position": "sinusoidal"}),
    ("sliding_window", {"sliding_window": 0}),
    ("attention_dropout", {"attention_dropout": 1.0}),
    ("rms_norm_eps", {"rms_norm_eps": -1e-6}),
    ("rope_theta", {"position": "alibi", "rope_theta": 500.0}),
    ("t5_buckets", {"t5_buckets": 16}),
    ("t5_buckets", {"position": "t5", "t5_buckets": 7}),
    ("t5_max_distance", {"position": "t5", "t5_max_distance": 4}),
    ("horizon", {"horizon": None}),
    ("horizon", {"horizon": 0}),
    ("horizon", {"horizon": "forever"}),
    ("horizon", {"remedy": "none", "horizon": 8}),
    ("gamma", {"gamma": -0.5}),
    ("gamma", {"gamma": [0.5, 0.5]}),
    ("gamma", {"gamma": 0.0, "headwise": False, "horizon": "infinite"}),
    ("gamma", {"remedy": "urpe", "gamma": 0.25}),
    ("base", {"base": math.inf}),
    ("base", {"base": "low"}),
    ("artificial_tokens", {"artificial_tokens": 2}),
    ("artificial_tokens", {"remedy": "artificial_token", "artificial_tokens": 0}),
    ("artificial_zero", {"remedy": "learned_sink", "artificial_zero": True}),
]


@pytest.mark.parametrize(("name", "settings"), BAD, ids=str)
def test_a_bad_value_is_named(name: str, settings: dict[str, Any]) -> None:
    settings = {"position": "rope", "remedy": "stablemask", "horizon": 12, **settings}
    if settings["remedy"] != "stablemask" and settings["horizon"] == 12:
        del settings["horizon"]
    small = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match=f"^{name}: got "):
        StableMaskConfig(**{**small, **settings})


@pytest.mark.parametrize(
    ("name", "value"), [("headwise", "yes"), ("horizon", 12.5), ("gated", 1.5), ("gamma", "0.5")]
)
def test_a_wrong_type_is_named(name: str, value: object) -> None:
    with pytest.raises(StrictDataclassError, match=name):
        StableMaskConfig(**{"horizon": 12, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["horizn", "sliding_windows", "positions", "remedie"])
def test_a_misspelt_setting_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: .*did you mean"):
        StableMaskConfig(**{"horizon": 12, name: 7})


def test_the_horizon_is_never_guessed() -> None:
    with pytest.raises(ValueError, match="horizon: got None"):
        StableMaskConfig(max_position_embeddings=512)


def test_a_bad_value_set_later_is_not_saved(tmp_path: Path) -> None:
    config = tiny.config()
    config.horizon = 0
    with pytest.raises(StrictDataclassError, match="horizon: got 0"):
        config.save_pretrained(tmp_path)


def test_scores() -> None:
    assert tiny.config(gamma=0.25, base=1.5).scores == PseudoScores(0.25, horizon=tiny.HORIZON, base=1.5)
    assert tiny.config(horizon="infinite").scores == PseudoScores(0.5, horizon=None)
    assert tiny.config(gamma=[0.1, 0.2, 0.3, 0.4]).scores == PseudoScores(
        [0.1, 0.2, 0.3, 0.4], horizon=tiny.HORIZON
    )
    assert tiny.config(remedy="softmax_plus_one").scores is None


@pytest.mark.parametrize("base", [-math.inf, "-inf"])
def test_a_round_trip_keeps_everything(tmp_path: Path, base: float | str) -> None:
    config = tiny.config(gamma=[0.1, 0.2, 0.3, 0.4], base=base, horizon="infinite", sliding_window=9)
    config.save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text(encoding="utf-8")
    json.loads(written, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, StableMaskConfig)
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert loaded.scores == config.scores
    assert loaded.scores is not None
    assert loaded.scores.base == -math.inf


def test_auto_classes() -> None:
    config = tiny.config()
    assert isinstance(AutoModel.from_config(config), StableMaskModel)
    assert isinstance(AutoModelForCausalLM.from_config(config), StableMaskForCausalLM)


PRINTED = {"71m": 71.9, "160m": 162.2, "400m": 411.3, "1.4b": 1439.0}
COUNTED = {"71m": 71_917_056, "160m": 162_148_608, "400m": 411_257_856, "1.4b": 1_439_078_400}


@pytest.mark.parametrize("size", SIZES)
def test_named_sizes(size: str) -> None:
    with torch.device("meta"):
        model = StableMaskForCausalLM(named_config(size, horizon=512))
    total = sum(parameter_counts(model).values())
    assert total == model.num_parameters() == COUNTED[size]
    assert total / 1e6 == pytest.approx(PRINTED[size], abs=0.1)


def test_a_named_size_takes_other_settings() -> None:
    config = named_config("71m", horizon=512, hidden_size=640, head_dim=64, position="alibi")
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers, config.position) == (
        640,
        64,
        6,
        "alibi",
    )
    with pytest.raises(ValueError, match=r"size: got '70m'; allowed: 71m, 160m, 400m, 1\.4b"):
        named_config("70m", horizon=512)


@pytest.mark.parametrize(("position", "remedy"), tiny.EVERY)
def test_every_parameter_is_counted(position: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.model(position, remedy, tie_word_embeddings=position == "t5")
    model.describe()
    printed = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert int(printed["total"].replace(",", "")) == sum(p.numel() for p in model.parameters())
    assert ("artificial tokens" in printed) == (remedy == "artificial_token")
    assert ("positions" in printed) == (position in ("learned", "t5"))
    assert ("output layer" in printed) == (position != "t5")


def test_parameters_of_the_remedies() -> None:
    plain = sum(p.numel() for p in tiny.model(remedy="none").parameters())
    extra = {r: sum(p.numel() for p in tiny.model(remedy=r).parameters()) - plain for _, r in tiny.EVERY}
    layers, heads, width, length = 2, 4, 20, 64
    assert extra["stablemask"] == extra["softmax_plus_one"] == 0
    assert extra["learned_sink"] == layers * heads
    assert extra["artificial_token"] == 3 * width
    assert extra["urpe"] == layers * heads * length


def test_new_parameters_start_where_they_change_least() -> None:
    for remedy, part, value in (("learned_sink", "sinks", 0.0), ("urpe", "toeplitz", 1.0)):
        model = StableMaskForCausalLM(tiny.config(remedy=remedy))
        found = [p for name, p in model.named_parameters() if name.endswith(part)]
        assert len(found) == 2
        assert all(torch.equal(p, torch.full_like(p, value)) for p in found)
    tokens = StableMaskForCausalLM(tiny.config(remedy="artificial_token")).model.artificial
    assert tokens is not None
    assert 0.1 < float(tokens.weight.detach().std()) < 0.7
