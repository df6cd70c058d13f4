"""Colours of the figures and of the report page, for light and dark surroundings.

Attention is blue and pseudo mass is orange everywhere, a pair that every common colour blindness tells apart.
Their ramps run through OKLab from the background over a saturated middle to a far end, evenly in lightness:
equal steps look equal and the order survives a grey print.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Theme = Literal["light", "dark"]
RAMP_STEPS = 256


@dataclass(frozen=True)
class Palette:
    """Colours as ``#rrggbb``.

    Args:
        surface: Behind everything.
        panel: Behind tables and controls.
        text: Text, at least 7 : 1 on the surface.
        muted: Secondary text, at least 4.5 : 1 on the surface.
        line: Rules and grids.
        attention: Middle and end of the ramp of attention, which begins at the surface.
        pseudo: Middle and end of the ramp of pseudo mass.
        series: Lines of a chart, at least 3 : 1 on the surface; the first two are those of attention and
            pseudo mass.
    """

    surface: str
    panel: str
    text: str
    muted: str
    line: str
    attention: tuple[str, str]
    pseudo: tuple[str, str]
    series: tuple[str, ...]

    def attention_ramp(self) -> list[str]:
        """256 colours for attention from 0 to 1."""
        return ramp(self.surface, *self.attention)

    def pseudo_ramp(self) -> list[str]:
        """256 colours for pseudo mass from 0 to 1."""
        return ramp(self.surface, *self.pseudo)


PALETTES: dict[Theme, Palette] = {
    "light": Palette(
        surface="#ffffff",
        panel="#f4f5f7",
        text="#1c2330",
        muted="#5a6372",
        line="#d5d9e0",
        attention=("#5b96d6", "#08306b"),
        pseudo=("#e98a45", "#7a2900"),
        series=("#0b5cab", "#c2500a", "#16795a", "#8446a8", "#6b6f76", "#0a7f93"),
    ),
    "dark": Palette(
        surface="#14181f",
        panel="#1d232d",
        text="#e8ebf0",
        muted="#a3acba",
        line="#39424f",
        attention=("#2f74c0", "#cfe6ff"),
        pseudo=("#b25a12", "#ffd9ae"),
        series=("#6fb3f2", "#f59a4c", "#5fcf9f", "#cf9ae0", "#b0b5bd", "#5fd0e0"),
    ),
}


def ramp(*stops: str, steps: int = RAMP_STEPS) -> list[str]:
    """Colours on the way from stop to stop through OKLab, with even steps of lightness from end to end."""
    points = [_oklab(stop) for stop in stops]
    light = [point[0] for point in points]
    if light not in (sorted(light), sorted(light, reverse=True)):
        raise ValueError(f"stops: got {stops}; allowed are colours that only get lighter or only get darker")
    colours = []
    for i in range(steps):
        wanted = light[0] + (light[-1] - light[0]) * i / (steps - 1)
        leg = next(k for k in range(len(points) - 1) if _between(wanted, light[k], light[k + 1]))
        share = (wanted - light[leg]) / (light[leg + 1] - light[leg])
        colours.append(_hex([a + (b - a) * share for a, b in zip(points[leg], points[leg + 1], strict=True)]))
    return colours


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours as WCAG 2 defines it: 1 for equal, 21 for black on white."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _between(x: float, first: float, second: float) -> bool:
    return min(first, second) - 1e-12 <= x <= max(first, second) + 1e-12


def _linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def _luminance(colour: str) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), _linear(colour), strict=True))


# Björn Ottosson's matrices: linear sRGB → cone responses → OKLab, and back.
_TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
_FROM_LAB = (
    (1.0, 0.3963377774, 0.2158037573),
    (1.0, -0.1055613458, -0.0638541728),
    (1.0, -0.0894841775, -1.2914855480),
)
_FROM_CONES = (
    (4.0767416621, -3.3077115913, 0.2309699292),
    (-1.2684380046, 2.6097574011, -0.3413193965),
    (-0.0041960863, -0.7034186147, 1.7076147010),
)


def _times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(m * x for m, x in zip(row, vector, strict=True)) for row in matrix]


def _oklab(colour: str) -> list[float]:
    return _times(_TO_LAB, [c ** (1 / 3) for c in _times(_TO_CONES, _linear(colour))])


def _hex(lab: Sequence[float]) -> str:
    channels = _times(_FROM_CONES, [c**3 for c in _times(_FROM_LAB, lab)])
    clipped = [min(max(c, 0.0), 1.0) for c in channels]
    encoded = [12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in clipped]
    return "#" + "".join(f"{round(255 * c):02x}" for c in encoded)
