"""How recipes are read: files over files, overrides, and what is refused."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from stablemask.cli import train as command
from stablemask.training import load_recipe

FOLDER = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 3", "unknown key 'trian'; did you mean 'train'"),
        ("[train]\nstep = 3", "train: unknown key 'step'; did you mean 'steps'"),
        ("[train]\nlearning_rat = 3", "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ("[model]\nheads = 3", "model: unknown key 'heads'; did you mean 'headwise'"),
        ("[data]\ntokeniser = 'gpt2'", "data: unknown key 'tokeniser'; did you mean 'tokenizer'"),
        ("[train]\nsteps = 0", "steps: got 0; allowed: finite, above 0"),
        ("[train]\nsteps = '3'", "steps: got '3'; allowed: an integer"),
        ("[train]\nsteps = true", "steps: got True; allowed: an integer"),
        ("[train]\nlearning_rate = nan", "learning_rate: got nan; allowed: finite, above 0"),
        ("[train]\nlearning_rate = inf", "learning_rate: got inf; allowed: finite, above 0"),
        ("[train]\nbeta2 = 1", "beta2: got 1.0; allowed: from 0 to below 1"),
        ("[train]\nschedule = 'square'", "schedule: got 'square'; allowed: 'linear', 'cosine'"),
        ("[train]\nsteps = 3\nepochs = 1", "train: got steps and epochs; allowed: exactly one of"),
        ("[train]\naccumulation = 5", "accumulation: got 5; allowed: divisors of the batch of 16 sequences"),
        ("[train]\nbatch_tokens = 100", "batch_tokens: got 100; allowed: multiples of the length, 256"),
        ("[model]\nsize = '2b'", "size: got '2b'; allowed: 71m, 160m, 400m, 1.4b"),
        ("[model]\nhorizon = 'long'", "horizon: got 'long'; allowed: an integer or 'infinite'"),
        ("model = 3", "model: got 3; allowed: a table"),
        ("[data]\npacking = 'tight'", "packing: got 'tight'"),
        ("[model", "Expected ']'"),
    ],
)
def test_what_a_recipe_may_not_say(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "{FOLDER / "tiny.toml"}"\n{text}', encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_recipe(path)
    assert (
        str(path) in str(caught.value)
        or "train: got" in message
        or "got 5" in message
        or "got 100" in message
    )


def test_a_recipe_over_others(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nsteps = 7\nlength = 16\nseed = 1\n", encoding="utf-8")
    (tmp_path / "b.toml").write_text('[train]\nseed = 2\n[model]\nsize = "160m"\n', encoding="utf-8")
    path = tmp_path / "c.toml"
    path.write_text(
        'extends = ["a.toml", "b.toml"]\n[train]\ntokens = 320\nbatch_size = 4\n', encoding="utf-8"
    )
    made = load_recipe(path)
    assert (made.name, made.model.size) == ("c", "160m")
    assert (made.train.steps, made.train.tokens, made.train.length, made.train.seed) == (None, 320, 16, 2)
    assert made.train.updates(10**6) == 5
    assert load_recipe(path, {"train": {"epochs": 2.0}}).train.updates(1000) == 500
    (tmp_path / "a.toml").write_text('extends = "c.toml"\n', encoding="utf-8")
    with pytest.raises(
        ValueError, match=re.escape("extends: got 'c.toml', which builds on this file itself")
    ):
        load_recipe(path)


@pytest.mark.parametrize("name", ["tiny", "pile-1.4b-rope-stablemask"])
def test_overrides_from_the_command_line_change_what_they_name(name: str) -> None:
    path = str(FOLDER / f"{name}.toml")
    options = "--train.steps 100 --train.batch-tokens 65536 --model.remedy none --data.tokenizer bpe:300"
    job = command.parse([path, *options.split(), "--out", "there"], "stablemask train")
    assert job.problem == ""
    assert job.recipe is not None
    expected = asdict(load_recipe(path))
    expected["train"] |= {"steps": 100, "batch_size": None, "batch_tokens": 65536}
    expected["model"]["remedy"] = "none"
    expected["data"]["tokenizer"] = "bpe:300"
    assert asdict(job.recipe) == expected
    assert job.out == Path("there")


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes('name = "é"\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*can't decode byte"):
        load_recipe(path)
