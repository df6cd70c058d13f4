"""The bare loop trains what ``stablemask train`` trains, and arms of one seed begin alike."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stablemask.data import prepare
from stablemask.model import StableMaskForCausalLM
from stablemask.reproduce import loop
from stablemask.training import Recipe
from stablemask.training import train as full_train
from tests.reproduce import small


def recipe(folder: Path, arm: str = "stablemask", seed: int = 5) -> Recipe:
    found = small.study(folder).recipe(f"small/rope/{arm}", seed=seed)
    source = small.write_texts(folder)
    data = replace(found.data, source=source.data, valid=source.valid, cache=str(folder / "cache"))
    return replace(found, data=data, train=replace(found.train, clipping=0.5))


def trained_here(given: Recipe) -> tuple[StableMaskForCausalLM, list[float]]:
    splits = prepare(given.data, given.train.length)
    model = loop.make_model(given, len(splits.tokenizer))
    return model, loop.train(model, given, splits.train)


@pytest.mark.parametrize("arm", ["none", "stablemask"])
def test_the_same_weights_as_the_full_training(tmp_path: Path, arm: str) -> None:
    given = recipe(tmp_path, arm)
    summary = full_train(given, tmp_path / "run", progress=False)
    full = AutoModelForCausalLM.from_pretrained(summary.model).state_dict()
    model, _ = trained_here(given)
    other, _ = trained_here(recipe(tmp_path, arm, seed=6))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, full[name], rtol=1e-4, atol=1e-5, msg=f"{name} of {arm}")
    name = "lm_head.weight"
    assert not torch.allclose(other.state_dict()[name], full[name], rtol=1e-4, atol=1e-5), "another seed"


def test_a_setting_that_the_loop_forgot_would_be_seen(tmp_path: Path) -> None:
    """The comparison above can fail: each setting changes the weights by more than it allows."""
    given = recipe(tmp_path)
    weights = trained_here(given)[0].lm_head.weight
    for change in (
        {"weight_decay": 0.0},
        {"clipping": 0.0},
        {"warmup_steps": 0},
        {"beta2": 0.9},
        {"schedule": "cosine"},
        {"batch_size": 5},
    ):
        other = replace(given, train=replace(given.train, **change))
        found = trained_here(other)[0].lm_head.weight
        assert not torch.allclose(found, weights, rtol=1e-4, atol=1e-5), change


def test_arms_of_one_seed_begin_with_the_same_weights(tmp_path: Path) -> None:
    arms = ("none", "stablemask", "learned_token", "learned_sink")
    models = {arm: loop.make_model(recipe(tmp_path, arm), 257).state_dict() for arm in arms}
    for arm in arms[1:]:
        shared = models["none"].keys() & models[arm].keys()
        assert shared == models["none"].keys()
        assert all(torch.equal(models["none"][name], models[arm][name]) for name in shared), arm
    assert models["learned_token"].keys() > models["none"].keys()
    other = loop.make_model(recipe(tmp_path, "none", seed=6), 257).state_dict()
    assert not torch.equal(other["lm_head.weight"], models["none"]["lm_head.weight"])


def test_arms_of_one_seed_read_the_same_text_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[torch.Tensor] = []
    honest = StableMaskForCausalLM.forward

    def forward(self: StableMaskForCausalLM, **inputs: object) -> object:
        assert isinstance(inputs["input_ids"], torch.Tensor)
        read.append(inputs["input_ids"])
        return honest(self, **inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(StableMaskForCausalLM, "forward", forward)
    texts = {}
    for arm, seed in (("none", 5), ("stablemask", 5), ("none", 6)):
        read.clear()
        trained_here(recipe(tmp_path, arm, seed))
        texts[arm, seed] = torch.cat(read)
    assert texts["none", 5].shape == (10 * 4, 16)
    assert torch.equal(texts["none", 5], texts["stablemask", 5])
    assert not torch.equal(texts["none", 5], texts["none", 6])


def test_losses_are_means_over_tenths_and_fall(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    given = replace(given, train=replace(given.train, steps=40))
    seen: list[int] = []
    splits = prepare(given.data, given.train.length)
    model = loop.make_model(given, len(splits.tokenizer))
    losses = loop.train(model, given, splits.train, on_update=seen.append)
    assert seen == list(range(1, 41))
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.5
    assert not model.training
