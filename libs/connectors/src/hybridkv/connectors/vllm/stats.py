"""What the connector counts, on its way to /metrics through vLLM's connector statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybridkv.metrics import CATALOGUE, DISK_ERRORS, Counts, PrometheusSink
from hybridkv.tiers import TierCounts, TierIndex
from hybridkv.tiers.disk import DiskCounts, DiskIndex
from hybridkv.tiers.stack import BreakerState, Direction, MoveCounts, TierStack

if TYPE_CHECKING:
    from hybridkv.connectors.vllm.explain import Explanation
    from hybridkv.connectors.vllm.messages import LoadFailure

RAM, DISK, LMCACHE = "ram", "disk", "lmcache"


class Recorder:
    """Counts events under the catalogue's names. One for each half; vLLM merges what they hand over."""

    def __init__(self) -> None:
        self._counts = Counts()

    def pending(self, *, is_asked: bool = False) -> None:
        """What a request needs is being stored, or `is_asked` for in a tier that has not answered yet."""
        reason = "asked" if is_asked else "being_stored"
        self._counts.add("vllm:hybridkv_lookups_total", 1, result="pending", reason=reason)

    def lookup(self, explained: Explanation) -> None:
        """A request was looked up and admitted."""
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
        if explained.lost_tokens:
            kind = explained.limiting_kind
            self._counts.add("vllm:hybridkv_limited_lookups_total", 1, limiting_kind=kind)
            self._counts.add("vllm:hybridkv_lost_tokens_total", explained.lost_tokens, limiting_kind=kind)
        if explained.junction:
            self._counts.add("vllm:hybridkv_junctions_total", 1, outcome=explained.junction)

    def store(self, kind: str, outcome: str) -> None:
        """One chunk of one group was stored, or why not."""
        self._counts.add("vllm:hybridkv_stores_total", 1, kind=str(kind), outcome=outcome)

    def stored_bytes(self, num_bytes: int) -> None:
        self._counts.add("vllm:hybridkv_store_bytes_total", num_bytes)

    def store_failed(self, reason: str) -> None:
        """One request's store of one step failed."""
        self._counts.add("vllm:hybridkv_store_failures_total", 1, reason=reason)

    def load(self, num_tokens: int, num_bytes: int, failed: bool, failures: Sequence[LoadFailure]) -> None:
        """One request's load ended."""
        self._counts.add("vllm:hybridkv_loads_total", 1, outcome="failed" if failed else "loaded")
        if not failed:
            self._counts.add("vllm:hybridkv_load_bytes_total", num_bytes)
        for reason in {failure.reason for failure in failures}:
            self._counts.add("vllm:hybridkv_load_failures_total", 1, reason=reason)

    def copied(self, is_load: bool, seconds: float, num_bytes: int) -> None:
        """One copy job ended on this rank; 0 bytes where it failed before the first one."""
        job = "load" if is_load else "store"
        self._counts.observe(f"vllm:hybridkv_{job}_seconds", seconds)
        if num_bytes:
            self._counts.observe(f"vllm:hybridkv_{job}_size_bytes", num_bytes)

    def wait_timeout(self, wait: str) -> None:
        """A request waited too long: a "lookup" for chunks that were being stored, a "load" for a slower tier."""
        self._counts.add("vllm:hybridkv_wait_timeouts_total", 1, wait=wait)

    def moved(self, direction: Direction, tier: str, seconds: float) -> None:
        """One chunk ended its way between the fast tier and another on this rank."""
        self._counts.observe("vllm:hybridkv_move_seconds", seconds, direction=str(direction), tier=tier)

    def server_operations(self, operation: str, outcome: str, number: int) -> None:
        """What a server of LMCache was asked for."""
        self._counts.add("vllm:hybridkv_lmcache_operations_total", number, operation=operation, outcome=outcome)

    def server_chunks(self, operation: str, number: int) -> None:
        """Chunks that a server of LMCache took or wrote."""
        self._counts.add("vllm:hybridkv_lmcache_chunks_total", number, operation=operation)

    def server_withdrawals(self, number: int) -> None:
        """Chunks that a server of LMCache was told to delete."""
        self._counts.add("vllm:hybridkv_lmcache_withdrawals_total", number)

    def server_state(self, is_up: bool) -> None:
        """Whether a server of LMCache can be asked."""
        self._counts.set("vllm:hybridkv_lmcache_up", int(is_up))

    def server_pool(self, used_bytes: int, capacity_bytes: int) -> None:
        """The memory that this rank and a server of LMCache share."""
        self._counts.set("vllm:hybridkv_lmcache_pool_used_bytes", used_bytes)
        self._counts.set("vllm:hybridkv_lmcache_pool_capacity_bytes", capacity_bytes)

    def tiers(self, stack: TierStack, num_ranks: int) -> None:
        """What the tiers hold now, over all ranks, and what they did since they were last asked."""
        self._tier(RAM, stack.only_near, num_ranks)
        if not stack.slower:
            return
        counts = stack.take_counts()
        for name, index in stack.slower.items():
            self._tier(name, index, num_ranks)
            if isinstance(index, DiskIndex):
                self._disk(index.take_disk_counts())
            self._moves(name, counts.tiers[name], num_ranks)
            self._counts.set("vllm:hybridkv_cascades_waiting", stack.num_waiting(name), tier=name)
            for direction in Direction:
                is_open = stack.breaker_state(direction, name) is not BreakerState.CLOSED
                self._counts.set("vllm:hybridkv_breaker_open", int(is_open), direction=str(direction), tier=name)

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

    def _tier(self, name: str, index: TierIndex, num_ranks: int) -> None:
        counts: TierCounts = index.take_counts()
        if counts.evictions:
            self._counts.add("vllm:hybridkv_evictions_total", counts.evictions, tier=name)
            self._counts.add("vllm:hybridkv_evicted_bytes_total", counts.evicted_bytes * num_ranks, tier=name)
        if counts.invalidations:
            self._counts.add("vllm:hybridkv_invalidations_total", counts.invalidations, tier=name)
        for answer, number in counts.answers.items():
            self._counts.add("vllm:hybridkv_asked_total", number, tier=name, outcome=str(answer))
        self._counts.set("vllm:hybridkv_tier_used_bytes", index.used_bytes * num_ranks, tier=name)
        self._counts.set("vllm:hybridkv_tier_capacity_bytes", index.capacity_bytes * num_ranks, tier=name)

    def take(self) -> OffloadStats | None:
        """What was counted since the last call, None if nothing."""
        if self._counts.is_empty():
            return None
        return OffloadStats(data=self._counts.take().to_dict())


class OffloadStats(KVConnectorStats):
    """Counts in the shape in which vLLM merges them and carries them to the API process."""

    def reset(self) -> None:
        self.data = Counts().to_dict()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = Counts.from_dict(self.data)
        merged.merge(Counts.from_dict(other.data))
        return OffloadStats(data=merged.to_dict())

    def reduce(self) -> dict[str, int | float]:
        """For the periodic log line: counters and gauges, summed over their labels."""
        return Counts.from_dict(self.data).totals()

    def is_empty(self) -> bool:
        return Counts.from_dict(self.data).is_empty()


class OffloadPromMetrics(KVConnectorPromMetrics):
    """The catalogue as Prometheus metrics in the API process."""

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
