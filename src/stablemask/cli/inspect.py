"""``stablemask inspect DIR``: what the attention of a model does with a text, as tables, JSON and a page."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as Printed
from transformers import PreTrainedModel

from stablemask.analysis import summary
from stablemask.analysis._files import write_whole
from stablemask.analysis.inspection import SHOWN, Inspection, inspect_model
from stablemask.analysis.inspection_report import inspection_tables, report_inspections
from stablemask.analysis.metrics import SINK_THRESHOLD
from stablemask.analysis.outliers import (
    Activations,
    QuantizationGap,
    measure_activations,
    measure_quantization,
)
from stablemask.analysis.pieces import Piece, cut_pieces
from stablemask.analysis.training_log import training_curves
from stablemask.analysis.views import Cell, Table
from stablemask.cli.terminal import environment_line, make_console, make_progress
from stablemask.evaluation.documents import read_texts
from stablemask.evaluation.models import Dtype, describe, open_model, open_tokenizer

_LOG = "metrics.jsonl"
_WIDEST = 16
_PASSES = 5  # through the pieces, with outliers: one to look, two for each way to quantize


@dataclass(frozen=True)
class Options:
    """Look at the attention of a model, or of two models side by side, while they read a text.

    Tables are printed. Everything behind them is in inspect.json, and report.html is a page on which heads
    and rows can be explored. It works on models of stablemask with every remedy but URPE, and on any
    architecture that StableMask runs in, with StableMask or as it was pretrained.

    Args:
        models: A folder, or a name on the hub; two of them are compared.
        text: The text itself.
        file: A text instead: a file or a folder (.txt, .jsonl or .parquet, also compressed), or "builtin".
        length: Tokens of a piece. Longer texts are cut; where none is that long, the longest is read whole.
        pieces: How many pieces are read at most; figures are means over them.
        epsilon: A head has a sink if it gives its first token more than this share on average.
        shown: Tokens of the first piece whose maps are on the page.
        outliers: Also measure activation outliers, and perplexity with 8-bit weights and activations.
        log: metrics.jsonl of the training of each model; by default the one in the folder of a model or in
            the folder above, where there is one.
        out: Folder of the two files; by default "inspection" in the folder of the first model.
        device: cpu or cuda.
        dtype: Of the weights and of what is computed with them.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    text: str | None = None
    file: str | None = None
    length: int = 512
    pieces: int = 4
    epsilon: float = SINK_THRESHOLD
    shown: int = SHOWN
    outliers: bool = False
    log: tuple[Path, ...] = ()
    out: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Dtype = "float32"


class Outliers(NamedTuple):
    """Of every layer, and what quantization costs with one scale for all activations, and one a token."""

    layers: list[Activations]
    per_tensor: QuantizationGap
    per_token: QuantizationGap


def run(options: Options) -> int:
    """Print the tables and write both files. 0: done; 2: something in the options cannot be."""
    console = make_console()
    try:
        names = _check(options)
        curves = training_curves(_logs(options, names))
        with make_progress(console) as progress:
            found, outliers = _inspect(options, names, progress)
        extra = _outlier_tables(outliers)
        folder = options.out or Path(options.models[0]) / "inspection"
        folder.mkdir(parents=True, exist_ok=True)
        lead = _lead(options, found)
        report_inspections(
            folder / "report.html", found, tables=extra, curves=curves, lead=lead, threshold=options.epsilon
        )
        content = {"text": lead, "models": [_values(each, outliers, options.epsilon) for each in found]}
        write_whole(folder / "inspect.json", json.dumps(content, indent=1).encode())
    except (OSError, ValueError) as error:
        print(f"stablemask inspect: {error}", file=sys.stderr)
        return 2
    console.print(f"{escape(lead)} {options.dtype} on {options.device}; {environment_line()}")
    for table in [*inspection_tables(found, options.epsilon), *extra]:
        _print(console, table)
    for each in found:
        _print_heads(console, each)
    for what, name in (("The page", "report.html"), ("All values", "inspect.json")):
        console.print(f"{what}: {escape(str(folder / name))}", style="dim", soft_wrap=True)
    return 0


def _check(options: Options) -> list[str]:
    """What the models are called; the options are looked at before anything is opened."""
    if len(options.models) not in (1, 2):
        raise ValueError(f"models: got {len(options.models)}; allowed: one, or two to be compared")
    if (options.text is None) == (options.file is None):
        raise ValueError("text, file: got both or neither; allowed is one of them")
    if options.text is not None and any("\ud800" <= letter <= "\udfff" for letter in options.text):
        raise ValueError(f"text: got {options.text!r}, which is not UTF-8; allowed: UTF-8")
    if options.log and len(options.log) != len(options.models):
        raise ValueError(f"log: got {len(options.log)}; allowed: none, or one for each model")
    if not 0 <= options.epsilon < 1:
        raise ValueError(f"epsilon: got {options.epsilon}; allowed: 0 ≤ ε < 1")
    if options.shown < 1:
        raise ValueError(f"shown: got {options.shown}; allowed: 1 or more")
    names = [describe(path) for path in options.models]
    names = names if len(set(names)) == len(names) else list(options.models)
    if len(set(names)) != len(names):
        raise ValueError(f"models: got {names[0]!r} twice; allowed: two different ones")
    return names


def _logs(options: Options, names: Sequence[str]) -> dict[str, Path]:
    """The training logs, of those models that have one."""
    if options.log:
        return dict(zip(names, options.log, strict=True))
    logs: dict[str, Path] = {}
    for name, path in zip(names, options.models, strict=True):
        for folder in (Path(path), Path(path).resolve().parent):
            if (folder / _LOG).is_file():
                logs.setdefault(name, folder / _LOG)
    return logs


def _inspect(
    options: Options, names: Sequence[str], progress: Progress
) -> tuple[list[Inspection], dict[str, Outliers]]:
    """One model after the other."""
    texts = [options.text] if options.text is not None else read_texts(options.file or "")
    found, outliers = [], {}
    for path, name in zip(options.models, names, strict=True):
        pieces = cut_pieces(texts, open_tokenizer(path), length=options.length, count=options.pieces)
        model = open_model(path, device=options.device, dtype=options.dtype)
        task = progress.add_task(escape(name), total=(_PASSES if options.outliers else 1) * len(pieces))
        advance = partial(progress.advance, task)
        found.append(inspect_model(model, name, pieces, shown=options.shown, on_piece=advance))
        if options.outliers:
            outliers[name] = _measure_outliers(model, pieces, advance)
        progress.remove_task(task)
    return found, outliers


def _measure_outliers(
    model: PreTrainedModel, pieces: Sequence[Piece], advance: Callable[[], object]
) -> Outliers:
    texts = [piece.ids.to(model.device) for piece in pieces]
    gaps = [
        measure_quantization(model, texts, activations=kind, on_text=advance) for kind in ("tensor", "token")
    ]
    return Outliers(measure_activations(model, texts), *gaps)


def _outlier_tables(outliers: Mapping[str, Outliers]) -> list[Table]:
    if not outliers:
        return []
    several = len(outliers) > 1
    columns = [
        f"{what}: {name}" if several else what
        for what in ("largest |x|", "at position", "kurtosis")
        for name in outliers
    ]
    depth = max(len(each.layers) for each in outliers.values())
    rows: list[list[Cell]] = []
    for layer in range(depth):
        cells = [each.layers[layer] if layer < len(each.layers) else None for each in outliers.values()]
        largest = [None if a is None else a.largest for a in cells]
        places = [None if a is None else a.position + 1 for a in cells]
        rows.append([str(layer), *largest, *places, *(None if a is None else a.kurtosis for a in cells)])
    gaps: list[list[Cell]] = [
        [name, gap.perplexity, scale, gap.quantized, 100 * gap.increase]
        for name, each in outliers.items()
        for scale, gap in (("all activations", each.per_tensor), ("each token", each.per_token))
    ]
    note = "Of the residual stream after each layer. The kurtosis of a normal distribution is 3."
    price = "Weights and activations of all linear layers in the decoder as 8-bit integers; on these pieces."
    return [
        Table("Activation outliers", ["layer", *columns], rows, note),
        Table("8-bit integers", ["model", "perplexity", "one scale for", "8-bit", "rise in %"], gaps, price),
    ]


def _values(each: Inspection, outliers: Mapping[str, Outliers], epsilon: float) -> dict[str, Any]:
    """All values of a model for inspect.json."""
    values = summary.to_json(each, epsilon)
    if each.name in outliers:
        layers, per_tensor, per_token = outliers[each.name]
        values["activations"] = [asdict(layer) for layer in layers]
        values["quantization"] = {"per_tensor": per_tensor._asdict(), "per_token": per_token._asdict()}
    return values


def _lead(options: Options, found: Sequence[Inspection]) -> str:
    names = " and ".join(each.name for each in found)
    sizes = {f"{each.pieces} × {each.length:,} tokens" for each in found}
    source = "a text from the command line" if options.file is None else describe(options.file)
    return f"{names} on {source}, {' and '.join(sorted(sizes))}."


def _print(console: Console, table: Table) -> None:
    printed = Printed(
        title=escape(table.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for at, name in enumerate(table.columns):
        numeric = any(isinstance(row[at], int | float) for row in table.rows)
        printed.add_column(escape(name), justify="right" if numeric else "left")
    for row in table.rows:
        printed.add_row(*(_cell(cell) for cell in row))
    console.print(printed)
    if table.note:
        console.print(f"{escape(table.note)}\n", style="dim")


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:,.2f}" if isinstance(cell, float) else escape(str(cell))


def _print_heads(console: Console, each: Inspection) -> None:
    """First token and no token of every head, a row a layer, where that fits on a line."""
    metrics = each.metrics
    mass = metrics.pseudo + metrics.artificial
    grids = {"first token": metrics.first} | ({"no token": mass} if bool(mass.any()) else {})
    for what, values in grids.items():
        if values.shape[1] > _WIDEST:
            continue
        title = f"By layer and head, {what}, in percent: {each.name}"
        columns = ["layer", *(f"head {head}" for head in range(values.shape[1]))]
        means = 100 * values.mean(-1)
        rows = [[str(layer), *(f"{float(m):.1f}" for m in row)] for layer, row in enumerate(means)]
        _print(console, Table(title, columns, rows))
