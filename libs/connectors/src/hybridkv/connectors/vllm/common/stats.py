"""Metrics of a connector. vLLM's connector statistics carry them to /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybridkv.metrics import CATALOGUE, DISK_ERRORS, Counts, PrometheusSink
from hybridkv.tiers import TierCounts, TierIndex
from hybridkv.tiers.disk import DiskCounts, DiskIndex
from hybridkv.tiers.object import ObjectIndex, StoreCounts
from hybridkv.tiers.stack import BreakerState, Direction, MoveCounts, TierStack

if TYPE_CHECKING:
    from hybridkv.connectors.vllm.common.explain import Explanation
    from hybridkv.connectors.vllm.common.messages import LoadFailure
    from hybridkv.planner.checkpoints import Placement

RAM, DISK, LMCACHE = "ram", "disk", "lmcache"
GAUGE_RESEND_INTERVAL = 17
"""After every n-th call of `take`, all gauges are sent again. The number is a prime, so that each of several front-ends
gets the gauges although the front-ends get the counts in turn."""


class ConnectorMetrics:
    """Counts of one half of a connector, under the catalogue's metric names. vLLM merges the counts of all halves.

    A gauge is sent when it has changed. All gauges are also sent again from time to time, because the counts of a step
    go to only one of several front-ends. A step without counts and gauges sends nothing.
    """

    def __init__(self) -> None:
        self._counts = Counts()
        self._sent: dict[tuple[str, ...], int | float] = {}
        """Last sent values of gauges by name and labels. The catalogue bounds their number."""
        self._num_taken = 0
        self.restored_tokens = 0
        """Tokens that loads have restored."""
        self.saved_s = 0.0
        """Estimated seconds to compute `restored_tokens`."""
        self.waited_s = 0.0
        """Seconds that requests have waited before they ran."""

    def pending(self, *, is_async: bool = False) -> None:
        """A lookup waits for a store of its chunks, or (`is_async`) for an async lookup in a tier."""
        reason = "async_lookup" if is_async else "being_stored"
        self._counts.add("vllm:hybridkv_lookups_total", 1, result="pending", reason=reason)

    def lookup(self, explained: Explanation) -> None:
        """A request was admitted after a lookup, or without a lookup because of a hint or its adapter."""
        self._counts.add("vllm:hybridkv_lookups_total", 1, result=explained.result, reason=str(explained.reason))
        for source, num_tokens in (
            ("engine", explained.engine_tokens),
            (explained.source, explained.offered_tokens),
            ("compute", explained.compute_tokens),
        ):
            if num_tokens:
                self._counts.add("vllm:hybridkv_lookup_tokens_total", num_tokens, source=source)
        if explained.offered_tokens:
            self._counts.add("vllm:hybridkv_hit_tokens_total", explained.offered_tokens)
        if explained.resumable_tokens > explained.engine_tokens:
            num_tokens = explained.resumable_tokens - explained.engine_tokens
            self._counts.add("vllm:hybridkv_resumable_tokens_total", num_tokens)
        if explained.lost_tokens:
            kind = explained.limiting_kind
            self._counts.add("vllm:hybridkv_limited_lookups_total", 1, limiting_kind=kind)
            self._counts.add("vllm:hybridkv_lost_tokens_total", explained.lost_tokens, limiting_kind=kind)
        if explained.junction:
            self._counts.add("vllm:hybridkv_junctions_total", 1, outcome=explained.junction)

    def placed(self, placement: Placement) -> None:
        """A request was admitted with these prefill stops."""
        for stop in placement.stops:
            self._counts.add("vllm:hybridkv_checkpoint_stops_total", 1, reason=str(stop.reason))
        for cause, number in msgspec.structs.asdict(placement.left_out).items():
            if number:
                self._counts.add("vllm:hybridkv_checkpoint_stops_left_out_total", number, cause=cause)

    def prefixes_forgotten(self, number: int) -> None:
        """Remembered prefixes were dropped, the least recently used first."""
        if number:
            self._counts.add("vllm:hybridkv_forgotten_prefixes_total", number)

    def superseded(self) -> None:
        """A newer state of the same answer replaced an older one."""
        self._counts.add("vllm:hybridkv_superseded_states_total", 1)

    def state_stored(self, origin: str) -> None:
        """The states of one boundary were stored."""
        self._counts.add("vllm:hybridkv_states_stored_total", 1, origin=origin)

    def store(self, kind: str, outcome: str, number: int = 1) -> None:
        """Chunks of a group of this kind were stored ("stored"), or not stored for the reason `outcome`."""
        self._counts.add("vllm:hybridkv_stores_total", number, kind=str(kind), outcome=outcome)

    def count_misled(self, cause: str) -> None:
        """One request continued from a corrupt block, so it stores nothing more."""
        self._counts.add("vllm:hybridkv_misled_requests_total", 1, cause=cause)

    def hint(self, name: str) -> None:
        """One request carried this hint. `name` is "invalid" for a hint that could not be read."""
        self._counts.add("vllm:hybridkv_hints_total", 1, hint=name)

    def prefetch(self, outcome: str, number: int = 1) -> None:
        """Prefetches of prefixes ended with this outcome."""
        self._counts.add("vllm:hybridkv_prefetches_total", number, outcome=outcome)

    def kept(self, tier: str, is_kept: bool) -> None:
        """One request's prefix is kept in a tier, or the tier refused it."""
        self._counts.add("vllm:hybridkv_keeps_total", 1, tier=tier, outcome="kept" if is_kept else "refused")

    def kept_bytes(self, tier: str, num_bytes: int) -> None:
        """Bytes that are kept in a tier now."""
        self._gauge("vllm:hybridkv_kept_bytes", num_bytes, tier=tier)

    def stored_bytes(self, num_bytes: int) -> None:
        self._counts.add("vllm:hybridkv_store_bytes_total", num_bytes)

    def store_failed(self, reason: str) -> None:
        """One store failed: the chunks of one request in one step."""
        self._counts.add("vllm:hybridkv_store_failures_total", 1, reason=reason)

    def load(self, num_bytes: int, failed: bool, failures: Sequence[LoadFailure]) -> None:
        """One request's load ended."""
        self._counts.add("vllm:hybridkv_loads_total", 1, outcome="failed" if failed else "loaded")
        if not failed:
            self._counts.add("vllm:hybridkv_load_bytes_total", num_bytes)
        for reason in {failure.reason for failure in failures}:
            self._counts.add("vllm:hybridkv_load_failures_total", 1, reason=reason)

    def local(self, source: str, num_tokens: int, num_bytes: int) -> None:
        """Part of one load was copied from the engine's own blocks. `source`: tier that these blocks replaced."""
        if num_tokens:
            self._counts.add("vllm:hybridkv_local_tokens_total", num_tokens, source=source)
        if num_bytes:
            self._counts.add("vllm:hybridkv_local_bytes_total", num_bytes, source=source)

    def copied(self, is_load: bool, seconds: float, num_bytes: int) -> None:
        """One copy job ended on this rank. `num_bytes`: copied bytes; 0 if the job failed before its first byte."""
        job = "load" if is_load else "store"
        self._counts.observe(f"vllm:hybridkv_{job}_seconds", seconds)
        if num_bytes:
            self._counts.observe(f"vllm:hybridkv_{job}_size_bytes", num_bytes)

    def wait_timeout(self, wait: str) -> None:
        """A wait of a request timed out. `wait`: "lookup" for pending stores or for a lookup in an LMCache server,
        "load" for a secondary tier."""
        self._counts.add("vllm:hybridkv_wait_timeouts_total", 1, wait=wait)

    def moved(self, direction: Direction, tier: str, seconds: float) -> None:
        """One chunk's move between the primary tier and a secondary tier ended on this rank."""
        self._counts.observe("vllm:hybridkv_move_seconds", seconds, direction=str(direction), tier=tier)

    def lmcache_operations(self, operation: str, outcome: str, number: int) -> None:
        """Operations of an LMCache server ended with this outcome."""
        self._counts.add("vllm:hybridkv_lmcache_operations_total", number, operation=operation, outcome=outcome)

    def lmcache_chunks(self, operation: str, number: int) -> None:
        """Chunks that an LMCache server stored or loaded."""
        self._counts.add("vllm:hybridkv_lmcache_chunks_total", number, operation=operation)

    def lmcache_withdrawals(self, number: int) -> None:
        """Chunks for which a delete request was sent to an LMCache server."""
        self._counts.add("vllm:hybridkv_lmcache_withdrawals_total", number)

    def lmcache_state(self, is_up: bool) -> None:
        """Whether an LMCache server answers."""
        self._gauge("vllm:hybridkv_lmcache_up", int(is_up))

    def lmcache_pool(self, used_bytes: int, capacity_bytes: int) -> None:
        """Use of the memory that this rank shares with an LMCache server."""
        self._gauge("vllm:hybridkv_lmcache_pool_used_bytes", used_bytes)
        self._gauge("vllm:hybridkv_lmcache_pool_capacity_bytes", capacity_bytes)

    def reuse(self, shares: Mapping[str, float], needed_bytes: int) -> None:
        """Estimated hits and needed host memory.

        Args:
            shares: for each size of host memory, the estimated share of prompt tokens that would be hits.
            needed_bytes: bytes of host memory for most of the possible hits; 0 if unknown.
        """
        for capacity, share in shares.items():
            self._gauge("vllm:hybridkv_estimated_hit_share", round(share, 3), capacity=capacity)
        self._gauge("vllm:hybridkv_reused_bytes", needed_bytes)

    def saved(self, num_tokens: int, seconds: float) -> None:
        """A load restored tokens. To compute them takes an estimated time of `seconds`."""
        self.restored_tokens += num_tokens
        self.saved_s += seconds
        self._counts.add("vllm:hybridkv_saved_seconds_total", seconds)

    def waited(self, seconds: float) -> None:
        """A request waited before it ran."""
        self.waited_s += seconds
        self._counts.add("vllm:hybridkv_waited_seconds_total", seconds)

    def announced(self, event: str, medium: str) -> None:
        """A KV event of type `event` was sent for a medium."""
        kind = "stored" if event == "BlockStored" else "removed"
        self._counts.add("vllm:hybridkv_kv_events_total", 1, type=kind, medium=medium.lower())

    def announcements(self, num_tokens: int, num_unannounced_chunks: int) -> None:
        """Number of tokens that are announced to routers now, and number of stored chunks that are not announced."""
        self._gauge("vllm:hybridkv_announced_tokens", num_tokens)
        self._gauge("vllm:hybridkv_unannounced_chunks", num_unannounced_chunks)

    def tiers(self, stack: TierStack, num_ranks: int) -> None:
        """State of the tiers now, over all ranks, and their activity since the last call. Resets the tiers' counts."""
        self._tier(RAM, stack.primary, num_ranks)
        if not stack.secondary:
            return
        counts = stack.take_counts()
        for result, number in counts.prefetches.items():
            self.prefetch(str(result), number)
        for outcome, num_bytes in counts.prefetch_bytes.items():
            self._counts.add("vllm:hybridkv_prefetch_bytes_total", num_bytes * num_ranks, outcome=str(outcome))
        for name, index in stack.secondary.items():
            self._tier(name, index, num_ranks)
            if isinstance(index, DiskIndex):
                self._disk(index.take_disk_counts())
            elif isinstance(index, ObjectIndex):
                self._objects(index.take_store_counts())
            self._moves(name, counts.tiers[name], num_ranks)
            self._gauge("vllm:hybridkv_cascades_waiting", stack.num_waiting(name), tier=name)
            for direction in Direction:
                is_open = stack.breaker_state(direction, name) is not BreakerState.CLOSED
                self._gauge("vllm:hybridkv_breaker_open", int(is_open), direction=str(direction), tier=name)

    def _moves(self, tier: str, counts: MoveCounts, num_ranks: int) -> None:
        for direction, results, num_bytes in (
            (Direction.PROMOTE, counts.promotions, counts.promoted_bytes),
            (Direction.CASCADE, counts.cascades, counts.cascaded_bytes),
        ):
            way = {"direction": str(direction), "tier": tier}
            for result, number in results.items():
                self._counts.add("vllm:hybridkv_moves_total", number, **way, result=str(result))
            if num_bytes:
                self._counts.add("vllm:hybridkv_move_bytes_total", num_bytes * num_ranks, **way)
        for reason, number in counts.failures.items():
            self._counts.add("vllm:hybridkv_move_failures_total", number, reason=reason, tier=tier)
        for direction, number in counts.breaker_openings.items():
            self._counts.add("vllm:hybridkv_breaker_openings_total", number, direction=str(direction), tier=tier)

    def _disk(self, counts: DiskCounts) -> None:
        for failure, number in counts.failures.items():
            reason = failure.rpartition(" ")[2].lower()
            reason = reason if reason in DISK_ERRORS else "other"
            self._counts.add("vllm:hybridkv_disk_errors_total", number, reason=reason)
        for reason, number in counts.quarantined.items():
            self._counts.add("vllm:hybridkv_quarantined_total", number, reason=reason)
        if counts.moved_bytes:
            self._counts.add("vllm:hybridkv_compacted_bytes_total", counts.moved_bytes)

    def _objects(self, counts: StoreCounts) -> None:
        if counts.duplicates:
            self._counts.add("vllm:hybridkv_duplicate_chunks_total", counts.duplicates)
        for outcome, number in (
            ("renewed", counts.renewed),
            ("renewal_dropped", counts.renewals_dropped),
            ("renewal_failed", counts.renewals_failed),
            ("swept", counts.swept),
            ("sweep_failed", counts.sweeps_failed),
        ):
            if number:
                self._counts.add("vllm:hybridkv_store_upkeep_total", number, outcome=outcome)

    def _tier(self, name: str, index: TierIndex, num_ranks: int) -> None:
        counts: TierCounts = index.take_counts()
        if counts.evictions:
            self._counts.add("vllm:hybridkv_evictions_total", counts.evictions, tier=name)
            self._counts.add("vllm:hybridkv_evicted_bytes_total", counts.evicted_bytes * num_ranks, tier=name)
        if counts.invalidations:
            self._counts.add("vllm:hybridkv_invalidations_total", counts.invalidations, tier=name)
        for answer, number in counts.answers.items():
            self._counts.add("vllm:hybridkv_async_lookups_total", number, tier=name, outcome=str(answer))
        self._gauge("vllm:hybridkv_tier_used_bytes", index.used_bytes * num_ranks, tier=name)
        self._gauge("vllm:hybridkv_tier_capacity_bytes", index.capacity_bytes * num_ranks, tier=name)

    def _gauge(self, name: str, value: int | float, /, **labels: str) -> None:
        series = (name, *labels.values())
        if self._sent.get(series) != value:
            self._counts.set(name, value, **labels)
            self._sent[series] = value

    def take(self) -> OffloadStats | None:
        """Counts since the last call; None if there are none."""
        self._num_taken += 1
        if self._num_taken % GAUGE_RESEND_INTERVAL == 0:
            self._sent.clear()
        if self._counts.is_empty():
            return None
        return OffloadStats(data=self._counts.take().to_dict())


class OffloadStats(KVConnectorStats):
    """Counts in the form that vLLM merges and sends to the API process."""

    def reset(self) -> None:
        self.data = Counts().to_dict()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = Counts.from_dict(self.data)
        merged.merge(Counts.from_dict(other.data))
        return OffloadStats(data=merged.to_dict())

    def reduce(self) -> dict[str, int | float]:
        """Counters and gauges summed over their labels, for the periodic log line."""
        return Counts.from_dict(self.data).totals()

    def is_empty(self) -> bool:
        return Counts.from_dict(self.data).is_empty()


class OffloadPromMetrics(KVConnectorPromMetrics):
    """The metrics catalogue as Prometheus metrics in the API process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._sink = PrometheusSink(
            CATALOGUE, self._counter_cls, self._gauge_cls, self._histogram_cls, labelnames, per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._sink.observe(transfer_stats_data, engine_idx)
