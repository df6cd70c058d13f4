"""Tokenizers that somebody else made: a folder, or a name on the hub, offline."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from stablemask.data import DataConfig, prepare
from stablemask.data.tokenizer import named_tokenizer
from tests.data.corpus import ODD, write

END = "<|endoftext|>"


def gpt2(folder: Path) -> Path:
    """A folder with the files that GPT-2 has on the hub, and few entries; it says that texts are short."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    made.train_from_iterator(["the text that the text of the tokenizer is"] * 9, trainer)
    folder.mkdir(parents=True)
    made.model.save(str(folder))
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 4}')
    return folder


def words(folder: Path, end: str | None) -> Path:
    """A saved tokenizer of whole words, which puts a token before each text unless it is told not to."""
    first, last, unknown = "<s>", "</s>", "<unk>"
    entries = [first, last, unknown, "one", "two", "three"]
    made = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[(first, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token=first, eos_token=end).save_pretrained(folder)
    return folder


def config_of(tokenizer: str, texts: list[str], folder: Path) -> DataConfig:
    file = str(write(folder / "text.jsonl", texts))
    return DataConfig(file, tokenizer=tokenizer, valid=file, test=file, cache=str(folder / "cache"))


def test_the_files_of_gpt_2(tmp_path: Path) -> None:
    folder = gpt2(tmp_path / "like-gpt2")
    tokenizer = named_tokenizer(str(folder))
    merged = tokenizer.encode("the text")
    assert len(merged) < len("the text")
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == END

    splits = prepare(config_of(str(folder), ODD, tmp_path), 8, progress=False)
    assert splits.tokenizer.get_vocab() == tokenizer.get_vocab()
    ids = splits.train.tokens.stream().tolist()
    texts = splits.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False).split(END)
    assert texts == [*ODD, ""], "whole, whatever length the folder names"


def test_any_other_saved_tokenizer(tmp_path: Path) -> None:
    folder = words(tmp_path / "words", "</s>")
    config = config_of(str(folder), ["one two three two", "three other one"], tmp_path)
    splits = prepare(config, 8, progress=False)
    assert splits.train.tokens.stream().tolist() == [3, 4, 5, 4, 1, 5, 2, 3, 1]


def test_a_tokenizer_that_was_trained_here(tmp_path: Path) -> None:
    texts = [*ODD, "many words " * 9]
    first = prepare(config_of("bpe:300", texts, tmp_path), 8, progress=False)
    first.tokenizer.save_pretrained(tmp_path / "saved")
    again = prepare(config_of(str(tmp_path / "saved"), texts, tmp_path), 8, progress=False)
    assert again.train.tokens.stream().tolist() == first.train.tokens.stream().tolist()


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is downloaded, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["gpt2", "owner/name"])
def test_a_name_on_the_hub(name: str, offline: Path, tmp_path: Path) -> None:
    """The files are where a download leaves them."""
    downloaded = offline / f"models--{name.replace('/', '--')}"
    version = "0" * 40
    folder = gpt2(downloaded / "snapshots" / version)
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text(version)
    splits = prepare(config_of(name, ODD, tmp_path), 8, progress=False)
    of_folder = named_tokenizer(str(folder))
    assert len(splits.tokenizer) == len(of_folder) <= 300
    assert splits.tokenizer.encode("the text") == of_folder.encode("the text")


# What is refused


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "~/no/such/folder"])
def test_a_missing_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^tokenizer: got '{name}'; there is no such folder$"):
        prepare(config_of(name, ["text"], tmp_path), 8, progress=False)


@pytest.mark.parametrize("name", ["no-such", "no/such", "not/a/name", "bytes:3"])
def test_an_unknown_name(name: str, offline: Path, tmp_path: Path) -> None:
    message = f"^tokenizer: got '{name}'; allowed: 'bytes', 'bpe:N', a folder with a tokenizer, or a name on"
    with pytest.raises(ValueError, match=message):
        prepare(config_of(name, ["text"], tmp_path), 8, progress=False)


@pytest.mark.parametrize("name", ["bpe:", "bpe:many", "bpe:256", "bpe:-300", "bpe:3e2"])
def test_a_vocabulary_that_cannot_be(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"^tokenizer: got '{name}'; allowed: bpe:N with N of at least 257, which"
    ):
        DataConfig(tokenizer=name)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"added_tokens": []}'])
def test_a_folder_without_a_tokenizer(content: str | None, offline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        words(folder, "</s>")
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(
        ValueError, match=f"^tokenizer: got '{folder}'; allowed: 'bytes', 'bpe:N', a folder with a"
    ):
        named_tokenizer(str(folder))


def test_a_tokenizer_without_an_exact_fast_form(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    message = "slow', a ByT5Tokenizer; allowed: one with a tokenizer.json"
    with pytest.raises(TypeError, match=message):
        named_tokenizer(str(tmp_path / "slow"))


def test_a_tokenizer_that_cannot_end_a_document(tmp_path: Path) -> None:
    folder = words(tmp_path / "endless", None)
    message = "endless', which has no eos_token; allowed: one that can end a document"
    with pytest.raises(ValueError, match=message):
        named_tokenizer(str(folder))
