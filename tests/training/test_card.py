"""The folder of a trained model: it opens by itself, and its card says what it is."""

import platform
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import stablemask
from stablemask.data import prepare
from stablemask.evaluation.models import open_model, open_tokenizer
from stablemask.training import Recipe, Summary, card, load_recipe, train
from tests.training import small


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Summary]:
    """A recipe and what came of it; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = replace(small.recipe(folder), name="a small one")
    return recipe, train(recipe, folder / "run", progress=False)


@pytest.fixture(scope="module")
def text(trained: tuple[Recipe, Summary]) -> str:
    return (trained[1].model / "README.md").read_text(encoding="utf-8")


def test_the_code_on_the_card_opens_the_model(trained: tuple[Recipe, Summary], text: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "AutoModelForCausalLM" in code
    names: dict[str, Any] = {}
    exec(code.replace("this folder", str(trained[1].model)), names)  # noqa: S102 - it is our own card
    model, tokenizer = names["model"], names["tokenizer"]
    ids = tokenizer("document 3 of many many words", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert out.shape == (1, ids.shape[1] + 8)
    assert tokenizer.decode(out[0]).startswith("document 3 of many many words")
    assert model.config.use_cache
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.remedy == "stablemask"


def test_the_evaluation_opens_it(trained: tuple[Recipe, Summary]) -> None:
    model = open_model(str(trained[1].model), device="cpu", dtype="float32")
    tokenizer = open_tokenizer(str(trained[1].model))
    splits = prepare(trained[0].data, 16, progress=False)
    assert tokenizer.get_vocab() == splits.tokenizer.get_vocab()
    assert sum(p.numel() for p in model.parameters()) == trained[1].parameters


def test_the_card_has_the_recipe(trained: tuple[Recipe, Summary], text: str, tmp_path: Path) -> None:
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "recipe.toml").write_text(toml, encoding="utf-8")
    found = load_recipe(tmp_path / "recipe.toml")
    cache = trained[0].data.cache
    assert cache not in text
    assert replace(found, data=replace(found.data, cache=cache)) == trained[0]


def test_the_card_has_data_curve_and_versions(trained: tuple[Recipe, Summary], text: str) -> None:
    recipe, summary = trained
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "# a small one\n" in text
    assert f"A decoder of {summary.parameters:,} parameters" in text
    assert "position encoding rope and the remedy stablemask" in text
    assert f"Validation perplexity {summary.perplexity:.4f} after 24 updates on 1,536 tokens" in text
    splits = prepare(recipe.data, 16, progress=False)
    for name, blocks in (("train", splits.train), ("valid", splits.valid)):
        counts = f"{len(blocks):,} | {blocks.num_tokens:,} | {blocks.num_bytes:,}"
        row = f"| {name} | {counts} | `{blocks.fingerprint}` |"
        assert row in text
    for line in small.curve(summary.model.parent):
        row = f"| {line['step']} | {line['tokens']:,} | {line.get('valid_loss', 0):.4f} |"
        assert (row in text) == ("perplexity" in line)
    versions = text.partition("## Versions")[2]
    modules = (stablemask, torch, transformers)
    for version in (*(module.__version__ for module in modules), platform.python_version()):
        assert version in versions


@pytest.mark.parametrize("count", [1, 19, 20, 21, 1000])
def test_a_long_curve_is_thinned_out_but_for_its_end(count: int) -> None:
    entries = [{"step": step} for step in range(1, count + 1)]
    found = [entry["step"] for entry in card._thinned(entries)]
    assert found[-1] == count
    assert min(count, 11) <= len(found) <= 20
    assert len({b - a for a, b in pairwise(found)}) <= 1
