"""What a copy engine asks of a GPU. `TorchCudaDevice` is the real one; tests play one on the CPU."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from hybridkv.transfer.cuda.plan import CopyTuning
from hybridkv.transfer.errors import TransferError
from hybridkv.transfer.runs import CopyRuns


class CudaError(TransferError, RuntimeError):
    """A call into CUDA failed; the text names it. In a copy it becomes the job's failure."""


class MemoryKind(Enum):
    """Where an address lies, as the driver sees it."""

    DEVICE = "device"
    """This GPU's own memory."""
    PINNED = "pinned"
    """Host memory that this GPU can address and that the operating system does not move."""
    OTHER = "other"
    """Ordinary host memory, or another GPU's."""


class Queue(Enum):
    """The two streams of an engine. What is enqueued in one happens in order; two are ordered by events alone."""

    KERNEL = "kernel"
    TRANSFER = "transfer"


class CudaDevice(Protocol):
    """One GPU, with two streams and staging memory that belong to one engine.

    Nothing but `finish` and `close` waits for the GPU. An engine calls all but `caller_event`, `memory_kind` and
    `register` on its copy thread. Every method raises `CudaError` when a call into CUDA fails.
    """

    @property
    def tuning(self) -> CopyTuning: ...

    @property
    def staging_address(self) -> int:
        """Of `tuning.staging_bytes` of device memory, aligned to 16 bytes or more."""
        ...

    @property
    def has_kernels(self) -> bool:
        """False: `copy_by_kernel` is not to be called, and each run costs a call."""
        ...

    def memory_kind(self, address: int) -> MemoryKind: ...

    def register(self, address: int, num_bytes: int, kind: MemoryKind) -> None:
        """Memory that copies may touch from now on."""
        ...

    def caller_event(self) -> Any:
        """An event behind everything that the calling thread has enqueued for compute so far."""
        ...

    def record(self, queue: Queue) -> Any:
        """An event behind everything that was enqueued in `queue` so far."""
        ...

    def wait(self, queue: Queue, event: Any) -> None:
        """What is enqueued in `queue` from now on happens after `event`."""
        ...

    def copy_by_kernel(self, runs: CopyRuns) -> None:
        """Enqueue in KERNEL."""
        ...

    def copy_by_transfer(self, runs: CopyRuns) -> None:
        """Enqueue in TRANSFER."""
        ...

    def finish(self) -> None:
        """Wait until both queues are empty. Reports what failed on the way."""
        ...
