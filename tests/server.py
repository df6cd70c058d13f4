"""A server process as a user starts it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def started(folder: Path, *options: str) -> Iterator[str]:
    """The URL of a server, which has to end by itself when it is interrupted."""
    command = [sys.executable, "-m", "stablemask.cli", "serve", str(folder), *options]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "PYTHONUNBUFFERED": "1",
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        line = next((line for line in process.stdout if "Serving" in line), None)
        assert line, f"the server ended with {process.wait()}"
        yield line.split(" at ")[1].split(",")[0]
        assert process.poll() is None, "the server died"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
