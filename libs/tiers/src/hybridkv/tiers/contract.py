"""Contract of a tier: the values that its two halves exchange, and the protocols of both. CONTRACT.md lists the tests.

A tier has an index, in the engine's scheduler, which decides what is kept; and a medium, in each worker, which holds
the bytes. For the primary tier, which copy engines access directly, the medium is `SealedMemory`. Index and medium may
live in different processes, and agree only through slots. The bytes of tensor-parallel rank r are in rank r's medium.
All media have the same layout, so one index serves every rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol, TypeAlias, runtime_checkable

import msgspec

from hybridkv.planner import LookupResult

if TYPE_CHECKING:
    from typing_extensions import Buffer

Key: TypeAlias = bytes
"""Identity of one group's part of one chunk; opaque to a tier."""

Ticket = NewType("Ticket", int)
"""The caller's id of one store or load; returned in the `Completion`."""


Extends: TypeAlias = tuple[Key, ...]
"""At most two keys, in order of preference: a chunk extends the first of them that the tier holds."""

NewChunk: TypeAlias = tuple[Key, int] | tuple[Key, int, Extends]
"""A key to reserve, its number of bytes, and what it extends, as for `TierIndex.reserve`."""


class Slot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Location of one chunk in a medium, assigned by the index. Sent between processes."""

    extents: tuple[tuple[int, int], ...]
    """(offset, num_bytes) in the medium, in the order of the chunk's bytes."""

    @property
    def num_bytes(self) -> int:
        extents = self.extents
        return extents[0][1] if len(extents) == 1 else sum(num_bytes for _, num_bytes in extents)

    @property
    def first_offset(self) -> int:
        """Identifies the slot among live slots. `ValueError` for a slot without extents."""
        if not self.extents:
            raise ValueError("a slot without extents has no first offset")
        return self.extents[0][0]


class Refusal(enum.StrEnum):
    """Why an index reserved no slot. A refusal changes nothing in the tier, and evicts nothing."""

    NO_ROOM = "no_room"
    """Not enough space, even after evicting everything that is evictable."""
    TOO_LARGE = "too_large"
    """Larger than the whole tier: retrying is pointless."""
    PRESENT = "present"
    """The key is committed or reserved, or it was deleted and its bytes are still pinned or being written."""
    CLOSED = "closed"
    """The index is closed."""
    BUSY = "busy"
    """Too much is in flight: retrying later may help."""


UNSPECIFIED = "unspecified"
"""Reason of an invalidation without a reason."""


class FailureReason(enum.StrEnum):
    """Why an operation of a medium failed."""

    MISSING = "missing"
    """Nothing is stored in the slot."""
    WRONG_KEY = "wrong_key"
    """The slot holds another key's bytes."""
    CHECKSUM = "checksum"
    """The bytes are not those that were stored."""
    IO = "io"
    """The operation could not be carried out: wrong sizes or bounds, device errors."""
    CLOSED = "closed"
    """The medium is closed."""
    BUSY = "busy"
    """Nothing was tried: the queue is full, or the process is short of files, memory or threads."""
    INJECTED = "injected"
    """Injected by a test."""


class Failure(msgspec.Struct, frozen=True):
    """A failed operation: reason and detail."""

    reason: FailureReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)


class Completion(msgspec.Struct, frozen=True):
    """End of one store or load. `failure` is None on success."""

    ticket: Ticket
    failure: Failure | None = None
    checksum: bytes | None = None
    """XXH3-128 (16 bytes, canonical order) of the chunk, on success, from a medium that computes it."""


class LookupAnswer(enum.StrEnum):
    """Result of an async lookup of one key."""

    FOUND = "held"
    """In time: the tier holds the key, and the index offers it."""
    MISSING = "missing"
    """In time: the tier does not hold the key, or the index has no room for its entry."""
    TIMED_OUT = "late"
    """No answer by the deadline, or too many lookups in flight."""


class LookupCounts(NamedTuple):
    """Numbers of keys with an async lookup that was answered, or not, since the start. They never decrease.

    Not counted, because they say nothing about the health of the tier: open lookups, keys that were invalidated or
    reserved meanwhile, and keys that were not sent because too many lookups were in flight.
    """

    num_answered: int = 0
    """Answered by the deadline, with any answer."""
    num_timed_out: int = 0
    """Not answered by the deadline, even if answered later."""


NO_LOOKUPS = LookupCounts()


class TierCounts(msgspec.Struct, frozen=True):
    """Counts of an index since the last `take_counts`. Merging adds, so order and grouping do not matter."""

    reservations: int = 0
    commits: int = 0
    aborts: int = 0
    invalidations: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    refusals: dict[Refusal, int] = {}
    """By reason; only reasons that occurred."""
    answers: dict[LookupAnswer, int] = {}
    """Results of async lookups; only those that occurred. A key that was invalidated or reserved meanwhile has none."""

    def merge(self, other: TierCounts) -> TierCounts:
        refusals = dict(self.refusals)
        for reason, count in other.refusals.items():
            refusals[reason] = refusals.get(reason, 0) + count
        answers = dict(self.answers)
        for answer, count in other.answers.items():
            answers[answer] = answers.get(answer, 0) + count
        return TierCounts(
            reservations=self.reservations + other.reservations,
            commits=self.commits + other.commits,
            aborts=self.aborts + other.aborts,
            invalidations=self.invalidations + other.invalidations,
            evictions=self.evictions + other.evictions,
            evicted_bytes=self.evicted_bytes + other.evicted_bytes,
            refusals=refusals,
            answers=answers,
        )


@runtime_checkable
class TierIndex(Protocol):
    """Index of a tier: decides what it keeps. Used by one thread. No method blocks.

    A key is unknown, reserved, committed, or deleted and pending: invalidated while it is still being written
    (reserved) or read (pinned). A call that does not fit the state of the key raises `TierProtocolError`.

    A call with many keys does the same as one call for each key, in order, at lower cost. If it raises for one key, the
    keys before that one are done.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """Bytes in use, including rounding and deleted keys that are pending; never above `capacity_bytes`."""
        ...

    def cost(self, num_bytes: int) -> int:
        """Bytes of `capacity_bytes` that a chunk of this size uses."""
        ...

    @property
    def num_keys(self) -> int:
        """Number of committed and reserved keys."""
        ...

    @property
    def generation(self) -> int:
        """Changes whenever the answer of any lookup may have changed."""
        ...

    @property
    def has_async_lookups(self) -> bool:
        """True if the tier needs async lookups: `lookup` may miss keys that `start_lookup` would find."""
        ...

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Start an async lookup of keys, with a deadline by the tier's clock.

        Separate from `lookup`, which changes nothing. An unknown key is PENDING until it is answered; it is a MISS
        after the deadline, or if too many lookups are in flight. A later answer still counts, unless the key was
        invalidated meanwhile. A repeated lookup does not delay the answer; the later deadline holds. Nothing is
        reserved: `reserve` works as without the lookup. Does nothing in a tier that knows all its keys.
        """
        ...

    @property
    def lookup_counts(self) -> LookupCounts:
        """Answered and unanswered lookups since the start, to judge the health of the tier.

        Reading does not reset it, so there may be several readers.
        """
        ...

    @property
    def answer_s(self) -> float:
        """Expected seconds from an async lookup to its answer: a moving average. A lookup without an answer by its
        deadline counts with twice its time. 0 in a tier that knows all its keys."""
        ...

    def lacks(self, key: Key) -> bool:
        """True if the key is worth storing: neither committed nor reserved, nor known to be stored. Open lookups do not
        count."""
        ...

    def lookup(self, key: Key) -> LookupResult:
        """HIT if committed, PENDING if reserved or in an open lookup, else MISS. Changes nothing, not even recency."""
        ...

    def leading(self, keys: Iterable[Key]) -> int:
        """Number of leading keys that are HIT or PENDING. Changes nothing, like the next two."""
        ...

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """Position of the last key that is HIT or PENDING, None if there is none."""
        ...

    def any_pending(self, keys: Iterable[Key]) -> bool:
        """True if one of the keys is PENDING."""
        ...

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        """Make committed keys the most recently used, the last one most. Other keys are ignored.

        Args:
            keys: used keys.
            extends: for each key, as for `reserve`. Ignored for a key that extends another one already. Fast if each
                key comes before the one that it extends.
        """
        ...

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        """Reserve space for a chunk of `num_bytes` > 0.

        Evicts committed, unpinned keys that no held key extends, the least recently used first, and only as many as
        needed. A refusal evicts nothing. Keys that the chunk extends, directly or not, are not evicted for it.

        When the last key that extends a key is gone, that key is evicted next; if it was used in a later call, it
        becomes the most recently used one instead. If a key in the middle of a chain is deleted, the keys that extended
        it extend its predecessor. A tier that only lists chunks of others may evict in any order.

        Args:
            key: of the chunk.
            num_bytes: of the chunk.
            extends: keys; the chunk extends the first of them that the tier holds.
        """
        ...

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        """`reserve` for each key and number of bytes; one result for each.

        Later chunks are tried after a refusal too: sizes differ, and only the caller knows which chunks are useful
        alone.
        """
        ...

    def commit(self, key: Key) -> bool:
        """Offer a reserved key, as the most recently used: its bytes are in the medium.

        False if the key was invalidated meanwhile: it is not offered, and its space is freed now.
        """
        ...

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        """`commit` of each, in order; one result for each."""
        ...

    def abort(self, key: Key) -> None:
        """Free a reservation that will not be committed, also one that was invalidated. No write may be in flight."""
        ...

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        """Delete a key: it is never offered again. False if it is not offered or reserved.

        Frees the space now, or at the last `unpin` if pinned, or at `commit` or `abort` if reserved.

        Args:
            key: to delete.
            reason: for tiers that count reasons, for example a `FailureReason`.
        """
        ...

    def pin(self, key: Key) -> Slot | None:
        """Protect a committed key from eviction and return its slot; None if it is not a HIT. Pins are counted."""
        ...

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        """`pin` all keys and return their slots, or none: None if one is not a HIT, and nothing has changed.

        A key given twice is pinned twice.
        """
        ...

    def unpin(self, key: Key) -> None:
        """Undo one `pin`. The last one makes the key the most recently used, or frees it if it was invalidated."""
        ...

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """`unpin` each, in order, so the last one is the most recently used."""
        ...

    def clear(self) -> int:
        """`invalidate` every key; returns how many were offered or reserved."""
        ...

    def take_counts(self) -> TierCounts:
        """Counts since the last call."""
        ...

    def close(self) -> None:
        """`clear`, and refuse every later reservation. Pins and reservations may still be ended."""
        ...


class SyncLookups:
    """Mixin for a `TierIndex` that knows all its keys: async lookups do nothing."""

    @property
    def has_async_lookups(self) -> bool:
        """False: `lookup` knows all keys."""
        return False

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Does nothing."""

    @property
    def lookup_counts(self) -> LookupCounts:
        """No lookups."""
        return NO_LOOKUPS

    @property
    def answer_s(self) -> float:
        """No wait."""
        return 0.0


@runtime_checkable
class TierMedium(Protocol):
    """Medium of a tier: holds bytes. `store`, `load` and `poll` do not wait for a device, a network or another thread.

    Every store and load ends in exactly one `Completion` with its ticket, also on failure; I/O errors are not raised.
    Buffers belong to the medium from the call until that completion is polled. The caller, through the index, never
    runs two writes, or a write and a read, on one slot at the same time.
    """

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        """Copy `source` into the slot, under `key`. Its total size must be that of the slot."""
        ...

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        """Copy the slot into writable `destination` of the same total size, if it holds the bytes stored for `key`.

        After a failed load the contents of `destination` must not be used.
        """
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call, in any order."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until every operation is complete and ready for `poll`; False on a timeout."""
        ...

    def close(self) -> None:
        """Release memory, files and threads. Later operations complete with CLOSED; `poll` still works. Repeatable."""
        ...


@runtime_checkable
class HintedLookups(Protocol):
    """An index that can look up first in the places that a request names. Called by a stack."""

    def start_lookup_at(self, addresses: Sequence[tuple[str, int]], keys: Iterable[Key], deadline_s: float) -> None:
        """`TierIndex.start_lookup`, first at these hosts and ports."""
        ...


@runtime_checkable
class BatchedIndex(Protocol):
    """An index that places the chunks of a batch together, each after the chunk that it extends. Called by a stack."""

    def prepare_stores(self, keys: Sequence[Key]) -> None:
        """Look up the keys that may be reserved soon, each after the one that it extends: another engine may have
        stored them. `reserve` is BUSY until the answer, and looks up a key itself if this was not called for it."""
        ...

    def end_batch(self) -> None:
        """End the batch of keys reserved since the last call. The media receive it as one batch."""
        ...


@runtime_checkable
class BatchedMedium(Protocol):
    """A medium that stores and loads chunks in batches."""

    def flush(self) -> None:
        """Start everything queued since the last `flush`, as one batch. Without it, nothing need start before
        `drain`."""
        ...


@runtime_checkable
class ExposesBytes(Protocol):
    """A medium with addressable memory, for copy engines, and for tests that corrupt bytes."""

    def views(self, slot: Slot) -> list[memoryview]:
        """One writable view for each extent. `TierProtocolError` if the slot is not in this medium."""
        ...


@runtime_checkable
class SealedMemory(ExposesBytes, Protocol):
    """Memory of the primary tier, which copy engines access directly.

    The writer of a chunk seals its slot with the key and the checksum of its bytes; a reader checks both, so a reused,
    torn or corrupted slot is a failed load and never wrong bytes. Threads of copy engines and the main thread may use
    it at the same time, on distinct slots.

    For a slot outside the memory, or any slot after `close`, a method returns a `Failure` if it can, else raises
    `TierProtocolError`.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def base_address(self) -> int:
        """Address of offset 0. Register this memory, of `capacity_bytes`, with a copy engine."""
        ...

    def addresses(self, slot: Slot) -> list[tuple[int, int]]:
        """(address, num_bytes) of each extent, valid until `close`."""
        ...

    def seal_all(
        self, chunks: Sequence[tuple[Key, Slot]], checksums: Sequence[bytes] | None = None
    ) -> list[Failure | None]:
        """Record key and checksum of the current bytes of each slot. One result for each chunk; None is success.

        Removes the seals of other slots that overlap.

        Reads the bytes once, unless the caller passes their XXH3-128, one for each chunk.
        """
        ...

    def sealed_checksum(self, key: Key, slot: Slot) -> bytes | None:
        """XXH3-128 of the chunk sealed for `key` at the first offset of the slot, None if there is none. Does not read
        the chunk, and does not compare the extents."""
        ...

    def is_sealed(self, key: Key, slot: Slot) -> bool:
        """True if exactly these extents are sealed for `key`, and no slot that overlaps them was sealed or discarded
        since. Does not read the chunk."""
        ...

    def check_all(self, chunks: Sequence[tuple[Key, Slot]]) -> list[Failure | None]:
        """Verify that each slot holds the bytes sealed for its key. One result for each chunk; None is success. Reads
        the bytes once."""
        ...

    def discard(self, slot: Slot) -> None:
        """Remove the seal of a slot and those of slots that overlap, so `check_all` returns MISSING. Call it before
        overwriting a slot."""
        ...

    def close(self) -> None:
        """Release the memory. Stop the copy engine first, since it holds addresses."""
        ...
