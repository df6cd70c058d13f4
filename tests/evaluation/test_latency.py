"""Latency: what is timed is right, and what is slower is found to be slower."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import stablemask.hf
from stablemask.evaluation.latency import Latency, check_cache, generate, latency, twins
from stablemask.model import StableMaskForCausalLM
from tests.model import tiny

QUICK = Latency(rounds=2, max_seconds=0.0)


def llama(*, enabled: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=12,
    )
    model = LlamaForCausalLM(config).eval()
    if enabled:
        stablemask.hf.enable(model, gamma=0.5, horizon=12)
    return model


MODELS = {
    "ours": tiny.model,
    "our baseline": lambda: tiny.model("rope", "none", max_position_embeddings=tiny.HORIZON),
    "enabled": lambda: llama(enabled=True),
    "stock": lambda: llama(enabled=False),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_twins_share_their_weights_and_differ_in_stablemask(name: str) -> None:
    model: PreTrainedModel = MODELS[name]()
    pair = twins(model)
    assert pair[0 if name in ("our baseline", "stock") else 1] is model
    for p, q in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert p.data_ptr() == q.data_ptr()
    ids = tiny.tokens(2, 9)
    plain, ours = (m(ids, use_cache=False).logits for m in pair)
    assert tiny.difference(plain, ours) > 1e-4
    if name in ("ours", "our baseline"):
        expected = [
            tiny.model("rope", remedy)(ids, use_cache=False).logits for remedy in ("none", "stablemask")
        ]
    else:
        expected = [llama(enabled=enabled)(ids, use_cache=False).logits for enabled in (False, True)]
    assert torch.equal(plain, expected[0])
    assert torch.equal(ours, expected[1])


@pytest.mark.parametrize("use_cache", [True, False])
def test_generated_tokens_are_those_of_generate(use_cache: bool) -> None:
    model, ids = tiny.model(), tiny.tokens(2, 5)
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert torch.equal(generate(model, ids, 9, use_cache=use_cache), expected)


def test_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts the tokens that go through a model, the ratios are known."""
    counted = 0
    forward = StableMaskForCausalLM.forward

    def counting(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        nonlocal counted
        counted += input_ids.shape[1]
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(StableMaskForCausalLM, "forward", counting)
    monkeypatch.setattr("stablemask.evaluation.latency.time.process_time", lambda: float(counted))
    rounds: list[int] = []
    values = dict(latency(tiny.model(), prompt=6, output=4, setting=QUICK, on_round=rounds.append))
    assert rounds == [1, 2, 1, 2]
    assert values["seconds/baseline"] == 6 + 3
    assert values["ratio/SM-I"] == values["ratio/SM-I/low"] == values["ratio/SM-I/high"] == 1.0
    assert values["ratio/SM"] == (6 + 7 + 8 + 9) / 9
    assert values["ratio/A/A"] == 1.0


def test_a_wrong_cache_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The horizon of a model without a cache is moved: then cached steps are not what one pass gives."""
    baseline, ours = twins(tiny.model())
    check_cache(baseline, ours, tiny.tokens(1, 6))
    forward = StableMaskForCausalLM.forward

    def wrong(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        if self is ours:
            self.config.horizon = tiny.HORIZON if options["use_cache"] else 100
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(StableMaskForCausalLM, "forward", wrong)
    with pytest.raises(ArithmeticError, match="with a cache the logits are off by"):
        check_cache(baseline, ours, tiny.tokens(1, 6))


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="got remedy 'learned_sink'; allowed: 'none' and 'stablemask'"):
        twins(tiny.model("rope", "learned_sink"))
    for options, message in (
        ({"prompts": ()}, "prompts: got"),
        ({"outputs": (0,)}, "outputs: got"),
        ({"rounds": 1}, "rounds: got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Latency(**options)  # type: ignore[arg-type]
