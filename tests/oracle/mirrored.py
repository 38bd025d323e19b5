"""An engine with KV tensors on another device than the fake runner, which computes on a mirror in host memory.

The connector gets only the tensors of the device. Work of the fake runner on the cache first reads all of them into the
mirror, then writes back the changed bytes, in the device's compute stream. On a GPU some of these writes are late, so
that a store without a fence reads the old bytes.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from hybridkv.connectors.vllm.common.copies import devices, proof
from oracle.engine import OracleEngine
from oracle.runner import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from oracle.memory import KVMemory
    from oracle.mixes import Mix
    from oracle.settings import EngineSettings

LATE_WRITES = 8
"""One of so many writes comes after compute that takes some milliseconds."""


class Mirror:
    """The bytes of a device beside those of the fake runner's memory, whose tensors are replaced by the device's."""

    def __init__(self, memory: KVMemory, device: str) -> None:
        storage = next(iter(memory.tensors.values())).untyped_storage()
        self._host = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._bytes = self._host.to(device, copy=True)
        on_device = self._bytes.untyped_storage()
        memory.tensors = {
            name: torch.empty(0, dtype=tensor.dtype, device=device).set_(
                on_device, tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            for name, tensor in memory.tensors.items()
        }

    def read(self) -> None:
        """Waits for the device's work on them."""
        self._host.copy_(self._bytes)

    def compute(self, work: Callable[[], None], before_write: Callable[[], None]) -> None:
        self.read()
        before = self._host.clone()
        work()
        changed = (self._host != before).nonzero().squeeze(1)
        if len(changed):
            before_write()
            self._bytes[changed.to(self._bytes.device)] = self._host[changed].to(self._bytes.device)


class MirroredRunner(FakeRunner):
    def __init__(self, mirror: Mirror, gpu: devices.GpuDevice | None, *arguments: Any) -> None:
        self._mirror = mirror
        self._gpu = gpu
        self._draw = Random(0).randrange
        super().__init__(*arguments)

    def _launch(self, compute: Callable[[], None]) -> None:
        self._mirror.compute(compute, self._before_write)

    def _before_write(self) -> None:
        if self._gpu is not None and self._draw(LATE_WRITES) == 0:
            self._gpu.launch_delay(proof.DELAY_CYCLES)


class MirroredEngine(OracleEngine):
    """`OracleEngine` with the KV tensors on a GPU, or in other memory of the CPU."""

    def __init__(self, mix: Mix, settings: EngineSettings, gpu: devices.GpuDevice | None = None) -> None:
        self._gpu = gpu
        with ExitStack() as stack:
            if gpu is not None:
                settings = replace(settings, device=gpu.device_type)
                stack.enter_context(mock.patch.object(devices, "open_device", return_value=gpu))
                # The clock would extend the proof to most of a second.
                stack.enter_context(mock.patch.object(proof, "ROUNDS_S", 0.0))
            super().__init__(mix, settings)

    def _runner_of(self, memory: KVMemory, connector: KVConnectorBase_V1 | None) -> FakeRunner:
        mirror = Mirror(memory, "cpu" if self._gpu is None else self._gpu.device_type)
        settings = self.settings
        arguments = (self.mix, memory, settings.runner, self._transcripts, connector, self._local_tokens)
        return MirroredRunner(mirror, self._gpu, *arguments)
