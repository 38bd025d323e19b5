"""Loads in flight: planned when the engine has allocated their blocks, tracked until every rank has ended them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.common.blocks.blocks import tables_of
from hybridkv.connectors.vllm.common.copies.table import CopyTable, copies_of_runs
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import Load, LoadFailure
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.common.stats import RAM, ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.local_blocks import LocalBlocks
from hybridkv.planner import (
    LoadAdmission,
    LocalCopies,
    LookupResult,
    PlanError,
    Transfer,
    TransferRun,
    plan_load_runs,
    transfers_of,
)
from hybridkv.tiers import FailureReason, Slot
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

logger = logging.getLogger("vllm.hybridkv.scheduler")

_NOTHING_READ = frozenset({"timeout", "busy"})
"""Failure reasons of loads that have read no byte."""


@dataclass(slots=True)
class _LoadInFlight:
    tracked: TrackedRequest
    boundary: int
    keys: list[bytes]
    num_tokens: int
    num_bytes: int
    """Bytes from the tiers, on one rank."""
    local_tokens: int = 0
    local_bytes: int = 0
    """Bytes copied from blocks of the engine, on one rank."""
    source: str = RAM
    """Slowest tier from which a chunk of the load was promoted; host memory without a promotion."""
    failures: list[LoadFailure] = field(default_factory=list)


class LoadsInFlight:
    """Plans loads with allocated blocks, and tracks them until all ranks have ended them.

    Args:
        layout: the model's groups.
        stack: the tiers.
        admission: limits the loads that hold blocks at the same time.
        metrics: the connector's metrics.
        local: finds blocks of the engine that loads may copy from; by default none.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        admission: LoadAdmission,
        metrics: ConnectorMetrics,
        local: LocalBlocks | None = None,
    ) -> None:
        self._layout = layout
        self._local = local or LocalBlocks(layout, is_wanted=False)
        self._stack = stack
        self._admission = admission
        self._metrics = metrics
        self._loads: dict[str, _LoadInFlight] = {}

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._local.bind(pool)

    def begin(self, tracked: TrackedRequest, boundary: int, blocks: KVCacheBlocks) -> Load:
        """Plans the load up to `boundary` into the allocated blocks, and pins the chunks of the load.

        A load that cannot be planned is refused: the workers report it as failed and copy nothing.
        """
        load, in_flight = self._plan(tracked, boundary, blocks)
        self._loads[tracked.request_id] = in_flight
        self._admission.take(tracked.request_id, tracked.request.num_tokens)
        return load

    def local_tokens(self, request_id: str) -> int:
        """Number of tokens of the request's load that are copied from blocks of the engine."""
        return self._loads[request_id].local_tokens

    def _plan(self, tracked: TrackedRequest, boundary: int, blocks: KVCacheBlocks) -> tuple[Load, _LoadInFlight]:
        request_id, computed = tracked.request_id, tracked.computed_tokens
        table = tables_of(blocks.blocks)
        hold = self._stack.lease(request_id)
        source = RAM if hold is None else hold.source
        in_flight = _LoadInFlight(tracked, boundary, [], boundary - computed, 0, source=source)
        try:
            runs = plan_load_runs(self._layout.spec, boundary, computed, table, NULL_BLOCK)
            local = self._local.find(tracked, runs, computed)
            load = Load(request_id, self._pin(tracked, runs, local, in_flight))
        except PlanError as error:
            # The engine waits for this load, so the workers must report its failure. Nothing is written.
            self._stack.unpin_all(in_flight.keys)
            in_flight.keys.clear()
            logger.error("request %s cannot load %d tokens: %s", printable(request_id), in_flight.num_tokens, error)
            load = Load(request_id, CopyTable(), str(error))
        return load, in_flight

    def _pin(
        self, tracked: TrackedRequest, runs: Sequence[TransferRun], local: LocalCopies | None, in_flight: _LoadInFlight
    ) -> CopyTable:
        """Plans the copies, and pins every chunk in the primary tier.

        Chunks that are copied from the engine's blocks are pinned too: the load reads them from the tier if the blocks
        cannot be used after all.
        """
        wanted = self._run_keys(tracked, runs)
        slots = self._stack.pin_all(wanted)
        if slots is None:
            raise PlanError(self._describe_missing(runs, wanted))
        if self._stack.has_async_lookups:
            self._require_sizes(runs, wanted, slots)
        in_flight.keys += wanted
        planned = copies_of_runs(self._layout, runs, wanted, slots, local)
        if local is not None:
            in_flight.local_tokens = local.num_tokens
            self._local.pin(tracked.request_id, local)
        in_flight.num_bytes += planned.tier_bytes
        in_flight.local_bytes += planned.local_bytes
        return planned.copies

    def _transfers(self, runs: Sequence[TransferRun]) -> tuple[Transfer, ...]:
        return transfers_of(runs, self._layout.spec.chunk_tokens)

    def _run_keys(self, tracked: TrackedRequest, runs: Sequence[TransferRun]) -> list[bytes]:
        keys, chunk = tracked.keys(), self._layout.spec.chunk_tokens
        wanted: list[bytes] = []
        for group_index, group_runs in groupby(runs, key=attrgetter("group_index")):
            wanted += keys.ending_at(group_index, [end for run in group_runs for end in run.end_tokens(chunk)])
        return wanted

    def _require_sizes(self, runs: Sequence[TransferRun], keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Checks the length of all chunks, and invalidates chunks with a wrong length in every tier.

        A remote tier may report a wrong length. Without this check, the next request would find the same chunks.

        Raises:
            PlanError: a chunk has a wrong length. All chunks are unpinned.
        """
        size = self._layout.chunk_bytes
        bad = [
            (key, slot.num_bytes)
            for part, key, slot in zip(self._transfers(runs), keys, slots, strict=True)
            if slot.num_bytes != size(part.group_index, part.end_token)
        ]
        if bad:
            self._stack.unpin_all(keys)
            for key, _ in bad:
                self._stack.invalidate(key, FailureReason.WRONG_KEY)
            raise PlanError(
                f"{len(bad)} of its chunks have a wrong length, such as {bad[0][0].hex()} with {bad[0][1]} bytes"
            )

    def _describe_missing(self, runs: Sequence[TransferRun], keys: Sequence[bytes]) -> str:
        lookup = self._stack.primary.lookup
        for part, key in zip(self._transfers(runs), keys, strict=True):
            if lookup(key) is not LookupResult.HIT:
                return f"the chunk of group {part.group_index} that ends at {part.end_token} is not stored"
        return "its chunks could not be pinned in the primary tier"

    def without_local_copies(self, loads: Iterable[Load]) -> list[Load]:
        """The same loads without copies from the engine's blocks. Local copies are off for all later loads too.

        Loads that run before the forward pass may fail, and the blocks that they were to fill keep their hashes for a
        while, so these blocks must not be copied.
        """
        self._local.switch_off()
        return [self._read_from_tier(load) for load in loads]

    def without_corrupt_blocks(self, loads: Iterable[Load], is_corrupt: Callable[[int], bool]) -> list[Load]:
        """The same loads; those that would copy from a block now known to be corrupt read only from the tier."""
        return [
            self._read_from_tier(load) if any(map(is_corrupt, load.copies.local_blocks())) else load for load in loads
        ]

    def _read_from_tier(self, load: Load) -> Load:
        in_flight = self._loads[load.request_id]
        in_flight.num_bytes, in_flight.local_bytes = in_flight.num_bytes + in_flight.local_bytes, 0
        in_flight.local_tokens = 0
        self._local.free(load.request_id)
        return msgspec.structs.replace(load, copies=load.copies.from_tier())

    def has_work(self) -> bool:
        return bool(self._loads)

    def holds_freed_blocks(self) -> bool:
        """Whether the end of a load will return blocks to the engine's pool."""
        return self._local.holds_freed_blocks()

    def close(self) -> None:
        """Unpins all blocks in the engine's pool."""
        self._local.close()

    # Results of the workers.

    def on_failures(self, request_id: str, failures: Iterable[LoadFailure]) -> None:
        """Records failures of a load on some rank. `on_ended` follows when all ranks have ended."""
        if in_flight := self._loads.get(request_id):
            in_flight.failures += failures

    def on_ended(self, request_id: str, tracked: TrackedRequest | None, failed: bool) -> int:
        """Called when a load has ended on every rank. After a failure, withdraws the suspect chunks.

        Returns:
            Tokens that were restored; 0 after a failure.
        """
        in_flight = self._loads.pop(request_id, None)
        if in_flight is None:
            return 0
        if tracked is None:
            self._admission.give_back(request_id)
        culprits = {failure.key for failure in in_flight.failures if failure.key is not None}
        for key in self._suspect_keys(in_flight, culprits):
            self._stack.invalidate_primary(key)
        self._stack.unpin_all(reversed(in_flight.keys))
        self._local.free(request_id)
        num_ranks = self._layout.world_size
        self._metrics.load(in_flight.num_bytes * num_ranks, failed, in_flight.failures)
        if not failed:
            self._metrics.local(in_flight.source, in_flight.local_tokens, in_flight.local_bytes * num_ranks)
        if tracked is not None:
            tracked.load_ended(failed=failed, is_explained=bool(culprits))
        if failed and tracked is not None:
            self._admission.fail(request_id, tracked.request.num_tokens)
            reasons = "; ".join(sorted({f"{f.reason}: {f.detail}" for f in in_flight.failures})) or "no reason given"
            logger.warning(
                "request %s: loading %d tokens failed; kv_load_failure_policy decides what follows (%s)",
                printable(request_id),
                in_flight.num_tokens,
                reasons,
            )
        return 0 if failed else in_flight.num_tokens

    def _suspect_keys(self, in_flight: _LoadInFlight, culprits: set[bytes]) -> Iterable[bytes]:
        """Keys to withdraw from the primary tier after a load that failed.

        If ranks name corrupt chunks, the whole prefix up to the boundary is suspect, except chunks that every rank has
        verified: a shorter load would read windows and states that this load did not read. With
        `kv_load_failure_policy: fail` each further corrupt chunk would end one more request. If no rank names a chunk,
        all chunks of the load are suspect, unless no rank has read a byte.
        """
        if not culprits:
            has_read = any(failure.reason not in _NOTHING_READ for failure in in_flight.failures)
            return in_flight.keys if has_read else ()
        doubted = culprits | set(self._prefix_keys(in_flight))
        # A rank that sends a failure without a chunk has not verified all other chunks. Chunks copied from the engine's
        # blocks are not verified.
        if not in_flight.local_bytes and all(failure.key is not None for failure in in_flight.failures):
            doubted -= set(in_flight.keys) - culprits
        else:
            doubted |= set(in_flight.keys)
        return [key for key in doubted if self._stack.in_primary(key)]

    def _prefix_keys(self, in_flight: _LoadInFlight) -> list[bytes]:
        """Keys of all groups up to the boundary of a load."""
        tracked, step = in_flight.tracked, self._layout.spec.boundary_tokens
        if tracked.request_keys is None:
            return []
        keys, ends = tracked.keys(), range(step, min(in_flight.boundary, tracked.request.num_tokens) + 1, step)
        return [key for group in self._layout.spec.stored_groups for key in keys.ending_at(group, ends)]

    def on_request_finished(self, request_id: str) -> None:
        """Called when a request has ended. A load in flight is tracked to its end."""
        if request_id not in self._loads:
            self._admission.give_back(request_id)
