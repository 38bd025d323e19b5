"""A page of headless Chromium, controlled with its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket
from patience import wait_until


class Page:
    """One page. `problems` lists exceptions, console errors, and requests that failed or left this machine."""

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=120, suppress_origin=True)
        self._last_id = 0
        self._is_loaded = False
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Open an address and wait until it is loaded."""
        self._is_loaded = False
        self.call("Page.navigate", url=url)
        while not self._is_loaded:
            self._handle(json.loads(self._socket.recv()))

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        wait_until(lambda: bool(self.value(expression)), expression)

    def picture(self, file: Path) -> None:
        """Write a screenshot as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 800
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._last_id:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._handle(message)

    def close(self) -> None:
        self._socket.close()

    def _handle(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {parameters['exceptionDetails']['text']}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"console: {parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("http://127.0.0.1:", "data:", "blob:")):
                self.problems.append(f"left this machine: {url}")


@contextlib.contextmanager
def running_browser(program: Path, directory: Path) -> Iterator[Page]:
    """Start the browser with an empty profile below `directory`, and stop it at the end of the block."""
    command = [str(program), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={directory}", "about:blank"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        chosen = directory / "DevToolsActivePort"
        wait_until(lambda: chosen.is_file() and "\n" in chosen.read_text(), "the port of the browser")
        port = chosen.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as reply:
            [target] = [entry for entry in json.load(reply) if entry["type"] == "page"]
        page = Page(target["webSocketDebuggerUrl"])
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)
