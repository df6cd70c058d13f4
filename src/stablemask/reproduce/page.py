"""``docs/results.md`` and its figures, from finished cells alone: the same cells give the same files."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stablemask.analysis.figures import save_figure
from stablemask.analysis.palette import Theme
from stablemask.evaluation.cells import write_text
from stablemask.reproduce import tables
from stablemask.reproduce.cells import CORPORA
from stablemask.reproduce.commands import commands
from stablemask.reproduce.gather import Found
from stablemask.reproduce.judge import Judged
from stablemask.reproduce.paper import Item
from stablemask.reproduce.pictures import OVERVIEW, Picture, pictures
from stablemask.reproduce.study import Study

FIGURES = "figures"
_PREFIX = "results-"
_THEMES: tuple[tuple[Theme, str], ...] = (("light", ""), ("dark", "-dark"))
_CONSTRUCTION = "construction"  # a picture of the method that the documentation has

_INTRODUCTION = """\
# Results

Every table, figure and theorem of the paper, beside what was measured here. This page is generated from the
files in `results/`, one for each trained or measured model, by `stablemask reproduce --report-only`;
nothing in it is written by hand.

The models are small and were trained for minutes. What is asked is whether the *direction* of a claim shows
at this scale, not whether the paper's perplexities come out: text, vocabulary and sizes differ, and no
perplexity measured here may be held against one of the paper. The claims, the smallest effect that counts and
the number of seeds were fixed before the runs."""

_RULE = """\
A claim is a difference that ought to be negative. Models of one seed began with the same weights and read
the same text in the same order, and only such pairs are compared. Of the difference there are two 95 %
intervals: Student's, from the seeds, and a bootstrap over validation documents, where the losses of
documents are known.

- **holds**: the mean is at least as large as the smallest effect that counts, and both intervals are below
  0.
- **does not hold**: both intervals exclude an effect that counts.
- **undecided at this scale**: anything else, and anything with fewer seeds than were set.
- **not measured**: cells are missing.

Where it says "none: seeds alone", losses were not kept document by document, as with learning curves, lengths
past training, shares of attention and position tasks: there is no bootstrap, and the verdict rests on the
interval from the seeds.

Differences of losses are in nats per token, in brackets as a change of perplexity; those of shares and
accuracies are fractions of 1. Where a claim has a bound, the difference is the distance to it. "The paper's
difference" is that of the values which it prints, in the same unit, of its own models and text and without
their ±; – where it does not print all of them. In tables, ± is the standard deviation over seeds; beside the
paper's values it is the paper's.

The rule and the claims, with the smallest effects and the numbers of seeds, are those of commit `05ccebd` of
2026-11-19, made before any language model of the study was trained. Neither file was changed since:

```bash
git log --oneline -- src/stablemask/reproduce/statistics.py src/stablemask/reproduce/claims.toml
```"""

_COMMANDS = "Each cell says what was typed for it. These lines make such cells anywhere:"

_SETS = (
    ("data", "train", "training"),
    ("valid", "valid", "validation"),
    ("other", "other", "validation, another source"),
    ("long", "long", "past the training length"),
)


def write_page(
    page: Path, items: Sequence[Item], judged: Sequence[Judged], found: Found, study: Study
) -> list[Path]:
    """Write the page and its figures; figures of an earlier page are removed. Returns what was written."""
    drawn = pictures(found, judged, study)
    folder = page.parent / FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        save_figure(picture.draw(theme=theme), folder / f"{_PREFIX}{picture.name}{suffix}.svg")
        for picture in drawn
        for theme, suffix in _THEMES
    ]
    for old in folder.glob(f"{_PREFIX}*.svg"):
        if old not in written:
            old.unlink()
    has_construction = (folder / f"{_CONSTRUCTION}.svg").exists()
    text = "\n\n".join(_blocks(items, judged, found, drawn, study, has_construction=has_construction))
    write_text(page, text + "\n")
    return [page, *written]


def _blocks(
    items: Sequence[Item],
    judged: Sequence[Judged],
    found: Found,
    drawn: Sequence[Picture],
    study: Study,
    *,
    has_construction: bool,
) -> Iterator[str]:
    """The parts of the page, each followed by an empty line."""
    yield _INTRODUCTION
    yield "## At a glance"
    rows = [
        (
            f"[{item.id}](#{_anchor(item)})",
            item.place,
            item.title,
            tables.summary(item, _of(item, judged), found),
        )
        for item in items
    ]
    yield _table(("", "in the paper", "about", "here"), rows)
    yield from _figures(OVERVIEW, drawn)
    yield "## How verdicts are made"
    yield _RULE
    yield "## What was run"
    yield from _provenance(items, judged, found, study)
    for item in items:
        yield from _item(item, _of(item, judged), found, drawn)
        if item.id == "figure-2" and has_construction:
            yield _figure(_CONSTRUCTION, "The construction in numbers: C, P, A ⊙ C + P and the result.")


def _item(item: Item, judged: Sequence[Judged], found: Found, drawn: Sequence[Picture]) -> Iterator[str]:
    yield f"## {item.place}: {item.title} {{ #{_anchor(item)} }}"
    yield f"**The paper.** {item.paper}"
    yield f"**Here.** {item.repeats} {tables.without_sinks(item, found)}".rstrip()
    if judged:
        grid = tables.claims_grid(judged, item.tables)
        yield _table(grid.columns, grid.rows)
    for grid in tables.grids(item, found):
        yield f"*{grid.title}*"
        yield _table(grid.columns, grid.rows)
    yield from _figures(item.id, drawn)
    lines = [f"stablemask reproduce {item.id}"]
    recipes = item.all_recipes()
    if recipes:
        lines.append(f"stablemask reproduce {item.id} --profile paper   # {len(recipes)} recipes, for GPUs")
    yield (
        "```bash\n" + "\n".join([*lines, *(line for line in item.commands if "RECIPE" not in line)]) + "\n```"
    )


def _provenance(items: Sequence[Item], judged: Sequence[Judged], found: Found, study: Study) -> Iterator[str]:
    if not found.cells:
        yield "Nothing yet: there is no finished cell."
        return
    cells = list(found.cells.values())
    dates = sorted(cell["environment"]["date"] for cell in cells)
    hours = sum(cell["seconds"] for cell in cells) / 3600
    yield f"{len(cells)} cells, {hours:.1f} hours of work in all, from {dates[0]} to {dates[-1]}."
    if found.left_out:
        verb = "is" if found.left_out == 1 else "are"
        yield (
            f"Of the cells in that folder {found.left_out} {verb} not on this page: of another text, device "
            "or precision, or of a study that was changed since."
        )
    machines = Counter(_machine(cell) for cell in cells)
    columns = ("machine", "cores", "GPU", "PyTorch", "transformers", "Python", "stablemask", "cells")
    yield _table(columns, [(*machine, str(count)) for machine, count in sorted(machines.items())])
    if found.conditions.corpus:
        yield from _text(found)
    yield _COMMANDS
    lines = commands(items, [each.claim for each in judged], study, found)
    yield "```bash\n" + "\n".join(lines) + "\n```"


def _text(found: Found) -> Iterator[str]:
    """What the models of language learned from and were measured on."""
    conditions, about = found.conditions, found.text
    yield (
        f"Language models were trained on {conditions.device} with products in {conditions.precision}. Their "
        f"text is {found.text_name}, with the digest `{conditions.corpus}`."
    )
    if not about:
        return
    source, told = about["source"], about.get("told", {})
    rows = [
        (title, source[name] or "held out", told.get(name, "–"), f"{about['tokens'][key]:,}")
        for name, key, title in _SETS
        if about["tokens"][key]
    ]
    yield _table(("", "file or folder", "what it is", "tokens"), rows)
    yield (
        f"Tokens and perplexities are of the tokenizer `{source['tokenizer']}`. This table is from "
        f"`results/{CORPORA}/{conditions.corpus}.json`. The first line below, which trains nothing, prepares "
        "such a text from files of your own that have these names; where its digest is another one, so are "
        "the values."
    )


def _machine(cell: dict[str, Any]) -> tuple[str, ...]:
    about = cell["environment"]
    names = ("cpu", "cores", "gpu", "torch", "transformers", "python")
    commit = [f"commit {cell['commit']}"] if "commit" in cell else []
    made = f"{cell['version']} ({', '.join([cell['source'], *commit])})"
    return (*(str(about.get(name, "–")) for name in names), made)


def _of(item: Item, judged: Sequence[Judged]) -> list[Judged]:
    return [each for each in judged if item.id in each.claim.items]


def _figures(item: str, drawn: Sequence[Picture]) -> Iterator[str]:
    for picture in drawn:
        if picture.item == item:
            yield _figure(_PREFIX + picture.name, picture.alt)


def _figure(name: str, alt: str) -> str:
    return f"![{alt}]({FIGURES}/{name}.svg#only-light)\n![]({FIGURES}/{name}-dark.svg#only-dark)"


def _anchor(item: Item) -> str:
    return item.id.replace(".", "-")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
