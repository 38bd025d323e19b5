"""Schedulers and ranks over an object store without an engine: a stack over the store, and a mover per rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import patience
from object_depots import FINGERPRINT, TIMEOUT_S, manifests, patient

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, Slot
from hybridkv.tiers.object import ObjectIndex, ObjectOptions, StoreLocation, open_index, open_medium
from hybridkv.tiers.object.names import manifest_name, prefix_of
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import MoveOutcome, SecondaryTier, SecondaryTierOptions, TierMover, TierStack

CHUNK_BYTES = 4096
PATIENT = SecondaryTierOptions(async_lookup_timeout_s=patience.seconds(6.0), load_timeout_s=patience.seconds(6.0))
FULL, WINDOW = b"f" * 16, b"w" * 16
"""Key tags of two groups."""


class Engine:
    """Stack of memory over the object store, with a mover per rank."""

    def __init__(
        self,
        depot: StoreLocation,
        num_ranks: int = 1,
        options: ObjectOptions | None = None,
        slower: SecondaryTierOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or patient()
        self.index: ObjectIndex = open_index(depot, FINGERPRINT, num_ranks, options, clock)
        self.primary = RamIndex(1 << 24, 4096)
        self.stack = TierStack(self.primary, [SecondaryTier("object", self.index, slower or PATIENT)], num_ranks, clock)
        self.arenas = [RamArena(1 << 24, 4096) for _ in range(num_ranks)]
        self.media = [open_medium(depot, rank, options) for rank in range(num_ranks)]
        self.movers = [
            TierMover(arena, {"object": medium}, time.monotonic)
            for arena, medium in zip(self.arenas, self.media, strict=True)
        ]

    def step(self) -> None:
        moves = self.stack.take_moves()
        for mover in self.movers:
            mover.start(moves)
            for move, failure, _ in mover.poll():
                self.stack.on_move(move.move_id, MoveOutcome(1, failure))
        self.stack.tick()

    def run(self) -> None:
        """Step until no move is in flight."""

        def is_idle() -> bool:
            self.step()
            return not self.stack.has_live_moves()

        patience.wait_until(is_idle, "nothing moves")

    def store(self, path: list[bytes], chunks: dict[bytes, bytes]) -> None:
        """Store chunks of one prefix and wait. Each key extends the one before it."""
        self.begin_store(path, chunks)
        self.run()

    def begin_store(self, path: list[bytes], chunks: dict[bytes, bytes]) -> None:
        """Like `store`, without the wait."""
        for number, key in enumerate(path):
            slot = self.stack.reserve(key, len(chunks[key]))
            assert isinstance(slot, Slot)
            for rank, arena in enumerate(self.arenas):
                for view in arena.views(slot):
                    view[:] = bytes(byte ^ rank for byte in chunks[key])
                assert arena.seal_all([(key, slot)]) == [None]
            self.stack.commit(key, tuple(path[number - 1 : number]))
        self.step()

    def look_up(self, keys: list[bytes]) -> list[LookupResult]:
        self.stack.start_lookup(keys)
        patience.wait_until(lambda: not self.stack.any_pending(keys), "every lookup has a result")
        return [self.stack.lookup(key) for key in keys]

    def load(self, keys: list[bytes]) -> list[bytes] | None:
        """Bytes of the first rank, checked against all ranks. None if they cannot be loaded."""
        lease = self.stack.acquire("r", keys)
        if isinstance(lease, Refusal):
            return None

        def is_over() -> bool:
            self.step()
            lease = self.stack.lease("r")
            assert lease is not None
            return not lease.waiting or lease.failure is not None

        patience.wait_until(is_over, "the load is over")
        lease = self.stack.lease("r")
        assert lease is not None
        if lease.failure is not None:
            self.stack.release("r")
            self.run()  # other moves are in flight
            return None
        slots = self.stack.pin_all(keys)
        assert slots is not None
        self.stack.release("r")
        found = []
        for rank, arena in enumerate(self.arenas):
            for key, slot in zip(keys, slots, strict=True):
                assert arena.check_all([(key, slot)]) == [None]
                data = b"".join(bytes(view) for view in arena.views(slot))
                found += [data] if rank == 0 else []
                assert rank == 0 or data == bytes(byte ^ rank for byte in found[keys.index(key)])
        self.stack.unpin_all(keys)
        return found

    def close(self, within_s: float = TIMEOUT_S) -> None:
        for mover in self.movers:
            mover.close(within_s)
        self.stack.close()
        for arena in self.arenas:
            arena.close()


def path_of(number: int, seed: bytes = b"") -> list[bytes]:
    """Keys of one prefix of one group."""
    return [FULL + seed + bytes([step]) * (32 - len(seed)) for step in range(number)]


def wait_until_named(engine: Engine, directory: Path, keys: list[bytes]) -> None:
    """Wait until all manifests of a prefix that an engine stored are written."""
    writes = engine.index._client._loop._writes
    patience.wait_until(lambda: last_is_named(directory, keys) and not writes, "the manifests are written")


def last_is_named(directory: Path, keys: list[bytes]) -> bool:
    """Whether the manifest of the whole prefix exists."""
    return any(path.name == manifest_name("", prefix_of(keys[-1]))[3:] for path in manifests(directory))


def chunks_of(keys: list[bytes]) -> dict[bytes, bytes]:
    return {key: os.urandom(CHUNK_BYTES) for key in keys}
