"""What cpu_module.cc and the other bindings export. ValueError for arguments that fit no call."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Integers = npt.NDArray[np.int64]  # one-dimensional, contiguous
_Caching = Literal["by_size", "cached", "streamed"]
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
