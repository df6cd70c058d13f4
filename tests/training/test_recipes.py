"""The recipes of this project: what the paper prints, what they say of themselves, what they take."""

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stablemask.cli import main
from stablemask.cli import train as command
from stablemask.training import Recipe, load_recipe
from stablemask.training import plan as what_it_takes
from stablemask.training.toml import read_tables

FOLDER = Path(__file__).parents[2] / "recipes"
PATHS = sorted(FOLDER.glob("*.toml"))
NAMES = [path.stem for path in PATHS]
REAL = ("tiny", "small")
PAPERS = [name for name in NAMES if name not in REAL]

SAME = {
    "beta1": 0.9,
    "beta2": 0.98,
    "epsilon": 1e-8,
    "clipping": 1.0,
    "warmup_steps": 4000,
    "epochs": None,
    "tokens": None,
    "batch_tokens": None,
}
PRINTED = {
    "wikitext103": SAME
    | {"length": 512, "batch_size": 64, "steps": 50_000, "beginning_learning_rate": 1e-6}
    | {"learning_rate": 6e-4, "schedule": "linear", "weight_decay": 0.01},
    "minipile": SAME
    | {"length": 512, "batch_size": 128, "steps": 2 * 22_000, "beginning_learning_rate": 1e-6}
    | {"learning_rate": 4e-4, "schedule": "linear", "weight_decay": 0.1},
    "pile": SAME
    | {"length": 1024, "batch_size": 128, "steps": 200_000, "beginning_learning_rate": 5e-6}
    | {"learning_rate": 2e-4, "schedule": "cosine", "weight_decay": 0.1},
}
TOKENS_PER_BATCH = {"wikitext103": 32768, "minipile": 65536, "pile": 131072}
SOURCES = {
    "wikitext103": "Salesforce/wikitext/wikitext-103-raw-v1",
    "minipile": "JeanKaddour/minipile",
    "pile": "monology/pile-uncopyrighted",  # the Pile itself is no longer distributed
}
SIZES = {  # hidden, feed-forward, layers, heads, parameters
    "71m": (512, 1536, 6, 8, 71_917_056),
    "160m": (768, 2048, 12, 12, 162_148_608),
    "400m": (1024, 2816, 24, 16, 411_257_856),
    "1.4b": (2048, 5632, 24, 16, 1_439_078_400),
}
ROWS = {"wikitext103": ("71m", "160m"), "minipile": ("160m", "400m"), "pile": ("160m", "400m", "1.4b")}
ABLATIONS: dict[str, dict[str, Any]] = {
    "ablation-fixed-token": {"remedy": "artificial_token", "artificial_tokens": 1, "artificial_zero": True},
    "ablation-learnable-token": {
        "remedy": "artificial_token",
        "artificial_tokens": 1,
        "artificial_zero": False,
    },
    "ablation-pseudo-minus-infinity": {"remedy": "stablemask", "base": float("-inf")},
    "ablation-pseudo-zero": {"remedy": "stablemask", "base": 0.0, "gamma": 0.0},
    "ablation-pseudo-constant": {"remedy": "stablemask", "base": 0.01, "gamma": 0.0},
    "ablation-pseudo-slow-decay": {"remedy": "stablemask", "base": 0.0, "gamma": 0.01, "headwise": False},
}
GRID = {
    f"{corpus}-{size}-{position}{'-stablemask' if remedy == 'stablemask' else ''}": (
        corpus,
        size,
        position,
        remedy,
    )
    for corpus, sizes in ROWS.items()
    for size in sizes
    for position in ("rope", "alibi")
    for remedy in ("none", "stablemask")
}


def recipe(name: str, overrides: dict[str, Any] | None = None) -> Recipe:
    return load_recipe(FOLDER / f"{name}.toml", overrides)


def own(name: str) -> dict[str, Any]:
    """What the file itself says."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Head:
    """The comment at the head of a recipe."""

    command: str
    hardware: str
    time: str
    paper: str

    @property
    def gpus(self) -> int:
        return {"one GPU": 1, "8 GPUs": 8}[" ".join(self.hardware.split()[:2])]

    @property
    def gigabytes(self) -> int:
        return int(re.findall(r"with (\d+) GB", self.hardware)[0])


def head(name: str) -> Head:
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    lines = text[: text.index("\nextends")].splitlines() if "\nextends" in text else text.splitlines()
    said = dict(
        line[2:].split(":", 1) for line in lines if re.match(r"# (Command|Hardware|Time|Paper):", line)
    )
    return Head(*(said[part].strip() for part in ("Command", "Hardware", "Time", "Paper")))


def test_nothing_is_missing_and_nothing_is_unknown() -> None:
    assert sorted(NAMES) == sorted([*GRID, *ABLATIONS, *REAL])


# What the paper prints


@pytest.mark.parametrize("name", GRID)
def test_rows_of_the_pretraining_tables(name: str) -> None:
    corpus, size, position, remedy = GRID[name]
    made = recipe(name)
    assert {key: getattr(made.train, key) for key in PRINTED[corpus]} == PRINTED[corpus]
    assert made.train.sequences * made.train.length == TOKENS_PER_BATCH[corpus]
    assert made.data.source == SOURCES[corpus]
    assert (made.data.tokenizer, made.data.packing) == ("gpt2", "concatenated")
    assert (made.name, made.model.size, made.model.position, made.model.remedy) == (
        name,
        size,
        position,
        remedy,
    )
    assert (made.model.gamma, made.model.headwise) == (0.5, True)


@pytest.mark.parametrize("name", GRID)
def test_decoders_of_the_pretraining_tables(name: str) -> None:
    corpus, size, position, remedy = GRID[name]
    made = recipe(name)
    config = made.config()
    widths = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
    )
    assert (*widths, sum(what_it_takes(made, head(name).gpus).parameters.values())) == SIZES[size]
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.width_of_head * config.num_attention_heads == config.hidden_size
    assert config.vocab_size == 50257
    assert not config.tie_word_embeddings
    assert (config.position, config.remedy) == (position, remedy)
    if remedy == "stablemask":
        assert config.horizon == PRINTED[corpus]["length"]
        assert (config.gamma, config.base) == (0.5, 0.0)


@pytest.mark.parametrize("name", ABLATIONS)
def test_rows_of_the_ablations(name: str) -> None:
    made, base = recipe(name), recipe("wikitext103-160m-rope")
    assert {key: getattr(made.model, key) for key in ABLATIONS[name]} == ABLATIONS[name]
    assert (made.train, made.data) == (base.train, base.data)
    assert (made.model.size, made.model.position) == ("160m", "rope")
    made.config()


def rows_of_the_paper() -> list[tuple[str, dict[str, Any]]]:
    """Rows of the tables of perplexities, by the recipe that each of them names."""
    path = Path(__file__).parents[2] / "src" / "stablemask" / "reproduce" / "paper.toml"
    items = tomllib.loads(path.read_text(encoding="utf-8"))["item"]
    tables = ("table-1", "table-2-tokens", "table-3-tokens", "table-3-values")
    return [
        (row["recipe"], row)
        for item in items
        if item["id"] in tables
        for table in item["table"]
        for row in table["rows"]
        if "printed" in row
    ]


def test_each_row_of_the_paper_has_a_recipe_that_prints_its_numbers() -> None:
    rows = rows_of_the_paper()
    assert len(rows) == 8 + 8 + 2 + 4 + 5
    for name, row in rows:
        said = head(name).paper
        for value in row["printed"]:
            assert re.search(rf"(?<![\d.]){value}(?![\d.])", said), (name, value, said)
        if len(row["printed"]) < 5 and "spread" in row:
            for value, spread in zip(row["printed"], row["spread"], strict=True):
                assert f"{value} ± {spread}" in said, (name, said)
    assert {name for name in PAPERS if "prints no number" in head(name).paper} == set(PAPERS) - {
        n for n, _ in rows
    }


# Composed, not copied


@pytest.mark.parametrize("name", PAPERS)
def test_a_variant_is_what_differs_from_the_one_below_it(name: str) -> None:
    said = own(name)
    assert (FOLDER / said.pop("extends")).is_file()
    training = said.pop("train", {})
    assert training.keys() <= {"distribution"}, "hyper-parameters stand in recipes/parts alone"
    assert said.keys() == {"model"}
    if name.endswith("-stablemask"):
        assert own(name) == {
            "extends": f"{name.removesuffix('-stablemask')}.toml",
            "model": {"remedy": "stablemask"},
        }


@pytest.mark.parametrize("name", [name for name in GRID if name.endswith("-stablemask")])
def test_the_two_of_a_pair_differ_in_the_remedy_alone(name: str) -> None:
    ours, plain = recipe(name).table(), recipe(name.removesuffix("-stablemask")).table()
    assert ours.pop("name") != plain.pop("name")
    assert ours["model"].pop("remedy") != plain["model"].pop("remedy")
    assert ours == plain


@pytest.mark.parametrize("name", NAMES)
def test_the_packing_is_said_and_not_left_to_a_default(name: str) -> None:
    assert read_tables(FOLDER / f"{name}.toml", {})["data"]["packing"] == "concatenated"


# What a recipe says of itself, and what it takes


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_the_head_is_this_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    said = head(name)
    words = shlex.split(said.command)
    start = ["stablemask", "train"]
    if recipe(name).train.distribution == "fsdp" or name.startswith("pile"):
        start = ["torchrun", "--nproc-per-node", str(said.gpus), "-m", "stablemask.cli", "train"]
    assert words[: len(start)] == start
    job = command.parse(words[len(start) :], "stablemask train")
    assert job.problem == ""
    assert job.recipe == recipe(name)
    assert job.out == Path("runs") / name


@pytest.mark.parametrize("name", PAPERS)
def test_the_hardware_of_the_head_is_enough_and_its_time_follows_from_the_operations(name: str) -> None:
    said = head(name)
    takes = what_it_takes(recipe(name), said.gpus)
    assert sum(takes.memory.values()) < 0.95 * said.gigabytes * 2**30
    assert "not run here; from its operations, at 100 T operations/s a GPU" in said.time
    assert takes.updates is not None
    hours = takes.operations * takes.updates / (1e14 * said.gpus) / 3600
    number, unit = re.findall(r"about ([\d.]+) (hours|days)", said.time)[0]
    assert float(number) * {"hours": 1, "days": 24}[unit] == pytest.approx(hours, rel=0.15)


@pytest.mark.parametrize("name", REAL)
def test_what_runs_for_real_needs_no_download_and_two_cores(name: str) -> None:
    made, said = recipe(name), head(name)
    assert made.data.source == "builtin"
    assert made.data.tokenizer.startswith("bpe:")
    assert (made.train.precision, made.train.distribution, made.name) == ("fp32", "ddp", name)
    assert said.hardware == "two CPU cores"
    assert said.time == {"tiny": "about 2 minutes", "small": "about 20 minutes"}[name]


def test_operations_and_memory_by_hand() -> None:
    takes = what_it_takes(recipe("wikitext103-71m-rope", {"train": {"precision": "fp32", "accumulation": 4}}))
    matrices = 6 * (4 * 512 * 512 + 3 * 512 * 1536) + 512 * 50257  # the embedding is no product
    attention = 6 * 512 * 512  # keys × width of every layer; half of them are visible, twice they are used
    assert takes.operations == 32768 * (6 * matrices + 6 * attention)
    assert takes.tokens == 32768
    assert takes.updates == 50_000
    assert takes.memory["weights"] == takes.memory["gradients"] == 4 * 71_917_056
    assert takes.memory["optimizer"] == 2 * 4 * 71_917_056
    whole = what_it_takes(recipe("wikitext103-71m-rope", {"train": {"precision": "fp32"}}))
    assert whole.memory["activations"] > 3 * takes.memory["activations"]
    spread = what_it_takes(recipe("pile-1.4b-rope"), 8)
    assert spread.memory["optimizer"] == 8 * 1_439_078_400 // 8


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_trains_nothing_and_writes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    built = []
    honest = what_it_takes.__globals__["StableMaskForCausalLM"]

    def watched(config: Any) -> Any:
        model = honest(config)
        built.append({tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
        return model

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setitem(what_it_takes.__globals__, "StableMaskForCausalLM", watched)
    monkeypatch.setattr(command, "train", never)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    processes = head(name).gpus if name in PAPERS else 1
    options = ["--dry-run", "--processes", str(processes)]
    assert main(["train", str(FOLDER / f"{name}.toml"), *options]) == 0
    assert built == [{"meta"}]
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().out
    takes = what_it_takes(recipe(name), processes)
    assert re.search(rf"total +{sum(takes.parameters.values()):,}\n", printed)
    assert f"{sum(takes.memory.values()) / 2**20:,.0f} MiB" in printed
    assert f"{takes.operations:.3e}" in printed
    assert f"{takes.updates:,}" in printed
    assert re.search(r"time on this machine +[\d.]+ s, at [\d,]+ G operations/s", printed)
    assert re.search(r"time, without validation +\d+:\d\d:\d\d", printed)
