"""Both tiers as the connector uses them: what it asks, holds, loads, stores, and how it follows what moves.

One thread, which is the scheduler's and every rank's worker. Checks each byte that it is given.
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
"""What is counted when a rank brought a chunk up."""


class Clock:
    """Seconds that pass when somebody says so, and by themselves if `is_real`."""

    def __init__(self, is_real: bool) -> None:
        self._is_real = is_real
        self.skew_s = 1000.0

    def __call__(self) -> float:
        return self.skew_s + (time.monotonic() if self._is_real else 0.0)


class Parts(NamedTuple):
    """What an engine is put together from."""

    groups: tuple[Group, ...]
    far: WatchedIndex
    media: list[DiskMedium]
    near_bytes: int
    granule_bytes: int
    clock: Clock


class PromptPart(NamedTuple):
    """One group's part of a prompt."""

    key: bytes
    group: Group
    extends: Extends


@dataclass(slots=True)
class Waiting:
    """A request whose chunks are on their way from the disk."""

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
        parts: what it is put together from.
        random: for what an engine does not decide, such as how long a store takes.
        tally: counts.
        tamper: is given each key, rank and bytes that were loaded, and gives the bytes back: for negative controls.
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
        """The last one of a move."""
        self.waiting: list[Waiting] = []
        self.storing: list[Storing] = []

    # Requests.

    def request(self, prompt: Prompt) -> None:
        """Load what can be loaded, and store the rest."""
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
        """The largest number of chunks at which every group can resume."""
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
        """Every chunk is in the fast tier, protected."""
        for key in keys_needed(waiting.prompt, waiting.num_chunks, self.groups):
            slot = self.primary.pin(key)
            if slot is None:  # withdrawn under the hold
                continue
            for rank, copies in enumerate(self.copies):
                destination = bytearray(slot.num_bytes)
                copies.load(Ticket(1), key, slot, [destination])
                [completion] = copies.poll()
                if completion.failure is not None:
                    raise SoakError("wrong memory", f"{key.hex()} in host memory: {completion.failure}")
                self.check(key, rank, self._tamper(key, rank, destination))
            self.primary.unpin(key)
            self._tally.add("chunks served")
        self.stack.release(waiting.owner)

    def check(self, key: bytes, rank: int, found: bytes | bytearray) -> None:
        """Whether these bytes were given back for the right key."""
        self._tally.add("bytes checked", len(found))
        if found != payload(key, rank, len(found)):
            raise SoakError("wrong bytes", f"{key.hex()} on rank {rank}")

    # Stores.

    def store(self, prompt: Prompt) -> None:
        """What a request that was computed leaves behind."""
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
        """From the beginning on, each with what it needs to be worth anything."""
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

    # What goes on by itself.

    def step(self) -> None:
        """As much as happens between two steps of an engine."""
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
        """What may keep a chunk from the disk."""
        counts = self.stack.take_counts(), self.far.take_counts()
        breakers = [f"{direction} {self.stack.breaker_state(direction, 'disk')}" for direction in Direction]
        return f"{', '.join(breakers)}; {', '.join(map(repr, counts))}"

    def settle(self) -> None:
        """Until nothing is on its way any more. A watchdog bounds it."""
        while True:
            self.step()
            for medium in self.media:
                medium.drain(1.0)
            self.step()
            if not (self.storing or self.waiting or self.stack.has_live_moves() or self.stack.num_waiting("disk")):
                return
            # What cannot be moved for now is tried again after a while, and given up at its deadline.
            self._clock.skew_s += 0.05 if self.stack.has_live_moves() else 0.5

    def audit(self, keys: list[bytes], media: list[DiskMedium]) -> dict[bytes, FailureReason]:
        """Read these from the disk, and check them. Those that could not be read, and why."""
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
