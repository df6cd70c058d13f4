"""``stablemask doctor``: what is installed, what the machine has, and which back ends work on it."""

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stablemask import PseudoScores, __version__, available_backends
from stablemask.cli.terminal import make_console
from stablemask.measuring import environment

_LIBRARIES = (
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "lm-eval",
    "matplotlib",
    "numpy",
)


@dataclass(frozen=True)
class Options:
    """Versions, devices, and which back ends work here or why they do not.

    Args:
        architectures: Instead, the architectures of transformers that can run StableMask and those that
            cannot, with the reason: the table that the tests write.
    """

    architectures: bool = False


def run(options: Options) -> int:
    """Print the report. 1 if some device is left with no back end but the dense one."""
    console = make_console()
    if options.architectures:
        return _print_architectures(console)
    console.print(_facts("Installed", _versions()), "")
    console.print(_facts("Machine", _machine()), "")
    slow = []
    for device in _devices():
        training, inference = _reasons(device, needs_grad=True), _reasons(device, needs_grad=False)
        console.print(_backends(device, training, inference))
        if all(reason is not None for name, reason in training.items() if name != "reference"):
            slow.append(device)
    for device in slow:
        console.print(f"{device}: only the dense reference works here, which takes O(T²) memory", style="red")
    return 1 if slow else 0


def _print_architectures(console: Console) -> int:
    """0: printed; 2: transformers, whose architectures they are, is not installed."""
    if importlib.util.find_spec("transformers") is None:
        extra = "pip install 'stablemask[hf]'"
        console.print(f"stablemask doctor: needs transformers, which is not installed: {extra}", markup=False)
        return 2
    from stablemask.hf.architectures import table  # noqa: PLC0415 - of an extra that may be missing

    listed = Table(title="Architectures of transformers", title_justify="left", title_style="bold", box=None)
    for column in ("model type", "StableMask", "remark"):
        listed.add_column(column, overflow="fold")
    for line in sorted(table(), key=lambda line: not line.supported):
        listed.add_row(
            line.name, Text("yes", "green") if line.supported else Text("no", "yellow"), line.remark
        )
    console.print(listed)
    console.print("An architecture that is not listed is tried when StableMask is switched on in it.")
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "stablemask", __version__
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    for name in _LIBRARIES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "–"


def _machine() -> Iterator[tuple[str, str]]:
    about = environment()
    yield "cpu", f"{about['cpu']}, {about['cores']} cores, {about['capability']}"
    yield "threads", f"{torch.get_num_threads()} used by PyTorch"
    yield "system", str(about["system"])
    yield "gpu", str(about["gpu"])
    yield "cuda / rocm of torch", f"{torch.version.cuda or '–'} / {torch.version.hip or '–'}"
    yield (
        "c++ compiler",
        shutil.which("g++") or shutil.which("clang++") or "– (torch.compile on CPU needs one)",
    )


def _devices() -> list[torch.device]:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    mps = [torch.device("mps")] if torch.backends.mps.is_available() else []
    return [torch.device("cpu"), *gpus, *mps]


def _reasons(device: torch.device, *, needs_grad: bool) -> dict[str, str | None]:
    """What ``available_backends`` says about a small call, the trial run of private operators included."""
    q, k, v = (torch.zeros(1, 2, 32, 64, device=device, requires_grad=needs_grad) for _ in range(3))
    return available_backends(q, k, v, PseudoScores(0.5, horizon=32))


def _facts(title: str, facts: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    for name, value in facts:
        table.add_row(name, value)
    return table


def _backends(
    device: torch.device, training: dict[str, str | None], inference: dict[str, str | None]
) -> Table:
    """One line a back end, in order of preference: whether it trains, whether it infers, and why not."""
    title = f"Back ends on {device}, the preferred first"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in ("", "training", "inference", "reason"):
        table.add_column(column, overflow="fold")
    for name, reason in training.items():
        marks = (
            Text("yes", "green") if why is None else Text("no", "yellow") for why in (reason, inference[name])
        )
        table.add_row(name, *marks, reason or "")
    return table
