"""The benchmark of whole models measures what it says: on a model small enough for a test."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models
from benchmarks._model_cases import CASES, Case, Group, Models
from benchmarks._models import (
    SUBJECTS,
    Subject,
    Truth,
    cached_step,
    draw_tokens,
    make_model,
    training_step,
    uncached_step,
)
from stablemask.measuring import Rule
from stablemask.model import StableMaskConfig, sizes

TINY = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 300  # bytes, and the end of text
RULE = Rule(2, 2, min_seconds=0.0)


@pytest.fixture(autouse=True)
def tiny_71m(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named size of every case, small, on a machine of a known rate."""
    monkeypatch.setattr("benchmarks._model_cases.measured_matmul_rate", lambda *_, **__: 1e10)
    monkeypatch.setitem(sizes.SIZES, "71m", {**TINY, "vocab_size": VOCABULARY})  # type: ignore[arg-type]


def config(horizon: int = 12) -> StableMaskConfig:
    return sizes.named_config("71m", horizon=horizon)


@pytest.mark.parametrize("subject", ["decoder", "enabled"])
def test_models_with_stablemask_are_within_the_budget(subject: Subject) -> None:
    tokens = draw_tokens(config(), 2, 9)
    truth = Truth(config(), tokens)
    assert truth.training_error(make_model(subject, config())) <= 1
    assert truth.decoding_error(cached_step(make_model(subject, config()), tokens)) <= 1


def test_the_truth_refuses_plain_attention_and_other_horizons() -> None:
    tokens = draw_tokens(config(), 1, 9)
    truth = Truth(config(), tokens)
    for wrong in (make_model("stock", config()), make_model("decoder", config(horizon=9))):
        assert truth.training_error(wrong) > 10
        assert truth.decoding_error(cached_step(wrong, tokens[:, :8])) > 10


def test_a_missing_gradient_is_refused() -> None:
    tokens = draw_tokens(config(), 1, 9)
    model = make_model("decoder", config())
    model.get_parameter("model.layers.1.self_attn.q_proj.weight").register_hook(torch.zeros_like)
    assert Truth(config(), tokens).training_error(model) > 10


def test_a_step_of_any_kind_can_be_repeated() -> None:
    tokens = draw_tokens(config(), 1, 9)
    for subject in SUBJECTS:
        model = make_model(subject, config())
        cached, whole = cached_step(model, tokens), uncached_step(model, tokens)
        assert torch.equal(cached(), cached())
        torch.testing.assert_close(cached(), whole(), rtol=1e-4, atol=1e-6)
        step = training_step(model, tokens, optimizer=True)
        assert torch.equal(step(), step())


def test_useful_operations_are_counted_as_in_a_hand_sum() -> None:
    weights = 2 * (4 * 24 * 24 + 3 * 24 * 32) + 24 * VOCABULARY
    decode = Case("decode", "decoder", 10)
    assert decode.flops == 2 * weights + 2 * (2 * 2 * 10 * 24)
    train = Case("step", "decoder", 10)
    assert train.flops == 6 * weights * 10 + 2 * (2 * 7 * 55 * 24)


@pytest.mark.parametrize("group", ["step", "fwd+bwd", "decode", "cache"])
def test_every_group_is_checked_and_timed(group: Group) -> None:
    result = Models(RULE).measure(Case(group, "decoder", 16, bar=math.inf))
    assert result.worst_error <= 1
    assert result.verdict in ("met", "not measured")
    assert [timing.clock for timing in result.timings] == ["process time, 1 thread", "wall time, 2 threads"]
    for timing in result.timings:
        assert timing.comparison.ratio.rounds == 2
        assert timing.comparison.candidate_seconds > 0


def test_what_has_no_bar_is_timed_once() -> None:
    assert len(Models(RULE).measure(Case("cache", "decoder", 16)).timings) == 1


def test_a_wrong_model_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Truth, "decoding_error", lambda *_: 2.0)
    result = Models(RULE).measure(Case("decode", "enabled", 16, bar=2.0))
    assert (result.verdict, result.timings) == ("WRONG", [])


def test_a_run_is_written_down_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def options(**settings: Any) -> models.Options:
        only = "cache/71m/T64|profile/decoder|data"
        return models.Options(only=only, output=tmp_path / "x.jsonl", **settings)

    monkeypatch.setattr(models, "Rule", lambda *_, **__: RULE)
    assert models.run(options()) == 0
    text = (tmp_path / "x.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 4  # the machine, a case and two notes
    assert "SM-I" in capsys.readouterr().out
    monkeypatch.setattr(Models, "measure", lambda *_: pytest.fail("it was measured already"))
    assert models.run(options(resume=True)) == 0
    assert (tmp_path / "x.jsonl").read_text(encoding="utf-8") == text
    with pytest.raises(FileExistsError, match="--resume"):
        models.run(options())
    assert models.run(models.Options(only="nothing")) == 2


def test_every_case_has_its_own_name() -> None:
    names = [(case.name, case.subject) for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.bar for case in CASES if case.trains} == {1.03}
    assert {case.bar for case in CASES if case.group == "decode"} == {1.05}
