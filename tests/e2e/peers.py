"""Two engines in their own processes, and the messages of a proxy between them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import forked
import patience
import peers_process
from noise import FLOOR

START_S = patience.seconds(80.0)
ANSWER_S = patience.seconds(60.0)
END_S = patience.seconds(3.0)
REST_S = patience.seconds(12.0)
"""Time until nothing is held."""
LEASE_S = 3600.0


class PeerProcess:
    """One engine. Commands return its answer; `add` does not wait, `result` does.

    Args:
        kind: the model.
        directory: for its files.
        transfer: its `kv_transfer_config`.
        environment: additional variables.
        arguments: replace the engine's usual arguments.
    """

    main = staticmethod(peers_process.main)

    def __init__(
        self,
        kind: str,
        directory: Path,
        transfer: dict[str, Any],
        environment: Mapping[str, str] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "log.txt"
        self._line, theirs = socket.socketpair()
        with theirs:
            given = kind, directory, transfer, arguments, theirs
            self.process = forked.start(self.main, *given, log=self.log, environment=environment)
        self._answers: dict[str, Any] = {}
        self._has_ended = False
        self._news = threading.Condition()
        self._numbers = itertools.count(1)
        # On its own thread, so that the two processes do not wait for each other to read.
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_until_ready(self) -> int:
        """Wait until it serves. The number of its free blocks."""
        free = int(self._wait("ready", START_S))
        self._at_rest = self.ask("held")
        return free

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        params: dict[str, Any] | None = None,
        abort_when: str | None = None,
    ) -> None:
        """Add a request. `abort_when`: the scheduler's status at which it is aborted; then its result is {'aborted':
        status}.
        """
        self._send(name, "add", prompt=list(prompt), max_tokens=max_tokens, params=params, abort_when=abort_when)

    def result(self, name: str) -> Any:
        """The result of a request."""
        return self._wait(name, ANSWER_S)

    def ask(self, do: str, **values: Any) -> Any:
        """Send any other command, and return its answer."""
        name = f"command-{next(self._numbers)}"
        self._send(name, do, **values)
        return self._wait(name, ANSWER_S)

    def tell_to_end(self) -> None:
        """Tell the process to end, without waiting."""
        with contextlib.suppress(OSError):
            self._send("end", "end")

    def end(self) -> None:
        """End the process if it is running."""
        self.tell_to_end()
        self.process.join(END_S)
        if self.process.is_alive():
            self.kill()

    def kill(self) -> None:
        """Kill the process as a crash would."""
        self.process.kill()
        self.process.join()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The process is stopped during the block."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        # The signal arrives with a delay, during which the threads still run.
        threads = Path(f"/proc/{self.process.pid}/task")
        patience.wait_until(lambda: are_stopped(threads), "all threads are stopped")
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def left_behind(self) -> set[str]:
        """Names of resources (`peers_held`) of which it holds another number than at the start."""
        held = self.ask("held")
        return {word for word, number in held.items() if number != self._at_rest[word]}

    def wait_until_held(self, word: str) -> None:
        """Wait until it holds a resource of this name."""
        patience.wait_until(lambda: word in self.left_behind(), f"it holds {word}", expected_s=60.0)

    def words(self) -> str:
        """The log."""
        return self.log.read_text(errors="replace")

    def _send(self, name: str, do: str, **values: Any) -> None:
        self._line.sendall(json.dumps({"name": name, "do": do, **values}).encode() + b"\n")

    def _listen(self) -> None:
        # A killed process leaves unread data.
        with contextlib.suppress(ConnectionResetError), self._line.makefile() as lines:
            for line in lines:
                answer = json.loads(line)
                with self._news:
                    self._answers[answer["name"]] = answer["value"]
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def _wait(self, name: str, limit_s: float) -> Any:
        with self._news:
            self._news.wait_for(lambda: name in self._answers or self._has_ended, limit_s)
            if name in self._answers:
                return self._answers.pop(name)
        raise RuntimeError(f"no answer to {name} (exit {self.process.exitcode}):\n{self.words()[-6000:]}")


def are_stopped(threads: Path) -> bool:
    """Whether all threads in a process's `task` directory are stopped."""
    try:
        return {path.read_text().rpartition(")")[2].split()[0] for path in threads.glob("*/stat")} == {"T"}
    except OSError:
        return False  # one has ended just now


class Two:
    """A producer and a consumer."""

    def __init__(self, producer: PeerProcess, consumer: PeerProcess) -> None:
        self.producer, self.consumer = producer, consumer
        self._count = 0
        self._tolerance: float | None = None

    def name(self, word: str) -> str:
        self._count += 1
        return f"{word}{self._count}"

    def ask_to_prefill(self, prompt: Sequence[int], **options: Any) -> str:
        """Send a prompt to the producer, without waiting. Options as of `PeerProcess.add`."""
        name = self.name("p")
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        self.producer.add(name, prompt, max_tokens=1, params=params, **options)
        return name

    def ask_to_decode(self, prompt: Sequence[int], params: dict[str, Any] | None, **options: Any) -> str:
        """Send a prompt to the consumer, without waiting. Options as of `PeerProcess.add`."""
        name = self.name("d")
        self.consumer.add(name, prompt, params=params, **options)
        return name

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The producer's result; its `params` are for the consumer."""
        result: dict[str, Any] = self.producer.result(self.ask_to_prefill(prompt))
        return result

    def decode(self, prompt: Sequence[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """The consumer's result."""
        result: dict[str, Any] = self.consumer.result(self.ask_to_decode(prompt, params))
        return result

    def left_behind(self) -> dict[str, set[str]]:
        """Resources that each holds in addition to those at the start."""
        return {"producer": self.producer.left_behind(), "consumer": self.consumer.left_behind()}

    def require_rest(self) -> None:
        """Wait until both hold nothing, and reset their caches."""
        until_s = time.monotonic() + REST_S
        while any((left := self.left_behind()).values()):
            assert time.monotonic() < until_s, left
            time.sleep(0.01)
        self.producer.ask("forget")
        self.consumer.ask("forget")
        assert not any(self.left_behind().values())

    def tolerance(self) -> float:
        """The allowed deviation of two answers of the consumer that were computed in different steps."""
        if self._tolerance is None:
            self._tolerance = float(self.consumer.ask("tolerance"))
        return self._tolerance

    def tolerance_so_far(self) -> float:
        """The tolerance if it was needed, otherwise the floor."""
        return FLOOR if self._tolerance is None else self._tolerance


def require_same_pages(prefilled: Mapping[str, Any], decoded: Mapping[str, Any]) -> None:
    """Require that the consumer loaded the pages handed over, except those that it held itself."""
    block_tokens = prefilled["params"]["hybridkv"]["block_tokens"]
    groups = zip(prefilled["handed_over"], decoded["loaded"], block_tokens, strict=True)
    for group, (theirs, ours, tokens) in enumerate(groups):
        read = {place: digest for place, digest in theirs.items() if int(place) * tokens >= decoded["local"]}
        assert read, f"group {group}: no page had to be read"
        assert {place: ours.get(place) for place in read} == read, f"group {group}: other pages"


def transfer_config(role: str, **extra: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of one side."""
    return {
        "kv_connector": "HybridNixlConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        # A forgotten lease must not expire before the test notices it.
        "kv_connector_extra_config": {"lease_seconds": LEASE_S, **extra},
    }


@contextlib.contextmanager
def running_two(kind: str, directory: Path, environments: Sequence[Mapping[str, str]] = ({}, {})) -> Iterator[Two]:
    """A producer and a consumer of one model until the block ends, each with its own environment."""
    producer = PeerProcess(kind, directory / "producer", transfer_config("kv_producer"), environments[0])
    consumer = PeerProcess(kind, directory / "consumer", transfer_config("kv_consumer"), environments[1])
    try:
        producer.wait_until_ready()
        consumer.wait_until_ready()
        yield Two(producer, consumer)
    finally:
        consumer.tell_to_end()
        producer.end()
        consumer.end()
