"""``stablemask inspect``: tables, JSON and a page, of decoders of ours and of pretrained models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stablemask.hf
from stablemask.analysis import capture
from stablemask.analysis.summary import position_buckets
from stablemask.cli import main
from tests import text
from tests.analysis.panels import FIRST, SECOND, point_at, shown
from tests.chromium import Chromium
from tests.evaluation import small

TEXT = "A stable mask, of 3 words: the fox and the dog sleep on 17 lazy logs; snow falls, and rain. "
KINDS = ("decoder", "stock", "enabled")


def save(folder: Path, kind: str) -> Path:
    """Three kinds of models, on the disk as a user has them."""
    if kind == "decoder":
        return small.save(folder)
    model = text.llama()
    if kind == "enabled":
        stablemask.hf.enable(model, gamma=0.5, horizon=64)
    model.save_pretrained(folder)
    text.tokenizer().save_pretrained(folder)
    return folder


def inspect(*arguments: object) -> int:
    return main(["inspect", *map(str, arguments), "--device", "cpu"])


def values(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "inspect.json").read_text(encoding="utf-8"))["models"]
    return found


def page_data(folder: Path) -> dict[str, Any]:
    page = (folder / "report.html").read_text(encoding="utf-8")
    start = page.index('id="data">') + len('id="data">')
    data: dict[str, Any] = json.loads(page[start : page.index("</script>", start)])
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_attention_maps(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "model", kind)
    assert inspect(folder, "--text", TEXT, "--length", 32, "--pieces", 1, "--epsilon", 0.05) == 0
    (found,) = values(folder / "inspection")
    tokenizer = small.tokenizer() if kind == "decoder" else text.tokenizer()
    ids = torch.tensor([tokenizer(TEXT, add_special_tokens=False)["input_ids"][:32]])
    model = {"decoder": lambda: small.model().float(), "stock": text.llama, "enabled": text.llama}[kind]()
    if kind == "enabled":
        stablemask.hf.enable(model, gamma=0.5, horizon=64)
    with capture(model) as layers, torch.no_grad():
        model(ids, use_cache=False)
    maps = torch.stack([layer.rows(slice(None)) for layer in layers])

    first = maps[..., 0]
    grid = found["by_layer_and_head"]
    assert torch.allclose(torch.tensor(grid["first_token"]), first.mean(-1), atol=2e-6)
    assert torch.allclose(torch.tensor(grid["no_token"]), 1 - maps.sum(-1).mean(-1), atol=2e-6)
    assert (found["mean"]["no_token"] > 0.01) == (kind != "stock")
    assert found["sink_rate"] == float((first.mean(-1) > 0.05).float().mean())
    assert 0 < found["sink_rate"] <= 1
    buckets = position_buckets(32)
    by_position = found["by_layer_head_and_position"]
    assert by_position["positions"] == [[a + 1, b] for a, b in buckets]
    expected = torch.stack([first[..., a:b].mean(-1) for a, b in buckets], -1)
    assert torch.allclose(torch.tensor(by_position["first_token"]), expected, atol=2e-6)
    assert found["by_class"]["positions"] == [32]
    assert sum(found["by_class"]["share_of_tokens"][0]) == pytest.approx(1, abs=1e-5)
    printed = capsys.readouterr().out
    for title in (
        "Attention",
        "By class of tokens",
        "By position",
        "By layer",
        "By layer and head, first token",
    ):
        assert title in printed
    assert ("By layer and head, no token" in printed) == (kind != "stock")
    assert f"{100 * found['mean']['first_token']:.2f}" in printed
    (about,) = page_data(folder / "inspection")["models"]
    assert "".join(about["tokens"]) == TEXT[: len("".join(about["tokens"]))]
    assert torch.allclose(torch.tensor(about["first"]), first.mean(-1), atol=1e-5)
    assert (about["gammas"] is None) == (kind == "stock")


def test_two_models_with_different_tokenizers_on_the_page(browser: Chromium, tmp_path: Path) -> None:
    ours, stock = save(tmp_path / "ours", "decoder"), save(tmp_path / "stock", "stock")
    out = tmp_path / "out"
    assert inspect(ours, stock, "--text", TEXT, "--out", out, "--outliers") == 0
    first, second = values(out)
    assert [first["name"], second["name"]] == ["ours", "stock"]
    assert first["length"] != second["length"], "bytes, and pieces of words"
    assert first["quantization"]["per_tensor"]["perplexity"] > 1
    assert len(second["activations"]) == 2
    browser.open(out / "report.html")
    assert browser.texts(".panel h3") == ["ours", "stock"]
    assert "".join(browser.texts(f"{FIRST} .token")) == TEXT
    assert list(shown(browser, FIRST).parts) == ["first token", "other tokens", "no token"]
    assert list(shown(browser, SECOND).parts) == ["first token", "other tokens"], "it has no pseudo mass"
    rates = [f"{100 * model['sink_rate']:.0f} %" for model in (first, second)]
    assert browser.texts("#tiles .tile:nth-child(1) dd") == rates
    row = shown(browser, SECOND).row
    point_at(browser, FIRST, 3, 1)
    assert (shown(browser, FIRST).row, shown(browser, SECOND).row) == (3, row)
    captions = browser.texts("caption")
    assert {"Activation outliers", "8-bit integers", "Attention", "By head: ours", "By head: stock"} <= {
        *captions
    }
    assert browser.ask("[...document.images].every((i) => i.complete && i.naturalWidth > 0)")


def test_a_file_is_cut_into_pieces_and_the_training_is_shown(tmp_path: Path) -> None:
    folder = save(tmp_path / "run" / "model", "decoder")
    log = [{"step": step, "loss": 3.0 / step} for step in (1, 2, 3)]
    lines = "".join(json.dumps(line) + "\n" for line in log)
    (folder.parent / "metrics.jsonl").write_text(lines, encoding="utf-8")
    source = tmp_path / "text.txt"
    source.write_text(TEXT * 3, encoding="utf-8")
    assert inspect(folder, "--file", source, "--length", 40, "--pieces", 5, "--shown", 12) == 0
    (found,) = values(folder / "inspection")
    assert (found["name"], found["length"], found["pieces"]) == ("run", 40, 5)
    data = page_data(folder / "inspection")
    assert len(data["models"][0]["tokens"]) == 12
    assert "Training loss" in [curve["title"] for curve in data["curves"]]


def test_markup_in_a_text_and_in_a_name_is_shown(browser: Chromium, tmp_path: Path) -> None:
    folder = save(tmp_path / "<b>[red]name", "decoder")
    strange = "<script>window.ran = 1</script> [bold]שלום 👩‍🚀[/bold] \u202e."
    assert inspect(folder, "--text", strange) == 0
    browser.open(folder / "inspection" / "report.html")
    assert browser.text(".panel h3") == "<b>[red]name"
    assert "<script>window.ran" in "".join(browser.texts(".token"))
    assert browser.ask("window.ran ?? null") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "text, file: got both or neither; allowed is one of them"),
        (["--text", "a b c", "--file", "builtin"], "text, file: got both or neither"),
        (["--text", "a"], "text: got 1 tokens; allowed: texts of two or more"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--text", TEXT, "--length", 1], "length, count: got 1, 4"),
        (["--text", TEXT, "--epsilon", 1], "epsilon: got 1.0; allowed: 0 ≤ ε < 1"),
        (["--text", TEXT, "--shown", 0], "shown: got 0; allowed: 1 or more"),
        (["--text", TEXT, "--log", "a", "b"], "log: got 2; allowed: none, or one for each model"),
        (["--text", "half \udce9 of a letter"], "which is not UTF-8"),
    ],
)
def test_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[object], message: str
) -> None:
    folder = save(tmp_path / "model", "decoder")
    assert inspect(folder, *options) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "inspection" / "report.html").exists()


def test_models_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "model", "decoder")
    assert inspect(folder, folder, "--text", TEXT) == 2
    assert "twice; allowed: two different ones" in capsys.readouterr().err
    assert inspect(folder, folder, folder, "--text", TEXT) == 2
    assert "models: got 3; allowed: one, or two to be compared" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert inspect(tmp_path / "empty", "--text", TEXT) == 2
    urpe = small.save(tmp_path / "urpe", "urpe")
    assert inspect(urpe, "--text", TEXT) == 2
    assert "urpe" in capsys.readouterr().err
