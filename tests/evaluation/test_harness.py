"""The harness: who knows the answers gets 100 %, the opposite 0 %, whatever form the rows have."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from pyarrow import parquet

import stablemask.hf
from stablemask.evaluation.harness import TASKS, run_downstream
from tests import text
from tests.model import tiny

Rows = list[dict[str, Any]]

HUB: dict[str, Rows] = {
    "lambada_openai": [{"text": "The fox jumps over the dog."}, {"text": "What falls from the sky is snow"}],
    "piqa": [
        {"goal": "How to melt snow?", "sol1": "Cool it.", "sol2": "Warm it up.", "label": 1},
        {"goal": "How to dry a dog?", "sol1": "With a towel.", "sol2": "With rain.", "label": 0},
    ],
    "arc_easy": [
        {
            "question": "What falls in winter?",
            "choices": {"text": ["fire", "snow", "foxes"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        }
    ],
    "arc_challenge": [
        {
            "question": "What sleeps on?",
            "choices": {"text": ["the lazy dog", "the sky"], "label": ["A", "B"]},
            "answerKey": "A",
        }
    ],
    "openbookqa": [
        {
            "question_stem": "A fox is",
            "choices": {"text": ["red", "a tree", "rain", "blue"], "label": ["A", "B", "C", "D"]},
            "answerKey": "A",
        }
    ],
    "winogrande": [
        {
            "sentence": "The fox jumped over the dog because _ slept.",
            "option1": "the fox",
            "option2": "the dog",
            "answer": "2",
        },
        {
            "sentence": "The snow hid the tree since _ was deep.",
            "option1": "the snow",
            "option2": "the tree",
            "answer": "1",
        },
    ],
}
FOUNDRY: dict[str, Rows] = {
    "lambada_openai": [
        {"context": "The fox jumps over the", "continuation": "dog."},
        {"context": "What falls from the sky is", "continuation": "snow"},
    ],
    "piqa": [
        {"query": "Question: How to melt snow?\n", "choices": ["Cool it.", "Warm it up."], "gold": 1},
        {"query": "Question: How to dry a dog?\n", "choices": ["With a towel.", "With rain."], "gold": 0},
    ],
    "arc_easy": [
        {"query": "Question: What falls in winter?", "choices": ["fire", "snow", "foxes"], "gold": 1}
    ],
    "arc_challenge": [
        {"query": "Question: What sleeps on?", "choices": ["the lazy dog", "the sky"], "gold": 0}
    ],
    "openbookqa": [{"query": "A fox is", "choices": ["red", "a tree", "rain", "blue"], "gold": 0}],
    "winogrande": [
        {
            "context_options": [
                "The fox jumped over the dog because the fox",
                "The fox jumped over the dog because the dog",
            ],
            "continuation": "slept.",
            "gold": 1,
        },
        {
            "context_options": [
                "The snow hid the tree since the snow",
                "The snow hid the tree since the tree",
            ],
            "continuation": "was deep.",
            "gold": 0,
        },
    ],
}
ANSWERS = {
    ("The fox jumps over the", " dog."),
    ("What falls from the sky is", " snow"),
    ("Question: How to melt snow?\nAnswer:", " Warm it up."),
    ("Question: How to dry a dog?\nAnswer:", " With a towel."),
    ("Question: What falls in winter?\nAnswer:", " snow"),
    ("Question: What sleeps on?\nAnswer:", " the lazy dog"),
    ("A fox is", " red"),
    ("The fox jumped over the dog because the dog", " slept."),
    ("The snow hid the tree since the snow", " was deep."),
}
QUESTIONS = {
    "lambada_openai": 2,
    "piqa": 4,
    "arc_easy": 3,
    "arc_challenge": 2,
    "openbookqa": 4,
    "winogrande": 4,
}


class Knows(LM):
    """Scores the written-down answers with ``right`` and everything else with ``wrong``."""

    def __init__(self, right: float, wrong: float) -> None:
        super().__init__()
        self.right, self.wrong = right, wrong
        self.asked: list[tuple[str, str]] = []

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        scores = [self.right if request.args in ANSWERS else self.wrong for request in requests]
        return [(score, score == max(self.right, self.wrong)) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError


def write(folder: Path, rows: dict[str, Rows], ending: str = ".jsonl") -> Path:
    for task, its_rows in rows.items():
        path = folder / f"{task}{ending}"
        lines = "".join(json.dumps(row) + "\n" for row in its_rows)
        if ending == ".parquet":
            parquet.write_table(pa.Table.from_pylist(its_rows), path)
        elif ending == ".jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        else:
            path.write_text(lines, encoding="utf-8")
    return folder


@pytest.mark.parametrize("rows", [HUB, FOUNDRY], ids=["hub", "llm-foundry"])
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_who_knows_the_answers_gets_everything(rows: dict[str, Rows], ending: str, tmp_path: Path) -> None:
    data = write(tmp_path, rows, ending)
    knows, inverse = Knows(0.0, -10.0), Knows(-10.0, 0.0)
    all_right, all_wrong = (dict(run_downstream(scorer, data=data)) for scorer in (knows, inverse))
    assert {name.split("/")[0] for name in all_right} == set(TASKS)
    assert len(knows.asked) == sum(QUESTIONS.values())
    for task in TASKS:
        accuracies = [name for name in all_right if name in (f"{task}/acc", f"{task}/acc_norm")]
        assert f"{task}/acc" in accuracies
        assert [all_right[name] for name in accuracies] == [1.0] * len(accuracies)
        assert [all_wrong[name] for name in accuracies] == [0.0] * len(accuracies)
    assert all_right["lambada_openai/perplexity"] == 1.0
    assert all_wrong["lambada_openai/perplexity"] == pytest.approx(math.exp(10.0))


def test_both_forms_ask_the_same_questions(tmp_path: Path) -> None:
    asked = []
    for name, rows in (("hub", HUB), ("foundry", FOUNDRY)):
        (tmp_path / name).mkdir()
        scorer = Knows(0.0, -1.0)
        list(run_downstream(scorer, data=write(tmp_path / name, rows)))
        asked.append(scorer.asked)
    assert asked[0] == asked[1]


def test_limit_takes_the_first_questions(tmp_path: Path) -> None:
    scorer = Knows(0.0, -1.0)
    list(run_downstream(scorer, tasks=["piqa"], data=write(tmp_path, HUB), limit=1))
    assert {context for context, _ in scorer.asked} == {"Question: How to melt snow?\nAnswer:"}


@pytest.mark.parametrize("position", ["rope", "t5"])
def test_a_model_is_scored_whatever_the_batches(position: str, tmp_path: Path) -> None:
    model = tiny.model(position, vocab_size=text.VOCABULARY, max_position_embeddings=512).train()
    data = write(tmp_path, FOUNDRY)
    scores = [
        dict(run_downstream(model, text.tokenizer(), data=data, batch_size=size)) for size in (1, 3, 3, 8)
    ]
    assert model.training
    assert scores[1] == scores[2]
    for others in scores[1:]:
        assert others == pytest.approx(scores[0], rel=1e-6)
    model.eval()
    log_likelihoods = [_log_likelihood(model, context, word) for context, word in list(_lambada())]
    perplexity = math.exp(-sum(log_likelihoods) / len(log_likelihoods))
    assert scores[0]["lambada_openai/perplexity"] == pytest.approx(perplexity, rel=1e-5)


def _lambada() -> list[tuple[str, str]]:
    return [(row["context"], " " + row["continuation"]) for row in FOUNDRY["lambada_openai"]]


def _log_likelihood(model: torch.nn.Module, context: str, word: str) -> float:
    ids = [text.tokenizer()(part)["input_ids"] for part in (context, word)]
    both = torch.tensor([ids[0] + ids[1]])
    with torch.no_grad():
        logs = model(both).logits.double().log_softmax(-1)[0]
    first = len(ids[0])
    return sum(float(logs[i - 1, both[0, i]]) for i in range(first, both.shape[1]))


def test_folders_of_both_doors(tmp_path: Path) -> None:
    data = write(tmp_path, FOUNDRY)
    ours = tiny.model(vocab_size=text.VOCABULARY, max_position_embeddings=512).float()
    enabled = text.llama()
    plain = dict(run_downstream(enabled, text.tokenizer(), tasks=["lambada_openai"], data=data))
    stablemask.hf.enable(enabled, gamma=0.5, horizon=16)
    for name, model in (("ours", ours), ("enabled", enabled)):
        folder = tmp_path / name
        model.save_pretrained(folder)
        text.tokenizer().save_pretrained(folder)
        from_folder, from_object = (
            dict(run_downstream(*given, tasks=["lambada_openai"], data=data))
            for given in ((folder,), (model, text.tokenizer()))
        )
        assert from_folder == pytest.approx(from_object, rel=1e-6)
        assert from_folder["lambada_openai/perplexity"] != plain["lambada_openai/perplexity"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["hellaswag"]}, "tasks: got hellaswag; allowed: lambada_openai, piqa"),
        ({"limit": 0}, "limit: got 0; allowed"),
        ({"batch_size": 0}, "batch_size: got 0; allowed"),
        ({"tasks": ["openbookqa"]}, "no file for openbookqa; allowed: one of openbookqa.jsonl"),
        (
            {"tasks": ["piqa"]},
            r"piqa.jsonl, row 1: got the columns a; allowed: goal, sol1, sol2, label as on",
        ),
        ({"tasks": ["lambada_openai"]}, "row 2: continuation: got 'two words'; allowed: one word"),
        ({"tasks": ["winogrande"]}, "has winogrande.jsonl, winogrande.parquet; allowed: one of"),
    ],
)
def test_bad_arguments_and_files(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    wrong = [FOUNDRY["lambada_openai"][0], {"context": "a", "continuation": "two words"}]
    write(tmp_path, {"piqa": [{"a": 1}], "lambada_openai": wrong, "winogrande": FOUNDRY["winogrande"]})
    write(tmp_path, {"winogrande": FOUNDRY["winogrande"]}, ".parquet")
    with pytest.raises(ValueError, match=message):
        list(run_downstream(Knows(0.0, -1.0), data=tmp_path, **options))


def test_a_model_needs_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer: got None"):
        list(run_downstream(tiny.model(), tasks=["piqa"], data=write(tmp_path, HUB)))
