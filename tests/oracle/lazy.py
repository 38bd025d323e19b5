"""An engine on a simulated GPU with deferred work: compute, stores and loads run late, in any order that their streams
allow.

The fake runner enqueues its work on the cache in the device's compute stream, and the connector's copy engines use
their own streams (`lazy_device`). So the scheduler is steps ahead of the bytes, as on a GPU.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from lazy_gpu import LazyGpu

from hybridkv.connectors.vllm.common.copies import devices, proof
from oracle.engine import OracleEngine
from oracle.runner import FakeRunner, OracleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lazy_device import LazyDevice
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from oracle.memory import KVMemory
    from oracle.mixes import Mix
    from oracle.runner import _Work
    from oracle.settings import EngineSettings


class LazyRunner(FakeRunner):
    """Launches the work that `FakeRunner` does at once."""

    def __init__(self, device: LazyDevice, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.device = device

    def execute(self, output: SchedulerOutput, fresh_blocks: Sequence[int]) -> ModelRunnerOutput:
        self.device.raise_failures()
        return super().execute(output, fresh_blocks)

    def _launch(self, compute: Callable[[], None]) -> None:
        self.device.launch(compute)

    def _forward(self, work: list[_Work]) -> None:
        # State of the request when its step is launched; the next step may change it before this one runs.
        super()._forward([replace(item, running=copy.copy(item.running)) for item in work])


class LazyEngine(OracleEngine):
    """`OracleEngine` on a `LazyDevice`, for mixes in which vLLM keeps no wrong states."""

    def __init__(self, mix: Mix, settings: EngineSettings, device: LazyDevice) -> None:
        assert not mix.misleads
        self.device = device
        open_device = mock.patch.object(devices, "open_device", return_value=LazyGpu(device))
        # The clock would extend the proof to most of a second.
        with open_device, mock.patch.object(proof, "ROUNDS_S", 0.0):
            super().__init__(mix, replace(settings, device="cuda"))

    def _runner_of(self, memory: KVMemory, connector: KVConnectorBase_V1 | None) -> FakeRunner:
        settings = self.settings
        arguments = (self.mix, memory, settings.runner, self._transcripts, connector, self._local_tokens)
        return LazyRunner(self.device, *arguments, saves_last=settings.saves_last)

    def close(self) -> None:
        super().close()
        if any(stream.steps for stream in self.device.streams if stream is not self.device.compute):
            raise OracleError("the connector was shut down while copies may still write to its memory")
        self.device.drain()
        self.device.raise_failures()
