"""What a run shows while it works: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

Write = Callable[[str], object]

_LINES_EVERY = 10.0  # seconds at least between two lines where there is no bar


class Progress(TrainerCallback):
    """Loss, speed and the time left."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None
        self.began = 0.0
        self.first = 0
        self.last_line = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and the bar if there is a terminal and rich is installed."""
        self.began, self.first = time.monotonic(), state.global_step
        self.bar = _make_bar()
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show a line of metrics."""
        text = _describe(logs or {})
        if not text:
            return
        if self.bar is not None:
            if "perplexity" in (logs or {}):
                self.bar.console.print(f"step {state.global_step:,}  {text}", highlight=False)
            else:
                self.bar.update(self.task, description=text)
            return
        now = time.monotonic()
        evaluated, last = "perplexity" in (logs or {}), state.global_step >= state.max_steps
        if evaluated or last or now - self.last_line >= _LINES_EVERY:
            self.last_line = now
            left = (now - self.began) / max(state.global_step - self.first, 1)
            left *= state.max_steps - state.global_step
            say(f"step {state.global_step:,}/{state.max_steps:,}  {text}  left {clock(left)}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the bar away."""
        self.close()

    def close(self) -> None:
        """Take the bar away, also after an error."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the place where a run without a terminal speaks


def clock(seconds: float) -> str:
    """For example ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _describe(logs: Mapping[str, float]) -> str:
    if "perplexity" in logs:
        return f"validation perplexity {logs['perplexity']:,.3f}"
    if "loss" not in logs:
        return ""
    return f"loss {logs['loss']:.4f}  {logs['tokens_per_second']:,.0f} tokens/s"


def _make_bar() -> Any:
    try:
        from rich.console import Console  # noqa: PLC0415 - a run works without it
        from rich.progress import (  # noqa: PLC0415 - as above
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar  # noqa: PLC0415 - as above
    except ModuleNotFoundError:
        return None
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True)
