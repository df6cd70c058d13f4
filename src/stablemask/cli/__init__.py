"""The ``stablemask`` command.

A subcommand is a module of this package with a dataclass ``Options``, from which its command line is built,
and a function ``run(options) -> int``. One whose defaults are in a file has ``parse(arguments, program)`` as
well, which returns what ``run`` gets. To add a subcommand, write the module and give it a line in
``COMMANDS``: it is imported when it is asked for, and not before. A command may have two words.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from stablemask import __version__


class Command(NamedTuple):
    """One line of help, the extras that install what the command needs, and its module if named otherwise."""

    summary: str
    extra: str = "cli"
    module: str = ""


COMMANDS = {
    "demo": Command(
        "a pair of small models trained here, with StableMask and without", "cli,train,eval,report"
    ),
    "demo operation": Command(
        "what the operation is, that it is right and how fast it is, on this machine", "cli", "demo_operation"
    ),
    "bench": Command("time a call of your choice on every back end that can serve it"),
    "serve": Command("an OpenAI-compatible server for a model with StableMask", extra="cli,serve"),
    "doctor": Command("versions, devices, and which back ends work here or why they do not"),
    "train": Command("pretrain a model by a recipe; a killed run goes on with the same command", "cli,train"),
    "eval": Command("perplexity and other evaluations of a trained model", "cli,eval", "evaluate"),
    "eval position": Command(
        "the position tasks of the paper, learned by small models", "cli,hf", "evaluate_position"
    ),
    "inspect": Command("what a model's attention does with a text, as tables and a page", "cli,eval,report"),
    "reproduce": Command(
        "tables, figures and theorems of the paper, its values beside measured ones", "cli,train,eval,report"
    ),
    "theory": Command("the theorems of the paper, put to the test one by one", "cli,hf"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code is returned."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"stablemask: got {name!r}; allowed: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        import tyro  # noqa: PLC0415 - listing the commands works without it

        command = importlib.import_module(f"stablemask.cli.{COMMANDS[name].module or name}")
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] == "stablemask":
            raise
        extra = f"pip install 'stablemask[{COMMANDS[name].extra}]'"
        print(f"stablemask {name}: needs {missing.name}, which is not installed: {extra}", file=sys.stderr)
        return 2
    program = f"stablemask {name}"
    if hasattr(command, "parse"):
        options = command.parse(rest, program)
    else:
        options = tyro.cli(command.Options, prog=program, args=rest)
    code: int = command.run(options)
    return code


def _help() -> str:
    lines = [f"  {name:{max(map(len, COMMANDS))}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: stablemask COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "stablemask COMMAND --help lists its options.",
        ]
    )
