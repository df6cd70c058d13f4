"""The pair of the demo: two small decoders that differ in nothing but StableMask, trained side by side.

Each has a process of its own, which trains it and then measures it. Whatever is finished stays on disk, so a
run that was interrupted goes on where it stopped.
"""

import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback
from transformers.utils import logging as hf_logging

from stablemask.data import DataConfig
from stablemask.evaluation.cells import Cell, Results
from stablemask.evaluation.documents import read_texts, tokenize
from stablemask.evaluation.extrapolation import cut_sequences, extrapolate
from stablemask.evaluation.latency import Latency, latency
from stablemask.evaluation.models import open_model, open_tokenizer
from stablemask.evaluation.position_tasks import Encoding, Setting, Task, position_task
from stablemask.training import ModelConfig, Recipe, TrainConfig, train

Remedy = Literal["none", "stablemask"]
PAIR: dict[Remedy, str] = {"none": "RoPE", "stablemask": "RoPE + StableMask"}
TIMES_LONGER = 4
POSITION_LENGTH = 64
_POSITION_TASKS: tuple[Task, ...] = ("mapping", "odd_even")
_ALIVE_SECONDS = 0.5

Advance = Callable[[Remedy, str, int], object]  # of whom, what it does now, steps just done


@dataclass(frozen=True)
class Plan:
    """How much is done: by default what two cores do in a few minutes.

    Args:
        steps: Updates of each model.
        length: T, the training length.
        batch_size: Sequences in an update.
        seed: Of the weights and of the order of the sequences, the same for both.
        task: The models that learn the position tasks.
        long_tokens: Tokens of the text that is read in sequences of 4T.
        decoding: Prompt, output and rounds of the comparison of decoding times.
    """

    steps: int = 400
    length: int = 128
    batch_size: int = 32
    seed: int = 0
    task: Setting = field(default_factory=lambda: Setting(steps=300))
    long_tokens: int = 32_768
    decoding: Latency = field(default_factory=lambda: Latency((64,), (32,), rounds=10, max_seconds=20.0))

    @property
    def effort(self) -> int:
        """Steps of the progress bar of one model."""
        return self.steps + len(_POSITION_TASKS) * self.task.steps


def recipe(remedy: Remedy, plan: Plan) -> Recipe:
    """What is trained: RoPE, four layers, on the documentation and source of Python's standard library."""
    return Recipe(
        name=f"demo-{remedy}",
        model=ModelConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=8,
            remedy=remedy,
        ),
        data=DataConfig(tokenizer="bpe:2048"),
        train=TrainConfig(
            steps=plan.steps,
            length=plan.length,
            batch_size=plan.batch_size,
            learning_rate=3e-3,
            warmup_steps=max(1, plan.steps // 10),
            weight_decay=0.1,
            seed=plan.seed,
            eval_every=max(1, plan.steps // 8),
            eval_tokens=32_768,
            save_every=max(1, plan.steps // 8),
        ),
    )


def grow_pair(folder: Path, plan: Plan, advance: Advance) -> dict[Remedy, dict[str, float]]:
    """Train and measure both, at the same time where there are two cores; what was measured, by remedy.

    Raises:
        RuntimeError: One of them failed; the message is that of its process.
    """
    context = multiprocessing.get_context("spawn")
    news = context.Queue()
    processes = {
        remedy: context.Process(target=_grow, args=(remedy, folder, plan, news), daemon=True)
        for remedy in PAIR
    }
    for process in processes.values():
        process.start()
    values: dict[Remedy, dict[str, float]] = {}
    try:
        while len(values) < len(PAIR):
            try:
                kind, remedy, *rest = news.get(timeout=_ALIVE_SECONDS)
            except queue.Empty:
                _refuse_the_dead(processes, values)
                continue
            if kind == "failed":
                raise RuntimeError(f"{PAIR[remedy]}: {rest[0]}")
            if kind == "done":
                values[remedy] = rest[0]
            else:
                advance(remedy, *rest)
    finally:
        for process in processes.values():
            if len(values) < len(PAIR):
                process.terminate()
            process.join()
    return values


def _refuse_the_dead(processes: dict[Remedy, Any], values: dict[Remedy, dict[str, float]]) -> None:
    for remedy, process in processes.items():
        if remedy not in values and process.exitcode not in (None, 0):
            raise RuntimeError(f"{PAIR[remedy]}: its process ended with {process.exitcode}; run it again")


def _grow(remedy: Remedy, folder: Path, plan: Plan, news: Any) -> None:
    """The process of one model."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it, and ends this process
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(max(1, torch.get_num_threads() // len(PAIR)))
    try:
        news.put(("done", remedy, dict(_measure(remedy, folder, plan, news))))
    except Exception:  # noqa: BLE001 - the other process has to hear of it, whatever it is
        news.put(("failed", remedy, traceback.format_exc()))


def _end_with_the_parent() -> None:
    """Not to go on, and keep others from the folder, when the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Tell(TrainerCallback):
    """Sends each update to the process that shows the progress."""

    def __init__(self, remedy: Remedy, news: Any) -> None:
        self.told, self.remedy, self.news = 0, remedy, news

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first message of a resumed run also counts the updates before it."""
        self.news.put(("at", self.remedy, "training", state.global_step - self.told))
        self.told = state.global_step


def _measure(remedy: Remedy, folder: Path, plan: Plan, news: Any) -> Iterator[tuple[str, float]]:
    summary = train(recipe(remedy, plan), folder / remedy, progress=False, callbacks=[_Tell(remedy, news)])
    yield "perplexity", summary.perplexity
    yield "seconds", summary.seconds
    yield "tokens", float(summary.tokens)
    yield "parameters", float(summary.parameters)

    def longer() -> Iterator[tuple[str, float]]:
        news.put(("at", remedy, "reading longer texts", 0))
        yield from _past_the_length(summary.model, plan)

    yield from once(folder, remedy, "longer", plan, longer)
    for task in _POSITION_TASKS:

        def learn(task: Task = task) -> Iterator[tuple[str, float]]:
            for name, value in position_task(
                task,
                Encoding("rope", remedy),
                length=POSITION_LENGTH,
                seed=plan.seed,
                setting=plan.task,
                on_step=lambda steps: news.put(("at", remedy, "position tasks", steps)),
            ):
                yield f"{task}/{name}", value

        yield from once(folder, remedy, task, plan, learn)


def _past_the_length(model_folder: Path, plan: Plan) -> Iterator[tuple[str, float]]:
    model, tokenizer = (
        open_model(str(model_folder), device="cpu", dtype="float32"),
        open_tokenizer(str(model_folder)),
    )
    longest = TIMES_LONGER * plan.length
    sequences = cut_sequences(tokenize(read_texts(), tokenizer), longest, plan.long_tokens)
    for method in ("full", "window"):
        found = dict(extrapolate(model, sequences, length=longest, method=method, keys=plan.length))
        yield f"longer/{method}", found["perplexity"]
    found = dict(extrapolate(model, sequences, length=plan.length, method="full", keys=plan.length))
    yield "longer/trained length", found["perplexity"]


def decoding_times(folder: Path, plan: Plan) -> dict[str, float]:
    """Seconds a token without StableMask, and the ratio of the same weights with it; interleaved."""

    def compare() -> Iterator[tuple[str, float]]:
        model = open_model(str(folder / "stablemask" / "model"), device="cpu", dtype="float32")
        (prompt,), (output,) = plan.decoding.prompts, plan.decoding.outputs
        found = dict(latency(model, prompt=prompt, output=output, setting=plan.decoding))
        yield "seconds a token", found["seconds/baseline"] / output
        for name in ("", "/low", "/high"):
            yield f"ratio{name}", found[f"ratio/SM-I{name}"]

    return dict(once(folder, "pair", "decoding", plan, compare))


def once(
    folder: Path, subject: str, what: str, plan: Plan, measure: Callable[[], Iterator[tuple[str, float]]]
) -> Iterator[tuple[str, float]]:
    """Values measured now, or by an earlier run with the same plan."""
    results = Results(folder / "measured")
    cell = Cell(f"demo-{what}", {"subject": subject, "plan": asdict(plan)})
    values = results.find(cell)
    if values is None:
        begin = time.perf_counter()
        measured = list(measure())
        results.save(cell, measured, time.perf_counter() - begin)
        values = results.find(cell)
        assert values is not None
    yield from values.items()
