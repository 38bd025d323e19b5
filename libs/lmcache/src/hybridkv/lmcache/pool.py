"""Pool of pages in shared memory, between an engine's blocks and a server.

A page is taken for one operation and given back when the server can no longer access it. An operation that timed out
keeps its pages until its late answer. If no answer can come any more, the pool is recreated in new memory under a new
name, and pages taken from the old memory are void.

A server maps the memory by its name. The name is removed on close, or by the next start after a crash; not earlier,
because a server may still map the memory. The owner holds a file lock, which ends with the process: a segment of this
library without a lock has no owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridkv.lmcache.errors import LMCacheConfigurationError, LMCacheProtocolError
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.wire import TensorPlace, WireGroup
from hybridkv.planner import GroupKind

logger = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
PREFIX = "hybridkv-lmcache-"
ALIGNMENT_BYTES = 4096
"""Alignment of the first page of each group."""
_INSTANCE_BITS = 62


class SharedMemory:
    """One segment of shared memory with a name. Before it is created, `sweep` removes segments of crashed processes.

    Args:
        num_bytes: size; the content is zeros.
        directory: directory of shared memory names.

    Raises:
        LMCacheConfigurationError: not enough shared memory.
    """

    def __init__(self, num_bytes: int, directory: Path = DIRECTORY) -> None:
        sweep(directory)
        self.num_bytes = num_bytes
        self._path = directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # a sweep may hold the lock briefly
            # Allocate now: a failed page allocation later would kill the process that touches the page.
            os.posix_fallocate(self._file, 0, num_bytes)
            self._map = mmap.mmap(self._file, num_bytes)
        except OSError as error:
            self._remove()
            raise LMCacheConfigurationError(
                "capacity",
                f"{num_bytes} bytes of shared memory",
                os.strerror(error.errno or 0),
                f"see `df {directory}`",
            ) from None
        self.view = memoryview(self._map)

    @property
    def name(self) -> str:
        """Name for `shm_open`."""
        return f"/{self._path.name}"

    def close(self) -> None:
        """Removes the name, and unmaps the memory unless a view is in use. Repeatable."""
        if self._file < 0:
            return
        self._remove()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._file)
        self._file = -1


def sweep(directory: Path = DIRECTORY) -> int:
    """Removes segments of crashed processes and returns their number. Skips locked and empty segments."""
    removed = 0
    for path in directory.glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # a segment of another user, or removed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A new segment that is not locked yet is still empty.
            if os.fstat(file).st_size:
                path.unlink()
                removed += 1
                logger.info("removed %s, left by a crashed process", path)
        except OSError:
            pass
        finally:
            os.close(file)
    return removed


@dataclass(frozen=True, slots=True)
class TakenPages:
    """Pages of one operation.

    Args:
        instance: instance of the pool when the pages were taken. If the pool has another instance, the pages are void.
        blocks: page numbers of each group.
    """

    instance: int
    blocks: Mapping[int, Sequence[int]]


class Pool:
    """Pages of one rank. For any thread.

    Args:
        geometry: groups and page sizes.
        num_chunks: maximum chunks in flight.

    Raises:
        LMCacheConfigurationError: not enough shared memory.
    """

    def __init__(self, geometry: Geometry, num_chunks: int) -> None:
        if num_chunks <= 0:
            raise LMCacheProtocolError(f"a pool of {num_chunks} chunks")
        self.geometry = geometry
        self._num_blocks = tuple(1 + num_chunks * kept for kept in geometry.kept_per_chunk)  # plus the null block
        self._offsets, num_bytes = _offsets(geometry, self._num_blocks)
        self.num_bytes = num_bytes
        self._memory = SharedMemory(num_bytes)
        self._lock = threading.Lock()
        self._instance = secrets.randbits(_INSTANCE_BITS)
        self._free = self._all()

    def _all(self) -> list[list[int]]:
        return [list(range(num_blocks - 1, 0, -1)) for num_blocks in self._num_blocks]

    @property
    def instance(self) -> int:
        """Id of this memory at the server. Changes with the memory."""
        return self._instance

    @property
    def view(self) -> memoryview:
        """The whole memory. A copy engine must register the memory again for each `instance`."""
        return self._memory.view

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Pages of each group, including the null block."""
        return self._num_blocks

    def current(self) -> tuple[int, memoryview]:
        """Consistent pair of `instance` and `view`."""
        with self._lock:
            return self._instance, self._memory.view

    @property
    def num_taken(self) -> int:
        """Number of taken pages."""
        with self._lock:
            return sum(self._num_blocks) - len(self._num_blocks) - sum(map(len, self._free))

    def recreate(self) -> None:
        """Replaces the memory with new memory of the same size. Taken pages become void.

        A view of the old memory stays usable. A server may still map the old memory and write to it.
        """
        memory = SharedMemory(self.num_bytes)
        with self._lock:
            old, self._memory = self._memory, memory
            self._instance = secrets.randbits(_INSTANCE_BITS)
            self._free = self._all()
        old.close()

    def wire_groups(self) -> tuple[WireGroup, ...]:
        """Groups for the registration, in the server's order."""
        geometry = self.geometry
        return tuple(
            WireGroup(
                engine_group=position,
                place=TensorPlace(
                    self._memory.name,
                    self._memory.num_bytes,
                    self._offsets[index],
                    self._num_blocks[index],
                    geometry.page_bytes[index],
                ),
                tokens_per_block=geometry.groups[index].spec.block_tokens,
                window_tokens=geometry.windows[index],
                is_recurrent=geometry.groups[index].spec.kind is GroupKind.RECURRENT,
            )
            for position, index in enumerate(geometry.order)
        )

    def offset(self, group: int, block: int) -> int:
        """Offset of a page in `view`."""
        if not 0 <= block < self._num_blocks[group]:
            raise LMCacheProtocolError(f"group {group} has no page {block}")
        return self._offsets[group] + block * self.geometry.page_bytes[group]

    def page(self, group: int, block: int) -> memoryview:
        """Header and payload of one page."""
        offset = self.offset(group, block)
        with self._lock:  # `recreate` must not replace the memory meanwhile
            return self._memory.view[offset : offset + self.geometry.page_bytes[group]]

    def num_free(self, group: int) -> int:
        with self._lock:
            return len(self._free[group])

    def take(self, numbers: Mapping[int, int]) -> TakenPages | None:
        """Takes pages of each group. Returns None and takes nothing if a group has too few free pages."""
        with self._lock:
            if any(number > len(self._free[group]) for group, number in numbers.items()):
                return None
            blocks = {group: [self._free[group].pop() for _ in range(number)] for group, number in numbers.items()}
            return TakenPages(self._instance, blocks)

    def give_back(self, taken: TakenPages) -> None:
        """Returns pages that no server can access any more. Ignores void pages."""
        with self._lock:
            if taken.instance == self._instance:
                for group, blocks in taken.blocks.items():
                    self._free[group].extend(blocks)

    def close(self) -> None:
        self._memory.close()


def _offsets(geometry: Geometry, num_blocks: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets, end = [], 0
    for page, number in zip(geometry.page_bytes, num_blocks, strict=True):
        offsets.append(end)
        end += -(-page * number // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(offsets), end
