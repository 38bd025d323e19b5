"""Both sides of a process that is controlled by lines of JSON.

Between two lines, the process steps its engine while the engine has requests.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from harness import Engine

PAUSE_S = 0.001


class DrivenProcess:
    """One process of this interpreter.

    Args:
        script: writes "ready" when it accepts commands.
        arguments: of the script.
        log: a file for all other output.
        paths: directories of packages, after those of this process.
        environment: additional variables.
    """

    def __init__(
        self,
        script: Path,
        arguments: Mapping[str, object],
        log: Path,
        paths: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        here = [path for path in sys.path if path]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *(f"--{name}={value}" for name, value in arguments.items())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join([*here, *paths])} | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def wait_until_ready(self) -> None:
        assert self._hear() == "ready"

    def ask(self, do: str, **values: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._hear())

    def rest(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.wake()
        self._process.kill()
        self._process.wait()

    def leave(self, within_s: float) -> None:
        """Let the process end by itself, as an engine that is shut down; kill it on a timeout."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.end()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"an engine ended:\n{self._log.read_text(errors='replace')[-4000:]}")
        return line


def take_answers() -> IO[str]:
    """The stream for answers. Output of libraries goes to the log from now on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


class Serving:
    """Executes commands with methods of a subclass, and steps the engine in between."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, answers: IO[str]) -> None:
        """Run until the input is closed."""
        _say(answers, "ready")
        buffer = b""
        while True:
            busy = self.engine.scheduler.has_requests()
            if busy:
                self.engine.step()
            if not select.select([sys.stdin], [], [], PAUSE_S if busy else None)[0]:
                continue
            data = os.read(sys.stdin.fileno(), 1 << 20)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                _say(answers, json.dumps(getattr(self, command.pop("do"))(**command)))


def _say(answers: IO[str], line: str) -> None:
    answers.write(line + "\n")
    answers.flush()
