"""A corpus, a study and claims of seconds."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from stablemask.reproduce.cells import Conditions, Job
from stablemask.reproduce.corpus import Corpus, Source, open_corpus, prepare_corpus
from stablemask.reproduce.study import Study, load_study

WORDS = (
    *("stable", "mask", "attention", "row", "column", ",", ".", "the", "of", "7"),
    *("12", "token", "head", "position", "pseudo", "mass", "decay"),
)

STUDY = """
code = 1

[common.data]
tokenizer = "bytes"

[common.train]
length = 16
batch_size = 4
steps = 10
warmup_steps = 3
learning_rate = 1e-2
weight_decay = 0.1

[sizes.small.model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2

[positions.rope.model]
position = "rope"

[positions.alibi.model]
position = "alibi"

[arms.none.model]
remedy = "none"

[arms.stablemask.model]
remedy = "stablemask"

[arms.learned_token.model]
remedy = "artificial_token"

[arms.learned_sink.model]
remedy = "learned_sink"

[[run]]
groups = ["small/rope/none", "small/rope/stablemask"]
seeds = 2

[[run]]
groups = ["small/alibi/none"]
seeds = 1
"""

# An arm that needs more text than there is, and one that takes its time; no run of the study has them.
ARMS = """
[arms.broken.train]
length = 1_000_000

[arms.long.train]
steps = {long}
"""


def text(seed: int, words: int) -> str:
    chance = random.Random(seed)  # noqa: S311 - words, not secrets
    return " ".join(chance.choice(WORDS) for _ in range(words))


def write_texts(folder: Path, long: tuple[int, int] = (1, 250)) -> Source:
    """Files of documents, as the study has them; of ``long`` so many, with so many words."""
    counts = {"train": (40, 60), "valid": (4, 50), "other": (3, 20), "long": long}
    for seed, (name, (documents, words)) in enumerate(counts.items()):
        rows = [json.dumps({"text": text(100 * seed + i, words + i)}) for i in range(documents)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    named = {name: str(folder / f"{name}.jsonl") for name in ("valid", "other", "long")}
    return Source(data=str(folder / "train.jsonl"), tokenizer="bytes", **named)


@cache
def corpus_folder() -> Path:
    """A prepared corpus, made once for all tests of a process; nobody may change it."""
    folder = Path(mkdtemp(prefix="stablemask-corpus-"))
    prepare_corpus(folder / "corpus", write_texts(folder), str(folder / "cache"))
    return folder / "corpus"


@cache
def corpus() -> Corpus:
    return open_corpus(corpus_folder())


def study(folder: Path) -> Study:
    path = folder / "study.toml"
    path.write_text(STUDY, encoding="utf-8")
    return load_study(path)


def conditions() -> Conditions:
    return Conditions("cpu", "fp32", corpus().digest)


def job(folder: Path, results: Path | None = None) -> Job:
    return Job(study(folder), conditions(), corpus_folder(), results or folder / "results", "a command")
