"""The report page: one HTML file that shows attention, tables and curves, and loads nothing.

Texts are data in it: whatever a token or a title contains is shown and never executed. A content policy
inside of the page admits its own script and style, by their hashes, and nothing else.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from stablemask import __version__
from stablemask.analysis._files import write_whole
from stablemask.analysis.figures import render_figure
from stablemask.analysis.metrics import SINK_THRESHOLD
from stablemask.analysis.packing import Packed, fitting_length, pack
from stablemask.analysis.palette import PALETTES, Theme
from stablemask.analysis.views import Cell, Curve, ModelView, Table

SIZE_LIMIT = 10_000_000
"""Bytes of the largest page; long texts are cut to fit, and the page says so."""
MAX_ROWS = 256
"""Rows of a map that the page shows at most: more could not be told apart."""

_SCRIPTS = ("model.js", "map.js", "panel.js", "charts.js", "page.js")
_RESERVE = 100_000


@dataclass(frozen=True)
class Picture:
    """A static figure on the page, drawn for light and for dark surroundings.

    Args:
        title: What it shows.
        draw: Makes the figure for a theme.
        note: What one should see in it.
    """

    title: str
    draw: Callable[[Theme], Figure]
    note: str = ""


def write_report(
    path: str | os.PathLike[str],
    models: Sequence[ModelView] = (),
    *,
    tables: Sequence[Table] = (),
    curves: Sequence[Curve] = (),
    pictures: Sequence[Picture] = (),
    title: str = "Where attention goes",
    lead: str = "",
    threshold: float = SINK_THRESHOLD,
) -> Path:
    """Write the page; it works from the disk, without a network and without a server.

    Args:
        path: The file, in a folder that exists. It appears whole or not at all.
        models: What can be explored, two of them side by side at a time.
        tables: Shown as tables that can be sorted.
        curves: Shown as charts whose values can be read.
        pictures: Static figures.
        title: Headline of the page.
        lead: A paragraph below it: which text, which models.
        threshold: ε of the sink rate.

    Raises:
        ValueError: There is nothing to show, or it does not fit into ``SIZE_LIMIT``.

    Examples:
        >>> write_report("report.html", [view], curves=[sink_curve([view])])
    """
    if not (models or tables or curves or pictures):
        raise ValueError("models, tables, curves, pictures: got none of them; allowed is at least one")
    names = [model.name for model in models]
    if len(set(names)) != len(names):
        raise ValueError(f"models: got the names {names}; allowed are different ones")
    around = {
        "title": title,
        "lead": lead,
        "tables": tables,
        "curves": curves,
        "pictures": [_draw(picture) for picture in pictures],
        "threshold": threshold,
    }
    rest = len(_render(around, (), ()))
    length, packed = 0, list[Packed]()
    if models:
        length = min(MAX_ROWS, fitting_length(list(models), SIZE_LIMIT - _RESERVE - rest))
        if length < 1:
            got = f"{sum(m.num_layers * m.num_heads for m in models)} heads, and {rest:,} bytes besides"
            raise ValueError(f"models: got {got}; allowed is what fits into {SIZE_LIMIT:,} bytes")
        packed = [pack(model, length) for model in models]
    shown = [_describe(model, parts, length) for model, parts in zip(models, packed, strict=True)]
    page = _render(around, shown, [parts.content for parts in packed])
    if len(page) > SIZE_LIMIT:
        raise ValueError(f"page: got {len(page):,} bytes; allowed are {SIZE_LIMIT:,}")
    return write_whole(Path(path), page)


def _render(around: Mapping[str, Any], models: Sequence[Mapping[str, Any]], contents: Sequence[str]) -> bytes:
    """The page: what stands around the models, the models, and their shares."""
    folder = files(__package__) / "page"
    style = _theme_style() + (folder / "page.css").read_text(encoding="utf-8")
    parts = [(folder / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    script = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
    for source in (style, script):
        assert "</" not in source, "it would end its element"
    data = {
        "models": models,
        "curves": [asdict(curve) for curve in around["curves"]],
        "ramps": {
            theme: {"attention": palette.attention_ramp(), "pseudo": palette.pseudo_ramp()}
            for theme, palette in PALETTES.items()
        },
        "sinkThreshold": around["threshold"],
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = _cell
    environment.tests["numeric"] = lambda cell: isinstance(cell, int | float)
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    page = template.render(
        **around,
        models=models,
        contents=contents,
        style=Markup(style),  # noqa: S704 - ours, and asserted above
        script=Markup(script),  # noqa: S704 - as above
        policy=_policy(style, script),
        data=Markup(_json(data)),  # noqa: S704 - escaped there
        version=__version__,
    )
    return page.encode("utf-8", errors="xmlcharrefreplace")  # halves of surrogate pairs are no text


def _describe(model: ModelView, packed: Packed, length: int) -> dict[str, Any]:
    """What the script has to know of a model besides its shares."""
    scores = model.scores
    return {
        "name": model.name,
        "tokens": list(model.tokens[:length]),
        "allTokens": len(model.tokens),
        "layers": model.num_layers,
        "heads": model.num_heads,
        "rest": model.rest,
        "details": [[key, value] for key, value in model.details.items()],
        "gammas": None if scores is None else scores.gammas(model.num_heads).tolist(),
        "horizon": None if scores is None else scores.horizon,
        "first": packed.first,
        "pseudo": packed.pseudo,
        "entropy": packed.entropy,
    }


def _json(data: object) -> str:
    """JSON that is safe inside of a script element: no markup, nothing but ASCII; NaN is null."""
    text = json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_finite(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.7g}") if math.isfinite(data) else None
    return data


def _policy(style: str, script: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _theme_style() -> str:
    """The colours of both palettes as custom properties."""
    rules = []
    for theme, palette in PALETTES.items():
        names = {
            "surface": palette.surface,
            "panel": palette.panel,
            "text": palette.text,
            "muted": palette.muted,
            "line": palette.line,
            "attention": palette.series[0],
            "pseudo": palette.series[1],
            **{f"series-{i}": colour for i, colour in enumerate(palette.series)},
        }
        properties = "".join(f"--{name}:{colour};" for name, colour in names.items())
        rules.append(f':root[data-theme="{theme}"]{{color-scheme:{theme};{properties}}}')
    return "\n".join(rules) + "\n"


def _draw(picture: Picture) -> dict[str, str]:
    themes: tuple[Theme, ...] = ("light", "dark")
    return {
        "title": picture.title,
        "note": picture.note,
        **{theme: _svg_address(picture.draw(theme)) for theme in themes},
    }


def _svg_address(figure: Figure) -> str:
    """The figure as an address: inside of an image nothing is executed either."""
    return "data:image/svg+xml;base64," + base64.b64encode(render_figure(figure)).decode()


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:,.4g}".replace("-", "−") if isinstance(cell, float) else str(cell)
