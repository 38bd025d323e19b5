"""Simulation of engines that share an object store: real indexes, names and manifests, no bytes and no threads.

Each engine has a `RamIndex` over an `ObjectIndex`, as in a connector. `SimulatedClient` replaces the manifest store: it
searches with the same `find_last`, builds manifests with the same `Paths` and the same encoder, and counts
the requests that the manifest store and the medium would send.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from hybridkv.cli.simulation.traces import TraceRequest
from hybridkv.hashing import TAG_BYTES
from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.object import (
    ClientEvent,
    LookupAnswered,
    ObjectIndex,
    ObjectOptions,
    ObjectSlot,
    PackPlace,
    StoreCounts,
)
from hybridkv.tiers.object.format.manifest import ManifestNode, encode_manifest
from hybridkv.tiers.object.format.record import HEADER_BYTES
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.manifests.paths import MAX_NODES, Paths
from hybridkv.tiers.object.manifests.search import MAX_PROBES, MAX_TAIL_PROBES, find_last
from hybridkv.tiers.object.medium import GAP_BYTES, READ_BYTES
from hybridkv.tiers.object.names import MANIFEST_EVERY, manifest_name, namespace_of, prefix_of
from hybridkv.tiers.object.packs import Stored
from hybridkv.tiers.ram import RamIndex

FULL, WINDOW = b"f" * TAG_BYTES, b"w" * TAG_BYTES
NAMESPACE: Final = namespace_of("simulated", 0)
HIT, MISS = LookupResult.HIT, LookupResult.MISS
FILLERS: Final = 64
"""Other load fills this part of host memory (1 / FILLERS) at a time."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Model, engines and store.

    Args:
        num_engines: number of engines.
        cascades_all: `cascade` is "all" if true, else "reused".
        by_affinity: requests go to the engine that served the longest part of their prefix, if that is at least half of
            the prompt; else, and without affinity, to a random one.
        chunk_tokens: tokens in a chunk.
        full_bytes: bytes of a full-attention chunk.
        window_bytes: bytes of the window that ends at a chunk; 0: no such group.
        ram_bytes: host memory of an engine.
        tokens_per_s: prompt tokens that arrive at each engine in one second, and that each engine can compute in one
            second.
        step_tokens: tokens of one prefill step. Each step stores one batch.
        put_s: seconds from the end of a step until its manifests are visible.
    """

    num_engines: int
    cascades_all: bool = False
    by_affinity: bool = False
    chunk_tokens: int = 128
    full_bytes: int = 128 * 36_864
    window_bytes: int = 128 * 36_864
    ram_bytes: int = 64 << 30
    tokens_per_s: float = 10_000.0
    step_tokens: int = 8192
    put_s: float = 0.2


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and the second in which it arrives."""

    at_s: float
    request: TraceRequest


@dataclass(slots=True)
class FleetCounts:
    """Requests to the store, bytes and tokens of one run."""

    requests: Counter[str] = field(default_factory=Counter)
    """By kind: "PUT pack", "PUT manifest", "PUT replaced", "GET range", "GET lookup" (found or not), "GET conflict"."""
    gets_of: Counter[str] = field(default_factory=Counter)
    """GET requests by object name without the rank."""
    num_lookups: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    pack_bytes: int = 0
    num_chunks: int = 0
    """Stored chunks."""
    num_duplicates: int = 0
    """Stored chunks that a manifest of another engine lists."""
    total_tokens: int = 0
    ram_tokens: int = 0
    """Tokens that host memory alone would restore."""
    hit_tokens: int = 0

    @property
    def puts(self) -> int:
        return sum(number for kind, number in self.requests.items() if kind.startswith("PUT"))

    @property
    def gets(self) -> int:
        return sum(number for kind, number in self.requests.items() if kind.startswith("GET"))


class SimulatedStore:
    """Manifests of one store, and the requests to it."""

    def __init__(self) -> None:
        self.counts = FleetCounts()
        self.manifests: dict[bytes, tuple[tuple[ManifestNode, ...], int]] = {}
        """Path and bytes, by prefix."""
        self._nodes: dict[tuple[bytes, tuple[object, ...]], ManifestNode] = {}
        self.seals = Seals()

    def read(self, prefix: bytes, kind: str) -> tuple[ManifestNode, ...] | None:
        """Count a GET of a manifest. None if it is missing."""
        self.counts.requests[kind] += 1
        self.counts.gets_of[manifest_name(NAMESPACE, prefix)] += 1
        found = self.manifests.get(prefix)
        if found is None:
            return None
        self.counts.bytes_down += found[1]
        return found[0]

    def write(self, prefix: bytes, path: Sequence[ManifestNode], num_bytes: int) -> None:
        """Write a manifest. Equal nodes are kept once."""
        nodes = ((node.prefix, tuple(node.parts)) for node in path)
        self.manifests[prefix] = (tuple(self._nodes.setdefault(node, ManifestNode(*node)) for node in nodes), num_bytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all objects."""
        return self.counts.pack_bytes + sum(num_bytes for _, num_bytes in self.manifests.values())


class SimulatedClient:
    """Lookup client of one engine's `ObjectIndex`. Answers at once, from the current manifests.

    The rules are those of `ManifestStore`, without failures, renewals and epochs.
    """

    namespace: str | None = NAMESPACE
    takes_objects = True

    def __init__(self, store: SimulatedStore, options: ObjectOptions, clock: Callable[[], float]) -> None:
        self._store, self._options, self._clock = store, options, clock
        self.events: deque[ClientEvent] = deque()
        self._paths = Paths(MAX_NODES)
        self._unpublished: dict[bytes, None] = {}

    def send_lookup(self, request: int, keys: Sequence[Key], until_s: float, *, is_for_store: bool = False) -> bool:
        self._store.counts.num_lookups += 1
        prefixes = list(dict.fromkeys(map(prefix_of, keys)))

        async def read(wanted: Sequence[bytes]) -> list[tuple[ManifestNode, ...] | None]:
            return [self._store.read(prefix, "GET lookup") for prefix in wanted]

        found = None
        try:
            find_last(prefixes, read, MANIFEST_EVERY, MAX_PROBES, MAX_TAIL_PROBES).send(None)
        except StopIteration as end:  # `read` never waits
            found = end.value
        places: dict[Key, PackPlace] = {}
        if found is not None:
            source, path = found
            if self._store.manifests[source][1] > self._options.lookup_bytes:
                self._store.read(source, "GET lookup")
            self._paths.learn(path)
            wanted = set(keys)
            for prefix, parts in path:
                for part in parts:
                    if (key := part.tag + prefix) in wanted:
                        places[key] = PackPlace(part.pack, part.offset, part.num_bytes, source)
        self.events.append(LookupAnswered(request, places, self._clock()))
        return True

    def publish(self, stored: Sequence[Stored]) -> None:
        own = {each.key: each.place.pack for each in stored}
        ends = self._paths.manifest_prefixes(self._paths.add(stored), MANIFEST_EVERY)
        waiting, self._unpublished = self._unpublished, {}
        for prefix in (*waiting, *ends):
            path = self._paths.up_to(prefix)
            if path is None:
                self._unpublished[prefix] = None
            else:
                self._put(prefix, path, own)

    def _put(self, prefix: bytes, path: list[ManifestNode], own: dict[Key, str]) -> None:
        store, counts = self._store, self._store.counts
        num_bytes = len(encode_manifest(store.seals, manifest_name(NAMESPACE, prefix), 1, path))
        if num_bytes > self._options.manifest_bytes:
            return
        counts.requests["PUT manifest"] += 1
        counts.bytes_up += num_bytes
        if prefix in store.manifests:
            standing = store.read(prefix, "GET conflict") or ()
            listed = {(node.prefix, part.tag) for node in path for part in node.parts}
            standing_listed = {(node.prefix, part.tag) for node in standing for part in node.parts}
            for node in standing:
                for part in node.parts:
                    if own.get(part.tag + node.prefix, part.pack) != part.pack:
                        del own[part.tag + node.prefix]
                        counts.num_duplicates += 1
            if not standing_listed < listed:
                return
            counts.requests["PUT replaced"] += 1
            counts.bytes_up += num_bytes
        store.write(prefix, path, num_bytes)

    def use(self, keys: Sequence[Key]) -> None:
        """Does nothing: renewals are not modelled."""

    def take_counts(self) -> StoreCounts:
        return StoreCounts()

    def retract(self, key: Key, place: PackPlace) -> None:
        raise NotImplementedError

    def clear(self, *, is_for_all: bool) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Does nothing."""


def count_reads(slots: Iterable[ObjectSlot]) -> Counter[str]:
    """Number of range reads of a load, by pack, counted as in `ObjectMedium`."""
    reads: Counter[str] = Counter()
    first = end = 0
    pack = ""
    for slot in sorted(slots, key=lambda each: (each.pack, each.offset)):
        stop = slot.offset + HEADER_BYTES + slot.num_bytes
        if slot.pack != pack or not 0 <= slot.offset - end <= GAP_BYTES or stop - first > READ_BYTES:
            reads[slot.pack] += 1
            pack, first = slot.pack, slot.offset
        end = stop
    return reads


def simulated_index(store: SimulatedStore, options: ObjectOptions, clock: Callable[[], float]) -> ObjectIndex:
    """Index with a simulated client."""
    return ObjectIndex(SimulatedClient(store, options, clock), options, clock)


class Prompt:
    """Keys of a prompt. A chunk of the trace is split into chunks of the fleet."""

    def __init__(self, request: TraceRequest, settings: FleetSettings, split: int) -> None:
        prefixes = [_prefix(number, part) for number in request.chunks for part in range(split)]
        self.num_tokens = request.num_tokens
        self.full = [FULL + prefix for prefix in prefixes]
        self.window = [WINDOW + prefix for prefix in prefixes] if settings.window_bytes else []

    def chunks(self, first: int, stop: int) -> list[tuple[Key, tuple[Key, ...]]]:
        """Keys of these chunks in prefix order, each with the keys that it extends."""
        found: list[tuple[Key, tuple[Key, ...]]] = []
        for place in range(first, min(stop, len(self.full))):
            full = self.full[place]
            found.append((full, (self.full[place - 1],) if place else ()))
            if self.window:
                found.append((self.window[place], (full,)))
        return found


def _prefix(number: int, part: int) -> bytes:
    return blake3(b"%d %d" % (number, part)).digest()


class SimulatedEngine:
    """One engine: host memory over the store.

    Args:
        settings: the fleet.
        store: store that counts the requests.
        clock: returns seconds.
        index: index of the store; None for a simulated one.
    """

    def __init__(
        self,
        settings: FleetSettings,
        store: SimulatedStore,
        clock: Callable[[], float],
        index: ObjectIndex | None = None,
    ) -> None:
        self._settings, self._store, self._clock = settings, store, clock
        unit = max(settings.full_bytes, settings.window_bytes)
        self.ram = RamIndex(settings.ram_bytes, min(unit, settings.window_bytes or unit, settings.full_bytes))
        self.index = index or simulated_index(store, ObjectOptions(), clock)
        self._at_s = clock()
        self._numbers = itertools.count()

    def fill(self, bytes_per_s: float) -> None:
        """Fills host memory with the other load since the last call."""
        now_s = self._clock()
        room = self._settings.ram_bytes
        piece = room // FILLERS
        num = min(FILLERS, int((now_s - self._at_s) * bytes_per_s / piece))
        if num:
            self._at_s = now_s if num == FILLERS else self._at_s + num * piece / bytes_per_s
        for _ in range(num):
            self._keep(b"other load %d" % next(self._numbers), piece, ())

    def _keep(self, key: Key, num_bytes: int, extends: tuple[Key, ...]) -> bool:
        if self.ram.lookup(key) is not MISS or not isinstance(self.ram.reserve(key, num_bytes, extends), Slot):
            return False
        self.ram.commit(key)
        return True

    def _size(self, key: Key) -> int:
        return self._settings.full_bytes if key.startswith(FULL) else self._settings.window_bytes

    def _resume(self, prompt: Prompt, held: int, has: Callable[[Key], bool]) -> int:
        if not prompt.window:
            return held
        return next((place for place in range(held, 0, -1) if has(prompt.window[place - 1])), 0)

    def begin(self, prompt: Prompt) -> tuple[int, list[Key]]:
        """Look up a prompt and load its hit. Returns the number of restored chunks, and the keys found in host
        memory."""
        counts, ram, index = self._store.counts, self.ram, self.index
        end = (prompt.num_tokens - 1) // self._settings.chunk_tokens
        path = prompt.chunks(0, len(prompt.full))
        met = [key for key, _ in path if ram.lookup(key) is HIT]
        present = set(met)
        wanted = [key for key, _ in prompt.chunks(0, end) if key not in present]
        if wanted:
            index.start_lookup(wanted, self._clock() + 0.25)

        def anywhere(key: Key) -> bool:
            return key in present or index.lookup(key) is HIT

        held_ram = ram.leading(prompt.full[:end])
        held = next((place for place in range(min(end, len(prompt.full))) if not anywhere(prompt.full[place])), None)
        held = min(end, len(prompt.full)) if held is None else held
        own = self._resume(prompt, held_ram, present.__contains__)
        resumed = self._resume(prompt, held, anywhere)
        counts.total_tokens += prompt.num_tokens
        counts.ram_tokens += own * self._settings.chunk_tokens
        counts.hit_tokens += resumed * self._settings.chunk_tokens
        needed = [*prompt.full[:resumed], *prompt.window[max(0, resumed - 1) : resumed]]
        absent = [key for key in needed if key not in present]
        if absent:
            slots = index.pin_all(absent)
            assert slots is not None
            places = [slot for slot in slots if isinstance(slot, ObjectSlot)]
            index.unpin_all(absent)
            reads = count_reads(places)
            counts.requests["GET range"] += sum(reads.values())
            counts.gets_of.update(reads)
            counts.bytes_down += sum(HEADER_BYTES + place.num_bytes for place in places)
        extends = dict(path)
        for key in absent:
            self._keep(key, self._size(key), extends[key])
        ram.touch(needed[::-1])
        return resumed, met

    def store(self, prompt: Prompt, first: int, stop: int, met: Sequence[Key]) -> list[Key]:
        """End a step: keep its chunks in host memory, and send chunks to the store by the policy. Returns the keys
        for `commit`.

        Args:
            prompt: the prompt.
            first: first chunk of the step.
            stop: chunk after the last one.
            met: keys that `begin` found in host memory; empty after the first step.
        """
        counts, index = self._store.counts, self.index
        new = prompt.chunks(first, stop)
        stored = [chunk for chunk in new if self._keep(chunk[0], self._size(chunk[0]), chunk[1])]
        path = prompt.chunks(0, stop)
        keys = [key for key, _ in reversed(path)]
        self.ram.touch(keys)
        index.touch(keys, [extends for _, extends in reversed(path)])
        found = set(met)
        wanted = [chunk for chunk in prompt.chunks(0, len(prompt.full)) if chunk[0] in found] if met else []
        wanted += stored if self._settings.cascades_all else []
        sent: list[Key] = []
        packs: set[str] = set()
        index.prepare_stores([key for key, _ in wanted if index.lacks(key)])
        for key, extends in wanted:
            if not index.lacks(key) or (extends and index.lacks(extends[-1])) or self.ram.lookup(key) is not HIT:
                continue
            slot = index.reserve(key, self._size(key), extends)
            if isinstance(slot, ObjectSlot):
                sent.append(key)
                packs.add(slot.pack)
                counts.pack_bytes += HEADER_BYTES + slot.num_bytes
                counts.bytes_up += HEADER_BYTES + slot.num_bytes
        index.end_batch()
        counts.requests["PUT pack"] += len(packs)
        counts.num_chunks += len(sent)
        return sent

    def commit(self, keys: Sequence[Key]) -> None:
        """End the stores of written packs."""
        for key in keys:
            self.index.commit(key)


def run_fleet(
    requests: Sequence[TimedRequest], settings: FleetSettings, trace_chunk_tokens: int, load_share: float = 1.0
) -> SimulatedStore:
    """Simulate requests in order of time.

    Args:
        requests: the requests.
        settings: the fleet.
        trace_chunk_tokens: tokens of one of the trace's chunks, a multiple of the fleet's.
        load_share: share of these requests in all requests of the fleet. The other requests only fill host memory.
    """
    split = trace_chunk_tokens // settings.chunk_tokens
    store = SimulatedStore()
    now = [0.0]
    rng = random.Random(0)
    engines: dict[int, SimulatedEngine] = {}
    engine_of: dict[int, int] = {}
    numbers = itertools.count()
    events: list[tuple[float, int, Callable[[], None]]] = []
    token_bytes = (settings.full_bytes + settings.window_bytes) / settings.chunk_tokens

    def later(after_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(events, (now[0] + after_s, next(numbers), work))

    def route(request: TraceRequest) -> int:
        number = rng.randrange(settings.num_engines)
        if settings.by_affinity:
            for place in range(len(request.chunks), 0, -1):
                if (known := engine_of.get(request.chunks[place - 1])) is not None:
                    if 2 * place * trace_chunk_tokens >= request.num_tokens:
                        number = known
                    break
            engine_of.update(dict.fromkeys(request.chunks, number))
        return number

    def finish(engine: SimulatedEngine, prompt: Prompt, first: int, stop: int, met: Sequence[Key]) -> None:
        sent = engine.store(prompt, first, stop, met)
        if sent:
            later(settings.put_s, lambda: engine.commit(sent))

    def arrive(request: TraceRequest) -> None:
        number = route(request)
        engine = engines.get(number)
        if engine is None:
            engine = engines[number] = SimulatedEngine(settings, store, lambda: now[0])
        counts = store.counts
        computed = 1 - counts.hit_tokens / max(1, counts.total_tokens)
        engine.fill(settings.tokens_per_s * (1 - load_share) * computed * token_bytes)
        prompt = Prompt(request, settings, split)
        resumed, met = engine.begin(prompt)
        num, per_step = len(prompt.full), max(1, settings.step_tokens // settings.chunk_tokens)
        for first in range(resumed, max(num, resumed + 1), per_step):
            stop = min(first + per_step, max(num, resumed))
            work = _step(finish, engine, prompt, first, stop, met if first == resumed else ())
            later((stop - resumed) * settings.chunk_tokens / settings.tokens_per_s, work)

    for each in requests:
        heapq.heappush(events, (each.at_s, next(numbers), _step(arrive, each.request)))
    while events:
        now[0], _, work = heapq.heappop(events)
        work()
    return store


def _step(work: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: work(*arguments)
