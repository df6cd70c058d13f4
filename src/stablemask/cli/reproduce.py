"""``stablemask reproduce``: tables, figures and theorems of the paper, beside what is measured here."""

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import tyro
from rich.console import Console

from stablemask.cli.reproduce_tables import print_index, print_item, print_plan, print_recipes
from stablemask.cli.terminal import environment_line, make_console, make_progress
from stablemask.reproduce import extras, runner
from stablemask.reproduce.cells import Conditions, Job
from stablemask.reproduce.corpus import Corpus, Source, open_corpus, open_or_prepare, source_digest
from stablemask.reproduce.gather import Found, Wanted, gather
from stablemask.reproduce.judge import judge
from stablemask.reproduce.paper import Item, choose, entries_of, load_paper
from stablemask.reproduce.study import POSITION_TASKS, Claim, Entry, Study, load_claims, load_study
from stablemask.training.recipe import Precision

_LINES_EVERY = 30.0  # seconds, where there is no bar
_NEED_NO_TEXT = ("sizes", "theory", "latency", POSITION_TASKS)


@dataclass(frozen=True)
class Options:
    """Repeat tables, figures and theorems of the paper, and write what came out to a page.

    Each trained or measured model is a file in the results folder, a cell. The same command goes on with what
    is missing. Without an ID, and with --list, it says what there is.

    Args:
        ids: Such as table-1 or theorem-4.1; "all" for everything.
        profile: "cpu", the scaled-down study; "paper", the full recipes: what they take, and the commands.
        list: Say what there is, and do nothing.
        report_only: Measure nothing; write the page from the cells that are there. Needs no text.
        dry_run: Measure nothing; say what is missing, and how long it would take.
        data: Training text: "builtin", a local file or folder, or a dataset on the hub.
        valid: Validation text; by default held out of the training text.
        other: Validation text from elsewhere.
        other_begins: Regular expression of the lines that begin a document in it.
        long: Long texts; without them the validation text has to do.
        corpus: Folder of a text that is prepared already, in place of all these.
        results: Folder of the cells.
        work: Folder for the prepared text and for the models of seed 0.
        weights: Folder of the models of seed 0, if elsewhere.
        downstream: Folder with the questions of downstream tasks; by default from the hub.
        page: The page that is written, with its figures in a folder beside it.
        jobs: Models trained at the same time, each on one core.
        minutes: Stop after so long, keeping what is finished.
        seeds: Of each model; by default what the study says.
        precision: Of the products in training; by default bf16 on cuda, else fp32.
        device: cpu or cuda; by default what this machine has.
        recipes: For the profile "paper": the folder of the recipes.
        study: A study of your own; by default that of the package.
    """

    ids: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    profile: Literal["cpu", "paper"] = "cpu"
    list: bool = False
    report_only: bool = False
    dry_run: bool = False
    data: str = "builtin"
    valid: str | None = None
    other: str | None = None
    other_begins: str | None = None
    long: str | None = None
    corpus: Path | None = None
    results: Path = Path("results")
    work: Path = Path("runs/reproduce")
    weights: Path | None = None
    downstream: Path | None = None
    page: Path = Path("docs/results.md")
    jobs: int = 1
    minutes: float | None = None
    seeds: int | None = None
    precision: Precision | None = None
    device: str | None = None
    recipes: Path = Path("recipes")
    study: Path | None = None


class Call(NamedTuple):
    """Options, and the command line that a reader of a cell can type."""

    options: Options
    command: str


class Subjects(NamedTuple):
    """What a call is about."""

    items: Sequence[Item]
    chosen: Sequence[Item]
    claims: Sequence[Claim]
    study: Study


def parse(arguments: Sequence[str], program: str) -> Call:
    """The options; of paths that lead elsewhere the command keeps the last part."""
    options = tyro.cli(Options, prog=program, args=arguments)
    short = (Path(text).name if text.startswith(("/", "../")) else text for text in arguments)
    return Call(options, shlex.join([*program.split(), *short]))


def run(call: Call) -> int:
    """0: all that was asked is there; 1: some is missing; 2: something in the options cannot be."""
    options, console = call.options, make_console()
    try:
        items = load_paper()
        subjects = Subjects(items, choose(items, options.ids), load_claims(), load_study(options.study))
        if options.profile == "paper":
            return print_recipes(console, subjects.chosen, options.recipes)
        if options.list or not (options.ids or options.report_only):
            found = gather(options.results, subjects.study, _wanted(options))
            print_index(console, items, [judge(claim, found) for claim in subjects.claims], found)
            return 0
        if options.report_only:
            return _report(
                console, options, subjects, gather(options.results, subjects.study, _wanted(options))
            )
        return _work(console, call, subjects)
    except (OSError, ValueError) as error:
        print(f"stablemask reproduce: {error}", file=sys.stderr)
        return 2


def _work(console: Console, call: Call, subjects: Subjects) -> int:
    options, study = call.options, subjects.study
    entries = _entries(options, subjects)
    corpus = _open(console, options, study) if _needs_text(entries) else None
    job = _job(call, study, corpus)
    todo = runner.missing(job, entries)
    console.print(f"{len(entries)} cells, {len(entries) - len(todo)} of them finished; {environment_line()}")
    if options.dry_run:
        print_plan(console, job, todo, options.jobs)
        return 0
    rest = _measure(console, options, job, todo)
    wanted = Wanted() if corpus is None else job.conditions
    code = _report(console, options, subjects, gather(options.results, study, wanted))
    if rest:
        console.print(f"Missing: {', '.join(f'{e.group} {e.seed}' for e in rest)}", style="yellow")
    return 1 if rest else code


def _entries(options: Options, subjects: Subjects) -> list[Entry]:
    """Cells of the chosen items; models of the study with as many seeds as are wanted."""
    if options.jobs < 1 or (options.seeds is not None and options.seeds < 1):
        raise ValueError(f"jobs, seeds: got {options.jobs}, {options.seeds}; allowed: from 1 on")
    entries = entries_of(subjects.chosen, subjects.claims, subjects.study)
    if options.seeds is None:
        return entries
    groups = list(dict.fromkeys(e.group for e in entries if not extras.is_extra(e)))
    more = [Entry(group, seed) for seed in range(options.seeds) for group in groups]
    return [*more, *(e for e in entries if extras.is_extra(e))]


def _needs_text(entries: Sequence[Entry]) -> bool:
    return any(extras.kind(entry) not in _NEED_NO_TEXT for entry in entries)


def _open(console: Console, options: Options, study: Study) -> Corpus:
    if options.corpus is not None:
        return open_corpus(options.corpus)
    source = Source(
        options.data,
        options.valid,
        options.other,
        options.other_begins,
        options.long,
        study.tables["common"]["data"]["tokenizer"],
    )
    with console.status("preparing the text"):
        return open_or_prepare(options.work / f"corpus-{source_digest(source)}", source)


def _job(call: Call, study: Study, corpus: Corpus | None) -> Job:
    options = call.options
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    precision: Precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    conditions = Conditions(device, precision, "" if corpus is None else corpus.digest)
    weights = options.weights or options.work / f"weights-{device}-{precision}-{conditions.corpus}"
    folder = Path() if corpus is None else corpus.folder
    return Job(study, conditions, folder, options.results, call.command, weights, options.downstream)


def _measure(console: Console, options: Options, job: Job, todo: Sequence[Entry]) -> list[Entry]:
    """First what stands for itself; then, alone, latencies and what looks at finished models."""
    late = [e for e in todo if extras.is_late(e)]
    began = time.monotonic()
    limit = math.inf if options.minutes is None else 60 * options.minutes
    rest = _run(console, job, [e for e in todo if e not in late], options.jobs, limit)
    waiting = [e for e in late if (seen := extras.model_entry(e)) and not job.path(seen).exists()]
    left = limit - (time.monotonic() - began)
    ready = [e for e in late if e not in waiting]
    done = ready if left <= 0 else _run(console, job, ready, 1, left)
    return [*rest, *waiting, *done]


def _run(console: Console, job: Job, entries: Sequence[Entry], jobs: int, seconds: float) -> list[Entry]:
    if not entries:
        return []
    last = time.monotonic()
    with make_progress(console) as progress:
        bar = progress.add_task("measuring", total=1.0)

        def on_state(state: runner.State) -> None:
            nonlocal last
            progress.update(bar, completed=state.share)
            quiet = time.monotonic() - last < _LINES_EVERY
            if state.message or not (console.is_terminal or quiet):
                last = time.monotonic()
                left = "" if state.left is None else f", {state.left / 60:.1f} min left"
                console.print(
                    f"{100 * state.share:5.1f} %{left}  {state.message}", soft_wrap=True, markup=False
                )

        limit = None if math.isinf(seconds) else seconds
        return runner.run(job, entries, jobs=jobs, seconds=limit, on_state=on_state)


def _report(console: Console, options: Options, subjects: Subjects, found: Found) -> int:
    """Print the items that were asked for, and write the page of all of them."""
    from stablemask.reproduce.page import write_page  # noqa: PLC0415 - importing matplotlib takes a second

    judged = [judge(claim, found) for claim in subjects.claims]
    if len(subjects.chosen) == len(subjects.items) or not subjects.chosen:
        print_index(console, subjects.items, judged, found)
    else:
        for item in subjects.chosen:
            print_item(console, item, judged, found)
    files = write_page(options.page, subjects.items, judged, found, subjects.study)
    console.print(f"The page: {files[0]}, with {len(files) - 1} figures", style="dim", soft_wrap=True)
    return 0


def _wanted(options: Options) -> Wanted:
    digest = None if options.corpus is None else open_corpus(options.corpus).digest
    device = None if options.device is None else torch.device(options.device).type
    return replace(Wanted(), device=device, precision=options.precision, corpus=digest)
