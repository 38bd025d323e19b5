"""Builder: agreement with the server on one chunk size for both halves, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from lmcache_played import BLOCK, FULL, layout_of, new_request

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.identity.identification import Identity
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache import builder as module
from hybridkv.connectors.vllm.lmcache.builder import LMCacheBuilder, require_fit
from hybridkv.connectors.vllm.lmcache.config import LMCacheConfig
from hybridkv.connectors.vllm.lmcache.scheduler import LMCacheScheduler
from hybridkv.hashing import ChunkKeys
from hybridkv.lmcache.geometry import PageGroup
from hybridkv.planner import GroupKind, GroupSpec
from kits.lmcache.scripted_server import ScriptedServer, polite
from kits.lmcache.server_process import eventually


class FixedIdentityBuilder:
    """Fixed facts of an engine."""

    def __init__(self, *args: object, **keys: object) -> None:
        self.keys = ChunkKeys(layout_of((FULL,)).fingerprint({"model": "m"}), BLOCK)

    def identity(self, ranks: object) -> Identity:
        return Identity(self.keys, Adapters(self.keys, 0))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def start(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> LMCacheScheduler:
    """Scheduler half of an engine that was started with chunks of 16 tokens."""
    monkeypatch.setattr(module, "IdentityBuilder", FixedIdentityBuilder)
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        model_config=SimpleNamespace(max_model_len=64),
        cache_config=SimpleNamespace(block_size=4),
        scheduler_config=SimpleNamespace(policy="fcfs"),
    )
    url = f"tcp://{server.address.host}:{server.address.port}"
    config = LMCacheConfig(url=url, http_port=server.address.http_port, pool=1 << 20)
    room = LoadRoom(None, lambda: 0.0)
    return LMCacheBuilder(vllm_config, config, layout_of((FULL,)), room, ConnectorMetrics()).build({})


@pytest.mark.parametrize(
    "chunk_tokens", [16, 24, *(pytest.param(number, marks=pytest.mark.full) for number in (32, 256))]
)
def test_a_server_with_another_chunk_size_finds_nothing_and_fails_no_engine(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    """An engine with a configured chunk size starts without its server, which may turn out to have another one."""

    def script(name: str, frames: Any) -> Any:
        is_chunk = name in ("negotiate_chunk_size", "get_chunk_size")
        return [[*frames[:3], msgspec.msgpack.encode(chunk_tokens)]] if is_chunk else polite(name, frames)

    server.script = script
    half = start(server, monkeypatch)
    try:
        numbers = iter(range(10_000))

        def asked() -> bool:
            request = new_request(f"r{next(numbers)}", range(57))
            half.track(request)
            return "lookup" in server.calls

        if chunk_tokens == 16:
            assert eventually(asked)
            return
        assert eventually(lambda: not asked() and server.calls.count("noop") > 2)
        request = new_request("r", range(57))
        assert eventually(lambda: half.matched_tokens(request, 0) == 0)
        assert "lookup" not in server.calls
    finally:
        half.close()


@pytest.mark.parametrize(("chunk_tokens", "fitting"), [(8, 16), (4, 16), (20, 24), (17, 24)])
def test_a_chunk_that_fits_no_block_or_hash_is_refused(chunk_tokens: int, fitting: int) -> None:
    groups = (PageGroup(GroupSpec(GroupKind.FULL, 8), 64), PageGroup(GroupSpec(GroupKind.FULL, 4), 64))
    with pytest.raises(ConfigurationError, match=f"use {fitting},"):
        require_fit(chunk_tokens, groups)
    require_fit(fitting, groups)
