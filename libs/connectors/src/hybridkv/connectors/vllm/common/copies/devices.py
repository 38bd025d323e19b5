"""Devices of workers: copy engines, and the memory of the arena.

A CPU copies with memmove. A GPU copies with vLLM's functions (`copies: "engine"`) or with `hybridkv.transfer.cuda`
(`copies: "native"`), from and to pinned memory. Any other device is refused.
"""

from __future__ import annotations

import logging
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
from hybridkv.transfer.pinned import map_memory, numa_local_cpus, pin

logger = logging.getLogger("vllm.hybridkv.worker")

Integers = npt.NDArray[np.int64]

MAX_BATCH_COPIES = 128
"""Maximum copies in one call of `swap_blocks_batch`. The GPU begins with the copies of a call when the call ends. On an
H100, copies of 64 KiB in calls of 128 copies load 42 GB/s and store 43 GB/s; in one call of 1,024 copies, 30 and 31
GB/s. Copies of 16 KiB load 29 GB/s; in one call of 4,096 copies, 4 GB/s. A call crashes with about 50,000 copies on
CUDA, and with more than 8,192 on ROCm."""

SMALL_CHUNK_BYTES = 8192
"""Bytes that one program of vLLM's kernel for small loads copies at a time."""
SMALL_MULTIPLE = 16
"""vLLM's kernel for small loads gets a multiple of this number of runs. For other numbers, and for other values of
`SMALL_CHUNK_BYTES`, Triton would compile another kernel. So it compiles only one, for the proof at the start."""


@dataclass(frozen=True, slots=True)
class EngineCopies:
    """vLLM's functions for copies between a GPU and host memory.

    Args:
        swap_blocks_batch: function of `vllm._custom_ops` that takes tensors of addresses and sizes, and enqueues the
            copies in the current stream.
        host_register: function of `vllm.v1.kv_offload.cpu.host_register` that pins memory. It returns False if it
            cannot pin.
        host_unregister: unpins memory.
        last_error: returns and clears the last error code of the GPU's runtime on this thread; 0: no error.
        load_small: function of `vllm.v1.kv_offload.cpu.swap_blocks_triton` that takes the same tensors as
            `swap_blocks_batch` and `bytes_per_chunk`, and copies from pinned memory with a kernel; None if it cannot be
            used.
        max_small_bytes: `load_small` is used only if each copy of a load has fewer bytes.
    """

    swap_blocks_batch: Callable[..., Any]
    host_register: Callable[[int, int], bool]
    host_unregister: Callable[[int], Any]
    last_error: Callable[[], int]
    load_small: Callable[..., Any] | None = None
    max_small_bytes: int = 0


class EngineDevice:
    """`CopyDevice` for CUDA or ROCm with vLLM's copies: the current GPU of the thread that creates this object.

    Raises:
        RuntimeError: torch finds no GPU.
    """

    def __init__(self, copies: EngineCopies) -> None:
        import torch

        self._torch = torch
        self._copies = copies
        self._load_small = copies.load_small
        self._index = int(torch.cuda.current_device())
        self._pinned: list[tuple[int, int]] = []

    def enter_thread(self) -> None:
        # A new thread uses GPU 0. A call of torch would create a context on GPU 0, which takes GPU memory.
        self._torch.cuda.set_device(self._index)

    def new_stream(self) -> Any:
        return self._torch.cuda.Stream(self._index)

    def new_event(self) -> Any:
        # With blocking=True, a thread that waits for the event sleeps.
        return self._torch.cuda.Event(blocking=True)

    def current_stream(self) -> Any:
        return self._torch.cuda.current_stream(self._index)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(stream)

    def swap_blocks_batch(
        self, sources: Integers, destinations: Integers, num_bytes: Integers, *, is_src_access_order_any: bool
    ) -> None:
        self._copies.last_error()  # clears errors of earlier calls
        columns = [self._torch.from_numpy(each) for each in (sources, destinations, num_bytes)]
        if is_src_access_order_any and self._are_small(sources, destinations, num_bytes):
            num_copied = len(sources) - len(sources) % SMALL_MULTIPLE
            if num_copied and self._load_by_kernel([column[:num_copied] for column in columns]):
                columns = [column[num_copied:] for column in columns]
        if not len(columns[0]):
            return
        for batch in zip(*(column.split(MAX_BATCH_COPIES) for column in columns), strict=True):
            self._copies.swap_blocks_batch(*batch, is_src_access_order_any=is_src_access_order_any)
            # If the driver has no batch copies, vLLM makes single copies and ignores their error codes.
            if code := self._copies.last_error():
                raise TransferError(f"vLLM's swap_blocks_batch: error {code} of the GPU's runtime")

    def _load_by_kernel(self, columns: list[Any]) -> bool:
        """Enqueues loads with vLLM's kernel for small loads. False if the kernel cannot be compiled or launched: then
        nothing is enqueued, and later loads do not try the kernel again.

        vLLM copies `columns` to the GPU. Their memory is not pinned, so CUDA has read it when this function returns.
        """
        assert self._load_small is not None
        try:
            self._load_small(*columns, is_src_access_order_any=True, bytes_per_chunk=SMALL_CHUNK_BYTES)
        except Exception as error:  # of Triton's compiler or of its launcher
            self._load_small = None
            logger.warning("small loads do not use vLLM's kernel: %s: %s", type(error).__name__, error)
            return False
        return True

    def _are_small(self, sources: Integers, destinations: Integers, num_bytes: Integers) -> bool:
        """Whether vLLM's kernel for small loads is faster, and can copy all runs: it copies words of 8 bytes."""
        if self._load_small is None or int(num_bytes.max()) >= self._copies.max_small_bytes:
            return False
        return not any(int(np.bitwise_or.reduce(column)) % 8 for column in (sources, destinations, num_bytes))

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._pinned)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Pins host memory for the GPU, until no view of the memory exists.

        Raises:
            TransferError: the memory cannot be pinned.
        """
        cpus = numa_local_cpus(self._torch.cuda.get_device_properties(self._index))
        pin(memory, self._register, self._copies.host_unregister, cpus)
        address = int(memory.ctypes.data)
        self._pinned.append((address, address + memory.nbytes))

    def _register(self, address: int, num_bytes: int) -> None:
        if not self._copies.host_register(address, num_bytes):
            raise TransferError(f"vLLM's host_register of {num_bytes} bytes failed; see its warning, and `ulimit -l`")


DEVICE_TYPES = ("cpu", "cuda")
ZERO_BYTES = 64 * 1024
"""Bytes of zeroed memory on each worker's device."""
MAX_DIGEST_THREADS = 8
_HINT = "run vLLM on a CPU or on GPUs of its CUDA or ROCm platform"


class Device(ABC):
    """Device of one worker."""

    device_type: ClassVar[str]
    """vLLM's device type: "cpu" or "cuda". "cuda" for ROCm too."""

    @abstractmethod
    def copy_engines(self, load: str) -> tuple[CopyEngine, CopyEngine]:
        """Engines for stores and loads. `load` is "async", or "sync" for loads that end within `submit`.

        Raises:
            ConfigurationError: hybridkv-cuda or its GPU is missing.
        """

    @abstractmethod
    def arena_memory(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Memory for this worker's arena; None if the arena may use ordinary memory.

        Raises:
            ConfigurationError: the memory cannot be pinned.
        """

    @abstractmethod
    def pin_pool(self, memory: npt.NDArray[np.uint8]) -> None:
        """Pins existing memory for copies of the device, until no view of the memory exists.

        Raises:
            ConfigurationError: the memory cannot be pinned.
        """

    @abstractmethod
    def digest_threads(self, num_workers: int) -> int:
        """Number of threads for checksums of this worker's arena. `num_workers`: workers of the engine."""

    def prepare(self, kv_caches: Mapping[str, Any]) -> None:
        """Refuses KV caches on another device. On a CPU, also requests permission for AMX.

        Raises:
            ConfigurationError: a KV cache is on another device; the text names the layer.
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

    def pin_pool(self, memory: npt.NDArray[np.uint8]) -> None:
        """Does nothing: a CPU can copy from all memory."""

    def digest_threads(self, num_workers: int) -> int:
        """1: the copy thread. The engine needs the other cores, and stores take checksums during the copy."""
        return 1

    def prepare(self, kv_caches: Mapping[str, Any]) -> None:
        super().prepare(kv_caches)
        # The engine's attention kernels need AMX even if no other kernel has run before.
        compat.permit_amx()


class GpuDevice(Device):
    """The current GPU of this thread. Launched work runs later, in the thread's current stream."""

    device_type = "cuda"

    def digest_threads(self, num_workers: int) -> int:
        """A quarter of the worker's share of cores, at least 1, at most 8: the engine needs the other cores.

        On a host with an H100, 1 thread reads 14 GB/s, 4 threads 42 to 45 GB/s, 8 threads 72 GB/s. The link to the GPU
        has 54 GB/s, so checksums on 1 thread would limit loads and stores.
        """
        return max(1, min(MAX_DIGEST_THREADS, len(os.sched_getaffinity(0)) // (4 * num_workers)))

    def launch(self, work: Callable[[], object]) -> None:
        """Calls `work`, which launches compute."""
        work()

    def launch_delay(self, cycles: int) -> None:
        """Launches compute that takes this number of GPU cycles."""
        import torch

        torch.cuda._sleep(cycles)

    def mark(self) -> Callable[[], bool]:
        """Returns a function that tells whether all work launched so far has ended. Any thread may call the result."""
        import torch

        event = torch.cuda.Event()
        event.record()
        return event.query

    def synchronize(self) -> None:
        """Waits for all work that this thread has launched."""
        import torch

        torch.cuda.current_stream().synchronize()


class EngineGpuDevice(GpuDevice):
    """A GPU that copies with vLLM's functions. Loads and stores have separate engines without a common stream."""

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

    def pin_pool(self, memory: npt.NDArray[np.uint8]) -> None:
        try:
            self._device.pin(memory)
        except TransferError as error:
            raise _cannot_pin("pool", "the pool", error) from error


class NativeGpuDevice(GpuDevice):
    """A GPU that copies with the kernels of hybridkv-cuda. Loads and stores have separate streams."""

    def copy_engines(self, load: str) -> tuple[CopyEngine, CopyEngine]:
        from hybridkv.transfer.cuda import CudaCopyEngine, CudaError, InlineCudaCopyEngine, open_device

        try:
            index = _current_gpu()
            load_engine = CudaCopyEngine if load == "async" else InlineCudaCopyEngine
            # Separate engines: loads and stores use different directions of the link, and should not share a queue.
            return CudaCopyEngine(open_device(index)), load_engine(open_device(index))
        except CudaError as error:
            raise ConfigurationError("copies", 'a GPU and hybridkv-cuda for "native"', str(error), _HINT) from error

    def arena_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        from hybridkv.transfer.cuda import pin_memory

        try:
            return pin_memory(num_bytes)
        except TransferError as error:
            raise _cannot_pin("capacity", "the capacity of the ram tier", error) from error

    def pin_pool(self, memory: npt.NDArray[np.uint8]) -> None:
        from hybridkv.transfer.cuda import pin_existing

        try:
            pin_existing(memory)
        except TransferError as error:
            raise _cannot_pin("pool", "the pool", error) from error


def open_device(device_type: str, copies: str) -> Device:
    """Device of this worker.

    Args:
        device_type: vLLM's device type.
        copies: for a GPU: "engine" copies with vLLM's functions, "native" with hybridkv-cuda.

    Raises:
        ConfigurationError: the device type is unknown; or, for "engine", the GPU is missing, or this vLLM lacks the
            functions for copies.
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
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build of torch without CUDA
        raise ConfigurationError("device", "a GPU that torch can use", str(error), _HINT) from error


def zero_memory(device: Any) -> Any:
    """Tensor of `ZERO_BYTES` zero bytes on `device`. Waits until the zeros are written."""
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
