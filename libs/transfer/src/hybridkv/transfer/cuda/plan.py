"""Which way each run of a job takes to or from a GPU. Decides by sizes and addresses alone, and can be printed.

Three ways:

- *batched*: the GPU's copy engines, one descriptor for each run. They use no multiprocessors and reach the link's
  speed once runs are large, but each descriptor costs time: for runs of `large_run_bytes` and more. They copy within
  one registration of host memory, so a run is cut where one may end.
- *staged*: small runs are packed on the GPU by the kernel into staging memory, which the copy engines then move in a
  few long runs; loads go the other way round. Two halves take turns, so that packing and moving overlap.
- *direct*: the kernel reads or writes pinned host memory itself: for jobs too small for two steps, where staging would
  not make the runs longer, and within the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridkv.transfer.memory import AddressRanges
from hybridkv.transfer.pinned import REGISTRATION_BYTES
from hybridkv.transfer.runs import CopyRuns

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CopyTuning:
    """What the decisions depend on. The defaults are estimates; `bench/gpu_copy.py` measures them on a machine.

    Args:
        large_run_bytes: from here on a run is moved by the copy engines: the crossover.
        direct_job_bytes: small runs of a job that are together no more than this are copied by the kernel alone.
        staging_bytes: of GPU memory that an engine keeps for itself, in two halves.
        tile_bytes: what one warp of the kernel copies at a time.
        num_blocks: thread blocks of the kernel, hence the most multiprocessors that it takes from compute.
    """

    large_run_bytes: int = 64 * 1024
    direct_job_bytes: int = 256 * 1024
    staging_bytes: int = 32 * 1024 * 1024
    tile_bytes: int = 16 * 1024
    num_blocks: int = 16

    def __post_init__(self) -> None:
        for name in ("large_run_bytes", "direct_job_bytes", "staging_bytes", "tile_bytes", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {getattr(self, name)}")
        if self.large_run_bytes > self.half_bytes:
            raise ValueError(f"staging_bytes: expected at least {2 * self.large_run_bytes}, got {self.staging_bytes}")

    @property
    def half_bytes(self) -> int:
        return self.staging_bytes // 2


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """One turn of one half of the staging memory.

    Args:
        half: 0 or 1.
        is_store: True: first `kernel` packs, then `moved` goes to the host. False: `moved`, then `kernel` unpacks.
        kernel: runs between the KV memory and staging memory.
        moved: runs between staging memory and the host.
    """

    half: int
    is_store: bool
    kernel: CopyRuns
    moved: CopyRuns


@dataclass(frozen=True, slots=True)
class StagedRuns:
    """Small runs of one direction, in the host's order, and the staging memory that they pass through.

    The turns are made one by one, so that the first is on its way while the next is made.
    """

    runs: CopyRuns
    is_store: bool
    staging_address: int
    half_bytes: int

    def batches(self) -> Iterator[StagedBatch]:
        runs = self.runs
        ends = np.cumsum(runs.num_bytes)
        first, half = 0, 0
        while first < len(runs):
            begin = int(ends[first] - runs.num_bytes[first])
            last = int(np.searchsorted(ends, begin + self.half_bytes, side="right"))
            sizes = runs.num_bytes[first:last]
            packed = self.staging_address + half * self.half_bytes + (ends[first:last] - sizes - begin)
            to_staging = CopyRuns(runs.sources[first:last], packed, sizes)
            from_staging = CopyRuns(packed, runs.destinations[first:last], sizes)
            kernel, moved = (to_staging, from_staging) if self.is_store else (from_staging, to_staging)
            yield StagedBatch(half, self.is_store, kernel, moved.coalesce().cut_at_multiples(REGISTRATION_BYTES))
            first, half = last, 1 - half


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Every byte of a job once. The parts may run in any order, the batches of one half after one another."""

    within_host: CopyRuns
    batched: CopyRuns
    direct: CopyRuns
    staged: tuple[StagedRuns, ...]

    def batches(self) -> Iterator[StagedBatch]:
        """The turns of staging memory, in order."""
        for part in self.staged:
            yield from part.batches()

    def describe(self) -> str:
        """Counts, for a log line."""
        staged = sum(len(part.runs) for part in self.staged)
        return (
            f"{len(self.batched)} runs batched, {len(self.direct)} direct, {staged} staged, "
            f"{len(self.within_host)} within host memory"
        )


def plan_copies(
    runs: CopyRuns, device: AddressRanges, staging_address: int, tuning: CopyTuning, *, has_kernels: bool = True
) -> CopyPlan:
    """How to carry out `runs`.

    Args:
        runs: between registered memory. The caller checked every address.
        device: which of it is the GPU's.
        staging_address: of `tuning.staging_bytes` of GPU memory that nobody else uses.
        tuning: the limits.
        has_kernels: False: everything that touches the GPU is batched.
    """
    from_device, to_device = device.contain(runs.sources), device.contain(runs.destinations)
    touches_device = from_device | to_device
    is_large = (runs.num_bytes >= tuning.large_run_bytes) | (not has_kernels)
    within = from_device & to_device
    is_direct = within & ~is_large
    staged: list[StagedRuns] = []
    for is_store, is_mine in ((True, from_device & ~within), (False, to_device & ~within)):
        small = is_mine & ~is_large
        if not small.any():
            continue
        part = _in_host_order(runs.select(small), is_store)
        if _is_worth_staging(part, is_store, tuning):
            staged.append(StagedRuns(part, is_store, staging_address, tuning.half_bytes))
        else:
            is_direct |= small
    return CopyPlan(
        within_host=runs.select(~touches_device),
        batched=runs.select(touches_device & is_large).cut_at_multiples(REGISTRATION_BYTES),
        direct=runs.select(is_direct),
        staged=tuple(staged),
    )


def _in_host_order(runs: CopyRuns, is_store: bool) -> CopyRuns:
    """So that neighbours on the host are neighbours in staging memory, and move together."""
    host = runs.destinations if is_store else runs.sources
    if (host[1:] >= host[:-1]).all():
        return runs
    order = np.argsort(host, kind="stable")
    return CopyRuns(runs.sources[order], runs.destinations[order], runs.num_bytes[order])


def _is_worth_staging(runs: CopyRuns, is_store: bool, tuning: CopyTuning) -> bool:
    host = runs.destinations if is_store else runs.sources
    stretches = 1 + int(np.count_nonzero(host[1:] != host[:-1] + runs.num_bytes[:-1]))
    num_bytes = runs.total_bytes
    return num_bytes > tuning.direct_job_bytes and num_bytes >= stretches * tuning.large_run_bytes
