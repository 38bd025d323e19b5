"""Calls of hybridkv.native with invalid arguments. A test runs them in their own process.

`python bad_calls.py FIRST` makes the calls beginning with number FIRST. It prints the name of each call before it, and
its outcome after it. A signal ends the process if a call hangs, even one that holds the interpreter.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import patience

from hybridkv import native

HANGS_AFTER_S = round(patience.seconds(5.0))
U32, U64 = 2**32, 2**64
I64 = 2**63 - 1
PAGE = 4096
HEADER = bytes(48)
KEY = b"k" * 40


class MisuseError(Exception):
    """Raised by a ledger for an invalid call."""


def integers(*values: int) -> Any:
    return np.array(values, np.int64)


def memory(num_bytes: int = PAGE) -> tuple[Any, int]:
    kept = np.zeros(num_bytes, np.uint8)
    return kept, kept.ctypes.data


MEMORY, AT = memory()
"""Memory that a call may read and write."""


def granules(num_granules: int = 8, granule_bytes: int = 64, max_keys: int = 4, **changes: Any) -> Any:
    options = {"seed": 1, "answers": (0, 1, 2), "refusals": (3, 4, 5, 6), "make_slot": tuple, "misuse": MisuseError}
    return native.GranuleLedger(num_granules, granule_bytes, max_keys, **options | changes)


def records(num_pages: int = 8, largest_pages: int = 4, max_keys: int = 4, **changes: Any) -> Any:
    options = {"seed": 1, "answers": (0, 1, 2), "refusals": (3, 4, 5, 6), "states": (7, 8, 9, 10)}
    options |= {"make_slot": tuple, "misuse": MisuseError}
    return native.RecordLedger(num_pages, largest_pages, max_keys, **options | changes)


def full_records() -> Any:
    ledger = records()
    for number in range(4):
        ledger.take(b"%d" % number, 1, number * PAGE)
    return ledger


def lowering(group: bool = True, block_tokens: int = 0) -> Any:
    """Lowering for an arena of 1 MiB and a group of 4 blocks with a page of 64 bytes."""
    made = native.Lowering(1 << 20, 1 << 20, 1 << 30, 64)
    if group:
        made.add_group(0, block_tokens, columns((1 << 32, 64, 64, 0)), 64, 4)
    return made


def columns(*rows: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("4q", *row) for row in rows)


def shape(**changes: int) -> bytes:
    """A shape of one copy of one block."""
    fields = {"num_copies": 1, "group_index": 0, "first_block": 0, "num_blocks": 1, "stored_blocks": 1}
    fields |= {"lead_tokens": 0, "trail_tokens": 0, "num_local": 0, "num_extents": 1, "key_bytes": 0}
    return struct.pack("10i", *(fields | changes).values())


def lower(
    made: Any, is_store: bool = False, ids: tuple[int, ...] = (0,), slot: tuple[int, ...] = (0, 64), **changes: int
) -> object:
    return made.lower(is_store, shape(**changes), np.array(ids, np.int32).tobytes(), b"", integers(*slot).tobytes())


def expand(num_runs: int, length: int, step: int = 1, *, is_writable: bool = True) -> None:
    arrays = [np.zeros(length, np.int64) for _ in range(3)]
    for array in arrays:
        array.setflags(write=is_writable)
    native.expand_rows(integers(1, 2, step, step, 5, num_runs), *arrays)


def expand_onto_rows() -> None:
    """The sources are the last word of the first row and words after it."""
    words = integers(1000, 2000, 1 << 20, 1 << 20, 5, 2, 1, 2, 3, 4, 5, 1)
    arrays = np.zeros(3, np.int64), np.zeros(3, np.int64)
    native.expand_rows(words, words[5:8], *arrays)


def expand_onto_each_other(first: int, second: int) -> None:
    """Two of the three arrays share memory, shifted by one word."""
    shared = np.zeros(3, np.int64)
    arrays = [np.zeros(2, np.int64) for _ in range(3)]
    arrays[first], arrays[second] = shared[:2], shared[1:]
    native.expand_rows(integers(1, 2, 3, 4, 5, 2), *arrays)


def copies_without_end() -> object:
    """300 copies of 2^55 bytes each: their sum has more than 63 bits."""
    made = native.Lowering(0, 1 << 56, 0, 64)
    made.add_group(0, 0, columns((0, 0, 1 << 55, 0)), 1 << 55, 1)
    return lower(made, ids=(0,) * 300, slot=(0, 1 << 55) * 300, num_copies=300)


def pages_without_end() -> object:
    """2^14 pages of each of 2^14 blocks."""
    made = native.Lowering(1 << 20, 1 << 30, 1 << 40, 64)
    made.add_group(0, 0, columns(*((1 << 41, 0, 1, offset) for offset in range(1 << 14))), 1 << 14, 1)
    return lower(made, ids=(0,) * (1 << 14), slot=(0, 1 << 28), num_blocks=1 << 14, stored_blocks=1 << 14)


def part_of_fewer_blocks() -> object:
    made = lowering(block_tokens=4)
    made.add_part(0, 1, 4, columns((1 << 32, 64, 48, 0)), 48, 2)
    return lower(made, ids=(3,), slot=(0, 48), lead_tokens=1)


def queue(*arguments: Any) -> Any:
    return native.RecordQueue(*(arguments or (2, 1 << 20, 8)))


def submit(opened: Any = None, **changes: Any) -> object:
    """Load a record from an invalid descriptor, which always fails."""
    arguments = {"tag": 1, "is_store": False, "fd": 1 << 30, "offset": 0, "is_direct": False, "syncs": False}
    arguments |= {"header": HEADER, "buffers": [bytearray(10)]}
    opened = opened or queue()
    opened.submit(**arguments | changes)
    assert opened.wait_until_idle(10.0)
    return opened.take()[0][1:3]


class Reentering:
    """A sequence that submits a record with the same tag when it is read."""

    def __init__(self, opened: Any) -> None:
        self.opened, self.has_begun = opened, False

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> bytearray:
        if place:
            raise IndexError
        if not self.has_begun:
            self.has_begun = True
            assert self.opened.submit(1, False, 1 << 30, 0, False, False, HEADER, [bytearray(10)])
        return bytearray(10)


def reentered() -> object:
    opened = queue()
    return submit(opened, buffers=Reentering(opened))


def many_pins() -> int:
    """Pin one key, in steps, twice as often as can be counted."""
    ledger = granules()
    ledger.reserve(KEY, 1)
    ledger.commit(KEY)
    keys = [KEY] * (1 << 16)
    for _ in range(8):
        if ledger.pin_all(keys) is None:
            break
    return int(ledger.num_pinned)


def never_made(kind: str) -> Any:
    return getattr(native, kind).__new__(getattr(native, kind))


def submit_when_closed() -> object:
    opened = queue()
    assert opened.close(10.0)
    return opened.submit(1, False, 1 << 30, 0, False, False, HEADER, [bytearray(1)])


def with_pipe() -> object:
    """Use a descriptor that cannot be read at an offset."""
    reader, writer = os.pipe()
    os.write(writer, bytes(2 * PAGE))
    try:
        return submit(fd=reader)
    finally:
        os.close(reader)
        os.close(writer)


def with_a_file_that_ends() -> object:
    with tempfile.TemporaryFile() as opened:
        return submit(fd=opened.fileno(), offset=1 << 40)


COPY = native.MemoryCopier()
ONE = integers(1)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # functions
    "memcpy from nothing": (lambda: native.copy_with_memcpy(0, AT, 1), "ValueError"),
    "memcpy to nothing": (lambda: native.copy_with_memcpy(AT, 0, 1), "ValueError"),
    "memcpy of less than nothing": (lambda: native.copy_with_memcpy(AT, AT, -1), "ValueError"),
    "memcpy of everything": (lambda: native.copy_with_memcpy(AT, AT, I64), "ValueError"),
    "memcpy from 64 bits": (lambda: native.copy_with_memcpy(U64 - 1, AT, 1), "TypeError"),
    # MemoryCopier
    "copier of no thread": (lambda: native.MemoryCopier(0), "ValueError"),
    "copier of -1 threads": (lambda: native.MemoryCopier(-1), "TypeError"),
    "copier of 2^63 threads": (lambda: native.MemoryCopier(2**63), "ValueError"),
    "copier never made": (lambda: never_made("MemoryCopier").copy(ONE, ONE, ONE), "TypeError"),
    "copier made twice": (lambda: native.MemoryCopier().__init__(), "TypeError"),
    "copy of less than nothing": (lambda: COPY.copy(integers(AT), integers(AT), integers(-1)), "ValueError"),
    "copy of everything": (lambda: COPY.copy(integers(AT), integers(AT), integers(I64)), "ValueError"),
    "copy from nothing": (lambda: COPY.copy(integers(0), integers(AT), integers(8)), "ValueError"),
    "copy to nothing": (lambda: COPY.copy(integers(AT), integers(0), integers(8)), "ValueError"),
    "copy from below": (lambda: COPY.copy(integers(-8), integers(AT), integers(8)), "ValueError"),
    "copy past the end": (lambda: COPY.copy(integers(I64), integers(AT), integers(8)), "ValueError"),
    "copy of None": (lambda: COPY.copy(None, None, None), "TypeError"),
    "copy of lists": (lambda: COPY.copy([AT], [AT], [1]), "TypeError"),
    "copy of floats": (lambda: COPY.copy(*[np.zeros(1)] * 3), "TypeError"),
    "copy of unsigned": (lambda: COPY.copy(*[np.zeros(1, np.uint64)] * 3), "TypeError"),
    "copy of the other byte order": (lambda: COPY.copy(*[np.zeros(1, ">i8")] * 3), "TypeError"),
    "copy of two dimensions": (lambda: COPY.copy(*[np.zeros((1, 1), np.int64)] * 3), "TypeError"),
    "copy of strided": (lambda: COPY.copy(*[np.zeros(4, np.int64)[::2]] * 3), "TypeError"),
    "copy of unequal": (lambda: COPY.copy(ONE, ONE, integers()), "ValueError"),
    "digest of less than nothing": (lambda: COPY.digest(integers(AT), integers(-1), ONE), "ValueError"),
    "digest of everything": (lambda: COPY.digest(integers(AT), integers(I64), ONE), "ValueError"),
    "digest of nothing": (lambda: COPY.digest(integers(0), integers(8), ONE), "ValueError"),
    "digest with ends below": (lambda: COPY.digest(integers(AT), integers(8), integers(-1, 1)), "ValueError"),
    "digest with ends beyond": (lambda: COPY.digest(integers(AT), integers(8), integers(2)), "ValueError"),
    "digest with ends of 64 bits": (lambda: COPY.digest(integers(AT), integers(8), integers(I64)), "ValueError"),
    "copy and digest of less": (
        lambda: COPY.copy_and_digest(integers(AT), integers(AT + 8), integers(-8), ONE),
        "ValueError",
    ),
    "copy and digest to nothing": (
        lambda: COPY.copy_and_digest(integers(AT), integers(0), integers(8), ONE),
        "ValueError",
    ),
    # Rows
    "rows cut": (lambda: native.expand_rows(integers(1, 2, 3, 4, 5), *[integers()] * 3), "ValueError"),
    "rows of more runs": (lambda: expand(2, 1), "ValueError"),
    "rows of fewer runs": (lambda: expand(1, 2), "ValueError"),
    "rows of no run": (lambda: expand(0, 0), "ValueError"),
    "rows of runs below": (lambda: expand(-1, 0), "ValueError"),
    "rows without end": (lambda: expand(I64, 1), "ValueError"),
    "rows to arrays of other lengths": (
        lambda: native.expand_rows(integers(1, 2, 3, 4, 5, 1), integers(0), integers(0), integers()),
        "ValueError",
    ),
    "rows onto themselves": (expand_onto_rows, "ValueError"),
    "rows to sources that are destinations": (lambda: expand_onto_each_other(0, 1), "ValueError"),
    "rows to sources that are sizes": (lambda: expand_onto_each_other(2, 0), "ValueError"),
    "rows to destinations that are sizes": (lambda: expand_onto_each_other(1, 2), "ValueError"),
    "rows of None": (lambda: native.expand_rows(None, *[integers()] * 3), "TypeError"),
    "rows to read-only arrays": (lambda: expand(1, 1, is_writable=False), "TypeError"),
    # Lowering
    "lowering never made": (lambda: lower(never_made("Lowering")), "TypeError"),
    "arena below": (lambda: native.Lowering(-1, 64, 64, 64), "ValueError"),
    "arena past the end": (lambda: native.Lowering(I64, 64, 64, 64), "ValueError"),
    "arena of everything": (lambda: native.Lowering(0, I64, 64, 64), "ValueError"),
    "arena of less": (lambda: native.Lowering(0, -1, 64, 64), "ValueError"),
    "no zeros": (lambda: native.Lowering(0, 64, 64, 0), "ValueError"),
    "zeros of everything": (lambda: native.Lowering(0, 64, 64, I64), "ValueError"),
    "columns cut": (lambda: lowering().add_group(0, 0, bytes(31), 64, 4), "ValueError"),
    "columns of None": (lambda: lowering().add_group(0, 0, None, 64, 4), "TypeError"),
    "page past its block": (lambda: lowering().add_group(0, 0, columns((1, 64, 65, 0)), 64, 4), "ValueError"),
    "page past all numbers": (lambda: lowering().add_group(0, 0, columns((1, 64, 64, I64 - 8)), 64, 4), "ValueError"),
    "page of everything": (lambda: lowering().add_group(0, 0, columns((1, 1, I64, 0)), I64, 4), "ValueError"),
    "page of nothing": (lambda: lowering().add_group(0, 0, columns((1, 64, 0, 0)), 64, 4), "ValueError"),
    "page below": (lambda: lowering().add_group(0, 0, columns((-64, 64, 64, 0)), 64, 4), "ValueError"),
    "stride below": (lambda: lowering().add_group(0, 0, columns((64, -64, 64, 0)), 64, 4), "ValueError"),
    "stride of everything": (lambda: lowering().add_group(0, 0, columns((64, I64, 64, 0)), 64, 4), "ValueError"),
    "blocks below": (lambda: lowering().add_group(0, 0, b"", 64, -1), "ValueError"),
    "blocks without end": (lambda: lowering().add_group(0, 0, b"", 64, I64), "ValueError"),
    "block of less": (lambda: lowering().add_group(0, 0, b"", -64, 4), "ValueError"),
    "block of everything": (lambda: lowering().add_group(0, 0, b"", I64, 4), "ValueError"),
    "tokens below": (lambda: lowering().add_group(0, -1, b"", 64, 4), "ValueError"),
    "part of nothing": (lambda: lowering().add_part(0, 4, 4, b"", 64, 4), "ValueError"),
    "part from below": (lambda: lowering().add_part(0, -1, 4, b"", 64, 4), "ValueError"),
    "part of fewer blocks": (part_of_fewer_blocks, "ValueError"),
    "load of no group": (lambda: lower(lowering(), group_index=7), "ValueError"),
    "load of a block below": (lambda: lower(lowering(), ids=(-1,)), "ValueError"),
    "load of a block beyond": (lambda: lower(lowering(), ids=(4,)), "ValueError"),
    "load of fewer blocks": (lambda: lower(lowering(), ids=()), "ValueError"),
    "load of more blocks": (lambda: lower(lowering(), ids=(0, 0)), "ValueError"),
    "load of copies below": (lambda: lower(lowering(), num_copies=-1), "ValueError"),
    "load of blocks below": (lambda: lower(lowering(), num_blocks=-1), "ValueError"),
    "load from a slot below": (lambda: lower(lowering(), slot=(-64, 64)), "ValueError"),
    "load from a slot beyond": (lambda: lower(lowering(), slot=(1 << 20, 64)), "ValueError"),
    "load from a slot of everything": (lambda: lower(lowering(), slot=(0, I64)), "ValueError"),
    "load from a slot that is short": (lambda: lower(lowering(), slot=(0, 63)), "ValueError"),
    "load from slots larger than the arena": (
        lambda: lower(lowering(), slot=(0, 1 << 20, 0, 64), num_extents=2),
        "ValueError",
    ),
    "copies without end": (
        lambda: lower(lowering(), ids=(), slot=(), num_copies=2**31 - 1, num_blocks=0, num_extents=0),
        "ValueError",
    ),
    "stores without end": (
        lambda: lower(lowering(), True, (), (), num_copies=2**31 - 1, num_blocks=0, num_extents=0, stored_blocks=0),
        "ValueError",
    ),
    "chunk of everything": (
        lambda: lower(big_blocks(), first_block=2**31 - 2, stored_blocks=2**31 - 1),
        "ValueError",
    ),
    "zeros without end": (lambda: lower(zeros_without_end(), True, slot=(0, 1 << 40)), "ValueError"),
    "pages without end": (pages_without_end, "ValueError"),
    "copies of more bytes than there are": (copies_without_end, "ValueError"),
    "shapes cut": (lambda: lowering().lower(False, bytes(39), b"", b"", b""), "ValueError"),
    "ids cut": (lambda: lowering().lower(False, shape(), bytes(3), b"", bytes(16)), "ValueError"),
    "slots cut": (lambda: lowering().lower(False, shape(), bytes(4), b"", bytes(15)), "ValueError"),
    "shapes of None": (lambda: lowering().lower(False, None, b"", b"", b""), "TypeError"),
    # RecordQueue
    "queue never made": (lambda: never_made("RecordQueue").take(), "TypeError"),
    "queue made twice": (lambda: queue().__init__(2, 1 << 20, 8), "TypeError"),
    "queue of none in flight": (lambda: queue(0, 1, 8), "ValueError"),
    "queue of 4097 in flight": (lambda: queue(4097, 1, 8), "ValueError"),
    "queue of 2^63 in flight": (lambda: queue(2**63, 1, 8), "ValueError"),
    "queue of -1 in flight": (lambda: queue(-1, 1, 8), "TypeError"),
    "queue of empty batches": (lambda: queue(2, 0, 8), "ValueError"),
    "digest after the page": (lambda: queue(2, 1, PAGE - 31), "ValueError"),
    "digest past all numbers": (lambda: queue(2, 1, U64 - 16), "ValueError"),
    "record of no file": (lambda: submit(fd=-1), "ValueError"),
    "record of a file of 32 bits": (lambda: submit(fd=U32), "TypeError"),
    "record below": (lambda: submit(offset=-PAGE), "ValueError"),
    "record past the end": (lambda: submit(offset=2**63 - PAGE), "ValueError"),
    "record between pages": (lambda: submit(offset=1), "ValueError"),
    "record without a header": (lambda: submit(header=b""), "ValueError"),
    "record with a long header": (lambda: submit(header=bytes(PAGE)), "ValueError"),
    "record of nothing": (lambda: submit(buffers=[]), "ValueError"),
    "record of 4 GiB": (lambda: submit(is_store=True, buffers=[MEMORY] * (1 << 20)), "ValueError"),
    "record of None": (lambda: submit(buffers=None), "TypeError"),
    "record of numbers": (lambda: submit(buffers=[1]), "TypeError"),
    "record of read-only memory": (lambda: submit(buffers=[b"x"]), "BufferError"),
    "record of strided memory": (lambda: submit(buffers=[memoryview(bytearray(8))[::2]]), "BufferError"),
    "record submitted during another submit": (reentered, "ValueError"),
    # ledgers
    "granules never made": (lambda: never_made("GranuleLedger").clear(), "TypeError"),
    "no granules": (lambda: granules(0), "ValueError"),
    "2^32 granules": (lambda: granules(U32), "ValueError"),
    "-1 granules": (lambda: granules(-1), "TypeError"),
    "granules of nothing": (lambda: granules(8, 0), "ValueError"),
    "granules of everything": (lambda: granules(8, U64 - 1), "ValueError"),
    "granules without keys": (lambda: granules(8, 64, 0), "ValueError"),
    "more keys than granules": (lambda: granules(8, 64, 9), "ValueError"),
    "granules of a seed of 65 bits": (lambda: granules(seed=U64), "TypeError"),
    "two answers": (lambda: granules(answers=(0, 1)), "ValueError"),
    "five refusals": (lambda: granules(refusals=(0, 1, 2, 3, 4)), "ValueError"),
    "slots of None": (lambda: granules(make_slot=None), "TypeError"),
    "misuse that is no error": (lambda: granules(misuse=int), "TypeError"),
    "misuse of None": (lambda: records(misuse=None), "TypeError"),
    "reserve of nothing": (lambda: granules().reserve(KEY, 0), "MisuseError"),
    "reserve of less": (lambda: granules().reserve(KEY, -(2**70)), "MisuseError"),
    "reserve of a float": (lambda: granules().reserve(KEY, 1.5), "TypeError"),
    "reserve of a string": (lambda: granules().reserve("key", 1), "TypeError"),
    "reserve of None": (lambda: granules().reserve_all(None), "TypeError"),
    "reserve of keys": (lambda: granules().reserve_all([KEY]), "TypeError"),
    "reserve of one": (lambda: granules().reserve_all([(KEY,)]), "TypeError"),
    "commit of an unknown key": (lambda: granules().commit(KEY), "MisuseError"),
    "commit of unknown keys": (lambda: granules().commit_all([KEY]), "MisuseError"),
    "abort of an unknown key": (lambda: granules().abort(KEY), "MisuseError"),
    "unpin of an unknown key": (lambda: granules().unpin(KEY), "MisuseError"),
    "lookup of a number": (lambda: granules().lookup(1), "TypeError"),
    "leading of numbers": (lambda: granules().leading([1]), "TypeError"),
    "last of a number": (lambda: granules().last_held(1), "TypeError"),
    "watch of less": (lambda: granules().watch_at_most(-1), "TypeError"),
    "records never made": (lambda: never_made("RecordLedger").forget_all(), "TypeError"),
    "records without keys": (lambda: records(max_keys=0), "ValueError"),
    "records of 2^32 keys": (lambda: records(max_keys=U32), "ValueError"),
    "records of pages without end": (lambda: records(U64 - 1, U64 - 1), "ValueError"),
    "records of three states": (lambda: records(states=(1, 2, 3)), "ValueError"),
    "take beyond max_keys": (lambda: full_records().take(b"one more", 1, 0), "MisuseError"),
    "take beyond all pages": (lambda: full_records().take(b"one more", 5 * PAGE, 0), "MisuseError"),
    "take of a present key": (lambda: full_records().take(b"0", 1, 0), "MisuseError"),
    "take of a record that is too large": (lambda: records().take(KEY, 4 * PAGE, 0), "MisuseError"),
    "take of a long key": (lambda: records().take(bytes(1 << 16), 1, 0), "MisuseError"),
    "take when closed": (lambda: closed_records().take(KEY, 1, 0), "MisuseError"),
    "take of 2^32 bytes": (lambda: records().take(KEY, U32, 0), "TypeError"),
    "take at an address below": (lambda: records().take(KEY, 1, -1), "TypeError"),
    "take without room made": (lambda: committed_records().take(b"one more", 1, 0), "MisuseError"),
    "room without end": (lambda: records().make_room(U64 - 1, 1), "ValueError"),
    "room for keys without end": (lambda: records().make_room(1, U32), "TypeError"),
    "why not a number": (lambda: records().why_not(1, 1), "TypeError"),
    "a segment below": (lambda: records().held_in(-1), "TypeError"),
    "a segment of 33 bits": (lambda: records().movable_in(U32), "TypeError"),
    "restore of short columns": (lambda: records().restore([KEY], b"", b""), "ValueError"),
    "restore of cut columns": (lambda: records().restore([KEY], bytes(9), bytes(8)), "ValueError"),
    "restore of long columns": (lambda: records().restore([KEY], bytes(16), bytes(16)), "ValueError"),
    "restore of 2^32 bytes": (lambda: records().restore([KEY], bytes(8), struct.pack("Q", U32)), "ValueError"),
    "restore of strings": (lambda: records().restore(["key"], bytes(8), bytes(8)), "TypeError"),
    "a walk of no step": (lambda: records().walk(records().begin_walk(), 0), "ValueError"),
    "a walk of steps below": (lambda: records().walk(0, -1), "TypeError"),
}
"""Name: the call and the error that it raises."""


def big_blocks() -> Any:
    """Blocks so large that a chunk of the maximal number of blocks exceeds 64 bits."""
    made = native.Lowering(1 << 20, 1 << 20, 1 << 30, 64)
    made.add_group(0, 0, columns((1 << 32, 64, 64, 0)), 1 << 33, 4)
    return made


def zeros_without_end() -> Any:
    """A chunk of 64 bytes in a slot of 1 TiB, with one byte of zeros as the source of the rest."""
    made = native.Lowering(1 << 20, 1 << 40, 1 << 50, 1)
    made.add_group(0, 0, columns((1 << 51, 64, 64, 0)), 64, 4)
    return made


def closed_records() -> Any:
    ledger = records()
    ledger.refuse_all()
    return ledger


def committed_records() -> Any:
    """A full ledger. One more record would evict another one."""
    ledger = full_records()
    ledger.commit_all([b"%d" % number for number in range(4)])
    return ledger


ANSWERED: dict[str, tuple[Callable[[], object], object]] = {
    "copy of nothing from nowhere": (lambda: COPY.copy(integers(0), integers(-1), integers(0)), None),
    "copy of no runs": (lambda: COPY.copy(integers(), integers(), integers()), None),
    "rows of steps without end": (lambda: expand(5, 5, step=I64), None),
    "no rows": (lambda: native.expand_rows(*[integers()] * 4), None),
    "a file that is not open": (submit, (1, 9)),
    "a pipe": (lambda: with_pipe()[0] in (0, 1, 2, 3), True),  # type: ignore[index]
    "a file that ends": (with_a_file_that_ends, (1, 61)),
    "reserve of too much": (lambda: granules().reserve(KEY, 2**70), 4),
    "pins of one key": (many_pins, 1),
    "a key without bytes": (lambda: granules().reserve(b"", 1) == (((0, 1),)), True),
    "restore beyond max_keys": (lambda: records().restore([b"%d" % n for n in range(9)], bytes(72), bytes(72)), 4),
    "restore of one key twice": (lambda: records().restore([KEY, KEY], bytes(16), bytes(16)), 1),
    "restore when closed": (lambda: closed_records().restore([KEY], bytes(8), bytes(8)), 0),
    "a walk that was not begun": (lambda: records().walk(7, 1), None),
    "a missing segment": (lambda: (records().held_in(U32 - 1), records().drop_segment(7)), ([], None)),
    "another refusal": (lambda: records().count_refusal("another"), None),
    "relocate of a missing key": (lambda: records().relocate(KEY, 0), False),
    "evict of a missing key": (lambda: (records().evict(KEY), records().evict_next()), (False, None)),
    "a wait of no number": (lambda: queue().wait_until_idle(float("nan")), True),
    "submit when closed": (submit_when_closed, False),
}
"""Name: the call and its result."""


def calls() -> Iterator[tuple[str, Callable[[], object], object]]:
    for name, (call, wanted) in (REFUSED | ANSWERED).items():
        yield name, call, wanted


def main(first: int) -> None:
    for name, call, wanted in list(calls())[first:]:
        print(f"{name}\t", end="", flush=True)
        signal.alarm(HANGS_AFTER_S)
        try:
            answer = call()
        except Exception as error:
            outcome = "as wanted" if type(error).__name__ == wanted else f"{type(error).__name__}: {error}"
        else:
            is_wanted = answer == wanted and name in ANSWERED
            outcome = "as wanted" if is_wanted else f"answered {answer!r}"
        print(outcome[:200].replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
