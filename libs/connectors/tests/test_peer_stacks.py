"""Two engines configured as peers promote chunks from each other's host memory."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tier_engines import Engine

from hybridkv.connectors.config import OffloadConfig, decode_config
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.worker import open_transport
from hybridkv.peers.transport.nixl_library import MODULES
from hybridkv.planner import LookupResult
from kits.peers.suite import until

CHUNK = bytes(number % 251 for number in range(10_000))
KEY, OTHER = b"key", b"other"


def free_port() -> int:
    """A port with a free successor."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        return port


def configured(port: int, *peers: int, **keys: Any) -> OffloadConfig:
    named = [f"127.0.0.1:{peer}" for peer in peers]
    tier = {"type": "peer", "listen": f"127.0.0.1:{port}", "peers": named, **keys}
    return decode_config({"tiers": [{"type": "ram", "capacity": 1 << 20}, tier]})


MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(*arguments: Any, **keys: Any) -> Engine:
        made.append(Engine(*arguments, **keys))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def test_an_engine_promotes_chunks_of_its_peer(engine: MakeEngine) -> None:
    port, other_port = free_port(), free_port()
    first, second = engine(configured(port, other_port)), engine(configured(other_port, port))
    first.store(KEY, CHUNK)
    until(lambda: second.lookups(KEY, OTHER) == [LookupResult.HIT, LookupResult.MISS])
    assert not second.stack.in_primary(KEY)
    assert second.load(KEY) == CHUNK
    assert second.stack.in_primary(KEY)
    counts = second.stack.take_counts().tiers["peer"]
    assert counts.promoted_bytes == len(CHUNK) and not counts.failures and not counts.cascades
    second.store(OTHER, CHUNK[::-1])
    until(lambda: first.lookups(OTHER) == [LookupResult.HIT])
    assert first.load(OTHER) == CHUNK[::-1]


def test_an_engine_promotes_chunks_of_a_hinted_peer_that_is_not_listed(engine: MakeEngine, tmp_path: Path) -> None:
    port, secret = free_port(), tmp_path / "secret"
    secret.write_bytes(b"a secret of both engines")
    secret.chmod(0o600)
    keys = {"secret_file": str(secret), "allowed_hosts": ["127.0.0.0/8"]}
    first, second = engine(configured(port, **keys)), engine(configured(free_port(), **keys))
    first.store(KEY, CHUNK)
    assert second.lookups(KEY) == [LookupResult.MISS], "without the hint"
    until(lambda: second.lookups(KEY, OTHER, hinted=[("127.0.0.1", port)]) == [LookupResult.HIT, LookupResult.MISS])
    assert second.load(KEY) == CHUNK and second.stack.in_primary(KEY)
    counts = second.stack.take_counts().tiers["peer"]
    assert counts.promoted_bytes == len(CHUNK) and not counts.failures


def test_a_chunk_changed_at_the_peer_is_not_loaded(engine: MakeEngine) -> None:
    port, other_port = free_port(), free_port()
    first, second = engine(configured(port)), engine(configured(other_port, port))
    first.store(KEY, CHUNK)
    until(lambda: second.lookups(KEY) == [LookupResult.HIT])
    slots = first.stack.pin_all([KEY])
    assert slots is not None
    first.arena.views(slots[0])[0][5] ^= 1
    assert second.load(KEY) is None and not second.stack.in_primary(KEY)
    assert second.stack.take_counts().tiers["peer"].failures == {"checksum": 1}


def test_a_peer_with_another_model_is_ignored(engine: MakeEngine) -> None:
    port, other_port = free_port(), free_port()
    first, second = engine(configured(port)), engine(configured(other_port, port), model="another")
    first.store(KEY, CHUNK)
    for _ in range(5):
        assert second.lookups(KEY) == [LookupResult.MISS]


def test_without_reachable_peers_a_lookup_misses_at_once(engine: MakeEngine) -> None:
    alone = engine(configured(free_port(), free_port()))
    assert alone.lookups(KEY) == [LookupResult.MISS]


def test_without_nixl_neither_the_tier_nor_the_connector_starts(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"{name}._api", raising=False)
    starts: dict[str, Callable[[], object]] = {
        "kv_connector_extra_config.tiers[1].type": lambda: engine(configured(free_port())),
        "kv_connector": lambda: open_transport("name"),
    }
    for path, start in starts.items():
        with pytest.raises(ConfigurationError) as caught:
            start()
        assert (caught.value.path, caught.value.expected) == (path, "NIXL, installed")
        assert "pip install nixl" in caught.value.hint


def test_an_unusable_secret_or_address_is_refused_by_its_key(engine: MakeEngine, tmp_path: Path) -> None:
    path = "kv_connector_extra_config.tiers[1]"
    port = free_port()
    engine(configured(port))
    open_to_all = tmp_path / "secret"
    open_to_all.write_text("a secret that others may read")
    open_to_all.chmod(0o644)
    for config, field in (
        (configured(port), "listen"),
        (configured(free_port(), secret_file=str(open_to_all)), "secret_file"),
        (configured(free_port(), secret_file=str(tmp_path / "nowhere")), "secret_file"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            engine(config)
        assert str(caught.value).startswith(f"{path}.{field}:")
