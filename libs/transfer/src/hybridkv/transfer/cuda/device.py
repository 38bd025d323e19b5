"""What a copy engine asks of a GPU. `KernelDevice` is the real one; tests play one on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hybridkv.transfer.runs import CopyRuns, TransferError

NUM_PARTS = 4
"""Parts of the staging memory, which take turns: `kParts` of csrc/cuda/job.h."""


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


@dataclass(frozen=True, slots=True)
class CopyTuning:
    """Which way each run takes: csrc/cuda/job.h describes the ways. Measured on one H100 by `bench/gpu_copy.py`.

    Args:
        large_run_bytes: from here on a run is moved by the GPU's copy engines, one descriptor each.
        direct_job_bytes: small runs of a job that are together no more than this are copied by the kernel alone.
        staging_bytes: of GPU memory that an engine keeps for itself, in `NUM_PARTS` parts.
        tile_bytes: what one warp of the kernel copies at a time.
        num_blocks: thread blocks of the kernel, hence the most multiprocessors that it takes from compute.
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
    """One GPU, with streams and staging memory that belong to one engine.

    An engine calls `copy` on its copy thread. Every method raises `CudaError` when a call into CUDA fails.
    """

    def memory_kind(self, address: int) -> MemoryKind: ...

    def register(self, address: int, num_bytes: int) -> None:
        """This GPU's memory, which copies may touch from now on."""
        ...

    def caller_event(self) -> Any:
        """An event behind everything that the calling thread has enqueued for compute so far."""
        ...

    def copy(self, runs: CopyRuns, caller: Any) -> None:
        """Copy behind an event of `caller_event`, and return when every byte is where it belongs.

        If it fails, nothing of the job can still write. The caller checked every address.
        """
        ...


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses by ranges (begin, end) that ascend and do not overlap."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
