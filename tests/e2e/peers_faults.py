"""Two engines with a relay between their control connections, and the faults that tests cause."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patience
import peers_faults_process
from equality import require_same_written
from harness import make_prompt
from peers import ANSWER_S, REST_S, PeerProcess, transfer_config
from relay import ADDRESS, Relay

NUM_TOKENS = 1025
"""Whole steps plus one token, as in `test_peers`."""
LOAD_S, LEASE_S = 3600.0, 1200.0
"""Seconds on the clock that tests move."""
MAX_LEASES = 3
ARGUMENTS: dict[str, Any] = {"max_model_len": 2048, "num_gpu_blocks_override": 96}
"""So few blocks that a few requests reuse all of them."""
FAILURES, PROMPTS, LEASES = (f"vllm:hybridkv_peer_{each}" for each in ("read_failures", "prompts", "leases"))


class FaultyProcess(PeerProcess):
    """One of the two engines."""

    main = staticmethod(peers_faults_process.main)

    def __init__(self, kind: str, directory: Path, role: str, policy: str = "recompute", **extra: Any) -> None:
        config = transfer_config(role, connect_timeout_seconds=patience.seconds(6.0), lease_seconds=LEASE_S, **extra)
        super().__init__(kind, directory, config | {"kv_load_failure_policy": policy}, **ARGUMENTS)
        self._names = itertools.count(1)

    def wait_until_ready(self) -> int:
        self.free = super().wait_until_ready()
        return self.free

    def name(self) -> str:
        return f"r{next(self._names)}"

    def end(self) -> None:
        """End regularly, however long it takes."""
        if self.process.is_alive():
            self._send("end", "end")
            self.process.join(ANSWER_S)

    def later(self, seconds: float) -> None:
        """Make its leases and reads older by `seconds`."""
        self.ask("later", seconds=seconds)

    def compute(self, prompt: Sequence[int], params: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Run a complete request."""
        name = self.name()
        self.add(name, prompt, params=params, **options)
        result: dict[str, Any] = self.result(name)
        return result

    def until(self, do: str, holds: Callable[[Any], bool]) -> None:
        """Repeat a command until `holds` accepts its answer."""
        until_s = time.monotonic() + REST_S
        while not holds(found := self.ask(do)):
            assert time.monotonic() < until_s, found
            time.sleep(0.01)

    def require_rest(self) -> None:
        """Wait until it holds only what it held at the start, and reset its cache."""
        self.let_go()
        until_s = time.monotonic() + REST_S
        while left := self.left_behind():
            assert time.monotonic() < until_s, left
            time.sleep(0.01)
        self.ask("forget")
        assert not self.left_behind()

    def let_go(self, is_spoilt: bool = False) -> None:
        """Let the held read continue."""
        self.ask("let go", is_spoilt=is_spoilt)

    def counts(self, metric: str) -> Counter[str]:
        """A counter's values by label, including the last step."""
        self.compute(make_prompt(3, seed=0), max_tokens=2)
        found = self.ask("counters").items()
        return Counter({key.rpartition("=")[2]: int(value) for key, value in found if key.split(",")[0] == metric})


class ReadGate:
    """Holds a consumer's read halfway, after `after` whole reads."""

    def __init__(self, consumer: FaultyProcess, after: int) -> None:
        self._consumer = consumer
        consumer.ask("hold", after=after)

    def wait_until_holding(self) -> None:
        self._consumer.until("holding", bool)

    def release(self) -> None:
        self._consumer.let_go()


class Producer(FaultyProcess):
    """A producer with a relay in front of its control connections, which it advertises as its own address."""

    def __init__(self, kind: str, directory: Path) -> None:
        super().__init__(kind, directory, "kv_producer", listen={"advertise": ADDRESS}, max_leases=MAX_LEASES)
        self._relay: Relay | None = None

    def wait_until_ready(self) -> int:
        free = super().wait_until_ready()
        self.port: int = self.ask("port")
        self._relay = Relay(self.port)
        return free

    @property
    def relay(self) -> Relay:
        assert self._relay is not None
        return self._relay

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Compute a prompt. The parameters for a consumer."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        params: dict[str, Any] = self.compute(prompt, wanted, max_tokens=1)["params"]
        # The lease starts in another thread, and must start before the test moves its time.
        self.until("settled", bool)
        return params

    def overwrite(self, params: dict[str, Any]) -> None:
        """Run other requests until all handed-over blocks are overwritten."""
        where = {"block_ids": params["remote_block_ids"], "first_blocks": params["hybridkv"]["first_blocks"]}
        before = self.ask("digests", **where)
        for seed in range(100, 120):
            now = self.ask("digests", **where)
            if not any(now[group][place] == held for group, one in enumerate(before) for place, held in one.items()):
                return
            self.compute(make_prompt(NUM_TOKENS, seed=seed), max_tokens=1)
        raise AssertionError("blocks were not reused")

    def end(self) -> None:
        if self._relay is not None:
            self._relay.close()
        super().end()


class Faults:
    """A consumer that survives, and producers that may be killed.

    Args:
        kind: the model.
        directory: for their files.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind, self._directory = kind, directory
        self._count = 0
        self.consumer = FaultyProcess(kind, directory / "consumer", "kv_consumer", load_timeout_seconds=LOAD_S)
        self._strict: FaultyProcess | None = None
        self._next = self._start()
        self._producer: Producer | None = None
        self._dead: list[Producer] = []
        self.consumer.wait_until_ready()
        self.prompt = make_prompt(NUM_TOKENS, seed=1)
        self._cold = self.consumer.compute(self.prompt)

    @property
    def producer(self) -> Producer:
        """A running producer."""
        if self._producer is None:
            self._next.wait_until_ready()
            self._producer = self._next
        return self._producer

    @property
    def strict(self) -> FaultyProcess:
        """A consumer whose requests fail if their loads fail."""
        if self._strict is None:
            where = self._directory / "strict"
            self._strict = FaultyProcess(self._kind, where, "kv_consumer", "fail", load_timeout_seconds=LOAD_S)
            self._strict.wait_until_ready()
        return self._strict

    def kill_strict(self) -> None:
        self.strict.kill()
        self.strict.end()
        self._strict = None

    def kill_producer(self) -> None:
        """Kill the producer, and start the next one, which takes time. Held messages stay held."""
        assert self._producer is not None
        self._producer.kill()
        self._dead.append(self._producer)
        self._producer, self._next = None, self._start()

    def require_cold(self, got: dict[str, Any], first_computed: int) -> None:
        """Require the answer of an engine that computes everything; `first_computed` is where this one began."""
        assert got["steps"][0][0] == first_computed
        require_same_written([self._cold], [got])
        assert got["finish_reason"] == self._cold["finish_reason"] == "length"

    def is_cold(self, got: dict[str, Any]) -> bool:
        return (got["tokens"], got["logprobs"]) == (self._cold["tokens"], self._cold["logprobs"])

    @contextmanager
    def counting(self, **expected: int) -> Iterator[None]:
        """Require that the consumer counts exactly these failures, by reason."""
        before = self.consumer.counts(FAILURES)
        yield
        assert self.consumer.counts(FAILURES) - before == Counter(expected)

    def require_rest(self) -> None:
        """Require that no engine holds more than at the start, and that all caches are empty."""
        living = [each for each in (self._producer, self.consumer, self._strict) if each is not None]
        if self._producer is not None:
            self._producer.relay.release()
        for each in living:
            each.require_rest()
        self._end_killed()

    def expire(self) -> None:
        """Let the producer's leases expire."""
        if self._producer is not None:
            self._producer.later(LEASE_S)

    def _end_killed(self) -> None:
        while self._dead:
            self._dead.pop().end()

    def end(self) -> None:
        self._end_killed()
        # A starting producer is awaited, because it can end regularly only when it serves.
        living = [each for each in (self.producer, self.consumer, self._strict) if each is not None]
        for each in living:
            each.end()
        for each in living:
            assert each.process.exitcode == 0, each.words()[-3000:]

    def _start(self) -> Producer:
        self._count += 1
        return Producer(self._kind, self._directory / f"producer-{self._count}")
