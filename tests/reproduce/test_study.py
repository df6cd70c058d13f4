"""The study and the claims that come with the package: what is asked is trained and measured."""

import hashlib
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from stablemask.evaluation.position_tasks import RELATIVE, REMEDIES
from stablemask.reproduce import cells, measurements, page
from stablemask.reproduce.cells import Conditions, Document, Job, is_position, work
from stablemask.reproduce.corpus import open_corpus, prepare_corpus
from stablemask.reproduce.judge import metric_of
from stablemask.reproduce.study import Claim, Entry, Study, load_claims, load_study
from tests.reproduce import small

ROOT = Path(__file__).parents[2]
HEADLINE = ("small/rope/none", "small/rope/stablemask")


@cache
def study() -> Study:
    return load_study()


@cache
def claims() -> list[Claim]:
    return load_claims()


def seeds_of(group: str) -> int:
    return sum(entry.group == group for entry in study().entries())


def quick(kind: Study) -> Study:
    """The same study with models and trainings of nothing, but sequences of its own length."""
    model = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {name: {"model": model, "train": {"steps": 5}} for name in kind.tables["sizes"]}
    train = {**kind.tables["common"]["train"], "batch_size": 1, "warmup_steps": 1}
    common = {**kind.tables["common"], "train": train, "data": {"tokenizer": "bytes"}}
    return replace(kind, tables={**kind.tables, "sizes": sizes, "common": common})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Document]:
    """Cells with the study's own sequence length, one of language (False) and one of positions (True).

    Reading past the training length takes its time and is left out: ``test_cells`` has it at a smaller one.
    """
    folder = tmp_path_factory.mktemp("study")
    source = small.write_texts(folder, long=(1, 900))
    prepare_corpus(folder / "corpus", source, str(folder / "cache"))
    conditions = Conditions("cpu", "fp32", open_corpus(folder / "corpus").digest)
    job = Job(quick(study()), conditions, folder / "corpus", folder / "results", "a command")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_POSITION_UPDATES", 2)
        patch.setattr(measurements, "extrapolate", lambda *_, **__: [("perplexity", 2.0)])
        for group in ("small/rope/stablemask", "position/rope/stablemask"):
            work(job, Entry(group, 0))
    return {d["suite"] == "position": d for d in cells.read_all(folder / "results")}


def test_a_metric_of_every_claim_is_in_the_cells(measured: dict[bool, Document]) -> None:
    absent = [
        (claim.id, term.metric)
        for claim in claims()
        for term in claim.terms
        if metric_of(measured[is_position(Entry(term.group, 0))], term.metric) is None
    ]
    assert absent == []
    assert metric_of(measured[False], "valid/256-511") is None, "a metric that no cell has would be seen"
    assert metric_of(measured[True], "valid/all") is None


def test_every_claim_asks_for_models_and_seeds_of_the_study() -> None:
    few = [
        (claim.id, term.group, seeds_of(term.group), claim.seeds)
        for claim in claims()
        for term in claim.terms
        if seeds_of(term.group) < claim.seeds
    ]
    assert few == []
    assert all(claim.seeds >= 3 for claim in claims() if not claim.exact)
    assert seeds_of("small/rope/nothing") == 0


def test_the_headline_pair_has_five_seeds_and_eight_million_tokens() -> None:
    for group in HEADLINE:
        train = study().recipe(group).train
        assert seeds_of(group) >= 5
        assert train.steps is not None
        assert train.steps * train.sequences * train.length >= 8_000_000
    (headline,) = (claim for claim in claims() if claim.id == "rope-small")
    assert [(term.weight, term.group) for term in headline.terms] == [(1, HEADLINE[1]), (-1, HEADLINE[0])]
    assert {term.metric for term in headline.terms} == {"valid/all"}
    assert headline.smallest > 0


def test_claims_are_told_apart_and_say_what_counts() -> None:
    assert Counter(claim.id for claim in claims()).most_common(1)[0][1] == 1
    assert Counter(claim.says for claim in claims()).most_common(1)[0][1] == 1
    for claim in claims():
        assert claim.smallest >= 0
        assert claim.items
        assert not any("{" in text for text in (claim.id, claim.says, *(t.group for t in claim.terms)))


def test_a_difference_of_perplexities_ignores_their_size() -> None:
    """Logarithms: adding the same to all losses changes no claim that compares models."""
    sides = {claim.id: sum(t.weight for t in claim.terms) for claim in claims() if len(claim.terms) > 1}
    assert set(sides.values()) == {0.0}


def test_models_of_a_claim_differ_in_nothing_but_what_it_is_about() -> None:
    """A size, a number of tokens or a rate that differs between arms would be the finding."""
    for claim in claims():
        groups = [term.group for term in claim.terms if not is_position(Entry(term.group, 0))]
        recipes = {replace(study().recipe(group), name="") for group in groups}
        assert len({recipe.train for recipe in recipes}) <= 1, claim.id
        assert len({recipe.data for recipe in recipes}) <= 1, claim.id
        plain = {
            (r.model.position, r.model.hidden_size, r.model.num_hidden_layers, r.model.num_attention_heads)
            for r in recipes
        }
        assert len(plain) <= 1, claim.id


def test_every_group_of_the_study_has_a_recipe_and_they_all_differ() -> None:
    groups = list(dict.fromkeys(entry.group for entry in study().entries()))
    recipes = {}
    for group in groups:
        if is_position(Entry(group, 0)):
            _, position, remedy = group.split("/")
            assert position in (*RELATIVE, "learned", "sinusoidal")
            assert remedy in ("none", *REMEDIES)
            continue
        recipe = study().recipe(group, seed=3, precision="bf16")
        assert (recipe.name, recipe.train.seed, recipe.train.precision) == (group, 3, "bf16")
        assert recipe.config(2048).vocab_size == 2048
        recipes[group] = recipe
    assert len({(recipe.model, recipe.train) for recipe in recipes.values()}) == len(recipes) >= 15


def test_entries_come_seed_by_seed_so_that_pairs_are_complete(tmp_path: Path) -> None:
    assert study().entries()[:4] == [Entry(group, seed) for seed in (0, 1) for group in HEADLINE]
    assert len(set(study().entries())) == len(study().entries())
    found = small.study(tmp_path)
    none, stable, alibi = "small/rope/none", "small/rope/stablemask", "small/alibi/none"
    first = [Entry(none, 0), Entry(stable, 0), Entry(none, 1), Entry(stable, 1)]
    assert found.entries() == [*first, Entry(alibi, 0)]
    again = replace(found, runs=[*found.runs, ((alibi, none), 3)])
    more = [Entry(none, 2), Entry(alibi, 2)]
    assert again.entries() == [*found.entries(), Entry(alibi, 1), *reversed(more)]


def test_tables_above_win(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(
        small.STUDY + "\n[arms.fast.train]\nlearning_rate = 0.5\ntokens = 640\n", encoding="utf-8"
    )
    recipe = load_study(path).recipe("small/rope/fast")
    assert (recipe.train.learning_rate, recipe.train.weight_decay) == (0.5, 0.1)
    assert (recipe.train.tokens, recipe.train.steps) == (640, None), (
        "one of the alternatives replaces the other"
    )


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("huge/rope/none", "group: got 'huge/rope/none'; allowed sizes: small"),
        ("small/none/none", "group: got 'small/none/none'; allowed positions: rope, alibi"),
        ("small/rope/urpe", "group: got 'small/rope/urpe'; allowed arms: none, stablemask"),
        ("small/rope", "group: got 'small/rope'; allowed: size/position/arm"),
        ("small/rope/none/more", "group: got 'small/rope/none/more'; allowed: size/position/arm"),
    ],
)
def test_an_unknown_group_is_refused(tmp_path: Path, group: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        small.study(tmp_path).recipe(group)


def test_a_wrong_setting_of_a_study_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(small.STUDY.replace("weight_decay", "weight_decai"), encoding="utf-8")
    with pytest.raises(
        ValueError, match="study: small/rope/none: train: unknown key 'weight_decai'; did you mean"
    ):
        load_study(path).recipe("small/rope/none")


CLAIMS = """
[[claim]]
id = "better-{each}"
items = ["table-1", "table-2"]
says = "{each} is better."
each = ["rope", "alibi"]
terms = [[1, "small/{each}/stablemask", "valid/all"], [-1, "small/{each}/none", "valid/0-31"]]
smallest = 0.25
seeds = 2

[[claim]]
id = "solved"
items = []
says = "It is solved."
terms = [[-1, "position/rope/stablemask", "mapping"]]
offset = 0.9
smallest = 0.0
seeds = 1
exact = true
"""


def test_a_claim_of_each_name(tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(CLAIMS, encoding="utf-8")
    rope, alibi, solved = load_claims(path)
    for claim, name in ((rope, "rope"), (alibi, "alibi")):
        terms = ((1.0, f"small/{name}/stablemask", "valid/all"), (-1.0, f"small/{name}/none", "valid/0-31"))
        assert claim == Claim(f"better-{name}", ("table-1", "table-2"), f"{name} is better.", terms, 0.25, 2)
    terms = ((-1.0, "position/rope/stablemask", "mapping"),)
    assert solved == Claim("solved", (), "It is solved.", terms, 0.0, 1, offset=0.9, exact=True)


def test_two_claims_of_one_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(CLAIMS.replace('"better-{each}"', '"solved"'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"claims: got \['solved'\] more than once"):
        load_claims(path)


FIXED = "05ccebd"  # the commit that fixed claims and rule, before any model of the study was trained
DIGEST = "d3c24a93ba125f98"


def asked(found: Sequence[Claim]) -> list[Claim]:
    """Claims without the words in which they are told."""
    return [replace(claim, says="") for claim in found]


def test_claims_are_those_that_were_fixed_before_the_runs() -> None:
    assert hashlib.sha256(repr(asked(claims())).encode()).hexdigest()[:16] == DIGEST
    eased = [replace(claims()[0], smallest=0.004), *claims()[1:]]
    assert asked(eased) != asked(claims())


@pytest.mark.parametrize("name", ["claims.toml", "statistics.py"])
def test_the_page_names_the_commit_that_fixed_them(name: str, tmp_path: Path) -> None:
    path = f"src/stablemask/reproduce/{name}"
    git = shutil.which("git")
    command = [git or "git", "-C", str(ROOT), "show", f"{FIXED}:{path}"]
    done = subprocess.run(command, capture_output=True, check=False) if git else None
    if done is None or done.returncode:
        pytest.skip(f"no history with commit {FIXED} here")
    assert f"commit `{FIXED}`" in page._RULE
    if name == "claims.toml":
        (tmp_path / name).write_bytes(done.stdout)
        assert asked(load_claims(tmp_path / name)) == asked(claims())
    else:
        assert done.stdout == (ROOT / path).read_bytes()
