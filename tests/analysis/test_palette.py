"""Colours can be told apart, on the page, in the dark and on grey paper."""

from itertools import pairwise

import pytest

from stablemask.analysis.palette import PALETTES, Palette, contrast, ramp


def test_contrast_is_that_of_the_guideline() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # the guideline's known near miss


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
def test_text_and_lines_stand_out(palette: Palette) -> None:
    for behind in (palette.surface, palette.panel):
        assert contrast(palette.text, behind) >= 7
        assert contrast(palette.muted, behind) >= 4.5
        assert min(contrast(colour, behind) for colour in palette.series) >= 3


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
def test_ramps_keep_their_order_in_grey(palette: Palette) -> None:
    for colours in (palette.attention_ramp(), palette.pseudo_ramp()):
        away = [contrast(colour, palette.surface) for colour in colours]
        assert colours[0] == palette.surface
        assert away[-1] > 7
        assert all(after >= before - 0.02 for before, after in pairwise(away))  # 0.02: colours have 8 bits


def test_a_ramp_passes_its_stops() -> None:
    assert ramp("#000000", "#ffffff", steps=3)[1] == "#636363"  # half of the lightness of white in OKLab
    assert ramp("#ffffff", "#123456")[-1] == "#123456"
    with pytest.raises(ValueError, match="stops: got"):
        ramp("#000000", "#ffffff", "#777777")
