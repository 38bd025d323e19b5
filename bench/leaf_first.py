"""A ledger that knows what each key extends, beside today's: the same requests, hit rates and time.

A key may be evicted when nothing that is held extends it, and goes in the order in which such keys were used last. So a
path is made recent by one touch of its last key, where today every key of it is touched, from its end on.

    python bench/leaf_first.py FOLDER NAME SIZE...
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from reuse_files import read_all

from hybridkv.cli.simulation.store import CostModel, unique_chunks
from hybridkv.cli.simulation.traces import Trace
from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Refusal
from hybridkv.tiers.ram import RamIndex
from kits.plain_ram_index import PlainRamIndex

COSTS = CostModel()


class Store(Protocol):
    """Of one tier, as far as this bench goes. Keys name chunks of attention by numbers, states by their negatives."""

    def held(self, path: Sequence[int]) -> int:
        """How many of a path's chunks are held, from its beginning on."""
        ...

    def has(self, key: int) -> bool: ...

    def use(self, path: Sequence[tuple[int, int]]) -> None:
        """Store what is lacking of a path of keys and their bytes, and make all of it recent."""
        ...


class Leaves:
    """The prototype. An entry is [bytes, the key it extends, entries that extend it]."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._entries: dict[int, list[int]] = {}
        self._leaves: OrderedDict[int, None] = OrderedDict()

    def held(self, path: Sequence[int]) -> int:
        entries = self._entries
        return next((place for place, key in enumerate(path) if key not in entries), len(path))

    def has(self, key: int) -> bool:
        return key in self._entries

    def use(self, path: Sequence[tuple[int, int]]) -> None:
        entries, leaves = self._entries, self._leaves
        extends = 0
        for key, num_bytes in path:
            entry = entries.get(key)
            if entry is None:
                # What it extends is no leaf while room is made, so a path never pushes out itself.
                if extends:
                    entries[extends][2] += 1
                    leaves.pop(extends, None)
                while self._free < num_bytes and leaves:
                    self._evict(next(iter(leaves)))
                if self._free < num_bytes:
                    self._let_go(extends)
                    break
                self._free -= num_bytes
                entry = entries[key] = [num_bytes, extends, 0]
                leaves[key] = None
            if key > 0:
                extends = key
        for key, _ in reversed(path):
            if key in leaves:
                leaves.move_to_end(key)

    def _evict(self, key: int) -> None:
        num_bytes, extends, _ = self._entries.pop(key)
        del self._leaves[key]
        self._free += num_bytes
        self._let_go(extends)

    def _let_go(self, extends: int) -> None:
        """It is extended by one less. As a leaf it is as old as what extended it, so it is the next to go."""
        if extends:
            entry = self._entries[extends]
            entry[2] -= 1
            if not entry[2]:
                self._leaves[extends] = None
                self._leaves.move_to_end(extends, last=False)


class Touched:
    """Today's: the ledger's model, in which all of a path is touched from its end on."""

    def __init__(self, index: PlainRamIndex | RamIndex) -> None:
        self._index = index

    def held(self, path: Sequence[int]) -> int:
        return self._index.leading([b"%d" % key for key in path])

    def has(self, key: int) -> bool:
        return self._index.lookup(b"%d" % key) is not LookupResult.MISS

    def use(self, path: Sequence[tuple[int, int]]) -> None:
        index, named = self._index, [(b"%d" % key, num_bytes) for key, num_bytes in path]
        keys = [key for key, _ in named]
        index.touch(reversed(keys))
        for key, num_bytes in named:
            if index.lookup(key) is LookupResult.MISS and not isinstance(index.reserve(key, num_bytes), Refusal):
                index.commit(key)
        index.touch(reversed(keys))


@dataclass(frozen=True, slots=True)
class Outcome:
    """`hit_rate` in percent, `use_us` of one request, in microseconds, lookups left out."""

    hit_rate: float
    use_us: float


def run(trace: Trace, store: Store, *, has_states: bool) -> Outcome:
    """Every prompt's end leaves a state, where there are states; and so does the junction that the store saw."""
    total = hits = 0
    seconds = 0.0
    for request in trace.requests:
        path = [number + 1 for number in request.chunks]
        end = (request.num_tokens - 1) // trace.chunk_tokens
        held = resumed = store.held(path[:end])
        if has_states:
            resumed = next((place for place in range(held, 0, -1) if store.has(-path[place - 1])), 0)
        stops = {resumed, held, end} if has_states else set()
        wanted = []
        for place, key in enumerate(path, 1):
            wanted.append((key, 1))
            if place in stops:
                wanted.append((-key, COSTS.state_chunks))
        began = time.process_time()
        store.use(wanted)
        seconds += time.process_time() - began
        total += request.num_tokens
        hits += resumed * trace.chunk_tokens
    return Outcome(round(100 * hits / total, 2), round(1e6 * seconds / len(trace.requests), 1))


def main() -> None:
    folder, name, sizes = Path(sys.argv[1]), sys.argv[2], [float(each) for each in sys.argv[3:]]
    (trace,) = (each for each in read_all(folder) if each.name == name)
    for has_states in (True, False):
        for size in sizes:
            capacity = int(unique_chunks(trace, COSTS) * size / 100)
            stores = {
                "today": Touched(PlainRamIndex(capacity, 1)),
                "today, C++": Touched(RamIndex(capacity, 1)),
                "leaves": Leaves(capacity),
            }
            print(f"{name}, {'states' if has_states else 'attention alone'}, {size} %:")
            for called, store in stores.items():
                outcome = run(trace, store, has_states=has_states)
                print(f"  {called}: {outcome.hit_rate} %, {outcome.use_us} us a request", flush=True)


if __name__ == "__main__":
    main()
