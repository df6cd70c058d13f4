"""What figures and the report page show: models with their maps, tables and curves."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from stablemask import PseudoScores

AttentionMaps = Annotated[Tensor, "L H T T"]
AttentionMap = Annotated[Tensor, "T T"]
PseudoMass = Annotated[Tensor, "L H T"]

_TOTAL_TOLERANCE = 0.02

Cell = str | float | int | None


@dataclass(frozen=True)
class ModelView:
    """The attention of one model on one text.

    Args:
        name: Shown above its maps.
        tokens: The text as the model reads it, one string per position; shown as it is.
        maps: Attention of every layer and head, or a function of (layer, head) that makes one map when it
            is asked for. ``map[i, j]`` is what row i gives to token j.
        pseudo_mass: 1 − α: the share of every row that goes to no token; zeros for a model without a sink
            logit.
        rest: What gets the share that no token gets, where it is not a sink logit alone.
        scores: The pseudo scores of StableMask, which say over which columns the pseudo mass of a row is
            spread; None where it has no columns.
        details: Further facts, by name: γ, horizon, position encoding.
    """

    name: str
    tokens: Sequence[str]
    maps: AttentionMaps | Callable[[int, int], AttentionMap]
    pseudo_mass: PseudoMass
    rest: str = "pseudo mass"
    scores: PseudoScores | None = None
    details: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expected = f"(layers, heads, {len(self.tokens)}) as there are {len(self.tokens)} tokens"
        if not self.tokens:
            raise ValueError("tokens: got none; allowed is at least one")
        if self.pseudo_mass.ndim != 3 or self.pseudo_mass.shape[2] != len(self.tokens):
            raise ValueError(f"pseudo_mass: got shape {tuple(self.pseudo_mass.shape)}; allowed is {expected}")
        if isinstance(self.maps, Tensor):
            shape = (*self.pseudo_mass.shape, len(self.tokens))
            if self.maps.shape != shape:
                raise ValueError(f"maps: got shape {tuple(self.maps.shape)}; allowed is {shape}")

    @property
    def num_layers(self) -> int:
        """Layers that can be looked at."""
        return self.pseudo_mass.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads of every layer."""
        return self.pseudo_mass.shape[1]

    def attention(self, layer: int, head: int) -> AttentionMap:
        """One map in float32 on the CPU, checked: causal, and with the pseudo mass every row sums to 1."""
        for what, index, count in (("layer", layer, self.num_layers), ("head", head, self.num_heads)):
            if not 0 <= index < count:
                raise ValueError(f"{what}: got {index}; allowed are 0 … {count - 1} in {self.name!r}")
        made = self.maps[layer, head] if isinstance(self.maps, Tensor) else self.maps(layer, head)
        shares = made.detach().to("cpu", torch.float32)
        where = f"maps: layer {layer}, head {head} of {self.name!r}"
        if shares.shape != (len(self.tokens),) * 2:
            raise ValueError(f"{where} has shape {tuple(shares.shape)}; allowed is {(len(self.tokens),) * 2}")
        if bool(shares.triu(1).any()):
            raise ValueError(f"{where} gives attention to later tokens; allowed are causal maps")
        if not bool(((shares >= 0) & (shares <= 1 + _TOTAL_TOLERANCE)).all()):
            raise ValueError(f"{where} has shares outside 0 … 1, or NaN; allowed are probabilities")
        totals = shares.sum(-1) + self.pseudo_mass[layer, head].detach().to("cpu", torch.float32)
        off = (totals - 1).abs()
        if not float(off.max()) <= _TOTAL_TOLERANCE:
            row = int(off.argmax())
            raise ValueError(
                f"{where}: shares and pseudo mass of row {row} sum to {float(totals[row]):.4f}; "
                f"allowed is 1 ± {_TOTAL_TOLERANCE}"
            )
        return shares.clamp(max=1.0)

    def on_first_token(self) -> PseudoMass:
        """What every row gives to the first token."""
        rows = [
            [self.attention(layer, head)[:, 0] for head in range(self.num_heads)]
            for layer in range(self.num_layers)
        ]
        return torch.stack([torch.stack(heads) for heads in rows])


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``low`` and ``high`` bound its interval where there is one. NaN leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.x:
            raise ValueError(f"x: got no points in series {self.name!r}; allowed is at least one")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"low, high: got one of them in series {self.name!r}; give both or neither")
        for what in ("y", "low", "high"):
            values = getattr(self, what)
            if values is not None and len(values) != len(self.x):
                got = f"{len(values)} values in series {self.name!r}"
                raise ValueError(f"{what}: got {got}; allowed is {len(self.x)}, one per x")


@dataclass(frozen=True)
class Curve:
    """A chart of one or more lines.

    Args:
        title: What it shows.
        x_label: The horizontal axis, with its unit.
        y_label: The vertical axis, with its unit.
        series: The lines.
        note: Where the figures come from.
        log_x: Logarithmic horizontal axis.
        log_y: Logarithmic vertical axis.
        marks: Values of x that get a labelled vertical line, such as the training length.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    marks: Sequence[tuple[float, str]] = ()

    def __post_init__(self) -> None:
        if not self.series:
            raise ValueError(f"series: got none in curve {self.title!r}; allowed is at least one")
        for log, what in ((self.log_x, "x"), (self.log_y, "y")):
            values = [v for line in self.series for v in getattr(line, what) if not math.isnan(v)]
            if log and min(values, default=1.0) <= 0:
                got = f"{what} = {min(values)} in curve {self.title!r}"
                raise ValueError(f"log_{what}: got {got}; allowed on a logarithmic axis is > 0")


@dataclass(frozen=True)
class Interval:
    """A difference and the ends of two intervals of it; NaN where there is none."""

    name: str
    value: float
    first: tuple[float, float]
    second: tuple[float, float]


@dataclass(frozen=True)
class Table:
    """A table: numbers are aligned and can be sorted on the page; ``None`` is shown as a dash."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                got = f"{len(row)} cells in row {i} of table {self.title!r}"
                raise ValueError(f"rows: got {got}; allowed is {len(self.columns)}")


def sink_curve(models: Sequence[ModelView]) -> Curve:
    """Attention on the first token over the position of the row: one line a model.

    The first row is left out: it has no other token to look at.
    """
    return Curve(
        "Attention on the first token",
        "position",
        "mean share of the first token",
        [_mean_series(m.name, m.on_first_token(), first=1) for m in models],
        note="Mean over all layers and heads. The first row is left out: it sees no other token.",
    )


def pseudo_mass_curve(models: Sequence[ModelView]) -> Curve:
    """Pseudo mass over the position of the row, mean over layers and heads, a line per model."""
    return Curve(
        "Pseudo mass",
        "position",
        "mean pseudo mass 1 − α",
        [_mean_series(m.name, m.pseudo_mass) for m in models],
        note="Mean over all layers and heads.",
    )


def pseudo_mass_at_rest(scores: PseudoScores, length: int, num_heads: int) -> Annotated[Tensor, "H T"]:
    """The pseudo mass of rows whose scores are all zero: what StableMask does before anything is learned."""
    rows = torch.arange(length)
    sigma = scores.row_logits(rows, num_heads, torch.float64)
    return torch.sigmoid(sigma - (rows + 1).to(torch.float64).log())


def _mean_series(name: str, values: PseudoMass, first: int = 0) -> Series:
    mean = values.detach().to("cpu", torch.float64).mean(dim=(0, 1))
    rows = range(first, mean.shape[0]) or range(1)
    return Series(name, [float(row + 1) for row in rows], [float(mean[row]) for row in rows])
