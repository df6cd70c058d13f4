"""The text of the study in one folder: tokenised, complete, and small enough to be carried elsewhere.

Whoever works from such a folder needs neither the source nor a tokenizer. It holds the training stream and
three sets of documents: ``valid``, from the same source as the training text; ``other``, from another one;
``long``, for lengths past the training length. The last two are optional.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from stablemask.analysis.classes import classify
from stablemask.data import Blocks, DataConfig, prepare
from stablemask.data import cache as disk
from stablemask.data.blocks import cut_blocks
from stablemask.data.config import Packing, default_cache
from stablemask.data.progress import Bar
from stablemask.data.sources import Part, parts
from stablemask.data.tokens import Tokens
from stablemask.evaluation.cells import write_text
from stablemask.evaluation.documents import Document, tokenize, whole_texts

META = "meta.json"
SETS = ("valid", "other", "long")
_LONG_CHARACTERS = 200_000  # of each long document, so many are kept
_FORMAT = 1


@dataclass(frozen=True)
class Source:
    """Where the text of the study comes from.

    Args:
        data: Training text: "builtin", a local file or folder, or a dataset on the hub, as in ``DataConfig``.
        valid: Validation text, likewise; by default held out of the training text.
        other: Validation text from elsewhere; none by default.
        other_begins: Regular expression of the lines that begin a document in it.
        long: Long texts, for extrapolation; by default the validation text has to do.
        tokenizer: As in ``DataConfig``.
    """

    data: str = "builtin"
    valid: str | None = None
    other: str | None = None
    other_begins: str | None = None
    long: str | None = None
    tokenizer: str = "bpe:2048"


@dataclass(frozen=True)
class Corpus:
    """An opened folder.

    Attributes:
        folder: Where it is.
        digest: A short name for exactly this content.
        about: Names of the sources, the tokenizer, counts.
        train: The training stream.
        tokenizer: What it was made with.
        documents: The sets of documents by name; empty where there is none.
        classes: Class of every token of ``valid``, as in ``analysis.classes``.
    """

    folder: Path
    digest: str
    about: dict[str, object]
    train: Tokens
    tokenizer: PreTrainedTokenizerFast
    documents: dict[str, list[Document]]
    classes: list[Annotated[Tensor, "n"]]

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer."""
        return len(self.tokenizer)

    def blocks(self, length: int, packing: Packing) -> Blocks:
        """The training text in blocks."""
        return cut_blocks(self.train, "train", length, packing, self.tokenizer)


def open_or_prepare(folder: Path, source: Source, cache: str | None = None) -> Corpus:
    """The corpus of a folder; made from its source where there is none yet.

    Raises:
        ValueError: The folder holds a corpus of another source, or of a text that was changed since.
    """
    if not (folder / META).exists():
        prepare_corpus(folder, source, cache)
    corpus = open_corpus(folder)
    wanted = _described(source, _config(source, cache))
    if corpus.about["source"] != wanted:
        raise ValueError(
            f"corpus: {str(folder)!r} holds {corpus.about['source']}; allowed: {wanted}, or another folder"
        )
    return corpus


def prepare_corpus(folder: Path, source: Source, cache: str | None = None) -> None:
    """Tokenise everything into a folder. The folder counts as made once ``meta.json`` is in it."""
    (folder / META).unlink(missing_ok=True)
    config = _config(source, cache)
    described, found = _described(source, config), _parts(source, config)
    splits = prepare(config, 2)
    tokenizer = splits.tokenizer
    shutil.copytree(splits.train.tokens.folder, folder / "train", dirs_exist_ok=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    texts = {name: whole_texts(found[name]) if name in found else [] for name in SETS}
    texts["long"] = [text[:_LONG_CHARACTERS] for text in texts["long"]]
    counts = {name: _save_documents(folder / f"{name}.npz", t, tokenizer, name) for name, t in texts.items()}
    about = {
        "format": _FORMAT,
        "source": described,
        "other_begins": source.other_begins,
        "tokens": {"train": splits.train.tokens.length, **counts},
        "train_bytes": splits.train.tokens.text_bytes,
        "digest": _digest(folder),
    }
    write_text(folder / META, json.dumps(about, indent=1) + "\n")


def open_corpus(folder: Path) -> Corpus:
    """A corpus that was prepared before, here or elsewhere."""
    path = folder / META
    if not path.exists():
        raise FileNotFoundError(f"corpus: got {str(folder)!r}; allowed: a folder with a prepared corpus")
    about = json.loads(path.read_text(encoding="utf-8"))
    if about["format"] != _FORMAT or about["digest"] != _digest(folder):
        raise ValueError(f"corpus: {str(folder)!r} is damaged or of another version; remove it")
    meta = json.loads((folder / "train" / META).read_text(encoding="utf-8"))
    train = Tokens(folder / "train", meta["dtype"], meta["tokens"], meta["documents"], meta["text_bytes"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    documents, classes = {}, []
    for name in SETS:
        with np.load(folder / f"{name}.npz") as held:
            arrays = {key: torch.from_numpy(held[key].astype(np.int64)) for key in held.files}
        pieces = arrays["tokens"].split(arrays["sizes"].tolist())
        sizes = arrays["bytes"].tolist()
        documents[name] = [Document(t, n) for t, n in zip(pieces, sizes, strict=True) if len(t)]
        if name == "valid":
            classes = list(arrays["classes"].split(arrays["sizes"].tolist()))
    return Corpus(folder, about["digest"], about, train, tokenizer, documents, classes)


def _config(source: Source, cache: str | None) -> DataConfig:
    return DataConfig(
        source=source.data,
        valid=source.valid,
        tokenizer=source.tokenizer,
        cache=default_cache() if cache is None else cache,
    )


def _parts(source: Source, config: DataConfig) -> dict[str, Part]:
    """The training text and the sets of documents that there are."""
    cache = Path(config.cache).expanduser()
    own = parts(config, cache)
    found = {"train": own["train"], "valid": own["valid"]}
    for name, begins in (("other", source.other_begins), ("long", None)):
        value = getattr(source, name)
        if value is not None:
            elsewhere = DataConfig(source=source.data, test=value, begins=begins, cache=config.cache)
            found[name] = parts(elsewhere, cache)["test"]
    return found


def _save_documents(path: Path, texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, name: str) -> int:
    """Tokens, sizes and bytes of documents, and the classes of their tokens for ``valid``."""
    documents = tokenize(texts, tokenizer) if texts else []
    arrays = {
        "tokens": _joined([d.tokens for d in documents]),
        "sizes": np.array([len(d.tokens) for d in documents]),
        "bytes": np.array([d.num_bytes for d in documents]),
    }
    if name == "valid":
        found = [_classes(text, tokenizer) for text in texts]
        arrays["classes"] = _joined([c for c in found if len(c) > 1]).astype(np.uint8)
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return int(arrays["sizes"].sum() - len(documents))


def _classes(text: str, tokenizer: PreTrainedTokenizerFast) -> Annotated[Tensor, "n"]:
    """Of the tokens of ``tokenize``: a first one that stands for the beginning, then those of the text."""
    offsets = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    first = [] if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None else [(0, 0)]
    return classify(text, [*first, *offsets["offset_mapping"]])


def _joined(pieces: Sequence[Tensor]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return torch.cat([*pieces, torch.zeros(0, dtype=torch.int64)]).to(torch.int32).numpy()


def _described(source: Source, config: DataConfig) -> dict[str, str | None]:
    """What names a source and its text without saying where on a disk it lies."""
    chosen = {name: getattr(source, name) for name in ("data", "valid", "other", "long")}
    short = {name: value if value is None else _short(value) for name, value in chosen.items()}
    bar = Bar(shown=False)
    text = disk.key({name: part.fingerprint(bar) for name, part in _parts(source, config).items()})
    return {**short, "tokenizer": source.tokenizer, "text": text}


def source_digest(source: Source) -> str:
    """A short name for a source, before it is read."""
    return hashlib.sha256(json.dumps(asdict(source), sort_keys=True).encode()).hexdigest()[:8]


def _short(value: str) -> str:
    path = Path(value).expanduser()
    return path.name if path.exists() else value


def _digest(folder: Path) -> str:
    """Of the arrays; compressed files can differ where their content does not."""
    total = hashlib.sha256((folder / "train" / "tokens.bin").read_bytes())
    for name in SETS:
        with np.load(folder / f"{name}.npz") as held:
            for key in sorted(held.files):
                total.update(held[key].astype(np.int64).tobytes())
    return total.hexdigest()[:16]
