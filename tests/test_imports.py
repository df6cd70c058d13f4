"""Imports go one way, and ``import stablemask`` needs torch alone and does no work."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

import stablemask

SOURCE = Path(__file__).parents[1] / "src"

# What each part of the package may import of it, besides itself. "" is `stablemask` with its public names.
OPERATION = {"", "shapes", "pseudo", "backends", "attention"}
MODELS = OPERATION | {"model", "hf"}
EXPERIMENTS = MODELS | {"data", "measuring", "training", "evaluation", "analysis"}
MAY_IMPORT: dict[str, set[str]] = {
    "shapes": set(),
    "pseudo": {"shapes"},
    "backends": {"shapes", "pseudo"},
    "attention": {"shapes", "pseudo", "backends"},
    "": {"shapes", "pseudo", "backends", "attention"},
    "measuring": set(),
    "testing": OPERATION,
    "benchmark": OPERATION | {"measuring", "testing"},
    "data": set(),
    "model": OPERATION,
    "hf": OPERATION | {"model"},
    "training": MODELS | {"data"},
    "evaluation": MODELS | {"data", "measuring"},
    "analysis": MODELS,
    "reproduce": EXPERIMENTS,
    "cli": EXPERIMENTS | {"benchmark", "testing", "reproduce"},
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((SOURCE / "stablemask").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found.append((".".join(parts), path))
    return found


def imported(module: str, source: str) -> set[str]:
    """Dotted names of everything imported at any depth of the source: ``from a import b`` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def unit(module: str) -> str:
    """The part of the package that a dotted name belongs to.

    Public names of ``stablemask`` belong to '', the private modules beside ``attention`` to it.
    """
    first = [*module.split("."), ""][1]
    if first.startswith("_") and first != "__init__":
        return "attention"
    parts = {name.split(".")[1] for name, _ in modules()} - {"__init__"}
    return first if first in parts | set(MAY_IMPORT) else ""


def back_end(module: str) -> str:
    """``triton`` for anything in ``stablemask.backends.triton``; '' for what they share, and elsewhere."""
    parts = [*module.split("."), "", ""]
    known = {path.stem for path in (SOURCE / "stablemask" / "backends").glob("[!_]*")}
    return parts[2] if parts[1] == "backends" and parts[2] in known else ""


def violations(module: str, source: str) -> list[str]:
    allowed = MAY_IMPORT[unit(module)] | {unit(module)}
    own = {name for name in imported(module, source) if name.split(".")[0] == "stablemask"}
    wrong_way = [f"{module} imports {name}" for name in sorted(own) if unit(name) not in allowed]
    if not back_end(module):
        return wrong_way
    return wrong_way + [
        f"{module} imports another back end: {name}"
        for name in sorted(own)
        if back_end(name) not in {"", back_end(module)}
    ]


@pytest.mark.parametrize(("module", "path"), [pytest.param(*found, id=found[0]) for found in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    assert unit(module) in MAY_IMPORT, f"give {unit(module)!r} its place in MAY_IMPORT"
    assert violations(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stablemask.pseudo", "from stablemask.attention import stable_attention"),
        ("stablemask.attention", "from stablemask import hf"),
        ("stablemask.attention", "def f():\n    import stablemask.model"),
        ("stablemask.hf.register", "if TYPE_CHECKING:\n    from ..training import Recipe"),
        ("stablemask.analysis.sinks", "from stablemask.cli import main"),
        ("stablemask.backends.cpu_flash", "from stablemask.backends import reference"),
        ("stablemask.backends.cpu_flash", "from .reference import run"),
        ("stablemask.backends.triton.forward", "from ..cpu_flash import run"),
        ("stablemask.backends.portable", "import stablemask"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source)


def test_a_back_end_may_import_shared_helpers_and_itself() -> None:
    source = (
        "from stablemask.backends._call import Call\nfrom .tiles import TABLE\nfrom stablemask import shapes"
    )
    assert violations("stablemask.backends.triton.forward", source) == []


COLD_IMPORT = """
import json, logging, os, sys, threading, warnings
import torch

def state():
    return {
        "environment": dict(os.environ),
        "operators": sorted(torch._C._dispatch_get_all_op_names()),
        "warning filters": [str(f) for f in warnings.filters],
        "log handlers": len(logging.root.handlers),
        "import hooks": len(sys.meta_path),
        "threads": threading.active_count(),
        "random state": torch.get_rng_state().tolist(),
        "default dtype": str(torch.get_default_dtype()),
    }

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed or name.startswith("torch.nn.attention.flex"):
            raise ImportError(f"import stablemask tried to import {name}")

allowed = set(sys.stdlib_module_names) | {"torch", "stablemask"}
before, loaded = state(), set(sys.modules)
sys.meta_path.insert(0, Refuse())
import stablemask
sys.meta_path.pop(0)
after = state()
changed = [name for name in before if before[name] != after[name]]
print(json.dumps({"changed": changed, "modules": sorted(set(sys.modules) - loaded)}))
"""


@pytest.fixture(scope="module")
def cold_import(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What a fresh interpreter in an empty folder reports about ``import stablemask``."""
    folder = tmp_path_factory.mktemp("cold")
    done = subprocess.run(
        [sys.executable, "-c", COLD_IMPORT],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    report: dict[str, list[str]] = json.loads(done.stdout)
    return report


def test_importing_changes_nothing(cold_import: dict[str, list[str]]) -> None:
    assert cold_import["changed"] == []


def test_importing_loads_no_back_end_and_no_compiler(cold_import: dict[str, list[str]]) -> None:
    shared = {name for name in cold_import["modules"] if name.startswith("stablemask.backends._")}
    late = ("stablemask.backends.", "torch._dynamo", "torch._inductor", "torch.nn.attention", "torch.export")
    assert [name for name in cold_import["modules"] if name.startswith(late) and name not in shared] == []


def test_public_names_are_pinned() -> None:
    assert sorted(stablemask.__all__) == [
        "BackendUnavailable",
        "PseudoScores",
        "available_backends",
        "cu_seqlens_from_documents",
        "documents_from_cu_seqlens",
        "pseudo_logits",
        "sink_attention",
        "stable_attention",
    ]
    assert all(hasattr(stablemask, name) for name in stablemask.__all__)
