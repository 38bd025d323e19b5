"""Two engines in processes of their own, and what a proxy does between them."""

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
"""Until nothing is held."""
LEASE_S = 3600.0


class PeerProcess:
    """One engine. Commands return what it answers; `add` does not wait, `result` does.

    Args:
        kind: of model.
        directory: where it may write.
        transfer: its `kv_transfer_config`.
        environment: variables besides this process's own.
        arguments: that override the engine's usual ones.
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
        self._heard: dict[str, Any] = {}
        self._has_ended = False
        self._news = threading.Condition()
        self._numbers = itertools.count(1)
        # On a thread of its own: or each might wait for the other to read.
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_until_ready(self) -> int:
        """Until it serves. Its free blocks."""
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
        """`abort_when`: how far it comes, in the scheduler's words. Then {"aborted": this} is what it gives."""
        self._say(name, "add", prompt=list(prompt), max_tokens=max_tokens, params=params, abort_when=abort_when)

    def result(self, name: str) -> Any:
        """What a request gave."""
        return self._wait(name, ANSWER_S)

    def ask(self, do: str, **values: Any) -> Any:
        """What it answers to any other command."""
        name = f"command-{next(self._numbers)}"
        self._say(name, do, **values)
        return self._wait(name, ANSWER_S)

    def tell_to_end(self) -> None:
        """Does not wait."""
        with contextlib.suppress(OSError):
            self._say("end", "end")

    def end(self) -> None:
        """Ends it, if it has not ended."""
        self.tell_to_end()
        self.process.join(END_S)
        if self.process.is_alive():
            self.kill()

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.join()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing, and has not ended."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        # The signal is on its way for a while, in which its threads do what they did.
        threads = Path(f"/proc/{self.process.pid}/task")
        patience.wait_until(lambda: {state_of(thread) for thread in threads.iterdir()} == {"T"}, "it stands still")
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def left_behind(self) -> set[str]:
        """Of what it holds (`peers_held`), that which it did not hold when it began to serve."""
        held = self.ask("held")
        return {word for word, number in held.items() if number != self._at_rest[word]}

    def wait_until_held(self, word: str) -> None:
        """Until it holds something of this."""
        patience.wait_until(lambda: word in self.left_behind(), f"it holds {word}", expected_s=60.0)

    def words(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")

    def _say(self, name: str, do: str, **values: Any) -> None:
        self._line.sendall(json.dumps({"name": name, "do": do, **values}).encode() + b"\n")

    def _listen(self) -> None:
        # A process that is killed leaves what it has not read.
        with contextlib.suppress(ConnectionResetError), self._line.makefile() as lines:
            for line in lines:
                answer = json.loads(line)
                with self._news:
                    self._heard[answer["name"]] = answer["value"]
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def _wait(self, name: str, limit_s: float) -> Any:
        with self._news:
            self._news.wait_for(lambda: name in self._heard or self._has_ended, limit_s)
            if name in self._heard:
                return self._heard.pop(name)
        raise RuntimeError(f"no answer to {name} (exit {self.process.exitcode}):\n{self.words()[-6000:]}")


def state_of(task: Path) -> str:
    """A letter, as in `man proc`, of a thread."""
    return task.joinpath("stat").read_text().rpartition(")")[2].split()[0]


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
        """Does not wait. The options are those of `PeerProcess.add`."""
        name = self.name("p")
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        self.producer.add(name, prompt, max_tokens=1, params=params, **options)
        return name

    def ask_to_decode(self, prompt: Sequence[int], params: dict[str, Any] | None, **options: Any) -> str:
        """Does not wait. The options are those of `PeerProcess.add`."""
        name = self.name("d")
        self.consumer.add(name, prompt, params=params, **options)
        return name

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What the producer answers; `params` is for the consumer."""
        result: dict[str, Any] = self.producer.result(self.ask_to_prefill(prompt))
        return result

    def decode(self, prompt: Sequence[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """What the consumer answers."""
        result: dict[str, Any] = self.consumer.result(self.ask_to_decode(prompt, params))
        return result

    def left_behind(self) -> dict[str, set[str]]:
        """What either holds and did not at first."""
        return {"producer": self.producer.left_behind(), "consumer": self.consumer.left_behind()}

    def require_rest(self) -> None:
        """Both come to hold nothing, and forget what they have cached."""
        until_s = time.monotonic() + REST_S
        while any((left := self.left_behind()).values()):
            assert time.monotonic() < until_s, left
            time.sleep(0.01)
        self.producer.ask("forget")
        self.consumer.ask("forget")
        assert not any(self.left_behind().values())

    def tolerance(self) -> float:
        """How far two answers of the consumer may lie apart that were not computed in the same steps."""
        if self._tolerance is None:
            self._tolerance = float(self.consumer.ask("tolerance"))
        return self._tolerance

    def tolerance_so_far(self) -> float:
        """The same, where a comparison needed it. Else none allowed more than the floor."""
        return FLOOR if self._tolerance is None else self._tolerance


def require_same_pages(prefilled: Mapping[str, Any], decoded: Mapping[str, Any]) -> None:
    """What one engine handed over is what the other began with, but for what that held itself."""
    block_tokens = prefilled["params"]["hybridkv"]["block_tokens"]
    groups = zip(prefilled["handed_over"], decoded["loaded"], block_tokens, strict=True)
    for group, (theirs, ours, tokens) in enumerate(groups):
        read = {place: digest for place, digest in theirs.items() if int(place) * tokens >= decoded["local"]}
        assert read, f"group {group}: nothing was to be read"
        assert {place: ours.get(place) for place in read} == read, f"group {group}: other pages"


def transfer_config(role: str, **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of one side."""
    return {
        "kv_connector": "HybridNixlConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        # A lease that somebody forgot to end must not end by itself before anybody sees it.
        "kv_connector_extra_config": {"lease_seconds": LEASE_S, **extra},
    }


@contextlib.contextmanager
def running_two(kind: str, directory: Path, environments: Sequence[Mapping[str, str]] = ({}, {})) -> Iterator[Two]:
    """A producer and a consumer of one model, until the block ends. Each has its environment."""
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
