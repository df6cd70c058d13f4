"""Verdicts: planted effects are found with their sign, and what is missing is said."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from stablemask.evaluation.position_tasks import TASKS
from stablemask.reproduce import cells, gather, judge
from stablemask.reproduce.study import Claim, ClaimTerm, Entry, load_claims, load_study
from tests.reproduce import planted

CLAIMS = {claim.id: claim for claim in load_claims()}
HEADLINE = CLAIMS["rope-small"]


def judged(results: Path, claim: Claim = HEADLINE) -> judge.Judged:
    return judge.judge(claim, gather.gather(results, load_study()))


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [(-0.02, "holds"), (0.02, "does not hold"), (0.0, "does not hold"), (-0.004, "undecided at this scale")],
)
def test_a_planted_effect_is_found_with_its_sign(tmp_path: Path, effect: float, verdict: str) -> None:
    planted.pair(tmp_path, effect)
    found = judged(tmp_path)
    assert found.verdict == verdict
    assert found.seeds == (0, 1, 2, 3, 4)
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(effect, abs=0.002)
    for interval in (found.effect.seeds, found.effect.documents):
        assert interval is not None
        assert interval.low < found.effect.mean < interval.high
        assert interval.high - interval.low < 0.01


def test_noise_without_an_effect_never_holds(tmp_path: Path) -> None:
    for noise in (0.003, 0.01, 0.03):
        planted.pair(tmp_path / str(noise), 0.0, noise=noise)
        assert judged(tmp_path / str(noise)).verdict != "holds"


def test_pairs_by_seed(tmp_path: Path) -> None:
    """What the two models of a seed have in common is no noise of their difference."""
    planted.pair(tmp_path, -0.02, seed_spread=0.5)
    effect = judged(tmp_path).effect
    assert effect is not None
    assert effect.seeds is not None
    assert effect.seeds.high < -0.015
    unpaired = planted.losses({"small/rope/stablemask": -0.02}, seed_spread=0.5)
    for seed in range(5):
        entry = Entry("small/rope/stablemask", seed)
        content = planted.pretraining(entry, lambda e, place: unpaired(e._replace(seed=e.seed + 1), place))
        planted.write(tmp_path, entry, content)
    assert judged(tmp_path).verdict == "undecided at this scale"


def test_a_missing_seed_is_reported(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02)
    study = load_study()
    cell = cells.cell_of(study, Entry("small/rope/none", 2), planted.CONDITIONS)
    cells.path_of(tmp_path, cell).unlink()
    found = judged(tmp_path)
    assert found.verdict == "undecided at this scale"
    assert (found.seeds, found.reason) == ((0, 1, 3, 4), "4 of 5 seeds")
    assert found.effect is not None
    assert len(found.effect.values) == 4


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02, seeds=1)
    found = judged(tmp_path)
    assert (found.verdict, found.reason) == ("undecided at this scale", "1 of 5 seeds")
    assert found.effect is not None
    assert found.effect.seeds is None


def test_what_was_not_measured(tmp_path: Path) -> None:
    assert judged(tmp_path).verdict == "not measured"
    entry = Entry("small/rope/stablemask", 0)
    planted.write(tmp_path, entry, planted.pretraining(entry, planted.losses({})))
    found = judged(tmp_path)
    assert (found.verdict, found.effect, found.seeds) == ("not measured", None, ())
    assert found.reason == "no cell of small/rope/none"
    other = Entry("small/rope/none", 1)
    planted.write(tmp_path, other, planted.pretraining(other, planted.losses({})))
    assert judged(tmp_path).reason == "no seed that all groups have"


def test_a_metric_that_the_cells_do_not_have(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02)
    for path in tmp_path.glob("*.json"):
        document = planted.read(path)
        del document["values"]["window/16"]
        del document["documents"]["other"]
        path.write_text(cells.to_text(document), encoding="utf-8")
    found = judged(tmp_path, CLAIMS["window-stable"])
    assert found.verdict == "not measured"
    assert found.reason == "the cells have no window/16 of small/rope/stablemask"
    assert judged(tmp_path, CLAIMS["rope-small-other-domain"]).verdict == "not measured"
    assert judged(tmp_path).verdict == "holds"


def test_metrics_of_documents_are_means_over_tokens(tmp_path: Path) -> None:
    nats, tokens = [[1.0, 9.0], [2.0, 4.0]], [[1, 3], [1, 1]]
    table = {"positions": ["0-1", "2-3"], "tokens": tokens, "nats": nats}
    document = {"values": {"sink rate": 0.25}, "documents": {"valid": table}}
    metrics = ("valid/all", "valid/0-1", "valid/2-3", "valid/4-7", "other/all", "sink rate")
    found = [judge.metric_of(document, name) for name in metrics]
    assert found == [16 / 6, 1.5, 13 / 4, None, None, 0.25]


def test_the_claim_of_early_positions_is_a_difference_of_differences(tmp_path: Path) -> None:
    early, late = -0.05, -0.01
    base = planted.losses({}, noise=0.0005)

    def loss(entry: Entry, place: str) -> float:
        gain = (early if place.endswith("/0-31") else late) * entry.group.endswith("stablemask")
        return base(entry, place) + gain

    for seed in range(5):
        for term in HEADLINE.terms:
            entry = Entry(term.group, seed)
            planted.write(tmp_path, entry, planted.pretraining(entry, loss))
    found = judged(tmp_path, CLAIMS["early-positions"])
    assert found.verdict == "holds"
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(early - late, abs=0.002)
    assert found.effect.documents is not None


def test_a_claim_without_documents_is_decided_by_seeds(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02)
    found = judged(tmp_path, CLAIMS["tokens-3"])
    assert found.effect is not None
    assert found.effect.documents is None
    assert found.verdict == "holds"


@pytest.mark.parametrize(("worse", "verdict"), [(1.05, "holds"), (1.3, "does not hold")])
def test_an_offset_is_part_of_the_claim(tmp_path: Path, worse: float, verdict: str) -> None:
    """At most 10 % above the perplexity at the training length."""
    for seed in range(5):
        entry = Entry("small/rope/stablemask", seed)
        values = {"window/1": 3.0, "window/16": 3.0 + math.log(worse) + 0.001 * seed}
        planted.write(tmp_path, entry, planted.pretraining(entry, planted.losses({}), **values))
    assert judged(tmp_path, CLAIMS["window-stable"]).verdict == verdict


def test_an_exact_claim_needs_no_spread(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02, seeds=1)
    exact = replace(HEADLINE, exact=True, seeds=1)
    assert judged(tmp_path, exact).verdict == "holds"
    assert judged(tmp_path, replace(exact, smallest=0.5)).verdict == "does not hold"


def test_cells_of_other_conditions_are_not_mixed(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02)
    gpu = replace(planted.CONDITIONS, device="cuda", precision="bf16")
    planted.pair(tmp_path, 0.3, seeds=2, conditions=gpu)
    found = gather.gather(tmp_path, load_study())
    assert (found.conditions, len(found.cells), found.left_out) == (planted.CONDITIONS, 10, 4)
    named = gather.gather(tmp_path, load_study(), gather.Wanted(device="cuda"))
    assert (named.conditions, len(named.cells)) == (gpu, 4)
    effect = judge.judge(HEADLINE, named).effect
    assert effect is not None
    assert effect.mean == pytest.approx(0.3, abs=0.01)
    with pytest.raises(
        ValueError, match=r"got no cell with device 'tpu'; allowed: cpu, fp32, 0123456789abcdef; cuda, bf16, "
    ):
        gather.gather(tmp_path, load_study(), gather.Wanted(device="tpu"))


def test_cells_of_a_changed_study_do_not_count(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02, seeds=2)
    entry = Entry("small/rope/none", 7)
    planted.write(
        tmp_path, entry, planted.pretraining(entry, planted.losses({})), study=planted.other_study()
    )
    found = gather.gather(tmp_path, load_study())
    assert (len(found.cells), found.left_out) == (4, 1)
    assert gather.gather(tmp_path, planted.other_study()).seeds("small/rope/none") == [7]


def test_of_two_versions_the_present_one_counts(tmp_path: Path) -> None:
    entry = Entry("small/rope/none", 0)
    content = planted.pretraining(entry, planted.losses({}))
    kept = planted.write(tmp_path, entry, content)
    old = planted.read(kept) | {
        "version": "0.0.1",
        "environment": {**planted.ENVIRONMENT, "date": "2030-01-01"},
    }
    (tmp_path / "old.json").write_text(cells.to_text(old), encoding="utf-8")
    assert gather.gather(tmp_path, load_study()).cells[entry]["version"] == planted.read(kept)["version"]
    kept.unlink()
    assert gather.gather(tmp_path, load_study()).cells[entry]["version"] == "0.0.1"


def test_models_without_a_text_count_whatever_the_device(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02, seeds=1)
    entry = Entry("position/rope/stablemask", 0)
    gpu = replace(planted.CONDITIONS, device="cuda")
    planted.write(tmp_path, entry, {"values": {"mapping": 0.5}}, conditions=gpu)
    assert gather.gather(tmp_path, load_study()).cells[entry]["values"] == {"mapping": 0.5}
    planted.write(tmp_path, entry, {"values": {"mapping": 0.75}})
    assert gather.gather(tmp_path, load_study()).cells[entry]["values"] == {"mapping": 0.75}


def test_other_documents_are_refused(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02, seeds=2)
    path = next(tmp_path.glob("small-rope-none-1-*.json"))
    document = planted.read(path)
    document["documents"]["valid"]["tokens"][0][0] += 1
    path.write_text(cells.to_text(document), encoding="utf-8")
    with pytest.raises(ValueError, match="other documents in 'valid' of small/rope/none"):
        judged(tmp_path)


def test_every_claim_of_the_package_can_be_judged(tmp_path: Path) -> None:
    """With all cells there, nothing is "not measured": each claim names what cells have."""
    study = load_study()
    loss = planted.losses({})
    for entry in study.entries():
        content = {"values": dict.fromkeys(TASKS, 0.7 + entry.seed / 9)}
        if not cells.is_position(entry):
            content = planted.pretraining(entry, loss)
        planted.write(tmp_path, entry, content)
    found = gather.gather(tmp_path, study)
    verdicts = [judge.judge(claim, found) for claim in CLAIMS.values()]
    assert [v.claim.id for v in verdicts if v.verdict == "not measured" or v.reason] == []
    absent = Claim("x", (), "x", (ClaimTerm(1.0, "small/rope/none", "valid/999"),), 0.0, 1)
    assert judge.judge(absent, found).verdict == "not measured"
