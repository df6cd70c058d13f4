"""``stablemask train``: what it explains, what it refuses, and a run."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import stablemask.model
from stablemask.cli import main
from stablemask.cli import train as command
from stablemask.training.toml import write_table
from tests.training import small

TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    table = small.recipe(tmp_path, steps=6, eval_every=3, save_every=3, log_every=1).table()
    path.write_text(write_table(table | {"name": "mine"}), encoding="utf-8")
    return path


def printed_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_explains_how_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        shown = printed_help(arguments, capsys)
        for said in (
            "The recipe comes first; every setting in it can be given another value",
            "A run that was killed goes on with the same command",
            "torchrun --nproc-per-node N -m",
            "--dry-run",
            "Train nothing; print parameters, memory, operations and time",
        ):
            assert said in shown


def test_help_on_a_recipe_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_help([str(TINY), "--help"], capsys)
    assert "Updates of the weights. (default: 300)" in shown
    assert "--data.tokenizer STR" in shown
    assert "(default: bpe:4096)" in shown
    assert "(default: stablemask)" in shown


def test_every_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_help([str(TINY), "--help"], capsys)
    parts = {part: vars(getattr(command.load_recipe(TINY), part)) for part in ("model", "data", "train")}
    for part, settings in parts.items():
        for name in settings:
            option = f"--{part}.{name.replace('_', '-')}"
            explained = re.search(rf"{option}[ ,].*?([A-Z].*?)\(default", shown)
            assert explained is not None, option
            assert len(explained[1].split()) >= 2, option


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "No such file or directory: 'nowhere.toml'"),
        (["{recipe}", "--model.remedy", "foo"], "remedy: got 'foo'; allowed: none, stablemask"),
        (
            ["{recipe}", "--train.batch-tokens", "100"],
            "batch_tokens: got 100; allowed: multiples of the length",
        ),
        (["{recipe}", "--train.accumulation", "3"], "accumulation: got 3; allowed: divisors"),
        (["{recipe}", "--data.source", "nowhere.txt"], "nowhere.txt"),
        (["{recipe}", "--train.distribution", "fsdp"], "distribution: got 'fsdp' in a single process"),
        (["{recipe}", "--dry-run", "--processes", "3"], "processes: got 3; allowed: divisors of 4"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(recipe=recipe) for argument in arguments]
    assert main(["train", *given, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("stablemask train: ")
    assert said.err.count("\n") == 1
    assert message in said.err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--train.stepz", "3"], "--train.steps"),
        (["--train.steps", "some"], "Error parsing --train.steps"),
        (["--train.steps", "0"], "steps: got 0; allowed: finite, above 0"),
        (["--train.schedule", "square"], "'linear', 'cosine'"),
        (["--model.size", "2b"], "size: got '2b'; allowed: 71m, 160m, 400m, 1.4b"),
    ],
)
def test_options_that_cannot_be(
    option: list[str], message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), *option])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in " ".join(said.err.replace("│", " ").split())


def test_without_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--train.steps", "3"]) == 2
    said = "stablemask train: recipe: got '--train.steps'; allowed: a TOML file, before all options\n"
    assert capsys.readouterr().err == said


def test_a_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(recipe), "--train.learning-rate", "0.02"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    run = tmp_path / "runs" / "mine"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    first = said.out
    assert f"validation perplexity {summary['perplexity']:.4f} after 6 updates, 384 tokens" in first
    assert first.count("\n") == 1
    assert "step 6/6" in said.err
    assert "tokens/s" in said.err
    curve = small.curve(run)
    assert max(line["learning_rate"] for line in curve if "loss" in line) == pytest.approx(0.02)
    assert [line["step"] for line in curve if "perplexity" in line] == [3, 6]
    assert curve[-1]["perplexity"] == summary["perplexity"]

    opened = AutoModelForCausalLM.from_pretrained(run / "model")
    assert isinstance(opened, stablemask.model.StableMaskForCausalLM)
    assert sum(p.numel() for p in opened.parameters()) == summary["parameters"]
    text = "document 3 of many words"
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("stablemask.training.run._trainer", never)
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    assert main([*arguments, "--train.seed", "1"]) == 2
    assert "which holds another run (train.seed: 0 → 1)" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(arguments) == 0
    assert capsys.readouterr().out == "", "one of several processes says it"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError("the disk is full"), 1, "stablemask train: the disk is full\n"),
        (FloatingPointError("loss: got nan"), 1, "stablemask train: loss: got nan\n"),
        (KeyboardInterrupt(), 130, "stablemask train: interrupted; the same command goes on\n"),
    ],
)
def test_runs_that_break(
    error: BaseException,
    code: int,
    message: str,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(command, "train", broken)
    assert main(["train", str(recipe)]) == code
    assert capsys.readouterr().err == message
