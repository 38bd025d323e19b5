"""The `CudaDevice` protocol. `KernelDevice` implements it; tests simulate a device on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hybridkv.transfer.gpu import EnqueuedCopies
from hybridkv.transfer.runs import CopyRuns, TransferError

NUM_PARTS = 4
"""Parts of the staging memory, used in rotation: `kParts` of csrc/cuda/job.h."""


class CudaError(TransferError, RuntimeError):
    """Failure of a CUDA call (the text names the call), or no usable GPU or hybridkv-cuda. A failure during a copy
    fails the job."""


class MemoryKind(Enum):
    """Kind of the memory at an address, according to the driver."""

    DEVICE = "device"
    """Memory of this GPU."""
    PINNED = "pinned"
    """Pinned host memory that has the same address on this GPU."""
    OTHER = "other"
    """Any other memory: pageable host memory, memory of another GPU."""


@dataclass(frozen=True, slots=True)
class CopyTuning:
    """Sizes that select the copy method of each run (see csrc/cuda/job.h). Measured on one H100 by `bench/gpu_copy.py`.

    Args:
        large_run_bytes: runs of this size or more are copied by the GPU's copy engines, with one descriptor each.
        direct_job_bytes: if the small runs of one direction of a job have at most this total size, the kernel copies
            them without staging.
        staging_bytes: GPU memory that one engine reserves, in `NUM_PARTS` parts.
        tile_bytes: bytes that one warp of the kernel copies at a time.
        num_blocks: thread blocks of the kernel: the maximum number of multiprocessors that it takes from compute.
    """

    large_run_bytes: int = 1024 * 1024
    direct_job_bytes: int = 256 * 1024
    staging_bytes: int = 32 * 1024 * 1024
    tile_bytes: int = 16 * 1024
    num_blocks: int = 8

    def __post_init__(self) -> None:
        for name in ("large_run_bytes", "direct_job_bytes", "staging_bytes", "tile_bytes", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {getattr(self, name)}")
        if self.large_run_bytes > self.part_bytes:
            least = NUM_PARTS * self.large_run_bytes
            raise ValueError(f"staging_bytes: expected at least {least}, got {self.staging_bytes}")

    @property
    def part_bytes(self) -> int:
        return self.staging_bytes // NUM_PARTS


class CudaDevice(Protocol):
    """One GPU, with the streams and staging memory of one engine.

    One thread at a time calls `enqueue`. Every method raises `CudaError` if a CUDA call fails.
    """

    def memory_kind(self, address: int) -> MemoryKind: ...

    def register(self, address: int, num_bytes: int) -> None:
        """Allow copies in this range of the GPU's memory."""
        ...

    def caller_event(self) -> Any:
        """An event after all compute that the calling thread has enqueued."""
        ...

    def enqueue(self, runs: CopyRuns, caller: Any) -> EnqueuedCopies:
        """Enqueue copies after an event of `caller_event`. The caller has checked every address.

        After an exception, no copy of the job still writes.
        """
        ...


def merge_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges (begin, end) into sorted ranges that neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
