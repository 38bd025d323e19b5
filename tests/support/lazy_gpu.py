"""A `LazyDevice` as the GPU of a worker: its KV caches are CPU tensors, and everything else is as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lazy_device import LazyDevice

from hybridkv.connectors.vllm.common.copies.devices import EngineGpuDevice


class LazyGpu(EngineGpuDevice):
    """The device of one worker. If a delay is below `submission_cycles`, compute ends before the copy is submitted."""

    def __init__(self, device: LazyDevice, submission_cycles: int = 0) -> None:
        super().__init__(device)  # type: ignore[arg-type]
        self.lazy = device
        self._submission_cycles = submission_cycles
        self._delay_cycles = 0

    def prepare(self, kv_caches: Mapping[str, Any]) -> None:
        """Tensors of the CPU need no preparation."""

    def launch(self, work: Callable[[], object]) -> None:
        self.lazy.launch(work)

    def launch_delay(self, cycles: int) -> None:
        """Only records the delay: later work is already as late as possible."""
        self._delay_cycles = cycles

    def mark(self) -> Callable[[], bool]:
        event = self.lazy.new_event()
        event.record(self.lazy.current_stream())

        def has_happened() -> bool:
            if self._delay_cycles < self._submission_cycles:
                self.lazy.drain()
            return event.happened

        return has_happened

    def synchronize(self) -> None:
        event = self.lazy.new_event()
        event.record(self.lazy.current_stream())
        event.synchronize()
        self.lazy.raise_failures()


__all__ = ["LazyGpu"]
