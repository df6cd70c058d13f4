"""Cells beside the study: theorems, sizes, latency, heads, downstream tasks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stablemask.evaluation import harness
from stablemask.model import StableMaskForCausalLM
from stablemask.reproduce import cells, extra_values, extras, gather, theory
from stablemask.reproduce.paper import metrics_of
from stablemask.reproduce.study import Entry, load_study
from tests.reproduce import planted, small

HEADS = Entry("heads/small/rope/stablemask", 0)
MODEL = Entry("small/rope/stablemask", 0)


def job(folder: Path, **changes: Any) -> cells.Job:
    return replace(small.job(folder), weights=folder / "weights", **changes)


def measured(given: cells.Job, entry: Entry) -> dict[str, Any]:
    return planted.read(cells.work(given, entry))


def test_rows_of_the_equation() -> None:
    found = theory.values("rows")
    assert 490 < found["increasing"] <= 504
    assert found["last row"] < 1e-15
    for name in ("stablemask", "none"):
        assert found[f"error/{name}"] < 1e-6
        assert found[f"cached/{name}"] < 1e-13
    assert found["error/shifted"] > 1e-3, "one column too far is seen"
    assert found["cached/wrong horizon"] > 1e-3, "a horizon taken from the length is seen"


def test_a_wrong_operation_shows_in_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = theory.stable_attention

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Any) -> torch.Tensor:
        return honest(q, k, v, replace(scores, base=0.5))

    monkeypatch.setattr(theory, "stable_attention", wrong)
    assert theory.values("rows")["error/stablemask"] > 1e-3


def test_positions_that_the_construction_recovers() -> None:
    half, none = theory.values("construction-1:2"), theory.values("construction-0")
    assert set(none.values()) == {1024.0}
    assert half["float32/rounded"] == 28
    assert half["float32/fitted"] <= half["float32/rounded"] < half["float64/fitted"] < 100


def test_room_of_the_statements() -> None:
    met, everywhere = theory.values("entropies-met"), theory.values("entropies-all")
    assert min(met.values()) > -1e-9
    assert everywhere["1"] > -1e-9
    assert all(everywhere[name] < -0.01 for name in ("2", "3", "4", "shares")), (
        "a collapsed layer breaks them"
    )


@pytest.mark.slow
def test_degrees_of_trained_decoders() -> None:
    plain = theory.values("copy-none")
    assert 0 <= plain["least"] <= plain["mean"] <= plain["largest"] <= 1
    assert plain["identical"] == pytest.approx(0.896, abs=1e-3)
    assert plain["anisotropy"] < 1e-9
    assert plain["weak"] > 0.5


def test_sizes_are_those_of_the_names() -> None:
    for entry in extras.entries():
        if extras.kind(entry) != "sizes":
            continue
        found = extra_values._sizes(entry.group.partition("/")[2])
        name = {"71m": 71, "160m": 160, "400m": 400, "1.4b": 1400}[entry.group.partition("/")[2]]
        assert found["named"] == pytest.approx(name, rel=0.03)
        assert found["printed/plain"] < found["printed/gated"]
    assert found["printed/plain"] == pytest.approx(1816.6, abs=0.1), "the printed widths of 1.4B are not 1.4B"


def test_every_group_has_the_metrics_that_are_promised(tmp_path: Path) -> None:
    """By kind, each metric is in at least one cell, and quick cells have no others."""
    quick = [
        e for e in extras.entries() if e.group in ("sizes/71m", "theory/rows", "theory/construction-1:2")
    ]
    study = load_study()
    given = cells.Job(study, planted.CONDITIONS, tmp_path, tmp_path / "results", "a command")
    for entry in quick:
        found = measured(given, entry)
        assert set(found["values"]) <= set(metrics_of(entry.group, study))
        assert found["settings"]["group"] == entry.group
        assert found["command"] == "a command"
    assert set(gather.gather(tmp_path / "results", study).cells) == set(quick)


def test_the_key_is_of_what_decides_the_values(tmp_path: Path) -> None:
    study = load_study()
    gpu = replace(planted.CONDITIONS, device="cuda")

    def key(group: str, conditions: cells.Conditions) -> str:
        return cells.cell_of(study, Entry(group, 0), conditions).key

    for group, depends in (("theory/rows", False), ("sizes/71m", False), ("latency/16+8", True)):
        assert (key(group, planted.CONDITIONS) != key(group, gpu)) == depends
    other = replace(planted.CONDITIONS, corpus="f" * 16)
    assert key("heads/small/rope/none", planted.CONDITIONS) != key("heads/small/rope/none", other)
    assert key("latency/16+8", planted.CONDITIONS) == key("latency/16+8", other)
    with pytest.raises(ValueError, match=r"group: got 'theory/rows', seed 1; allowed: seed 0 of sizes/71m"):
        cells.cell_of(study, Entry("theory/rows", 1), planted.CONDITIONS)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cells.Job:
    monkeypatch.setattr(extras, "HEADS_TOKENS", 12)
    given = job(tmp_path)
    cells.work(given, MODEL)
    return given


def test_heads_of_the_trained_model(trained: cells.Job) -> None:
    found = measured(trained, HEADS)
    maps, mass = found["maps"], found["pseudo mass"]
    assert list(maps) == list(mass) == ["0/0", "0/1"]
    assert len(found["tokens"]) == 12
    for place, rows in maps.items():
        assert [len(row) for row in rows] == list(range(1, 13))
        for row, rest in zip(rows, mass[place], strict=True):
            assert sum(row) + rest == pytest.approx(1, abs=2e-3)
    firsts = [row[0] for rows in maps.values() for row in rows[1:]]
    assert found["values"]["first"] == pytest.approx(sum(firsts) / len(firsts), abs=1e-4)
    assert found["values"]["pseudo"] > 0.01
    plain = measured(trained, Entry("heads/small/rope/none", 0))
    assert plain["values"]["pseudo"] == 0
    assert plain["settings"]["recipe"]["model"]["remedy"] == "none"


def test_weights_are_made_where_there_are_none(trained: cells.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    again = replace(trained, weights=trained.results.parent / "elsewhere")
    before, after = measured(trained, HEADS), measured(again, HEADS)
    assert again.weights is not None
    assert (again.weights / "small-rope-stablemask" / "config.json").exists()
    assert before["maps"] == after["maps"]

    def fail(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(extra_values.loop, "train", fail)
    assert measured(again, HEADS)["maps"] == after["maps"]


def test_other_weights_are_refused(trained: cells.Job) -> None:
    assert trained.weights is not None
    folder = trained.weights / "small-rope-stablemask"
    model = StableMaskForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"^weights: .*small-rope-stablemask' has a loss of .* remove the folder"
    ):
        cells.work(trained, HEADS)
    with pytest.raises(ValueError, match="weights: got None"):
        cells.work(replace(trained, weights=None), HEADS)


def test_downstream_tasks(trained: cells.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(model: Any, tokenizer: Any, **options: Any) -> Iterator[tuple[str, float]]:
        asked.append((model.config.remedy, len(tokenizer), options))
        (task,) = options["tasks"]
        yield f"{task}/acc", 0.25
        yield f"{task}/acc_norm", 0.5

    monkeypatch.setattr(harness, "run_downstream", run)
    questions = trained.results.parent / "questions"
    questions.mkdir()
    for task in harness.TASKS:
        (questions / f"{task}.jsonl").touch()
    entry = Entry("downstream/small/rope/stablemask", 0)
    found = measured(replace(trained, downstream=questions), entry)
    assert set(found["values"]) == set(extras.METRICS["downstream"])
    assert extras.DOWNSTREAM_TASKS == harness.TASKS
    assert {(remedy, o["data"], o["limit"]) for remedy, _, o in asked} == {("stablemask", questions, 500)}
    assert (found["settings"]["limit"], found["left out"]) == (500, [])
    (questions / "winogrande.jsonl").unlink()
    found = measured(replace(trained, downstream=questions), entry)
    assert found["left out"] == ["winogrande"]
    assert "winogrande/acc" not in found["values"]
    with pytest.raises(ValueError, match=r"^downstream: got .*nowhere'; allowed: a folder with questions"):
        measured(replace(trained, downstream=questions / "nowhere"), entry)


def test_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "LATENCY_MODEL", "small/rope/stablemask")
    monkeypatch.setattr(extras, "LATENCY_ROUNDS", 2)
    monkeypatch.setattr(extras, "LATENCY_SECONDS", 0.1)
    shares: list[float] = []
    path = cells.work(job(tmp_path), Entry("latency/256+32", 0), shares.append)
    found = planted.read(path)
    assert found["values"]["ratio/SM"] > found["values"]["ratio/SM-I"] > 0.1
    assert set(extras.METRICS["latency"]) < set(found["values"])
    assert (found["settings"]["prompt"], found["settings"]["output"]) == (256, 32)
    assert shares[-1] == 1.0
