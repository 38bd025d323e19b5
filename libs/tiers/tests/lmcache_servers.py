"""Engines that use a server of LMCache: a scheduler's half and the ranks' halves in this process, a real server."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import patience

from hybridkv.lmcache.connection import ConnectionOptions, ServerAddress
from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, Key, Slot, Ticket
from hybridkv.tiers.lmcache import LMCacheOptions, Site, open_index, open_medium
from kits.lmcache.server_process import ServerProcess, eventually

CHUNK_BYTES = 4096
SIZES = (CHUNK_BYTES, 1000)
TIMEOUT_S = patience.seconds(6.0)
SOON = ConnectionOptions(call_timeout_s=patience.seconds(0.3), beat_s=0.2, retry_s=0.1, retry_max_s=0.5)


def chunk_bytes(seed: int, num_bytes: int = CHUNK_BYTES) -> bytes:
    """Bytes that tell which chunk they are of."""
    return bytes((seed + 31 * position) % 251 for position in range(num_bytes))


class ServerWithDisk:
    """Where a server with a disk is started, killed and started again."""

    def __init__(self, lmcache: Sequence[str], directory: Path, *arguments: str) -> None:
        self.disk = directory / "disk"
        self.disk.mkdir(exist_ok=True)
        self._lmcache, self._directory, self._arguments = lmcache, directory, arguments
        self._address: ServerAddress | None = None
        self.server = self.start()

    def start(self) -> ServerProcess:
        disk = json.dumps({"type": "fs_native", "base_path": str(self.disk)})
        arguments = ["--chunk-size", "256", "--l2-adapter", disk, *self._arguments]
        self.server = ServerProcess(self._lmcache, self._directory, arguments, self._address)
        self._address = self.server.address
        return self.server.wait()

    def files(self) -> list[Path]:
        """What is on the disk, whole."""
        return sorted(path for path in self.disk.rglob("*") if path.is_file() and ".tmp" not in path.name)

    def has_written(self, num_files: int) -> bool:
        status = self.server.status()["storage_manager"]["store_controller"]
        is_idle = not status["pending_keys_count"] and not status["in_flight_task_count"]
        return len(self.files()) == num_files and is_idle


class Engine:
    """One engine. `namespace` says whose content; None: nobody else's."""

    def __init__(
        self,
        address: ServerAddress,
        namespace: bytes | None = None,
        options: LMCacheOptions | None = None,
        num_ranks: int = 1,
        sizes: tuple[int, ...] = SIZES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace = namespace or uuid.uuid4().bytes
        self.options = options or LMCacheOptions(move_timeout_s=patience.seconds(6.0))
        site = Site(address, self.namespace, num_ranks, sizes, SOON)
        self.index = open_index(site, self.options, clock)
        self.media = [open_medium(site, rank, self.options, time.monotonic) for rank in range(num_ranks)]
        self.medium = self.media[0]

    def found(self, *keys: Key, deadline_s: float = TIMEOUT_S) -> list[LookupResult]:
        """What the server says."""
        self.index.ask(keys, time.monotonic() + deadline_s)
        assert eventually(lambda: not self.index.any_pending(keys))
        return [self.index.lookup(key) for key in keys]

    def put(self, key: Key, chunks: bytes | Sequence[bytes]) -> FailureReason | None:
        """Store a chunk, each rank its part."""
        parts = [chunks] if isinstance(chunks, bytes) else list(chunks)
        slot = self.index.reserve(key, len(parts[0]))
        assert isinstance(slot, Slot), slot
        failures = []
        for medium, part in zip(self.media, parts, strict=True):
            medium.store(Ticket(1), key, slot, [part])
        for medium in self.media:
            assert medium.drain(TIMEOUT_S)
            failures += [completion.failure for completion in medium.poll() if completion.failure]
        if failures:
            self.index.abort(key)
            return failures[0].reason
        assert self.index.commit(key)
        return None

    def get(self, key: Key, rank: int = 0) -> bytes | FailureReason:
        """The bytes of a chunk of which the index knows."""
        slot = self.index.pin(key)
        assert slot is not None
        destination = bytearray(slot.num_bytes)
        self.media[rank].load(Ticket(2), key, slot, [destination])
        assert self.media[rank].drain(TIMEOUT_S)
        [completion] = self.media[rank].poll()
        self.index.unpin(key)
        return bytes(destination) if completion.failure is None else completion.failure.reason

    def is_there(self) -> bool:
        """Whether both halves can use the server."""
        connections = [shelf.connection for medium in self.media for shelf in medium._shelves.values()]
        courier = self.index._courier
        connections.append(courier._connection)  # type: ignore[attr-defined]
        return all(connection.ready is not None for connection in connections)

    def close(self) -> None:
        self.index.close()
        for medium in self.media:
            medium.close()


def engine_at(address: ServerAddress, **keys: Any) -> Engine:
    """One whose halves have met their server: they wait for it for a few seconds alone, and a machine may be busy."""
    engine = Engine(address, **keys)
    assert eventually(engine.is_there)
    return engine
