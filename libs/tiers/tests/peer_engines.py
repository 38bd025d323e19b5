"""Engines that are peers, over loopback: host memory, a scheduler's half and a rank's half each, in this process."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Sequence

from hybridkv.hashing import Fingerprint
from hybridkv.peers.transport.tcp import TcpTransport
from hybridkv.peers.wire import Secret
from hybridkv.tiers import Key, Slot, Ticket, TierConfigurationError
from hybridkv.tiers.peer import Neighbourhood, PeerIndex, PeerMedium, PeerOptions, open_index, open_medium
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.testing.copying import CopyingMedium

GRANULE_BYTES = 1024
SECRET = Secret(b"a secret that all peers know")
TIMEOUT_S = 60.0
OPTIONS = PeerOptions(retry_s=0.05)


def fingerprint(model: str = "model") -> Fingerprint:
    return Fingerprint(
        facts={"model.name": model}, chunk_tokens=16, hash_algorithm="sha256", tensor_parallel_size=1, groups=()
    )


def until(holds: Callable[[], object]) -> None:
    """Wait for another thread, or another process."""
    until_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.002)


def free_port() -> int:
    """One behind which another one is free. Somebody else may be quicker; who binds it tries again."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        return port


class Engine:
    """One rank. `peers` are ports of others' schedulers."""

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
    ) -> None:
        self.ram = RamIndex(capacity_bytes, GRANULE_BYTES)
        self.arena = RamArena(capacity_bytes, GRANULE_BYTES)
        self.copying = CopyingMedium(self.arena)
        found = fingerprint(model)
        for _ in range(50):
            self.port = port or free_port()
            addresses = tuple(("127.0.0.1", each) for each in peers)
            near = Neighbourhood(secret, ("127.0.0.1", self.port), addresses, lambda name: TcpTransport(name, secret))
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
        """Hold a chunk."""
        slot = self.ram.reserve(key, len(chunk))
        assert isinstance(slot, Slot)
        self.copying.store(Ticket(0), key, slot, [chunk])
        [completion] = self.copying.poll()
        assert completion.failure is None
        assert self.ram.commit(key)
        return slot

    def close(self) -> None:
        self.index.close()
        self.medium.close()
        self.arena.close()
