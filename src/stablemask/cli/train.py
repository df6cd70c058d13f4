"""``stablemask train RECIPE``: a run of a recipe, or what it would take."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import distributed

from stablemask.data import DataConfig
from stablemask.training import ModelConfig, Recipe, TrainConfig, load_recipe, plan, train


@dataclass(frozen=True)
class Options:
    """Train the model of a recipe. The recipe comes first; every setting in it can be given another value.

    A run that was killed goes on with the same command. Several processes: put torchrun --nproc-per-node N -m
    in front, and stablemask.cli for stablemask.

    Args:
        recipe: A TOML file.
        out: Folder of the run; by default runs/NAME, after the recipe.
        dry_run: Train nothing; print parameters, memory, operations and time.
        processes: For --dry-run: on how many processes.
        model: The decoder.
        data: The text.
        train: The training.
    """

    recipe: Annotated[Path, tyro.conf.Positional]
    out: Path | None = None
    dry_run: bool = False
    processes: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class Job:
    """A recipe with all overrides, and what to do with it; or what is wrong with the arguments."""

    recipe: Recipe | None = None
    out: Path = Path()
    planned_processes: int | None = None
    problem: str = ""


def parse(arguments: Sequence[str], program: str) -> Job:
    """Read the recipe, then the options with its values as their defaults."""
    first = arguments[0] if arguments else "--help"
    if first.startswith("-"):
        if not arguments or {"-h", "--help"}.intersection(arguments):
            tyro.cli(Options, prog=program, args=["--help"])
        return Job(problem=f"recipe: got {first!r}; allowed: a TOML file, before all options")
    try:
        recipe = load_recipe(first)
        default = Options(Path(first), model=recipe.model, data=recipe.data, train=recipe.train)
        options = tyro.cli(Options, prog=program, args=arguments[1:], default=default)
        parts = ("model", "data", "train")
        overrides = {name: _changed(getattr(recipe, name), getattr(options, name)) for name in parts}
        recipe = load_recipe(first, overrides)
    except (OSError, ValueError) as error:
        return Job(problem=str(error))
    out = options.out or Path("runs") / recipe.name
    return Job(recipe, out, options.processes if options.dry_run else None)


def run(job: Job) -> int:
    """0: trained; 1: the run broke; 2: something in the options is wrong; 130: interrupted."""
    if job.recipe is None:
        print(f"stablemask train: {job.problem}", file=sys.stderr)
        return 2
    try:
        if job.planned_processes is not None:
            print("\n".join(plan(job.recipe, job.planned_processes).lines()))
            return 0
        summary = train(job.recipe, job.out)
        _leave_group()
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"stablemask train: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    except KeyboardInterrupt:
        print("stablemask train: interrupted; the same command goes on", file=sys.stderr)
        return 130
    if os.environ.get("RANK", "0") != "0":  # of several processes one says it
        return 0
    print(
        f"{summary.model}: validation perplexity {summary.perplexity:.4f} after {summary.steps:,} updates, "
        f"{summary.tokens:,} tokens, {summary.seconds:,.0f} s"
    )
    return 0


def _leave_group() -> None:
    """A process that exits inside a group of gloo may abort while another still talks to it."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def _changed(before: Any, after: Any) -> Mapping[str, Any]:
    old = asdict(before)
    return {name: value for name, value in asdict(after).items() if value != old[name]}
