"""Share of a burst of prompts that a disk tier keeps: tokens that requests can resume from it, over tokens that fit.

The model has only full attention, so a prompt can be resumed up to its first missing chunk. Host memory holds the whole
burst, so only the cascade and the disk limit the result. Steps run without pauses.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import disk_subject

from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import MoveOutcome, SecondaryTier, SecondaryTierOptions, TierMover, TierStack
from kits.tiers.copying import CopyingMedium

CHUNK_BYTES = 512 << 10
PROMPT_CHUNKS = 64
GRANULE_BYTES = 4096
POLL_INTERVAL_S = 0.0005
CAPACITIES = tuple(mib << 20 for mib in (64, 256, 1024, 4096, 16384, 65536))


class Burst:
    """A primary and a disk tier, and the prompts stored in them."""

    def __init__(self, path: Path, capacity_bytes: int, offered_bytes: int) -> None:
        near_bytes = offered_bytes + (64 << 20)
        stack_options = SecondaryTierOptions()
        options = DiskOptions(
            capacity_bytes=capacity_bytes,
            fsync=Fsync.NONE,
            largest_chunk_bytes=CHUNK_BYTES,
            burst_bytes=int(stack_options.cascading_share * near_bytes),
        )
        self.far = DiskIndex(str(path), disk_subject.fingerprint(), options)
        near = RamIndex(near_bytes, GRANULE_BYTES)
        self._arena = RamArena(near_bytes, GRANULE_BYTES)
        self._copies = CopyingMedium(self._arena)
        self.stack = TierStack(near, [SecondaryTier("disk", self.far, stack_options)], 1, time.monotonic)
        medium = DiskMedium(str(path), self.far.namespace, 0, options)
        self._mover = TierMover(self._arena, {"disk": medium}, time.monotonic)
        self._tickets = itertools.count(1)
        self._chunk = memoryview(bytes(range(256)) * (CHUNK_BYTES // 256))
        self.prompts: list[list[bytes]] = []

    def offer(self) -> None:
        """Stores the chunks of one prompt in host memory and commits them."""
        keys = [b"%d-%d" % (len(self.prompts), number) for number in range(PROMPT_CHUNKS)]
        for number, key in enumerate(keys):
            extends = tuple(keys[max(number - 1, 0) : number])
            slot = self.stack.reserve(key, CHUNK_BYTES, extends)
            if not isinstance(slot, Slot):
                raise RuntimeError(f"host memory has no room: {slot}")
            self._copies.store(Ticket(next(self._tickets)), key, slot, [self._chunk])
            self._copies.poll()
            self.stack.commit(key, extends)
        self.prompts.append(keys)

    def settle(self) -> None:
        while self.stack.has_live_moves():
            self.stack.tick()
            self._mover.start(self.stack.take_moves())
            ended = self._mover.poll()
            for move, failure, _ in ended:
                self.stack.on_move(move.move_id, MoveOutcome(1, failure))
            if not ended:
                time.sleep(POLL_INTERVAL_S)

    def result(self, seconds: float) -> dict[str, float]:
        offered = PROMPT_CHUNKS * len(self.prompts)
        fitting = min(offered, self.far.capacity_bytes / self.far.cost(CHUNK_BYTES))
        resumable = sum(self.far.leading(keys) for keys in self.prompts)
        counts = self.stack.take_counts().moves
        dropped = sum(number for result, number in counts.cascades.items() if str(result).startswith("dropped"))
        stored_bytes = counts.cascaded_bytes
        moved_bytes = self.far.take_disk_counts().moved_bytes
        return {
            "offered over what fits": offered / fitting,
            "resumable over what fits": resumable / fitting,
            "resumable over offered": resumable / offered,
            "dropped chunks": dropped,
            "write amplification": (stored_bytes + moved_bytes) / stored_bytes,
            "gigabytes per second": stored_bytes / seconds / 1e9,
        }

    def close(self) -> None:
        self._mover.close(60.0)
        self.stack.close()
        self._arena.close()


def measure(path: Path, capacity_bytes: int, offered_bytes: int, is_paced: bool) -> dict[str, float]:
    burst = Burst(path, capacity_bytes, offered_bytes)
    try:
        started_s = time.monotonic()
        for _ in range(max(offered_bytes // (PROMPT_CHUNKS * CHUNK_BYTES), 1)):
            burst.offer()
            if is_paced:
                burst.settle()
        burst.settle()
        return burst.result(time.monotonic() - started_s)
    finally:
        burst.close()


def bursts(root: Path, capacities: tuple[int, ...], largest_offer_bytes: int) -> dict[str, dict[str, dict[str, float]]]:
    """Offers twice each capacity, but at most `largest_offer_bytes`: all prompts at once, and one by one."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for capacity_bytes in capacities:
        offered_bytes = min(2 * capacity_bytes, largest_offer_bytes)
        rows = found[f"{capacity_bytes >> 20} MiB"] = {}
        for name, is_paced in (("burst", False), ("paced", True)):
            row = rows[name] = measure(root / f"{name}-{capacity_bytes}", capacity_bytes, offered_bytes, is_paced)
            print(
                f"{capacity_bytes >> 20:7,d} MiB  {name}  offered {row['offered over what fits']:4.2f} of capacity, "
                f"resumable {row['resumable over what fits']:.3f} of capacity; "
                f"write amplification {row['write amplification']:.2f}, {row['gigabytes per second']:.2f} GB/s",
                flush=True,
            )
    return found
