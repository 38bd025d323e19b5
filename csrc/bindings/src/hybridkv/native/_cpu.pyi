"""What cpu_module.cc and the other bindings export. ValueError for arguments that fit no call."""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Integers = npt.NDArray[np.int64]  # one-dimensional, contiguous
_Caching = Literal["by_size", "cached", "streamed"]
_Answer = TypeVar("_Answer")
_Refusal = TypeVar("_Refusal")
_Slot = TypeVar("_Slot")
_State = TypeVar("_State")
_Backend = Literal["best", "io_uring", "threads"]

def levels() -> list[str]:
    """The instructions that this machine has: "scalar", "avx2", "avx512"; best last."""

def has_uring() -> bool:
    """Whether this kernel lets this process use io_uring."""

def copy_with_memcpy(source: int, destination: int, num_bytes: int) -> None:
    """The C library's memcpy, for benchmarks."""

class MemoryCopier:
    """Carries out copies. Any number of threads may use one at once; with `num_threads` > 1 they take turns.

    `level` is one of `levels()` or "best". `caching` says whether what is written stays out of the caches: "streamed",
    "cached", or by the size of the call. Threads above the first start now, as many as the system gives, and end with
    the object.
    """

    def __init__(self, num_threads: int = 1, level: str = "best", caching: _Caching = "by_size") -> None: ...
    def copy(self, sources: _Integers, destinations: _Integers, num_bytes: _Integers) -> None:
        """Copies `num_bytes[i]` bytes from `sources[i]` to `destinations[i]`. No destination overlaps anything."""

    def copy_and_digest(
        self, sources: _Integers, destinations: _Integers, num_bytes: _Integers, record_ends: _Integers
    ) -> bytes:
        """The same, and XXH3-128 of each record, 16 bytes each as `xxhash.xxh3_128_digest` gives them.

        Record i is runs `record_ends[i - 1]` to `record_ends[i]`, in order; the last end is the number of runs.
        """

    def digest(self, addresses: _Integers, num_bytes: _Integers, record_ends: _Integers) -> bytes:
        """The digests alone: nothing is written."""

class Lowering:
    """From the copies of a whole job to runs of bytes, between pages of the engine and slots of an arena.

    What is zero comes from `zeros_bytes` of memory at `zeros_address`. Any thread may call anything. `ValueError` for
    blocks, slots and parts that cannot be, and for arrays that do not fit each other.
    """

    def __init__(self, arena_address: int, arena_bytes: int, zeros_address: int, zeros_bytes: int) -> None: ...
    def add_group(self, group_index: int, block_tokens: int, columns: bytes, block_bytes: int, num_blocks: int) -> None:
        """Pages of a group's blocks. `columns` are rows of four 64-bit words: the address of block 0's page, the stride
        from block to block, the page's bytes, and its place in a block of a chunk, of `block_bytes`. `block_tokens` is
        0 where no chunk cuts the group's blocks."""

    def add_part(
        self, group_index: int, start: int, end: int, columns: bytes, block_bytes: int, num_blocks: int
    ) -> None:
        """The same of tokens [start, end) of every block, where chunks do."""

    def lower(
        self, is_store: bool, shapes: bytes, block_ids: bytes, local_ids: bytes, extents: bytes
    ) -> tuple[_Integers, _Integers, _Integers, _Integers, int]:
        """Sources, destinations and sizes of runs; of a store, how many runs there are up to the end of each copy, and
        how many bytes are zeros. The arguments are those of a `CopyTable` of the connectors."""

class RecordQueue:
    """Stores and loads records of files: a page that begins with a header, then the payload in whole pages.

    A thread of its own keeps `max_in_flight` calls on their way, 1 to 4096; with the backend "threads" as many threads
    make them, or fewer where the system gives fewer; `RuntimeError` where it gives none. Neighbours in a file are moved
    by one call of about `batch_bytes` at most. Loads go before stores. Any thread may call anything. What has not ended
    when the last reference goes is left to run, with its memory.

    A header is any bytes with 16 zeros at `digest_at`. In the file the payload's XXH3-128 stands there, and that of the
    header behind it; the rest of the page is zeros.
    """

    def __init__(self, max_in_flight: int, batch_bytes: int, digest_at: int, backend: _Backend = "best") -> None: ...
    @property
    def backend(self) -> str: ...
    @property
    def uring_error(self) -> int:
        """The errno with which the kernel refused io_uring to the backend "best"; 0 when it did not."""

    @property
    def num_transfers(self) -> int:
        """Calls that moved records so far."""

    def submit(
        self,
        tag: int,
        is_store: bool,
        fd: int,
        offset: int,
        is_direct: bool,
        syncs: bool,
        header: bytes,
        buffers: Sequence[Buffer],
    ) -> bool:
        """Takes a record, which waits for its turn. False after `close`.

        `fd` stays open and the buffers stay as they are until it was taken from the queue. With `is_direct` the file
        was opened with O_DIRECT. With `syncs` a store has ended when its bytes are on the device. `BufferError` for
        buffers that are not contiguous, or read-only for a load.
        """

    def take(self) -> list[tuple[int, int, int, bytes, bytes]]:
        """(tag, outcome, errno, digest, page) of what has ended since the last call.

        Outcome 0: done; `digest` is the payload's. 1: the system said `errno`; ENODATA: the file ends before the
        record. 2: the record begins with another header, or a damaged one: `page` is what was read. 3: the payload is
        not the one whose digest stands in the header. 4: cancelled by `close`.
        """

    def wait_until_idle(self, timeout_s: float) -> bool:
        """False when something has not ended by then."""

    def close(self, timeout_s: float) -> bool:
        """Cancels what was not begun and waits for the rest. False when some of it has not ended by then."""

class GranuleLedger(Generic[_Answer, _Refusal, _Slot]):
    """Which keys a tier in memory holds, in which of its granules, and what may be done to them now.

    What a `TierIndex` of hybridkv.tiers promises, least recently used goes first. A key is any bytes; one of more than
    48 takes memory of its own beside the tables. Each call holds the interpreter lock, and has done what it does before
    it makes the objects that it returns. At runtime it is no generic.

    `answers` are what is told of a key that is a MISS, PENDING, a HIT; `refusals` are NO_ROOM, TOO_LARGE, PRESENT,
    CLOSED; `make_slot` is called with a tuple of (offset, num_bytes); `misuse` is raised for a call that does not fit.
    No call of Python's comes back into a ledger but from these. `seed` is of chance, up to 2^64 - 1. `ValueError` for
    more than 2^32 - 2 granules, and for granules of more than 2^32 bytes; `MemoryError` where there are no addresses
    for so many.
    """

    def __init__(
        self,
        num_granules: int,
        granule_bytes: int,
        max_keys: int,
        seed: int,
        answers: tuple[_Answer, _Answer, _Answer],
        refusals: tuple[_Refusal, _Refusal, _Refusal, _Refusal],
        make_slot: Callable[[tuple[tuple[int, int], ...]], _Slot],
        misuse: type[Exception],
    ) -> None: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def granule_bytes(self) -> int: ...
    @property
    def max_keys(self) -> int: ...
    @property
    def most_index_bytes(self) -> int:
        """What the tables take when they are full. Memory is taken as it is used."""

    @property
    def leftover_bytes(self) -> int:
        """Of the tables that `clear` gave up, what later reservations still have to give back."""

    @property
    def num_keys(self) -> int: ...
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_pinned(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    def lacks(self, key: bytes) -> bool: ...
    def lookup(self, key: bytes) -> _Answer: ...
    def leading(self, keys: Iterable[bytes]) -> int: ...
    def last_held(self, keys: Sequence[bytes]) -> int | None: ...
    def any_pending(self, keys: Iterable[bytes]) -> bool: ...
    def find(self, key: bytes) -> _Slot | None:
        """Where a committed key lies. For any thread."""

    def eviction_order(self) -> list[bytes]:
        """What may be evicted, what goes first first. Takes a step for each key."""

    def reserve(self, key: bytes, num_bytes: int) -> _Slot | _Refusal: ...
    def reserve_all(self, chunks: Sequence[tuple[bytes, int]]) -> list[_Slot | _Refusal]: ...
    def commit(self, key: bytes) -> bool: ...
    def commit_all(self, keys: Iterable[bytes]) -> list[bool]: ...
    def abort(self, key: bytes) -> None: ...
    def invalidate(self, key: bytes, reason: str = "") -> bool: ...
    def invalidate_all(self, keys: Iterable[bytes]) -> int: ...
    def touch(self, keys: Iterable[bytes]) -> None: ...
    def pin(self, key: bytes) -> _Slot | None: ...
    def pin_all(self, keys: Sequence[bytes]) -> list[_Slot] | None: ...
    def unpin(self, key: bytes) -> None: ...
    def unpin_all(self, keys: Iterable[bytes]) -> None: ...
    def clear(self) -> int: ...
    def close(self) -> None: ...
    def take_tally(self) -> tuple[int, int, int, int, int, int, dict[_Refusal, int]]:
        """Reservations, commits, aborts, invalidations, evictions, bytes of these, refusals, since the last call."""

    def watch_at_most(self, max_keys: int) -> None:
        """Keep the keys whose answers change, from now on: so many by name."""

    def take_changed(self) -> tuple[set[bytes], bool]:
        """They, since the last call, and whether others may have changed, too."""

class RecordLedger(Generic[_Answer, _Refusal, _State, _Slot]):
    """Which records a store holds, in which of its segments, and what may be done to them now.

    As `GranuleLedger`, but somebody else says where a record lies, and hears what he has to count along. An address is
    a segment's number times 2^32, plus an offset in it; a record takes a page of 4096 bytes beside its payload, in
    whole pages. A row is (key, address, payload_bytes, state, num_pins). Several addresses are 64-bit numbers in bytes.

    `states` are RESERVED, COMMITTED, DOOMED_WRITE, DOOMED_READ. `ValueError` for more than 2^32 - 2 keys or
    2^51 pages. A key of more than 65,535 bytes is too large.
    """

    def __init__(
        self,
        num_pages: int,
        largest_pages: int,
        max_keys: int,
        seed: int,
        answers: tuple[_Answer, _Answer, _Answer],
        refusals: tuple[_Refusal, _Refusal, _Refusal, _Refusal],
        states: tuple[_State, _State, _State, _State],
        make_slot: Callable[[tuple[tuple[int, int], ...]], _Slot],
        misuse: type[Exception],
    ) -> None: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def max_keys(self) -> int: ...
    @property
    def most_index_bytes(self) -> int: ...
    @property
    def leftover_bytes(self) -> int: ...
    @property
    def num_keys(self) -> int: ...
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_pinned(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def has_evictable(self) -> bool: ...
    def lacks(self, key: bytes) -> bool: ...
    def lookup(self, key: bytes) -> _Answer: ...
    def leading(self, keys: Iterable[bytes]) -> int: ...
    def last_held(self, keys: Sequence[bytes]) -> int | None: ...
    def any_pending(self, keys: Iterable[bytes]) -> bool: ...
    def eviction_order(self) -> list[bytes]: ...
    def find(self, key: bytes) -> tuple[bytes, int, int, _State, int] | None: ...
    def reserved(self) -> list[tuple[bytes, int, int, _State, int]]:
        """What is being written, doomed or not."""

    def in_use(self) -> list[tuple[bytes, int, int, _State, int]]:
        """That, and what is pinned."""

    def held_in(self, number: int) -> list[tuple[bytes, int, int, _State, int]]:
        """Of a segment what is committed or reserved, in the order in which it lies."""

    def movable_in(self, number: int) -> list[tuple[bytes, int, int, _State, int]]:
        """Of that, what is committed and not pinned."""

    def why_not(self, key: bytes, num_pages: int) -> _Refusal | None: ...
    def count_refusal(self, refusal: _Refusal) -> None:
        """One that is none of `refusals` is not counted."""

    def make_room(self, num_pages: int, num_keys: int) -> list[tuple[bytes, int, int, _State, int]]:
        """What was evicted."""

    def take(self, key: bytes, payload_bytes: int, address: int) -> _Slot:
        """A reservation. `misuse` where there is a reason why not, or `make_room` has not made room for it."""

    def evict_next(self) -> tuple[bytes, int, int, _State, int] | None: ...
    def evict(self, key: bytes) -> bool: ...
    def count_evicted(self, num_pages: int) -> None:
        """A record that was evicted before it was taken in."""

    def commit_all(self, keys: Sequence[bytes]) -> tuple[list[tuple[int, int, bool]], bool]:
        """(address, payload_bytes, is_offered) of each before one that is not reserved, and whether that is all."""

    def raise_not_reserved(self, key: bytes) -> NoReturn: ...
    def abort(self, key: bytes) -> None: ...
    def invalidate(self, key: bytes) -> bool: ...
    def touch(self, keys: Iterable[bytes]) -> bytes:
        """Addresses of what may be evicted, in order."""

    def pin_all(self, keys: Sequence[bytes]) -> tuple[list[_Slot], bytes] | None:
        """Slots, and addresses of what was not pinned before."""

    def unpin_all(self, keys: Iterable[bytes]) -> tuple[bytes, list[tuple[int, int]], int]:
        """Addresses of what is pinned no more and used; (address, payload_bytes) of what was freed; how many keys came
        before one that is not pinned."""

    def raise_not_pinned(self, key: bytes) -> NoReturn: ...
    def relocate(self, key: bytes, address: int) -> bool: ...
    def drop_segment(self, number: int) -> None: ...
    def restore(self, keys: Sequence[bytes], addresses: bytes, payload_bytes: bytes) -> int:
        """Take in committed records, the least recently used first, before anything else is done. Columns of 64-bit
        numbers; how many were taken, from the first."""

    def forget_all(self) -> int: ...
    def refuse_all(self) -> None: ...
    def begin_walk(self) -> int:
        """A walk over what is committed, in steps between which anything may happen. It ends the one before."""

    def walk(self, number: int, num_entries: int) -> tuple[bool, bytes, bytes, bytes, bytes, bytes] | None:
        """Whether it goes on; keys one behind the other, their lengths (16 bits), addresses, payload bytes (64 bits
        each) and turns (32 bits): what has the lowest was used longest ago. None where another one has begun."""

    def take_tally(self) -> tuple[int, int, int, int, int, int, dict[_Refusal, int]]: ...
    def watch_at_most(self, max_keys: int) -> None: ...
    def take_changed(self) -> tuple[set[bytes], bool]: ...
