"""Contract of a tier: the values that its two halves exchange, and the protocols of both. CONTRACT.md lists the tests.

A tier has an index, in the engine's scheduler, which decides which chunks are kept; and a medium, in each worker, which
holds the bytes. The medium of the primary tier is `SealedMemory`: copy engines access it directly. Index and medium may
run in different processes. They share no memory: they exchange only values, such as keys and slots. The medium of
tensor-parallel rank r holds the bytes of rank r. All media have the same layout, so one index serves every rank.
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
"""Key of one group's part of one chunk. Only the object tier interprets its bytes: as a tag and a prefix hash."""

Ticket = NewType("Ticket", int)
"""Id of one store or load. The caller chooses it; the `Completion` returns it."""


Extends: TypeAlias = tuple[Key, ...]
"""At most two keys of preceding chunks, in order of preference. A chunk extends the first one that the tier holds."""

NewChunk: TypeAlias = tuple[Key, int] | tuple[Key, int, Extends]
"""Arguments of `TierIndex.reserve`: key, number of bytes, and keys that the chunk may extend."""


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
        """Offset of the first extent; unique among live slots. `ValueError` for a slot without extents."""
        if not self.extents:
            raise ValueError("a slot without extents has no first offset")
        return self.extents[0][0]


class Refusal(enum.StrEnum):
    """Reason why an index reserved no slot. A refusal changes nothing in the tier, and evicts nothing."""

    NO_ROOM = "no_room"
    """Not enough space, even if all evictable keys were evicted."""
    TOO_LARGE = "too_large"
    """The chunk is larger than the largest chunk that fits into the tier. A retry fails too."""
    PRESENT = "present"
    """The key is committed, reserved, or deleted while its bytes are still pinned or written."""
    CLOSED = "closed"
    """The index is closed."""
    BUSY = "busy"
    """Too much work is in flight. A later retry may succeed."""


UNSPECIFIED = "unspecified"
"""Default reason of `TierIndex.invalidate`."""


class FailureReason(enum.StrEnum):
    """Reason why an operation of a medium failed."""

    MISSING = "missing"
    """Nothing is stored in the slot."""
    WRONG_KEY = "wrong_key"
    """The slot holds another key's bytes."""
    CHECKSUM = "checksum"
    """The bytes differ from the stored bytes."""
    IO = "io"
    """The operation failed: wrong sizes or bounds, or a device error."""
    CLOSED = "closed"
    """The medium is closed."""
    BUSY = "busy"
    """The operation was not tried: the queue is full, or the process is short of files, memory or threads."""


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
    """XXH3-128 (16 bytes, canonical order) of the chunk. None on failure, or if the medium does not compute it."""


class LookupAnswer(enum.StrEnum):
    """Result of an async lookup of one key."""

    FOUND = "held"
    """Answered by the deadline: the tier holds the key, and the index offers the key."""
    MISSING = "missing"
    """Answered by the deadline: the tier does not hold the key, or the index has no room for an entry."""
    TIMED_OUT = "late"
    """Not answered by the deadline, or not sent because too many lookups were in flight."""


class LookupCounts(NamedTuple):
    """Counts of keys with an answered or timed-out async lookup since the start. Counts never decrease.

    Not counted, because they do not show the health of the tier: open lookups; keys invalidated or reserved during the
    lookup; keys not sent because too many lookups were in flight.
    """

    num_answered: int = 0
    """Keys answered by the deadline, found or missing."""
    num_timed_out: int = 0
    """Keys without an answer by the deadline, even if answered later."""


NO_LOOKUPS = LookupCounts()


class TierCounts(msgspec.Struct, frozen=True):
    """Counts of an index since the last `take_counts`. `merge` adds, so order and grouping do not matter."""

    reservations: int = 0
    commits: int = 0
    aborts: int = 0
    invalidations: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    refusals: dict[Refusal, int] = {}
    """Refusals by reason; only reasons that occurred."""
    answers: dict[LookupAnswer, int] = {}
    """Keys by result of their async lookup; only results that occurred. Keys that were invalidated or reserved during
    the lookup are not counted."""

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
    """Index of a tier: decides which chunks the tier keeps. Used by one thread. No method blocks.

    A key is unknown, reserved, committed or deleted. Deleted: invalidated while its bytes are still written (reserved)
    or read (pinned); its space is not free yet. A call that does not fit the state of the key raises
    `TierProtocolError`.

    A call with many keys has the same effect as one call for each key, in order, at lower cost. Exception:
    `pin_all` pins all keys or none. If a call raises for one key, all keys before that key are done.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """Bytes in use, including rounding and deleted keys; never above `capacity_bytes`."""
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
        """Number that changes whenever the result of any lookup may have changed."""
        ...

    @property
    def has_async_lookups(self) -> bool:
        """True if the tier needs async lookups: `lookup` may miss keys that `start_lookup` would find."""
        ...

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Start an async lookup of keys, with a deadline in seconds of the tier's clock.

        An unknown key is PENDING until the answer. It is a MISS after the deadline, or if too many lookups are in
        flight. An answer after the deadline is still used, unless the key was invalidated after `start_lookup`. A
        repeated lookup does not delay the answer; the later of the two deadlines applies. Reserves nothing: `reserve`
        works as without the lookup. Does nothing if `has_async_lookups` is False.
        """
        ...

    @property
    def lookup_counts(self) -> LookupCounts:
        """Counts of answered and timed-out lookups since the start, to judge the health of the tier.

        A read does not reset the counts, so several readers are possible.
        """
        ...

    @property
    def answer_s(self) -> float:
        """Expected seconds from an async lookup to its answer: a moving average. A timed-out lookup adds twice its
        time limit to the average. 0 if `has_async_lookups` is False."""
        ...

    def lacks(self, key: Key) -> bool:
        """True if the key is worth storing, also during an open lookup: the key is not committed, not reserved, and not
        known to be stored."""
        ...

    def lookup(self, key: Key) -> LookupResult:
        """HIT if committed, PENDING if reserved or in an open lookup, else MISS. Changes nothing, not even recency."""
        ...

    def leading(self, keys: Iterable[Key]) -> int:
        """Number of leading keys that are HIT or PENDING. Changes nothing."""
        ...

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """Position of the last key that is HIT or PENDING, None if there is none. Changes nothing."""
        ...

    def any_pending(self, keys: Iterable[Key]) -> bool:
        """True if one of the keys is PENDING. Changes nothing."""
        ...

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        """Make committed keys the most recently used, in order: the last key becomes the most recent. Ignores other
        keys.

        Args:
            keys: used keys.
            extends: for each key, as for `reserve`. Ignored for a key that already extends another key. Fast if each
                key comes before the key that it extends.
        """
        ...

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        """Reserve space for a chunk of `num_bytes` > 0.

        Evicts committed, unpinned keys that no other key extends, least recently used first, and only as many as
        needed. A refusal evicts nothing. Never evicts keys that the new chunk extends, directly or through other keys.

        Suppose that key B extends key A. If B is gone and no other key extends A, A is evicted next. Exception: if A
        was used in a later call than B, A becomes the most recently used key. If a key in the middle of a chain is
        deleted, its successors extend its predecessor. A tier that only lists chunks of other engines may evict in any
        order.

        Args:
            key: key of the chunk.
            num_bytes: size of the chunk.
            extends: keys of preceding chunks; the chunk extends the first one that the tier holds.
        """
        ...

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        """`reserve` for each chunk, in order; one result for each.

        Continues after a refusal: sizes differ, and a later chunk may be useful without the refused one.
        """
        ...

    def commit(self, key: Key) -> bool:
        """Offer a reserved key, as the most recently used key. Its bytes must be in the medium.

        False if the key was invalidated after `reserve`: the key is not offered, and its space is freed now.
        """
        ...

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        """`commit` each key, in order; one result for each."""
        ...

    def abort(self, key: Key) -> None:
        """Free a reservation that will not be committed; the key may be invalidated already. No write may be in
        flight."""
        ...

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        """Delete a key: the stored bytes are never offered again. False if the key is not committed or reserved.

        Frees the space now, or at the last `unpin` if pinned, or at `commit` or `abort` if reserved.

        Args:
            key: key to delete.
            reason: for example a `FailureReason`; used by tiers that count reasons.
        """
        ...

    def pin(self, key: Key) -> Slot | None:
        """Protect a committed key from eviction and return its slot; None if it is not a HIT. Pins are counted."""
        ...

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        """`pin` all keys and return their slots. None, and no change, if one of the keys is not a HIT.

        A key that occurs twice is pinned twice.
        """
        ...

    def unpin(self, key: Key) -> None:
        """Undo one `pin`. The last `unpin` makes the key the most recently used, or frees a deleted key."""
        ...

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """`unpin` each key, in order: the last key becomes the most recently used."""
        ...

    def clear(self) -> int:
        """`invalidate` every key; returns the number of keys that were committed or reserved."""
        ...

    def take_counts(self) -> TierCounts:
        """Counts since the last call."""
        ...

    def close(self) -> None:
        """`clear`, and refuse every later reservation. `unpin`, `commit` and `abort` still work."""
        ...


class SyncLookups:
    """Mixin for a `TierIndex` without async lookups: `lookup` finds all keys of the tier."""

    @property
    def has_async_lookups(self) -> bool:
        """False: `lookup` finds all keys."""
        return False

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Does nothing."""

    @property
    def lookup_counts(self) -> LookupCounts:
        """All counts 0."""
        return NO_LOOKUPS

    @property
    def answer_s(self) -> float:
        """Always 0."""
        return 0.0


@runtime_checkable
class TierMedium(Protocol):
    """Medium of a tier: holds bytes. `store`, `load` and `poll` do not wait for a device, a network or another thread.

    Every store and load ends in exactly one `Completion` with its ticket, also on failure; I/O errors are not raised.
    The medium may use the buffers from the call until `poll` returns that completion. The caller never runs two writes,
    or a write and a read, on one slot at the same time: the states and pins of the index prevent it.
    """

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        """Copy `source` into the slot, under `key`. The total size of `source` must be the size of the slot."""
        ...

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        """Copy the slot into writable `destination` of the same total size. Fails if the slot does not hold the bytes
        stored for `key`.

        After a failed load the contents of `destination` must not be used.
        """
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call, in any order."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until every operation is complete and `poll` can return its completion. False on a timeout."""
        ...

    def close(self) -> None:
        """Release memory, files and threads. Later operations complete with CLOSED; `poll` still works. Repeatable."""
        ...


@runtime_checkable
class HintedLookups(Protocol):
    """Index that first looks up keys at given peers. Called by a stack."""

    def start_lookup_at(self, addresses: Sequence[tuple[str, int]], keys: Iterable[Key], deadline_s: float) -> None:
        """`TierIndex.start_lookup` that first sends the lookup to these addresses: (host, port)."""
        ...


@runtime_checkable
class BatchedIndex(Protocol):
    """Index that places the chunks of a batch together, each after the chunk that it extends. Called by a stack."""

    def prepare_stores(self, keys: Sequence[Key]) -> None:
        """Look up keys that may be reserved soon: another engine may have stored them. Each key comes after the key
        that it extends. `reserve` is BUSY until the answer. Without this call, `reserve` starts the lookup itself."""
        ...

    def end_batch(self) -> None:
        """End the batch of keys reserved since the last call. The media receive these keys as one batch."""
        ...


@runtime_checkable
class BatchedMedium(Protocol):
    """Medium that stores and loads chunks in batches."""

    def flush(self) -> None:
        """Start all operations queued since the last `flush`, as one batch. Without `flush`, it is possible that
        operations start only at `drain`."""
        ...


@runtime_checkable
class ExposesBytes(Protocol):
    """Medium with addressable memory, for copy engines, and for tests that corrupt bytes."""

    def views(self, slot: Slot) -> list[memoryview]:
        """One writable view for each extent. `TierProtocolError` if the slot is not in this medium."""
        ...


@runtime_checkable
class SealedMemory(ExposesBytes, Protocol):
    """Memory of the primary tier. Copy engines access it directly.

    The writer of a chunk seals the slot with the key, the extents, and the checksum of the bytes. A load always
    compares key and extents, so a load from a reused or unsealed slot fails. `verify_ram` selects the chunks that a
    load also compares with their checksum; only for these a changed byte fails the load. Threads of copy engines and
    the main thread may use the memory at the same time, on distinct slots.

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

        Removes the seals of other, overlapping slots. Reads the bytes once, unless the caller passes `checksums`: the
        XXH3-128 of each chunk.
        """
        ...

    def sealed_checksum(self, key: Key, slot: Slot) -> bytes | None:
        """XXH3-128 of the chunk sealed for `key` at the first offset of the slot; None if no chunk is sealed there.
        Does not read the chunk, and does not compare the extents."""
        ...

    def is_sealed(self, key: Key, slot: Slot) -> bool:
        """True if exactly these extents are sealed for `key`, and no overlapping slot was sealed or discarded
        afterwards. Does not read the chunk."""
        ...

    def check_all(self, chunks: Sequence[tuple[Key, Slot]]) -> list[Failure | None]:
        """Check that each slot holds the bytes sealed for its key. One result for each chunk; None is success. Reads
        the bytes once."""
        ...

    def discard(self, slot: Slot) -> None:
        """Remove the seals of a slot and of overlapping slots, so `check_all` returns MISSING. Call it before a slot
        is overwritten."""
        ...

    def close(self) -> None:
        """Release the memory. Stop the copy engine first: it holds addresses of this memory."""
        ...
