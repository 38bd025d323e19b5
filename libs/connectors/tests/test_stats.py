import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from test_lookups import BLOCK, FULL, make_layout
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hybridkv.connectors.vllm.common.events import RouterEvents
from hybridkv.connectors.vllm.common.explain import Explanation, LookupReason
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.common.requests import Requests
from hybridkv.connectors.vllm.common.stats import GAUGE_RESEND_INTERVAL, ConnectorMetrics, OffloadStats
from hybridkv.connectors.vllm.offload.reuse import RECORD_S, ReuseMeter
from hybridkv.metrics import CATALOGUE, PrometheusSink
from hybridkv.planner.checkpoints import LeftOut, Placement, Stop, StopReason
from hybridkv.tiers import Failure, FailureReason, Refusal, Slot
from hybridkv.tiers.disk import DiskIndex, DiskOptions
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import BreakerOptions, Direction, MoveOutcome, SecondaryTier, TierStack
from kits.tiers.inline_janitor import InlineJanitor
from kits.tiers.reference import RemoteIndex, RemoteStore


def explanation(
    result: str, reason: LookupReason, num_tokens: int = 0, offered_tokens: int = 0, **more: Any
) -> Explanation:
    return Explanation(
        request_id="a",
        result=result,
        reason=reason,
        num_tokens=num_tokens,
        engine_tokens=0,
        offered_tokens=offered_tokens,
        compute_tokens=num_tokens - offered_tokens,
        **more,
    )


def used_stack() -> TierStack:
    """Two tiers; the primary one has evicted two chunks and invalidated one."""
    near = RamIndex(4 * 4096, 4096)
    for key, num_bytes in ((b"a", 8192), (b"b", 8192), (b"c", 16384)):
        assert not isinstance(near.reserve(key, num_bytes), Refusal)
        near.commit(key)
    near.invalidate(b"c")
    far = RamIndex(1 << 22, 4096)
    assert not isinstance(far.reserve(b"d", 8192), Refusal)
    far.commit(b"d")
    stack = TierStack(near, [SecondaryTier("disk", far)], 1, lambda: 0.0)
    stack.prefetch([b"d"], 8192)
    (move,) = stack.take_moves()
    stack.on_move(move.move_id, MoveOutcome(1))
    return stack


def everything() -> ConnectorMetrics:
    metrics = ConnectorMetrics()
    metrics.pending()
    metrics.pending(is_async=True)
    metrics.lookup(explanation("hit", LookupReason.COMPLETE, num_tokens=40, offered_tokens=32, source="ram"))
    metrics.lookup(explanation("hit", LookupReason.PREFIX_ENDS, junction="resumed"))
    metrics.lookup(
        explanation(
            "miss",
            LookupReason.GROUP_LIMITS,
            limiting_kind="recurrent",
            lost_tokens=16,
            resumable_tokens=16,
            junction="lost",
        )
    )
    dropped = ("no_room", "too_large", "not_aligned", "incomplete")
    for outcome in ("stored", "present", *(f"dropped_{why}" for why in dropped), "failed"):
        metrics.store("recurrent", outcome)
    metrics.placed(Placement((Stop(16, StopReason.JUNCTION), Stop(32, StopReason.SPACED)), LeftOut(stops=2, worth=1)))
    metrics.state_stored("stop")
    metrics.superseded()
    metrics.prefixes_forgotten(3)
    metrics.count_misled("copied_copy")
    for hint in ("no_store", "no_load", "keep", "prefetch", "invalid"):
        metrics.hint(hint)
    metrics.prefetch("crowded")
    metrics.kept("ram", True)
    metrics.kept("disk", False)
    metrics.kept_bytes("ram", 4096)
    metrics.stored_bytes(1000)
    metrics.store_failed("busy")
    metrics.load(500, False, [])
    metrics.load(500, True, [LoadFailure("checksum", ""), LoadFailure("io", "")])
    metrics.local("ram", 0, 0)
    metrics.local("disk", 16, 700)
    metrics.copied(True, 0.01, 4096)
    metrics.copied(False, 0.02, 8192)
    metrics.tiers(used_stack(), 1)
    metrics.moved(Direction.PROMOTE, "disk", 0.01)
    metrics.wait_timeout("load")
    metrics.announced("BlockStored", "CPU")
    metrics.announced("BlockRemoved", "STORAGE")
    metrics.announcements(128, 3)
    metrics.reuse({"1x": 0.25, "unbounded": 0.5}, 4096)
    return metrics


def exposed(stats: OffloadStats) -> str:
    """Text of /metrics for the stats, after their transport to the API process."""
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    registry = CollectorRegistry()
    counter, gauge, histogram = (partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram))
    sink = PrometheusSink(CATALOGUE, counter, gauge, histogram, ["engine"], {0: ["0"]})
    sink.observe(carried, 0)
    return generate_latest(registry).decode()


def test_every_event_reaches_prometheus_under_a_declared_name() -> None:
    stats = everything().take()
    assert stats is not None
    text = exposed(stats)
    for line in (
        'vllm:hybridkv_lookups_total{engine="0",reason="complete",result="hit"} 1.0',
        'vllm:hybridkv_lookups_total{engine="0",reason="group_limits",result="miss"} 1.0',
        'vllm:hybridkv_lookups_total{engine="0",reason="being_stored",result="pending"} 1.0',
        'vllm:hybridkv_lookups_total{engine="0",reason="async_lookup",result="pending"} 1.0',
        'vllm:hybridkv_lookup_tokens_total{engine="0",source="ram"} 32.0',
        'vllm:hybridkv_lookup_tokens_total{engine="0",source="compute"} 8.0',
        'vllm:hybridkv_limited_lookups_total{engine="0",limiting_kind="recurrent"} 1.0',
        'vllm:hybridkv_lost_tokens_total{engine="0",limiting_kind="recurrent"} 16.0',
        'vllm:hybridkv_resumable_tokens_total{engine="0"} 16.0',
        'vllm:hybridkv_checkpoint_stops_total{engine="0",reason="junction"} 1.0',
        'vllm:hybridkv_checkpoint_stops_left_out_total{cause="stops",engine="0"} 2.0',
        'vllm:hybridkv_checkpoint_stops_left_out_total{cause="worth",engine="0"} 1.0',
        'vllm:hybridkv_states_stored_total{engine="0",origin="stop"} 1.0',
        'vllm:hybridkv_superseded_states_total{engine="0"} 1.0',
        'vllm:hybridkv_junctions_total{engine="0",outcome="resumed"} 1.0',
        'vllm:hybridkv_junctions_total{engine="0",outcome="lost"} 1.0',
        'vllm:hybridkv_load_size_bytes_sum{engine="0"} 4096.0',
        'vllm:hybridkv_store_size_bytes_sum{engine="0"} 8192.0',
        'vllm:hybridkv_store_failures_total{engine="0",reason="busy"} 1.0',
        'vllm:hybridkv_evicted_bytes_total{engine="0",tier="ram"} 16384.0',
        'vllm:hybridkv_evictions_total{engine="0",tier="ram"} 2.0',
        'vllm:hybridkv_invalidations_total{engine="0",tier="ram"} 1.0',
        'vllm:hybridkv_hit_tokens_total{engine="0"} 32.0',
        'vllm:hybridkv_loads_total{engine="0",outcome="failed"} 1.0',
        'vllm:hybridkv_load_bytes_total{engine="0"} 500.0',
        'vllm:hybridkv_load_failures_total{engine="0",reason="checksum"} 1.0',
        'vllm:hybridkv_local_bytes_total{engine="0",source="disk"} 700.0',
        'vllm:hybridkv_local_tokens_total{engine="0",source="disk"} 16.0',
        'vllm:hybridkv_stores_total{engine="0",kind="recurrent",outcome="dropped_no_room"} 1.0',
        'vllm:hybridkv_forgotten_prefixes_total{engine="0"} 3.0',
        'vllm:hybridkv_misled_requests_total{cause="copied_copy",engine="0"} 1.0',
        'vllm:hybridkv_hints_total{engine="0",hint="invalid"} 1.0',
        'vllm:hybridkv_keeps_total{engine="0",outcome="refused",tier="disk"} 1.0',
        'vllm:hybridkv_prefetches_total{engine="0",outcome="promoted"} 1.0',
        'vllm:hybridkv_prefetches_total{engine="0",outcome="crowded"} 1.0',
        'vllm:hybridkv_prefetch_bytes_total{engine="0",outcome="promoted"} 8192.0',
        'vllm:hybridkv_kept_bytes{engine="0",tier="ram"} 4096.0',
        'vllm:hybridkv_tier_capacity_bytes{engine="0",tier="ram"} 16384.0',
        'vllm:hybridkv_tier_capacity_bytes{engine="0",tier="disk"} 4.194304e+06',
        'vllm:hybridkv_breaker_open{direction="promote",engine="0",tier="disk"} 0.0',
        'vllm:hybridkv_breaker_open{direction="cascade",engine="0",tier="disk"} 0.0',
        'vllm:hybridkv_wait_timeouts_total{engine="0",wait="load"} 1.0',
        'vllm:hybridkv_kv_events_total{engine="0",medium="cpu",type="stored"} 1.0',
        'vllm:hybridkv_kv_events_total{engine="0",medium="storage",type="removed"} 1.0',
        'vllm:hybridkv_announced_tokens{engine="0"} 128.0',
        'vllm:hybridkv_unannounced_chunks{engine="0"} 3.0',
        'vllm:hybridkv_move_seconds_count{direction="promote",engine="0",tier="disk"} 1.0',
    ):
        assert line in text, text


def test_breaker_metrics_have_a_direction() -> None:
    stack = TierStack(RamIndex(8192, 4096), [SecondaryTier("disk", RamIndex(8192, 4096))], 1, lambda: 0.0)
    for number in range(BreakerOptions().failures):
        assert isinstance(stack.reserve(b"%d" % number, 100), Slot) and stack.commit(b"%d" % number)
        [move] = stack.take_moves()
        stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.IO)))
        stack.invalidate(b"%d" % number)
    metrics = ConnectorMetrics()
    metrics.tiers(stack, 1)
    stats = metrics.take()
    assert stats is not None
    text = exposed(stats)
    for line in (
        'vllm:hybridkv_breaker_openings_total{direction="cascade",engine="0",tier="disk"} 1.0',
        'vllm:hybridkv_breaker_open{direction="cascade",engine="0",tier="disk"} 1.0',
        'vllm:hybridkv_breaker_open{direction="promote",engine="0",tier="disk"} 0.0',
    ):
        assert line in text, text
    assert 'vllm:hybridkv_breaker_openings_total{direction="promote"' not in text


def test_quarantined_records_are_counted_by_reason(tmp_path: Path) -> None:
    options = DiskOptions(capacity_bytes=1 << 20, segment_bytes=1 << 16)
    disk = DiskIndex(str(tmp_path / "store"), make_layout([FULL]).keys.fingerprint, options, InlineJanitor())
    for key, reason in ((b"a", FailureReason.CHECKSUM), (b"b", FailureReason.IO), (b"c", FailureReason.CHECKSUM)):
        assert not isinstance(disk.reserve(key, 100), Refusal) and disk.commit(key)
        assert disk.invalidate(key, reason)
    metrics = ConnectorMetrics()
    stack = TierStack(RamIndex(4096, 4096), [SecondaryTier("disk", disk)], 1, lambda: 0.0)
    metrics.tiers(stack, 1)
    stats = metrics.take()
    stack.close()
    assert stats is not None
    for line in (
        'vllm:hybridkv_quarantined_total{engine="0",reason="checksum"} 2.0',
        'vllm:hybridkv_quarantined_total{engine="0",reason="io"} 1.0',
    ):
        assert line in exposed(stats)


def test_async_lookups_are_counted_by_tier_and_outcome() -> None:
    now_s = 0.0
    stores = {name: RemoteStore(1, lambda: now_s, answer_s) for name, answer_s in (("peer", 0.5), ("object", 5.0))}
    stores["peer"].lie(b"a", 16)
    below = [SecondaryTier(name, RemoteIndex(world, 1 << 20)) for name, world in stores.items()]
    stack = TierStack(RamIndex(4096, 4096), below, 1, lambda: now_s)
    stack.start_lookup([b"a", b"b"])
    now_s = 2.0
    metrics = ConnectorMetrics()
    metrics.tiers(stack, 1)
    stats = metrics.take()
    stack.close()
    assert stats is not None
    text = exposed(stats)
    assert set(re.findall(r'vllm:hybridkv_async_lookups_total{engine="0",outcome="(\w+)",tier="(\w+)"} 1.0', text)) >= {
        ("held", "peer"),
        ("missing", "peer"),
    }
    assert 'outcome="late",tier="peer"' not in text


def test_stats_are_summed_without_changing_the_operands() -> None:
    first, second = everything().take(), everything().take()
    assert first is not None and second is not None
    merged = first.aggregate(second)
    assert merged.reduce()["vllm:hybridkv_hit_tokens_total"] == 64
    assert first.reduce()["vllm:hybridkv_hit_tokens_total"] == 32


def test_empty_stats_are_not_sent() -> None:
    metrics = ConnectorMetrics()
    assert metrics.take() is None
    assert OffloadStats().is_empty()


def test_a_gauge_is_sent_on_change_and_again_after_a_while() -> None:
    metrics, stack = ConnectorMetrics(), TierStack(RamIndex(8192, 4096), [], 1, lambda: 0.0)

    def gauges() -> dict[str, float]:
        metrics.tiers(stack, 2)
        stats = metrics.take()
        return {} if stats is None else {name: value for name, _, value in stats.data["gauges"]}

    both = {"vllm:hybridkv_tier_used_bytes": 0, "vllm:hybridkv_tier_capacity_bytes": 16384}
    assert gauges() == both
    assert gauges() == {}
    assert isinstance(stack.reserve(b"a", 100), Slot)
    assert gauges() == {"vllm:hybridkv_tier_used_bytes": 8192}
    later = [gauges() for _ in range(2 * GAUGE_RESEND_INTERVAL)]
    assert [each for each in later if each] == [both | {"vllm:hybridkv_tier_used_bytes": 8192}] * 2


def test_gauges_of_announcements_and_of_reuse_are_sent_again_without_news() -> None:
    made, stack = make_layout((FULL,)), TierStack(RamIndex(1 << 20, 4096), [], 1, lambda: 0.0)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request("r", [1] * 9, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    now_s, metrics = [0.0], ConnectorMetrics()
    tracked = Requests(made.layout, made.keys, Adapters(made.keys, 0)).track(request)
    meter = ReuseMeter(made.layout, stack, metrics, lambda: now_s[0])
    meter.on_admitted(tracked)
    tracked.chain.keys[0, 8] = made.key(0, tracked.prefix_hashes(), 8)
    meter.on_request_finished(tracked)
    now_s[0] = RECORD_S
    events = RouterEvents(made.layout, stack, [{"group_idx": 0}], metrics)
    sent: dict[str, int] = {}
    for _ in range(3 * GAUGE_RESEND_INTERVAL):
        meter.record()
        assert events.take() == []
        if (stats := metrics.take()) is not None:
            for name in {name.removeprefix("vllm:hybridkv_") for name, _, _ in stats.data["gauges"]}:
                sent[name] = sent.get(name, 0) + 1
    gauges = ("estimated_hit_share", "reused_bytes", "announced_tokens", "unannounced_chunks")
    assert sent == dict.fromkeys(gauges, 3)


@pytest.mark.parametrize("num_front_ends", range(1, 13))
def test_each_of_several_front_ends_gets_a_constant_gauge(num_front_ends: int) -> None:
    metrics, stack = ConnectorMetrics(), TierStack(RamIndex(8192, 4096), [], 1, lambda: 0.0)
    updated = set()
    for step in range(num_front_ends * GAUGE_RESEND_INTERVAL):
        metrics.tiers(stack, 1)
        if metrics.take() is not None:
            updated.add(step % num_front_ends)
    assert updated == set(range(num_front_ends))
