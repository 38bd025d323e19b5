"""What the connector counts. Its way to /metrics is that of HybridOffloadConnector's counts (`vllm.stats`)."""

from __future__ import annotations

import threading

from hybridkv.connectors.vllm.common.stats import OffloadStats
from hybridkv.metrics import PEER_FAILURES, Counts


class NixlMetrics:
    """Counts events under the catalogue's names. One for each half; vLLM merges what they hand over.

    Any thread may call: a rank's thread counts what the engine's takes away.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def prompt(self, outcome: str) -> None:
        """A request that a producer had computed: "loaded", "held_already", "refused", "failed", or "cancelled"."""
        with self._lock:
            self._counts.add("vllm:hybridkv_peer_prompts_total", 1, outcome=outcome)

    def lease(self, outcome: str) -> None:
        """A lease ended: "done", "expired" or "dropped"; or there was no room for one."""
        with self._lock:
            self._counts.add("vllm:hybridkv_peer_leases_total", 1, outcome=outcome)

    def misled(self, cause: str) -> None:
        """One request went on from a block that the engine had copied wrongly, so it is not handed over."""
        with self._lock:
            self._counts.add("vllm:hybridkv_misled_requests_total", 1, cause=cause)

    def held(self, num_leases: int) -> None:
        """Requests whose blocks are held for their consumers now."""
        with self._lock:
            self._counts.set("vllm:hybridkv_peer_leases_held", num_leases)

    def read(self, seconds: float, num_bytes: int, num_descriptors: int) -> None:
        """One request was read on this rank, and what was read is believed."""
        with self._lock:
            self._counts.observe("vllm:hybridkv_peer_read_seconds", seconds)
            self._counts.add("vllm:hybridkv_peer_read_bytes_total", num_bytes)
            self._counts.add("vllm:hybridkv_peer_read_descriptors_total", num_descriptors)

    def failure(self, reason: str) -> None:
        """One request's read failed on this rank."""
        reason = reason if reason in PEER_FAILURES else "other"
        with self._lock:
            self._counts.add("vllm:hybridkv_peer_read_failures_total", 1, reason=reason)

    def take(self) -> OffloadStats | None:
        """What was counted since the last call, None if nothing."""
        with self._lock:
            taken = self._counts.take()
        return None if taken.is_empty() else OffloadStats(data=taken.to_dict())
