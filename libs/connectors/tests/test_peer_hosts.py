"""Allowed hosts: no request makes an engine connect to a host that its operator did not allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_peer_prompts import FULL, held

from hybridkv.connectors.hosts import AllowedHosts
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.nixl.consumer import Consumer
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan
from hybridkv.connectors.vllm.nixl.params import compose
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.planner import CacheSpec
from hybridkv.planner.admission import LoadAdmission


def plan_for(host: str, metrics: NixlMetrics) -> NixlStepPlan:
    """Plan for the workers after a request that names a host."""
    params = compose(msgspec.structs.replace(held((FULL,), 9), host=host))
    # The request reads no cache, so that its tokens are not needed.
    request: Any = SimpleNamespace(
        request_id="r", kv_transfer_params=params, lora_request=None, skip_reading_prefix_cache=True
    )
    plan = NixlStepPlan()
    room = LoadRoom(LoadAdmission(CacheSpec((FULL,), FULL.block_tokens), 64), lambda: 0.0)
    Consumer((FULL,), 0, AllowedHosts(["10.0.0.0/8", "kv-1"]), room, metrics).begin(request, plan)
    return plan


@pytest.mark.parametrize("host", ["10.1.2.3", "kv-1"])
def test_an_allowed_host_is_connected(host: str) -> None:
    metrics = NixlMetrics()
    (found,) = plan_for(host, metrics).waiting
    assert found.prompt.host == host
    assert metrics.take() is None


@pytest.mark.parametrize("entry", ["::ffff:10.0.0.5", "::ffff:10.0.0.0/120", "10.0.0.0/24", "10.0.0.5"])
@pytest.mark.parametrize("host", ["10.0.0.5", "::ffff:10.0.0.5", "::ffff:a00:5"])
def test_an_entry_allows_ipv4_addresses_in_both_forms(entry: str, host: str) -> None:
    allowed = AllowedHosts([entry])
    assert host in allowed
    assert "10.0.1.5" not in allowed and "::ffff:10.0.1.5" not in allowed and "::a00:5" not in allowed


def test_a_zone_in_an_entry_allows_no_address_without_it() -> None:
    assert "1.2.3.4" not in AllowedHosts(["::ffff:1.2.3.4%eth0"])


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "kv-2", "10.1"])
def test_another_host_reaches_no_rank_and_is_counted(host: str) -> None:
    metrics = NixlMetrics()
    assert plan_for(host, metrics).is_empty
    stats = metrics.take()
    assert stats is not None and "refused" in str(stats.data)
