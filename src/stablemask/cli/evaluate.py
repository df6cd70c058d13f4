"""``stablemask eval DIR``: evaluations of a trained model, their values as a table and as JSON lines."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from stablemask.cli.terminal import environment_line, make_console, make_progress
from stablemask.evaluation.cells import Cell, Results
from stablemask.evaluation.documents import Document, cut, digest, read_texts, tokenize
from stablemask.evaluation.models import (
    Dtype,
    describe,
    fingerprint,
    open_model,
    open_tokenizer,
    training_length,
)
from stablemask.evaluation.perplexity import Perplexity, perplexity

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Options:
    """Evaluate a trained model.

    Every finished piece is a JSON file in the output folder; the same command goes on where it stopped. All
    values are then in results.jsonl there, one a line. For the position tasks see: stablemask eval position.

    Args:
        model: A folder, or a name on the hub: any causal language model of transformers.
        suite: Any of perplexity, with commas between them.
        text: What to evaluate on: a file or a folder (.txt, .jsonl or .parquet, also compressed), a dataset
            on the hub, or "builtin", the part of the built-in corpus that training holds out.
        begins: Regular expression of the lines that begin a document; by default every file or row is one.
        out: Where the results go; the folder "evaluation" of the model by default.
        device: cpu or cuda.
        dtype: Of the weights and of what is computed with them.
        perplexity: How to measure perplexity.
    """

    model: Annotated[str, tyro.conf.Positional]
    suite: str = "perplexity"
    text: str = "builtin"
    begins: str | None = None
    out: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Dtype = "float32"
    perplexity: Perplexity = field(default_factory=Perplexity)


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and on what."""

    model: PreTrainedModel
    documents: Sequence[Document]
    identity: Mapping[str, object]


@dataclass(frozen=True)
class Work:
    """A cell, its steps for the progress bar, and how to compute its values."""

    cell: Cell
    title: str
    steps: int
    run: Callable[[Advance], Iterable[tuple[str, float]]]


def run(options: Options) -> int:
    """Print a table for every suite. 0: all was measured; 2: something in the options cannot be."""
    console = make_console()
    try:
        names = _suites(options.suite)
        folder = options.out or Path(options.model) / "evaluation"
        subject = _subject(options)
        works = [work for name in names for work in SUITES[name](options, subject)]
        console.print(f"{describe(options.model)}; {options.dtype} on {options.device}; {environment_line()}")
        path = finish(console, Results(folder), works)
    except (OSError, ValueError) as error:
        print(f"stablemask eval: {error}", file=sys.stderr)
        return 2
    console.print(f"\nAll values, one a line: {path}", style="dim", soft_wrap=True)
    return 0


def finish(console: Console, results: Results, works: Sequence[Work]) -> Path:
    """Do the works whose cells are not finished, print all values, write them as JSON lines."""
    open_works = [work for work in works if results.find(work.cell) is None]
    with make_progress(console) as progress:
        for work in open_works:
            task = progress.add_task(work.title, total=work.steps)
            begin = time.perf_counter()
            values = list(work.run(lambda steps, task=task: progress.advance(task, steps)))  # type: ignore[misc]
            results.save(work.cell, values, time.perf_counter() - begin)
            progress.remove_task(task)
    for work in works:
        console.print(_table(work.title, results.find(work.cell) or {}))
    return results.write_lines([work.cell for work in works])


def _suites(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SUITES:
            raise ValueError(f"suite: got {name!r}; allowed: {', '.join(SUITES)}")
    return names


def _subject(options: Options) -> Subject:
    texts = read_texts(options.text, options.begins)
    documents = tokenize(texts, open_tokenizer(options.model))
    model = open_model(options.model, device=options.device, dtype=options.dtype)
    identity = {"model": fingerprint(model), "dtype": options.dtype, "device": options.device}
    return Subject(model, documents, identity)


def _perplexity(options: Options, subject: Subject) -> Iterator[Work]:
    settings = options.perplexity
    length = settings.length or training_length(subject.model)
    documents = subject.documents
    if settings.max_tokens is not None:
        documents = cut(documents, settings.max_tokens)
    stride = settings.stride or length
    decides = {"length": length, "stride": stride, "text": digest(documents)}
    yield Work(
        Cell("perplexity", {**subject.identity, **decides}),
        f"Perplexity, windows of {length}, stride {stride}",
        sum(len(d.tokens) - 1 for d in documents),
        lambda advance: perplexity(
            subject.model,
            documents,
            length=length,
            stride=stride,
            batch_size=settings.batch_size,
            on_tokens=advance,
        ),
    )


SUITES: dict[str, Callable[[Options, Subject], Iterator[Work]]] = {"perplexity": _perplexity}


def _table(title: str, values: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in values.items():
        table.add_row(name, f"{value:,.0f}" if value.is_integer() else f"{value:,.4f}")
    return table
