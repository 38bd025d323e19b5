"""Engine of `peer_engines` in its own process, which a test can stop and kill.

The child executes commands, lines of JSON on its standard input, and answers each with one line. It ends when its
standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

import patience
from peer_engines import CHUNK_BYTES, Engine, chunk_bytes

from hybridkv.peers.transport.nixl import NixlTransport
from hybridkv.tiers import Key, Slot

ANSWER_TIMEOUT_S = patience.seconds(12.0)


class EngineProcess:
    """Context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.port: int = self.tell("port")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def tell(self, do: str, key: Key = b"", number: int = 0) -> Any:
        """Send a command; return the child's answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps({"do": do, "key": key.decode(), "number": number})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)[0], f"no answer to {line}"
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        """Suspend the process with SIGSTOP."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _execute(engine: Engine, do: str, key: Key, number: int) -> Any:
    match do:
        case "port":
            return engine.port
        case "put":
            engine.put(key, chunk_bytes(number, CHUNK_BYTES))
        case "lie":
            # The scheduler's half reports every key as found.
            engine.ram.find = lambda key: Slot(((0, CHUNK_BYTES),))  # type: ignore[method-assign]
        case "forge":
            # The rank's half reports any bytes as sealed for the key.
            engine.arena.sealed_checksum = lambda key, slot: bytes(16)  # type: ignore[method-assign]
        case other:
            raise ValueError(other)
    return None


if __name__ == "__main__":
    made = Engine(make_transport=NixlTransport)
    for text in sys.stdin:
        command = json.loads(text)
        print(json.dumps(_execute(made, command["do"], command["key"].encode(), command["number"])), flush=True)
    os._exit(0)
