"""A real Prometheus server on loopback.

Where the programs are comes from HYBRIDKV_PROMETHEUS and HYBRIDKV_PROMTOOL.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import patience

START_DEADLINE_S: Final = patience.seconds(6.0)
STOP_DEADLINE_S: Final = patience.seconds(2.0)
REPLY_DEADLINE_S: Final = patience.seconds(3.0)
SCRAPE_INTERVAL_S: Final = round(patience.slowness())
"""Also the timeout of a scrape."""
_POLL_S: Final = 0.1
_CONFIGURATION: Final = """\
global:
  scrape_interval: {interval}s
  scrape_timeout: {interval}s
  evaluation_interval: {interval}s
rule_files:
  - {rules}
scrape_configs:
  - job_name: engine
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer, and its value now."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server. Get one from `running_prometheus`."""

    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def query(self, expression: str) -> list[Series]:
        """The result of an instant query. `ValueError` if the server cannot parse or evaluate it."""
        data = self._get("query", query=expression)
        if data["resultType"] != "vector":
            raise ValueError(f"expected a vector, got {data['resultType']}: {expression}")
        return [Series(result["metric"], float(result["value"][1])) for result in data["result"]]

    def data(self, expression: str) -> list[Series]:
        """Series with a finite value: a ratio of zero to zero has none."""
        return [series for series in self.query(expression) if math.isfinite(series.value)]

    def rules(self) -> list[dict[str, Any]]:
        """Every alert rule, with its state and health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def wait_until(self, is_so: Callable[[Prometheus], bool], what: str) -> None:
        """Query repeatedly until `is_so` is true."""
        try:
            patience.wait_until(lambda: is_so(self), what)
        except AssertionError:
            print(self.log.read_text())
            raise

    def wait_for_scrapes(self, number: int) -> None:
        """Wait until `number` more scrapes have succeeded."""
        before = self._num_scrapes()
        self.wait_until(lambda server: server._num_scrapes() >= before + number, f"{number} more scrapes")

    def _num_scrapes(self) -> float:
        return sum(series.value for series in self.query('sum_over_time(up{job="engine"}[1h])'))

    def _get(self, path: str, **parameters: Any) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=REPLY_DEADLINE_S) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.code} {error.read().decode()}: {parameters}") from error
        if answer["status"] != "success":
            raise ValueError(f"{answer}: {parameters}")
        return answer["data"]


@contextlib.contextmanager
def running_prometheus(directory: Path, target_port: int, rules: Path) -> Iterator[Prometheus]:
    """Run a server that scrapes `127.0.0.1:target_port` repeatedly and evaluates `rules` until the block ends."""
    directory.mkdir()
    configuration = directory / "prometheus.yml"
    configuration.write_text(
        _CONFIGURATION.format(interval=SCRAPE_INTERVAL_S, rules=json.dumps(str(rules.resolve())), port=target_port)
    )
    server = Prometheus(_free_port(), directory / "prometheus.log")
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            [
                Path(os.environ["HYBRIDKV_PROMETHEUS"]).resolve(),
                f"--config.file={configuration}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{server.port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError, ValueError):
                server.query("vector(1)")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus did not start: {process.poll()}\n{server.log.read_text()}")
            time.sleep(_POLL_S)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs promtool, with `text` on its standard input."""
    program = Path(os.environ["HYBRIDKV_PROMTOOL"]).resolve()
    return subprocess.run([program, *arguments], input=text, capture_output=True, text=True, check=False)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
