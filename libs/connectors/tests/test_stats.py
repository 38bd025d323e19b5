from functools import partial

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybridkv.connectors.vllm.messages import LoadFailure
from hybridkv.connectors.vllm.stats import OffloadStats, Recorder
from hybridkv.metrics import CATALOGUE, PrometheusSink
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Hit, Miss
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import Direction, TierStack

SPEC = CacheSpec(
    (GroupSpec(kind=GroupKind.RECURRENT, block_tokens=16), GroupSpec(kind=GroupKind.FULL, block_tokens=16)), 16
)


def everything() -> Recorder:
    recorder = Recorder()
    recorder.lookup(Hit(32), SPEC, 32)
    recorder.lookup(Miss(0, "no state"), SPEC, 0)
    recorder.lookup(Miss(None, "too short"), SPEC, 0)
    for outcome in ("stored", "present", "dropped_no_room", "dropped_not_aligned", "failed"):
        recorder.store("recurrent", outcome)
    recorder.stored_bytes(1000)
    recorder.load(32, 500, False, [])
    recorder.load(32, 500, True, [LoadFailure("checksum", ""), LoadFailure("io", "")])
    recorder.copied(True, 0.01)
    recorder.copied(False, 0.02)
    recorder.tiers(TierStack(RamIndex(1 << 20, 4096), RamIndex(1 << 22, 4096), 2, lambda: 0.0), 2)
    recorder.moved(Direction.PROMOTE, 0.01)
    recorder.wait_timeout("load")
    return recorder


def test_every_event_reaches_prometheus_under_a_declared_name() -> None:
    stats = everything().take()
    assert stats is not None
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    registry = CollectorRegistry()

    counter, gauge, histogram = (partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram))
    sink = PrometheusSink(CATALOGUE, counter, gauge, histogram, ["engine"], {0: ["0"]})
    sink.observe(carried, 0)
    text = generate_latest(registry).decode()
    for line in (
        'vllm:hybridkv_lookups_total{engine="0",limiting_kind="",result="hit"} 1.0',
        'vllm:hybridkv_lookups_total{engine="0",limiting_kind="recurrent",result="miss"} 1.0',
        'vllm:hybridkv_hit_tokens_total{engine="0"} 32.0',
        'vllm:hybridkv_loads_total{engine="0",outcome="failed"} 1.0',
        'vllm:hybridkv_load_bytes_total{engine="0"} 500.0',
        'vllm:hybridkv_load_failures_total{engine="0",reason="checksum"} 1.0',
        'vllm:hybridkv_stores_total{engine="0",kind="recurrent",outcome="dropped_no_room"} 1.0',
        'vllm:hybridkv_tier_capacity_bytes{engine="0",tier="ram"} 2.097152e+06',
        'vllm:hybridkv_tier_capacity_bytes{engine="0",tier="disk"} 8.388608e+06',
        'vllm:hybridkv_breaker_open{engine="0"} 0.0',
        'vllm:hybridkv_wait_timeouts_total{engine="0",wait="load"} 1.0',
        'vllm:hybridkv_move_seconds_count{direction="promote",engine="0"} 1.0',
    ):
        assert line in text, text


def test_stats_of_two_steps_add_up_and_are_not_changed_by_it() -> None:
    first, second = everything().take(), everything().take()
    assert first is not None and second is not None
    merged = first.aggregate(second)
    assert merged.reduce()["vllm:hybridkv_hit_tokens_total"] == 64
    assert first.reduce()["vllm:hybridkv_hit_tokens_total"] == 32


def test_nothing_counted_is_nothing_sent() -> None:
    recorder = Recorder()
    assert recorder.take() is None
    assert OffloadStats().is_empty()
