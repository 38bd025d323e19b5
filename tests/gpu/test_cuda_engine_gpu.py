"""The copy engines of both ways on a real GPU: bytes, fences, and overlap with compute.

The ways are `copies: "native"`, with the kernel of hybridkv-cuda, and `copies: "engine"` ("streams").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import patience
import pytest
from conftest import unavailable

from hybridkv.transfer import CopyEngine, CopyRuns, InlineStreamCopyEngine, JobId, StreamCopyEngine
from hybridkv.transfer.cuda import CopyTuning, CudaCopyEngine, InlineCudaCopyEngine, open_device, pin_memory
from hybridkv.transfer.pinned import map_memory

torch = pytest.importorskip("torch", reason="torch is not installed")

TIMEOUT_S = patience.seconds(6.0)
SIZES = (64, 512, 4096, 16 * 1024, 64 * 1024, 320 * 1024, 2 * 1024 * 1024)
BUSY_CYCLES = 400_000_000
"""How long the stream of compute is kept busy: some tenths of a second."""


@pytest.fixture(autouse=True, scope="module")
def gpu() -> None:
    if not torch.cuda.is_available():
        unavailable(
            f"torch {torch.__version__} sees no GPU; docs/guides/gpu.md says how to run this with one that does"
        )


class NativeWay:
    """`copies: "native"`."""

    def open(self, kind: str = "thread") -> CopyEngine:
        device = open_device(torch.cuda.current_device())
        return CudaCopyEngine(device) if kind == "thread" else InlineCudaCopyEngine(device)

    def pinned(self, num_bytes: int) -> np.ndarray:  # type: ignore[type-arg]
        return pin_memory(num_bytes)


class StreamsWay:
    """`copies: "engine"`, by the copies that this machine has."""

    def __init__(self) -> None:
        from engine_copies import find_engine_copies

        from hybridkv.connectors.vllm.common.copies.devices import EngineDevice

        name, copies = find_engine_copies()
        print(name)
        self._device = EngineDevice(copies)

    def open(self, kind: str = "thread") -> CopyEngine:
        engine = StreamCopyEngine if kind == "thread" else InlineStreamCopyEngine
        return engine(self._device)

    def pinned(self, num_bytes: int) -> np.ndarray:  # type: ignore[type-arg]
        memory = map_memory(num_bytes)
        self._device.pin(memory)
        return memory


Way = NativeWay | StreamsWay


@pytest.fixture(params=["native", "streams"])
def way(request: pytest.FixtureRequest) -> Way:
    return NativeWay() if request.param == "native" else StreamsWay()


class CopyRig:
    """KV memory and a pinned arena, registered with an engine."""

    def __init__(self, way: Way, engine: CopyEngine, page_bytes: int, num_pages: int) -> None:
        self.page_bytes, self.num_pages = page_bytes, num_pages
        generator = torch.Generator(device="cuda").manual_seed(page_bytes)
        self.cache = torch.randint(
            0, 256, (2 * num_pages, page_bytes), dtype=torch.uint8, device="cuda", generator=generator
        )
        self.arena = way.pinned(num_pages * page_bytes)
        self.arena[:] = 0xA5
        self.order = np.random.default_rng(1).permutation(2 * num_pages)[:num_pages]
        engine.register(self.cache.data_ptr(), self.cache.nbytes, "kv cache")
        engine.register(int(self.arena.ctypes.data), self.arena.nbytes, "arena")

    def stores(self) -> CopyRuns:
        sources = self.cache.data_ptr() + self.order.astype(np.int64) * self.page_bytes
        destinations = int(self.arena.ctypes.data) + np.arange(self.num_pages, dtype=np.int64) * self.page_bytes
        return CopyRuns(sources, destinations, np.full(self.num_pages, self.page_bytes, dtype=np.int64))

    def pages(self) -> np.ndarray:  # type: ignore[type-arg]
        """What the arena should hold."""
        return self.cache[torch.from_numpy(self.order).cuda()].cpu().numpy().reshape(-1)


@pytest.fixture(params=["thread", "inline"])
def engine(request: pytest.FixtureRequest, way: Way) -> Iterator[CopyEngine]:
    made = way.open(request.param)
    yield made
    made.close()


def finish(engine: CopyEngine, job_id: int) -> None:
    assert engine.wait([JobId(job_id)], TIMEOUT_S)
    [result] = engine.poll()
    assert result.failure is None, result.failure


@pytest.mark.parametrize("page_bytes", SIZES)
def test_a_job_may_copy_within_the_gpu_and_from_the_arena(way: Way, engine: CopyEngine, page_bytes: int) -> None:
    rig = CopyRig(way, engine, page_bytes, max(3, min(3000, 64 * 1024 * 1024 // page_bytes)))
    rig.arena[:] = np.random.default_rng(2).integers(0, 256, rig.arena.nbytes, dtype=np.uint8)
    rest = np.setdiff1d(np.arange(2 * rig.num_pages), rig.order)
    loaded, copied = rest[::2], rest[1::2]
    expected = rig.cache.clone()
    arena = torch.from_numpy(np.array(rig.arena)).cuda().reshape(rig.num_pages, page_bytes)
    expected[torch.from_numpy(loaded).cuda()] = arena[: len(loaded)]
    sources = rig.order[: len(copied)]
    expected[torch.from_numpy(copied).cuda()] = rig.cache[torch.from_numpy(sources).cuda()]
    cache, host = rig.cache.data_ptr(), int(rig.arena.ctypes.data)
    runs = [(host + i * page_bytes, cache + int(page) * page_bytes, page_bytes) for i, page in enumerate(loaded)]
    runs += [
        (cache + int(source) * page_bytes, cache + int(page) * page_bytes, page_bytes)
        for source, page in zip(sources, copied, strict=True)
    ]
    engine.submit(JobId(1), CopyRuns.of(runs))
    finish(engine, 1)
    assert torch.equal(rig.cache, expected)


@pytest.mark.parametrize("page_bytes", SIZES)
def test_what_was_stored_is_loaded_again(way: Way, engine: CopyEngine, page_bytes: int) -> None:
    rig = CopyRig(way, engine, page_bytes, max(3, min(3000, 64 * 1024 * 1024 // page_bytes)))
    wanted = rig.pages()
    engine.submit(JobId(1), rig.stores())
    finish(engine, 1)
    assert np.array_equal(rig.arena, wanted)
    others = rig.cache.clone()
    rig.cache[torch.from_numpy(rig.order).cuda()] = 0
    engine.submit(JobId(2), rig.stores().reversed())
    finish(engine, 2)
    assert torch.equal(rig.cache, others)


@pytest.mark.parametrize("page_bytes", [4096, 2 * 1024 * 1024])
def test_a_store_holds_what_the_forward_pass_wrote_last(way: Way, engine: CopyEngine, page_bytes: int) -> None:
    rig = CopyRig(way, engine, page_bytes, 16)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    rig.cache.fill_(7)
    engine.submit(JobId(1), rig.stores())
    finish(engine, 1)
    assert (rig.arena == 7).all()


@pytest.mark.parametrize("page_bytes", [4096, 2 * 1024 * 1024])
def test_a_load_leaves_blocks_to_those_who_read_them_before(way: Way, engine: CopyEngine, page_bytes: int) -> None:
    rig = CopyRig(way, engine, page_bytes, 16)
    rig.cache.fill_(3)
    rig.arena[:] = 9
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    read = rig.cache.clone()
    engine.submit(JobId(1), rig.stores().reversed())
    finish(engine, 1)
    assert (read == 3).all()
    assert (rig.cache[torch.from_numpy(rig.order).cuda()] == 9).all()


def test_a_load_does_not_wait_for_the_forward_pass_after_it(way: Way) -> None:
    """It ends while compute that was enqueued later is still busy."""
    engine = way.open()
    rig = CopyRig(way, engine, 4096, 16)
    gate = _Gate()
    torch.cuda.synchronize()
    engine.submit(JobId(1), rig.stores().reversed(), before=gate)
    torch.cuda._sleep(10 * BUSY_CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    gate.open()
    finish(engine, 1)
    assert not behind.query()
    torch.cuda.synchronize()
    engine.close()


class _Gate:
    """A hook that holds the copy until the compute that comes after it was enqueued."""

    def __init__(self) -> None:
        import threading

        self._opened = threading.Event()
        self.open: Callable[[], None] = self._opened.set

    def __call__(self) -> str | None:
        return None if self._opened.wait(TIMEOUT_S) else "the gate was never opened"


def test_jobs_in_flight_do_not_overwrite_each_other(way: Way) -> None:
    """Stores and loads of many sizes are enqueued before the first can begin."""
    engine = way.open()
    rigs = [CopyRig(way, engine, size, max(3, (4 << 20) // size)) for size in SIZES for _ in range(6)]
    wanted = []
    for number, rig in enumerate(rigs):
        rig.arena[:] = np.random.default_rng(number).integers(0, 256, rig.arena.nbytes, dtype=np.uint8)
        wanted.append(rig.pages() if number % 2 else rig.arena.copy())
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    for number, rig in enumerate(rigs):
        engine.submit(JobId(number), rig.stores() if number % 2 else rig.stores().reversed())
    assert engine.wait([JobId(number) for number in range(len(rigs))], TIMEOUT_S)
    assert [result.failure for result in engine.poll()] == [None] * len(rigs)
    for number, rig in enumerate(rigs):
        assert np.array_equal(rig.arena if number % 2 else rig.pages(), wanted[number])
    engine.close()


def test_small_turns_of_staging_memory_lose_nothing() -> None:
    tuning = CopyTuning(large_run_bytes=8192, direct_job_bytes=1, staging_bytes=65536)
    engine = CudaCopyEngine(open_device(torch.cuda.current_device(), tuning))
    rig = CopyRig(NativeWay(), engine, 4096, 4000)
    wanted = rig.pages()
    for job_id in range(20):
        rig.arena[:] = 0
        engine.submit(JobId(job_id), rig.stores())
        finish(engine, job_id)
        assert np.array_equal(rig.arena, wanted)
    engine.close()
