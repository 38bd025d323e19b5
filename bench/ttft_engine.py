"""Process with an engine for `engine_ttft.py`. A command removes the connector and puts it back."""

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
"""Names of byte counters, without `vllm:hybridkv_`."""


class Meter:
    """Processor time of the engine's thread in calls of a connector's public methods."""

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
    """Commands of the process."""

    _halves: tuple[Any, Any] | None = None
    """Halves of the connector while it is removed."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._meter = Meter()
        if engine.connector is not None:
            self._meter.watch(engine.connector)
            self._meter.watch(engine.worker_connector)

    def connect(self, is_on: bool) -> None:
        """Removes the connector from the engine, or puts it back, while no request runs.

        The connector's work at the engine's start and the engine's configuration remain.
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
        """Result of `first_token`, number of moved bytes, and processor seconds: of the engine's thread, of its part in
        the connector, and of the copy threads until all chunks are stored."""
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
        """Median seconds of steps that compute one token each, after a prompt that is mostly in the engine's cache."""
        engine, times_s = self.engine, []
        engine.add(prompt, max_tokens=num_steps + 1)
        finished: list[Any] = []
        while not finished:
            began_s = time.perf_counter()
            finished = engine.step()
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s[-num_steps:])

    def forget_primary(self) -> None:
        """Drops the engine's own prefix cache and the chunks in host memory. Slower tiers keep their chunks."""
        self.engine.reset_prefix_cache()
        self.engine.connector._scheduler._stack.primary.clear()

    def copy_seconds(self, num_bytes: int, times: int) -> float:
        """Median seconds of contiguous copies of `num_bytes`, in memory that was touched before."""
        source, destination = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        times_s = []
        for _ in range(times):
            began_s = time.perf_counter()
            np.copyto(destination, source)
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s)

    def set_threads(self, num_threads: int) -> None:
        """Sets the number of threads with which the engine computes. vLLM replaces torch's function with an empty
        function."""
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
