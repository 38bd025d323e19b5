"""The kernel through csrc/cuda/tests/plain_api.cc: memory and copies on a GPU, without torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybridkv.transfer import CopyRuns

_ERROR_BYTES = 512
_ROW_BYTES = 64


class CudaCallError(Exception):
    """A call failed; the text names it."""


class PlainKernels:
    """One GPU's kernel on one stream."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library.resolve()))
        stream = ctypes.c_uint64(0)
        self._call("make_stream", ctypes.byref(stream))
        self._stream = ctypes.c_uint64(stream.value)

    @property
    def has_batch_copy(self) -> bool:
        return bool(self._library.hybridkv_cuda_has_batch_copy())

    @contextlib.contextmanager
    def memory(self, content: npt.NDArray[np.uint8], on_device: bool) -> Iterator[int]:
        """The address of memory on the GPU, or pinned on the host, that holds `content`."""
        address = self.allocate(max(1, content.nbytes), on_device)
        try:
            self._move(content.ctypes.data, address, content.nbytes)
            yield address
        finally:
            self._call("free", ctypes.c_int(on_device), ctypes.c_uint64(address))

    def allocate(self, num_bytes: int, on_device: bool) -> int:
        address = ctypes.c_uint64(0)
        self._call("allocate", ctypes.c_int(on_device), ctypes.c_uint64(num_bytes), ctypes.byref(address))
        return address.value

    def read(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        content = np.empty(num_bytes, dtype=np.uint8)
        self._move(address, content.ctypes.data, num_bytes)
        return content

    def copy(self, runs: CopyRuns, tile_bytes: int, num_blocks: int) -> None:
        """By the kernel. Waits for it."""
        rows = np.zeros(max(1, len(runs)) * _ROW_BYTES, dtype=np.uint8)
        with self.memory(rows, on_device=True) as table:
            self._call(
                "copy_by_kernel",
                *_pointers(runs),
                ctypes.c_uint64(len(runs)),
                ctypes.c_void_p(rows.ctypes.data),
                ctypes.c_uint64(table),
                ctypes.c_uint64(tile_bytes),
                ctypes.c_uint32(num_blocks),
                self._stream,
            )
            self._call("synchronize", self._stream)

    def copy_batch(self, runs: CopyRuns) -> None:
        """By the copy engines. Waits for them."""
        self._call("copy_batch", *_pointers(runs), ctypes.c_uint64(len(runs)), self._stream)
        self._call("synchronize", self._stream)

    def _move(self, source: int, destination: int, num_bytes: int) -> None:
        if num_bytes:
            self._call("move", ctypes.c_uint64(source), ctypes.c_uint64(destination), ctypes.c_uint64(num_bytes))

    def _call(self, name: str, *arguments: object) -> None:
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        call = getattr(self._library, f"hybridkv_cuda_{name}")
        if call(*arguments, error, ctypes.c_uint64(_ERROR_BYTES)):
            raise CudaCallError(error.value.decode())


def _pointers(runs: CopyRuns) -> list[ctypes.c_void_p]:
    """The columns of `runs`, which must outlive them."""
    return [ctypes.c_void_p(column.ctypes.data) for column in (runs.sources, runs.destinations, runs.num_bytes)]
