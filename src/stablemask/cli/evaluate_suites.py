"""The suites of ``stablemask eval``: which cells they consist of, and the table of each."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rich.console import RenderableType
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stablemask.cli.evaluate_figures import Chart, extrapolation_curves, latency_curves
from stablemask.cli.evaluate_tables import (
    downstream_table,
    extrapolation_table,
    latency_table,
    streaming_table,
    value_table,
)
from stablemask.evaluation.cells import Cell, Values
from stablemask.evaluation.documents import Document, cut, digest, read_texts, tokenize
from stablemask.evaluation.downstream import Downstream
from stablemask.evaluation.extrapolation import Extrapolation, cut_sequences, extrapolate
from stablemask.evaluation.latency import Latency, latency
from stablemask.evaluation.models import fingerprint, training_length
from stablemask.evaluation.perplexity import Perplexity, perplexity
from stablemask.evaluation.reading import Method, why_not
from stablemask.evaluation.streaming import Streaming, join, stream_text
from stablemask.measuring import environment

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and on what; the text is read when a suite asks for it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: str
    begins: str | None
    dtype: str

    @cached_property
    def documents(self) -> list[Document]:
        """The text, as tokens."""
        return tokenize(read_texts(self.text, self.begins), self.tokenizer)

    @cached_property
    def identity(self) -> dict[str, object]:
        """What decides every value, whatever the suite."""
        device = self.model.device.type
        return {"model": fingerprint(self.model), "dtype": self.dtype, "device": device}


class Work(NamedTuple):
    """A cell, its name and its steps for the progress bar, and how to compute its values."""

    cell: Cell
    title: str
    steps: int
    run: Callable[[Advance], Iterable[tuple[str, float]]]


class Suite(NamedTuple):
    """Cells, the table of their values, and their curves where they have some."""

    works: Sequence[Work]
    table: Callable[[Sequence[Values]], RenderableType]
    chart: Chart | None = None


def perplexity_suite(subject: Subject, settings: Perplexity) -> Suite:
    """One cell: a text in windows of one length."""
    length = settings.length or training_length(subject.model)
    documents: Sequence[Document] = subject.documents
    if settings.max_tokens is not None:
        documents = cut(documents, settings.max_tokens)
    stride = settings.stride or length
    decides = {"length": length, "stride": stride, "text": digest(documents)}
    title = f"Perplexity, windows of {length}, stride {stride}"
    work = Work(
        Cell("perplexity", {**subject.identity, **decides}),
        title,
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
    return Suite([work], lambda values: value_table(title, values[0]))


def extrapolation_suite(subject: Subject, settings: Extrapolation) -> Suite:
    """A cell for every method and length that the model can read."""
    model = subject.model
    trained = settings.length or training_length(model)
    keys = settings.keys or trained
    lengths = [trained * times for times in settings.times]
    sequences = cut_sequences(subject.documents, max(lengths), settings.max_tokens)
    text = digest([Document(sequence, 0) for sequence in sequences])
    places: list[tuple[Method, int]] = []
    notes: dict[str, str] = {}
    for method in settings.methods:
        for length in lengths:
            reason = why_not(model, method, length)
            if reason is None:
                places.append((method, length))
            else:
                notes.setdefault(method, reason)

    def work(method: Method, length: int) -> Work:
        kept = {} if method == "full" else {"keys": keys}
        kept = {**kept, "pinned": settings.pinned} if method == "pinned" else kept
        decides = {"method": method, "length": length, "text": text, **kept}
        return Work(
            Cell("extrapolation", {**subject.identity, **decides}),
            f"Perplexity at length {length}, {method}",
            sequences[:, 1:].numel(),
            lambda advance: extrapolate(
                model,
                sequences,
                length=length,
                method=method,
                keys=keys,
                pinned=settings.pinned,
                batch_size=settings.batch_size,
                chunk=settings.chunk,
                on_tokens=advance,
            ),
        )

    title = f"Perplexity against length; window and pinned keep {keys} keys"
    chart = Chart(
        "Perplexity against length",
        "length of the sequences, in tokens",
        "perplexity",
        lambda values: extrapolation_curves(dict(zip(places, values, strict=True))),
        (trained, "training length"),
    )
    return Suite(
        [work(*place) for place in places],
        lambda values: extrapolation_table(title, dict(zip(places, values, strict=True)), notes),
        chart,
    )


def streaming_suite(subject: Subject, settings: Streaming) -> Suite:
    """A cell for every method."""
    model = subject.model
    keys = settings.keys or training_length(model)
    stream = join(subject.documents, settings.tokens)
    text = digest([Document(stream, 0)])
    reasons = {method: why_not(model, method, settings.tokens) for method in settings.methods}
    methods = [method for method, reason in reasons.items() if reason is None]
    notes: dict[str, str] = {m: reason for m, reason in reasons.items() if reason is not None}

    def work(method: Method) -> Work:
        kept = {} if method == "full" else {"keys": keys}
        kept = {**kept, "pinned": settings.pinned} if method == "pinned" else kept
        decides = {"method": method, "text": text, "chunk": settings.chunk, **kept}
        return Work(
            Cell("streaming", {**subject.identity, **decides}),
            f"Streaming {settings.tokens:,} tokens, {method}",
            settings.tokens,
            lambda advance: stream_text(
                model,
                stream,
                method=method,
                keys=keys,
                pinned=settings.pinned,
                chunk=settings.chunk,
                on_tokens=advance,
            ),
        )

    title = f"{settings.tokens:,} tokens in one stream; {keys} keys are kept"
    return Suite(
        [work(method) for method in methods],
        lambda values: streaming_table(title, dict(zip(map(str, methods), values, strict=True)), notes),
    )


def latency_suite(subject: Subject, settings: Latency) -> Suite:
    """A cell for every length of prompt and output; its values hold for this machine."""
    about = environment()
    machine = {name: about[name] for name in ("cpu", "gpu", "torch")}
    places = [(prompt, output) for prompt in settings.prompts for output in settings.outputs]
    decides = {"batch": settings.batch_size, "threads": settings.num_threads, "rounds": settings.rounds}

    def work(prompt: int, output: int) -> Work:
        return Work(
            Cell(
                "latency",
                {**subject.identity, **machine, **decides, "prompt": prompt, "output": output},
            ),
            f"Latency, prompt {prompt}, output {output}",
            2 * settings.rounds,
            lambda advance: latency(
                subject.model,
                prompt=prompt,
                output=output,
                setting=settings,
                on_round=lambda _: advance(1),
            ),
        )

    chart = Chart(
        "Latency of generation, as a ratio to the baseline",
        "tokens generated",
        "ratio",
        lambda values: latency_curves(dict(zip(places, values, strict=True))),
    )
    return Suite(
        [work(*place) for place in places],
        lambda values: latency_table(dict(zip(places, values, strict=True))),
        chart,
    )


def downstream_suite(subject: Subject, settings: Downstream) -> Suite:
    """A cell for every task."""
    from stablemask.evaluation import harness  # noqa: PLC0415 - importing lm-eval takes seconds

    tasks = settings.tasks or harness.TASKS
    files = harness.find_files(tasks, settings.data)

    def work(task: str) -> Work:
        rows = None if files is None else hashlib.sha256(files[task].read_bytes()).hexdigest()[:12]
        decides: Mapping[str, object] = {"task": task, "rows": rows, "limit": settings.limit}
        return Work(
            Cell("downstream", {**subject.identity, **decides}),
            f"Downstream, {task}",
            1,
            lambda _: harness.run_downstream(
                subject.model,
                subject.tokenizer,
                tasks=[task],
                data=settings.data,
                limit=settings.limit,
                batch_size=settings.batch_size,
            ),
        )

    return Suite(
        [work(task) for task in tasks],
        lambda values: downstream_table(dict(zip(tasks, values, strict=True)), settings.limit),
    )
