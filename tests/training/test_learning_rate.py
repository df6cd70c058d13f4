"""What an update of the weights is: its learning rate, and AdamW as the recipe says."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from stablemask.training import load_recipe, train
from tests.training import small

FOLDER = Path(__file__).parents[2] / "recipes"
CLIPPING = 1.35


@pytest.mark.parametrize(
    ("name", "points"),
    [
        (  # a line up, a line down to 0
            "wikitext103-71m-rope-stablemask",
            {0: 1e-6, 1000: 1.5075e-4, 2000: 3.005e-4, 4000: 6e-4, 27_000: 3e-4, 38_500: 1.5e-4, 50_000: 0.0},
        ),
        (
            "minipile-400m-alibi",
            {0: 1e-6, 2000: 2.005e-4, 4000: 4e-4, 14_000: 3e-4, 24_000: 2e-4, 44_000: 0.0},
        ),
        (  # a line up, half a wave of the cosine down to 0
            "pile-1.4b-rope",
            {
                0: 5e-6,
                2000: 1.025e-4,
                4000: 2e-4,
                53_000: 1e-4 + 1e-4 / math.sqrt(2),
                102_000: 1e-4,
                200_000: 0.0,
            },
        ),
    ],
)
def test_the_rate_of_the_paper(name: str, points: dict[int, float]) -> None:
    config = load_recipe(FOLDER / f"{name}.toml").train
    assert config.steps == max(points)
    found = {update: config.learning_rate_at(update, config.steps) for update in points}
    assert found == pytest.approx(points, abs=1e-15)


class Watch(TrainerCallback):
    """What the optimizer has before each update."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.norms: list[float] = []
        self.groups: list[dict[str, Any]] = []
        self.model: Any = None

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        optimizer, self.model = kwargs["optimizer"], kwargs["model"]
        self.groups = optimizer.param_groups
        self.rates.append([group["lr"] for group in self.groups])
        gradients = [p.grad for group in self.groups for p in group["params"]]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


def test_the_updates_of_a_run(tmp_path: Path) -> None:
    recipe = small.recipe(
        tmp_path,
        schedule="cosine",
        beta1=0.8,
        beta2=0.95,
        epsilon=1e-7,
        weight_decay=0.1,
        clipping=CLIPPING,
        log_every=1,
    )
    watch, run = Watch(), tmp_path / "run"
    train(recipe, run, progress=False, callbacks=[watch])
    config = recipe.train
    expected = [config.learning_rate_at(update, small.STEPS) for update in range(small.STEPS)]
    assert expected[0] == 1e-6
    assert expected[3] == 1e-2
    assert watch.rates == [pytest.approx([rate] * len(watch.groups), rel=1e-12) for rate in expected]
    curve = [line for line in small.curve(run) if "loss" in line]
    assert [line["learning_rate"] for line in curve] == pytest.approx(expected, rel=1e-12)

    unclipped = [line["grad_norm"] for line in curve]
    assert min(unclipped) < 0.95 * CLIPPING < 1.1 * CLIPPING < max(unclipped)
    assert watch.norms == pytest.approx([min(norm, CLIPPING) for norm in unclipped], rel=1e-4)

    for group in watch.groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-7)
    names = {id(p): name for name, p in watch.model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in watch.groups for p in group["params"]}
    assert decay == {name: 0.0 if "norm" in name else 0.1 for name in names.values()}
