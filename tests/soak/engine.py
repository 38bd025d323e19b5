"""Both tiers, used as the connector uses them: lookups, leases, loads, stores and moves.

A single thread acts as the scheduler and as every rank's worker. All bytes are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from hybridkv.planner import LookupResult
from hybridkv.tiers import Extends, Failure, FailureReason, Refusal, Slot, Ticket
from hybridkv.tiers.disk import DiskMedium
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import (
    BreakerOptions,
    Direction,
    MoveOutcome,
    PromotionLease,
    SecondaryTier,
    SecondaryTierOptions,
    TierMover,
    TierStack,
)
from kits.tiers.copying import CopyingMedium
from soak.content import Group, Kind, Prompt, key_of, keys_needed, payload
from soak.findings import SoakError
from soak.tally import Tally
from soak.watching import WatchedIndex

LOAD_TIMEOUT_S = 30.0
LONGEST_PAUSE_S = 120.0
PROMOTED = "promote done"
"""Counted when a rank has promoted a chunk."""


class Clock:
    """Seconds; they pass only on demand, and also in real time if `is_real`."""

    def __init__(self, is_real: bool) -> None:
        self._is_real = is_real
        self.skew_s = 1000.0

    def __call__(self) -> float:
        return self.skew_s + (time.monotonic() if self._is_real else 0.0)


class Parts(NamedTuple):
    """The parts of which an engine consists."""

    groups: tuple[Group, ...]
    far: WatchedIndex
    media: list[DiskMedium]
    near_bytes: int
    granule_bytes: int
    clock: Clock


class PromptPart(NamedTuple):
    """One chunk of one group of a prompt."""

    key: bytes
    group: Group
    extends: Extends


@dataclass(slots=True)
class Waiting:
    """A request whose chunks are being loaded from the disk."""

    owner: str
    prompt: Prompt
    num_chunks: int
    hold: PromotionLease


@dataclass(slots=True)
class Storing:
    """Chunks that the workers are writing into the fast tier."""

    chunks: list[PromptPart]
    steps_left: int


class Engine:
    """See the module.

    Args:
        parts: the parts of the engine.
        random: for decisions outside the engine, such as the duration of a store.
        tally: counts.
        tamper: gets each loaded key, rank and bytes, and returns the bytes, changed for negative controls.
    """

    def __init__(
        self, parts: Parts, random: Random, tally: Tally, tamper: Callable[[bytes, int, bytearray], bytearray]
    ) -> None:
        self.groups, self.far, self.media = parts.groups, parts.far, parts.media
        self.primary = RamIndex(parts.near_bytes, parts.granule_bytes)
        self.arenas = [RamArena(parts.near_bytes, parts.granule_bytes) for _ in parts.media]
        self.copies = [CopyingMedium(arena) for arena in self.arenas]
        self.movers = [
            TierMover(arena, {"disk": medium}, parts.clock)
            for arena, medium in zip(self.arenas, parts.media, strict=True)
        ]
        options = SecondaryTierOptions(
            load_timeout_s=LOAD_TIMEOUT_S,
            breaker=BreakerOptions(failures=3, first_backoff_s=5.0, max_backoff_s=LONGEST_PAUSE_S),
        )
        self.stack = TierStack(self.primary, [SecondaryTier("disk", self.far, options)], len(parts.media), parts.clock)
        self._clock = parts.clock
        self._random = random
        self._tally = tally
        self._tamper = tamper
        self._num_requests = 0
        self.failure: Failure | None = None
        """The most recent failure of a move."""
        self.waiting: list[Waiting] = []
        self.storing: list[Storing] = []

    # Requests.

    def request(self, prompt: Prompt) -> None:
        """Load the available chunks and store the others."""
        self._num_requests += 1
        self._tally.add("requests")
        num_chunks = self.boundary(prompt)
        if num_chunks:
            owner = f"request {self._num_requests}"
            hold = self.stack.acquire(owner, keys_needed(prompt, num_chunks, self.groups))
            if isinstance(hold, PromotionLease):
                self.waiting.append(Waiting(owner, prompt, num_chunks, hold))
                return
            self._tally.add(f"holds refused, {hold}")
        self.store(prompt)

    def boundary(self, prompt: Prompt) -> int:
        """The largest number of chunks after which every group can resume."""
        num_chunks = len(prompt)
        while num_chunks:
            fewer = min(self._resumable(group, prompt, num_chunks) for group in self.groups)
            if fewer == num_chunks:
                break
            num_chunks = fewer
        return num_chunks

    def _resumable(self, group: Group, prompt: Prompt, num_chunks: int) -> int:
        keys = [key_of(prefix, group) for prefix in prompt[:num_chunks]]
        if group.kind is Kind.FULL:
            return self.stack.leading(keys)
        if group.kind is Kind.RECURRENT:
            place = self.stack.last_held(keys)
            return 0 if place is None else place + 1
        window = keys[-group.window_chunks :]
        return num_chunks if self.stack.leading(window) == len(window) else num_chunks - 1

    def _load(self, waiting: Waiting) -> None:
        """Load a request whose chunks are all pinned in the fast tier."""
        for key in keys_needed(waiting.prompt, waiting.num_chunks, self.groups):
            slot = self.primary.pin(key)
            if slot is None:  # withdrawn despite the lease
                continue
            for rank, copies in enumerate(self.copies):
                destination = bytearray(slot.num_bytes)
                copies.load(Ticket(1), key, slot, [destination])
                [completion] = copies.poll()
                if completion.failure is not None:
                    raise SoakError(
                        "wrong memory", f"{key.hex()} cannot be read from host memory: {completion.failure}"
                    )
                self.check(key, rank, self._tamper(key, rank, destination))
            self.primary.unpin(key)
            self._tally.add("chunks served")
        self.stack.release(waiting.owner)

    def check(self, key: bytes, rank: int, found: bytes | bytearray) -> None:
        """Check that loaded bytes belong to this key."""
        self._tally.add("bytes checked", len(found))
        if found != payload(key, rank, len(found)):
            raise SoakError("wrong bytes", f"{key.hex()} on rank {rank}")

    # Stores.

    def store(self, prompt: Prompt) -> None:
        """Store the chunks of a request that was computed."""
        begun: list[PromptPart] = []
        present: list[PromptPart] = []
        for chunk in self._chunks(prompt):
            answer = self.primary.lookup(chunk.key)
            if answer is LookupResult.HIT:
                present.append(chunk)
            elif answer is LookupResult.MISS and self._begin(chunk):
                begun.append(chunk)
        for chunk in present:
            self.stack.cascade(chunk.key, chunk.extends)
        self.stack.touch([chunk.key for chunk in reversed(present)], [chunk.extends for chunk in reversed(present)])
        if begun:
            self.storing.append(Storing(begun, self._random.choice([0, 0, 1, 4])))

    def _chunks(self, prompt: Prompt) -> Iterator[PromptPart]:
        """All chunks from the beginning, each with the keys that it extends."""
        full = next((group for group in self.groups if group.kind is Kind.FULL), None)
        for place, prefix in enumerate(prompt):
            for group in self.groups:
                if group.kind is Kind.RECURRENT and place < len(prompt) - 1:
                    continue
                extends: Extends = ()
                if full is not None and group is not full:
                    extends = (key_of(prefix, full),)
                elif full is not None and place:
                    extends = (key_of(prompt[place - 1], full),)
                yield PromptPart(key_of(prefix, group), group, extends)

    def _begin(self, chunk: PromptPart) -> bool:
        key, group, extends = chunk
        slot = self.stack.reserve(key, group.chunk_bytes, extends)
        self._tally.add("chunks offered" if isinstance(slot, Slot) else f"stores refused, {slot}")
        if isinstance(slot, Refusal):
            return False
        for rank, copies in enumerate(self.copies):
            copies.store(Ticket(1), key, slot, [payload(key, rank, group.chunk_bytes)])
            [completion] = copies.poll()
            if completion.failure is not None:
                raise SoakError("wrong memory", f"{key.hex()} could not be stored: {completion.failure}")
        return True

    # Background work.

    def step(self) -> None:
        """Do the work that happens between two steps of an engine."""
        self.stack.tick()
        for storing in list(self.storing):
            storing.steps_left -= 1
            if storing.steps_left < 0:
                self.storing.remove(storing)
                self._end_store(storing)
        self._move()
        for waiting in list(self.waiting):
            if waiting.hold.is_ready:
                self.waiting.remove(waiting)
                self._load(waiting)
                self.store(waiting.prompt)
            elif waiting.hold.failure is not None:
                self._tally.add(f"holds failed, {waiting.hold.failure}")
                self.waiting.remove(waiting)
                self.stack.release(waiting.owner)
                self.store(waiting.prompt)
        self._move()
        self._require_bounds()

    def _end_store(self, storing: Storing) -> None:
        is_failed = self._random.random() < 0.03
        for chunk in storing.chunks:
            if is_failed:
                self.stack.abort(chunk.key)
            else:
                self.stack.commit(chunk.key, chunk.extends)

    def _move(self) -> None:
        moves = self.stack.take_moves()
        for mover in self.movers:
            mover.start(moves)
        for mover in self.movers:
            for move, failure, _ in mover.poll():
                self._tally.add(f"{move.direction} {'done' if failure is None else f'failed, {failure.reason}'}")
                self.failure = failure or self.failure
                self.stack.on_move(move.move_id, MoveOutcome(1, failure))

    def _require_bounds(self) -> None:
        for index in (self.primary, self.far):
            if not 0 <= index.used_bytes <= index.capacity_bytes:
                name = type(index).__name__
                raise SoakError("out of bounds", f"{name} uses {index.used_bytes} of {index.capacity_bytes} bytes")

    def why_not(self) -> str:
        """Possible reasons why no chunk reaches the disk."""
        counts = self.stack.take_counts(), self.far.take_counts()
        breakers = [f"{direction} {self.stack.breaker_state(direction, 'disk')}" for direction in Direction]
        return f"{', '.join(breakers)}; last failure: {self.failure}; {', '.join(map(repr, counts))}"

    def settle(self) -> None:
        """Run until no work is pending. A watchdog limits the time."""
        while True:
            self.step()
            for medium in self.media:
                medium.drain(1.0)
            self.step()
            if not (self.storing or self.waiting or self.stack.has_live_moves() or self.stack.num_waiting("disk")):
                return
            # Moves that fail are retried after a while, and given up at their deadline.
            self._clock.skew_s += 0.05 if self.stack.has_live_moves() else 0.5

    def audit(self, keys: list[bytes], media: list[DiskMedium]) -> dict[bytes, FailureReason]:
        """Read keys from the disk and check them. The keys that could not be read, with reasons."""
        failures: dict[bytes, FailureReason] = {}
        for key in keys:
            slot = self.far.pin(key)
            if slot is None:
                continue
            for rank, medium in enumerate(media):
                destination = bytearray(slot.num_bytes)
                medium.load(Ticket(1), key, slot, [destination])
                medium.drain(float(LONGEST_PAUSE_S))
                [completion] = medium.poll()
                if completion.failure is not None:
                    failures[key] = completion.failure.reason
                else:
                    self.check(key, rank, self._tamper(key, rank, destination))
            self.far.unpin(key)
            self._tally.add("chunks audited")
        return failures
