"""Metrics of the NIXL connector. /metrics shows them in the same way as HybridOffloadConnector's (`common.stats`)."""

from __future__ import annotations

import threading

from hybridkv.connectors.vllm.common.stats import OffloadStats
from hybridkv.metrics import PEER_FAILURES, Counts


class NixlMetrics:
    """Counters of one half, under the catalogue's names. vLLM merges the counters of all halves.

    Thread-safe: the agent's thread counts, and the engine's thread takes the counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def count_prompt(self, outcome: str) -> None:
        """Counts a request with a remote prompt: "loaded", "held_already", "refused", "failed", or "cancelled"."""
        with self._lock:
            self._counts.add("vllm:hybridkv_peer_prompts_total", 1, outcome=outcome)

    def count_lease(self, outcome: str) -> None:
        """Counts an ended lease as "done", "expired" or "dropped", and a refused lease as "no_room"."""
        with self._lock:
            self._counts.add("vllm:hybridkv_peer_leases_total", 1, outcome=outcome)

    def count_misled(self, cause: str) -> None:
        """Counts a request that resumed from a corrupt block; the producer does not hand over such a request."""
        with self._lock:
            self._counts.add("vllm:hybridkv_misled_requests_total", 1, cause=cause)

    def set_held(self, num_leases: int) -> None:
        """Sets the current number of requests with blocks held for consumers."""
        with self._lock:
            self._counts.set("vllm:hybridkv_peer_leases_held", num_leases)

    def count_read(self, seconds: float, num_bytes: int, num_descriptors: int) -> None:
        """Counts a complete, checked read of one request on this rank."""
        with self._lock:
            self._counts.observe("vllm:hybridkv_peer_read_seconds", seconds)
            self._counts.add("vllm:hybridkv_peer_read_bytes_total", num_bytes)
            self._counts.add("vllm:hybridkv_peer_read_descriptors_total", num_descriptors)

    def count_failure(self, reason: str) -> None:
        """Counts a failed read of one request on this rank."""
        reason = reason if reason in PEER_FAILURES else "other"
        with self._lock:
            self._counts.add("vllm:hybridkv_peer_read_failures_total", 1, reason=reason)

    def take(self) -> OffloadStats | None:
        """Takes the counts since the last call; None if there are no counts."""
        with self._lock:
            taken = self._counts.take()
        return None if taken.is_empty() else OffloadStats(data=taken.to_dict())
