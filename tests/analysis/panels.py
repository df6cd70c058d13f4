"""What tests of the report page ask of its panels: which head and row they show, and what they say of it."""

import json
import re
from typing import NamedTuple

from stablemask.analysis.views import ModelView
from tests.chromium import Chromium

FIRST, SECOND = ".panel:nth-child(1)", ".panel:nth-child(2)"


def shares(view: ModelView, layer: int, head: int, row: int) -> list[float]:
    """What a row gives to each token, in percent."""
    return [100 * float(share) for share in view.attention(layer, head)[row, : row + 1]]


def mass(view: ModelView, layer: int, head: int, row: int) -> float:
    return 100 * float(view.pseudo_mass[layer, head, row])


class Shown(NamedTuple):
    """What a panel says: its head, its row from 1, and where that row's attention goes, in percent."""

    layer: int
    head: int
    row: int
    parts: dict[str, float]


def number(text: str) -> float:
    return float(text.removeprefix("< ").removesuffix(" %"))


def shown(browser: Chromium, panel: str) -> Shown:
    layer, head = browser.ask(
        f"[...document.querySelectorAll({json.dumps(panel + ' .pick select')})].map((e) => e.value)"
    )
    found = re.match(r"Row (\d+) ", browser.text(f"{panel} .row-name"))
    assert found is not None
    values = browser.texts(f"{panel} .split dd")
    names = browser.texts(f"{panel} .split dt")
    parts = {name: number(value) for name, value in zip(names, values, strict=True)}
    return Shown(int(layer), int(head), int(found[1]) - 1, parts)


def agrees(found: Shown, view: ModelView) -> bool:
    """Whether the panel says of its row what the maps of the model say, to the digits shown."""
    row = shares(view, found.layer, found.head, found.row)
    expected = {"first token": row[0], "other tokens": sum(row[1:])}
    if bool(view.pseudo_mass.any()):
        expected["no token"] = mass(view, found.layer, found.head, found.row)
    return found.parts.keys() == expected.keys() and all(
        abs(found.parts[name] - value) <= (0.06 if value < 9.9 else 0.51) for name, value in expected.items()
    )


def canvas(browser: Chromium, panel: str) -> str:
    """The map as it is drawn."""
    drawn: str = browser.ask(f"document.querySelector({json.dumps(panel + ' canvas')}).toDataURL()")
    return drawn


def point_at(browser: Chromium, panel: str, row: int, column: float, *, click: bool = False) -> None:
    """The mouse over a cell of the map; columns past the text are the strip beside it."""
    cell, width, height = browser.ask(
        f"(() => {{ const p = document.querySelector({json.dumps(panel)}), m = p.querySelector('.map');"
        "return [parseFloat(p.querySelector('.band').style.height), m.offsetWidth, m.offsetHeight]; })()"
    )
    place = ((column + 0.5) * cell / width, (row + 0.5) * cell / height)
    (browser.click if click else browser.point)(f"{panel} .map", *place)


def focus(browser: Chromium, selector: str) -> None:
    """Press Tab until it is there: a keyboard reaches it."""
    for _ in range(60):
        if browser.ask(f"document.activeElement.matches({json.dumps(selector)})"):
            return
        browser.press("Tab")
    raise AssertionError(f"Tab never reaches {selector}")
