"""What an operator says of each tier reaches it: its place in the stack, and its deadlines."""

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
    decode_config,
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
    """A tier that answers late, as somebody might add one."""


class World:
    """Where each stack is built with a peer beside the disk, and a clock that the test holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.peer = RemoteStore(1, self.clock, is_silent=True)
        open_index = tiers.open_index

        def with_peer(tier: SecondaryTierConfig, setting: tiers.Setting) -> TierIndex:
            return RemoteIndex(self.peer, 1 << 20) if isinstance(tier, PeerTierConfig) else open_index(tier, setting)

        monkeypatch.setattr(tiers, "open_index", with_peer)
        monkeypatch.setattr(tiers, "clock", self.clock)

    def clock(self) -> float:
        return self.now_s

    def stack(self, *slower: SecondaryTierConfig) -> TierStack:
        # What decodes a list of tiers knows none but those of the product.
        everything: Any = (RamTierConfig(capacity=1 << 20), *slower)
        return tiers.build_stack(OffloadConfig(tiers=everything), LAYOUT, LAYOUT.fingerprint({"model": "m"}), SIZES)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_start_says_what_the_index_of_host_memory_may_take(caplog: pytest.LogCaptureFixture) -> None:
    config = OffloadConfig(tiers=(RamTierConfig(capacity=1 << 20),))
    with caplog.at_level(logging.INFO):
        tiers.build_stack(config, LAYOUT, LAYOUT.fingerprint({"model": "m"}), replace(SIZES, smallest_bytes=5000))
    assert "host memory: index of 128 records takes up to" in caplog.text


def test_host_memory_that_cannot_be_had_is_named_by_its_key() -> None:
    config = OffloadConfig(tiers=(RamTierConfig(capacity=100),))
    with pytest.raises(ConfigurationError, match=r"tiers\[0\]\.capacity: .* got 100"):
        tiers.build_stack(config, LAYOUT, LAYOUT.fingerprint({"model": "m"}), replace(SIZES, rank_bytes=100))


def test_the_index_has_room_for_the_smallest_chunks() -> None:
    config = OffloadConfig(tiers=(RamTierConfig(capacity=1 << 30),))
    assert tiers.arena_sizes(config, LAYOUT).smallest_bytes == min(LAYOUT.chunk_sizes())


def test_a_model_of_which_nothing_is_ever_stored_has_tiers() -> None:
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


def test_the_order_of_the_list_is_the_stack(world: World, tmp_path: Path) -> None:
    for expected in (["disk", "peer"], ["peer", "disk"]):
        configured = {"disk": disk(tmp_path), "peer": PeerTierConfig()}
        stack = world.stack(*(configured[name] for name in expected))
        assert list(stack.secondary) == expected
        stack.close()


def test_the_sizes_of_chunks_are_all_that_occur() -> None:
    spec = LAYOUT.spec
    ends = range(spec.chunk_tokens, 64 * spec.chunk_tokens, spec.chunk_tokens)
    occurring = {LAYOUT.chunk_bytes(group, end) for group in spec.stored_groups for end in ends} - {0}
    assert LAYOUT.chunk_sizes() == tuple(sorted(occurring))


def test_host_memory_alone_is_a_stack(world: World) -> None:
    stack = world.stack()
    assert dict(stack.secondary) == {} and not stack.has_async_lookups
    stack.close()


@pytest.mark.parametrize(("keys", "lookup_wait_s"), [({}, 1.0), ({"lookup_timeout_seconds": 0.25}, 0.25)])
def test_an_asked_key_is_a_miss_when_the_time_of_its_tier_is_over(
    keys: dict[str, float], lookup_wait_s: float, world: World, tmp_path: Path
) -> None:
    stack = world.stack(disk(tmp_path), PeerTierConfig(**keys))
    assert stack.lookup_wait_s == lookup_wait_s
    stack.start_lookup([KEY])
    world.now_s += lookup_wait_s * 0.9
    assert stack.lookup(KEY) is LookupResult.PENDING
    world.now_s += lookup_wait_s * 0.2
    assert stack.lookup(KEY) is LookupResult.MISS
    stack.close()


def test_who_waits_for_a_tier_waits_as_long_as_that_may_take(world: World, tmp_path: Path) -> None:
    world.peer.is_silent = False
    stack = world.stack(disk(tmp_path), PeerTierConfig(load_timeout_seconds=5))
    world.peer.lie(KEY, 16)
    stack.start_lookup([KEY])
    hold = stack.acquire("request", [KEY])
    assert isinstance(hold, PromotionLease) and hold.source == "peer"
    for seconds in (4.0, 2.0):
        assert hold.failure is None
        world.now_s += seconds
        stack.tick()
        stack.tick()
    assert hold.failure is LeaseFailure.TIMEOUT
    stack.close()


def test_a_tier_that_is_only_read_is_given_nothing(world: World, tmp_path: Path) -> None:
    stack = world.stack(disk(tmp_path), PeerTierConfig(cascade="nothing"))
    assert not isinstance(stack.reserve(KEY, 16), Refusal)
    assert stack.commit(KEY)
    assert {move.tier for move in stack.take_moves()} == {"disk"}
    stack.close()


def test_a_time_to_answer_in_is_refused_where_a_tier_answers_at_once(world: World, tmp_path: Path) -> None:
    keys = {"type": "disk", "path": str(tmp_path / "store"), "capacity": "64MiB", "lookup_timeout_seconds": 0.5}
    config = decode_config({"tiers": [{"type": "ram", "capacity": "1MiB"}, keys]})
    with pytest.raises(ConfigurationError) as caught:
        tiers.build_stack(config, LAYOUT, LAYOUT.fingerprint({"model": "m"}), SIZES)
    error = caught.value
    assert error.path == "kv_connector_extra_config.tiers[1].lookup_timeout_seconds"
    assert "answers late" in error.expected and "disk" in str(error.got) and error.hint == "leave it out"
    stack = world.stack(disk(tmp_path))  # and gave its directory back
    stack.close()


def test_every_type_of_tier_that_can_be_configured_can_be_counted() -> None:
    [label] = CATALOGUE.named("vllm:hybridkv_tier_used_bytes").labels
    assert isinstance(label, Label)
    assert {str(kind.__struct_config__.tag) for kind in get_args(TierConfig)} <= set(label.values)
    assert name_of(PeerTierConfig()) == "peer"
