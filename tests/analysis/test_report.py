"""The report page as a file: what is in it, how large it gets, what it refuses. ``test_page`` opens it."""

import base64
import hashlib
import json
import math
import re
import zlib
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

from stablemask import PseudoScores
from stablemask.analysis import report
from stablemask.analysis.figures import curve_figure
from stablemask.analysis.packing import fitting_length, pack
from stablemask.analysis.report import Picture, write_report
from stablemask.analysis.views import Curve, ModelView, Series, Table
from tests.analysis.views import make_view

CURVE = Curve("Loss", "step", "loss", [Series("one", [1, 2, 3], [2.0, math.nan, 1.0])])
TABLE = Table("Values", ["name", "value"], [["a", 1.5], ["b", None]])


def written(folder: Path, *models: ModelView, **more: Any) -> str:
    return write_report(folder / "report.html", models, **more).read_text(encoding="utf-8")


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def unpacked(content: str, view: ModelView, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps and pseudo mass from the text of the page, as its script reads them."""
    planes = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(content))), dtype=torch.uint8)
    high, low = planes.to(torch.int64).chunk(2)
    numbers = (256 * high + low).double() / 65_535
    heads, triangle = view.num_layers * view.num_heads, length * (length + 1) // 2
    maps = torch.zeros(heads, length, length, dtype=torch.float64)
    rows, columns = torch.tril_indices(length, length)
    maps[:, rows, columns] = numbers[: heads * triangle].view(heads, triangle)
    return maps, numbers[heads * triangle :].view(heads, length)


@pytest.mark.parametrize("length", [11, 5])
def test_shares_are_packed_to_one_in_65_535(length: int) -> None:
    view = make_view()
    packed = pack(view, length)
    maps, mass = unpacked(packed.content, view, length)
    assert isinstance(view.maps, torch.Tensor)
    expected = view.maps.flatten(0, 1)[:, :length, :length]
    half = 0.5 / 65_535 + 1e-7
    assert (maps - expected).abs().max() <= half
    assert (mass - view.pseudo_mass.flatten(0, 1)[:, :length]).abs().max() <= half
    assert torch.allclose(torch.tensor(packed.first).flatten(), expected[:, :, 0].mean(-1))
    assert torch.allclose(torch.tensor(packed.pseudo), view.pseudo_mass[:, :, :length].mean(-1))


def test_the_page_has_everything_and_loads_nothing(tmp_path: Path) -> None:
    picture = Picture("A figure", lambda theme: curve_figure(CURVE, theme=theme), "Look.")
    page = written(
        tmp_path, make_view(), tables=[TABLE], curves=[CURVE], pictures=[picture], lead="About this."
    )
    for text in ("Where attention goes", "About this.", "Values", "A figure", "Look."):
        assert text in page
    data = embedded(page)
    assert data["models"][0]["tokens"] == list(make_view().tokens)
    assert data["curves"][0]["series"][0]["y"] == [2.0, None, 1.0]
    addresses = re.findall(r"""(?:src|href|action|data)=["']([^"']*)""", page)
    assert addresses
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in addresses)
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    assert style
    assert not re.search(r"url\(|@import", style)


def test_the_policy_admits_the_script_and_the_style_of_the_page_alone(tmp_path: Path) -> None:
    page = written(tmp_path, make_view())
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    policy = dict(rule.strip().split(" ", 1) for rule in unescape(found[1]).split(";") if rule.strip())
    assert policy["default-src"] == "'none'"
    for kind, element in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        (source,) = re.findall(element, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert policy[f"{kind}-src"].startswith(f"'sha256-{digest}'")
        assert "unsafe-inline" not in policy[f"{kind}-src"].split(" 'unsafe-hashes'")[0]


NASTY = "</script><script>alert(1)</script><!--"


def test_no_text_can_end_its_element(tmp_path: Path) -> None:
    honest = written(tmp_path, make_view(), tables=[TABLE], curves=[CURVE], lead="lead")
    view = replace(make_view(NASTY), tokens=[NASTY] * 11, details={NASTY: NASTY}, rest=NASTY)
    table = Table(NASTY, [NASTY] * 2, [[NASTY, 1], [NASTY, None]], NASTY)
    curve = Curve(NASTY, NASTY, NASTY, [Series(NASTY, [1.0], [1.0])], NASTY)
    page = written(tmp_path, view, tables=[table], curves=[curve], lead=NASTY, title=NASTY)
    for mark in ("<script", "</script", "<!--"):
        assert page.count(mark) == honest.count(mark)
    data = embedded(page)
    assert data["models"][0]["tokens"] == [NASTY] * 11
    assert data["curves"][0]["title"] == NASTY


def test_halves_of_surrogate_pairs_and_control_characters_can_be_written(tmp_path: Path) -> None:
    tokens = ["\ud83d", "\udc00", "\x00", "\u2028", "\u202e", "é", "中", "\U0001fae0", "", "\n", "\x85"]
    page = written(tmp_path, replace(make_view(), tokens=tokens), lead="half \ud83d")
    assert embedded(page)["models"][0]["tokens"] == tokens
    assert "half &#55357;" in page


def test_a_page_stays_below_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise does not compress; what does not fit is cut, the same in all models, and the page says so."""
    monkeypatch.setattr(report, "SIZE_LIMIT", 400_000)
    views = [make_view(str(i), length=150, layers=3, heads=4, seed=i) for i in range(2)]
    page = written(tmp_path, *views)
    length = len(embedded(page)["models"][0]["tokens"])
    assert 40 < length < 150
    assert len(page.encode()) < 400_000
    assert {(len(m["tokens"]), m["allTokens"]) for m in embedded(page)["models"]} == {(length, 150)}
    assert len(page.encode()) > 0.6 * (400_000 - report._RESERVE), "it could have shown more"


def test_the_length_that_fits_surely_fits() -> None:
    """Random bytes, which nothing compresses, in the place of shares."""
    view = make_view(length=97, layers=2, heads=2)
    length = fitting_length([view], 20_000)
    size = 2 * 4 * (length * (length + 1) // 2 + length)
    noise = torch.randint(256, (size,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert len(base64.b64encode(zlib.compress(noise.numpy().tobytes()))) <= 20_000
    longer = length + 4
    assert 2 * 4 * (longer * (longer + 1) // 2 + longer) * 4 / 3 > 20_000, "and not much shorter than it can"
    assert fitting_length([view], 10**9) == 97


def test_long_texts_are_cut_to_the_rows_that_a_map_can_show(tmp_path: Path) -> None:
    view = make_view(length=report.MAX_ROWS + 1, layers=1, heads=1)
    (model,) = embedded(written(tmp_path, view))["models"]
    assert (len(model["tokens"]), model["allTokens"]) == (report.MAX_ROWS, report.MAX_ROWS + 1)


def test_gammas_and_horizon_are_those_of_the_model(tmp_path: Path) -> None:
    scores = PseudoScores(0.5, horizon=11)
    with_scores = replace(make_view("a"), scores=scores)
    models = embedded(written(tmp_path, with_scores, make_view("b")))["models"]
    assert models[0]["gammas"] == pytest.approx(scores.gammas(2).tolist())
    assert models[0]["horizon"] == 11
    assert models[1]["gammas"] is models[1]["horizon"] is None


def test_what_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = make_view()
    with pytest.raises(ValueError, match="got none of them; allowed is at least one"):
        written(tmp_path)
    with pytest.raises(ValueError, match=r"models: got the names .*allowed are different ones"):
        written(tmp_path, view, view)
    maps = view.maps
    assert isinstance(maps, torch.Tensor)
    smaller = replace(view, maps=maps * 0.9)
    with pytest.raises(ValueError, match=r"sum to 0\.9000"):
        written(tmp_path, smaller)
    with pytest.raises(FileNotFoundError, match="allowed is a file in a folder that exists"):
        written(tmp_path / "none", view)
    monkeypatch.setattr(report, "SIZE_LIMIT", 60_000)
    with pytest.raises(ValueError, match=r"models: got 6 heads.*allowed is what fits into 60,000 bytes"):
        written(tmp_path, view)
    with pytest.raises(ValueError, match=r"page: got .* bytes; allowed are 60,000"):
        written(tmp_path, tables=[Table("t", ["a"], [["x" * 60_000]])])
    assert list(tmp_path.iterdir()) == []
