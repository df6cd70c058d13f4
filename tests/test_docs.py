"""The README and the documentation do what they say: snippets run, names exist, commands are real."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch

import stablemask
from stablemask import shapes
from stablemask.cli import COMMANDS
from tests.pages import COMMAND, blocks, run_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The page of results is generated; its commands are hours of work, and tested with what generates it.
WRITTEN = [page for page in PAGES if page != ROOT / "docs" / "results.md"]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def program(page: Path) -> Any:
    """Commands train models and start servers."""
    marks = pytest.mark.slow if any(block.info == COMMAND for block in blocks(page)) else ()
    return pytest.param(page, marks=marks, id=name(page))


@pytest.mark.parametrize("page", [program(page) for page in WRITTEN if blocks(page)])
def test_pages_run_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_page(page, tmp_path)


IN_PYTHON, IN_SHELL, IN_RECIPE, IN_OTHER = (
    f"```{info}\n{{}}\n```\n" for info in ("python", "sh", "toml", "python {{.cuda}}")
)


@pytest.mark.parametrize(
    ("fence", "wrong"),
    [
        (IN_PYTHON, "assert 1 + 1 == 3"),
        (IN_OTHER, "x = ("),
        (IN_SHELL, "stablemask no-such-command"),
        (IN_SHELL, "stablemask inspect HuggingFaceTB/SmolLM2-135M --file your.txt --text both"),
        (IN_SHELL, "stablemask train recipes/no-such-recipe.toml"),
        (IN_SHELL, "torchrun --nproc-per-node 3 -m stablemask.cli train recipes/tiny.toml"),
        (IN_SHELL, "torchrun --nproc-per-node 8 -m stablemask train recipes/tiny.toml"),
        (IN_SHELL, "accelerate launch --config_file no-such.yaml -m stablemask.cli train recipes/tiny.toml"),
        (IN_SHELL, "make no-such-target"),
        (IN_SHELL, "pip install 'stablemask[no-such-extra]'"),
        (IN_SHELL, "python -m benchmarks.attention --no-such-option"),
        (IN_SHELL, "no-such-program"),
        (IN_RECIPE, "[train]\nsteps = 3"),
        (IN_RECIPE, "# recipes/mine.toml\nextends = 'tiny.toml'\n[train]\nstops = 3"),
    ],
)
def test_a_wrong_block_fails(
    fence: str,
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n" + IN_PYTHON.format("x = 1") + "\n" + fence.format(wrong), encoding="utf-8")
    assert [block.line for block in blocks(page)] == [4, 8]
    with pytest.raises((AssertionError, SyntaxError, ValueError, FileNotFoundError)):
        run_page(page, tmp_path)


def test_every_block_is_found() -> None:
    for page in WRITTEN:
        fences = r"^\s*```+ *\{? *\.?(?:python|py|sh|shell|bash|console|zsh|toml)\b"
        opened = re.findall(fences, read(name(page)), re.MULTILINE)
        assert len(opened) == len(blocks(page)), f"{name(page)}: a block is indented or oddly fenced"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`stablemask ([a-z]+)[ `]", read(name(page)))
    assert [command for command in named if command not in COMMANDS] == []


def tree_paths(readme: str) -> list[str]:
    """The paths that the README's layout tree names: one an indented line, folders ending in a slash."""
    tree = re.search(r"## Layout.*?```text\n(.*?)```", readme, re.DOTALL)
    assert tree, "the README has a layout tree"
    paths, folders = [], []
    for line in tree[1].splitlines():
        depth, entry = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [entry]
        paths.append("".join(folders))
    return paths


def test_layout_tree_names_what_exists() -> None:
    paths = tree_paths(read("README.md"))
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []
    unnamed = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src" / "stablemask").glob("*")
        if path.suffix == ".py" and path.relative_to(ROOT).as_posix() not in paths
    ]
    assert unnamed == []


def test_examples_in_docstrings_are_shown_as_examples() -> None:
    """The generator of the interface pages takes a section called "Example" for a quotation."""
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"^ *Example:$", path.read_text(encoding="utf-8"), re.MULTILINE), path


@pytest.mark.parametrize("public", stablemask.__all__)
def test_public_names_are_documented(public: str) -> None:
    assert f"::: stablemask.{public}\n" in read("docs/api.md")
    prose = "".join(read(name(page)) for page in PAGES if page.name != "api.md")
    assert re.search(rf"\b{public}\b", prose)


def test_the_shapes_in_the_documentation_are_those_of_the_code() -> None:
    named = {n: get_args(t)[1] for n, t in vars(shapes).items() if get_origin(t) is Annotated}
    assert named
    assert dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|$", read("docs/api.md"), re.MULTILINE)) == named


def test_the_table_of_back_ends_is_true() -> None:
    q = torch.randn(1, 2, 5, 4)
    learned = {"bias": torch.zeros(2, 5, 5, requires_grad=True)}
    calls: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {
        "gradient for `bias`, `alibi_slopes`": (q, q, learned),
        "`return_lse`": (q, q, {"return_lse": True}),
        "`softcap`": (q, q, {"softcap": 3.0}),
        "`dropout`": (q, q, {"dropout": 0.1}),
        "float64": (q.double(), q.double(), {}),
        "values wider or narrower than queries": (q, q[..., :3], {}),
    }
    table = re.search(r"^\| \| `cpu_flash`.*?\n\n", read("docs/backends.md"), re.MULTILINE | re.DOTALL)
    assert table
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].strip().splitlines()
    )
    said = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    for what, (query, value, options) in calls.items():
        reasons = stablemask.available_backends(query, query, value, 0.0, **options)
        for backend in ("cpu_flash", "portable", "reference"):
            assert said[what][f"`{backend}`"] == ("yes" if reasons[backend] is None else "no"), (
                what,
                backend,
            )


def test_ci_runs_the_commands_of_the_readme() -> None:
    assert re.search(r"^make test\b", read("README.md"), re.MULTILINE)
    steps = re.findall(r"^step (.*)$", read(".ci/run"), re.MULTILINE)
    assert {"make test", "make check", "make compile-gate"} <= set(steps)
    assert steps[-1] == "make test", "the last thing CI prints is the closing line of the tests"


def test_make_targets_named_in_the_text_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.MULTILINE))
    texts = [read(name(page)) for page in PAGES] + [read("CONTRIBUTING.md"), read(".ci/run")]
    named = {
        found for text in texts for found in re.findall(r"(?:`|^|^step )make ([a-z-]+)", text, re.MULTILINE)
    }
    assert {"demo", "test", "check"} <= named <= targets


def test_the_version_is_the_same_everywhere() -> None:
    assert re.findall(r"^version: (\S+)$", read("CITATION.cff"), re.MULTILINE) == [stablemask.__version__]


def test_the_tested_torch_is_the_admitted_one() -> None:
    """CI tests one release of torch; pyproject admits its series and no other."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    pinned = re.search(r"^torch==(\d+)\.(\d+)\.\d+$", read("constraints.txt"), re.MULTILINE)
    assert pinned
    major, minor = int(pinned[1]), int(pinned[2])
    assert project["dependencies"] == [f"torch>={major}.{minor},<{major}.{minor + 1}"]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = r"\]\(([^)#:\s]+)(?:#[^)]*)?\)|src(?:set)?=\"([^\":]+)\""
    targets = [a or b for a, b in re.findall(links, read(name(page)))]
    assert len(targets) > 1 or page.name != "README.md"
    assert [target for target in targets if not (page.parent / target).exists()] == []
