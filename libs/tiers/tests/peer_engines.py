"""Peer engines over loopback in this process: each has host memory, a scheduler half and a rank half."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import patience

from hybridkv.hashing import Fingerprint
from hybridkv.peers.transport import Transport
from hybridkv.peers.wire import Secret
from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, Key, Slot, Ticket, TierConfigurationError
from hybridkv.tiers.peer import (
    PeerAddresses,
    PeerIndex,
    PeerLookupClient,
    PeerMedium,
    PeerOptions,
    open_index,
    open_medium,
)
from hybridkv.tiers.ram import RamArena, RamIndex
from kits.peers.in_memory import InMemoryTransport, World
from kits.peers.suite import until
from kits.tiers.copying import CopyingMedium

GRANULE_BYTES = 1024
CHUNK_BYTES = 4096
SECRET = Secret(b"a secret that all peers know")
TIMEOUT_S = patience.seconds(6.0)


def patient(**chosen: Any) -> PeerOptions:
    """Options with timeouts that a busy machine does not exceed."""
    load_s = patience.seconds(6.0)
    bounds = {"retry_s": 0.05, "reach_timeout_s": load_s, "load_timeout_s": load_s, "lease_s": 2 * load_s}
    return PeerOptions(**bounds | chosen)


OPTIONS = patient()
WORLD = World()


def in_memory(name: str) -> Transport:
    return InMemoryTransport(name, WORLD)


def fingerprint(model: str = "model") -> Fingerprint:
    return Fingerprint(
        facts={"model.name": model}, chunk_tokens=16, hash_algorithm="sha256", tensor_parallel_size=1, groups=()
    )


def free_port() -> int:
    """A port with a free successor. Another process may take it first, so that callers try again."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        return port


def chunk_bytes(seed: int, num_bytes: int = CHUNK_BYTES) -> bytes:
    """Bytes that identify their chunk."""
    return bytes((seed + 31 * position) % 251 for position in range(num_bytes))


def found(asker: Engine, *keys: Key) -> list[LookupResult]:
    """Results of a lookup at the peers."""
    until(asker.client.ready)
    asker.index.start_lookup(keys, 1e12)
    until(lambda: not asker.index.any_pending(keys))
    return [asker.index.lookup(key) for key in keys]


def load(asker: Engine, key: Key, num_bytes: int = CHUNK_BYTES) -> bytes | FailureReason:
    """Bytes of the chunk, loaded into the engine's own memory."""
    far, near = asker.index.pin(key), asker.ram.reserve(key, num_bytes)
    assert far is not None and isinstance(near, Slot)
    views = asker.arena.views(near)
    asker.medium.load(Ticket(1), key, far, views)
    assert asker.medium.drain(TIMEOUT_S)
    [completion] = asker.medium.poll()
    asker.index.unpin(key)
    asker.ram.abort(key)
    return b"".join(views) if completion.failure is None else completion.failure.reason


class Engine:
    """Engine with one rank. `peers` are ports of other schedulers."""

    index: PeerIndex
    medium: PeerMedium

    def __init__(
        self,
        peers: Sequence[int] = (),
        capacity_bytes: int = 64 * GRANULE_BYTES,
        secret: Secret = SECRET,
        model: str = "model",
        options: PeerOptions = OPTIONS,
        clock: Callable[[], float] = time.monotonic,
        port: int | None = None,
        make_transport: Callable[[str], Transport] = in_memory,
    ) -> None:
        self.ram = RamIndex(capacity_bytes, GRANULE_BYTES)
        self.arena = RamArena(capacity_bytes, GRANULE_BYTES)
        self.copying = CopyingMedium(self.arena)
        found = fingerprint(model)
        for _ in range(50):
            self.port = port or free_port()
            addresses = tuple(("127.0.0.1", each) for each in peers)
            near = PeerAddresses(secret, ("127.0.0.1", self.port), addresses, make_transport)
            try:
                self.index = open_index(near, self.ram, found, options, clock)
            except TierConfigurationError:
                continue
            try:
                self.medium = open_medium(near, self.arena, found.digest(), 0, options, time.monotonic)
            except TierConfigurationError:
                self.index.close()
                continue
            return
        raise AssertionError("no port is free")

    def put(self, key: Key, chunk: bytes) -> Slot:
        """Store a chunk in host memory."""
        slot = self.ram.reserve(key, len(chunk))
        assert isinstance(slot, Slot)
        self.copying.store(Ticket(0), key, slot, [chunk])
        [completion] = self.copying.poll()
        assert completion.failure is None
        assert self.ram.commit(key)
        return slot

    @property
    def client(self) -> PeerLookupClient:
        """Lookup client of the index."""
        client = self.index._client
        assert isinstance(client, PeerLookupClient)
        return client

    def close(self) -> None:
        self.index.close()
        self.medium.close()
        self.arena.close()
