"""A headless Chromium, driven over a pipe by its own protocol: no package, no port, no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """The path of a Chromium; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium is installed: pages are not looked at in a browser (apt-get install chromium)")
    return found


class Browser:
    """One page. `errors` collects what its console was told, exceptions, and what could not be loaded."""

    def __init__(self, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        command = [find_browser(), *options, f"--user-data-dir={profile}", "about:blank"]
        # The protocol's pipe is descriptors 3 and 4 of the process.
        wired = f'exec 3<&{to_read} 4>&{to_write} && exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", wired, "bash", *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._id, self._buffer, self._session = 0, b"", ""
        self.errors: list[str] = []
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._id:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(event["params"])[:500])

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Opens a file at a screen of this width, and waits until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        while (event := self._next()).get("method") != "Page.loadEventFired":
            self._note(event)

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
