"""What a run writes and shows, and settings that must not change what it computes."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.integrations import integration_utils

from stablemask.data import prepare
from stablemask.model import StableMaskForCausalLM
from stablemask.reproduce import loop
from stablemask.training import Recipe, Summary, checkpoints, progress, train
from stablemask.training import run as running
from stablemask.training.trainer import PretrainingTrainer
from tests.training import small
from tests.training.small import Updates

LENGTH, BATCH = 16, 4


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Summary, Path]:
    """A finished run: its recipe, its summary, its folder; not to be changed."""
    folder = tmp_path_factory.mktemp("given")
    recipe = small.recipe(folder)
    return recipe, train(recipe, folder / "run", progress=False), folder / "run"


def losses(run: Path) -> Tensor:
    return torch.tensor([line["loss"] for line in small.curve(run) if "loss" in line], dtype=torch.float64)


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def largest_difference(a: Path, b: Path) -> float:
    """Of any weight of two runs."""
    ours, others = weights(a), weights(b)
    assert ours.keys() == others.keys()
    return max(float((t - others[name]).abs().max()) for name, t in ours.items())


# Metrics


def test_metrics_are_lines_of_json_on_schedule(given: tuple[Recipe, Summary, Path]) -> None:
    recipe, _, run = given
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [line for line in lines if "loss" in line]
    validated = [line for line in lines if "perplexity" in line]
    assert len(trained) + len(validated) == len(lines)
    assert [line["step"] for line in trained] == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20, 22, 24]
    assert [line["step"] for line in validated] == [6, 12, 18, 24]
    for line in trained:
        rate = recipe.train.learning_rate_at(line["step"] - 1, small.STEPS)
        assert line["learning_rate"] == pytest.approx(rate, rel=1e-12)
        assert line["tokens_per_second"] > 0
        assert line["grad_norm"] > 0
    for line in lines:
        assert line["tokens"] == line["step"] * BATCH * LENGTH
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert all(line["perplexity"] == math.exp(line["valid_loss"]) for line in validated)


def test_losses_are_those_of_the_updates(tmp_path: Path) -> None:
    """As the bare loop of the study computes them."""
    recipe = small.recipe(tmp_path, steps=10, log_every=1)
    train(recipe, tmp_path / "run", progress=False)
    splits = prepare(recipe.data, LENGTH, progress=False)
    expected = loop.train(loop.make_model(recipe, len(splits.tokenizer)), recipe, splits.train)
    torch.testing.assert_close(
        losses(tmp_path / "run"), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_validation_is_the_mean_over_tokens_of_the_first_blocks(given: tuple[Recipe, Summary, Path]) -> None:
    recipe, summary, run = given
    blocks = prepare(recipe.data, LENGTH, progress=False).valid
    assert recipe.train.eval_tokens is not None
    count = recipe.train.eval_tokens // LENGTH
    assert 1 < count < len(blocks)
    ids = torch.stack([blocks[i]["input_ids"] for i in range(count)])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(run / "model").eval()(input_ids=ids).logits
    loss = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert small.curve(run)[-1]["valid_loss"] == pytest.approx(loss, rel=1e-5)
    assert summary.loss == small.curve(run)[-1]["valid_loss"]
    assert summary.perplexity == math.exp(summary.loss)


def test_summary_and_checkpoints(given: tuple[Recipe, Summary, Path]) -> None:
    recipe, summary, run = given
    assert summary.steps == small.STEPS
    assert summary.tokens == small.STEPS * BATCH * LENGTH
    assert summary.parameters == sum(w.numel() for w in weights(run).values())
    assert [path.name for path in checkpoints.find(run)] == ["checkpoint-24", "checkpoint-20"], (
        "the newest two"
    )
    assert all(checkpoints.damage(path) is None for path in checkpoints.find(run))
    assert recipe.train.keep == 2


# What must not change the result


def other(given: tuple[Recipe, Summary, Path], folder: Path, **settings: Any) -> Path:
    """The run with other settings of training."""
    recipe = given[0]
    train(replace(recipe, train=replace(recipe.train, **settings)), folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def by_documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Summary, Path]:
    """As above on packed documents, whose first tokens are no labels: pieces of a batch count differently."""
    folder = tmp_path_factory.mktemp("documents")
    recipe = small.recipe(folder)
    recipe = replace(recipe, data=replace(recipe.data, packing="documents"))
    return recipe, train(recipe, folder / "run", progress=False), folder / "run"


@pytest.mark.parametrize("pieces", [2, 4])
def test_a_batch_in_pieces_is_the_batch(
    pieces: int, by_documents: tuple[Recipe, Summary, Path], tmp_path: Path
) -> None:
    run = other(by_documents, tmp_path, accumulation=pieces)
    torch.testing.assert_close(losses(run), losses(by_documents[2]), rtol=1e-5, atol=0)
    assert largest_difference(run, by_documents[2]) < 1e-4


def test_the_mean_of_the_pieces_means_would_be_seen(
    by_documents: tuple[Recipe, Summary, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = PretrainingTrainer.__init__

    def without_counting(self: PretrainingTrainer, *given: Any, **named: Any) -> None:
        honest(self, *given, **named)
        self.model_accepts_loss_kwargs = False

    monkeypatch.setattr(PretrainingTrainer, "__init__", without_counting)
    run = other(by_documents, tmp_path, accumulation=4)
    assert float((losses(run) / losses(by_documents[2]) - 1).abs().max()) > 1e-4
    assert largest_difference(run, by_documents[2]) > 1e-3


def test_checkpointing_of_gradients_computes_layers_again_and_nothing_else(
    given: tuple[Recipe, Summary, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    layer = type(StableMaskForCausalLM(given[0].config(257)).model.layers[0].mlp)
    honest = layer.forward

    def counted(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return honest(self, x)

    monkeypatch.setattr(layer, "forward", counted)
    run = other(given, tmp_path, gradient_checkpointing=True)
    layers = given[0].model.num_hidden_layers
    assert layers is not None
    assert calls == 2 * layers * small.STEPS
    assert torch.equal(losses(run), losses(given[2]))
    assert largest_difference(run, given[2]) == 0


def test_bf16_multiplies_in_bfloat16_and_keeps_weights_in_float32(
    given: tuple[Recipe, Summary, Path], tmp_path: Path
) -> None:
    run = other(given, tmp_path / "whole", precision="bf16")
    assert {weight.dtype for weight in weights(run).values()} == {torch.float32}
    difference = (losses(run) / losses(given[2]) - 1).abs().max()
    assert 1e-5 < float(difference) < 2e-2  # bfloat16 rounds to 1 in 256
    with pytest.raises(KeyboardInterrupt):
        train(
            replace(given[0], train=replace(given[0].train, precision="bf16")),
            tmp_path / "run",
            progress=False,
            callbacks=[Updates(last=13)],
        )
    resumed = other(given, tmp_path / "run", precision="bf16")
    assert small.different(small.outcome(resumed), small.outcome(run)) == []


# Trackers


def test_trackers_get_every_entry(
    given: tuple[Recipe, Summary, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tracker(TrainerCallback):
        seen: list[tuple[int, set[str]]] = []  # noqa: RUF012 - transformers makes the instance

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            self.seen.append((state.global_step, set(logs)))

    monkeypatch.setattr(running, "get_available_reporting_integrations", lambda: ["trackio"])
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", Tracker)
    run = other(given, tmp_path, report_to=("trackio",))
    lines = small.curve(run)
    assert [step for step, _ in Tracker.seen] == [line["step"] for line in lines]
    for (_, names), line in zip(Tracker.seen, lines, strict=True):
        assert names > {"loss", "tokens_per_second"} or names > {"valid_loss", "perplexity"}
        assert ("perplexity" in names) == ("perplexity" in line)
    assert small.different(small.outcome(run), small.outcome(given[2])) == []


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "get_available_reporting_integrations", lambda: ["wandb", "trackio"])
    monkeypatch.setattr(running, "prepare", None)
    recipe = small.recipe(tmp_path, report_to=("tensorboard",))
    with pytest.raises(ValueError, match="report_to: got 'tensorboard'; allowed: wandb, trackio, "):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Progress


def test_lines_of_progress(
    given: tuple[Recipe, Summary, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "_LINES_EVERY", 0.0)
    train(given[0], tmp_path)
    lines = capsys.readouterr().err.splitlines()
    kinds = {
        r"step \d+/24  loss \d\.\d{4}  [\d,]+ tokens/s  left 0:\d\d:\d\d": 14,
        r"step \d+/24  validation perplexity [\d.]+  left 0:\d\d:\d\d": 4,
    }
    for kind, count in kinds.items():
        assert sum(re.fullmatch(kind, line) is not None for line in lines) == count
    assert len(lines) == sum(kinds.values())


def test_the_time_left_is_that_of_the_updates_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that goes on at update 100 of 1,000 and has done 50 more in 200 s."""
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)

    class State:
        global_step, max_steps = 100, 1000

    shown: Any = progress.Progress()
    shown.on_train_begin(None, State, None)
    now += 200
    State.global_step = 150
    shown.on_log(None, State, None, logs={"loss": 2.0, "tokens_per_second": 1234.5})
    assert capsys.readouterr().err == "step 150/1,000  loss 2.0000  1,234 tokens/s  left 0:56:40\n"


def test_a_bar_on_a_terminal(
    given: tuple[Recipe, Summary, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    train(given[0], tmp_path)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"loss \d\.\d{4}  [\d,]+ tokens/s .*\d+/24 .*left", shown)
    assert "step 24  validation perplexity" in shown
