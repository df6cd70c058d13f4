"""The shim in a saved folder: a few lines that open it through the installed package."""

from os import PathLike
from pathlib import Path

SHIM = "stablemask_shim"
AUTO_MAP = {
    "AutoConfig": f"{SHIM}.StableMaskConfig",
    "AutoModel": f"{SHIM}.StableMaskModel",
    "AutoModelForCausalLM": f"{SHIM}.StableMaskForCausalLM",
}

_SOURCE = '''"""Opens this folder with `trust_remote_code=True` through the installed stablemask package."""

try:
    from stablemask.model import StableMaskConfig, StableMaskForCausalLM, StableMaskModel
except ImportError as error:
    raise ImportError("this model needs the stablemask package: pip install stablemask[hf]") from error

__all__ = ["StableMaskConfig", "StableMaskForCausalLM", "StableMaskModel"]
'''


def write_shim(folder: str | PathLike[str]) -> None:
    """Write the module that ``auto_map`` names into a folder, which is made if it does not exist."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{SHIM}.py").write_text(_SOURCE, encoding="utf-8")
