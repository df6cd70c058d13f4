"""``stablemask serve``: an OpenAI-compatible server for one model with StableMask."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
import uvicorn

from stablemask.cli.terminal import make_console
from stablemask.hf.serving import Batching, build_app


@dataclass(frozen=True)
class Options:
    """Serve the model in a folder with the OpenAI interface: completions, chat, streaming.

    The folder is what save_pretrained wrote, with the tokenizer: our decoder, or an existing architecture
    with StableMask. Any OpenAI client can ask it; the model's name is the folder's.

    Args:
        folder: Folder of the model and its tokenizer.
        port: 0 takes a free one.
        host: Address to listen on. There is no password: whoever reaches it may use it.
        batching: Concurrent requests together (continuous) or one after the other (sequential). auto is
            continuous where the model can: our decoder, but for alibi, t5, urpe and artificial tokens.
        context: Most tokens of prompt and answer together; by default max_position_embeddings.
        sequences: So many sequences of that length fit into the cache of continuous batching.
        device: auto, cpu or cuda.
        dtype: Of the weights: auto (as saved), float32, bfloat16 or float16.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    port: int = 8000
    host: str = "127.0.0.1"
    batching: Batching = "auto"
    context: int | None = None
    sequences: int = 8
    device: str = "auto"
    dtype: str = "auto"


def run(options: Options) -> int:
    """Serve until interrupted. 0: it was; 2: it could not start."""
    console = make_console()
    try:
        served = build_app(
            options.folder,
            batching=options.batching,
            context=options.context,
            sequences=options.sequences,
            device=options.device,
            dtype=options.dtype,
        )
    except (ValueError, TypeError, OSError) as error:
        console.print(f"stablemask serve: {error}", soft_wrap=True, markup=False)
        return 2
    config = uvicorn.Config(served.app, host=options.host, port=options.port, log_level="warning")
    socket = config.bind_socket()
    host, port = socket.getsockname()[:2]
    console.print(
        f"Serving {served.name!r} at http://{host}:{port}/v1, {served.context} tokens of context, "
        f"{served.batching} batching. Ctrl-C ends it.",
        soft_wrap=True,
    )
    try:
        uvicorn.Server(config).run(sockets=[socket])
    except KeyboardInterrupt:  # raised again after the last answers are out
        pass
    finally:
        served.close()
    return 0
