"""The paper as data: typed, complete, and naming only what exists."""

import json
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from stablemask.cli import COMMANDS
from stablemask.reproduce import extras, gather, tables
from stablemask.reproduce.paper import Item, Row, Table, choose, entries_of, load_paper, problems
from stablemask.reproduce.study import Claim, ClaimTerm, Entry, load_claims, load_study
from stablemask.training import load_recipe
from tests.reproduce import planted

RECIPES = Path(__file__).parents[2] / "recipes"
ITEMS = {item.id: item for item in load_paper()}


def item(**changes: object) -> Item:
    return replace(ITEMS["table-2-tokens"], **changes)  # type: ignore[arg-type]


def test_everything_that_is_named_exists() -> None:
    assert problems(list(ITEMS.values()), load_claims(), load_study()) == []
    named = {name for each in ITEMS.values() for name in each.all_recipes()}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (RECIPES / f"{name}.toml").exists()] == []


def test_what_does_not_exist_is_found() -> None:
    table = ITEMS["table-2-tokens"].tables[0]
    wrong_group = replace(table, rows=(Row("a", group="small/rope/nothing"),))
    wrong_metric = replace(table, metrics=("curve/9",) * 5)
    items = [
        item(id="a", tables=(wrong_group,)),
        item(id="b", tables=(wrong_metric,)),
        item(groups=("heads/x",)),
        item(id="d", sinks="position/rope/none"),
    ]
    claim = Claim("c", ("table-9",), "", (ClaimTerm(1.0, "position/rope/none", "valid/all"),), 0.0, 1)
    found = problems(items, [claim], load_study())
    assert "a: a: no group 'small/rope/nothing'" in found
    assert "b: OpenLLaMA: small/rope/none has no metric 'curve/9'" in found
    assert "table-2-tokens: no group 'heads/x'" in found
    assert "d: position/rope/none has no metric 'sink rate'" in found
    assert "claim c: position/rope/none has no metric 'valid/all'" in found
    assert "claim c: no item 'table-9'" in found


def test_every_table_and_figure_of_the_paper_has_an_item() -> None:
    expected = ["table-1", "table-2-tokens", "table-2-downstream", "table-3-tokens", "table-3-values"]
    expected += [f"table-{n}" for n in (4, 5, 6)]
    expected += [
        "figure-1a",
        "figure-1b",
        "figure-1c",
        "figure-2",
        "figure-3",
        "figure-4-scaling",
        "figure-4d",
    ]
    expected += ["figure-5", "figure-6", "figure-f", "theorem-4.1", "proposition-a.4", "definition-a.5"]
    assert list(ITEMS) == [*expected, "theorem-b.1", "algorithm-1"]
    assert all(each.paper and each.repeats and each.place for each in ITEMS.values())


def test_commands_are_commands() -> None:
    for each in ITEMS.values():
        for line in each.commands:
            program, command, *_ = line.split()
            assert program == "stablemask"
            assert command in COMMANDS


def test_commands_for_each_recipe() -> None:
    lines = ITEMS["table-1"].full_commands()
    recipes = ITEMS["table-1"].all_recipes()
    assert [re.findall(r"runs/(\S+)/model", line) for line in lines] == [[name] for name in recipes]
    assert [("minipile" in line.rpartition("--text")[2]) for line in lines] == [False] * 8 + [True] * 8
    assert ITEMS["theorem-4.1"].full_commands() == ["stablemask theory"]


@pytest.mark.parametrize(
    ("ours", "other", "shape"),
    [
        ("table-2-downstream", "downstream_table.json", {"OpenLLaMA": 0, "OpenLLaMA-SM": 1}),
        (
            "table-4",
            "position_table.json",
            {"learned": 0, "sinusoidal": 1, "alibi": 2, "t5": 3, "rope": 4},
        ),
    ],
)
def test_values_that_are_kept_twice_are_the_same(ours: str, other: str, shape: dict[str, int]) -> None:
    text = files("stablemask.evaluation").joinpath(other).read_text(encoding="utf-8")
    accuracy = json.loads(text)["accuracy"]
    rows = ITEMS[ours].tables[0].rows
    for name, row in shape.items():
        assert list(rows[row].printed) == [pytest.approx(100 * value) for value in accuracy[name].values()]


def test_recipes_have_the_printed_hyperparameters() -> None:
    (table,) = ITEMS["table-6"].tables
    words: dict[object, object] = {"512 / 1024": 512, "50k": 50_000, "22k an epoch": 44_000, "200k": 200_000}
    compared = 0
    for column, name in enumerate(table.recipes):
        recipe = load_recipe(RECIPES / f"{name}.toml")
        for row in table.rows:
            if row.setting in (None, "epochs"):
                continue
            part = recipe.model if hasattr(recipe.model, row.setting or "") else recipe.train
            printed = row.printed[column]
            expected = words.get(printed, {"true": True}.get(str(printed), printed))
            assert getattr(part, row.setting or "") == expected, (name, row.name)
            compared += 1
    assert compared == 3 * sum(row.setting not in (None, "epochs") for row in table.rows) > 30


def test_ids_are_chosen_in_the_order_of_the_paper() -> None:
    items = list(ITEMS.values())
    assert [each.id for each in choose(items, ["table-4", "table-1"])] == ["table-1", "table-4"]
    assert choose(items, ["all"]) == items
    assert choose(items, []) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tabel-1", r"^ID: got 'tabel-1'; did you mean table-1"),
        ("theorem-4", r"did you mean theorem-4\.1"),
        ("zzz", r"^ID: got 'zzz'; allowed: all, table-1, table-2-tokens"),
    ],
)
def test_an_unknown_id_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(list(ITEMS.values()), ["table-1", name])


def test_entries_of_an_item() -> None:
    study, claims = load_study(), load_claims()
    tokens = entries_of([ITEMS["table-2-tokens"]], claims, study)
    pair = [Entry(g, s) for s in range(5) for g in ("small/rope/none", "small/rope/stablemask")]
    assert tokens == pair
    heads = entries_of([ITEMS["figure-f"]], claims, study)
    assert heads == [Entry("small/rope/stablemask", 0), Entry("heads/small/rope/stablemask", 0)]
    assert entries_of([ITEMS["figure-6"]], claims, study) == []
    figure = entries_of([ITEMS["figure-1c"]], claims, study)
    assert {e.group for e in figure} == {
        f"position/{p}/{r}" for p in ("alibi", "t5", "rope") for r in ("none", "stablemask")
    }, "its claims name them"
    whole = entries_of(ITEMS.values(), claims, study)
    assert set(whole) == {*study.entries(), *extras.entries()}, "nothing is trained that no item needs"


FILE = """
[[item]]
id = "one"
place = "here"
title = "it"
paper = "says"
repeats = "so"

[[item.table]]
title = "numbers"
columns = ["a", "b"]
rows = [{ name = "r", printed = [1, 2] }]
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("printed = [1, 2]", "printed = [1]"),
            r"one, table 'numbers': got 1 printed of 'r'; allowed: 2, one a column",
        ),
        (('title = "it"', 'titel = "it"'), r"one: got titel; allowed: id, place, title"),
        (("name = ", "nam = "), r"nam"),
        (
            ('columns = ["a", "b"]', 'columns = ["a", "b"]\nscale = "log"'),
            r"got scale 'log'; allowed: perplexity",
        ),
        (('columns = ["a", "b"]', 'columns = ["a", "b"]\nmetrics = ["m"]'), r"got 1 metrics; allowed: 2"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "paper.toml"
    path.write_text(FILE, encoding="utf-8")
    assert load_paper(path)[0].tables[0].rows == (Row("r", printed=(1, 2)),)
    path.write_text(FILE.replace(*change), encoding="utf-8")
    with pytest.raises((ValueError, KeyError), match=message):
        load_paper(path)
    path.write_text(FILE + FILE, encoding="utf-8")
    with pytest.raises(ValueError, match="got one more than once"):
        load_paper(path)


def grid(found: gather.Found, table: Table) -> tables.Grid:
    (made,) = tables.grids(item(tables=(table,)), found)
    return made


def test_printed_values_stand_beside_measured_ones(tmp_path: Path) -> None:
    for seed, loss in enumerate((3.0, 3.2)):
        entry = Entry("small/rope/none", seed)
        nats = [[loss * n for n in planted.TOKENS]] * 3
        table = {"positions": planted.POSITIONS, "tokens": [planted.TOKENS] * 3, "nats": nats}
        planted.write(tmp_path, entry, {"values": {}, "documents": {"valid": table}})
    found = gather.gather(tmp_path, load_study())
    made = grid(found, ITEMS["table-3-tokens"].tables[0])
    text = f"measured, text: the text {planted.CONDITIONS.corpus}"
    assert made.columns == ("", "perplexity, paper", text, "parameters here", "seeds")
    rows = {row[0]: row[1:] for row in made.rows}
    values = [math.exp(3.0), math.exp(3.2)]
    mean, spread = sum(values) / 2, abs(values[0] - values[1]) / math.sqrt(2)
    assert rows["Baseline"] == ("22.5", f"{mean:.2f} ± {spread:.2f}", "1.4M", "2")
    assert rows["StableMask"] == ("21.1", "not measured", "", "0")
    assert rows["learned sink"] == ("–", "not measured", "", "0")


def test_several_columns_have_a_line_for_the_paper_and_one_for_us(tmp_path: Path) -> None:
    entry = Entry("position/rope/none", 0)
    planted.write(tmp_path, entry, {"values": {"mapping": 1 / 64, "identification": 0.5, "odd_even": 0.5}})
    made = grid(gather.gather(tmp_path, load_study()), ITEMS["table-4"].tables[0])
    at = next(i for i, row in enumerate(made.rows) if row[0] == "RoPE")
    assert made.rows[at] == ("RoPE", "paper", "25.3", "24.7", "43.1")
    assert made.rows[at + 1] == ("", "measured", "1.6", "50.0", "50.0")
    assert made.rows[-1] == ("RoPE + StableMask", "measured", *["not measured"] * 3)


def test_text_and_size_stand_beside_several_columns_too(tmp_path: Path) -> None:
    entry = Entry("medium/rope/none", 0)
    planted.write(tmp_path, entry, {"values": {"curve/1": math.log(50.0)}})
    planted.describe(tmp_path)
    table = replace(
        ITEMS["table-2-tokens"].tables[0],
        rows=(Row("ours", (15.4,) * 5, group="medium/rope/none"), Row("none", (1.0,) * 5)),
    )
    made = grid(gather.gather(tmp_path, load_study()), table)
    assert made.title == f"{table.title}; 6.2M parameters, trained on a text of the tests"
    rows = made.rows
    assert rows[0] == ("ours", "paper", *["15.4"] * 5)
    assert rows[1][:3] == ("", "measured", "50.00")
    assert rows[3][:3] == ("", "measured", "")


def test_a_table_that_is_not_printed_names_the_text_in_its_title(tmp_path: Path) -> None:
    scaling = ITEMS["figure-4-scaling"].tables[0]
    assert grid(gather.gather(tmp_path, load_study()), scaling).title == scaling.title
    planted.pair(tmp_path, -0.02, seeds=1)
    entry = Entry("medium/rope/none", 0)
    planted.write(tmp_path, entry, planted.pretraining(entry, planted.losses({})))
    planted.describe(tmp_path)
    made = grid(gather.gather(tmp_path, load_study()), scaling)
    assert made.title == f"{scaling.title}; 1.4M and 6.2M parameters, trained on a text of the tests"


@pytest.mark.parametrize(
    ("claim", "where", "expected"),
    [
        ("rope-small", "table-1", math.log(26.9 / 27.4)),
        ("alibi-medium", "table-1", math.log(26.1 / 27.6)),
        ("rope-small", "figure-4-scaling", None),
        ("rope-small-other-domain", "table-1", None),
        ("tokens-4", "table-2-tokens", math.log(11.3 / 11.7)),
        ("learned-token-helps", "table-3-tokens", math.log(21.6 / 22.5)),
        ("constant-differs-from-zero", "table-3-values", math.log(21.5 / 22.2)),
        ("headwise", "table-3-values", None),
        ("position-1-fails-alibi", "table-4", 0.217 - 0.5),
        ("position-1-solved-alibi", "table-4", None),
    ],
)
def test_the_papers_own_difference(claim: str, where: str, expected: float | None) -> None:
    (asked,) = (each for each in load_claims() if each.id == claim)
    assert where in asked.items
    found = tables.printed_effect(asked, ITEMS[where].tables)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_values_are_shown_as_printed(tmp_path: Path) -> None:
    found = gather.gather(tmp_path, load_study())
    first = grid(found, ITEMS["table-1"].tables[0]).rows[1]
    assert first == ("BLOOM-SM, ALiBi, 71M", "29.0 ± 0.1", "not measured")
    rows = {row[0]: row[1:] for row in grid(found, ITEMS["table-6"].tables[0]).rows}
    assert rows["peak learning rate"] == ("6e-4", "4e-4", "2e-4")
    assert rows["Adam ε"] == ("1e-8",) * 3
    assert rows["weight decay"] == ("0.01", "0.1", "0.1")


def test_a_ratio_has_its_interval(tmp_path: Path) -> None:
    values = {"ratio/SM-I": 1.0213, "ratio/SM-I/low": 1.01, "ratio/SM-I/high": 1.0334, "ratio/SM": 7.5}
    planted.write(tmp_path, Entry("latency/16+8", 0), {"values": values})
    row = grid(gather.gather(tmp_path, load_study()), ITEMS["figure-5"].tables[0]).rows[0]
    assert row == ("prompt 16, output 8", "1.021 (1.01 to 1.033)", "7.5", "not measured")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1024.0, "1,024"),
        (0.0, "0"),
        (-1.0, "−1"),
        (2.4e-15, "2.4e-15"),
        (-0.0119, "−0.0119"),
        (1439.08, "1,439"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert tables.shown([value], "number") == text


def test_the_summary_of_an_item(tmp_path: Path) -> None:
    found = gather.gather(tmp_path, load_study())
    assert tables.summary(ITEMS["table-5"], [], found) == "not measured"
    assert tables.summary(ITEMS["table-6"], [], found) == "nothing to measure"
    planted.write(tmp_path, Entry("sizes/71m", 0), {"values": {"named": 71.9}})
    found = gather.gather(tmp_path, load_study())
    assert tables.summary(ITEMS["table-5"], [], found) == "measured in part (1 of 4 cells)"
