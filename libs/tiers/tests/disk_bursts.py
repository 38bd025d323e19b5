"""Prompts stored in a disk tier below host memory, at once or one by one, and how much of them can be resumed."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import TracebackType

import disk_store

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Hit, LookupResult, longest_hit, path_order
from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import (
    MoveOutcome,
    MoveResult,
    SecondaryTier,
    SecondaryTierOptions,
    TierMover,
    TierStack,
)
from kits.tiers.copying import CopyingMedium
from kits.tiers.inline_janitor import InlineJanitor

CHUNK_TOKENS = 64
HYBRID = CacheSpec((GroupSpec(GroupKind.FULL, 64), GroupSpec(GroupKind.RECURRENT, 64)), CHUNK_TOKENS)
NEVER_S = 1e6
PAUSE_S = 1e-4
"""Between two steps. A busy loop would keep the writing threads waiting for the interpreter."""
GRANULE_BYTES = 4096


class Burst:
    """Scheduler half and worker half of a two-tier stack, and the prompts stored through them.

    Args:
        path: of the store.
        options: of the disk.
        primary_bytes: capacity of host memory.
        sizes: bytes of a chunk, by group.
        janitor: of the disk; None: a thread.
    """

    def __init__(
        self,
        path: Path,
        options: DiskOptions,
        primary_bytes: int,
        sizes: tuple[int, int],
        janitor: InlineJanitor | None = None,
    ) -> None:
        self.secondary = DiskIndex(str(path), disk_store.FINGERPRINT, options, janitor)
        self.primary = RamIndex(primary_bytes, GRANULE_BYTES)
        arena = RamArena(primary_bytes, GRANULE_BYTES)
        self._clock = disk_store.Clock()
        self.stack = TierStack(
            self.primary,
            [SecondaryTier("disk", self.secondary, SecondaryTierOptions(load_timeout_s=NEVER_S))],
            1,
            self._clock,
        )
        self._mover = TierMover(
            arena, {"disk": DiskMedium(str(path), self.secondary.namespace, 0, options)}, self._clock
        )
        self._copies = CopyingMedium(arena)
        self._sizes = sizes
        self._pool = bytes(range(256)) * (max(sizes) // 256 + 2)
        self._tickets = itertools.count(1)
        self._paths: dict[bytes, list[tuple[int, int]]] = {}
        self._path_bytes: dict[bytes, int] = {}

    def __enter__(self) -> Burst:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mover.close(disk_store.TIMEOUT_S)
        self.stack.close()
        self._copies.close()

    @staticmethod
    def key(name: bytes, part: tuple[int, int]) -> bytes:
        return name + b"-%d-%d" % part

    def offer(self, name: bytes, first_chunk: int, num_chunks: int, state_every: int = 1) -> None:
        """Store `num_chunks` more chunks of a prompt, with a state every `state_every` chunks, as one store of an
        engine.
        """
        self._touch(name)
        parts = []
        for number in range(first_chunk + 1, first_chunk + num_chunks + 1):
            parts.append((0, number * CHUNK_TOKENS))
            if number % state_every == 0:
                parts.append((1, number * CHUNK_TOKENS))
        last = [self.key(name, part) for part in self._paths.get(name, ())[-1:]]
        before = [self.key(name, part) for part in self._paths.get(name, ()) if part[0] == 0]
        for part in path_order(HYBRID, parts):
            size, key = self._sizes[part[0]], self.key(name, part)
            slot = self.stack.reserve(key, size)
            assert isinstance(slot, Slot), slot
            start = next(self._tickets) % 256
            self._copies.store(Ticket(start), key, slot, [memoryview(self._pool)[start : start + size]])
            assert self._copies.poll()[0].failure is None
            self._path_bytes[name] = self._path_bytes.get(name, 0) + self.secondary.cost(size)
            full_end = part[1] if part[0] else part[1] - CHUNK_TOKENS
            needs = before or ([self.key(name, (0, full_end))] if full_end else [])
            assert self.stack.commit(key, (*last, *needs[-1:]) if needs else ())
            before, last = [], [key]
        self._paths.setdefault(name, []).extend(parts)
        self._touch(name)

    def _touch(self, name: bytes) -> None:
        """Mark the end of the path as the first to be evicted."""
        path = self._paths.get(name, [])
        self.stack.touch([self.key(name, part) for part in reversed(path_order(HYBRID, path))])

    def settle(self) -> None:
        """Run engine steps until no move is in flight."""
        while self.stack.has_live_moves():
            self.stack.tick()
            self._mover.start(self.stack.take_moves())
            for move, failure, _ in self._mover.poll():
                self.stack.on_move(move.move_id, MoveOutcome(1, failure))
            time.sleep(PAUSE_S)

    def resumable(self, name: bytes) -> int:
        """Tokens of a prompt that an engine could resume from the disk alone."""

        def lookup(group_index: int, end_token: int) -> LookupResult:
            return self.secondary.lookup(self.key(name, (group_index, end_token)))

        num_tokens = max(end for _, end in self._paths[name])
        answer = longest_hit(HYBRID, num_tokens + 1, 0, lookup)
        return answer.num_tokens if isinstance(answer, Hit) else 0

    @property
    def offered_tokens(self) -> int:
        return sum(max(end for _, end in path) for path in self._paths.values())

    @property
    def resumable_tokens(self) -> int:
        return sum(self.resumable(name) for name in self._paths)

    @property
    def fitting_tokens(self) -> float:
        """Offered tokens that the disk has room for."""
        return self.offered_tokens * min(1.0, self.secondary.capacity_bytes / sum(self._path_bytes.values()))

    def cascades(self) -> dict[MoveResult, int]:
        return self.stack.take_counts().moves.cascades
