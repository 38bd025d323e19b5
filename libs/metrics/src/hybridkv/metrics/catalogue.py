"""Catalogue: the declarations of all metrics of hybridkv."""

from __future__ import annotations

from hybridkv.metrics.declaration import Catalogue, ConfiguredLabel, Kind, Label, Metric, Panel, Section, View
from hybridkv.metrics.lmcache_catalogue import LMCACHE_METRICS
from hybridkv.metrics.peer_catalogue import PEER_METRICS

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(1 << power) for power in (12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32))
_GROUP_KINDS = ("full", "window", "chunked", "recurrent")
_FAILURES = ("missing", "wrong_key", "checksum", "io", "busy", "closed")
DISK_ERRORS = ("enospc", "edquot", "eio", "eacces", "eperm", "erofs", "enoent", "estale", "other")
"""Values of the label `reason`: names of errno in lower case, and `other`."""
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
"""Results of moving a chunk between two tiers; docs/guides/disk.md explains each."""
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
        "async_lookup",
    ),
)
"""Reasons why a hit was not longer; docs/guides/observing.md explains each."""

MAX_CHILDREN = 16
"""Limit of the stores of one engine: values of the label `connector`."""
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
            "Admitted requests (hit, miss), by the reason why the hit was not longer, and lookups that began to wait "
            "(pending).",
            (Label("result", ("hit", "pending", "miss")), _REASON),
            panel=Panel(Section.HITS, "Lookups"),
        ),
        Metric(
            "vllm:hybridkv_lookup_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens of requests that were looked up, by source: the engine's prefix cache, a tier, or compute.",
            (Label("source", ("engine", *_TIERS, "lmcache", "compute")),),
            panel=Panel(Section.HITS, "Tokens by source"),
        ),
        Metric(
            "vllm:hybridkv_hit_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens that lookups found in the tiers beyond those in GPU memory, and that the engine loads.",
            panel=Panel(Section.HITS, "Tokens found in the tiers"),
        ),
        Metric(
            "vllm:hybridkv_saved_seconds_total",
            Kind.COUNTER,
            "seconds",
            "Time to compute the tokens that hits restored, at the measured speed of the engine.",
            panel=Panel(Section.HITS, "Prefill time saved"),
        ),
        Metric(
            "vllm:hybridkv_waited_seconds_total",
            Kind.COUNTER,
            "seconds",
            "Time that requests waited for lookups, promotions, room and loads before they ran.",
            panel=Panel(Section.HITS, "Waits of requests"),
        ),
        Metric(
            "vllm:hybridkv_resumable_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens of full groups in the tiers beyond those in GPU memory: the hits if every boundary had a state and "
            "a window.",
            panel=Panel(Section.HITS, "Tokens that could be resumed"),
        ),
        Metric(
            "vllm:hybridkv_limited_lookups_total",
            Kind.COUNTER,
            "lookups",
            "Lookups with a hit shorter than the full groups allow, by the kind of group that limited it.",
            (Label("limiting_kind", _GROUP_KINDS),),
            panel=Panel(Section.HITS, "Lookups that a kind of group limited"),
        ),
        Metric(
            "vllm:hybridkv_lost_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens between the resume point and the end of the full groups, by the kind of group that lacked chunks.",
            (Label("limiting_kind", _GROUP_KINDS),),
            panel=Panel(Section.HITS, "Tokens lost to a kind of group"),
        ),
        Metric(
            "vllm:hybridkv_junctions_total",
            Kind.COUNTER,
            "lookups",
            "Requests that diverge from a stored prefix, by whether every group could resume at that point.",
            (Label("outcome", ("resumed", "lost")),),
            panel=Panel(Section.HITS, "Junctions"),
        ),
        Metric(
            "vllm:hybridkv_checkpoint_stops_total",
            Kind.COUNTER,
            "stops",
            "Boundaries at which prefills of admitted requests stop to store recurrent states, by reason.",
            (Label("reason", ("junction", "branch", "spaced", "end")),),
            panel=Panel(Section.HITS, "Stops for states"),
        ),
        Metric(
            "vllm:hybridkv_checkpoint_stops_left_out_total",
            Kind.COUNTER,
            "stops",
            "Stops that were considered and not made: too many steps (stops), too much extra prefill (share), or not "
            "worth their step and bytes (worth).",
            (Label("cause", ("stops", "share", "worth")),),
            panel=Panel(Section.HITS, "Stops left out"),
        ),
        Metric(
            "vllm:hybridkv_states_stored_total",
            Kind.COUNTER,
            "states",
            "Boundaries with stored recurrent states, by origin: a stop by hybridkv, the end of the prompt, the "
            "answer, or any other state that the engine kept.",
            (Label("origin", ("stop", "prompt_end", "answer", "engine")),),
            panel=Panel(Section.HITS, "States stored"),
        ),
        Metric(
            "vllm:hybridkv_superseded_states_total",
            Kind.COUNTER,
            "states",
            "States of answers that a newer state of the same answer replaced in host memory.",
            panel=Panel(Section.HITS, "States superseded"),
        ),
        Metric(
            "vllm:hybridkv_forgotten_prefixes_total",
            Kind.COUNTER,
            "prefixes",
            "Prefixes that were dropped for newer ones. Points where prompts diverge from them are no longer detected.",
            panel=Panel(Section.HITS, "Prefixes forgotten"),
        ),
        Metric(
            "vllm:hybridkv_kv_events_total",
            Kind.COUNTER,
            "events",
            "KV events about tiers that were sent to routers, by type and medium.",
            (Label("type", ("stored", "removed")), Label("medium", ("cpu", "storage"))),
            panel=Panel(Section.HITS, "Events for routers"),
        ),
        Metric(
            "vllm:hybridkv_announced_tokens",
            Kind.GAUGE,
            "tokens",
            "Tokens in tiers that were announced to routers: up to boundaries at which every group can resume.",
            panel=Panel(Section.HITS, "Announced tokens"),
        ),
        Metric(
            "vllm:hybridkv_unannounced_chunks",
            Kind.GAUGE,
            "chunks",
            "Chunks in tiers that were not announced to routers, because no request can resume with them.",
            panel=Panel(Section.HITS, "Unannounced chunks"),
        ),
        Metric(
            "vllm:hybridkv_stores_total",
            Kind.COUNTER,
            "chunks",
            "Chunks selected for storing, by kind of group and outcome.",
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
            "Requests that continued from a corrupt block of vLLM, so that they are neither stored nor offered to a "
            "peer. `partial_copy`: vLLM may have copied a block only in part. `copied_copy`: vLLM copied from a "
            "block that the same step also filled by a copy. `wrong_block`: a block has another state than its hash "
            "says, was computed by such a request, or was copied from such a block. `dropped_step`: a session "
            "continued from a state with a token that vLLM has dropped.",
            (Label("cause", ("partial_copy", "copied_copy", "wrong_block", "dropped_step")),),
            panel=Panel(Section.STORES, "Requests not stored"),
        ),
        Metric(
            "vllm:hybridkv_hints_total",
            Kind.COUNTER,
            "requests",
            "Requests with a hint, by hint. Invalid hints and refused peers were ignored.",
            (Label("hint", ("no_store", "no_load", "keep", "prefetch", "peers", "peers_refused", "invalid")),),
            panel=Panel(Section.HITS, "Hints"),
        ),
        Metric(
            "vllm:hybridkv_keeps_total",
            Kind.COUNTER,
            "requests",
            "Prefixes that requests asked to keep, by tier and by whether they fit into `keep_share`.",
            (_TIER, Label("outcome", ("kept", "refused"))),
            panel=Panel(Section.TIERS, "Prefixes to be kept"),
        ),
        Metric(
            "vllm:hybridkv_kept_bytes",
            Kind.GAUGE,
            "bytes",
            "Bytes of a tier that are kept because requests asked for it.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Kept"),
        ),
        Metric(
            "vllm:hybridkv_prefetches_total",
            Kind.COUNTER,
            "requests",
            "Prefixes that requests asked to prefetch into host memory, by outcome: all chunks arrived, nothing to "
            "fetch, no room within `keep_share`, too late, a chunk was lost, or too many prefetches waited.",
            (Label("outcome", ("promoted", "nothing", "no_room", "late", "lost", "crowded")),),
            panel=Panel(Section.TIERS, "Prefixes to be prefetched"),
        ),
        Metric(
            "vllm:hybridkv_prefetch_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Prefetched bytes: promoted into host memory, used by another request, or displaced by a later prefetch.",
            (Label("outcome", ("promoted", "used", "displaced")),),
            panel=Panel(Section.TIERS, "Prefetched"),
        ),
        Metric(
            "vllm:hybridkv_store_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes stored in the tiers.",
            panel=Panel(Section.STORES, "Bytes"),
        ),
        Metric(
            "vllm:hybridkv_store_size_bytes",
            Kind.HISTOGRAM,
            "bytes",
            "Bytes of one store job on one rank.",
            buckets=_BYTES,
            panel=Panel(Section.STORES, "Size of a store"),
        ),
        Metric(
            "vllm:hybridkv_store_failures_total",
            Kind.COUNTER,
            "stores",
            "Failed stores, by the tier's reason, or `adapter` if the files of an adapter changed, or `failed_load` if "
            "another connector failed to load blocks that the request uses.",
            (Label("reason", (*_FAILURES, "adapter", "failed_load")),),
            panel=Panel(Section.STORES, "Failed stores"),
        ),
        Metric(
            "vllm:hybridkv_loads_total",
            Kind.COUNTER,
            "loads",
            "Loads from the tiers into GPU memory, by outcome. After a failed load, `kv_load_failure_policy` decides "
            "about the request.",
            (Label("outcome", ("loaded", "failed")),),
            panel=Panel(Section.LOADS, "Loads"),
        ),
        Metric(
            "vllm:hybridkv_load_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes loaded from the tiers.",
            panel=Panel(Section.LOADS, "Bytes"),
        ),
        Metric(
            "vllm:hybridkv_local_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens found in the tiers for which only states were read there, because the engine had their attention "
            "in its own blocks. By the slowest tier of the load.",
            (_SOURCE,),
            panel=Panel(Section.LOADS, "Tokens copied within the engine"),
        ),
        Metric(
            "vllm:hybridkv_local_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that loads copied from the engine's own blocks instead of a tier, by the slowest tier of the load. "
            "Chunks of tiers other than ram were promoted nevertheless.",
            (_SOURCE,),
            panel=Panel(Section.LOADS, "Bytes"),
        ),
        Metric(
            "vllm:hybridkv_load_size_bytes",
            Kind.HISTOGRAM,
            "bytes",
            "Bytes of one load job on one rank.",
            buckets=_BYTES,
            panel=Panel(Section.LOADS, "Size of a load"),
        ),
        Metric(
            "vllm:hybridkv_load_failures_total",
            Kind.COUNTER,
            "loads",
            "Failed loads, by the tier's reason.",
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
            "vllm:hybridkv_async_lookups_total",
            Kind.COUNTER,
            "chunks",
            "Chunks in asynchronous lookups of secondary tiers, by the result within the time limit.",
            (_SLOWER, Label("outcome", ("held", "missing", "late"))),
            panel=Panel(Section.SLOW_TIER, "Chunks asked for"),
        ),
        Metric(
            "vllm:hybridkv_duplicate_chunks_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that this engine stored in the object store though another engine had stored them meanwhile. Their "
            "share of the cascades to that tier is wasted.",
            panel=Panel(Section.SLOW_TIER, "Chunks stored twice"),
        ),
        Metric(
            "vllm:hybridkv_store_upkeep_total",
            Kind.COUNTER,
            "objects",
            "Objects of the object store: written again because they are in use, or not (dropped: too many waited; "
            "failed), and deleted to keep the bound of a directory, or not.",
            (Label("outcome", ("renewed", "renewal_dropped", "renewal_failed", "swept", "sweep_failed")),),
            panel=Panel(Section.SLOW_TIER, "Objects renewed and swept"),
        ),
        Metric(
            "vllm:hybridkv_moves_total",
            Kind.COUNTER,
            "chunks",
            "Moves of chunks between tiers, by direction and result, including those that did not start.",
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
            "Failed moves between the tiers, by the slower tier's reason.",
            (Label("reason", _FAILURES), _SLOWER),
            panel=Panel(Section.SLOW_TIER, "Failed moves"),
            starts_at_zero=True,
        ),
        Metric(
            "vllm:hybridkv_move_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of moving one chunk between the tiers, including its wait in the queue.",
            (_DIRECTION, _SLOWER),
            buckets=(*_SECONDS, 30.0, 100.0),
            panel=Panel(Section.SLOW_TIER, "Time of a move"),
        ),
        Metric(
            "vllm:hybridkv_cascades_waiting",
            Kind.GAUGE,
            "chunks",
            "Chunks that wait for their move to a slower tier.",
            (_SLOWER,),
            panel=Panel(Section.SLOW_TIER, "Chunks waiting"),
        ),
        Metric(
            "vllm:hybridkv_disk_errors_total",
            Kind.COUNTER,
            "operations",
            "File operations of the disk tier that failed, by errno. Chunks are dropped meanwhile.",
            (Label("reason", DISK_ERRORS),),
            panel=Panel(Section.SLOW_TIER, "Disk errors"),
        ),
        Metric(
            "vllm:hybridkv_quarantined_total",
            Kind.COUNTER,
            "chunks",
            "Chunks of the disk tier that are never offered again, by failure.",
            (Label("reason", (*_FAILURES, "unspecified")),),
            panel=Panel(Section.SLOW_TIER, "Quarantined chunks", view=View.INCREASE),
        ),
        Metric(
            "vllm:hybridkv_compacted_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that the disk tier copied to make contiguous room, for the write amplification.",
            panel=Panel(Section.SLOW_TIER, "Bytes moved"),
        ),
        Metric(
            "vllm:hybridkv_breaker_openings_total",
            Kind.COUNTER,
            "openings",
            "Times that the breaker of a slower tier opened: moves in that direction failed or did not end, or "
            "(promote) no lookup was answered in time.",
            (_DIRECTION, _SLOWER),
            panel=Panel(Section.SLOW_TIER, "Breaker openings", view=View.INCREASE),
        ),
        Metric(
            "vllm:hybridkv_breaker_open",
            Kind.GAUGE,
            "state",
            "1 while a slower tier is not used or only probed in that direction, else 0.",
            (_DIRECTION, _SLOWER),
            panel=Panel(Section.SLOW_TIER, "Breaker open"),
        ),
        Metric(
            "vllm:hybridkv_evictions_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that were evicted to make room for newer ones.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Evicted chunks"),
        ),
        Metric(
            "vllm:hybridkv_evicted_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes of evicted chunks.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Evicted bytes"),
        ),
        Metric(
            "vllm:hybridkv_invalidations_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that were dropped because their bytes are no longer trusted.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Invalidated chunks", view=View.INCREASE),
        ),
        Metric(
            "vllm:hybridkv_load_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one load job on one rank, without its wait for earlier jobs.",
            buckets=_SECONDS,
            panel=Panel(Section.LOADS, "Time of a load"),
        ),
        Metric(
            "vllm:hybridkv_store_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one store job on one rank, without its wait for earlier jobs.",
            buckets=_SECONDS,
            panel=Panel(Section.STORES, "Time of a store"),
        ),
        Metric(
            "vllm:hybridkv_tier_used_bytes",
            Kind.GAUGE,
            "bytes",
            "Used bytes of the tier.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Space"),
        ),
        Metric(
            "vllm:hybridkv_tier_capacity_bytes",
            Kind.GAUGE,
            "bytes",
            "Capacity of the tier in bytes.",
            (_TIER,),
            panel=Panel(Section.TIERS, "Space"),
        ),
        _of_child(
            "queries_total",
            Kind.COUNTER,
            "requests",
            "Admitted requests that were looked up in the store: a hit, a miss, passed over, unanswered or an error.",
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
            "Requests for which the store had tokens that were not loaded: another store or compute scored higher.",
            "Requests",
        ),
        _of_child(
            "unanswered_total",
            Kind.COUNTER,
            "requests",
            "Requests that were admitted before the store answered: another store answered, or the time was over.",
            "Requests",
        ),
        _of_child(
            "errors_total",
            Kind.COUNTER,
            "requests",
            "Requests for which the lookup of the store raised an exception.",
            "Requests",
        ),
        _of_child(
            "deferrals_total",
            Kind.COUNTER,
            "lookups",
            "Lookups that were deferred because the store needed more time.",
            "Deferrals and timeouts",
        ),
        _of_child(
            "timeouts_total",
            Kind.COUNTER,
            "requests",
            "Requests that waited for the store until the timeout.",
            "Deferrals and timeouts",
        ),
        _of_child("failures_total", Kind.COUNTER, "loads", "Loads of the store that failed.", "Failed loads"),
        _of_child(
            "load_seconds_total",
            Kind.COUNTER,
            "seconds",
            "Time from the start to the end of the store's successful loads.",
            "Seconds of loading a second",
        ),
        _of_child(
            "load_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes of engine memory that the store's loads wrote, over all ranks.",
            "Bytes loaded",
        ),
        _of_child(
            "pending_loads",
            Kind.GAUGE,
            "loads",
            "Loads of the store that have started and not ended.",
            "Loads on their way",
        ),
        _of_child(
            "clamped_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Amount by which counts of the store were below zero; they count as 0. More than 0 is a bug in the store.",
            "Tokens below zero",
            starts_at_zero=True,
        ),
        *PEER_METRICS,
        *LMCACHE_METRICS,
    )
)
