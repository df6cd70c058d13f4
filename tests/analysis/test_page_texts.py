"""Whatever text says, the report page shows it: nothing in it is executed, nothing falls out of its place."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from stablemask.analysis.figures import curve_figure
from stablemask.analysis.report import Picture, write_report
from stablemask.analysis.views import Curve, Series, Table
from tests.analysis.panels import FIRST, point_at
from tests.analysis.views import make_view
from tests.chromium import Chromium

PROBE = "window.ran = (window.ran ?? 0) + 1"
MARKUP = f"<img src=x onerror='{PROBE}'></script><script>{PROBE}</script><b>&amp;"
ARABIC, EMOJI, HALF = "مرحبا", "👩🏽‍🚀", "\ud83d"
STRANGE = [MARKUP, ARABIC, EMOJI, HALF, "\u202e", "\x00", "\n", "", "W" * 300, "\u2028", "{{ 7 * 7 }}"]
SEEN = [
    MARKUP,
    ARABIC,
    "👩🏽⟨200D⟩🚀",
    "⟨D83D⟩",
    "⟨202E⟩",
    "⟨0⟩",
    "↵",
    "∅",
    "W" * 300,
    "⟨2028⟩",
    "{{ 7 * 7 }}",
]


def strange_page(folder: Path) -> Path:
    view = replace(make_view(MARKUP), tokens=STRANGE, details={MARKUP: MARKUP}, rest=MARKUP)
    table = Table(MARKUP, [MARKUP, ARABIC], [[MARKUP, 1.0], [EMOJI, None]], MARKUP)
    curve = Curve(
        MARKUP, MARKUP, MARKUP, [Series(MARKUP, [1.0], [1.0]), Series(ARABIC, [1.0], [2.0])], MARKUP
    )
    short = "<b>&amp; ç"
    drawn = Curve(short, short, short, [Series(short, [1.0], [1.0])])
    picture = Picture(MARKUP, lambda theme: curve_figure(drawn, theme=theme), MARKUP)
    options: dict[str, Any] = {"tables": [table], "curves": [curve], "pictures": [picture]}
    return write_report(folder / "report.html", [view], title=MARKUP, lead=MARKUP + HALF, **options)


def test_text_is_shown_and_never_executed(browser: Chromium, tmp_path: Path) -> None:
    browser.open(strange_page(tmp_path))
    assert browser.texts(f"{FIRST} .token") == SEEN
    for place in (
        "h1",
        ".lead",
        ".panel h3",
        ".details",
        "caption",
        "thead",
        "tbody",
        ".chart h3",
        "#pictures",
    ):
        assert MARKUP in browser.text(place), place
    assert browser.ask("document.title") == MARKUP
    browser.click(f"{FIRST} .map", 0.1, 0.95)
    browser.point(f"{FIRST} .map", 0.05, 0.95)
    assert MARKUP in browser.text(f"{FIRST} .tip")
    assert MARKUP in browser.text(f"{FIRST} .largest")
    assert browser.ask("window.ran ?? null") is None
    assert (
        browser.ask("document.querySelectorAll('img:not(.picture img), b > b, #explore script').length") == 0
    )
    browser.resize(390, 900)
    browser.wait("document.documentElement.scrollWidth <= 390")
    widths = browser.ask(
        "(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])(document.querySelector('.text'))"
    )
    assert widths[0] <= widths[1], "long words are broken"


def test_text_that_runs_the_other_way_moves_no_neighbour(browser: Chromium, tmp_path: Path) -> None:
    tokens = ["one", ARABIC, "1", "\u202e", "two", "א", "2", "three", "x", "y", "z"]
    browser.open(write_report(tmp_path / "report.html", [replace(make_view(), tokens=tokens)]))
    lefts = browser.ask(
        f"[...document.querySelectorAll('{FIRST} .token')].map((e) => e.getBoundingClientRect().left)"
    )
    assert lefts == sorted(lefts)
    point_at(browser, FIRST, 7, 1)
    assert browser.text(f"{FIRST} .tip").splitlines()[0].endswith(f"to \u2068“{ARABIC}”\u2069 (2)")


INTRUDE = """new Promise((done) => {
  const found = [];
  document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
  const script = document.createElement("script");
  script.textContent = "window.ran = 1";
  const holder = document.createElement("div");
  holder.innerHTML = "<img src='data:,' onerror='window.ran = 2'>";
  const style = document.createElement("style");
  style.textContent = "* { color: red }";
  document.body.append(script, holder, style);
  fetch("data:,x").catch(() => {});
  new Image().src = "http://127.0.0.1:9/pixel";
  setTimeout(() => done([window.ran ?? null, [...new Set(found)].sort()]), 300);
})"""


def test_the_policy_holds(any_browser: Chromium, tmp_path: Path) -> None:
    """What somebody smuggled in would not run, and could send nothing; without the policy it would."""
    page = strange_page(tmp_path)
    any_browser.open(page)
    ran, violated = any_browser.ask(INTRUDE)
    assert ran is None
    assert violated == ["connect-src", "img-src", "script-src-attr", "script-src-elem", "style-src-elem"]
    policy = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
    open_page = tmp_path / "open.html"
    open_page.write_text(policy.sub("", page.read_text(encoding="utf-8")), encoding="utf-8")
    any_browser.open(open_page)
    assert any_browser.ask(INTRUDE) == [2, []]
