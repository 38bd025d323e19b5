"""Devices that an engine runs on: who copies, and what memory the arena is made of.

A CPU copies with memmove. A GPU copies with what vLLM copies with (`copies: "engine"`), or with
`hybridkv.transfer.cuda` (`copies: "native"`), from and to pinned memory. Every other device is refused.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.engine_device import EngineDevice
from hybridkv.transfer import (
    CopyEngine,
    CpuCopyEngine,
    InlineCopyEngine,
    InlineStreamCopyEngine,
    StreamCopyEngine,
    TransferError,
)
from hybridkv.transfer.pinned import map_memory

DEVICE_TYPES = ("cpu", "cuda")
ZERO_BYTES = 64 * 1024
"""Of memory that is zero, on each worker's device."""
MOST_DIGEST_THREADS = 8
_HINT = "run vLLM on a CPU or on GPUs of its CUDA or ROCm platform"


class Device(ABC):
    """The device of one worker."""

    device_type: ClassVar[str]
    """vLLM's name of it; ROCm's is "cuda", too."""

    @abstractmethod
    def copy_engines(self, load: str) -> tuple[CopyEngine, CopyEngine]:
        """Who stores and who loads. `load` is "async", or "sync" for loads that have ended when they were submitted."""

    @abstractmethod
    def arena_memory(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Memory for this worker's arena, None where the arena may take ordinary memory.

        Raises:
            ConfigurationError: the memory cannot be pinned.
        """

    @abstractmethod
    def reach_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        """Let the device copy to and from memory that is there already, until all views of it are gone.

        Raises:
            ConfigurationError: the memory cannot be pinned.
        """

    @abstractmethod
    def digest_threads(self, num_workers: int) -> int:
        """How many threads take checksums of this worker's arena. The engine has `num_workers` workers."""

    def prepare(self, kv_caches: Mapping[str, Any]) -> None:
        """Refuses KV caches that lie on another device.

        Raises:
            ConfigurationError: naming the first such layer.
        """
        for name, cache in kv_caches.items():
            tensors: Iterable[Any] = [cache] if hasattr(cache, "device") else cache
            for tensor in tensors:
                if tensor.device.type != self.device_type:
                    expected = f"KV caches on {self.device_type}"
                    raise ConfigurationError("device", expected, f"{tensor.device} ({name})", _HINT)


class CpuDevice(Device):
    """A CPU: the KV caches are host memory."""

    device_type = "cpu"

    def copy_engines(self, load: str) -> tuple[CopyEngine, CopyEngine]:
        stores = CpuCopyEngine()
        return stores, stores if load == "async" else InlineCopyEngine()

    def arena_memory(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        return None

    def reach_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        """It reaches all memory."""

    def digest_threads(self, num_workers: int) -> int:
        """One, which copies too: the others are the engine's, and a store takes its checksums while it copies."""
        return 1

    def prepare(self, kv_caches: Mapping[str, Any]) -> None:
        super().prepare(kv_caches)
        # What the engine's kernels take for granted, whatever the engine runs first.
        compat.permit_amx()


class GpuDevice(Device):
    """The GPU that is current on this thread: what is launched happens later, in the thread's current stream."""

    device_type = "cuda"

    def digest_threads(self, num_workers: int) -> int:
        """A quarter of the worker's cores, at most 8: the engine needs the others.

        One thread reads 14 GB/s beside an H100, and its link carries 54: checksums would be the limit of loads and
        stores. Four threads read 42 to 45 GB/s, eight 72.
        """
        return max(1, min(MOST_DIGEST_THREADS, len(os.sched_getaffinity(0)) // (4 * num_workers)))

    def launch(self, work: Callable[[], object]) -> None:
        """Calls `work`, which launches compute."""
        work()

    def launch_delay(self, cycles: int) -> None:
        """Launches compute that takes so many cycles of the GPU."""
        import torch

        torch.cuda._sleep(cycles)

    def mark(self) -> Callable[[], bool]:
        """Whether all that this thread has launched until now has happened. Any thread may ask."""
        import torch

        event = torch.cuda.Event()
        event.record()
        return event.query

    def synchronize(self) -> None:
        """Waits for what this thread has launched."""
        import torch

        torch.cuda.current_stream().synchronize()


class EngineGpuDevice(GpuDevice):
    """A GPU that copies with what vLLM copies with. An engine each for loads and stores, which share no stream."""

    def __init__(self, device: EngineDevice) -> None:
        self._device = device

    def copy_engines(self, load: str) -> tuple[CopyEngine, CopyEngine]:
        stores = StreamCopyEngine(self._device)
        if load == "async":
            return stores, StreamCopyEngine(self._device)
        return stores, InlineStreamCopyEngine(self._device)

    def arena_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        try:
            memory = map_memory(num_bytes)
            self._device.pin(memory)
        except TransferError as error:
            raise _cannot_pin("capacity", "the capacity of the ram tier", error) from error
        return memory

    def reach_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        try:
            self._device.pin(memory)
        except TransferError as error:
            raise _cannot_pin("pool", "the pool", error) from error


class NativeGpuDevice(GpuDevice):
    """A GPU that copies with the kernels of hybridkv-cuda, on streams of their own."""

    def copy_engines(self, load: str) -> tuple[CopyEngine, CopyEngine]:
        from hybridkv.transfer.cuda import CudaCopyEngine, CudaError, InlineCudaCopyEngine, open_device

        try:
            index = _current_gpu()
            load_engine = CudaCopyEngine if load == "async" else InlineCudaCopyEngine
            # An engine each, so that loads and stores share neither a queue nor a direction of the link.
            return CudaCopyEngine(open_device(index)), load_engine(open_device(index))
        except CudaError as error:
            raise ConfigurationError("copies", 'a GPU and hybridkv-cuda for "native"', str(error), _HINT) from error

    def arena_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        from hybridkv.transfer.cuda import pin_memory

        try:
            return pin_memory(num_bytes)
        except TransferError as error:
            raise _cannot_pin("capacity", "the capacity of the ram tier", error) from error

    def reach_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        from hybridkv.transfer.cuda import pin_existing

        try:
            pin_existing(memory)
        except TransferError as error:
            raise _cannot_pin("pool", "the pool", error) from error


def open_device(device_type: str, copies: str) -> Device:
    """The device of this worker.

    Args:
        device_type: vLLM's name of it.
        copies: "engine" or "native", who copies on a GPU.

    Raises:
        ConfigurationError: it is not known or not there, or this vLLM lacks what it would copy with.
    """
    if device_type == "cpu":
        return CpuDevice()
    if device_type not in DEVICE_TYPES:
        raise ConfigurationError("device", " or ".join(DEVICE_TYPES), device_type, _HINT)
    if copies == "native":
        return NativeGpuDevice()
    engine_copies = compat.engine_copies()
    try:
        return EngineGpuDevice(EngineDevice(engine_copies))
    except (RuntimeError, AssertionError) as error:  # the second: torch's word for a build without CUDA
        raise ConfigurationError("device", "a GPU that torch can use", str(error), _HINT) from error


def zero_memory(device: Any) -> Any:
    """A tensor of `ZERO_BYTES` bytes that are zero by now, beside the KV caches on their device."""
    import torch

    memory = torch.zeros(ZERO_BYTES, dtype=torch.uint8, device=device)
    if memory.is_cuda:
        torch.cuda.synchronize(device)
    return memory


def _cannot_pin(path: str, lower: str, error: TransferError) -> ConfigurationError:
    hint = f"lower {lower}, or raise the limit on memory or locked memory; Windows lets WSL2 pin only a part"
    return ConfigurationError(path, "memory that can be pinned", str(error), hint)


def _current_gpu() -> int:
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_available() else 0
