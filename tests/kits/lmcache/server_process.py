"""A real LMCache server from an environment of its own; nothing of LMCache is imported here.

`HYBRIDKV_LMCACHE_0_5_6` and `HYBRIDKV_LMCACHE_0_5_7RC2` each hold a command that runs
`libs/lmcache/tests/lmcache_command.py` with that version. All servers of a command are forks of one process that has
imported LMCache.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.lmcache.connection import ServerAddress
from hybridkv.lmcache.http import HttpAddress, HttpError, get_json

START_S = 900.0
"""A server imports torch, and the machine may be busy."""
STOP_S = 60.0


def variable(version: str) -> str:
    """The environment variable that holds the command of a version."""
    return f"HYBRIDKV_LMCACHE_{version.replace('.', '_').upper()}"


def command(version: str) -> list[str] | None:
    """Command that starts `lmcache` of a version; None where it is not installed."""
    return shlex.split(os.environ.get(variable(version), "")) or None


class ServerProcess:
    """One server on loopback.

    Args:
        lmcache: the command.
        directory: where its log goes.
        arguments: more of `lmcache server`.
        address: where it listens, to come back where one was; None for free ports.
    """

    def __init__(
        self,
        lmcache: Sequence[str],
        directory: Path,
        arguments: Sequence[str] = (),
        address: ServerAddress | None = None,
    ) -> None:
        self.address = address or ServerAddress("127.0.0.1", *_free_ports(2))
        self.log_path = directory / f"lmcache-{self.address.port}.log"
        listening = ["--host", "127.0.0.1", "--port", str(self.address.port)]
        http = ["--http-host", "127.0.0.1", "--http-port", str(self.address.http_port)]
        defaults = ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
        self._process = _parent(tuple(lmcache)).fork(
            self.log_path, ["server", *listening, *http, *defaults, *arguments]
        )

    def wait(self) -> ServerProcess:
        """Returns once it answers. `RuntimeError` with the end of its log if it does not."""
        until_s = time.monotonic() + START_S
        http = HttpAddress(self.address.host, self.address.http_port)
        while True:
            try:
                get_json(http, "/healthcheck", 60.0)
                return self
            except HttpError as failure:
                if self._process.has_ended(0.0) or time.monotonic() > until_s:
                    self.kill()
                    raise RuntimeError(f"no server: {failure}\n{self.log()[-4000:]}") from None
                time.sleep(0.1)

    def status(self) -> dict[str, Any]:
        """The server's status page."""
        status: dict[str, Any] = get_json(HttpAddress(self.address.host, self.address.http_port), "/status", 300.0)
        return status

    def log(self) -> str:
        """The server's log."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Stops or continues the server. Returns once a stopped server has stopped all its threads."""
        os.killpg(self._process.pid, number)
        if number == signal.SIGSTOP and not eventually(self._stands_still):
            raise RuntimeError("the server does not stop")

    def _stands_still(self) -> bool:
        threads = Path(f"/proc/{self._process.pid}/task")
        try:
            return all(path.read_text().rpartition(")")[2].startswith(" T") for path in threads.glob("*/stat"))
        except OSError:
            return False  # one has ended just now

    def kill(self) -> None:
        """Ends it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends it as an operator would, and kills it if that takes too long."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        for each in (number, signal.SIGKILL):
            if not self._process.has_ended(0.0):
                os.killpg(self._process.pid, each)
                if each != signal.SIGKILL:
                    # A stopped server receives SIGTERM only once it continues. Before SIGKILL it must not continue: it
                    # would answer.
                    os.killpg(self._process.pid, signal.SIGCONT)
            if self._process.has_ended(STOP_S):
                break

    def __enter__(self) -> ServerProcess:
        return self.wait()

    def __exit__(self, *error: object) -> None:
        self._end(signal.SIGTERM)


class _Fork(NamedTuple):
    """A process that its parent never reaps, so that its pid is not reused."""

    pid: int

    def has_ended(self, within_s: float) -> bool:
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], within_s)[0])
        finally:
            os.close(descriptor)


class _Parent:
    """A process that has imported LMCache and ends with this one, as its forks do."""

    def __init__(self, lmcache: Sequence[str]) -> None:
        # Directory for compiled functions: a package may be read-only.
        self._directory = tempfile.TemporaryDirectory(prefix="lmcache-")
        self._log_path = Path(self._directory.name) / "parent.log"
        # Without the packages of this process.
        packages = os.environ.get("LMCACHE_PYTHONPATH", "")
        ours = {"LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": packages, "NUMBA_CACHE_DIR": self._directory.name}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*lmcache, "forks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ours},
                start_new_session=True,
            )

    def fork(self, log_path: Path, arguments: Sequence[str]) -> _Fork:
        """`RuntimeError` with the end of the log if the parent has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(log_path.absolute()), arguments]).encode() + b"\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(
                f"the parent of the servers has ended:\n{self._log_path.read_text(errors='replace')[-4000:]}"
            )
        return _Fork(int(answer))


_parent = functools.cache(_Parent)


def eventually(is_true: Callable[[], bool], within_s: float = 300.0) -> bool:
    """Whether a state of another process becomes true in time."""
    until_s = time.monotonic() + within_s
    while not is_true():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
