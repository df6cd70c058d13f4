"""A saved folder opens in a process that knows transformers alone, or says what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import stablemask
from stablemask.model import StableMaskForCausalLM
from tests.model import tiny

OPEN = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
folder, trust = sys.argv[1], sys.argv[2] == "trust"
assert not any(name.startswith("stablemask") for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
assert type(config) is type(model.config)
with torch.no_grad():
    logits = model(load_file(f"{folder}/inputs.safetensors")["ids"]).logits
model.save_pretrained(f"{folder}/again")
save_file({"logits": logits}, f"{folder}/outputs.safetensors")
print(sys.modules[type(model).__module__].__file__)
"""
WITHOUT_US = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "stablemask":
            raise ModuleNotFoundError("No module named 'stablemask'", name="stablemask")
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny.model("rope", "stablemask", gamma=[0.1, 0.2, 0.3, 0.4]).float()
    ids = tiny.tokens(2, tiny.HORIZON + 5)
    model.save_pretrained(tmp_path)
    save_file({"ids": ids}, tmp_path / "inputs.safetensors")
    with torch.no_grad():
        save_file({"logits": model(ids).logits}, tmp_path / "expected.safetensors")
    return tmp_path


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(folder), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": "",
            "PYTHONPATH": str(Path(stablemask.__file__).parents[1]),
        },
    )


def test_a_fresh_process_gets_the_same_logits(folder: Path) -> None:
    done = run(OPEN, folder, "trust")
    assert done.returncode == 0, done.stderr
    given = load_file(folder / "outputs.safetensors")["logits"]
    assert torch.equal(given, load_file(folder / "expected.safetensors")["logits"])
    import stablemask.model.modeling

    assert done.stdout.strip() == stablemask.model.modeling.__file__
    shim = (folder / "stablemask_shim.py").read_text(encoding="utf-8")
    assert (folder / "again" / "stablemask_shim.py").read_text(encoding="utf-8") == shim
    assert sorted(p.name for p in (folder / "again").glob("*.py")) == ["stablemask_shim.py"]
    assert (folder / "again" / "config.json").read_text(encoding="utf-8") == (
        folder / "config.json"
    ).read_text(encoding="utf-8")
    assert len(shim.splitlines()) < 12


def test_without_the_package_it_says_what_to_install(folder: Path) -> None:
    done = run(WITHOUT_US + OPEN, folder, "trust")
    assert done.returncode != 0
    assert "pip install stablemask" in done.stderr


def test_without_trust_it_does_not_open_as_something_else(folder: Path) -> None:
    done = run(OPEN, folder, "no")
    assert done.returncode != 0
    assert "trust_remote_code" in done.stderr


def test_a_process_with_the_package_needs_no_trust(folder: Path) -> None:
    for trust in (None, True):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(model) is StableMaskForCausalLM
        ids = load_file(folder / "inputs.safetensors")["ids"]
        with torch.no_grad():
            assert torch.equal(model(ids).logits, load_file(folder / "expected.safetensors")["logits"])


@pytest.mark.parametrize(("position", "remedy"), tiny.EVERY)
def test_every_parameter_is_saved(position: str, remedy: str, tmp_path: Path) -> None:
    model = tiny.model(position, remedy, tie_word_embeddings=remedy == "none").float()
    model.save_pretrained(tmp_path)
    loaded = StableMaskForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict()
    ids = tiny.tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
