"""Pages of the documentation as programs: their Python runs, and so do their commands, shortened.

A page runs in a folder that has what a reader would have: the recipes, a text, a pretrained model of the hub.
What follows from the blocks above is there for those below, so a page is one program from top to bottom.
"""

import io
import json
import random
import re
import runpy
import shlex
import shutil
import sys
import tomllib
import warnings
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from stablemask.cli import COMMANDS, main
from stablemask.training import load_recipe
from tests import text
from tests.reproduce import small
from tests.server import started

ROOT = Path(__file__).parents[1]
PYTHON, NEEDS_GPU, COMMAND, RECIPE = "python", "python {.cuda}", "sh", "toml"
PRETRAINED = "HuggingFaceTB/SmolLM2-135M"  # in the folder of a page a random Llama has this name
PORT = "127.0.0.1:8000"

# What is added to a command so that it takes seconds: the later of two values of an option counts.
SHORTER = {
    "train": "--train.steps 4 --train.length 32 --train.batch-size 4 --train.eval-every 2 "
    "--train.eval-tokens 512 --data.source texts.jsonl --data.tokenizer bytes --data.cache cache",
    "eval": "--text texts.jsonl --perplexity.max-tokens 2000 --extrapolation.times 1 2 "
    "--extrapolation.max-tokens 512 --streaming.tokens 200 --latency.prompts 4 --latency.outputs 2 "
    "--latency.rounds 2 --latency.max-seconds 1",
    "eval position": "--lengths 8 --jobs 1 --setting.steps 2 --setting.batch-size 2 --setting.width 16",
    "inspect": "--length 64",
    "reproduce": "--data texts.jsonl --study study.toml --seeds 1 --jobs 1",
    "theory": "--length 48 --steps 2",
}

_FENCE = re.compile(r"^```((?:python|sh|toml)[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """What stands behind the fence, the text of the block, and the line of the page on which it begins."""

    info: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The Python, the commands and the recipes of a page, in their order."""
    content = page.read_text(encoding="utf-8")
    return [
        Block(m[1].strip(), m[2], content.count("\n", 0, m.start(2)) + 1) for m in _FENCE.finditer(content)
    ]


def commands(code: str) -> list[list[str]]:
    """The command lines of a block as words, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_page(page: Path, folder: Path) -> None:
    """Run a page from top to bottom in a folder, which is the working directory."""
    furnish(folder)
    namespace: dict[str, object] = {"__name__": "__main__"}
    with ExitStack() as servers:
        port = PORT
        for info, code, line in blocks(page):
            if info == COMMAND:
                for words in commands(code):
                    if words[:2] == ["stablemask", "serve"]:
                        url = servers.enter_context(started(Path(words[2]), *words[3:], "--port", "0"))
                        port = url.removeprefix("http://").removesuffix("/v1")
                    else:
                        run_command(words)
                continue
            if info == RECIPE:
                write_recipe(code)
                continue
            program = compiled(page, code.replace(PORT, port), line)
            if info == PYTHON:
                exec(program, namespace)  # noqa: S102 - running the page's own code is the test
            else:
                assert info == NEEDS_GPU, (
                    f"{page}:{line}: {info!r}; allowed: {PYTHON}, {NEEDS_GPU}, {COMMAND}"
                )


def compiled(page: Path, code: str, line: int) -> object:
    """The code with the page's own line numbers, so that a failure points into the page."""
    return compile("\n" * (line - 1) + code, str(page), "exec")


def run_command(words: Sequence[str]) -> None:
    """A command as a page has it, in as short a form as shows that it works."""
    match list(words):
        case ["stablemask", *rest]:
            assert main(shortened(rest)) == 0, shlex.join(words)
        case ["torchrun", *options]:
            given = get_args_parser().parse_args(options)
            plan_training(given, int(given.nnodes.split(":")[-1]) * int(given.nproc_per_node))
        case ["accelerate", "launch", *options]:
            given = launch_command_parser().parse_args(options)
            plan_training(given, load_config_from_file(given.config_file).num_processes)
        case ["python", "-m", module, *options] if module.startswith(("benchmarks.", "stablemask.")):
            check_options(module, options)
        case ["make", target, *_]:
            assert re.search(
                rf"^{target}:.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
        case ["pip", "install", package]:
            known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            extras = re.fullmatch(r"stablemask(?:\[([a-z,]+)\])?", package)
            assert extras, package
            assert {*filter(None, (extras[1] or "").split(","))} <= {*known["optional-dependencies"]}
        case _:
            raise AssertionError(f"nothing here can tell whether this is right: {shlex.join(words)}")


def plan_training(launched: Namespace, processes: int) -> None:
    """A launcher of many processes: what they would run is planned for as many."""
    assert launched.module
    assert launched.training_script == "stablemask.cli"
    assert main([*launched.training_script_args, "--dry-run", "--processes", str(processes)]) == 0


def shortened(words: Sequence[str]) -> list[str]:
    """The words behind ``stablemask``, with those that make the command take seconds."""
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    if "--dry-run" in words:
        return list(words)
    return [*words, *SHORTER.get(name, "").split()]


def write_recipe(code: str) -> None:
    """A recipe goes into the file that its first line names, and has to be a right one."""
    name = re.match(r"# (recipes/[a-z-]+\.toml)\n", code)
    assert name, "the first line of a recipe is a comment with the name of its file"
    Path(name[1]).write_text(code, encoding="utf-8")
    load_recipe(name[1])


def check_options(module: str, options: Sequence[str]) -> None:
    """A program of ours must know the options; it is not run."""
    printed = io.StringIO()
    with patch.object(sys, "argv", [module, "--help"]), redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        with pytest.raises(SystemExit):
            runpy.run_module(module, run_name="__main__")
    known = re.findall(r"--[a-z-]+", printed.getvalue())
    assert {o for o in options if o.startswith("--")} <= {*known}, (module, options, known)


def furnish(folder: Path) -> None:
    """What a reader has: recipes, texts, a pretrained model."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "study.toml").write_text(small.STUDY, encoding="utf-8")
    random.seed(0)
    words = " ".join(text.SENTENCES).split()
    texts = [" ".join(random.choices(words, k=110)) for _ in range(40)]  # noqa: S311 - a text, not a secret
    lines = "".join(json.dumps({"text": one}) + "\n" for one in texts)
    (folder / "texts.jsonl").write_text(lines, encoding="utf-8")
    (folder / "your.txt").write_text("\n".join(texts[:4]), encoding="utf-8")
    text.llama().save_pretrained(folder / PRETRAINED)
    text.tokenizer().save_pretrained(folder / PRETRAINED)
