"""A real server process, asked by a real client, answers what ``generate`` gives, and refuses the rest."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from transformers import PreTrainedModel

import stablemask.hf
from stablemask.cli import serve
from stablemask.hf.serving import build_app, why_not_continuous
from stablemask.model.configuration import POSITIONS, REMEDIES
from tests import text
from tests.model import tiny
from tests.server import started

CONTEXT = 96
PROMPTS = ["The quick brown", "A", "snow, and sometimes rain", "Question: what?\nAnswer:", "fox " * 12]


class Server(NamedTuple):
    """A running server and the model that it serves."""

    url: str
    name: str
    model: PreTrainedModel
    client: openai.OpenAI

    def complete(self, prompt: str, tokens: int = 8, *, stream: bool = False, **options: Any) -> str:
        ask = self.client.completions.create
        options |= {"model": self.name, "prompt": prompt, "max_tokens": tokens}
        if not stream:
            return ask(**options).choices[0].text
        return "".join(chunk.choices[0].text or "" for chunk in ask(**options, stream=True))

    def chat(self, content: str, *, stream: bool = False) -> str:
        ask = self.client.chat.completions.create
        messages: Any = [{"role": "user", "content": content}]
        options: dict[str, Any] = {"model": self.name, "messages": messages, "max_tokens": 8}
        if not stream:
            return ask(**options).choices[0].message.content or ""
        return "".join(chunk.choices[0].delta.content or "" for chunk in ask(**options, stream=True))

    def expected(self, prompt: str, tokens: int = 8, **options: Any) -> str:
        ids = text.tokenizer()(prompt, return_tensors="pt")
        options = {"do_sample": False, "max_new_tokens": tokens} | options
        out = self.model.generate(**ids, **options)
        return str(text.tokenizer().decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        """The status and the text of the answer, whatever the body is."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", body, headers)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - as above
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def save(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    text.tokenizer().save_pretrained(folder)
    return folder


def ours(**settings: Any) -> PreTrainedModel:
    sizes = {"vocab_size": text.VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": 1}
    return tiny.model(**{**sizes, **settings}).float()


@pytest.fixture(scope="module", params=["ours", "enabled"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param == "ours":
        model = ours()
    else:
        model = text.llama()
        model.config.max_position_embeddings = CONTEXT
        stablemask.hf.enable(model, gamma=0.5, horizon=16)
    folder = save(tmp_path_factory.mktemp(request.param) / "a-model", model)
    with (
        started(folder, "--port", "0") as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield Server(url, "a-model", model, client)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_generate(server: Server, stream: bool) -> None:
    expected = [server.expected(prompt) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    assert [server.complete(prompt, stream=stream) for prompt in PROMPTS] == expected
    chats = [f"user: {prompt}\nassistant:" for prompt in PROMPTS]
    assert [server.chat(prompt, stream=stream) for prompt in PROMPTS] == list(map(server.expected, chats))


def test_requests_at_the_same_time(server: Server) -> None:
    asked = [(prompt * (1 + i % 2), 3 + i) for i in range(4) for prompt in PROMPTS[:4]]
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(server.complete, prompt, tokens, stream=i % 2 == 0)
            for i, (prompt, tokens) in enumerate(asked)
        ]
    assert [answer.result() for answer in answers] == [server.expected(*request) for request in asked]


def test_a_short_stream_is_not_lost(server: Server) -> None:
    expected = server.expected("A", 1)
    assert [server.complete("A", 1, stream=True) for _ in range(20)] == [expected] * 20


def test_the_same_request_id_twice(server: Server) -> None:
    expected = server.expected("The", 20)
    headers = {"x-request-id": "mine"}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.complete, "The", 20, extra_headers=headers) for _ in range(4)]
    assert [answer.result() for answer in asked] == [expected] * 4


def test_an_answer_ends_with_the_context(server: Server) -> None:
    length = len(text.tokenizer()("A")["input_ids"])
    for options in ({"max_tokens": 1000}, {}):
        answer = server.client.completions.create(model=server.name, prompt="A", **options)
        room = CONTEXT - length
        expected = server.expected("A", room)
        assert answer.choices[0].text == expected
        assert answer.usage
        assert answer.usage.prompt_tokens == length
        if answer.usage.completion_tokens == room:
            assert answer.choices[0].finish_reason == "length"


def test_the_one_model_is_listed(server: Server) -> None:
    assert [model.id for model in server.client.models.list()] == [server.name]


def test_sampling_and_stops(server: Server) -> None:
    assert server.complete("A", temperature=0) == server.expected("A")
    if why_not_continuous(server.model) is None:
        for option in ({"temperature": 0.7}, {"top_p": 0.5}, {"stop": ["x"]}):
            with pytest.raises(openai.BadRequestError, match="--batching sequential"):
                server.complete("A", **option)
        return
    torch.manual_seed(5)
    sampled = server.expected("A", 20, do_sample=True, temperature=0.7)
    assert server.complete("A", 20, temperature=0.7, seed=5) == sampled != server.expected("A", 20)
    stop = server.expected("A", 20)[4:6]
    stopped = server.expected("A", 20, stop_strings=[stop], tokenizer=text.tokenizer())
    assert server.complete("A", 20, stop=stop) == stopped != server.expected("A", 20)


CHAT = {"messages": [{"role": "user", "content": "A"}]}
BAD: list[tuple[str, object]] = [
    ("completions", b"{"),
    ("completions", b"[1]"),
    ("completions", b"\xff"),
    ("completions", {}),
    ("completions", {"prompt": ""}),
    ("completions", {"prompt": "é"}),
    ("completions", {"prompt": "\ud800"}),
    ("completions", {"prompt": "A" * 500}),
    ("completions", {"prompt": "A" * 500, "stream": True}),
    ("completions", {"prompt": ["A"]}),
    ("completions", {"prompt": [1, 2]}),
    ("completions", {"prompt": None}),
    ("completions", {"prompt": "A", "max_tokens": 0}),
    ("completions", {"prompt": "A", "max_tokens": "8"}),
    ("completions", {"prompt": "A", "max_tokens": 2.5}),
    ("completions", {"prompt": "A", "temperature": -1}),
    ("completions", {"prompt": "A", "temperature": "hot"}),
    ("completions", {"prompt": "A", "top_p": 0}),
    ("completions", {"prompt": "A", "seed": -1}),
    ("completions", {"prompt": "A", "stop": []}),
    ("completions", {"prompt": "A", "stream": "yes"}),
    ("completions", {"prompt": "A", "n": 2}),
    ("completions", {"prompt": "A", "logprobs": 3}),
    ("completions", {"prompt": "A", "echo": True}),
    ("completions", {"prompt": "A", "frequency_penalty": 1}),
    ("completions", {"prompt": "A", "generation_config": "{"}),
    ("completions", {"prompt": "A", "model": "gpt2"}),
    ("completions", {"prompt": "A", "model": 3}),
    ("completions", {"prompt": "A", "model": None}),
    ("completions", {"prompt": "A", "unheard_of": 1}),
    ("chat/completions", {}),
    ("chat/completions", {"messages": []}),
    ("chat/completions", {"messages": "A"}),
    ("chat/completions", {"messages": [{"role": "user"}]}),
    ("chat/completions", {"messages": [{"content": "A"}]}),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "A"}]}),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}),
    ("chat/completions", {**CHAT, "chat_template_kwargs": 3}),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    ("responses", {"input": "A"}),
    ("../reset", {}),
    ("../load_model", {"model": "gpt2"}),
]


def test_bad_requests_are_refused_and_do_no_harm(server: Server) -> None:
    expected = server.expected("A")
    for path, body in BAD:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = server.post(path, sent)
        assert 400 <= status < 500, (path, body, status, answer)
        assert json.loads(answer)["error"]["message"], (path, body)
    assert server.complete("A") == expected
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/health", timeout=60) as answer:  # noqa: S310
        assert json.load(answer) == {"status": "ok"}


def test_too_long_prompts_name_the_limit(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=rf"allowed: 1 to {CONTEXT - 1}"):
        server.complete("A" * 500)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (None, {}, "folder: .* has no config.json"),
        (lambda: ours(position="alibi"), {"batching": "continuous"}, "position 'alibi' does not work"),
        (ours, {"context": CONTEXT + 1}, f"context: got {CONTEXT + 1}; allowed: 2 to {CONTEXT}"),
        (ours, {"sequences": 0}, "sequences: got 0; allowed"),
    ],
)
def test_what_cannot_be_served_is_not_started(
    make: Any, options: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path if make is None else save(tmp_path, make())
    with pytest.raises(ValueError, match=message):
        build_app(folder, **options)
    assert serve.run(serve.Options(folder, **options)) == 2
    assert "stablemask serve: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind"), [*(("position", k) for k in POSITIONS), *(("remedy", k) for k in REMEDIES)]
)
def test_continuous_batching_is_said_to_be_what_it_is(name: str, kind: str) -> None:
    model = tiny.model(**{name: kind})
    if why_not_continuous(model) is None:
        model.init_continuous_batching()
    else:
        with pytest.raises(ValueError, match="allowed with continuous batching"):
            model.init_continuous_batching()
