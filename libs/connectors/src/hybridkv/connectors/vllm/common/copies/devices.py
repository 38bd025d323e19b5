"""Devices of an engine: copy engines, and the memory of the arena.

A CPU copies with memmove. A GPU copies as vLLM does (`copies: "engine"`) or with `hybridkv.transfer.cuda` (`copies:
"native"`), from and to pinned memory. Any other device is refused.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.transfer import (
    CopyEngine,
    CpuCopyEngine,
    InlineCopyEngine,
    InlineStreamCopyEngine,
    StreamCopyEngine,
    TransferError,
)
from hybridkv.transfer.pinned import map_memory, near_cpus, pin

Integers = npt.NDArray[np.int64]

MAX_BATCH_COPIES = 4096
"""Copies of one call of `swap_blocks_batch`. CUDA's batches crash at some 50,000, ROCm's above 8,192."""


@dataclass(frozen=True, slots=True)
class EngineCopies:
    """What vLLM copies with.

    Args:
        swap_blocks_batch: of `vllm._custom_ops`: tensors of addresses and sizes, enqueued in the current stream.
        host_register: of `vllm.v1.kv_offload.cpu.host_register`: False where memory cannot be pinned.
        host_unregister: ends that.
        last_error: code of the last failed call to the GPU's runtime on this thread, 0 for none; forgets it.
    """

    swap_blocks_batch: Callable[..., Any]
    host_register: Callable[[int, int], bool]
    host_unregister: Callable[[int], Any]
    last_error: Callable[[], int]


class EngineDevice:
    """A `CopyDevice`, CUDA's or ROCm's: the GPU that is current on the thread that makes it.

    Raises:
        RuntimeError: torch sees no GPU.
    """

    def __init__(self, copies: EngineCopies) -> None:
        import torch

        self._torch = torch
        self._copies = copies
        self._index = int(torch.cuda.current_device())
        self._pinned: list[tuple[int, int]] = []

    def enter_thread(self) -> None:
        # A thread begins on GPU 0, and whatever torch asks of it there makes a context that takes its memory.
        self._torch.cuda.set_device(self._index)

    def new_stream(self) -> Any:
        return self._torch.cuda.Stream(self._index)

    def new_event(self) -> Any:
        # A thread that waits for a blocking event sleeps.
        return self._torch.cuda.Event(blocking=True)

    def current_stream(self) -> Any:
        return self._torch.cuda.current_stream(self._index)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(stream)

    def swap_blocks_batch(
        self, sources: Integers, destinations: Integers, num_bytes: Integers, *, is_src_access_order_any: bool
    ) -> None:
        self._copies.last_error()  # of somebody else's call before
        for start in range(0, len(sources), MAX_BATCH_COPIES):
            part = slice(start, start + MAX_BATCH_COPIES)
            # Copies, because torch takes no read-only array.
            columns = [self._torch.from_numpy(np.array(each[part])) for each in (sources, destinations, num_bytes)]
            self._copies.swap_blocks_batch(*columns, is_src_access_order_any=is_src_access_order_any)
            # Where the driver has no batches, vLLM copies one by one and ignores the code of each call.
            if code := self._copies.last_error():
                raise TransferError(f"vLLM's swap_blocks_batch: error {code} of the GPU's runtime")

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._pinned)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Let the GPU reach host memory, until all views of it are gone.

        Raises:
            TransferError: it cannot be pinned.
        """
        cpus = near_cpus(self._torch.cuda.get_device_properties(self._index))
        pin(memory, self._register, self._copies.host_unregister, cpus)
        address = int(memory.ctypes.data)
        self._pinned.append((address, address + memory.nbytes))

    def _register(self, address: int, num_bytes: int) -> None:
        if not self._copies.host_register(address, num_bytes):
            raise TransferError(f"vLLM's host_register of {num_bytes} bytes failed; see its warning, and `ulimit -l`")


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
