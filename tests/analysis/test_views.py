"""What a view accepts, and what it computes."""

from dataclasses import replace

import pytest
import torch

from stablemask import PseudoScores, stable_attention
from stablemask.analysis.views import Curve, Series, Table, pseudo_mass_at_rest, pseudo_mass_curve, sink_curve
from tests.analysis.views import make_view


def test_maps_may_be_made_on_demand() -> None:
    view = make_view()
    assert isinstance(view.maps, torch.Tensor)
    maps, asked = view.maps, []

    def make(layer: int, head: int) -> torch.Tensor:
        asked.append((layer, head))
        return maps[layer, head]

    lazy = replace(view, maps=make)
    assert asked == []
    assert torch.equal(lazy.attention(2, 1), view.attention(2, 1))
    assert asked == [(2, 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "tokens: got none"),
        ({"tokens": ["one"]}, r"pseudo_mass: got shape \(3, 2, 11\); allowed is \(layers, heads, 1\)"),
        ({"maps": torch.zeros(3, 2, 5, 5)}, r"maps: got shape \(3, 2, 5, 5\); allowed is \(3, 2, 11, 11\)"),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_view(), **change)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: m.transpose(-1, -2), "later tokens"),
        (lambda m: m * 0.9, "row 10 sum to 0.9000"),
        (lambda m: m - 2 * m.tril(-10), "outside 0 … 1"),
        (lambda m: m * float("nan"), "later tokens|NaN"),
        (lambda m: m[:5, :5], r"has shape \(5, 5\)"),
    ],
)
def test_maps_that_are_no_attention_are_refused(wrong: object, message: str) -> None:
    view = make_view()
    assert isinstance(view.maps, torch.Tensor)
    maps = view.maps
    with pytest.raises(ValueError, match=message):
        replace(view, maps=lambda layer, head: wrong(maps[layer, head])).attention(0, 0)  # type: ignore[operator]


def test_layers_and_heads_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="layer: got 3; allowed are 0 … 2"):
        make_view().attention(3, 0)
    with pytest.raises(ValueError, match="head: got -1; allowed are 0 … 1"):
        make_view().attention(0, -1)


def test_curves_are_means_over_layers_and_heads() -> None:
    view = make_view()
    assert isinstance(view.maps, torch.Tensor)
    sinks, pseudo = sink_curve([view]).series[0], pseudo_mass_curve([view]).series[0]
    assert list(sinks.x) == list(range(2, 12))
    assert sinks.y == pytest.approx(view.maps[:, :, 1:, 0].mean((0, 1)).tolist())
    assert list(pseudo.x) == list(range(1, 12))
    assert pseudo.y == pytest.approx(view.pseudo_mass.mean((0, 1)).tolist())
    assert max(pseudo_mass_curve([make_view(sink=False)]).series[0].y) < 1e-6


def test_pseudo_mass_at_rest_is_what_the_operation_does() -> None:
    scores = PseudoScores(0.5, horizon=13)
    q, v = torch.zeros(1, 4, 13, 2), torch.ones(1, 4, 13, 2)
    kept = stable_attention(q, q, v, scores)[0, :, :, 0]
    assert torch.allclose(pseudo_mass_at_rest(scores, 13, 4).float(), 1 - kept, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Series("a", [], []), "x: got no points"),
        (lambda: Series("a", [1, 2], [1]), "y: got 1 values in series 'a'; allowed is 2"),
        (lambda: Series("a", [1], [1], low=[0]), "give both or neither"),
        (lambda: Curve("c", "x", "y", []), "series: got none"),
        (lambda: Curve("c", "x", "y", [Series("a", [0], [1])], log_x=True), "log_x: got x = 0"),
        (lambda: Table("t", ["a", "b"], [[1, 2], [3]]), "rows: got 1 cells in row 1 of table 't'"),
    ],
)
def test_curves_and_tables_refuse_nonsense(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
