"""A model of the study, trained and measured: its file tells the truth, and is there whole or not at all."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import stablemask
from stablemask.measuring import threads
from stablemask.reproduce import cells, loop, measurements
from stablemask.reproduce.cells import Conditions, Document, Job, cell_of, path_of, table_of, work
from stablemask.reproduce.judge import metric_of
from stablemask.reproduce.study import Entry, Study, load_study
from tests.reproduce import small

LENGTH = 48  # two ranges of positions
STUDY = small.STUDY.replace("length = 16", f"length = {LENGTH}")
ENTRY = Entry("small/rope/stablemask", 0)


def study_of(folder: Path, text: str = STUDY) -> Study:
    path = folder / "study.toml"
    path.write_text(text, encoding="utf-8")
    return load_study(path)


def job_of(folder: Path, text: str = STUDY) -> Job:
    given = small.job(folder)
    return replace(given, study=study_of(folder, text), weights=folder / "weights")


class Made(NamedTuple):
    job: Job
    path: Path
    document: Document
    model: PreTrainedModel
    shares: list[float]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One cell, and the model that it kept."""
    job = job_of(tmp_path_factory.mktemp("cell"))
    shares: list[float] = []
    path = work(job, ENTRY, shares.append)
    assert job.weights is not None
    model = AutoModelForCausalLM.from_pretrained(job.weights / "small-rope-stablemask")
    return Made(job, path, json.loads(path.read_text(encoding="utf-8")), torch.nn.Module.eval(model), shares)


def windows(tokens: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a text and the tokens to predict."""
    yield from zip(tokens[:-1].split(length), tokens[1:].split(length), strict=True)


@torch.no_grad()
def losses(model: PreTrainedModel, tokens: Tensor, length: int) -> list[Tensor]:
    """Of every window of a document, its losses by position."""
    return [
        F.cross_entropy(model(input_ids=read.unsqueeze(0)).logits[0], wanted, reduction="none").double()
        for read, wanted in windows(tokens, length)
    ]


@pytest.mark.parametrize("name", ["valid", "other"])
def test_losses_of_documents_are_those_of_the_kept_model(made: Made, name: str) -> None:
    nats, tokens, positions = table_of(made.document, name)
    assert positions == ["0-31", "32-47"]
    documents = small.corpus().documents[name]
    assert nats.shape == tokens.shape == (len(documents), 2)
    for row, document in enumerate(documents):
        found = losses(made.model, document.tokens, LENGTH)
        parts = [[part[:32] for part in found], [part[32:] for part in found]]
        assert tokens[row].tolist() == [sum(len(part) for part in group) for group in parts]
        for column, group in enumerate(parts):
            assert float(nats[row, column]) == pytest.approx(float(torch.cat(group).sum()), abs=0.02)


def test_documents_add_up_to_the_mean_loss(made: Made) -> None:
    every = torch.cat(
        [torch.cat(losses(made.model, d.tokens, LENGTH)) for d in small.corpus().documents["valid"]]
    )
    assert metric_of(made.document, "valid/all") == pytest.approx(float(every.mean()), abs=1e-4)
    nats, tokens, _ = table_of(made.document, "valid")
    assert tokens.sum() == len(every)
    assert float(nats.sum() / tokens.sum()) == pytest.approx(made.document["values"]["curve/5"], abs=1e-4)
    other = metric_of(made.document, "other/all")
    assert other is not None
    assert abs(other - float(every.mean())) > 1e-3, "other documents have another loss"


@torch.no_grad()
@pytest.mark.parametrize("times", [1, 16])
def test_loss_past_the_training_length_is_that_of_the_kept_model(made: Made, times: int) -> None:
    (document,) = small.corpus().documents["long"]
    text = document.tokens[: 16 * LENGTH + 1]
    expected = torch.cat(losses(made.model, text, times * LENGTH)).mean()
    assert made.document["values"][f"full/{times}"] == pytest.approx(float(expected), abs=1e-4)


def test_every_metric_is_there_and_a_number(made: Made) -> None:
    values = made.document["values"]
    lengths = {f"{method}/{times}" for method in ("full", "window", "pinned") for times in (1, 2, 4, 8, 16)}
    kinds = ("first", "pseudo", "punctuation", "function words", "digits", "others")
    shares = {"sink rate", *(f"{kind}/last" for kind in kinds)}  # a sequence of 48 has no position 64
    assert set(values) == {f"curve/{k}" for k in range(1, 6)} | lengths | shares
    assert all(math.isfinite(value) for value in values.values())
    assert sum(values[f"{kind}/last"] for kind in kinds) == pytest.approx(1.0, abs=1e-4)
    assert values["curve/5"] < values["curve/1"] - 0.1, "it has learned something"
    assert values["window/1"] == pytest.approx(values["full/1"], abs=1e-5)


def test_curves_have_a_point_for_every_position(made: Made) -> None:
    curves = made.document["curves"]
    assert {name: len(curve) for name, curve in curves.items()} == {
        "training loss": 10,
        **dict.fromkeys(("first", "pseudo", "entropy"), LENGTH),
    }
    assert curves["first"][-1] == pytest.approx(made.document["values"]["first/last"], abs=1e-4)
    assert curves["pseudo"][0] > curves["pseudo"][-1] == 0.0, "N is the training length"


def test_the_file_says_what_made_it(made: Made) -> None:
    document = made.document
    assert document["suite"] == "pretraining"
    assert document["version"] == stablemask.__version__
    assert document["command"] == "a command"
    assert document["source"] == cells.source_digest()
    assert document.get("commit") == cells.source_commit()
    assert document["environment"]["torch"] == torch.__version__
    assert document["seconds"] > 0
    settings = document["settings"]
    assert (settings["group"], settings["seed"], settings["device"], settings["code"]) == (*ENTRY, "cpu", 1)
    assert settings["corpus"] == small.corpus().digest
    assert settings["recipe"]["train"]["length"] == LENGTH
    assert settings["recipe"]["model"]["remedy"] == "stablemask"
    assert settings == json.loads(json.dumps(cell_of(made.job.study, ENTRY, made.job.conditions).settings))
    assert str(made.job.corpus) not in made.path.read_text(encoding="utf-8"), "no path of this machine"


def test_the_text_is_described_once(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = (made.job.results / cells.CORPORA).iterdir()
    assert path.name == f"{small.corpus().digest}.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    assert about == small.corpus().about
    assert about["source"]["valid"] == "valid.jsonl"
    monkeypatch.setattr(cells, "_pretraining", lambda *_: {})
    job = job_of(tmp_path)
    described = job.results / cells.CORPORA / path.name
    described.parent.mkdir(parents=True)
    described.write_text("by hand", encoding="utf-8")
    work(job, ENTRY)
    assert described.read_text(encoding="utf-8") == "by hand"


def test_the_file_is_the_only_one(made: Made) -> None:
    assert made.path == made.job.path(ENTRY)
    results = made.job.results
    assert sorted(results.iterdir()) == sorted([made.path, results / cells.CORPORA])
    assert cells.read_all(results) == [made.document], "what describes the text is no cell"
    assert made.shares == sorted(made.shares)


@pytest.fixture
def without_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_measured", lambda *_: {"values": {}})


def test_shares_of_the_work_are_told(tmp_path: Path, without_measurements: None) -> None:
    text = STUDY.replace("steps = 10", "steps = 60")
    shares: list[float] = []
    work(job_of(tmp_path, text), ENTRY, shares.append)
    assert shares == pytest.approx([0.3, 0.6, 0.9])


def test_weights_open_with_the_auto_classes(made: Made) -> None:
    assert made.job.weights is not None
    folder = made.job.weights / "small-rope-stablemask"
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.remedy, config.horizon) == ("stablemask", "stablemask", LENGTH)
    assert made.model.get_input_embeddings().weight.shape == (small.corpus().vocabulary, 16)


def test_the_same_cell_has_the_same_values_and_another_seed_has_others(tmp_path: Path, made: Made) -> None:
    job = job_of(tmp_path)
    again = json.loads(work(job, ENTRY).read_text(encoding="utf-8"))
    for part in ("settings", "values", "curves", "documents"):
        assert again[part] == made.document[part], part
    assert job.weights is not None
    weights = job.weights / "small-rope-stablemask" / "model.safetensors"
    before = weights.read_bytes()
    other = json.loads(work(job, ENTRY._replace(seed=1)).read_text(encoding="utf-8"))
    assert other["values"]["curve/5"] != again["values"]["curve/5"]
    assert weights.read_bytes() == before, "those of seed 0 are kept"
    assert len(cells.read_all(job.results)) == 2


def test_a_cell_computes_in_one_thread_and_gives_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one process for every core more threads would only be in each other's way."""
    found = []
    monkeypatch.setattr(cells, "_pretraining", lambda *_: found.append(torch.get_num_threads()) or {})
    with threads(2):
        work(job_of(tmp_path), ENTRY)
        assert (found, torch.get_num_threads()) == ([1], 2)


def test_the_digest_of_the_source_is_of_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may be edited while a model is trained."""
    source = ["before"]
    monkeypatch.setattr(cells, "source_digest", lambda: source[0])
    monkeypatch.setattr(cells, "_pretraining", lambda *_: source.insert(0, "after") or {})
    assert json.loads(work(job_of(tmp_path), ENTRY).read_text(encoding="utf-8"))["source"] == "before"


def test_weights_are_kept_only_where_somebody_asked(tmp_path: Path, without_measurements: None) -> None:
    work(replace(job_of(tmp_path), weights=None), ENTRY)
    assert {path.name for path in tmp_path.iterdir()} == {"study.toml", "results"}


@pytest.mark.parametrize(
    ("owner", "name"), [(measurements, "attention"), (loop.torch.optim.AdamW, "step"), (cells, "to_text")]
)
def test_a_cell_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FloatingPointError("broken")

    job = job_of(tmp_path)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(FloatingPointError, match="broken"):
        work(job, ENTRY)
    assert not job.path(ENTRY).exists()
    assert not job.results.exists() or not list(job.results.iterdir())


def test_another_text_than_the_cell_says_is_refused(tmp_path: Path) -> None:
    job = replace(job_of(tmp_path), conditions=Conditions("cpu", "fp32", "0123"))
    with pytest.raises(ValueError, match=f"^corpus: got {small.corpus().digest}; allowed: 0123, as the cell"):
        work(job, ENTRY)
    assert not job.path(ENTRY).exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("code = 1", "code = 2"),
        ("weight_decay = 0.1", "weight_decay = 0.2"),
        ("steps = 10", "steps = 11"),
        ("hidden_size = 16", "hidden_size = 32"),
        ('remedy = "stablemask"', 'remedy = "stablemask"\ngamma = 0.25'),
        ('tokenizer = "bytes"', 'tokenizer = "bpe:300"'),
        ('tokenizer = "bytes"', 'tokenizer = "bytes"\npacking = "documents"'),
    ],
)
def test_what_decides_the_values_changes_the_key(tmp_path: Path, old: str, new: str) -> None:
    assert old in STUDY
    other = study_of(tmp_path, STUDY.replace(old, new))
    assert key(other) != key(study_of(tmp_path))


@pytest.mark.parametrize(
    "conditions",
    [Conditions("cuda", "fp32", "a"), Conditions("cpu", "bf16", "a"), Conditions("cpu", "fp32", "b")],
)
def test_conditions_change_the_key(tmp_path: Path, conditions: Conditions) -> None:
    study = study_of(tmp_path)
    assert key(study, conditions) != key(study, Conditions("cpu", "fp32", "a"))


def key(study: Study, conditions: Conditions | None = None, entry: Entry = ENTRY) -> str:
    return cell_of(study, entry, conditions or small.conditions()).key


def test_group_seed_and_version_change_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(tmp_path)
    others = [ENTRY._replace(seed=1), Entry("small/rope/none", 0), Entry("small/alibi/none", 0)]
    keys = {key(study, entry=entry) for entry in (ENTRY, *others)}
    assert len(keys) == 4
    monkeypatch.setattr(stablemask, "__version__", "another")
    assert key(study) not in keys


def test_where_it_is_made_does_not_change_the_file(tmp_path: Path) -> None:
    """Neither paths nor what is said about them, nor where a recipe would look for its text."""
    job = job_of(tmp_path)
    data = 'source = "elsewhere.txt"\nvalid = "valid.txt"\ncache = "there"\ntokenizer = "bytes"'
    other = Job(
        study_of(tmp_path, STUDY.replace('tokenizer = "bytes"', data)),
        job.conditions,
        corpus=tmp_path / "another",
        results=tmp_path / "more",
        command="another command",
        weights=None,
    )
    assert other.path(ENTRY).name == job.path(ENTRY).name
    assert other.path(ENTRY).parent == tmp_path / "more"
    assert job.path(ENTRY).name.startswith("small-rope-stablemask-0-")


def test_files_of_all_cells_of_the_study_have_names_of_their_own() -> None:
    study = load_study()
    paths = [path_of(Path(), cell_of(study, entry, small.conditions())) for entry in study.entries()]
    assert len(set(paths)) == len(paths)
    assert not any(path.is_absolute() or path.parent != Path() for path in paths)


def test_a_cell_of_the_position_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_POSITION_UPDATES", 3)
    job, entry = job_of(tmp_path), Entry("position/learned/none", 1)
    shares: list[float] = []
    document = json.loads(work(job, entry, shares.append).read_text(encoding="utf-8"))
    assert document["suite"] == "position"
    assert document["settings"]["updates"] == 3
    assert set(document["values"]) == {"mapping", "identification", "odd_even"}, "its table ends at T"
    assert all(0 <= value <= 1 for value in document["values"].values())
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])
    same = replace(job, conditions=Conditions("cpu", "bf16", "another text"))
    assert same.path(entry) == job.path(entry), "it reads no text and multiplies in float32"
    relative = json.loads(work(job, Entry("position/rope/none", 0)).read_text(encoding="utf-8"))
    assert set(relative["values"]) == {
        f"{task}{beyond}" for task in ("mapping", "identification", "odd_even") for beyond in ("", " beyond")
    }
    assert relative["values"]["mapping"] == 1 / 64, "identical outputs have one answer"


def test_text_of_a_document_reads_back() -> None:
    document = {"a": 1, "b": {"c": [1, 2.5, {"d": None}], "e": "ü\n"}, "f": {}, "g": [1]}
    assert json.loads(cells.to_text(document)) == document
    assert '  "c": [1, 2.5, {"d": null}],\n' in cells.to_text(document)
