"""Headless Chromium over the DevTools protocol, on two pipes: nothing but the browser is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from limits import LONGEST_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
WAIT = 60.0  # seconds for an answer
# The browser reads commands from descriptor 3 and answers on 4.
PLACE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One tab. What the page logs, and every request that it makes, is kept."""

    def __init__(self, width: int = 1440, height: int = 900, *, dark: bool = False) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="rlx-chromium-", ignore_cleanup_errors=True)
        read_end, self.to = os.pipe()
        self.answers, write_end = os.pipe()
        options = [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
            f"--user-data-dir={self.folder.name}", "about:blank",
        ]  # fmt: skip
        assert CHROMIUM is not None
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_end, write_end)]
        command = [sys.executable, "-ISc", PLACE, *map(str, ends), CHROMIUM, *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=ends, **quiet)
        for end in ends:
            os.close(end)
        os.close(read_end)
        os.close(write_end)
        self.number, self.buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        self.session = ""
        page = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.to)  # the browser ends with its pipe
        try:
            self.process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.answers)
        self.folder.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self.to, text) :]
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while b"\0" not in self.buffer:
            piece = os.read(self.answers, 1 << 20)
            if not piece or time.monotonic() > end:
                raise RuntimeError("the browser has ended, or does not answer")
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file, and wait until it is drawn."""
        self.events.clear()
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=path.resolve().as_uri() + fragment)
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            time.sleep(0.01)
        self.frames(2)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited where it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def frames(self, count: int) -> None:
        """Wait for some frames."""
        step = "new Promise(done => requestAnimationFrame(done))"
        self.evaluate(f"(async () => {{ for (let i = 0; i < {count}; i++) await {step}; return 0 }})()")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as a user presses it."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)
        event = {"key": key, "text": text, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)
        self.frames(1)

    def write(self, text: str) -> None:
        """Text into what has the focus."""
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    @property
    def requests(self) -> list[str]:
        """What the page has loaded since it was opened, itself included."""
        sent = (e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [url for url in sent if url != "about:blank"]

    @property
    def complaints(self) -> list[str]:
        """Errors, refusals of the content policy and dialogs since it was opened."""
        kinds = (
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
            "Runtime.consoleAPICalled",
        )
        return [json.dumps(e["params"])[:500] for e in self.events if e.get("method") in kinds]
