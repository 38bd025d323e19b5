"""Metrics of KV transfer between engines (peers). Part of the catalogue."""

from __future__ import annotations

from hybridkv.metrics.declaration import Kind, Label, Metric, Panel, Section, View

_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PEER_FAILURES = (
    "gone",
    "refused",
    "timeout",
    "lease",
    "digest",
    "pairing",
    "protocol",
    "transport",
    "busy",
    "cancelled",
    "other",
)
"""Reasons of failed reads from a peer; docs/guides/peers.md explains each."""

PEER_METRICS = (
    Metric(
        "vllm:hybridkv_peer_prompts_total",
        Kind.COUNTER,
        "requests",
        "Requests with a prompt that a peer has computed, by outcome. After `refused` or `failed`, the prompt is "
        "computed here.",
        (Label("outcome", ("loaded", "held_already", "refused", "failed", "cancelled")),),
        panel=Panel(Section.PEERS, "Prompts from peers"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_bytes_total",
        Kind.COUNTER,
        "bytes",
        "Bytes that were read from peers and passed the checks.",
        panel=Panel(Section.PEERS, "Bytes read"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_descriptors_total",
        Kind.COUNTER,
        "runs",
        "Descriptors (runs of bytes) of reads from peers, after adjacent runs were joined.",
        panel=Panel(Section.PEERS, "Runs read"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_seconds",
        Kind.HISTOGRAM,
        "seconds",
        "Time of one request's read on one rank, from the plan to the end of the checks.",
        buckets=_SECONDS,
        panel=Panel(Section.PEERS, "Time of a read"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_failures_total",
        Kind.COUNTER,
        "reads",
        "Reads from peers that failed on a rank, by reason. All but `cancelled` fail the load.",
        (Label("reason", PEER_FAILURES),),
        panel=Panel(Section.PEERS, "Failed reads", view=View.INCREASE),
    ),
    Metric(
        "vllm:hybridkv_peer_leases_total",
        Kind.COUNTER,
        "leases",
        "Ended leases on blocks for peers, by outcome. `no_room`: requests that got no lease.",
        (Label("outcome", ("done", "expired", "dropped", "no_room")),),
        panel=Panel(Section.PEERS, "Leases"),
    ),
    Metric(
        "vllm:hybridkv_peer_leases_held",
        Kind.GAUGE,
        "leases",
        "Finished requests with blocks that are leased to a peer.",
        panel=Panel(Section.PEERS, "Leases held"),
    ),
)
