"""Random calls of each class of hybridkv.native. A test runs them in their own process.

`python random_calls.py CLASS SEED INPUTS SECONDS` creates an object for each seed from SEED on, and calls it with
mostly valid arguments; for INPUTS seeds, or for SECONDS if that is above 0. A call may return or raise a Python error;
a crash or a hang ends the process. It prints the seed before each object, and counts of calls as JSON at the end.
`_Play.check` has the conditions after each call.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from bad_calls import HANGS_AFTER_S, PAGE, MisuseError

from hybridkv import native

MAX_CALLS = 150
FILE_BYTES = 64 * PAGE
ERRORS = (
    TypeError,
    ValueError,
    OverflowError,
    IndexError,
    BufferError,
    MemoryError,
    OSError,
    RuntimeError,
    MisuseError,
)
NUMBERS = (0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**70, -(2**63))
WILD: tuple[Any, ...] = (
    *NUMBERS, None, True, 1.5, float("nan"), float("inf"), "", "key", b"", b"key", bytes(70000), bytearray(8), (), [],
    {}, [None], [b"key", 1], [[b"key"]], object, np.zeros(2, np.int64), np.zeros((2, 2)), memoryview(bytes(8))[::2],
)  # fmt: skip

OFTEN = {"reserve", "take", "commit", "commit_all", "pin", "pin_all", "unpin", "unpin_all", "submit"}
RARE = {"close", "refuse_all", "clear", "forget_all"}

Make = Callable[[], Any]


class _Play:
    """An object, and generators of arguments for its calls.

    `calls` has every public name of the object's class: None for a property, generators of the arguments for a method.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.made: Any = None
        self.calls: dict[str, tuple[Make, ...] | None] = {}

    def check(self, name: str, arguments: list[Any], answer: Any) -> None:
        """Check the conditions after a successful call."""

    def end(self) -> None:
        """Close the object."""

    def number(self, *mostly: int) -> Make:
        return lambda: self.rng.choice(mostly if self.rng.random() < 0.9 else NUMBERS)


class _LedgerPlay(_Play):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.keys = [bytes([number]) * rng.choice((1, 40, 48, 49, 200)) for number in range(7)]
        self.max_keys = rng.randint(1, 12)
        self.options = {
            "seed": rng.choice((0, 1, 2**64 - 1)),
            "answers": ("miss", "pending", "hit"),
            "refusals": ("no room", "too large", "present", "closed"),
            "make_slot": tuple if rng.random() < 0.95 else rng.choice((int, self.refuse)),
            "misuse": MisuseError,
        }
        key, keys = self.key, self.some_keys
        none: tuple[Make, ...] = ()
        self.calls = dict.fromkeys(
            ("num_keys", "num_reserved", "num_pinned", "generation", "is_closed", "max_index_bytes", "leftover_bytes")
        )
        self.calls |= dict.fromkeys(("max_keys", "used_bytes"))
        self.calls |= dict.fromkeys(("lacks", "lookup", "find", "abort", "invalidate"), (key,))
        self.calls |= dict.fromkeys(("leading", "last_held", "any_pending", "touch"), (keys,))
        self.calls |= dict.fromkeys(("commit_all", "pin_all", "unpin_all"), (keys,))
        self.calls |= dict.fromkeys(("eviction_order", "take_tally", "take_changed"), none)
        self.calls["watch_at_most"] = (self.number(0, 3, 100),)

    def refuse(self, extents: object) -> object:
        raise ValueError(extents)

    def key(self) -> bytes:
        return self.rng.choice(self.keys)

    def some_keys(self) -> Any:
        keys = [self.key() for _ in range(self.rng.choice((0, 1, 1, 2, 5, 300)))]
        return self.rng.choice((list, tuple, iter, dict.fromkeys))(keys)

    def check(self, name: str, arguments: list[Any], answer: Any) -> None:
        ledger = self.made
        assert ledger.num_keys <= ledger.max_keys, "more keys than allowed"
        assert ledger.num_reserved + ledger.num_pinned <= ledger.max_keys, "more keys in use than allowed"
        assert len(ledger.eviction_order()) <= ledger.num_keys, "more evictable keys than keys"
        assert ledger.used_bytes <= self.capacity_bytes, "more bytes than the capacity"

    capacity_bytes = 0


class GranulePlay(_LedgerPlay):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        num_granules, granule_bytes = self.number(self.max_keys, self.max_keys + 30)(), self.number(64)()
        self.made = native.GranuleLedger(num_granules, granule_bytes, self.number(self.max_keys)(), **self.options)
        self.capacity_bytes = granule_bytes * num_granules
        size = self.number(1, 63, 64, 65, 500)
        self.calls |= {
            "capacity_bytes": None,
            "granule_bytes": None,
            "clear": (),
            "close": (),
            "reserve": (self.key, size),
        }
        self.calls["reserve_all"] = (lambda: [(self.key(), size()) for _ in range(rng.randint(0, 6))],)
        self.calls |= dict.fromkeys(("commit", "pin", "unpin"), (self.key,))
        self.calls["invalidate_all"] = (self.some_keys,)


class RecordPlay(_LedgerPlay):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        num_pages, largest_pages = self.number(5, 20, 60)(), self.number(1, 3, 12)()
        states = ("reserved", "committed", "doomed write", "doomed read")
        self.made = native.RecordLedger(
            num_pages, largest_pages, self.number(self.max_keys)(), states=states, **self.options
        )
        # An opening may restore more; reservations enforce the limit.
        self.capacity_bytes = num_pages * PAGE + self.made.max_keys * 2**33
        size, pages = self.number(1, PAGE, 5 * PAGE), self.number(0, 1, 3, 9)
        address = self.number(0, PAGE, 2**32, 2**32 + PAGE)
        segment = self.number(0, 1, 2)
        none: tuple[Make, ...] = ()
        self.calls |= {"has_evictable": None, "why_not": (self.key, pages), "take": (self.key, size, address)}
        self.calls |= dict.fromkeys(("reserved", "in_use", "evict_next", "begin_walk", "forget_all"), none)
        self.calls |= dict.fromkeys(("held_in", "movable_in", "drop_segment"), (segment,))
        self.calls |= {"count_refusal": (lambda: rng.choice(self.options["refusals"]),), "refuse_all": ()}
        self.calls |= {"make_room": (pages, self.number(0, 1, 2)), "evict": (self.key,), "count_evicted": (pages,)}
        self.calls |= dict.fromkeys(("raise_not_reserved", "raise_not_pinned"), (self.key,))
        self.calls |= {"relocate": (self.key, address), "walk": (self.number(1, 2, 3), self.number(1, 4))}
        self.calls["restore"] = (self.keys_again, self.column, self.column)
        self.num_restored = 0

    def keys_again(self) -> list[bytes]:
        self.num_restored = self.rng.randint(0, 5)
        return [self.key() for _ in range(self.num_restored)]

    def column(self) -> bytes:
        numbers = [self.rng.choice((1, PAGE, 2**32 - 1)) for _ in range(self.num_restored)]
        return np.array(numbers, np.uint64).tobytes() + (b"" if self.rng.random() < 0.9 else b"more")


class QueuePlay(_Play):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        backends = ["best", "threads"] + (["io_uring"] if native.has_uring() else [])
        self.digest_at = rng.choice((0, 8, 100) if rng.random() < 0.9 else (PAGE - 32, PAGE - 31, 2**64 - 16))
        batch_bytes = self.number(1, PAGE, 1 << 20)()
        self.made = native.RecordQueue(self.number(1, 2, 9)(), batch_bytes, self.digest_at, rng.choice(backends))
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.file.truncate(FILE_BYTES)
        self.read_only = os.open("/proc/self/exe", os.O_RDONLY)
        self.folder = os.open("/", os.O_RDONLY)
        flag = lambda: self.rng.random() < 0.5  # noqa: E731
        self.calls = {"backend": None, "uring_error": None, "num_transfers": None, "take": ()}
        self.calls |= dict.fromkeys(("wait_until_idle", "close"), (self.timeout_s,))
        submit = (self.number(*range(20)), flag, self.fd, self.offset, flag, flag, self.header, self.buffers)
        self.calls["submit"] = submit

    def timeout_s(self) -> float:
        return self.rng.choice((0.0, -1.0, 0.001, float("nan"), 1e300, float("inf")))

    def fd(self) -> int:
        # Small numbers may be descriptors of this process.
        mine = self.file.fileno()
        return mine if self.rng.random() < 0.7 else self.rng.choice((self.read_only, self.folder, -1, 1 << 30, 2**31))

    def offset(self) -> int:
        mostly = (0, PAGE, 2 * PAGE, FILE_BYTES)
        return self.rng.choice(mostly if self.rng.random() < 0.9 else (1, -PAGE, 2**62, 2**63 - PAGE, 2**63))

    def header(self) -> bytes:
        return bytes(self.digest_at + self.rng.choice((16, 40) if self.rng.random() < 0.9 else (0, 15, PAGE)))

    def buffers(self) -> list[Any]:
        sizes = [self.rng.choice((0, 1, PAGE - 1, PAGE, 3 * PAGE)) for _ in range(self.rng.randint(1, 4))]
        return [bytearray(size) if self.rng.random() < 0.95 else bytes(size) for size in sizes]

    def check(self, name: str, arguments: list[Any], answer: Any) -> None:
        if name == "take":
            assert all(0 <= outcome <= 4 for _, outcome, *_ in answer), "unknown outcome"

    def end(self) -> None:
        assert self.made.close(float("inf")), "the queue did not finish"
        self.file.close()
        os.close(self.read_only)
        os.close(self.folder)


class CopierPlay(_Play):
    """Uses addresses of existing memory, and addresses that no memory can have. Only the caller can check others."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.memory = np.zeros(2 * PAGE, np.uint8)
        caching = rng.choice(("by_size", "cached", "streamed"))
        self.made = native.MemoryCopier(self.number(1, 2, 3)(), rng.choice(native.levels()), caching)
        self.count = 0
        self.calls = {
            "copy": (self.sources, self.destinations, self.sizes),
            "copy_and_digest": (self.sources, self.destinations, self.sizes, self.ends),
            "digest": (self.sources, self.sizes, self.ends),
        }

    def sources(self) -> Any:
        self.count = self.rng.choice((0, 1, 2, 7))
        return self.array(self.memory.ctypes.data)

    def destinations(self) -> Any:
        return self.array(self.memory.ctypes.data + PAGE)

    def array(self, at: int) -> Any:
        return np.array(
            [at if self.rng.random() < 0.98 else self.rng.choice((0, -1, 2**56, 2**63 - 1)) for _ in range(self.count)],
            np.int64,
        )

    def sizes(self) -> Any:
        sizes = (0, 1, 63, 1024, PAGE)
        wild = (-1, -(2**63), 2**56, 2**63 - 1)
        return np.array(
            [self.rng.choice(sizes if self.rng.random() < 0.98 else wild) for _ in range(self.count)], np.int64
        )

    def ends(self) -> Any:
        ends = [*sorted(self.rng.randint(0, self.count) for _ in range(self.rng.randint(0, 3))), self.count]
        if self.rng.random() < 0.1:
            ends.insert(0, self.rng.choice((-1, 99, 2**63 - 1)))
        return np.array(ends, np.int64)


class LoweringPlay(_Play):
    """No memory is accessed, so any numbers may be used: each returned run must lie within the given ranges."""

    ARENA, ARENA_BYTES, ZEROS, ZEROS_BYTES, POOL = 1 << 40, 1 << 16, 1 << 41, 64, 1 << 42

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.made = native.Lowering(self.ARENA, self.ARENA_BYTES, self.ZEROS, self.ZEROS_BYTES)
        self.block_bytes, self.num_blocks = rng.choice((64, 256)), rng.randint(1, 9)
        group = self.number(0, 0, 1)
        pages = (self.columns, lambda: self.block_bytes, lambda: self.num_blocks)
        rows = (self.shapes, self.block_ids, self.local_ids, self.extents)
        self.calls = {
            "add_group": (group, self.number(0, 4), *pages),
            "add_part": (group, self.number(0, 1, 3), self.number(3, 4), *pages),
            "lower": (lambda: rng.random() < 0.5, *rows),
        }
        self.counts = (0, 0, 0)
        self.pages: set[tuple[int, int, int, int]] = set()
        """Address, stride, bytes and number of blocks of each added page."""

    def odd(self, number: int, bits: int) -> int:
        if self.rng.random() < 0.99:
            return number
        return self.rng.choice((-1, 0, 1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 2 ** (bits - 2)))

    def columns(self) -> bytes:
        rows, offset = [], 0
        for _ in range(self.rng.randint(0, 3)):
            page_bytes = self.rng.choice((1, 16, 64))
            address = self.POOL + 4 * offset
            rows.append([self.odd(number, 64) for number in (address, 4096, page_bytes, offset)])
            offset += page_bytes + self.rng.choice((0, 8))
        return np.array(rows, np.int64).tobytes()

    def shapes(self) -> bytes:
        rows, counts = [], np.zeros(3, np.int64)
        for _ in range(self.rng.randint(0, 3)):
            stored = self.rng.randint(1, 3)
            first = self.rng.choice((0, 0, stored - 1))
            num_blocks = stored - first
            num_local = num_blocks if self.rng.random() < 0.2 else 0
            copies, extents = self.rng.randint(0, 2), self.rng.randint(1, 2)
            cut = self.rng.choice((0, 0, 1, 3))
            row = (copies, self.rng.choice((0, 0, 1)), first, num_blocks, stored, cut, 0, num_local, extents, 0)
            rows.append([self.odd(number, 32) for number in row])
            counts += copies * np.array((num_blocks, num_local, extents))
        self.counts = tuple(counts.tolist())
        return np.array(rows, np.int32).tobytes()

    def block_ids(self) -> bytes:
        return self.ids(self.counts[0])

    def local_ids(self) -> bytes:
        return self.ids(self.counts[1])

    def ids(self, count: int) -> bytes:
        return np.array([self.odd(self.rng.randrange(self.num_blocks), 32) for _ in range(count)], np.int32).tobytes()

    def extents(self) -> bytes:
        rows = [
            [self.odd(self.rng.choice((0, 512, 4096)), 64), self.odd(self.rng.choice((64, 512, 1024)), 64)]
            for _ in range(self.counts[2])
        ]
        return np.array(rows, np.int64).tobytes()

    def check(self, name: str, arguments: list[Any], answer: Any) -> None:
        if name != "lower":
            rows = np.frombuffer(arguments[-3], np.int64).reshape(-1, 4).tolist()
            self.pages |= {(address, stride, page_bytes, arguments[-1]) for address, stride, page_bytes, _ in rows}
            return
        rows, num_runs, total_bytes, spans, ends, _ = answer
        arrays = [np.empty(num_runs, np.int64) for _ in range(3)]
        native.expand_rows(rows, *arrays)
        sources, destinations, sizes = (array.tolist() for array in arrays)
        assert sum(sizes) == total_bytes
        assert ends.tolist() == sorted(ends.tolist()) and all(end <= len(sizes) for end in ends.tolist())
        is_store = arguments[0]
        for source, destination, size in zip(sources, destinations, sizes, strict=True):
            assert size > 0
            assert spans[0] <= source <= source + size <= spans[1], (source, size)
            assert spans[2] <= destination <= destination + size <= spans[3], (destination, size)
            assert self.is_in_arena(destination, size) if is_store else self.is_page(destination, size), (
                destination,
                size,
            )
            is_good = self.is_page(source, size) or (
                self.ZEROS <= source <= source + size <= self.ZEROS + self.ZEROS_BYTES
                if is_store
                else self.is_in_arena(source, size)
            )
            assert is_good, (source, size)

    def is_in_arena(self, at: int, size: int) -> bool:
        return self.ARENA <= at <= at + size <= self.ARENA + self.ARENA_BYTES

    def is_page(self, at: int, size: int) -> bool:
        """True for a range in pages, which may be adjacent in memory."""
        end = at + size
        while at < end:
            bytes_left = max((self.page_bytes_from(at, *page) for page in self.pages), default=0)
            if bytes_left <= 0:
                return False
            at += bytes_left
        return True

    def page_bytes_from(self, at: int, begin: int, stride: int, page_bytes: int, num_blocks: int) -> int:
        """Bytes from an address to the end of the page that contains it; none if no page does."""
        distance = at - begin
        number = distance // stride if stride > 0 else max(0, -(distance // -stride)) if stride < 0 else 0
        offset = distance - min(number, num_blocks - 1) * stride
        return page_bytes - offset if number >= 0 and offset >= 0 else 0


PLAYS: dict[str, type[_Play]] = {
    "GranuleLedger": GranulePlay,
    "RecordLedger": RecordPlay,
    "RecordQueue": QueuePlay,
    "MemoryCopier": CopierPlay,
    "Lowering": LoweringPlay,
}


def play(kind: str, seed: int, called: Counter[str], answered: Counter[str]) -> None:
    rng = random.Random(seed)
    try:
        one = PLAYS[kind](rng)
    except ERRORS:
        return
    public = {name for name in dir(one.made) if not name.startswith("_")}
    assert public == set(one.calls), public ^ set(one.calls)
    names = [name for name in sorted(public) for _ in range(4 if name in OFTEN else 1)]
    for _ in range(rng.randint(1, MAX_CALLS)):
        name = rng.choice(names)
        if name in RARE and rng.random() < 0.95:
            continue
        makers = one.calls[name]
        arguments = [make() for make in makers or ()]
        is_address = kind == "MemoryCopier"
        if arguments and rng.random() < 0.1:
            wild = [value for value in WILD if not (is_address and isinstance(value, np.ndarray))]
            place = rng.randrange(len(arguments))
            # Only descriptors of this process that were opened for the test.
            is_fd = kind == "RecordQueue" and name == "submit" and place == 2
            arguments[place] = rng.choice([v for v in wild if not is_fd or not isinstance(v, (int, float))])
            if rng.random() < 0.1:
                arguments.pop()
        called[name] += 1
        try:
            answer = getattr(one.made, name)
            if makers is not None:
                answer = answer(*arguments)
        except ERRORS as error:
            if "nanobind" in str(error):
                raise
            continue
        answered[name] += 1
        one.check(name, arguments, answer)
    one.end()


def main(kind: str, seed: int, inputs: int, seconds: float) -> None:
    called: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    end = time.monotonic() + seconds
    tried = 0
    while time.monotonic() < end if seconds else tried < inputs:
        print(f"{kind} of seed {seed + tried}", file=sys.stderr, flush=True)
        signal.alarm(HANGS_AFTER_S)
        play(kind, seed + tried, called, answered)
        tried += 1
    print(json.dumps({"tried": tried, "called": called, "answered": answered}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
