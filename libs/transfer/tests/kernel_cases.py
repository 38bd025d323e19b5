"""Cases for the copy kernel, used by its simulation on the CPU and by the tests on a GPU.

A case has runs, by offset, into a source and a destination of given sizes. The reference is a loop over the runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

POISON = 0xA5
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

PAGE_BYTES = (64, 512, 4096, 32 * 1024, 320 * 1024, 2 * 1024 * 1024, 4 * 1024 * 1024)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Runs of one copy: int64 arrays of one length. No two destinations overlap."""

    name: str
    sources: Offsets
    destinations: Offsets
    sizes: Offsets

    @property
    def source_bytes(self) -> int:
        return int((self.sources + self.sizes).max(initial=64))

    @property
    def destination_bytes(self) -> int:
        return int((self.destinations + self.sizes).max(initial=64))

    def memory(self) -> tuple[Bytes, Bytes]:
        """A source of random bytes, and a destination filled with `POISON`."""
        source = np.random.default_rng(11).integers(0, 256, self.source_bytes, dtype=np.uint8)
        return source, np.full(self.destination_bytes, POISON, dtype=np.uint8)

    def expected(self, source: Bytes) -> Bytes:
        """The destination after a sequential copy of the runs."""
        wanted = np.full(self.destination_bytes, POISON, dtype=np.uint8)
        triples = zip(self.sources.tolist(), self.destinations.tolist(), self.sizes.tolist(), strict=True)
        for start, end, size in triples:
            wanted[end : end + size] = source[start : start + size]
        return wanted


def _pages(name: str, page_bytes: int, num_pages: int, source_step: int, destination_step: int) -> Case:
    order = np.random.default_rng(page_bytes + num_pages).permutation(num_pages).astype(np.int64)
    index = np.arange(num_pages, dtype=np.int64)
    return Case(name, order * source_step, index * destination_step, np.full(num_pages, page_bytes, dtype=np.int64))


def _scattered(case: Case) -> Case:
    """The same pages in reverse: from one row to places in any order. The bytes between them stay unchanged."""
    return Case("scattered " + case.name, case.destinations, case.sources, case.sizes)


def _joined(name: str, parts: list[Case]) -> Case:
    """Several groups in one launch: they read one memory and write consecutive ranges."""
    begins = np.cumsum([0] + [part.destination_bytes for part in parts])
    return Case(
        name,
        np.concatenate([part.sources for part in parts]),
        np.concatenate([part.destinations + begin for part, begin in zip(parts, begins[:-1], strict=True)]),
        np.concatenate([part.sizes for part in parts]),
    )


def _unaligned() -> list[Case]:
    sizes = np.array([1, 2, 3, 15, 16, 17, 31, 33, 511, 513, 4097, 16383, 16385, 40000], dtype=np.int64)
    found = []
    for source_skew in (0, 1, 2, 4, 8, 15):
        for destination_skew in (0, 1, 2, 4, 8, 15):
            begins = np.cumsum(np.append(0, sizes[:-1] + 16)) // 16 * 16
            name = f"unaligned by {source_skew} and {destination_skew}"
            found.append(Case(name, begins + source_skew, begins + destination_skew, sizes))
    return found


@functools.cache
def cases() -> list[Case]:
    none = np.empty(0, dtype=np.int64)
    few = {size: max(3, min(40, (8 * 1024 * 1024) // size)) for size in PAGE_BYTES}
    pages = [_pages(f"pages of {size}", size, few[size], size, size) for size in PAGE_BYTES]
    padded = [_pages(f"padded pages of {size}", size, few[size], 2 * size, size) for size in PAGE_BYTES]
    odd = [_pages(f"odd strides of {size}", size, few[size], size + 1, size + 13) for size in PAGE_BYTES]
    shared = _joined("overlapping groups", [_pages("", size, 8, 4096, size) for size in (4096, 34304, 65536)])
    mixed = _joined("groups of many sizes", [*pages[:4], *padded[:3], *odd[:3]])
    many = _pages("100,000 runs", 64, 100_000, 96, 64)
    return [
        Case("no runs", none, none, none),
        _pages("one run", 4096, 1, 4096, 4096),
        *pages,
        *padded,
        *odd,
        *map(_scattered, [*pages, *padded, *odd, many]),
        shared,
        mixed,
        *_unaligned(),
        many,
    ]
