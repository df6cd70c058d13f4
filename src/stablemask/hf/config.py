"""The config of a model with StableMask: its class in memory, its form on disk.

``enable`` gives the config of a model a class derived from its own. It keeps the name, by which
transformers finds models and tokenizers, and differs in two ways: the attention cannot be set to anything
but StableMask, and what it writes as ``config.json`` is *sealed*. Whatever reads a sealed config without
this package fails:

* the model type is one that transformers does not know, so the Auto classes refuse it;
* ``hidden_size`` is a sentence, so the model's own class refuses it;
* the architecture is one that other programs do not know either;
* ``auto_map`` names a module beside it that imports this package, for ``trust_remote_code=True``.
"""

import json
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from stablemask.hf import companions
from stablemask.hf.interface import NAME

SAVED_TYPE = "stablemask_enabled"

_REPLACED = "stablemask_replaced"
_MESSAGE = (
    "This model has StableMask: pip install 'stablemask[hf]' and open the folder with stablemask.hf.load"
)

_switched_classes: dict[Any, Any] = {}


class Switched:
    """What ``enable`` puts in front of the class of a config."""

    stock_class: Any

    @property
    def _attn_implementation_internal(self) -> str:
        return NAME

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: str | None) -> None:
        if value not in (None, NAME):
            raise ValueError(
                f"attn_implementation: got {value!r}, but this model has StableMask; "
                "call stablemask.hf.disable(model) first"
            )

    def to_json_string(self, use_diff: bool = True) -> str:
        """The sealed text of config.json."""
        return seal(super().to_json_string(use_diff))  # type: ignore[misc]

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the sealed config and, beside it, the module that opens it and a model card."""
        super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]
        companions.write(Path(json_file_path).parent, vars(self)["stablemask"])

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _blank, (self.stock_class,), vars(self)


class SavedConfig(PreTrainedConfig):
    """Reads a sealed ``config.json``: gives the config of the architecture in it, with StableMask on."""

    model_type = SAVED_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config, and the unused arguments where the caller asks for them."""
        stock = unseal(config_dict)
        stock_class = type(AutoConfig.for_model(stock["model_type"]))
        return switched_class(stock_class).from_dict(stock, **kwargs)


def switched_class(stock_class: Any) -> Any:
    """The class of configs of ``stock_class`` with StableMask."""
    if stock_class not in _switched_classes:
        namespace = {
            "__module__": stock_class.__module__,
            "__qualname__": stock_class.__qualname__,
            "__doc__": stock_class.__doc__,
            "stock_class": stock_class,
        }
        _switched_classes[stock_class] = type(stock_class.__name__, (Switched, stock_class), namespace)
    return _switched_classes[stock_class]


def is_switched(config: object) -> bool:
    """Whether this is the config of a model with StableMask."""
    return isinstance(config, Switched)


def seal(text: str) -> str:
    """The text of a config.json, changed so that nothing opens it as a plain model."""
    config = json.loads(text)
    architectures = [f"StableMask{name}" for name in config.get("architectures") or []]
    changes = {
        "architectures": architectures,
        "auto_map": {"AutoConfig": f"{companions.MODULE}.{SavedConfig.__name__}"},
        "model_type": SAVED_TYPE,
        "hidden_size": _MESSAGE,
    }
    # pairs, not a table: transformers takes any table in a config that has the model type it looks for
    replaced = [[key, config[key]] for key in changes if key in config]
    return json.dumps({**config, **changes, _REPLACED: replaced}, indent=2, sort_keys=True) + "\n"


def unseal(config: dict[str, Any]) -> dict[str, Any]:
    """The config as it was before ``seal``."""
    if _REPLACED not in config or "stablemask" not in config:
        raise ValueError(
            f"config.json: got model type {SAVED_TYPE!r} without its {_REPLACED!r} or 'stablemask' table"
        )
    sealed = {"architectures", "auto_map", "model_type", "hidden_size", _REPLACED}
    return {key: value for key, value in config.items() if key not in sealed} | dict(config[_REPLACED])


def register() -> None:
    """Make the Auto classes open sealed folders."""
    AutoConfig.register(SAVED_TYPE, SavedConfig, exist_ok=True)


def _blank(stock_class: Any) -> Any:
    """A config without contents, for copying and unpickling."""
    switched = switched_class(stock_class)
    return switched.__new__(switched)
