"""A headless Chromium for tests of pages: opened from the disk, pointed at, clicked on, typed into, asked.

It is driven by its own protocol over two pipes, so nothing but the browser is needed. `make chromium`
installs it on Debian. Without it tests are skipped, except where the environment variable CI is set: there
they fail.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it refuses to run as root with one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
    "about:blank",
)
_KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32, "End": 35, "Home": 36, "PageDown": 34, "PageUp": 33}
_KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def find() -> str:
    """The path of the browser; skips the test that asks, or fails it in CI, where there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    missing = f"no browser: none of {', '.join(NAMES)} is installed; `make chromium` installs it on Debian"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


class Chromium:
    """One tab. What the page loads and what goes wrong in it is kept.

    Attributes:
        requests: The addresses of everything that pages asked for.
        problems: Exceptions, errors and warnings of pages.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._received = b""
        self._count = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol and wait for what it returns."""
        self._count += 1
        message: dict[str, object] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page from the disk, in a window of this size, and wait until it says that it is ready."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.documentElement.dataset.ready === 'yes'")

    def resize(self, width: int, height: int) -> None:
        """Another size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.ask(condition):
            assert time.monotonic() < end, f"never true: {condition}; {self.problems}"
            time.sleep(0.02)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        found = self.ask(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(found, str)
        return found

    def texts(self, selector: str) -> list[str]:
        """What a reader sees of all elements that there are."""
        found = self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")
        assert isinstance(found, list)
        return found

    def point(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """Move the mouse to a place in an element, given as shares of its size; scrolls to it first."""
        x, y = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({ block: 'center', behavior: 'instant' });"
            "const b = e.getBoundingClientRect();"
            f"return [b.left + {across} * b.width, b.top + {down} * b.height]; }})()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Press and release the mouse at a place in an element."""
        x, y = self.point(selector, across, down)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, where the focus is."""
        for key in keys:
            code = {"key": key, "code": "Space" if key == " " else key}
            code |= {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {}
            typed = {"Enter": "\r", " ": " "}.get(key)
            text = {} if typed is None else {"text": typed}
            self.send("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def choose(self, selector: str, value: object) -> None:
        """Choose an option of a list, as if somebody had."""
        self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f"e.value = {json.dumps(str(value))};"
            "e.dispatchEvent(new Event('change', { bubbles: true })); })()"
        )

    def picture(self, *, whole: bool = False) -> bytes:
        """What is in the window, or the whole page, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {_SECONDS:.0f} seconds"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._keep(message.get("method"), message.get("params", {}))
        return message

    def _keep(self, method: str | None, about: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(about["args"]))


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Start the browser; it ends, with its folder, when the block does."""
    path = find()
    pipes = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in _pipes()]  # out of the way of 3 and 4
    to_read, write, read, to_write = pipes
    with TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        actions: list[Any] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, to_read, 3),
            (os.POSIX_SPAWN_DUP2, to_write, 4),
        ]
        arguments = [path, f"--user-data-dir={folder}", *_FLAGS]
        process = os.posix_spawn(
            path, arguments, {**os.environ, "HOME": folder}, file_actions=actions, setsid=True
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Chromium(read, write)
        finally:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(read)
            os.close(write)


def _pipes() -> Iterator[int]:
    """Both ends of the pipe to the browser, then of the one from it; those that are yielded are closed."""
    for _ in range(2):
        ends = os.pipe()
        for end in ends:
            yield end
            os.close(end)
