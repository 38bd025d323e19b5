"""Every metric of hybridkv, declared once, as data."""

from __future__ import annotations

from hybridkv.metrics.declaration import Catalogue, ConfiguredLabel, Kind, Label, Metric, Panel, Section, View
from hybridkv.metrics.lmcache_catalogue import LMCACHE_METRICS
from hybridkv.metrics.peer_catalogue import PEER_METRICS

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(1 << power) for power in (12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32))
_GROUP_KINDS = ("full", "window", "chunked", "recurrent")
_FAILURES = ("missing", "wrong_key", "checksum", "io", "busy", "closed", "injected")
DISK_ERRORS = ("enospc", "edquot", "eio", "eacces", "eperm", "erofs", "enoent", "estale", "other")
"""What the system says, in lower case, and everything else."""
_DIRECTION = Label("direction", ("promote", "cascade"))
_MOVE_RESULTS = (
    "done",
    "failed",
    "dropped_busy",
    "dropped_no_room",
    "dropped_open",
    "dropped_orphan",
    "dropped_evicted",
    "dropped_late",
)
"""What became of a chunk between two tiers; docs/guides/disk.md explains each."""
_TIERS = ("ram", "disk", "peer", "object")
_TIER = Label("tier", _TIERS)
_SLOWER = Label("tier", _TIERS[1:])
_SOURCE = Label("source", _TIERS)
_REASON = Label(
    "reason",
    (
        "complete",
        "prefix_ends",
        "group_limits",
        "tier_room",
        "engine_room",
        "not_taken",
        "no_boundary",
        "not_stored",
        "timeout",
        "failed_loads",
        "hint",
        "adapter",
        "being_stored",
        "asked",
    ),
)
"""Why a request was not offered more; docs/guides/observing.md explains each."""

MAX_CHILDREN = 16
"""Stores below one engine that can be told apart."""
_CONNECTOR = ConfiguredLabel("connector", MAX_CHILDREN, "the stores in `connectors`")


def _of_child(name: str, kind: Kind, unit: str, meaning: str, panel: str, starts_at_zero: bool = False) -> Metric:
    labels, where = (_CONNECTOR,), Panel(Section.CHOICE, panel)
    return Metric(
        f"vllm:kv_connector_mc_{name}", kind, unit, meaning, labels, panel=where, starts_at_zero=starts_at_zero
    )


CATALOGUE = Catalogue(
    (
        Metric(
            "vllm:hybridkv_estimated_hit_share",
            Kind.GAUGE,
            "share",
            "Estimated share of prompt tokens that host memory of this multiple of its size would have restored.",
            (Label("capacity", ("0.25x", "0.5x", "1x", "2x", "4x", "8x", "unbounded")),),
            panel=Panel(Section.HITS, "Estimated hits by size of host memory"),
        ),
        Metric(
            "vllm:hybridkv_reused_bytes",
            Kind.GAUGE,
            "bytes",
            "Host memory that would have restored 95 % of the tokens that prompts share; 0 if it is above 16 times its "
            "size, or if prompts share nothing.",
            panel=Panel(Section.HITS, "Host memory for most shared tokens"),
        ),
        Metric(
            "vllm:hybridkv_lookups_total",
            Kind.COUNTER,
            "lookups",
            "Requests that were looked up in the tiers, by answer and by why it was not a longer hit.",
            (Label("result", ("hit", "pending", "miss")), _REASON),
            panel=Panel(Section.HITS, "Lookups"),
        ),
        Metric(
            "vllm:hybridkv_lookup_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens of requests that were looked up, by where they came from: the engine, a tier, or computing.",
            (Label("source", ("engine", *_TIERS, "lmcache", "compute")),),
            panel=Panel(Section.HITS, "Tokens by source"),
        ),
        Metric(
            "vllm:hybridkv_hit_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens that lookups found in the tiers beyond what GPU memory held.",
            panel=Panel(Section.HITS, "Tokens found in the tiers"),
        ),
        Metric(
            "vllm:hybridkv_resumable_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens that the full groups held beyond what GPU memory held: what would be found with a state and a "
            "window at every boundary.",
            panel=Panel(Section.HITS, "Tokens that could be resumed"),
        ),
        Metric(
            "vllm:hybridkv_limited_lookups_total",
            Kind.COUNTER,
            "lookups",
            "Lookups that one kind of group made shorter than what the full groups held.",
            (Label("limiting_kind", _GROUP_KINDS),),
            panel=Panel(Section.HITS, "Lookups that a kind of group limited"),
        ),
        Metric(
            "vllm:hybridkv_lost_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens between where every group could resume and what the full groups held, by the kind that lacked it.",
            (Label("limiting_kind", _GROUP_KINDS),),
            panel=Panel(Section.HITS, "Tokens lost to a kind of group"),
        ),
        Metric(
            "vllm:hybridkv_junctions_total",
            Kind.COUNTER,
            "lookups",
            "Requests that part from what the full groups hold, by whether every group could resume at that point.",
            (Label("outcome", ("resumed", "lost")),),
            panel=Panel(Section.HITS, "Junctions"),
        ),
        Metric(
            "vllm:hybridkv_checkpoint_stops_total",
            Kind.COUNTER,
            "stops",
            "Boundaries at which prompts were made to stop so that their recurrent states are stored, by why there.",
            (Label("reason", ("junction", "branch", "spaced", "end")),),
            panel=Panel(Section.HITS, "Stops for states"),
        ),
        Metric(
            "vllm:hybridkv_checkpoint_stops_left_out_total",
            Kind.COUNTER,
            "stops",
            "Such stops that were considered and not made: too many steps, too dear beside the prompt, or not worth "
            "their bytes.",
            (Label("cause", ("stops", "share", "worth")),),
            panel=Panel(Section.HITS, "Stops left out"),
        ),
        Metric(
            "vllm:hybridkv_states_stored_total",
            Kind.COUNTER,
            "states",
            "Boundaries whose recurrent states were stored, by where they come from: a stop of ours, the prompt's end, "
            "the answer, or wherever else the engine kept one.",
            (Label("origin", ("stop", "prompt_end", "answer", "engine")),),
            panel=Panel(Section.HITS, "States stored"),
        ),
        Metric(
            "vllm:hybridkv_superseded_states_total",
            Kind.COUNTER,
            "states",
            "States of answers whose place in host memory a newer one of the same answer has taken.",
            panel=Panel(Section.HITS, "States superseded"),
        ),
        Metric(
            "vllm:hybridkv_forgotten_prefixes_total",
            Kind.COUNTER,
            "prefixes",
            "Prefixes of requests that were forgotten for others, so that nobody learns where prompts part from them.",
            panel=Panel(Section.HITS, "Prefixes forgotten"),
        ),
        Metric(
            "vllm:hybridkv_kv_events_total",
            Kind.COUNTER,
            "events",
            "Events that routers were sent about what tiers hold, by medium.",
            (Label("type", ("stored", "removed")), Label("medium", ("cpu", "storage"))),
            panel=Panel(Section.HITS, "Events for routers"),
        ),
        Metric(
            "vllm:hybridkv_announced_tokens",
            Kind.GAUGE,
            "tokens",
            "Tokens in tiers that routers were told of: up to boundaries at which every group can resume.",
            panel=Panel(Section.HITS, "Announced tokens"),
        ),
        Metric(
            "vllm:hybridkv_unannounced_chunks",
            Kind.GAUGE,
            "chunks",
            "Chunks in tiers that routers were not told of, because no request can resume with them.",
            panel=Panel(Section.HITS, "Unannounced chunks"),
        ),
        Metric(
            "vllm:hybridkv_stores_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that were to be stored, by kind of group and by what became of them.",
            (
                Label("kind", _GROUP_KINDS),
                Label(
                    "outcome",
                    (
                        "stored",
                        "present",
                        "dropped_no_room",
                        "dropped_too_large",
                        "dropped_not_aligned",
                        "dropped_incomplete",
                        "dropped_wrong",
                        "failed",
                    ),
                ),
            ),
            panel=Panel(Section.STORES, "Chunks"),
        ),
        Metric(
            "vllm:hybridkv_misled_requests_total",
            Kind.COUNTER,
            "requests",
            "Requests that went on from a block which vLLM had left wrong, so that nothing of them is stored or "
            "handed to a peer: it was copied in part, it was a copy of a copy not made yet, or it holds another state "
            "than its hash says or was computed by such a request.",
            (Label("cause", ("partial_copy", "copied_copy", "wrong_block")),),
            panel=Panel(Section.STORES, "Requests not stored"),
        ),
        Metric(
            "vllm:hybridkv_hints_total",
            Kind.COUNTER,
            "requests",
            "Requests with a hint about themselves, by hint; invalid ones were passed over.",
            (Label("hint", ("no_store", "no_load", "keep", "prefetch", "invalid")),),
            panel=Panel(Section.HITS, "Hints"),
        ),
        Metric(
            "vllm:hybridkv_keeps_total",
            Kind.COUNTER,
            "requests",
            "Prefixes that requests asked to be kept, by tier and whether there was room for it within `keep_share`.",
            (_TIER, Label("outcome", ("kept", "refused"))),
            panel=Panel(Section.TIERS, "Prefixes to be kept"),
        ),
        Metric(
            "vllm:hybridkv_kept_bytes",
            Kind.GAUGE,
            "bytes",
            "What of a tier is kept for requests that asked for it.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Kept"),
        ),
        Metric(
            "vllm:hybridkv_prefetches_total",
            Kind.COUNTER,
            "requests",
            "Prefixes that requests asked to be brought into host memory, by what became of it: all came, there was "
            "nothing to bring, `keep_share` had no room for it, it took too long, a chunk could not be had, or too "
            "many waited.",
            (Label("outcome", ("brought", "nothing", "no_room", "late", "lost", "crowded")),),
            panel=Panel(Section.TIERS, "Prefixes to be prefetched"),
        ),
        Metric(
            "vllm:hybridkv_prefetch_bytes_total",
            Kind.COUNTER,
            "bytes",
            "What came into host memory because requests asked for it, and what of it was used by another, or gave "
            "way to what was asked for later.",
            (Label("outcome", ("brought", "used", "displaced")),),
            panel=Panel(Section.TIERS, "Prefetched"),
        ),
        Metric(
            "vllm:hybridkv_store_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that were stored in the tiers.",
            panel=Panel(Section.STORES, "Bytes"),
        ),
        Metric(
            "vllm:hybridkv_store_size_bytes",
            Kind.HISTOGRAM,
            "bytes",
            "Bytes of one store: what one request stored after one step, over all ranks.",
            buckets=_BYTES,
            panel=Panel(Section.STORES, "Size of a store"),
        ),
        Metric(
            "vllm:hybridkv_store_failures_total",
            Kind.COUNTER,
            "stores",
            "Stores that failed, by the reason that the tier gave, or because of an adapter whose files changed.",
            (Label("reason", (*_FAILURES, "adapter")),),
            panel=Panel(Section.STORES, "Failed stores"),
        ),
        Metric(
            "vllm:hybridkv_loads_total",
            Kind.COUNTER,
            "loads",
            "Loads from the tiers into GPU memory, by outcome. A failed load is a recompute.",
            (Label("outcome", ("loaded", "failed")),),
            panel=Panel(Section.LOADS, "Loads"),
        ),
        Metric(
            "vllm:hybridkv_load_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that were loaded from the tiers.",
            panel=Panel(Section.LOADS, "Bytes"),
        ),
        Metric(
            "vllm:hybridkv_local_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens found in the tiers of which nothing but states was read there, as the engine had their attention "
            "in blocks of its own, by the slowest tier that had a part of the load.",
            (_SOURCE,),
            panel=Panel(Section.LOADS, "Tokens copied within the engine"),
        ),
        Metric(
            "vllm:hybridkv_local_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that loads copied from the engine's own blocks and did not read from a tier, by the slowest tier "
            "that had a part of the load. Of any but ram they were promoted all the same.",
            (_SOURCE,),
            panel=Panel(Section.LOADS, "Bytes"),
        ),
        Metric(
            "vllm:hybridkv_load_size_bytes",
            Kind.HISTOGRAM,
            "bytes",
            "Bytes of one load that worked, over all ranks.",
            buckets=_BYTES,
            panel=Panel(Section.LOADS, "Size of a load"),
        ),
        Metric(
            "vllm:hybridkv_load_failures_total",
            Kind.COUNTER,
            "loads",
            "Failed loads, by the reason that the tier gave.",
            (Label("reason", ("timeout", *_FAILURES)),),
            panel=Panel(Section.LOADS, "Failed loads"),
            starts_at_zero=True,
        ),
        Metric(
            "vllm:hybridkv_wait_timeouts_total",
            Kind.COUNTER,
            "waits",
            "Requests that stopped waiting: for chunks that were being stored (lookup) or for a slower tier (load).",
            (Label("wait", ("lookup", "load")),),
            panel=Panel(Section.LOADS, "Waits in vain"),
        ),
        Metric(
            "vllm:hybridkv_asked_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that a tier which answers late was asked for, by what it said before its time was over.",
            (_SLOWER, Label("outcome", ("held", "missing", "late"))),
            panel=Panel(Section.SLOW_TIER, "Chunks asked for"),
        ),
        Metric(
            "vllm:hybridkv_moves_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that moved between the tiers, or were to, by direction and by what became of them.",
            (
                _DIRECTION,
                _SLOWER,
                Label("result", _MOVE_RESULTS),
            ),
            panel=Panel(Section.SLOW_TIER, "Chunks moved"),
        ),
        Metric(
            "vllm:hybridkv_move_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that moved between the tiers.",
            (_DIRECTION, _SLOWER),
            panel=Panel(Section.SLOW_TIER, "Bytes moved"),
        ),
        Metric(
            "vllm:hybridkv_move_failures_total",
            Kind.COUNTER,
            "chunks",
            "Failed moves between the tiers, by the reason that the slower tier gave.",
            (Label("reason", _FAILURES), _SLOWER),
            panel=Panel(Section.SLOW_TIER, "Failed moves"),
            starts_at_zero=True,
        ),
        Metric(
            "vllm:hybridkv_move_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one chunk between the tiers, with waiting in the queue.",
            (_DIRECTION, _SLOWER),
            buckets=(*_SECONDS, 30.0, 100.0),
            panel=Panel(Section.SLOW_TIER, "Time of a move"),
        ),
        Metric(
            "vllm:hybridkv_cascades_waiting",
            Kind.GAUGE,
            "chunks",
            "Chunks that wait for their way down to a slower tier.",
            (_SLOWER,),
            panel=Panel(Section.SLOW_TIER, "Chunks waiting"),
        ),
        Metric(
            "vllm:hybridkv_disk_errors_total",
            Kind.COUNTER,
            "operations",
            "File work of the disk tier that the system refused, by what it said. Chunks are dropped meanwhile.",
            (Label("reason", DISK_ERRORS),),
            panel=Panel(Section.SLOW_TIER, "Disk errors"),
        ),
        Metric(
            "vllm:hybridkv_quarantined_total",
            Kind.COUNTER,
            "chunks",
            "Chunks of the disk tier that are never offered again, by what was wrong with them.",
            (Label("reason", (*_FAILURES, "unspecified")),),
            panel=Panel(Section.SLOW_TIER, "Quarantined chunks", view=View.INCREASE),
        ),
        Metric(
            "vllm:hybridkv_compacted_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that the disk tier copied to make room in one piece; beside those stored, its write amplification.",
            panel=Panel(Section.SLOW_TIER, "Bytes moved"),
        ),
        Metric(
            "vllm:hybridkv_breaker_openings_total",
            Kind.COUNTER,
            "openings",
            "Times that a slower tier was left alone: moves in that direction failed or did not end, or (promote) "
            "nothing that it was asked was answered in time.",
            (_DIRECTION, _SLOWER),
            panel=Panel(Section.SLOW_TIER, "Breaker openings", view=View.INCREASE),
        ),
        Metric(
            "vllm:hybridkv_breaker_open",
            Kind.GAUGE,
            "state",
            "1 while a slower tier is left alone or only probed in that direction, else 0.",
            (_DIRECTION, _SLOWER),
            panel=Panel(Section.SLOW_TIER, "Breaker open"),
        ),
        Metric(
            "vllm:hybridkv_evictions_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that gave way to newer ones.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Evicted chunks"),
        ),
        Metric(
            "vllm:hybridkv_evicted_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Space that evicted chunks gave up.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Evicted bytes"),
        ),
        Metric(
            "vllm:hybridkv_invalidations_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that were dropped because their bytes are not to be trusted any more.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Invalidated chunks", view=View.INCREASE),
        ),
        Metric(
            "vllm:hybridkv_load_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one load job, without its wait for the jobs before it.",
            buckets=_SECONDS,
            panel=Panel(Section.LOADS, "Time of a load"),
        ),
        Metric(
            "vllm:hybridkv_store_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one store job, without its wait for the jobs before it.",
            buckets=_SECONDS,
            panel=Panel(Section.STORES, "Time of a store"),
        ),
        Metric(
            "vllm:hybridkv_tier_used_bytes",
            Kind.GAUGE,
            "bytes",
            "Space of the tier that is not free.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Space"),
        ),
        Metric(
            "vllm:hybridkv_tier_capacity_bytes",
            Kind.GAUGE,
            "bytes",
            "Space of the tier.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Space"),
        ),
        _of_child(
            "queries_total",
            Kind.COUNTER,
            "requests",
            "Admitted requests that the store was asked about: a hit, a miss, passed over, unanswered or an error.",
            "Requests",
        ),
        _of_child("hits_total", Kind.COUNTER, "requests", "Requests that the store was chosen to load.", "Requests"),
        _of_child(
            "hit_tokens_total", Kind.COUNTER, "tokens", "Tokens that the store was chosen to load.", "Tokens loaded"
        ),
        _of_child("misses_total", Kind.COUNTER, "requests", "Requests for which the store had nothing.", "Requests"),
        _of_child(
            "passed_over_total",
            Kind.COUNTER,
            "requests",
            "Requests for which the store had tokens that were not loaded: another scored higher, or computing did.",
            "Requests",
        ),
        _of_child(
            "unanswered_total",
            Kind.COUNTER,
            "requests",
            "Requests that were admitted before the store had answered, because another had or the time was over.",
            "Requests",
        ),
        _of_child(
            "errors_total",
            Kind.COUNTER,
            "requests",
            "Requests for which the store raised when asked.",
            "Requests",
        ),
        _of_child(
            "deferrals_total",
            Kind.COUNTER,
            "lookups",
            "Lookups that were put off because the store needed more time.",
            "Deferrals and timeouts",
        ),
        _of_child(
            "timeouts_total",
            Kind.COUNTER,
            "requests",
            "Requests that waited for the store in vain.",
            "Deferrals and timeouts",
        ),
        _of_child("failures_total", Kind.COUNTER, "loads", "Loads of the store that failed.", "Failed loads"),
        _of_child(
            "load_seconds_total",
            Kind.COUNTER,
            "seconds",
            "Time from the start to the end of the store's loads that worked.",
            "Seconds of loading a second",
        ),
        _of_child(
            "load_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Engine memory that the store's loads filled, over all ranks.",
            "Bytes loaded",
        ),
        _of_child(
            "pending_loads",
            Kind.GAUGE,
            "loads",
            "Loads of the store that have begun and not ended.",
            "Loads on their way",
        ),
        _of_child(
            "clamped_tokens_total",
            Kind.COUNTER,
            "tokens",
            "How far below zero counts of the store were before they were taken as zero. More than 0 is a bug in it.",
            "Tokens below zero",
            starts_at_zero=True,
        ),
        *PEER_METRICS,
        *LMCACHE_METRICS,
    )
)
