"""Drives a headless Chromium over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

LIMIT_S = 90.0


def find_chromium() -> str | None:
    """Return the path of Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "chrome", "chromium-headless-shell")
    return next(filter(None, map(shutil.which, names)), None)


class Tab:
    """A tab: navigates, evaluates expressions, and keeps console errors and exceptions."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"]))
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end_s = time.monotonic() + LIMIT_S
        while not self.value(expression):
            assert time.monotonic() < end_s, f"{expression} did not become true"
            time.sleep(0.1)

    def open(self, address: str, width: int = 1200, height: int = 900) -> None:
        """Open an address in a window of this size."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and the preferred colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """Press and release a key."""
        number = {"windowsVirtualKeyCode": 9} if key == "Tab" else {}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text, **number)

    def type(self, text: str) -> None:
        """Type a text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def _around(self, selector: str) -> dict[str, float]:
        boxes = self.value(f"""[...document.querySelectorAll({selector!r})]
            .map((one) => one.getBoundingClientRect().toJSON())""")
        left, top = (min(box[side] for box in boxes) for side in ("left", "top"))
        right, bottom = (max(box[side] for box in boxes) for side in ("right", "bottom"))
        size = {"width": right - left + 16, "height": bottom - top + 16}
        return {"x": left - 8, "y": top - 8, **size}

    def picture(self, path: Path, selector: str = "") -> None:
        """Write a screenshot of the window as PNG, or of what the elements of a selector cover."""
        clip = {"clip": {**self._around(selector), "scale": 1}} if selector else {}
        data = self.call("Page.captureScreenshot", format="png", **clip)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a profile folder, and yield its first tab."""
    command = find_chromium()
    assert command is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    with subprocess.Popen(
        [command, *flags, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            port_file = profile / "DevToolsActivePort"
            end_s = time.monotonic() + LIMIT_S
            while not port_file.exists() or not port_file.read_text().strip():
                assert process.poll() is None, "Chromium has ended"
                assert time.monotonic() < end_s
                time.sleep(0.1)
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=LIMIT_S) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
