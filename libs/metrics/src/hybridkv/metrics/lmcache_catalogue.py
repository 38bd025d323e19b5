"""Metrics of engines that use an `lmcache server`. Part of the catalogue."""

from __future__ import annotations

from hybridkv.metrics.declaration import Kind, Label, Metric, Panel, Section, View

LMCACHE_FAILURES = ("busy", "timeout", "lost", "unsent", "malformed", "refused", "closed")
"""Failures of a request to a server; docs/guides/lmcache.md explains each."""

LMCACHE_METRICS = (
    Metric(
        "vllm:hybridkv_lmcache_operations_total",
        Kind.COUNTER,
        "operations",
        "Requests to a server of LMCache, by outcome: done, nothing (it has no part of the prefix), or the failure.",
        (
            Label("operation", ("lookup", "retrieve", "store")),
            Label("outcome", ("done", "nothing", *LMCACHE_FAILURES)),
        ),
        panel=Panel(Section.LMCACHE, "Operations"),
    ),
    Metric(
        "vllm:hybridkv_lmcache_chunks_total",
        Kind.COUNTER,
        "chunks",
        "Chunks that a server of LMCache reported as retrieved or stored, per rank. Their content is checked when they "
        "are read.",
        (Label("operation", ("retrieve", "store")),),
        panel=Panel(Section.LMCACHE, "Chunks"),
    ),
    Metric(
        "vllm:hybridkv_lmcache_withdrawals_total",
        Kind.COUNTER,
        "chunks",
        "Chunks that a server of LMCache was asked to delete because their bytes are not trusted.",
        panel=Panel(Section.LMCACHE, "Withdrawn chunks", view=View.INCREASE),
    ),
    Metric(
        "vllm:hybridkv_lmcache_up",
        Kind.GAUGE,
        "state",
        "1 while the server of LMCache is usable, else 0: nothing is read from it or stored in it.",
        panel=Panel(Section.LMCACHE, "Server up"),
    ),
    Metric(
        "vllm:hybridkv_lmcache_pool_used_bytes",
        Kind.GAUGE,
        "bytes",
        "Bytes of one rank's pool that are in transfer between the engine and the server, or in an unknown state.",
        panel=Panel(Section.LMCACHE, "Pool"),
    ),
    Metric(
        "vllm:hybridkv_lmcache_pool_capacity_bytes",
        Kind.GAUGE,
        "bytes",
        "Capacity of one rank's pool in bytes.",
        panel=Panel(Section.LMCACHE, "Pool"),
    ),
)
