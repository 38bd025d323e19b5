"""A GPU through torch: its streams, events and allocator, and the kernels of hybridkv-cuda where they are installed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np
import torch

from hybridkv.transfer.cuda import driver
from hybridkv.transfer.cuda.device import CudaError, MemoryKind, Queue
from hybridkv.transfer.cuda.extension import cuda_kernels
from hybridkv.transfer.cuda.plan import CopyTuning
from hybridkv.transfer.cuda.table import ROW_WORDS, fragment_table
from hybridkv.transfer.runs import CopyRuns, Integers

TABLE_ROWS = 64 * 1024
"""Rows that the tables of one job may have together before memory must be allocated for them, which delays compute."""


class TorchCudaDevice:
    """A `CudaDevice`. `index` is torch's; `CudaError` when torch sees no such GPU."""

    def __init__(self, index: int, tuning: CopyTuning) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise CudaError(f"torch {torch.__version__} sees no GPU cuda:{index}")
        self._device = torch.device("cuda", index)
        self._tuning = tuning
        self._kernels = cuda_kernels()
        self._views: list[tuple[int, int, torch.Tensor]] = []
        self._keep: list[torch.Tensor] = []
        with self._calling("open"):
            self._streams = {queue: torch.cuda.Stream(self._device) for queue in Queue}
            if self._kernels is not None:
                # All that a job needs is taken now: taking memory and loading code may wait for what the GPU runs.
                self._kernels.load_kernels()
                self._staging = torch.empty(tuning.staging_bytes, dtype=torch.uint8, device=self._device)
                self._host_rows = torch.empty((TABLE_ROWS, ROW_WORDS), dtype=torch.int64, pin_memory=True)
                self._rows = torch.empty((TABLE_ROWS, ROW_WORDS), dtype=torch.int64, device=self._device)
        self._rows_used = 0

    @property
    def tuning(self) -> CopyTuning:
        return self._tuning

    @property
    def staging_address(self) -> int:
        return self._staging.data_ptr() if self._kernels is not None else 0

    @property
    def has_kernels(self) -> bool:
        return self._kernels is not None

    def memory_kind(self, address: int) -> MemoryKind:
        with self._calling("memory_kind"):
            return driver.memory_kind(address, self._device.index)

    def register(self, address: int, num_bytes: int, kind: MemoryKind) -> None:
        if self._kernels is None:
            with self._calling("register"):
                self._views.append((address, num_bytes, _view(address, num_bytes, kind, self._device)))

    def caller_event(self) -> torch.cuda.Event:
        with self._calling("record on the caller's stream"):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            return event

    def record(self, queue: Queue) -> torch.cuda.Event:
        with self._calling("record"):
            event = torch.cuda.Event()
            event.record(self._streams[queue])
            return event

    def wait(self, queue: Queue, event: torch.cuda.Event) -> None:
        with self._calling("wait"):
            self._streams[queue].wait_event(event)

    def copy_by_kernel(self, runs: CopyRuns) -> None:
        table = fragment_table(runs, self._tuning.tile_bytes)
        stream = self._streams[Queue.KERNEL]
        with self._calling("copy_fragments"), torch.cuda.stream(stream):
            rows = self._upload(_tensor(table.rows))
            self._kernels.copy_fragments(
                rows, table.num_tiles, self._tuning.tile_bytes, self._tuning.num_blocks, stream.cuda_stream
            )

    def _upload(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows on the GPU, until `finish`."""
        first, last = self._rows_used, self._rows_used + rows.shape[0]
        if last > TABLE_ROWS:
            host = rows.pin_memory()
            uploaded = host.to(self._device, non_blocking=True)
            self._keep += [host, uploaded]
            return uploaded
        self._rows_used = last
        self._host_rows[first:last] = rows
        return self._rows[first:last].copy_(self._host_rows[first:last], non_blocking=True)

    def copy_by_transfer(self, runs: CopyRuns) -> None:
        stream = self._streams[Queue.TRANSFER]
        with self._calling("copy_batch"), torch.cuda.stream(stream):
            if self._kernels is None:
                for source, destination, num_bytes in runs.triples():
                    self._bytes(destination, num_bytes).copy_(self._bytes(source, num_bytes), non_blocking=True)
                return
            columns = [_tensor(column) for column in (runs.sources, runs.destinations, runs.num_bytes)]
            self._kernels.copy_batch(*columns, stream.cuda_stream)

    def checksums(self, ranges: Integers) -> list[bytes]:
        """XXH3-128 of each range (address, num_bytes), as xxhash's `digest()` gives it. Waits for the answer.

        Needs the kernels. The ranges may lie on the GPU or in pinned memory; they are read after all that KERNEL holds.
        """
        stream = self._streams[Queue.KERNEL]
        with self._calling("checksums"), torch.cuda.stream(stream):
            table = _tensor(ranges).pin_memory().to(self._device, non_blocking=True)
            digests = torch.empty_like(table)
            self._kernels.checksums(table, digests, self._tuning.num_blocks, stream.cuda_stream)
            words = digests.cpu().numpy().view(np.uint64)
        return [int(high).to_bytes(8, "big") + int(low).to_bytes(8, "big") for low, high in words]

    def finish(self) -> None:
        try:
            with self._calling("synchronize"):
                for stream in self._streams.values():
                    # A blocking event lets the thread sleep, where the stream's own wait would spin.
                    event = torch.cuda.Event(blocking=True)
                    event.record(stream)
                    event.synchronize()
        finally:
            self._keep.clear()
            self._rows_used = 0

    def _bytes(self, address: int, num_bytes: int) -> torch.Tensor:
        for start, size, view in self._views:
            if start <= address and address + num_bytes <= start + size:
                return view[address - start : address - start + num_bytes]
        raise CudaError(f"[{address:#x}, +{num_bytes}) does not lie in registered memory")

    @contextlib.contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        """On this GPU, and with torch's errors as ours."""
        try:
            with torch.cuda.device(self._device):
                yield
        except RuntimeError as error:
            if isinstance(error, CudaError):
                raise
            raise CudaError(f"{name}: {error}") from error


def _tensor(array: Integers) -> torch.Tensor:
    # A copy, because torch takes no read-only array.
    return torch.from_numpy(np.array(array, dtype=np.int64))


class _DeviceBytes:
    """Bytes of a GPU at an address, in the form that torch takes without copying."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _view(address: int, num_bytes: int, kind: MemoryKind, device: torch.device) -> torch.Tensor:
    if kind is MemoryKind.DEVICE:
        return torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
