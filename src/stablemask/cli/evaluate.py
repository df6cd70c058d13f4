"""``stablemask eval DIR``: evaluations of a trained model, their values as a table and as JSON lines."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from rich.console import Console

from stablemask.cli.evaluate_figures import write_figure
from stablemask.cli.evaluate_suites import (
    Subject,
    Suite,
    Work,
    downstream_suite,
    extrapolation_suite,
    latency_suite,
    perplexity_suite,
    streaming_suite,
)
from stablemask.cli.terminal import environment_line, make_console, make_progress
from stablemask.evaluation.cells import Results, Values
from stablemask.evaluation.downstream import Downstream
from stablemask.evaluation.extrapolation import Extrapolation
from stablemask.evaluation.latency import Latency
from stablemask.evaluation.models import Dtype, describe, open_model, open_tokenizer
from stablemask.evaluation.perplexity import Perplexity
from stablemask.evaluation.streaming import Streaming


@dataclass(frozen=True)
class Options:
    """Evaluate trained models.

    Every finished piece is a JSON file in the output folder; the same command goes on where it stopped. All
    values are then in results.jsonl there, one a line. For the position tasks see: stablemask eval position.

    Args:
        model: A folder, or a name on the hub: any causal language model of transformers. Of several, the
            curves of extrapolation and latency come into one figure.
        suite: Any of perplexity, extrapolation, streaming, latency and downstream, with commas between them.
        text: What to evaluate on: a file or a folder (.txt, .jsonl or .parquet, also compressed), a dataset
            on the hub, or "builtin", the part of the built-in corpus that training holds out.
        begins: Regular expression of the lines that begin a document; by default every file or row is one.
        out: Where the results go; the folder "evaluation" of the model by default. With several models each
            has a folder of its own in it.
        device: cpu or cuda.
        dtype: Of the weights and of what is computed with them.
        perplexity: How to measure perplexity.
        extrapolation: How to measure perplexity against length.
        streaming: How to read one long stream.
        latency: How to time generation.
        downstream: How to score downstream tasks.
    """

    model: Annotated[tuple[str, ...], tyro.conf.Positional]
    suite: str = "perplexity"
    text: str = "builtin"
    begins: str | None = None
    out: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Dtype = "float32"
    perplexity: Perplexity = field(default_factory=Perplexity)
    extrapolation: Extrapolation = field(default_factory=Extrapolation)
    streaming: Streaming = field(default_factory=Streaming)
    latency: Latency = field(default_factory=Latency)
    downstream: Downstream = field(default_factory=Downstream)


SUITES: dict[str, Callable[[Subject, Options], Suite]] = {
    "perplexity": lambda subject, options: perplexity_suite(subject, options.perplexity),
    "extrapolation": lambda subject, options: extrapolation_suite(subject, options.extrapolation),
    "streaming": lambda subject, options: streaming_suite(subject, options.streaming),
    "latency": lambda subject, options: latency_suite(subject, options.latency),
    "downstream": lambda subject, options: downstream_suite(subject, options.downstream),
}


def run(options: Options) -> int:
    """Print a table for every suite. 0: all was measured; 2: something in the options cannot be."""
    console = make_console()
    try:
        names = _suite_names(options.suite)
        evaluated = [_evaluate(console, options, path, names) for path in _models(options.model)]
        _draw(console, options, names, evaluated)
    except (OSError, ValueError) as error:
        print(f"stablemask eval: {error}", file=sys.stderr)
        return 2
    return 0


class Evaluated(NamedTuple):
    """A model whose suites are finished."""

    name: str
    folder: Path
    suites: Sequence[Suite]
    values: Sequence[Sequence[Values]]


def _evaluate(console: Console, options: Options, path: str, names: Sequence[str]) -> Evaluated:
    folder = _folder(options, path)
    results = Results(folder)
    tokenizer = open_tokenizer(path)
    model = open_model(path, device=options.device, dtype=options.dtype)
    subject = Subject(model, tokenizer, options.text, options.begins, options.dtype)
    suites = [SUITES[name](subject, options) for name in names]
    console.print(f"{describe(path)}; {options.dtype} on {options.device}; {environment_line()}")
    values = [finish(console, results, suite) for suite in suites]
    lines = results.write_lines([work.cell for suite in suites for work in suite.works])
    console.print(f"\nAll values, one a line: {lines}", style="dim", soft_wrap=True)
    return Evaluated(describe(path), folder, suites, values)


def finish(console: Console, results: Results, suite: Suite) -> list[Values]:
    """Do the works whose cells are not finished; print the table of all and return their values."""
    _do(console, results, [work for work in suite.works if results.find(work.cell) is None])
    values = [results.find(work.cell) or {} for work in suite.works]
    console.print(suite.table(values))
    return values


def _draw(console: Console, options: Options, names: Sequence[str], evaluated: Sequence[Evaluated]) -> None:
    """The curves of all models, a figure for each suite that has some; beside the results of the first."""
    folder = options.out or evaluated[0].folder
    for i, name in enumerate(names):
        chart = evaluated[0].suites[i].chart
        if chart is None:
            continue
        curves = {}
        for model in evaluated:
            own = model.suites[i].chart
            assert own is not None
            for line, points in own.curves(model.values[i]).items():
                curves[f"{model.name}, {line}" if len(evaluated) > 1 else line] = points
        try:
            text = f"Curves: {write_figure(chart, folder / f'{name}.svg', curves)}"
        except ModuleNotFoundError as missing:
            text = f"No figure: it needs {missing.name}: pip install 'stablemask[report]'"
        console.print(text, style="dim", soft_wrap=True)


def _do(console: Console, results: Results, works: Sequence[Work]) -> None:
    with make_progress(console) as progress:
        for done, work in enumerate(works):
            title = f"{work.title} ({done + 1} of {len(works)})" if len(works) > 1 else work.title
            task = progress.add_task(title, total=work.steps)
            begin = time.perf_counter()
            values = list(work.run(lambda steps, task=task: progress.advance(task, steps)))  # type: ignore[misc]
            results.save(work.cell, values, time.perf_counter() - begin)
            progress.remove_task(task)


def _suite_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SUITES:
            raise ValueError(f"suite: got {name!r}; allowed: {', '.join(SUITES)}")
    return names


def _models(paths: Sequence[str]) -> Sequence[str]:
    names = [describe(path) for path in paths]
    if not paths or len(set(names)) < len(names):
        raise ValueError(f"model: got {', '.join(paths) or 'none'}; allowed: one or more, of different names")
    return paths


def _folder(options: Options, path: str) -> Path:
    if options.out is None:
        return Path(path) / "evaluation"
    return options.out / describe(path) if len(options.model) > 1 else options.out
