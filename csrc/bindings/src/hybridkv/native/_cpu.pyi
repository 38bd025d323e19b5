"""Functions and classes of the extension. They raise ValueError for invalid arguments."""

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
    """Instruction sets of this machine: "scalar", "avx2", "avx512". The best is last."""

def has_uring() -> bool:
    """True if the kernel permits io_uring to this process."""

def copy_with_memcpy(source: int, destination: int, num_bytes: int) -> None:
    """memcpy of the C library, for benchmarks."""

class MemoryCopier:
    """Copies bytes and computes digests. For any thread; with `num_threads` > 1 calls run one after the other.

    `level` is one of `levels()` or "best". `caching`: "streamed" stores bypass the caches, "cached" ones do not, and
    "by_size" chooses by the size of the call. The other threads start now, as many as the system permits, and end with
    the object.
    """

    def __init__(self, num_threads: int = 1, level: str = "best", caching: _Caching = "by_size") -> None: ...
    def copy(self, sources: _Integers, destinations: _Integers, num_bytes: _Integers) -> None:
        """Copies `num_bytes[i]` bytes from `sources[i]` to `destinations[i]`. A destination must not overlap another
        range."""

    def copy_and_digest(
        self, sources: _Integers, destinations: _Integers, num_bytes: _Integers, record_ends: _Integers
    ) -> bytes:
        """Copies, and returns the XXH3-128 of each record: 16 bytes each, equal to `xxhash.xxh3_128_digest`.

        Record i is runs `record_ends[i - 1]` to `record_ends[i]`, in order; the last end is the number of runs.
        """

    def digest(self, addresses: _Integers, num_bytes: _Integers, record_ends: _Integers) -> bytes:
        """Returns the digests without copies."""

class Lowering:
    """Lowers the copies of a job to runs of bytes between pages of the engine and slots of an arena.

    Zeros are copied from `zeros_bytes` of memory at `zeros_address`. For any thread. Raises ValueError for invalid
    blocks, slots and parts, and for arrays that do not match.
    """

    def __init__(self, arena_address: int, arena_bytes: int, zeros_address: int, zeros_bytes: int) -> None: ...
    def add_group(self, group_index: int, block_tokens: int, columns: bytes, block_bytes: int, num_blocks: int) -> None:
        """Adds pages of a group's blocks. `columns` are rows of four 64-bit words: the address of block 0's page, the
        stride from block to block, the page's bytes, and its offset in a block of a chunk, of `block_bytes`.
        `block_tokens` is 0 if no chunk cuts the group's blocks."""

    def add_part(
        self, group_index: int, start: int, end: int, columns: bytes, block_bytes: int, num_blocks: int
    ) -> None:
        """Adds the pages of tokens [start, end) of each block, for a group that chunks cut."""

    def lower(
        self, is_store: bool, shapes: bytes, block_ids: bytes, local_ids: bytes, extents: bytes
    ) -> tuple[_Integers, int, int, tuple[int, int, int, int], _Integers, int]:
        """Returns rows of runs, the number of runs, their bytes, and addresses [begin, end) that contain all sources
        and [begin, end) that contain all destinations; for a store also the number of runs up to the end of each copy,
        and the number of zero bytes. The arguments are those of a `CopyTable` of the connectors.

        A row has six words: the source and the destination of its first run, the step of both from run to run, the
        bytes of a run, and the number of runs."""

def expand_rows(rows: _Integers, sources: _Integers, destinations: _Integers, num_bytes: _Integers) -> None:
    """Writes the runs of rows to three arrays. ValueError if the arrays do not have one element for each run."""

class RecordQueue:
    """Stores and loads records of files: a page that begins with a header, then the payload in whole pages.

    Its thread keeps up to `max_in_flight` requests (1 to 4096) in flight. The backend "threads" starts as many threads,
    or fewer if the system permits fewer; RuntimeError if it permits none. One request moves adjacent records of about
    `batch_bytes` at most. Loads go before stores. For any thread. Records that have not ended when the last reference
    is dropped continue, with their memory.

    A header is any bytes with 16 zeros at `digest_at`. The file has the payload's XXH3-128 there, and that of the
    header after the header; the rest of the page is zeros.
    """

    def __init__(self, max_in_flight: int, batch_bytes: int, digest_at: int, backend: _Backend = "best") -> None: ...
    @property
    def backend(self) -> str: ...
    @property
    def uring_error(self) -> int:
        """The errno with which the kernel refused io_uring to the backend "best", or 0."""

    @property
    def num_transfers(self) -> int:
        """Number of requests so far."""

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
        """Queues a record. Returns False after `close`.

        `fd` must stay open and the buffers unchanged until `take` has returned the record. `is_direct`: the file was
        opened with O_DIRECT. `syncs`: a store ends when its bytes are on the device. Raises BufferError for buffers
        that are not contiguous, or read-only for a load.
        """

    def take(self) -> list[tuple[int, int, int, bytes, bytes]]:
        """Returns (tag, outcome, errno, digest, page) of the records that ended since the last call.

        Outcome 0: done; `digest` is the payload's. 1: failed with `errno`; ENODATA: the file ends before the record.
        2: another header, or a damaged one; `page` has the bytes read. 3: the payload does not match the digest in the
        header. 4: cancelled by `close`.
        """

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Returns False on timeout."""

    def close(self, timeout_s: float) -> bool:
        """Cancels records that were not started, and waits for the others. Returns False on timeout."""

class GranuleLedger(Generic[_Answer, _Refusal, _Slot]):
    """Ledger of a tier in memory: its keys, their states, and their granules.

    It has the rules of a `TierIndex` of hybridkv.tiers, and evicts the least recently used key first. A key is any
    bytes; one of more than 48 bytes needs memory outside the tables. A call holds the interpreter lock, and makes its
    changes before it makes the objects that it returns. At runtime the class is not generic.

    `answers` are the objects for MISS, PENDING, HIT; `refusals` those for NO_ROOM, TOO_LARGE, PRESENT, CLOSED;
    `make_slot` is called with a tuple of (offset, num_bytes); `misuse` is raised for a key in a wrong state. A ledger
    calls no other Python code. `seed` is random, up to 2^64 - 1. Raises ValueError for more than 2^32 - 2 granules, and
    for granules of more than 2^32 bytes; MemoryError if the system lacks the address space.
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
    def max_index_bytes(self) -> int:
        """Bytes of full tables. The system provides memory as it is used."""

    @property
    def leftover_bytes(self) -> int:
        """Bytes of old tables after `clear`, which later reservations free."""

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
        """Returns the slot of a committed key. For any thread."""

    def eviction_order(self) -> list[bytes]:
        """Returns the evictable keys, the next to be evicted first. Takes one step for each key."""

    def reserve(self, key: bytes, num_bytes: int, extends: tuple[bytes, ...] = ()) -> _Slot | _Refusal: ...
    def reserve_all(
        self, chunks: Sequence[tuple[bytes, int] | tuple[bytes, int, tuple[bytes, ...]]]
    ) -> list[_Slot | _Refusal]: ...
    def commit(self, key: bytes) -> bool: ...
    def commit_all(self, keys: Iterable[bytes]) -> list[bool]: ...
    def abort(self, key: bytes) -> None: ...
    def invalidate(self, key: bytes, reason: str = "") -> bool: ...
    def invalidate_all(self, keys: Iterable[bytes]) -> int: ...
    def touch(self, keys: Iterable[bytes], extends: Sequence[tuple[bytes, ...]] = ()) -> None: ...
    def pin(self, key: bytes) -> _Slot | None: ...
    def pin_all(self, keys: Sequence[bytes]) -> list[_Slot] | None: ...
    def unpin(self, key: bytes) -> None: ...
    def unpin_all(self, keys: Iterable[bytes]) -> None: ...
    def clear(self) -> int: ...
    def close(self) -> None: ...
    def take_tally(self) -> tuple[int, int, int, int, int, int, dict[_Refusal, int]]:
        """Returns counts since the last call: reservations, commits, aborts, invalidations, evictions, evicted bytes,
        refusals."""

    def watch_at_most(self, max_keys: int) -> None:
        """Starts to record keys with changed answers, at most `max_keys` by name."""

    def take_changed(self) -> tuple[set[bytes], bool]:
        """Returns the recorded keys since the last call, and True if other keys may have changed too."""

class RecordLedger(Generic[_Answer, _Refusal, _State, _Slot]):
    """Ledger of the records of a store: their keys, states and places in segments.

    As `GranuleLedger`, but the caller chooses the places, and gets the numbers to keep its own counts. An address is
    the segment's number times 2^32, plus an offset; a record takes one page of 4096 bytes, and its payload in whole
    pages. A row is (key, address, payload_bytes, state, num_pins). Lists of addresses are 64-bit numbers in bytes.

    `states` are the objects for RESERVED, COMMITTED, DELETED_WHILE_WRITTEN, DELETED_WHILE_PINNED. Raises ValueError for
    more than 2^32 - 2 keys or 2^51 pages. A key of more than 65,535 bytes is too large.
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
    def max_index_bytes(self) -> int: ...
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
        """Returns the rows of records being written, deleted ones too."""

    def in_use(self) -> list[tuple[bytes, int, int, _State, int]]:
        """Returns the rows of records being written or pinned."""

    def held_in(self, number: int) -> list[tuple[bytes, int, int, _State, int]]:
        """Returns the committed and reserved rows of a segment, by offset."""

    def movable_in(self, number: int) -> list[tuple[bytes, int, int, _State, int]]:
        """Returns those rows of `held_in` that are committed and not pinned."""

    def why_not(self, key: bytes, num_pages: int, extends: tuple[bytes, ...] = ()) -> _Refusal | None: ...
    def count_refusal(self, refusal: _Refusal) -> None:
        """Counts a refusal. Ignores an object that is not in `refusals`."""

    def make_room(
        self, num_pages: int, num_keys: int, extends: tuple[bytes, ...] = ()
    ) -> list[tuple[bytes, int, int, _State, int]]:
        """Evicts until `num_pages` and `num_keys` more fit. Returns the evicted rows."""

    def take(self, key: bytes, payload_bytes: int, address: int, extends: tuple[bytes, ...] = ()) -> _Slot:
        """Reserves a record. Raises `misuse` if it is refused, or `make_room` did not make room for it."""

    def evict_next(self) -> tuple[bytes, int, int, _State, int] | None: ...
    def evict(self, key: bytes) -> bool: ...
    def count_evicted(self, num_pages: int) -> None:
        """Counts a record that was evicted before it was restored."""

    def commit_all(self, keys: Sequence[bytes]) -> tuple[list[tuple[int, int, bool]], bool]:
        """Returns (address, payload_bytes, is_offered) of each key before the first that is not reserved, and True if
        there is no such key."""

    def raise_not_reserved(self, key: bytes) -> NoReturn: ...
    def abort(self, key: bytes) -> None: ...
    def invalidate(self, key: bytes) -> bool: ...
    def touch(self, keys: Iterable[bytes], extends: Sequence[tuple[bytes, ...]] = ()) -> bytes:
        """Returns the addresses of the committed and unpinned ones, in order."""

    def pin_all(self, keys: Sequence[bytes]) -> tuple[list[_Slot], bytes] | None:
        """Returns slots, and the addresses of records that had no pin before."""

    def unpin_all(self, keys: Iterable[bytes]) -> tuple[bytes, list[tuple[int, int]], int]:
        """Returns the addresses of records that lost their last pin and stay; (address, payload_bytes) of freed
        records; and the number of keys before the first that is not pinned."""

    def raise_not_pinned(self, key: bytes) -> NoReturn: ...
    def relocate(self, key: bytes, address: int) -> bool: ...
    def drop_segment(self, number: int) -> None: ...
    def restore(self, keys: Sequence[bytes], addresses: bytes, payload_bytes: bytes) -> int:
        """Adds committed records, the least recently used first, before any other call. The columns are 64-bit numbers.
        Returns the number of records added, from the first on."""

    def forget_all(self) -> int: ...
    def refuse_all(self) -> None: ...
    def begin_walk(self) -> int:
        """Begins a walk over committed records in steps. The ledger may change between steps. It ends an older walk."""

    def walk(self, number: int, num_entries: int) -> tuple[bool, bytes, bytes, bytes, bytes, bytes] | None:
        """Returns True if the walk continues, and columns: joined keys, their lengths (16 bits), addresses, payload
        bytes (64 bits each) and turns (32 bits; the lowest is the least recently used). None if another walk began."""

    def take_tally(self) -> tuple[int, int, int, int, int, int, dict[_Refusal, int]]: ...
    def watch_at_most(self, max_keys: int) -> None: ...
    def take_changed(self) -> tuple[set[bytes], bool]: ...
