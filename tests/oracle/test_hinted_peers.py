"""Hint `peers`, through the scheduler of vLLM: an engine reads a prefix from an engine that it does not list."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hybridkv.connectors.vllm import CONNECTOR, register
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.peers.transport import Transport
from kits.peers.in_memory import InMemoryTransport, World
from oracle.engine import OracleEngine
from oracle.heard import Heard, heard
from oracle.mixes import GPT_OSS, QWEN3_NEXT, Mix
from oracle.settings import Connector, EngineSettings

__all__ = ["heard"]

CHUNKS = 4


@pytest.fixture(autouse=True)
def _peers_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    world = World()

    def transport(name: str) -> Transport:
        return InMemoryTransport(name, world)

    monkeypatch.setattr(tiers, "_nixl_transport", transport)
    monkeypatch.setattr(tiers, "_require_nixl", lambda: None)


def free_port() -> int:
    while True:
        port = random.randrange(20000, 32000)
        try:
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        return port


class PeerEngine:
    """An engine with host memory and a peer tier that lists no peer."""

    def __init__(self, mix: Mix, **keys: Any) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        peer = {"type": "peer", "listen": self.address, "lookup_timeout_seconds": 20, **keys}
        extra = {
            "chunk_tokens": mix.alignment_tokens,
            "weights_digest": "weights of the oracle",
            "compute_tokens_per_second": 0.1,  # every possible hit is worth the wait
            "tiers": [{"type": "ram", "capacity": "64MiB"}, peer],
        }
        settings = EngineSettings(
            num_blocks=400, max_step_tokens=512, retention_tokens=0, connector=Connector(CONNECTOR, extra)
        )
        self.engine = OracleEngine(mix, settings)
        self._num_requests = 0

    def restored(self, tokens: list[int], *peers: str) -> int:
        """Tokens that a request with this hint restores."""
        before = self.engine.restored_tokens
        params = {"hybridkv_hints": {"peers": list(peers)}} if peers else None
        self._num_requests += 1
        self.engine.submit(f"request-{self._num_requests}", tokens, 2, transfer_params=params)
        self.engine.drain()
        self.engine.check_idle()
        return self.engine.restored_tokens - before


def prompt(mix: Mix, seed: int) -> list[int]:
    generator = Random(seed)
    return [generator.randrange(200) for _ in range(CHUNKS * mix.alignment_tokens + 3)]


@pytest.fixture
def engines() -> Iterator[list[PeerEngine]]:
    made: list[PeerEngine] = []
    yield made
    for each in made:
        each.engine.close()


@pytest.mark.parametrize("mix", [QWEN3_NEXT, GPT_OSS], ids=lambda mix: mix.name)
def test_a_hinted_peer_that_is_not_listed_gives_its_prefix(
    mix: Mix, engines: list[PeerEngine], heard: Heard, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of both engines")
    secret.chmod(0o600)
    keys = {"secret_file": str(secret), "allowed_hosts": ["127.0.0.0/8"]}
    holder, reader = PeerEngine(mix, **keys), PeerEngine(mix, **keys)
    engines += [holder, reader]
    for seed in (1, 2):
        assert holder.restored(prompt(mix, seed)) == 0
    assert reader.restored(prompt(mix, 1)) == 0, "without the hint"
    assert reader.restored(prompt(mix, 2), holder.address) == CHUNKS * mix.alignment_tokens


def test_a_hinted_peer_that_is_not_allowed_is_not_connected_to(engines: list[PeerEngine], heard: Heard) -> None:
    mix = QWEN3_NEXT
    holder, reader = PeerEngine(mix), PeerEngine(mix)
    engines += [holder, reader]
    assert holder.restored(prompt(mix, 1)) == 0
    assert reader.restored(prompt(mix, 1), holder.address) == 0
    assert reader.engine.scheduler_connector is not None
    reader.engine.scheduler_connector.get_kv_connector_stats()
    assert {labels[0]: value for labels, value in heard.counted("hints_total").items()} == {"peers_refused": 1}
