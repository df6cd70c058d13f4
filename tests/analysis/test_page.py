"""The report page in a browser: opened from the disk, clicked through, and looked at for what changed."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stablemask import PseudoScores
from stablemask.analysis.figures import curve_figure
from stablemask.analysis.report import MAX_ROWS, Picture, write_report
from stablemask.analysis.views import Curve, ModelView, Series, Table
from tests.analysis.panels import FIRST, SECOND, agrees, canvas, focus, mass, number, point_at, shares, shown
from tests.analysis.views import make_view
from tests.chromium import NAMES, Chromium

LENGTH = 23
CURVE = Curve(
    "Loss",
    "step",
    "nats",
    [Series("ours", [1, 2, 3], [2.0, 1.5, 1.25], low=[1.9, 1.4, 1.2], high=[2.1, 1.6, 1.3])],
)
TABLE = Table("Values", ["name", "value"], [["b", 10.5], ["c", None], ["a", -0.25], ["d", 9.0]])
PICTURE = Picture("A figure", lambda theme: curve_figure(CURVE, theme=theme), "Look.")
OURS = replace(make_view(length=LENGTH), scores=PseudoScores(0.5, horizon=LENGTH))
PLAIN = make_view("Plain", length=LENGTH, sink=False, seed=1)
PLAIN = replace(PLAIN, pseudo_mass=torch.zeros_like(PLAIN.pseudo_mass), details={})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("pair"), OURS, PLAIN)


def written(folder: Path, *models: ModelView) -> Path:
    return write_report(
        folder / "report.html", models, tables=[TABLE], curves=[CURVE], pictures=[PICTURE], lead="Two models."
    )


def away(browser: Chromium) -> None:
    browser.point("footer")


def test_the_page_opens_from_the_disk(browser: Chromium, pair: Path) -> None:
    browser.open(pair)
    assert browser.requests[0] == pair.as_uri()
    assert (
        browser.ask(
            "performance.getEntriesByType('resource').filter((e) => !e.name.startsWith('data:')).length"
        )
        == 0
    )
    assert browser.texts(".panel h3") == ["StableMask", "Plain"]
    assert "Two models." in browser.text("header")
    for panel, view in ((FIRST, OURS), (SECOND, PLAIN)):
        assert agrees(shown(browser, panel), view)
        assert browser.texts(f"{panel} .token") == view.tokens
    assert browser.texts("#tiles h3") == [
        "Sink rate",
        "On the first token",
        "On no token",
        "Spread of the rest",
    ]
    means = [
        100 * float(torch.stack([view.attention(a, b)[:, 0] for a in range(3) for b in range(2)]).mean())
        for view in (OURS, PLAIN)
    ]
    assert [number(text) for text in browser.texts("#tiles .tile:nth-child(2) dd")] == pytest.approx(
        means, abs=0.51
    )


def test_a_head_is_chosen_with_the_mouse(browser: Chromium, pair: Path) -> None:
    browser.open(pair)
    before = canvas(browser, FIRST), canvas(browser, SECOND)
    start = shown(browser, FIRST)
    layer, head = (start.layer + 1) % 3, (start.head + 1) % 2
    browser.click(f"{FIRST} .heads [data-layer='{layer}'][data-head='{head}']")
    for panel, view, old in zip((FIRST, SECOND), (OURS, PLAIN), before, strict=True):
        found = shown(browser, panel)
        assert (found.layer, found.head) == (layer, head), "the other panel follows"
        assert agrees(found, view)
        assert canvas(browser, panel) != old
        assert browser.ask(f"document.querySelectorAll('{panel} [aria-checked=true]').length") == 1
    browser.click("#together")
    browser.choose(f"{SECOND} .pick label:nth-child(2) select", 1 - head)
    assert [shown(browser, panel)[:2] for panel in (FIRST, SECOND)] == [(layer, head), (layer, 1 - head)]
    browser.choose(f"{FIRST} .pick label:nth-child(1) select", start.layer)
    assert [shown(browser, panel)[:2] for panel in (FIRST, SECOND)] == [
        (start.layer, head),
        (layer, 1 - head),
    ]
    assert agrees(shown(browser, FIRST), OURS)
    assert agrees(shown(browser, SECOND), PLAIN)


def test_everything_works_with_the_keyboard_alone(browser: Chromium, pair: Path) -> None:
    browser.open(pair)
    focus(browser, "#theme")
    browser.press("Enter")
    assert browser.ask("document.documentElement.dataset.theme") == "dark"
    focus(browser, f"{FIRST} .heads button")
    start = shown(browser, FIRST)
    browser.press("ArrowDown", "ArrowRight")
    found = shown(browser, FIRST)
    assert (found.layer, found.head) == ((start.layer + 1) % 3, (start.head + 1) % 2)
    assert browser.ask("document.activeElement.getAttribute('aria-checked')") == "true"
    focus(browser, f"{FIRST} .map")
    browser.press("End", "PageUp", "ArrowUp", "ArrowDown", "ArrowLeft")
    assert shown(browser, FIRST).row == shown(browser, SECOND).row == LENGTH - 1 - 10 - 1
    said = browser.ask("document.activeElement.ariaValueText")
    assert said.startswith(f"Row {LENGTH - 11}, “")
    assert browser.text("#announce") == said
    assert agrees(shown(browser, FIRST), OURS)
    browser.press("Home")
    assert shown(browser, FIRST).row == 0
    focus(browser, ".plot")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.text(".readout") == "step 2 · ours 1.5 (1.4 … 1.6)"
    focus(browser, "thead th:nth-child(2) button")
    browser.press("Enter")
    assert [row.split()[0] for row in browser.texts("tbody tr")] == ["a", "d", "b", "c"]


def test_pointing_at_a_row_shows_where_it_goes(browser: Chromium, pair: Path) -> None:
    browser.open(pair)
    chosen = shown(browser, FIRST)
    point_at(browser, FIRST, 9, 4)
    for panel, view in ((FIRST, OURS), (SECOND, PLAIN)):
        found = shown(browser, panel)
        assert found.row == 9, "the same row in both"
        assert agrees(found, view)
    row = shares(OURS, chosen.layer, chosen.head, 9)
    share, rest = browser.text(f"{FIRST} .tip").split(" %", 1)
    assert float(share) == pytest.approx(row[4], abs=0.51 if row[4] > 9.9 else 0.06)
    assert rest.replace("\u2068", "").replace("\u2069", "") == " to “·over” (5)\nfrom “·fox” (10)"
    most = browser.texts(f"{FIRST} .largest li")
    order = sorted(range(10), key=lambda column: -row[column])[:5]
    assert [int(re.search(r"” (\d+) ", text)[1]) - 1 for text in most] == order  # type: ignore[index]

    columns = LENGTH - 9
    expected = mass(OURS, chosen.layer, chosen.head, 9)
    point_at(browser, FIRST, 9, LENGTH + 1)
    assert browser.text(f"{FIRST} .tip").startswith(f"{expected:.0f} % goes to no token (pseudo mass)")
    point_at(browser, FIRST, 9, 15)
    assert "to pseudo column 16" in browser.text(f"{FIRST} .tip")
    assert number(browser.text(f"{FIRST} .tip b")) == pytest.approx(expected / columns, rel=0.3), (
        "γ is small here"
    )

    away(browser)
    assert shown(browser, FIRST) == chosen
    assert browser.ask(f"document.querySelector('{FIRST} .tip').hidden")
    browser.point(f"{SECOND} .token:nth-of-type(18)")
    assert shown(browser, FIRST).row == shown(browser, SECOND).row == 17
    point_at(browser, SECOND, 6, 2, click=True)
    away(browser)
    assert [shown(browser, panel).row for panel in (FIRST, SECOND)] == [6, 6]


def test_words_of_the_text_are_coloured_by_their_share(browser: Chromium, pair: Path) -> None:
    browser.open(pair)
    found = shown(browser, FIRST)
    row = shares(OURS, found.layer, found.head, found.row)
    colours = browser.ask(
        f"[...document.querySelectorAll('{FIRST} .token')].map((e) => e.style.backgroundColor)"
    )
    light = [sum(map(int, re.findall(r"\d+", colour))) for colour in colours]
    order = sorted(range(len(row)), key=lambda column: row[column])
    assert all(light[a] >= light[b] for a, b in pairwise(order)), "darker is more"
    red, _, blue = (int(x) for x in re.findall(r"\d+", colours[found.row + 1]))
    assert red > blue, "what comes later has the colour of no token"
    red, _, blue = (int(x) for x in re.findall(r"\d+", colours[order[-1]]))
    assert blue > red


def test_heads_are_coloured_by_what_is_chosen(browser: Chromium, pair: Path) -> None:
    browser.open(pair)

    def colours() -> list[str]:
        found: list[str] = browser.ask(
            "[...document.querySelectorAll('.heads button')].map((e) => e.style.backgroundColor)"
        )
        return found

    first = colours()
    browser.choose("#statistic", "pseudo")
    pseudo = colours()
    assert all(a != b for a, b in zip(first[:6], pseudo[:6], strict=True))
    label = browser.ask(
        f"document.querySelector('{FIRST} .heads [data-layer=\"1\"]').getAttribute('aria-label')"
    )
    expected = 100 * float(OURS.pseudo_mass[1, 0].mean())
    assert label == f"Layer 1, head 0: pseudo mass {expected:.0f} %"


def test_values_of_a_curve_are_read_with_the_mouse(browser: Chromium, pair: Path) -> None:
    browser.open(pair)
    browser.point(".plot", across=0.99)
    assert browser.text(".readout") == "step 3 · ours 1.25 (1.2 … 1.3)"
    browser.point(".plot", across=0.2)
    assert browser.text(".readout") == "step 1 · ours 2 (1.9 … 2.1)"
    browser.point("footer")
    assert browser.text(".readout").strip() == ""


def test_tables_are_sorted(browser: Chromium, pair: Path) -> None:
    browser.open(pair)

    def names() -> list[str]:
        return [row.split()[0] for row in browser.texts("tbody tr")]

    assert names() == ["b", "c", "a", "d"]
    browser.click("thead th:nth-child(2) button")
    assert names() == ["a", "d", "b", "c"], "by value, not by letters; what is missing comes last"
    browser.click("thead th:nth-child(2) button")
    assert names() == ["b", "d", "a", "c"]
    assert browser.ask("[...document.querySelectorAll('thead th')].map((e) => e.ariaSort)") == [
        None,
        "descending",
    ]
    browser.click("thead th:nth-child(1) button")
    assert names() == ["a", "b", "c", "d"]


def test_texts_with_numbers_are_sorted_by_them(browser: Chromium, tmp_path: Path) -> None:
    table = Table("By position", ["position"], [["17–32"], ["3–4"], ["2"]])
    browser.open(write_report(tmp_path / "report.html", tables=[table]))
    browser.click("thead button")
    assert browser.texts("tbody tr") == ["2", "3–4", "17–32"]


def test_the_theme_is_that_of_the_system_until_somebody_chooses(browser: Chromium, pair: Path) -> None:
    def looks() -> tuple[str, str, str, list[bool]]:
        body = browser.ask("getComputedStyle(document.body).backgroundColor")
        images = browser.ask("[...document.querySelectorAll('.picture img')].map((e) => e.offsetWidth > 0)")
        return browser.ask("document.documentElement.dataset.theme"), body, canvas(browser, FIRST), images

    browser.open(pair)
    light = looks()
    assert (light[0], light[3]) == ("light", [True, False])
    browser.open(pair, dark=True)
    dark = looks()
    assert (dark[0], dark[3]) == ("dark", [False, True])
    assert all(a != b for a, b in zip(light, dark, strict=True))
    browser.click("#theme")
    assert looks() == light
    browser.click("#theme")
    assert looks() == dark
    browser.open(pair)
    media = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.send("Emulation.setEmulatedMedia", features=media)
    browser.wait("document.documentElement.dataset.theme === 'dark'")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(browser: Chromium, pair: Path, width: int) -> None:
    browser.open(pair, width=width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    beside = browser.ask("[...document.querySelectorAll('.panel')].map((e) => e.getBoundingClientRect().top)")
    assert (beside[0] == beside[1]) == (width == 1280)
    point_at(browser, FIRST, 9, 4)
    assert shown(browser, FIRST).row == 9
    left, right = browser.ask(
        "(({ left, right }) => [left, right])(document.querySelector('.tip').getBoundingClientRect())"
    )
    assert 0 <= left < right <= width
    browser.resize(1280, 900)
    browser.wait(f"document.querySelector({json.dumps(FIRST + ' canvas')}).offsetWidth > 400")


def test_models_with_other_texts_keep_their_rows(browser: Chromium, tmp_path: Path) -> None:
    other = make_view("Other text", length=7, layers=1, heads=1)
    browser.open(written(tmp_path, OURS, other))
    start = shown(browser, SECOND)
    point_at(browser, FIRST, 20, 3, click=True)
    browser.click(f"{FIRST} .heads [data-layer='2'][data-head='1']")
    assert shown(browser, FIRST)[:3] == (2, 1, 20)
    assert shown(browser, SECOND) == start
    assert agrees(start, other)


def test_of_three_models_two_are_chosen(browser: Chromium, tmp_path: Path) -> None:
    third = make_view("Third", length=LENGTH, seed=2)
    browser.open(written(tmp_path, OURS, PLAIN, third))
    browser.choose(f"{SECOND} .head > select", 2)
    assert agrees(shown(browser, SECOND), third)
    assert agrees(shown(browser, FIRST), OURS)
    assert browser.ask(f"document.querySelector('{SECOND}').ariaLabel") == "Third"


def test_one_model_alone_and_a_text_that_is_cut(browser: Chromium, tmp_path: Path) -> None:
    long = make_view(length=MAX_ROWS + 9, layers=1, heads=1)
    browser.open(written(tmp_path, long))
    assert browser.ask("document.querySelectorAll('.panel').length") == 1
    assert (
        browser.text("#cut") == f"This part of the page shows the first {MAX_ROWS} of {MAX_ROWS + 9} tokens."
    )
    point_at(browser, FIRST, MAX_ROWS - 1, 3)
    assert agrees(shown(browser, FIRST), long)


def test_without_scripts_there_are_tables_and_figures(browser: Chromium, pair: Path) -> None:
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.send("Page.navigate", url=pair.as_uri())
        browser.wait("document.readyState === 'complete'")
        assert "scripts are switched off" in browser.text("body")
        assert browser.texts("tbody tr") == ["b\t10.5", "c\t–", "a\t−0.25", "d\t9"]
        images = browser.ask("[...document.querySelectorAll('.picture img')].map((e) => e.offsetWidth > 0)")
        assert images == [True, False]
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)


def test_make_looks_for_the_same_browsers() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^BROWSERS := (.*)$", makefile, re.MULTILINE)
    assert found is not None
    assert found[1].split() == list(NAMES)
