"""`LazyDevice` as the GPU of a worker: its KV caches are tensors of the CPU, and the rest is as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lazy_device import LazyDevice

from hybridkv.connectors.vllm.common.copies.devices import EngineGpuDevice


class LazyGpu(EngineGpuDevice):
    """The device of one worker. Compute behind a delay below `submission_cycles` ends before a copy is submitted."""

    def __init__(self, device: LazyDevice, submission_cycles: int = 0) -> None:
        super().__init__(device)  # type: ignore[arg-type]
        self.lazy = device
        self._submission_cycles = submission_cycles
        self._delay_cycles = 0

    def prepare(self, kv_caches: Mapping[str, Any]) -> None:
        """They lie where this device reaches."""

    def launch(self, work: Callable[[], object]) -> None:
        self.lazy.launch(work)

    def launch_delay(self, cycles: int) -> None:
        """What comes later comes as late as it may anyway."""
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
