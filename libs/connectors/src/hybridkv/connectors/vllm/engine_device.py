"""The GPU of a worker as vLLM copies from and to it: its batched copies and pinning, torch's streams and events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridkv.transfer import TransferError
from hybridkv.transfer.pinned import near_cpus, pin

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
