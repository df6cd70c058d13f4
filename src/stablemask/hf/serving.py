"""The OpenAI-compatible server of transformers for one model with StableMask.

The server itself is that of ``transformers serve``. What is ours makes it exact or refusing: it opens our
models, it answers for one model and never downloads another, a request is checked in full before it reaches
the model (a field that would be ignored is refused), and nothing longer than the context is generated.
"""

import time
import uuid
from asyncio import Queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException as HTTPError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    ProcessorMixin,
    TokenizersBackend,
)
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    BaseHandler,
    CBGenerateManager,
    CBStreamer,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    Modality,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

import stablemask.model  # noqa: F401 - lets the Auto classes open our folders
from stablemask.hf.config import is_switched
from stablemask.model.configuration import POSITIONS, REMEDIES, StableMaskConfig

Batching = Literal["auto", "continuous", "sequential"]
Text = Annotated[str, Field(min_length=1)]

_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"}
_PAGE = 64  # tokens


class _Request(BaseModel, extra="forbid", strict=True):
    """What both endpoints take. Fields that the server would ignore are not here, so they are refused."""

    model: str
    stream: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    n: Literal[1] | None = None
    user: str | None = None
    stream_options: dict[str, bool] | None = None


class _Completion(_Request):
    prompt: Text


class _Part(BaseModel, extra="forbid", strict=True):
    type: Literal["text"]
    text: str


class _Message(BaseModel, extra="forbid", strict=True):
    role: Text
    content: str | list[_Part]


class _Chat(_Request):
    messages: Annotated[list[_Message], Field(min_length=1)]


class _Handler(BaseHandler):
    """Checks the whole request before anything else happens."""

    schema: type[_Request]

    def _validate_request(self, body: dict[str, Any]) -> None:
        body.setdefault("model", self.model_manager.force_model)
        try:
            self.schema.model_validate(body)
        except ValidationError as error:
            found = _explain(error.errors(include_input=False))
            raise HTTPException(status_code=422, detail=found) from error

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        config = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        sampled = body.get("temperature") != 0 and (body.get("temperature") or body.get("top_p"))
        if sampled:
            config.do_sample = True
        if use_cb and (config.do_sample or body.get("stop") is not None):
            allowed = "greedy requests without them, or a server with --batching sequential"
            raise HTTPException(
                400, f"temperature, top_p, stop: with continuous batching, allowed: {allowed}"
            )
        return config


class _CompletionHandler(_Handler, CompletionHandler):
    schema = _Completion


class _ChatHandler(_Handler, ChatCompletionHandler):
    schema = _Chat


class _Manager(BaseGenerateManager):
    """Hands requests on to transformers, prompt and answer within the context."""

    def __init__(self, inner: GenerateManager | CBGenerateManager, context: int) -> None:
        self.inner = inner
        self.context = context

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | TokenizersBackend,
        inputs: dict[str, Any],
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[Queue[Any], DirectStreamer | CBStreamer]:
        """Check, then stream."""
        self._check(inputs, gen_config)
        request_id = str(uuid.uuid4())  # clients may send the same one twice
        streamer: DirectStreamer | CBStreamer | None = None

        def hand_on(output: GenerationOutput) -> None:
            """Takes what is ready before transformers listens; it would be lost."""
            assert isinstance(streamer, CBStreamer)
            streamer.put(output)
            if output.is_finished():
                streamer.end()

        if isinstance(self.inner, CBGenerateManager):
            assert self.inner._cb is not None
            self.inner._cb.register_result_handler(request_id, hand_on)
        queue, streamer = self.inner.generate_streaming(
            model, processor, inputs, gen_config, request_id, response_parser
        )
        return queue, streamer

    async def generate_non_streaming(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | TokenizersBackend,
        inputs: dict[str, Any],
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, Any]:
        """Check, then generate."""
        self._check(inputs, gen_config)
        request_id = str(uuid.uuid4())
        return await self.inner.generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def stop(self) -> None:
        """Leave what is not finished."""
        self.inner.stop()

    def _check(self, inputs: dict[str, Any], gen_config: GenerationConfig) -> None:
        """Refuse a prompt that leaves no room; end the answer where the context ends, like any server."""
        ids = inputs["input_ids"]
        length = len(ids) if isinstance(ids, list) else ids.shape[-1]
        if not 1 <= length < self.context:
            raise HTTPException(400, f"prompt: got {length} tokens; allowed: 1 to {self.context - 1}")
        asked = gen_config.max_new_tokens
        assert asked is not None
        gen_config.max_new_tokens = min(asked, self.context - length)


class _State(GenerationState):
    """One model, one manager."""

    def __init__(self, manager: _Manager) -> None:
        continuous = isinstance(manager.inner, CBGenerateManager)
        super().__init__(continuous_batching=continuous)
        self.manager = manager
        if isinstance(manager.inner, CBGenerateManager):
            self._cb_manager = manager.inner

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:  # noqa: ARG002
        return self.manager


class _Models(ModelManager):
    """One model, loaded before the server starts, that stays."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: TokenizersBackend) -> None:
        super().__init__(device=str(model.device))
        self.force_model = name
        self.loaded_models[self.process_model_name(name)] = TimedModel(model, -1, tokenizer)
        self.listed = [{"id": name, "object": "model", "created": int(time.time()), "owned_by": ""}]

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]  # noqa: ARG002
        return self.listed

    @staticmethod
    def get_model_modality(model: object, processor: object = None) -> Modality:  # noqa: ARG004
        return Modality.LLM


@dataclass(frozen=True)
class Served:
    """A server that is ready to run, and what a user wants to know about it."""

    app: FastAPI
    name: str
    context: int
    batching: Batching
    close: Callable[[], None]


def build_app(
    folder: Path,
    *,
    batching: Batching = "auto",
    context: int | None = None,
    sequences: int = 8,
    device: str = "auto",
    dtype: str = "auto",
) -> Served:
    """Load the model in a folder and build its server.

    Args:
        folder: Of a model with StableMask, ours or of an existing architecture, with its tokenizer.
        batching: "continuous" computes concurrent requests together, "sequential" one after the other;
            "auto" takes the first where the model can.
        context: Tokens that prompt and answer have together; by default ``max_position_embeddings``.
        sequences: How many sequences the cache of continuous batching holds at full length.
        device: Where the model goes; "auto" takes a GPU if there is one.
        dtype: Of the weights; "auto" takes what they were saved in.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"folder: {folder} has no config.json; allowed: the folder of a saved model")
    if sequences < 1:
        raise ValueError(f"sequences: got {sequences}; allowed: integers ≥ 1")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not isinstance(tokenizer, TokenizersBackend):
        raise TypeError(f"folder: the tokenizer is a {type(tokenizer).__name__}; allowed: fast tokenizers")
    reason = why_not_continuous(model)
    if batching == "continuous" and reason:
        raise ValueError(f"batching: got 'continuous'; {reason}")
    chosen: Batching = "sequential" if reason or batching == "sequential" else "continuous"
    limit = model.config.max_position_embeddings
    if context is not None and not 2 <= context <= limit:
        raise ValueError(f"context: got {context}; allowed: 2 to {limit} = max_position_embeddings")
    context = limit if context is None else context
    inner = _continuous(model, context, sequences) if chosen == "continuous" else GenerateManager()
    manager = _Manager(inner, context)
    name = folder.resolve().name
    app = _build(_Models(name, model, tokenizer), _State(manager))
    return Served(app, name, context, chosen, manager.stop)


def why_not_continuous(model: PreTrainedModel) -> str | None:
    """Why continuous batching cannot serve a model; None where it can."""
    config = model.config
    if is_switched(config):
        return "transformers allows no attention but its own with continuous batching"
    if isinstance(config, StableMaskConfig):
        for setting, kinds in (("position", POSITIONS), ("remedy", REMEDIES)):
            kind = getattr(config, setting)
            if not kinds[kind].continuous_batching:
                return f"{setting} {kind!r} does not work with the paged cache of continuous batching"
    if model.generation_config.do_sample:
        return "the model's generation_config.json samples, and settings cannot differ between requests"
    return None


def _continuous(model: PreTrainedModel, context: int, sequences: int) -> CBGenerateManager:
    """Continuous batching, started, with a cache for that many sequences and no more."""
    pages = -(-context // _PAGE)
    manager = CBGenerateManager(
        ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=pages * sequences,
            max_batch_tokens=max(256, sequences),
            max_requests_per_batch=sequences,
            auto_switch_to_flash=False,
        )
    )
    assert model.generation_config is not None
    manager.init_cb(model, GenerationConfig(**{**model.generation_config.to_dict(), "use_cache": False}))
    return manager


def _build(models: _Models, state: _State) -> FastAPI:
    unused: Any = None
    app = build_server(
        models,
        _ChatHandler(models, state),
        completion_handler=_CompletionHandler(models, state),
        response_handler=unused,
        transcription_handler=unused,
        systemone_handler=unused,
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in _PATHS]
    for kind in (HTTPError, RequestValidationError, ValueError, TemplateError):
        app.add_exception_handler(kind, _refuse)
    return app


def _refuse(_request: object, error: Exception) -> JSONResponse:
    """The error as OpenAI's clients read it. The last two kinds come from tokenizer and chat template."""
    if isinstance(error, HTTPError):
        status, message = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):
        status, message = 422, _explain(error.errors())
    else:
        status, message = 400, str(error)
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)


def _explain(errors: Sequence[Any]) -> str:
    return "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in errors)
