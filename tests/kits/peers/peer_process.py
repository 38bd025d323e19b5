"""A peer in a process of its own, so that it can be stopped and killed.

The child registers regions full of `pattern` and lets them be read. It executes lines of JSON from its standard input
and answers each with a line. It ends with its standard input, so no test leaves one running.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kits.peers import factories
from kits.peers.memory import Bytes, pattern, region_of

ANSWER_TIMEOUT_S = 300.0


class PeerProcess:
    """A process with memory that is read over NIXL. Use it as a context manager."""

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        self.regions = [pattern(number, size, seed) for number, size in enumerate(sizes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        answer = self.send({"do": "register", "sizes": list(sizes), "seed": seed})
        self.capability = base64.b64decode(answer["capability"])

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def send(self, command: dict[str, Any]) -> dict[str, Any]:
        """Sends a command and returns the child's answer. `TimeoutError` if none comes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise TimeoutError(f"the peer does not answer {command}")
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the peer ended at {command}, with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Stops the process, which remains. Returns once it has stopped."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL. Returns once the process has ended."""
        self._process.kill()
        self._process.wait()


def _execute(transport: Any, memory: list[Bytes], command: dict[str, Any]) -> dict[str, Any]:
    match command["do"]:
        case "register":
            first = len(memory)
            sizes = command["sizes"]
            memory += [pattern(number, size, command["seed"]) for number, size in enumerate(sizes, first)]
            regions = [region_of(each) for each in memory[first:]]
            return {"capability": base64.b64encode(transport.register(regions)).decode()}
        case "fill":
            memory[command["region"]][:] = command["value"]
            return {}
        case "deregister":
            transport.deregister(command["regions"])
            return {}
        case other:
            raise ValueError(other)


def _serve() -> None:
    transport = factories.nixl()
    memory: list[Bytes] = []
    pending = b""
    while True:
        if not select.select([0], [], [], 0)[0]:
            transport.wait(0.001)
            continue
        data = os.read(0, 1 << 16)
        if not data:
            # Skips the interpreter's shutdown: how the transport's library behaves there is not tested.
            os._exit(0)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            os.write(1, json.dumps(_execute(transport, memory, json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    _serve()
