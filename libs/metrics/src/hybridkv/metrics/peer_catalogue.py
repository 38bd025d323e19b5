"""What engines count that hand KV cache to each other: a part of the catalogue."""

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
"""Why a read from a peer failed; docs/guides/peers.md explains each."""

PEER_METRICS = (
    Metric(
        "vllm:hybridkv_peer_prompts_total",
        Kind.COUNTER,
        "requests",
        "Requests whose prompt a peer had computed, by what became of it. What was refused or failed was computed.",
        (Label("outcome", ("loaded", "held_already", "refused", "failed", "cancelled")),),
        panel=Panel(Section.PEERS, "Prompts from peers"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_bytes_total",
        Kind.COUNTER,
        "bytes",
        "Bytes that were read from peers and believed.",
        panel=Panel(Section.PEERS, "Bytes read"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_descriptors_total",
        Kind.COUNTER,
        "runs",
        "Runs of bytes in which they were read: neighbours are joined.",
        panel=Panel(Section.PEERS, "Runs read"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_seconds",
        Kind.HISTOGRAM,
        "seconds",
        "Time of one request's read on one rank, from its plan to the end of its checks.",
        buckets=_SECONDS,
        panel=Panel(Section.PEERS, "Time of a read"),
    ),
    Metric(
        "vllm:hybridkv_peer_read_failures_total",
        Kind.COUNTER,
        "reads",
        "Reads from peers that failed on a rank, by reason. Each but those that were cancelled is a recompute.",
        (Label("reason", PEER_FAILURES),),
        panel=Panel(Section.PEERS, "Failed reads", view=View.INCREASE),
    ),
    Metric(
        "vllm:hybridkv_peer_leases_total",
        Kind.COUNTER,
        "leases",
        "Leases on blocks for peers that ended, by how, and requests for which there was no room for one.",
        (Label("outcome", ("done", "expired", "dropped", "no_room")),),
        panel=Panel(Section.PEERS, "Leases"),
    ),
    Metric(
        "vllm:hybridkv_peer_leases_held",
        Kind.GAUGE,
        "leases",
        "Requests that have finished and whose blocks are held for a peer.",
        panel=Panel(Section.PEERS, "Leases held"),
    ),
)
