"""The benchmark of the operation: nothing wrong is timed, ratios are true, the table holds every bar."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import attention
from benchmarks._cases import ENTRIES
from stablemask import cli, stable_attention
from stablemask.benchmark import (
    PROCESS_TIME,
    WALL_TIME,
    Bench,
    Case,
    Result,
    Truth,
    able_backends,
    candidate,
    make_problem,
)
from stablemask.measuring import Ratio, Rule, attention_flops, compare, median_ratio

TINY = Case("causal", torch.float32, 8, 29, heads=4, kv_heads=4)
RULE = Rule(2, 2, min_seconds=0.0)
CASES = {
    "plain": TINY,
    "backward": replace(TINY, backward=True),
    "bfloat16": replace(TINY, backward=True, dtype=torch.bfloat16),
    "grouped": replace(TINY, backward=True, kv_heads=2),
    "alibi": replace(TINY, backward=True, alibi=True),
    "window": replace(TINY, backward=True, window=5),
    "packed": replace(TINY, backward=True, documents=(3, 1, 14, 11)),
    "decode": replace(TINY, queries=1),
}


@pytest.mark.parametrize("name", CASES)
def test_every_back_end_is_right_about_every_kind_of_case(name: str) -> None:
    case = CASES[name]
    problem, truth = make_problem(case), Truth(replace(case, backward=True))
    able = [backend for backend, reason in able_backends(problem).items() if reason is None]
    assert {"cpu_flash", "portable", "reference"} <= set(able)
    assert [b for b in able if not truth.worst_error(candidate(problem, b)) <= 1] == []


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_gets_no_figure(name: str) -> None:
    case = CASES[name]
    problem = make_problem(case)
    shorter = replace(problem, scores=replace(problem.scores, horizon=case.length // 2))
    result = Bench((PROCESS_TIME,), RULE).measure(problem, "wrong", candidate(shorter), bar=9.0)
    assert result.verdict == "WRONG"
    assert result.timings == []


def test_a_wrong_gradient_gets_no_figure() -> None:
    problem = make_problem(CASES["backward"])

    def call() -> dict[str, torch.Tensor]:
        return candidate(problem)() | {"dk": torch.zeros_like(problem.k)}

    assert Bench((PROCESS_TIME,), RULE).measure(problem, "wrong", call).verdict == "WRONG"


def test_a_right_call_gets_every_figure() -> None:
    problem = make_problem(CASES["backward"])
    result = Bench((PROCESS_TIME,), RULE).measure(problem, "cpu_flash", candidate(problem), bar=1e9)
    (timing,) = result.timings
    assert result.worst_error <= 1
    assert timing.comparison.ratio.rounds == 2
    assert timing.comparison.noise.median > 0
    assert 0 < timing.of_matmul < 1


class Machine:
    """A clock that only its own work moves on, ever slower."""

    def __init__(self, slowdown: float = 0.0) -> None:
        self.now = 0.0
        self.calls = 0
        self.slowdown = slowdown

    def work(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1
            self.now += seconds * (1 + self.slowdown * self.calls)

        return run


@pytest.mark.parametrize("slowdown", [0.0, 1e-3])
def test_the_ratio_is_that_of_the_times(slowdown: float) -> None:
    """A machine that slows down steadily changes nothing: a round is A B B A."""
    machine = Machine(slowdown)
    found = compare(
        machine.work(1.0), machine.work(1.5), clock=lambda: machine.now, rule=Rule(20, 20, min_seconds=0.5)
    )
    assert found.ratio.median == pytest.approx(1.5, rel=1e-12)
    assert found.noise.median == pytest.approx(1.0, rel=1e-12)
    assert found.ratio.rounds == 20


def test_the_ratio_of_a_window_is_to_its_useful_work() -> None:
    """Half the time of the causal kernel for a tenth of its pairs is five times too long."""
    machine = Machine()
    case = replace(TINY, length=2000, window=100)
    factor = case.baseline_pairs / case.visible_pairs
    assert factor == pytest.approx(10.005)
    found = compare(machine.work(1.0), machine.work(0.5), clock=lambda: machine.now, rule=RULE, factor=factor)
    assert found.ratio.median == pytest.approx(5.0025)


def test_rounds_go_on_while_the_scaled_interval_is_wide() -> None:
    machine = Machine()
    noisy = iter(range(10**6))

    def candidate_call() -> None:
        machine.now += 0.2 + 0.002 * (next(noisy) % 5)

    def rounds(factor: float) -> int:
        rule = Rule(20, 60, min_seconds=0.1)
        found = compare(
            machine.work(1.0), candidate_call, clock=lambda: machine.now, rule=rule, factor=factor
        )
        return found.ratio.rounds

    assert rounds(1.0) == 20
    assert rounds(100.0) == 60


def test_pairs_and_operations_are_counted() -> None:
    assert TINY.visible_pairs == 29 * 30 // 2 == TINY.baseline_pairs
    assert CASES["decode"].visible_pairs == 29
    assert CASES["packed"].visible_pairs == 6 + 1 + 105 + 66 == CASES["packed"].baseline_pairs
    assert CASES["window"].visible_pairs == 29 * 5
    assert CASES["window"].baseline_pairs == 29 * 30 // 2
    assert attention_flops(10, 4, 8, backward=False) == 2 * 2 * 10 * 4 * 8
    assert attention_flops(10, 4, 8, backward=True) == 7 * 2 * 10 * 4 * 8


def test_verdicts() -> None:
    assert Ratio(1.02, 1.0, 1.04, 20).verdict(1.03) == "met"
    assert Ratio(1.04, 1.02, 1.06, 20).verdict(1.03) == "missed"
    assert Ratio(1.0, 0.96, 1.03, 20).verdict(1.03) == "not measured"
    assert Ratio(math.nan, -math.inf, math.inf, 0).verdict(1.03) == "not measured"
    assert Result("c", "b", 1.05, 0.5, mib=105.0, baseline_mib=100.0).verdict == "met"
    assert Result("c", "b", 1.05, 0.5, mib=106.0, baseline_mib=100.0).verdict == "missed"
    assert Result("c", "b", 1.05, 1.01, mib=1.0, baseline_mib=100.0).verdict == "WRONG"
    assert Result("c", "b", 1.05, math.nan).verdict == "WRONG"


def test_the_interval_holds_the_median() -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    found = median_ratio(values)
    assert found.low < found.median < found.high
    assert found.median == pytest.approx(sorted(values)[19] / 2 + sorted(values)[20] / 2)


def test_the_table_has_every_bar() -> None:
    """Both dtypes, both widths, forward and both ways."""
    bars = {entry.case.name: entry.bar for entry in ENTRIES}
    assert len(bars) == len(ENTRIES)
    for dtype, width, way in product(("float32", "bfloat16"), (64, 128), ("fwd", "fwd+bwd")):
        for length in (256, 512, 1024, 2048, 4096, 8192):
            bar = 1.10 if length < 1024 else 1.03
            assert bars[f"causal/T{length}/D{width}/{dtype}/{way}"] == bar
        assert bars[f"window/T8192/D{width}/{dtype}/{way}"] == 2.0
        assert bars[f"eager/T64/D{width}/{dtype}/{way}"] == 3.0
        kinds = {name.split("/")[0] for name in bars if name.endswith(f"D{width}/{dtype}/{way}")}
        expected = {"causal", "alibi", "gqa", "window", "packed", "eager"}
        assert kinds == (expected | {"decode"} if way == "fwd" else expected)
    contrasted = {entry.case.length for entry in ENTRIES if entry.contrast}
    assert contrasted == {512, 2048}, "the dense form, portable and flex stand beside"


def test_bench_prints_a_line_for_every_back_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stablemask.cli.bench.Rule", lambda **_: RULE)
    asked = ["cpu_flash", "portable", "reference", "flex"]
    assert cli.main(["bench", "--length", "19", "--heads", "2", "--width", "8", "--backends", *asked]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith("call/")]
    assert [row[1] for row in rows] == asked[:-1]
    assert "flex did not run: flex_attention has no backward on CPU" in text
    assert cli.main(["bench", "--backends", "nonsense"]) == 2
    assert "backends: got nonsense" in capsys.readouterr().out


def test_bench_fails_where_a_back_end_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stablemask.cli.bench.Rule", lambda **_: RULE)
    monkeypatch.setattr(
        "stablemask.benchmark.stable_attention", lambda *a, **k: 1.1 * stable_attention(*a, **k)
    )
    assert cli.main(["bench", "--length", "19", "--heads", "2", "--backends", "portable"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_run_leaves_json_lines_and_goes_on_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.attention.Rule", lambda **_: RULE)
    monkeypatch.setattr("stablemask.benchmark.matmul_rate", lambda *_, **__: 1e10)
    options = attention.Options(only="eager/T64/D64/float32/fwd$", output=tmp_path / "lines.jsonl")
    assert attention.run(options) == 0
    environment, result = map(json.loads, options.output.read_text(encoding="utf-8").splitlines())
    assert environment["kind"] == "environment"
    assert result["case"] == "eager/T64/D64/float32/fwd"
    assert [timing["clock"] for timing in result["timings"]] == [PROCESS_TIME.name, WALL_TIME.name]
    table = capsys.readouterr().out
    assert all(
        word in table for word in ("A/A", "of mm", "wall, 2 threads", "eager/T64/D64/float32/fwd", "≤ 3")
    )
    with pytest.raises(FileExistsError, match="--resume"):
        attention.run(options)
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("measured again"))
    assert attention.run(replace(options, resume=True)) == 0
    assert attention.run(replace(options, only="[a-c]nothing")) == 2
    assert "'[a-c]nothing'" in capsys.readouterr().out
