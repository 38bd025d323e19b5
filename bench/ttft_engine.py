"""An engine whose connector can be taken out and put back: a process that `engine_ttft.py` tells what to do."""

from __future__ import annotations

import inspect
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from checkpoint_engine import CheckpointServing, serve
from harness import Engine
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

COPY_THREAD = "hybridkv-copy"
MOVED = ("load_bytes", "store_bytes", "move_bytes", "evicted_bytes")
"""What is counted in bytes, under these names behind `vllm:hybridkv_`."""


class Meter:
    """What the engine's thread computes in calls of an object that it makes by the names of an interface."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def watch(self, connector: Any) -> None:
        for name in dir(KVConnectorBase_V1) + dir(SupportsHMA):
            if not name.startswith("_") and inspect.ismethod(getattr(connector, name, None)):
                setattr(connector, name, self._metered(getattr(connector, name)))

    def _metered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return method(*arguments, **named)
            self._is_inside = True
            began_s = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began_s
                self._is_inside = False

        return call


class TtftServing(CheckpointServing):
    """What it can be told."""

    _halves: tuple[Any, Any] | None = None
    """Of the connector, while it is out."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._meter = Meter()
        if engine.connector is not None:
            self._meter.watch(engine.connector)
            self._meter.watch(engine.worker_connector)

    def connect(self, is_on: bool) -> None:
        """Take the connector out of the engine, or put it back. Nothing runs meanwhile.

        What is left of it then is what it does when the engine starts, and how the engine was configured.
        """
        self.engine.drain()
        if is_on == (self._halves is None):
            return
        scheduler = self.engine.scheduler
        if is_on:
            scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = self._halves
            self._halves = None
        else:
            self._halves = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
            scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None

    def timed(self, prompt: list[int], hints: dict[str, Any] | None = None) -> dict[str, Any]:
        """`first_token`, and the seconds of processor that it took of the engine's thread (of which in the connector),
        and of the copy thread until all that it had to store is stored; and how many bytes were moved for it."""
        params = None if hints is None else {"hybridkv_hints": hints}
        moved = self._moved()
        own_s, connector_s, copy_s = time.thread_time(), self._meter.seconds, self._copy_s()
        answer = self.first_token(prompt, params)
        answer["engine_cpu"] = time.thread_time() - own_s
        answer["connector_cpu"] = self._meter.seconds - connector_s
        self.engine.drain()
        answer["copy_cpu"] = self._copy_s() - copy_s
        return answer | {name: number - moved[name] for name, number in self._moved().items()}

    def step_seconds(self, prompt: list[int], num_steps: int) -> float:
        """The median of steps that compute one token each, behind a prompt of which the engine holds the most."""
        engine, times_s = self.engine, []
        engine.add(prompt, max_tokens=num_steps + 1)
        finished: list[Any] = []
        while not finished:
            began_s = time.perf_counter()
            finished = engine.step()
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s[-num_steps:])

    def forget_near(self) -> None:
        """Drop the engine's own prefix cache and what host memory holds; slower tiers keep what they have."""
        self.engine.reset_prefix_cache()
        self.engine.connector._scheduler._stack.primary.clear()

    def copy_seconds(self, num_bytes: int, times: int) -> float:
        """The median of copies of so many bytes in a row, in memory that was touched before."""
        source, destination = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        times_s = []
        for _ in range(times):
            began_s = time.perf_counter()
            np.copyto(destination, source)
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s)

    def set_threads(self, num_threads: int) -> None:
        """With how many threads the engine computes. vLLM puts a function that does nothing in place of torch's."""
        torch._C.set_num_threads(num_threads)

    def _moved(self) -> dict[str, int]:
        counters = self.engine.counters()
        named = {
            name: [v for key, v in counters.items() if key.split(",")[0] == f"vllm:hybridkv_{name}"] for name in MOVED
        }
        return {name: round(sum(values)) for name, values in named.items()}

    def _copy_s(self) -> float:
        """Processor time of the copy threads."""
        idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith(COPY_THREAD)]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


if __name__ == "__main__":
    serve(TtftServing)
