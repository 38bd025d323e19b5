"""What engines count that speak with an `lmcache server` themselves: a part of the catalogue."""

from __future__ import annotations

from hybridkv.metrics.declaration import Kind, Label, Metric, Panel, Section, View

LMCACHE_FAILURES = ("busy", "timeout", "lost", "unsent", "malformed", "refused", "closed")
"""How a question to a server ends that has no answer which helps; docs/guides/lmcache.md explains each."""

LMCACHE_METRICS = (
    Metric(
        "vllm:hybridkv_lmcache_operations_total",
        Kind.COUNTER,
        "operations",
        "What a server of LMCache was asked for, by what became of it: done, nothing (it has none of a prefix), or why "
        "there was no answer that helps.",
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
        "Chunks that a server of LMCache said to have taken or written, of one rank each. Whether they are what they "
        "should be is found out when they are read.",
        (Label("operation", ("retrieve", "store")),),
        panel=Panel(Section.LMCACHE, "Chunks"),
    ),
    Metric(
        "vllm:hybridkv_lmcache_withdrawals_total",
        Kind.COUNTER,
        "chunks",
        "Chunks that a server of LMCache was told to delete because their bytes are not to be trusted.",
        panel=Panel(Section.LMCACHE, "Withdrawn chunks", view=View.INCREASE),
    ),
    Metric(
        "vllm:hybridkv_lmcache_up",
        Kind.GAUGE,
        "state",
        "1 while the server of LMCache can be asked, else 0: nothing is read or stored there.",
        panel=Panel(Section.LMCACHE, "Server up"),
    ),
    Metric(
        "vllm:hybridkv_lmcache_pool_used_bytes",
        Kind.GAUGE,
        "bytes",
        "Pages of one rank's pool that are under way between the engine and the server, or whose fate is not known.",
        panel=Panel(Section.LMCACHE, "Pool"),
    ),
    Metric(
        "vllm:hybridkv_lmcache_pool_capacity_bytes",
        Kind.GAUGE,
        "bytes",
        "Pages of one rank's pool.",
        panel=Panel(Section.LMCACHE, "Pool"),
    ),
)
