"""KV events have the types and fields of the installed vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from test_lookups import BLOCK, FULL, STATE, make_layout
from vllm.config import KVEventsConfig
from vllm.distributed import kv_events
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.events import RouterEvents
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.requests import Requests
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.tiers import Slot
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import TierStack


class Config:
    """The part of an engine's configuration that is read."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def publishes(config: Any) -> bool:
    return compat.publishes_kv_events(config)


def test_events_are_published_only_if_the_engine_publishes_them() -> None:
    assert not publishes(Config())
    assert not publishes(Config(kv_events_config=None))
    assert not publishes(Config(kv_events_config=KVEventsConfig()))
    assert publishes(Config(kv_events_config=KVEventsConfig(enable_kv_cache_events=True)))


def test_each_block_has_the_extra_keys_of_the_engine() -> None:
    request = Request("r", [1] * 8, SamplingParams(max_tokens=1), None, cache_salt="salt")
    assert compat.event_extra_keys(request, [(0, 4), (4, 8)]) == [("salt",), None]


def test_fields_that_an_engine_lacks_are_omitted() -> None:
    event = compat.block_removed(block_hashes=[1], medium="CPU", group_idx=0, of_a_later_version=True)
    assert event == kv_events.BlockRemoved([1], "CPU", group_idx=0)


def test_hashes_are_numbers_or_bytes_according_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    assert compat.event_hash(b"\x01" * 32) == int.from_bytes(b"\x01" * 8, "big")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert compat.event_hash(b"\x01" * 32) == b"\x01" * 32


def test_a_state_is_announced_only_for_the_last_hash_block_of_its_chunk() -> None:
    """A request that shares half of the chunk cannot resume from this state."""
    made, near = make_layout((FULL, STATE)), RamIndex(1 << 20, 4096)
    events = RouterEvents(
        made.layout, TierStack(near, (), 1, lambda: 0.0), [{"group_idx": 0}, {"group_idx": 1}], ConnectorMetrics()
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request, end = Request("r", [1] * 8, SamplingParams(max_tokens=1), None, block_hasher=hasher), 2 * BLOCK
    tracked = Requests(made.layout, made.keys, Adapters(made.keys, 0)).track(request)
    for group in (0, 1):
        key = tracked.keys().key(group, end)
        assert isinstance(near.reserve(key, 1), Slot) and near.commit(key)
    events.on_admitted(tracked)
    hashes = {event.group_idx: event.block_hashes for event in events.take()}
    first, last = (compat.event_hash(block_hash) for block_hash in request.block_hashes[:2])
    assert hashes == {0: [first, last], 1: [last]}
