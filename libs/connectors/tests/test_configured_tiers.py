"""Settings of each tier reach the stack: its place, and its deadlines."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from test_worker_facts import layout

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.config import (
    DiskTierConfig,
    OffloadConfig,
    RamTierConfig,
    SecondaryTierConfig,
    TierConfig,
    name_of,
)
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.metrics import CATALOGUE, Label
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LookupResult
from hybridkv.tiers import Refusal, TierIndex
from hybridkv.tiers.stack import LeaseFailure, PromotionLease, TierStack
from kits.tiers.reference import RemoteIndex, RemoteStore

KEY = b"key"
LAYOUT = layout()
SIZES = tiers.ArenaSizes(1 << 20, 4096)


class PeerTierConfig(SecondaryTierConfig, frozen=True, tag_field="type", tag="peer"):
    """Async tier, as a user may add one."""


class StackBuilder:
    """Builds stacks with a peer beside the disk, and with a clock under the test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.peer = RemoteStore(1, self.clock, is_silent=True)
        open_index = tiers.open_index

        def with_peer(tier: SecondaryTierConfig, *rest: Any) -> TierIndex:
            return RemoteIndex(self.peer, 1 << 20) if isinstance(tier, PeerTierConfig) else open_index(tier, *rest)

        monkeypatch.setattr(tiers, "open_index", with_peer)
        monkeypatch.setattr(tiers, "clock", self.clock)

    def clock(self) -> float:
        return self.now_s

    def stack(self, *slower: SecondaryTierConfig) -> TierStack:
        # `decode_config` accepts only tiers of the product.
        everything: Any = (RamTierConfig(capacity=1 << 20), *slower)
        return tiers.build_stack(OffloadConfig(tiers=everything), LAYOUT, LAYOUT.fingerprint({"model": "m"}), SIZES)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> StackBuilder:
    return StackBuilder(monkeypatch)


def test_a_start_logs_the_size_of_the_index_of_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    config = OffloadConfig(tiers=(RamTierConfig(capacity=1 << 20),))
    with caplog.at_level(logging.INFO):
        tiers.build_stack(config, LAYOUT, LAYOUT.fingerprint({"model": "m"}), replace(SIZES, smallest_chunk_bytes=5000))
    assert "host memory: index of at most 128 records takes at most" in caplog.text


def test_a_capacity_too_small_for_host_memory_is_refused_by_its_key() -> None:
    config = OffloadConfig(tiers=(RamTierConfig(capacity=100),))
    with pytest.raises(ConfigurationError, match=r"tiers\[0\]\.capacity: .* got 100"):
        tiers.build_stack(config, LAYOUT, LAYOUT.fingerprint({"model": "m"}), replace(SIZES, rank_bytes=100))


def test_the_index_has_room_for_the_smallest_chunks() -> None:
    config = OffloadConfig(tiers=(RamTierConfig(capacity=1 << 30),))
    assert tiers.arena_sizes(config, LAYOUT).smallest_chunk_bytes == min(LAYOUT.chunk_sizes())


def test_a_model_without_stored_chunks_has_tiers() -> None:
    spec = CacheSpec((GroupSpec(GroupKind.CHUNKED, 4, align_tokens=4),), 4)
    nothing = CacheLayout(spec, ((LayerLayout("a", 8),),), LAYOUT.groups[:1], 4, "sha256", 1)
    assert nothing.chunk_sizes() == ()
    config = OffloadConfig(tiers=(RamTierConfig(capacity=1 << 20),))
    sizes = tiers.arena_sizes(config, nothing)
    stack = tiers.build_stack(config, nothing, LAYOUT.fingerprint({"model": "m"}), sizes)
    assert stack.primary.num_keys == 0
    stack.close()


def disk(path: Path, **keys: Any) -> DiskTierConfig:
    return DiskTierConfig(path=str(path / "store"), capacity=64 << 20, **keys)


def test_the_order_of_the_list_is_the_order_of_the_stack(builder: StackBuilder, tmp_path: Path) -> None:
    for expected in (["disk", "peer"], ["peer", "disk"]):
        configured = {"disk": disk(tmp_path), "peer": PeerTierConfig()}
        stack = builder.stack(*(configured[name] for name in expected))
        assert list(stack.secondary) == expected
        stack.close()


def test_chunk_sizes_are_exactly_those_that_occur() -> None:
    spec = LAYOUT.spec
    ends = range(spec.chunk_tokens, 64 * spec.chunk_tokens, spec.chunk_tokens)
    occurring = {LAYOUT.chunk_bytes(group, end) for group in spec.stored_groups for end in ends} - {0}
    assert LAYOUT.chunk_sizes() == tuple(sorted(occurring))


def test_host_memory_alone_is_a_stack(builder: StackBuilder) -> None:
    stack = builder.stack()
    assert dict(stack.secondary) == {} and not stack.has_async_lookups
    stack.close()


@pytest.mark.parametrize(("keys", "lookup_wait_s"), [({}, 1.0), ({"lookup_timeout_seconds": 0.25}, 0.25)])
def test_a_lookup_becomes_a_miss_at_the_timeout_of_its_tier(
    keys: dict[str, float], lookup_wait_s: float, builder: StackBuilder, tmp_path: Path
) -> None:
    stack = builder.stack(disk(tmp_path), PeerTierConfig(**keys))
    assert stack.lookup_wait_s == lookup_wait_s
    stack.start_lookup([KEY])
    builder.now_s += lookup_wait_s * 0.9
    assert stack.lookup(KEY) is LookupResult.PENDING
    builder.now_s += lookup_wait_s * 0.2
    assert stack.lookup(KEY) is LookupResult.MISS
    stack.close()


def test_a_lease_times_out_with_its_tier(builder: StackBuilder, tmp_path: Path) -> None:
    builder.peer.is_silent = False
    stack = builder.stack(disk(tmp_path), PeerTierConfig(load_timeout_seconds=5))
    builder.peer.lie(KEY, 16)
    stack.start_lookup([KEY])
    hold = stack.acquire("request", [KEY])
    assert isinstance(hold, PromotionLease) and hold.source == "peer"
    for seconds in (4.0, 2.0):
        assert hold.failure is None
        builder.now_s += seconds
        stack.tick()
        stack.tick()
    assert hold.failure is LeaseFailure.TIMEOUT
    stack.close()


def test_a_tier_without_cascades_gets_no_chunk(builder: StackBuilder, tmp_path: Path) -> None:
    stack = builder.stack(disk(tmp_path), PeerTierConfig(cascade="nothing"))
    assert not isinstance(stack.reserve(KEY, 16), Refusal)
    assert stack.commit(KEY)
    assert {move.tier for move in stack.take_moves()} == {"disk"}
    stack.close()


def test_every_configurable_tier_has_a_metric_label() -> None:
    [label] = CATALOGUE.named("vllm:hybridkv_tier_used_bytes").labels
    assert isinstance(label, Label)
    assert {str(kind.__struct_config__.tag) for kind in get_args(TierConfig)} <= set(label.values)
    assert name_of(PeerTierConfig()) == "peer"
