"""``stablemask doctor``: the back ends of this machine, and the architectures by the table of the tests."""

import importlib.util
import json

import pytest
import torch

from stablemask import backends, cli
from stablemask.backends import preference
from tests.hf import survey


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[list[str]]]:
    """The exit code, and the words of every line."""
    code = cli.main(["doctor", *arguments])
    return code, [line.split() for line in capsys.readouterr().out.splitlines()]


def test_every_back_end_has_a_line_in_order_of_preference(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = printed(capsys)
    table = lines[next(i for i, words in enumerate(lines) if words[:2] == ["Back", "ends"]) :]
    marks = {words[0]: words[1:3] for words in table if words and words[0] in backends.NAMES}
    assert code == 0
    assert tuple(marks) == preference(torch.device("cpu"))
    assert marks["cpu_flash"] == marks["reference"] == ["yes", "yes"]
    assert marks["flex"] == ["no", "yes"]
    assert marks["cuda_flash"] == ["no", "no"]
    assert ["torch", torch.__version__] in lines


def test_a_machine_left_with_the_dense_form_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(backends.NAMES) - {"reference"}:
        monkeypatch.setattr(backends.module(name), "why_not", lambda _: "broken")
    code, lines = printed(capsys)
    assert code == 1
    assert "only the dense reference works here" in " ".join(lines[-1])


def test_the_architectures_are_those_of_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = printed(capsys, "--architectures")
    expected = json.loads(survey.TABLE.read_text(encoding="utf-8"))
    shown = {words[0]: words[1] for words in lines if words and words[0] in expected}
    assert code == 0
    assert shown == {name: "yes" if line["supported"] else "no" for name, line in expected.items()}
    text = " ".join(word for words in lines for word in words)
    assert all(str(expected[name]["remark"]) in text for name in ("bloom", "gpt_oss"))


def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    code, lines = printed(capsys, "--architectures")
    assert code == 2
    assert "stablemask[hf]" in " ".join(lines[0])
