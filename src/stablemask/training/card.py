"""The card of a trained model: what it is, what it was trained on and how, its curve, and the versions."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import stablemask
from stablemask.data import Splits
from stablemask.training.recipe import Recipe
from stablemask.training.toml import write_table

_ROWS = 20


def write_card(
    folder: Path,
    recipe: Recipe,
    splits: Splits,
    history: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> None:
    """Write ``README.md`` into the folder of a model."""
    model, table = recipe.model, recipe.table()
    del table["data"]["cache"]  # says something of the machine, nothing of the model
    remedy = "" if model.remedy == "none" else f" and the remedy {model.remedy}"
    what = (
        f"A decoder of {summary['parameters']:,} parameters with position encoding {model.position}{remedy}. "
        f"Validation perplexity {summary['perplexity']:.4f} after {summary['steps']:,} updates on "
        f"{summary['tokens']:,} tokens, which took {summary['seconds']:,.0f} s."
    )
    versions = (
        f"stablemask {stablemask.__version__}, PyTorch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}"
    )
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [stablemask]",
        "---",
        "",
        f"# {recipe.name}",
        "",
        what,
        "",
        "```python",
        "import stablemask.model",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("this folder")',
        'tokenizer = AutoTokenizer.from_pretrained("this folder")',
        "```",
        "",
        "## Data",
        "",
        *_table(
            ("split", "blocks", "tokens", "bytes of text", "fingerprint"),
            [
                (name, f"{len(b):,}", f"{b.num_tokens:,}", f"{b.num_bytes:,}", f"`{b.fingerprint}`")
                for name, b in (("train", splits.train), ("valid", splits.valid))
            ],
        ),
        "",
        "## Curve",
        "",
        *_table(
            ("update", "tokens", "validation loss", "perplexity"),
            [
                (f"{e['step']:,}", f"{e['tokens']:,}", f"{e['valid_loss']:.4f}", f"{e['perplexity']:.3f}")
                for e in _thinned([e for e in history if "perplexity" in e])
            ],
        ),
        "",
        "## Recipe",
        "",
        "```toml",
        write_table(table),
        "```",
        "",
        "## Versions",
        "",
        versions,
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _thinned(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """About ``_ROWS`` entries, the last among them."""
    every = max(1, -(-len(entries) // _ROWS))
    return list(reversed(entries[::-1][::every]))
