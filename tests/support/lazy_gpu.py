"""`LazyDevice` as the GPU of a worker: its KV caches are tensors of the CPU, and the rest is as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lazy_device import LazyDevice

from hybridkv.connectors.vllm.devices import EngineGpuDevice


class LazyGpu(EngineGpuDevice):
    """The device of one worker."""

    def __init__(self, device: LazyDevice) -> None:
        super().__init__(device)  # type: ignore[arg-type]
        self.lazy = device

    def prepare(self, kv_caches: Mapping[str, Any]) -> None:
        """They lie where this device reaches."""

    def launch(self, work: Callable[[], object]) -> None:
        self.lazy.launch(work)

    def launch_delay(self) -> None:
        """What comes later comes as late as it may anyway."""

    def synchronize(self) -> None:
        event = self.lazy.new_event()
        event.record(self.lazy.current_stream())
        event.synchronize()
        self.lazy.raise_failures()


__all__ = ["LazyGpu"]
