"""Tier stack over a disk tier with its mover, all in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import disk_faults
import disk_store

from hybridkv.tiers import Failure, Key, Slot, Ticket
from hybridkv.tiers.disk import DiskMedium, DiskOptions
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import MoveOutcome, PromotionLease, SecondaryTier, TierMover, TierStack
from kits.tiers.copying import CopyingMedium

CHUNK = disk_faults.CHUNK
PLACE_BYTES = 8192
"""Size of one chunk in the primary tier."""


class Tiers:
    """Stack over a disk whose open, close and sync calls can fail. The clock stands still.

    With `PlainDiskMedium` all calls can fail.
    """

    def __init__(
        self, path: Path, options: DiskOptions, primary_chunks: int = 24, medium_type: type[DiskMedium] = DiskMedium
    ) -> None:
        self.path, self.options, self.medium_type = path, options, medium_type
        self.io = disk_faults.FaultyIO()
        self.clock = disk_store.Clock()
        self.index = disk_store.make_index(path, options, clock=self.clock)
        self.primary, self.arena = (
            RamIndex(primary_chunks * PLACE_BYTES, PLACE_BYTES),
            RamArena(primary_chunks * PLACE_BYTES),
        )
        self.stack = TierStack(self.primary, [SecondaryTier("disk", self.index)], 1, self.clock)
        self.open_medium()

    def open_medium(self) -> None:
        """Opens the medium, or opens it again."""
        digest = disk_store.FINGERPRINT.digest()
        self.medium = self.medium_type(str(self.path), digest, 0, self.options, self.io)
        self.copies = CopyingMedium(self.arena)
        self.mover = TierMover(self.arena, {"disk": self.medium}, self.clock)

    def move(self) -> list[Failure | None]:
        """Carry out the planned moves; return how each ended."""
        self.mover.start(self.stack.take_moves())
        assert self.medium.drain(disk_faults.TIMEOUT_S)
        ended = self.mover.poll()
        for move, failure, _ in ended:
            self.stack.on_move(move.move_id, MoveOutcome(1, failure))
        return [failure for _, failure, _ in ended]

    def store(self, keys: Sequence[Key]) -> list[Failure | None]:
        """Store keys one by one in the primary tier; return how their cascades ended."""
        ended = []
        for key in keys:
            slot = self.stack.reserve(key, len(CHUNK))
            assert isinstance(slot, Slot)
            self.copies.store(Ticket(0), key, slot, [CHUNK])
            assert [completion.failure for completion in self.copies.poll()] == [None]
            assert self.stack.commit(key)
            ended += self.move()
        return ended

    def clear_primary(self) -> None:
        """Empty the primary tier and close all segment files."""
        self.primary.clear()
        for number in range(64):
            self.medium._cache.forget(number)
        self.medium._cache.close_forgotten()

    def lease(self, keys: Sequence[Key]) -> PromotionLease:
        lease = self.stack.acquire("request", keys)
        assert isinstance(lease, PromotionLease)
        return lease

    def serves(self, key: Key) -> bool:
        """Whether a promotion lease on the chunk becomes ready. The lease is released afterwards."""
        lease = self.stack.acquire("request", [key])
        self.move()
        is_ready = isinstance(lease, PromotionLease) and lease.is_ready
        self.stack.release("request")
        return is_ready

    def close(self) -> None:
        self.io.failing.clear()
        self.stack.release("request")
        assert self.mover.close(disk_faults.TIMEOUT_S)
        self.stack.close()
        self.arena.close()
