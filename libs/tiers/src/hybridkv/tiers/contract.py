"""What every tier promises: the values that its two halves exchange, and the protocols of both.

A tier has an index (in the engine's scheduler: decides what is kept) and a medium (in each worker: holds bytes), which
for the tier that engines copy to and from is memory with seals. They may live in different processes and agree only
through slots. Bytes of tensor-parallel rank r live in rank r's medium;
all media are laid out alike, so one index serves every rank. CONTRACT.md lists each promise with the test that pins it.
No implementation stands here.
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
"""The caller's name for one store or load; it comes back in the `Completion`."""


class Slot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of one chunk in a medium, as the index gave it out. Travels between processes."""

    extents: tuple[tuple[int, int], ...]
    """(offset, num_bytes) in the medium, in the order of the chunk's bytes."""

    @property
    def num_bytes(self) -> int:
        extents = self.extents
        return extents[0][1] if len(extents) == 1 else sum(num_bytes for _, num_bytes in extents)

    @property
    def first_offset(self) -> int:
        """Names the slot among those that are alive at one time. `ValueError` for a slot without bytes."""
        if not self.extents:
            raise ValueError("a slot without extents has no first offset")
        return self.extents[0][0]


class Refusal(enum.StrEnum):
    """Why an index gave no slot. A refusal changes nothing in the tier, evictions included."""

    NO_ROOM = "no_room"
    """Not enough is free, nor would be after evicting everything that may go."""
    TOO_LARGE = "too_large"
    """Larger than the whole tier: asking again is pointless."""
    PRESENT = "present"
    """The key is committed or reserved, or its invalidated bytes are still pinned or being written."""
    CLOSED = "closed"
    """The index was closed."""
    BUSY = "busy"
    """As much is on its way as may be: asking again later may help."""


UNSPECIFIED = "unspecified"
"""Why a key was withdrawn where its withdrawer does not say."""


class FailureReason(enum.StrEnum):
    """Why a medium could not do what it was asked."""

    MISSING = "missing"
    """Nothing was ever stored in the slot."""
    WRONG_KEY = "wrong_key"
    """The slot holds another key's bytes."""
    CHECKSUM = "checksum"
    """The bytes are not those that were stored."""
    IO = "io"
    """The operation itself could not be carried out: sizes, bounds, device errors."""
    CLOSED = "closed"
    """The medium was closed."""
    BUSY = "busy"
    """Nothing was tried: more operations wait than may, or this process lacks files, memory or threads."""
    INJECTED = "injected"
    """A test asked for it."""


class Failure(msgspec.Struct, frozen=True):
    """A problem as a value."""

    reason: FailureReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)


class Completion(msgspec.Struct, frozen=True):
    """The end of one store or load: `failure` is None when it succeeded."""

    ticket: Ticket
    failure: Failure | None = None
    checksum: bytes | None = None
    """XXH3-128 (16 bytes, canonical order) of the chunk's bytes, from a medium that computed it and succeeded."""


class Answer(enum.StrEnum):
    """How a question ended that a tier was asked about one key."""

    HELD = "held"
    """In time: it is there, and this index may offer it."""
    MISSING = "missing"
    """In time: it is not there, or this index has no room to know of it."""
    LATE = "late"
    """There was no answer by the deadline, or as much was asked as may be."""


class Heard(NamedTuple):
    """Of how many keys that a tier was ever asked about it has heard. Neither becomes less.

    What is not answered yet is neither, nor is what was withdrawn or reserved meanwhile, nor what could not be asked
    because as much was asked as may be: for none of these is whoever should answer to blame.
    """

    in_time: int = 0
    """Answered by the deadline, whatever the answer was."""
    not_in_time: int = 0
    """Not answered by the deadline, whatever came later."""


NOTHING_HEARD = Heard()


class TierCounts(msgspec.Struct, frozen=True):
    """What an index did since it was last asked. Merging is addition, so order and grouping do not matter."""

    reservations: int = 0
    commits: int = 0
    aborts: int = 0
    invalidations: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    refusals: dict[Refusal, int] = {}
    """Only reasons that occurred."""
    answers: dict[Answer, int] = {}
    """Of a tier that answers late. Only those that occurred; a question that was withdrawn, or whose key was reserved
    meanwhile, has none."""

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
    """Decides what a tier keeps. Used by one thread. No method blocks.

    A key is unknown, reserved, committed, or doomed: invalidated while somebody still writes (reserved) or reads
    (pinned) it. A call that does not fit the key's state raises `TierProtocolError`.

    What is done to many keys at once is done to one after the other, in their order, and costs less. Where one of them
    does not fit, those before it are done.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """Space that is not free, rounding and doomed keys included; never above `capacity_bytes`."""
        ...

    def cost(self, num_bytes: int) -> int:
        """What a chunk of so many bytes takes up of `capacity_bytes`."""
        ...

    @property
    def num_keys(self) -> int:
        """Keys that are committed or reserved; doomed ones are not counted."""
        ...

    @property
    def generation(self) -> int:
        """Changes whenever the answer of any lookup may have changed."""
        ...

    @property
    def answers_late(self) -> bool:
        """Whether there may be more than `lookup` says before somebody has asked: whether `ask` is of any use."""
        ...

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Find out whether these are stored, by this time of the tier's clock.

        A verb of its own, because a lookup changes nothing. A key about which nothing is known is PENDING from now on,
        until there is an answer; it is a MISS when there is none by the deadline, or when as much is asked as may be.
        An answer that comes later still counts, unless the key was withdrawn meanwhile. To ask again what is not
        answered yet puts no answer off; the later deadline holds. Nothing is reserved for such a key: it can be
        reserved as if nobody had asked. Where everything is known this does nothing.
        """
        ...

    @property
    def heard(self) -> Heard:
        """How questions ended until now: whoever asks sees in it whether it is worth asking again.

        Unlike counts it is not taken, so that several may look.
        """
        ...

    def lacks(self, key: Key) -> bool:
        """Whether it is worth storing: it is neither committed nor reserved here, nor known to be stored, whatever was
        asked and not answered."""
        ...

    def lookup(self, key: Key) -> LookupResult:
        """HIT when committed, PENDING when reserved or asked and not answered yet, else MISS. Changes nothing, recency
        included."""
        ...

    def leading(self, keys: Iterable[Key]) -> int:
        """How many keys in a row, from the first, are HIT or PENDING. Changes nothing, as the next two."""
        ...

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """The position of the last key that is HIT or PENDING, None if none is."""
        ...

    def any_pending(self, keys: Iterable[Key]) -> bool:
        """Whether one of the keys is PENDING."""
        ...

    def touch(self, keys: Iterable[Key]) -> None:
        """Make committed keys the most recently used, the last one most; other keys are passed over."""
        ...

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """Take space for a chunk of `num_bytes` > 0.

        Evicts committed, unpinned keys, the least recently used first, only as far as needed. A
        refusal evicts nothing.
        """
        ...

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        """`reserve` for each key and its number of bytes; what each was answered.

        One that is refused keeps none behind it from being tried: sizes differ, and only the caller knows which chunks
        are of use without which others.
        """
        ...

    def commit(self, key: Key) -> bool:
        """The bytes of a reserved key are in the medium: offer it, as most recently used.

        False when the key was invalidated meanwhile: its space is freed now and it is not offered.
        """
        ...

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        """`commit` of each, in their order; what each was answered."""
        ...

    def abort(self, key: Key) -> None:
        """A reservation, doomed or not, that will never be committed: its space is freed now.

        No one may still be writing to it.
        """
        ...

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        """Never offer what is stored under this key again. False when there is nothing to withdraw.

        `reason` is for tiers that count it; a `FailureReason` is one.

        Space is freed now when nobody uses it, at the last `unpin` when pinned, at `commit` or `abort` when reserved.
        """
        ...

    def pin(self, key: Key) -> Slot | None:
        """Protect a committed key from eviction and learn where it lies; None when it is not a HIT. Counted."""
        ...

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        """`pin` of each, and where it lies. All or none: where one is not a HIT, None, and nothing has changed.

        Whoever reads many chunks needs all of them. A key that is named twice is pinned twice.
        """
        ...

    def unpin(self, key: Key) -> None:
        """Undo one `pin`. The last one makes the key the most recently used, or frees it if it was invalidated."""
        ...

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """`unpin` of each, so that the last one is the most recently used."""
        ...

    def clear(self) -> int:
        """`invalidate` every key; how many were withdrawn."""
        ...

    def take_counts(self) -> TierCounts:
        """What happened since the last call."""
        ...

    def close(self) -> None:
        """`clear`, and refuse every later reservation. Open pins and reservations may still be given back."""
        ...


class AnswersAtOnce:
    """That part of a `TierIndex`."""

    @property
    def answers_late(self) -> bool:
        """Never: everything is known here."""
        return False

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Nothing to find out."""

    @property
    def heard(self) -> Heard:
        """Nothing: nobody is asked."""
        return NOTHING_HEARD


@runtime_checkable
class TierMedium(Protocol):
    """Holds bytes. `store`, `load` and `poll` do not wait for a device, a network or another thread.

    Every store and load ends in exactly one `Completion` with its ticket, also when it failed; none of them raises for
    what the medium met. Buffers belong to the medium from the call until that completion is polled. The caller (through
    the index) never lets two operations that write use one slot at the same time, nor a write and a read.
    """

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        """Copy `source`, whose total size must be the slot's, into the slot and remember that it belongs to `key`."""
        ...

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        """Copy the slot into writable `destination` of the same total size, if it holds what was stored for `key`.

        What a failed load left in `destination` must not be used.
        """
        ...

    def poll(self) -> list[Completion]:
        """Completions that were not handed out yet, in any order."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until each operation has its completion ready for `poll`; False when `timeout_s` passed first."""
        ...

    def close(self) -> None:
        """Give up memory, files and threads. Later operations complete with CLOSED; `poll` still works. Repeatable."""
        ...


@runtime_checkable
class GathersPlaces(Protocol):
    """An index that gives chunks places together, and wants to know which follows which. Asked for by a stack."""

    def follows(self, key: Key, needs: Sequence[Key]) -> None:
        """What the key that is reserved next needs before it on its path, as `PathPosition.needs`."""
        ...

    def end_batch(self) -> None:
        """What was reserved since the last call is given to the media in one go, and what comes is not."""
        ...


@runtime_checkable
class GathersMoves(Protocol):
    """A medium that stores chunks together, and loads them together."""

    def flush(self) -> None:
        """What was given to be stored or loaded since the last call was one batch. Without it nothing of that need be
        moved before `drain`."""
        ...


@runtime_checkable
class ExposesBytes(Protocol):
    """A medium whose stored bytes are addressable memory: what a copy engine writes to, and what tests corrupt."""

    def views(self, slot: Slot) -> list[memoryview]:
        """One writable view an extent. `TierProtocolError` when the slot does not lie in this medium."""
        ...


@runtime_checkable
class SealedMemory(ExposesBytes, Protocol):
    """Memory that a copy engine moves chunks in and out of by itself: what holds the bytes of the fastest tier.

    Whoever wrote a chunk seals its slot with the key and the checksum of its bytes; whoever is about to read it checks
    both, so that a slot that was reused, torn or corrupted is a failed load and never wrong bytes. Threads of copy
    engines and the main thread may use it at once, on distinct slots.

    A slot that does not lie in the memory, or any slot after `close`, is a `Failure` where one is returned and a
    `TierProtocolError` elsewhere.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def base_address(self) -> int:
        """Where offset 0 lies: with `capacity_bytes`, the memory to register with a copy engine."""
        ...

    def addresses(self, slot: Slot) -> list[tuple[int, int]]:
        """(address, num_bytes) of each extent, valid until `close`."""
        ...

    def seal_all(
        self, chunks: Sequence[tuple[Key, Slot]], checksums: Sequence[bytes] | None = None
    ) -> list[Failure | None]:
        """The present bytes of each slot are those of its key. For each chunk, None when that is recorded.

        Reads them once, or takes the XXH3-128 that somebody else computed while writing them, one for each chunk.
        """
        ...

    def sealed_checksum(self, key: Key, slot: Slot) -> bytes | None:
        """XXH3-128 of what was sealed in the slot for `key`, None when nothing was. Reads no chunk."""
        ...

    def check_all(self, chunks: Sequence[tuple[Key, Slot]]) -> list[Failure | None]:
        """For each chunk, None when its slot holds exactly the bytes that were sealed for its key. Reads them once."""
        ...

    def discard(self, slot: Slot) -> None:
        """Forget what was sealed in the slot: `check_all` then finds it MISSING. Call it before overwriting a slot."""
        ...

    def close(self) -> None:
        """Give up the memory. Stop the copy engine first: it holds addresses."""
        ...
