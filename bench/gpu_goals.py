"""Copies of KV pages on a GPU, compared with their goals, for `copies: "native"` and `copies: "engine"`.

    PYTHONPATH=... python bench/gpu_goals.py [--mebibytes N] [--rounds N] [--json FILE]

The bundle for GPU machines runs this file with the right path: docs/guides/gpu.md. Each measurement prints a line of
JSON; after a failure the program continues with the next one. "direct" are the copies of vLLM's own worker on a
stream; without vLLM for CUDA, a substitute that the first line names. "link" is one copy of all bytes in one piece.
Wall time is from the call to the last byte; rates are the best of N rounds, in which the variants alternate.

- G1: fragments of 512 bytes to 2 MiB, in scattered blocks of 32, to one contiguous range of pinned memory (store) and
  back (load), one job each; and both directions concurrently, compared with the sum of each direction alone. Bytes are
  compared before the timing.
- G2: matrix products during continuous copies, compared with the same products alone; also during copies in one piece.
- G3: the host's processor time of a job, over all threads, by the number of its fragments.
- G4: queued jobs with the checksum of every chunk, as in the connector, compared with jobs without checksums.

Not measured: lowering of a job to runs (`gpu_host.py`), and an engine of vLLM. Without a GPU the program reports this
and ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.connectors.vllm.common.copies.devices import EngineDevice
from hybridkv.tiers import Slot
from hybridkv.tiers.ram import RamArena
from hybridkv.transfer import CopyEngine, CopyRuns, JobId
from hybridkv.transfer.runs import ROW_WORDS, AddressSpans

MIB = 1 << 20
FRAGMENT_BYTES = tuple(512 << power for power in range(13))
"""512 bytes to 2 MiB."""
LAYERS = 32
"""Fragments of a block: the GPU stores them layer by layer, and the host one after the other."""
MOST_FRAGMENTS = 128 * 1024
"""Limit for the fragments of a job. So jobs of small fragments have fewer bytes."""
FROM_BYTES = 4096
"""The smallest fragment of the goals of G1."""
MOST_DIRECT_COPIES = 32 * 1024
"""Limit for the copies of one call. CUDA crashes at about 50,000."""
CHECKED_FRAGMENT_BYTES, CHECKED_JOBS = 64 * 1024, 16
CHUNK_BYTES = 1 << 20
"""Bytes of one checksum."""
TIMEOUT_S = 60.0
POISON = 0xA5


@dataclass
class Report:
    """Prints lines of JSON, and compares values with goals."""

    path: Path | None
    num_failed: int = 0
    num_done: int = 0
    _lines: list[str] = field(default_factory=list)

    def say(self, name: str, **values: Any) -> None:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
        line = json.dumps({"name": name} | rounded)
        print(line, flush=True)
        self._lines.append(line)
        if self.path is not None:
            self.path.write_text("\n".join(self._lines) + "\n")

    def goal(self, what: str, value: float, goal: float, *, at_most: bool = False) -> None:
        is_met = value <= goal if at_most else value >= goal
        bound = "at most" if at_most else "at least"
        self.say("goal", what=what, value=value, goal=goal, is_met=is_met)
        print(f"note: {what}: {value:.3g}, goal {bound} {goal:g}: {'met' if is_met else 'MISSED'}", flush=True)

    def run(self, measure: Callable[[], None]) -> None:
        try:
            measure()
            self.num_done += 1
        except Exception as error:
            self.num_failed += 1
            self.say("failed", measurement=measure.__name__, error=f"{type(error).__name__}: {error}"[:300])


@dataclass(frozen=True)
class CopyMethod:
    """One copy method: its engines and its pinned memory."""

    name: str
    stores: CopyEngine
    loads: CopyEngine
    arena: np.ndarray  # type: ignore[type-arg]

    def engine(self, is_store: bool) -> CopyEngine:
        return self.stores if is_store else self.loads


@dataclass(frozen=True)
class Fragments:
    """Fragments of one size, in blocks at random places of the cache, and one after the other in pinned memory."""

    size: int
    layers: int
    blocks: np.ndarray  # type: ignore[type-arg]

    @property
    def count(self) -> int:
        return len(self.blocks) * self.layers

    @property
    def total_bytes(self) -> int:
        return self.count * self.size

    @property
    def order(self) -> np.ndarray:  # type: ignore[type-arg]
        """Indices of the fragments in the cache, in the order of pinned memory."""
        layers = np.arange(self.layers, dtype=np.int64) * 2 * len(self.blocks)
        return (self.blocks[:, np.newaxis] + layers).reshape(-1)

    def runs(self, cache_address: int, arena_address: int, is_store: bool) -> CopyRuns:
        """The runs in rows, as a `Lowering` makes them."""
        size, num_blocks = self.size, len(self.blocks)
        source, destination = (0, 1) if is_store else (1, 0)  # columns of the cache and of pinned memory
        rows = np.empty((num_blocks, 6), dtype=np.int64)
        rows[:, source] = cache_address + self.blocks * size
        rows[:, destination] = arena_address + np.arange(num_blocks, dtype=np.int64) * self.layers * size
        rows[:, 2 + source], rows[:, 2 + destination] = 2 * num_blocks * size, size
        rows[:, 4:] = size, self.layers
        spans = [
            *(cache_address, cache_address + 2 * self.total_bytes),
            *(arena_address, arena_address + self.total_bytes),
        ]
        in_order = spans if is_store else spans[2:] + spans[:2]
        return CopyRuns.of_rows(rows.reshape(-1), self.count, self.total_bytes, AddressSpans(*in_order))


def fragments(size: int, most_bytes: int, count: int = MOST_FRAGMENTS) -> Fragments:
    count = min(count, most_bytes // size)
    layers = max(1, min(LAYERS, count))
    num_blocks = count // layers
    blocks = np.random.default_rng(size).permutation(2 * num_blocks)[:num_blocks]
    return Fragments(size, layers, blocks.astype(np.int64))


class Rig:
    """KV memory on the GPU, and both copy methods."""

    def __init__(self, torch: Any, total_bytes: int, rounds: int, report: Report) -> None:
        from engine_copies import find_engine_copies

        from hybridkv.connectors.vllm.common.copies.devices import EngineGpuDevice, NativeGpuDevice

        self.torch, self.total_bytes, self.rounds, self.report = torch, total_bytes, rounds, report
        self.cache = torch.randint(0, 256, (2 * total_bytes,), dtype=torch.uint8, device="cuda")
        name, self.copies = find_engine_copies()
        report.say("start", gpu=torch.cuda.get_device_name(), torch=torch.__version__, direct=name)
        self.methods = []
        self.digest_threads = 1
        for name, device in (("native", NativeGpuDevice()), ("engine", EngineGpuDevice(EngineDevice(self.copies)))):
            arena = device.arena_memory(total_bytes)
            self.digest_threads = device.digest_threads(1)
            stores, loads = device.copy_engines("async")
            for engine in (stores, loads):
                engine.register(self.cache.data_ptr(), self.cache.nbytes, "kv cache")
                engine.register(int(arena.ctypes.data), arena.nbytes, "arena")
            self.methods.append(CopyMethod(name, stores, loads, arena))
        self.ids = itertools.count(1)
        self._stream = torch.cuda.Stream()

    def runs(self, method: CopyMethod, of: Fragments, is_store: bool) -> CopyRuns:
        return of.runs(self.cache.data_ptr(), int(method.arena.ctypes.data), is_store)

    def copy(self, method: CopyMethod, runs: CopyRuns, is_store: bool) -> None:
        """Submits a job and waits for its result."""
        engine, job_id = method.engine(is_store), JobId(next(self.ids))
        if not engine.submit(job_id, runs) or not engine.wait([job_id], TIMEOUT_S):
            raise RuntimeError(f"{method.name}: the job did not end")
        [result] = engine.poll()
        if result.failure is not None:
            raise RuntimeError(f"{method.name}: {result.failure}")

    def direct(self, runs: CopyRuns, is_store: bool) -> Callable[[], None]:
        """The copies of vLLM's own worker without an engine: a kernel for small loads, otherwise one call."""
        torch, copies, options = self.torch, self.copies, {"is_src_access_order_any": not is_store}
        columns = [torch.from_numpy(np.array(column)) for column in (runs.sources, runs.destinations, runs.num_bytes)]
        size, call, most = int(runs.num_bytes.max()), copies.swap_blocks_batch, MOST_DIRECT_COPIES
        if not is_store and copies.load_small is not None and size < copies.max_small_bytes:
            call, most = partial(copies.load_small, bytes_per_chunk=min(1 << (size - 1).bit_length(), 8192)), len(runs)
        batches = list(zip(*(column.split(most) for column in columns), strict=True))

        def copy() -> None:
            done = torch.cuda.Event(blocking=True)
            with torch.cuda.stream(self._stream):
                for batch in batches:
                    call(*batch, **options)
                done.record()
            done.synchronize()

        return copy

    def link(self, is_store: bool) -> Callable[[], None]:
        device = self.cache[: self.total_bytes]
        host = self.torch.from_numpy(self.methods[0].arena)
        destination, source = (host, device) if is_store else (device, host)

        def copy() -> None:
            done = self.torch.cuda.Event(blocking=True)
            with self.torch.cuda.stream(self._stream):
                destination.copy_(source, non_blocking=True)
                done.record()
            done.synchronize()

        return copy

    def require_right(self, method: CopyMethod, of: Fragments, is_store: bool) -> None:
        """Copies once, and compares all bytes."""
        torch = self.torch
        pages = self.cache[: 2 * of.total_bytes].view(2 * of.count, of.size)
        index = torch.from_numpy(of.order).cuda()
        wanted = pages[index]
        place = method.arena[: of.total_bytes]
        if is_store:
            place[:] = POISON
        else:
            place[:] = wanted.cpu().numpy().reshape(-1)
            pages[index] = POISON
        torch.cuda.synchronize()
        self.copy(method, self.runs(method, of, is_store), is_store)
        found = torch.from_numpy(place).cuda().view(of.count, of.size) if is_store else pages[index]
        is_right = torch.equal(found, wanted)
        pages[index] = wanted
        torch.cuda.synchronize()
        if not is_right:
            raise RuntimeError(f"{method.name} copied wrong bytes: a {direction(is_store)} of fragments of {of.size}")

    def rates(self, copies: dict[str, Callable[[], None]], num_bytes: dict[str, int]) -> dict[str, float]:
        """Bytes per second of each copy. The copies alternate."""
        best = dict.fromkeys(copies, float("inf"))
        for _ in range(self.rounds):
            for name, copy in copies.items():
                began_s = time.perf_counter()
                copy()
                best[name] = min(best[name], time.perf_counter() - began_s)
        return {name: num_bytes[name] / seconds for name, seconds in best.items()}

    def close(self) -> None:
        for method in self.methods:
            method.stores.close()
            method.loads.close()


def direction(is_store: bool) -> str:
    return "store" if is_store else "load"


def g1_fragments(rig: Rig) -> None:
    """G1 for each size and direction."""
    for is_store in (True, False):
        least = {"native": float("inf"), "engine": float("inf")}
        for size in FRAGMENT_BYTES:
            of = fragments(size, rig.total_bytes)
            for method in rig.methods:
                rig.require_right(method, of, is_store)
            copies = {method.name: _job(rig, method, of, is_store) for method in rig.methods}
            copies["direct"] = rig.direct(rig.runs(rig.methods[1], of, is_store), is_store)
            copies["link"] = rig.link(is_store)
            num_bytes = dict.fromkeys(copies, of.total_bytes) | {"link": rig.total_bytes}
            found = rig.rates(copies, num_bytes)
            in_gb = {f"{name}_gb_s": rate / 1e9 for name, rate in found.items()}
            rig.report.say("G1", direction=direction(is_store), fragment=size, count=of.count, **in_gb)
            if size >= FROM_BYTES:
                least["native"] = min(least["native"], found["native"] / found["link"])
                least["engine"] = min(least["engine"], found["engine"] / found["direct"])
        word = direction(is_store)
        rig.report.goal(f"G1 native {word}s, of the link, from 4 KiB", least["native"], 0.95)
        rig.report.goal(f"G1 engine {word}s, of vLLM's own copies, from 4 KiB", least["engine"], 1.0)


def _job(rig: Rig, method: CopyMethod, of: Fragments, is_store: bool) -> Callable[[], None]:
    runs = rig.runs(method, of, is_store)
    return lambda: rig.copy(method, runs, is_store)


def g1_duplex(rig: Rig) -> None:
    """G1 with both directions concurrently. They share no byte: loads use the other half of the memory."""
    torch, half = rig.torch, rig.total_bytes // 2
    host, streams = torch.from_numpy(rig.methods[0].arena), [torch.cuda.Stream() for _ in range(2)]

    def pieces() -> None:
        with torch.cuda.stream(streams[0]):
            host[:half].copy_(rig.cache[:half], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            rig.cache[half : 2 * half].copy_(host[half:], non_blocking=True)
        torch.cuda.synchronize()

    link_s = min(_timed_s(pieces) for _ in range(rig.rounds))
    rig.report.say("G1 duplex", way="link, one piece each way", both_gb_s=2 * half / link_s / 1e9)
    for method, size in itertools.product(rig.methods, (16 * 1024, 256 * 1024)):
        of = fragments(size, half)
        store = rig.runs(method, of, True)
        load = of.runs(rig.cache.data_ptr() + rig.total_bytes, int(method.arena.ctypes.data) + half, False)
        alone = [_best_s(rig, method, runs, is_store) for runs, is_store in ((store, True), (load, False))]

        def both(method: CopyMethod = method, store: CopyRuns = store, load: CopyRuns = load) -> None:
            other = threading.Thread(target=rig.copy, args=(method, store, True))
            other.start()
            rig.copy(method, load, False)
            other.join()

        together_s = min(_timed_s(both) for _ in range(rig.rounds))
        of_sum = 2 / together_s / sum(1 / seconds for seconds in alone)
        both_gb_s = 2 * of.total_bytes / together_s / 1e9
        rig.report.say("G1 duplex", way=method.name, fragment=size, both_gb_s=both_gb_s, of_sum=of_sum)
        rig.report.goal(f"G1 {method.name}, both directions at once, of the sum, {size >> 10} KiB", of_sum, 0.85)


def _timed_s(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _best_s(rig: Rig, method: CopyMethod, runs: CopyRuns, is_store: bool) -> float:
    return min(_timed_s(lambda: rig.copy(method, runs, is_store)) for _ in range(rig.rounds))


def _gpu_s(torch: Any, launch: Callable[[], Any], rounds: int = 8) -> float:
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(min(times))


def g2_interference(rig: Rig) -> None:
    """G2: matrix products of a prefill, during repeated copies of one job."""
    torch = rig.torch
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def products() -> float:
        return _gpu_s(torch, lambda: [a @ b for _ in range(60)], rounds=1)

    products()
    alone = statistics.median(products() for _ in range(7))
    most: dict[str, float] = {}

    def measure(word: str, copy: Callable[[], None]) -> float:
        with _Copying(torch, copy, rig.total_bytes) as rate:
            busy = statistics.median(products() for _ in range(7))
        rig.report.say("G2", copies=word, slower=busy / alone - 1, gb_s=rate() / 1e9)
        return busy / alone - 1

    for is_store in (True, False):
        measure(f"one piece, {direction(is_store)}", rig.link(is_store))
    for method, is_store, size in itertools.product(rig.methods, (True, False), (32 * 1024, 256 * 1024)):
        job = _job(rig, method, fragments(size, rig.total_bytes), is_store)
        slower = measure(f"{method.name} {direction(is_store)}s of {size >> 10} KiB", job)
        most[method.name] = max(most.get(method.name, slower), slower)
    for name, slower in most.items():
        rig.report.goal(f"G2 matrix products beside {name} copies, slower by", slower, 0.03, at_most=True)


class _Copying:
    """Repeats a copy on a thread. Yields a function that returns the rate after the end."""

    def __init__(self, torch: Any, copy: Callable[[], None], num_bytes: int) -> None:
        self._torch, self._copy, self._num_bytes = torch, copy, num_bytes
        self._stop = threading.Event()
        self._num_jobs, self._seconds = 0, 0.0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._loop)

    def _loop(self) -> None:
        began_s = time.perf_counter()
        try:
            # A separate stream: on the stream of the products, each job would wait for the products.
            with self._torch.cuda.stream(self._torch.cuda.Stream()):
                while not self._stop.is_set():
                    self._copy()
                    self._num_jobs += 1
        except Exception as error:
            self._failure = error
        self._seconds = time.perf_counter() - began_s

    def __enter__(self) -> Callable[[], float]:
        self._thread.start()
        time.sleep(0.05)
        return lambda: self._num_jobs * self._num_bytes / self._seconds

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def g3_host(rig: Rig) -> None:
    """G3: processor time of all threads, and wall time of `submit` on the caller's thread."""
    most: dict[str, float] = {}
    for is_store, count in itertools.product((True, False), (1024, 4096, 16 * 1024, 64 * 1024)):
        of = fragments(FROM_BYTES, rig.total_bytes, count)
        found: dict[str, float] = {}
        for method in rig.methods:
            runs = rig.runs(method, of, is_store)
            found[f"{method.name}_us"] = _processor_s(rig.rounds, _job(rig, method, of, is_store)) * 1e6
            found[f"{method.name}_submit_us"] = _submit_s(rig, method, runs, is_store) * 1e6
        direct = rig.direct(rig.runs(rig.methods[1], of, is_store), is_store)
        found["direct_us"] = _processor_s(rig.rounds, direct) * 1e6
        rig.report.say("G3", direction=direction(is_store), count=of.count, **found)
        for method in rig.methods:
            most[method.name] = max(most.get(method.name, 0.0), found[f"{method.name}_us"])
    for name, microseconds in most.items():
        rig.report.goal(f"G3 {name}, us of the host for a job", microseconds, 50.0, at_most=True)


def _processor_s(rounds: int, call: Callable[[], None]) -> float:
    call()
    began_s = time.process_time()
    for _ in range(rounds):
        call()
    return (time.process_time() - began_s) / rounds


def _submit_s(rig: Rig, method: CopyMethod, runs: CopyRuns, is_store: bool) -> float:
    engine = method.engine(is_store)
    best = float("inf")
    for number in range(rig.rounds):
        job_id = JobId(-1 - number)
        began_s = time.perf_counter()
        engine.submit(job_id, runs)
        best = min(best, time.perf_counter() - began_s)
        engine.wait([job_id], TIMEOUT_S)
        engine.poll()
    return best


@dataclass(frozen=True)
class QueuedCopies:
    """Jobs of one direction that are submitted together, and the chunks of each job in pinned memory."""

    method: CopyMethod
    is_store: bool
    runs: list[CopyRuns]
    chunks: list[list[tuple[bytes, Slot]]]

    def take_s(self, ids: Iterator[int], arena: RamArena | None) -> float:
        """Seconds from the first `submit` to the last result. With an arena, seals or checks the chunks."""
        engine, job_ids = self.method.engine(self.is_store), [JobId(next(ids)) for _ in self.runs]
        began_s = time.perf_counter()
        for job_id, runs, chunks in zip(job_ids, self.runs, self.chunks, strict=True):
            take = None if arena is None else partial(_first_failure, self.is_store, arena, chunks)
            before, after = (None, take) if self.is_store else (take, None)
            if not engine.submit(job_id, runs, before, after):
                raise RuntimeError(f"{self.method.name}: a job was refused")
        if not engine.wait(job_ids, TIMEOUT_S):
            raise RuntimeError(f"{self.method.name}: the jobs did not end")
        seconds = time.perf_counter() - began_s
        for result in engine.poll():
            if result.failure is not None:
                raise RuntimeError(f"{self.method.name}: {result.failure}")
        return seconds


def _first_failure(is_store: bool, arena: RamArena, chunks: list[tuple[bytes, Slot]]) -> str | None:
    failures = arena.seal_all(chunks) if is_store else arena.check_all(chunks)
    return next((str(failure) for failure in failures if failure is not None), None)


def part_of(runs: CopyRuns, rows: np.ndarray) -> CopyRuns:  # type: ignore[type-arg]
    return CopyRuns.of_rows(rows.reshape(-1), int(rows[:, 5].sum()), int(rows[:, 4] @ rows[:, 5]), runs.spans)


def queued_copies(method: CopyMethod, is_store: bool, runs: CopyRuns) -> QueuedCopies:
    table = runs.rows.reshape(-1, ROW_WORDS)
    parts = [part_of(runs, rows) for rows in np.array_split(table, CHECKED_JOBS)]
    begins = np.cumsum([0, *(part.total_bytes for part in parts)]).tolist()
    chunks = [
        [(b"chunk", Slot(((at, min(CHUNK_BYTES, end - at)),))) for at in range(begin, end, CHUNK_BYTES)]
        for begin, end in itertools.pairwise(begins)
    ]
    return QueuedCopies(method, is_store, parts, chunks)


def g4_checksums(rig: Rig) -> None:
    """G4 for each copy method and direction. Stores come first, because they seal the chunks that loads check."""
    of = fragments(CHECKED_FRAGMENT_BYTES, rig.total_bytes)
    for method in rig.methods:
        arena = RamArena(method.arena.nbytes, CHUNK_BYTES, method.arena, rig.digest_threads)
        for is_store in (True, False):
            queued = queued_copies(method, is_store, rig.runs(method, of, is_store))
            plain_s = min(queued.take_s(rig.ids, None) for _ in range(rig.rounds))
            if not is_store:
                queued_copies(method, True, rig.runs(method, of, True)).take_s(rig.ids, arena)
            checked_s = min(queued.take_s(rig.ids, arena) for _ in range(rig.rounds))
            rates = {"plain_gb_s": of.total_bytes / plain_s / 1e9, "checked_gb_s": of.total_bytes / checked_s / 1e9}
            word = direction(is_store)
            rig.report.say("G4", way=method.name, direction=word, threads=rig.digest_threads, **rates)
            rig.report.goal(f"G4 {method.name} {word}s with checksums, of those without", plain_s / checked_s, 0.95)


def measurements(rig: Rig) -> Iterator[Callable[[], None]]:
    for measure in (g1_fragments, g1_duplex, g3_host, g4_checksums, g2_interference):

        def run(measure: Callable[[Rig], None] = measure) -> None:
            measure(rig)

        run.__name__ = measure.__name__
        yield run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("result: no GPU: torch is not installed")
        return 0
    if not torch.cuda.is_available():
        print(f"result: no GPU: torch {torch.__version__} sees none")
        return 0
    report = Report(options.json)
    rig = Rig(torch, options.mebibytes * MIB, options.rounds, report)
    for measure in measurements(rig):
        report.run(measure)
    rig.close()
    print(f"result: {report.num_done} of {report.num_done + report.num_failed} measurements done")
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
