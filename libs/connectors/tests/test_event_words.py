"""Events are in the engine's own words, whichever of its versions it is."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed import kv_events
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from hybridkv.connectors.vllm import compat


class Config:
    """As much of an engine's configuration as is read."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def publishes(config: Any) -> bool:
    return compat.publishes_kv_events(config)


def test_nothing_is_published_unless_the_engine_does() -> None:
    assert not publishes(Config())
    assert not publishes(Config(kv_events_config=None))
    assert not publishes(Config(kv_events_config=KVEventsConfig()))
    assert publishes(Config(kv_events_config=KVEventsConfig(enable_kv_cache_events=True)))


def test_each_block_has_the_extra_keys_that_the_engine_gives_it() -> None:
    request = Request("r", [1] * 8, SamplingParams(max_tokens=1), None, cache_salt="salt")
    assert compat.event_extra_keys(request, [(0, 4), (4, 8)]) == [("salt",), None]


def test_fields_that_an_engine_lacks_are_left_out() -> None:
    event = compat.block_removed(block_hashes=[1], medium="CPU", group_idx=0, of_a_later_version=True)
    assert event == kv_events.BlockRemoved([1], "CPU", group_idx=0)


def test_hashes_are_numbers_or_bytes_as_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    assert compat.event_hash(b"\x01" * 32) == int.from_bytes(b"\x01" * 8, "big")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert compat.event_hash(b"\x01" * 32) == b"\x01" * 32
