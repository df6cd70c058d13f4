"""The pictures of the documentation: ``make figures`` writes them here, for light and dark pages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure

from stablemask import PseudoScores
from stablemask.analysis.figures import construction_figure, curve_figure, pseudo_mass_figure, save_figure
from stablemask.analysis.palette import Theme
from stablemask.analysis.views import Curve, Series, pseudo_mass_at_rest

SCORES = [  # A of six tokens: the last but one finds what it looks for, the others little
    [0.6, 0.0, 0.0, 0.0, 0.0, 0.0],
    [-0.4, 0.3, 0.0, 0.0, 0.0, 0.0],
    [-1.1, -0.2, 0.5, 0.0, 0.0, 0.0],
    [-0.9, 0.4, -1.3, 0.2, 0.0, 0.0],
    [-0.7, 2.9, -0.6, -1.2, 0.1, 0.0],
    [-1.0, -0.5, 0.8, -0.3, -0.8, 0.4],
]


def figures(theme: Theme) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every picture."""
    one_head = PseudoScores(0.5, horizon=6, headwise=False)
    yield "construction", construction_figure(one_head, torch.tensor(SCORES), theme=theme)

    scores, length, heads = PseudoScores(0.5, horizon=1024), 1024, 8
    mass = pseudo_mass_at_rest(scores, length, heads)
    yield "pseudo-mass", pseudo_mass_figure(mass[None], theme=theme)

    rows = [float(i) for i in range(1, length + 1)]
    lines = [Series(f"head {h}, γ = 1/{2 ** (h + 1)}", rows, (1 - mass[h]).tolist()) for h in (0, 2, 4, 6, 7)]
    title = "What is left for the tokens, where all scores are zero"
    yield "row-sums", curve_figure(Curve(title, "row i", "α", lines, log_x=True), theme=theme)


def main(folder: Path) -> None:
    """Write every picture into the folder: ``name.svg`` for light pages, ``name-dark.svg`` for dark ones."""
    themes: tuple[tuple[Theme, str], ...] = (("light", ""), ("dark", "-dark"))
    for theme, suffix in themes:
        for name, figure in figures(theme):
            save_figure(figure, folder / f"{name}{suffix}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
