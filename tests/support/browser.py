"""A real browser for tests: Chromium, driven over the pipe of its DevTools protocol, with real clicks and keys."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if b), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


class Page:
    """One page. ``complaints`` are errors and warnings of the console, including violations of the content policy. ``asked``
    are the addresses that pages requested."""

    def __init__(self, to: int, answers: Any):
        self._to, self._answers, self._number, self._session = to, answers, 0, ""
        self.complaints: list[str] = []
        self.asked: list[str] = []

    def start(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        found = bytearray()
        while (byte := self._answers.read(1)) not in (b"\0", b""):
            found += byte
        assert found, "the browser has gone"
        answer: dict[str, Any] = json.loads(found)
        match answer.get("method"), answer.get("params", {}):
            case "Runtime.exceptionThrown", params:
                self.complaints.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            case "Log.entryAdded", params:
                self.complaints.append(params["entry"]["text"])
            case "Network.requestWillBeSent", params:
                self.asked.append(params["request"]["url"])
        return answer

    def open(self, file: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Open a page at a width, light or dark, and wait until its network is drawn (if it has one)."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.as_uri())
        drawn = "!document.querySelector('#canvas') || document.querySelector('#canvas').classList.contains('ready')"
        self.until(f"document.readyState === 'complete' && location.href.startsWith('file:') && ({drawn})")

    def until(self, condition: str) -> None:
        """Wait for an expression to become true, at most 30 s."""
        end = time.monotonic() + 30
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page (of its promise, if it is one)."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def place(self, selector: str) -> tuple[float, float]:
        """The position of the middle of an element, after scrolling to it."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        """A real click on the middle of an element."""
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def drag(self, selector: str, dx: float, dy: float) -> None:
        """Press on the middle of an element, move, and release."""
        x, y = self.place(selector)
        for kind, way in (("mousePressed", 0), ("mouseMoved", 1), ("mouseReleased", 1)):
            self.mouse(kind, x + way * dx, y + way * dy, button="left", buttons=1, clickCount=1)

    def wheel(self, selector: str, dy: float, *, ctrl: bool) -> None:
        x, y = self.place(selector)
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=dy, modifiers=2 if ctrl else 0)

    def key(self, name: str) -> None:
        """Press a key: a letter, or a name such as ArrowDown, Enter."""
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name)

    def write(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def shot(self, file: Path, *, whole: bool = False) -> None:
        """A picture of the visible part, or of the whole page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty page; ``profile`` is a new folder."""
    assert BROWSER is not None
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()

    def pipes() -> None:
        """Runs in the child: the browser reads from file 3 and writes to file 4. The pipes are first copied to higher numbers,
        since one of them may be 3 or 4."""
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (in_read, out_write)]
        for end, number in zip(ends, (3, 4), strict=True):
            os.dup2(end, number)

    process = subprocess.Popen(
        [BROWSER, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        pass_fds=(3, 4),
        preexec_fn=pipes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(in_read)
    os.close(out_write)
    try:
        with os.fdopen(out_read, "rb") as answers:
            page = Page(in_write, answers)
            page.start()
            yield page
    finally:
        os.close(in_write)
        process.terminate()
        process.wait(timeout=20)
