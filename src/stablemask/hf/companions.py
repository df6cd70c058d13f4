"""What lies beside a sealed ``config.json``: the module that opens it, and a model card."""

import re
from collections.abc import Mapping
from pathlib import Path

MODULE = "stablemask_config"

_MODULE_TEXT = '''"""Opens this folder with the installed package: pip install 'stablemask[hf]'."""

from stablemask.hf import SavedConfig

__all__ = ["SavedConfig"]
'''

_HEADING = "## StableMask"
_SECTION = re.compile(rf"^{_HEADING}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)

_CARD = f"""{_HEADING}

The attention of this model is StableMask: causal attention with one zero-valued extra logit per row, which
depends on the absolute position of the row. Its parameters: `{{table}}`. Without it the weights compute
something else.

Open it with the `stablemask` package (`pip install 'stablemask[hf]'`):

```python
import stablemask.hf

model = stablemask.hf.load("this folder")
```

After `import stablemask.hf`, `AutoModelForCausalLM.from_pretrained` opens it as well. In a process that
does not
import stablemask, it does so with `trust_remote_code=True`, through `{MODULE}.py`.

Everything else raises. The Auto classes of transformers do not know the model type, the class of the
architecture refuses the hidden size in `config.json`, and other programs do not know the name of the
architecture.

What remains possible, and runs the weights as plain attention without a word: editing `config.json` by
hand, reading the weight files into a model that was built otherwise, and putting an adapter that was
trained on this model onto another one.
"""

_FRONT_MATTER = "---\nlibrary_name: transformers\ntags:\n- stablemask\n---\n\n# Model with StableMask\n\n"


def write(folder: Path, table: Mapping[str, object]) -> None:
    """Write both. A model card that exists keeps its text; its section on StableMask is replaced or added."""
    (folder / f"{MODULE}.py").write_text(_MODULE_TEXT, encoding="utf-8")
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.exists() else _FRONT_MATTER
    others = _SECTION.sub("", text).rstrip()
    card.write_text(f"{others}\n\n{_CARD.format(table=dict(table))}", encoding="utf-8")
