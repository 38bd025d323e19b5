"""The file queue of hybridkv.native: both backends write and read what they were given, in any order."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridkv.native import FileQueue, has_uring

READ, WRITE, SYNC = 0, 1, 2
LONG_S = 60.0


def integers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture(params=["threads", "io_uring"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and not has_uring():
        pytest.skip("this kernel gives us no io_uring")
    return str(request.param)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def submit(queue: FileQueue, operation: int, fd: int, pieces: list[tuple[int, list[np.ndarray]]], digests: bool) -> int:
    """Pieces are (offset, arrays)."""
    count = len(pieces)
    arrays = [array for _, extents in pieces for array in extents]
    return queue.submit(
        integers(list(range(count))),
        integers([operation] * count),
        integers([fd] * count),
        integers([offset for offset, _ in pieces]),
        integers(np.cumsum([len(extents) for _, extents in pieces]).tolist()),
        integers([array.ctypes.data for array in arrays]),
        integers([array.nbytes for array in arrays]),
        digests,
    )


def test_the_better_backend_is_taken() -> None:
    assert FileQueue(1).backend == ("io_uring" if has_uring() else "threads")


SIZES = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=4), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES)
def test_what_was_written_is_read_with_its_digest(backend: str, fd: int, sizes: list[list[int]]) -> None:
    queue = FileQueue(len(sizes), backend)
    generator = np.random.default_rng(0)
    written = [[generator.integers(0, 256, size, dtype=np.uint8) for size in extents] for extents in sizes]
    offsets = np.cumsum([0] + [sum(extents) for extents in sizes])[:-1].tolist()
    assert submit(queue, WRITE, fd, list(zip(offsets, written, strict=True)), False) == len(sizes)
    done = queue.reap(len(sizes), LONG_S)
    assert {(tag, error, num_bytes) for tag, error, num_bytes, _ in done} == {
        (tag, 0, sum(extents)) for tag, extents in enumerate(sizes)
    }
    read = [[np.zeros_like(array) for array in extents] for extents in written]
    assert submit(queue, READ, fd, list(zip(offsets, read, strict=True)), True) == len(sizes)
    done = queue.reap(len(sizes), LONG_S)
    assert {tag: digest for tag, _, _, digest in done} == {
        tag: xxhash.xxh3_128_digest(b"".join(array.tobytes() for array in extents))
        for tag, extents in enumerate(written)
    }
    assert all(np.array_equal(a, b) for x, y in zip(read, written, strict=True) for a, b in zip(x, y, strict=True))
    assert queue.num_in_flight == 0


def test_no_more_is_taken_than_there_is_room_for(backend: str, fd: int) -> None:
    queue = FileQueue(3, backend)
    data = np.zeros(10, dtype=np.uint8)
    assert submit(queue, WRITE, fd, [(0, [data])] * 5, False) == 3
    assert submit(queue, WRITE, fd, [(0, [data])], False) == 0
    assert len(queue.reap(3, LONG_S)) == 3
    assert submit(queue, SYNC, fd, [(0, [])], False) == 1
    assert [error for _, error, _, _ in queue.reap(1, LONG_S)] == [0]


def test_a_thread_may_take_over_what_has_nothing_in_flight(backend: str, fd: int) -> None:
    queue = FileQueue(2, backend)
    data = np.zeros(10, dtype=np.uint8)
    ended: list[int] = []

    def write() -> None:
        submit(queue, WRITE, fd, [(0, [data])], False)
        ended.append(queue.reap(1, LONG_S)[0][1])

    for _ in range(3):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert ended == [0, 0, 0]


def test_an_error_is_the_requests_own(backend: str, fd: int) -> None:
    queue = FileQueue(4, backend)
    data = np.zeros(10, dtype=np.uint8)
    submit(queue, READ, fd, [(0, [data])], True)
    assert queue.reap(1, LONG_S) == [(0, errno.ENODATA, 0, bytes(16))]
    submit(queue, READ, -1, [(0, [data])], True)
    assert queue.reap(1, LONG_S) == [(0, errno.EBADF, 0, bytes(16))]


def test_waiting_lets_other_threads_run_but_not_into_the_queue(tmp_path: Path) -> None:
    """A FIFO without a writer's bytes keeps a request in flight for as long as the test wants."""
    if not has_uring():
        pytest.skip("preadv, which the other backend uses, does not read FIFOs")
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    queue = FileQueue(2, "io_uring")
    data = np.zeros(1, dtype=np.uint8)
    waited: list[tuple[int, int, int, bytes]] = []
    is_submitted, may_wait = threading.Event(), threading.Event()

    def wait() -> None:
        assert submit(queue, READ, fifo, [(-1, [data])], False) == 1
        is_submitted.set()
        assert may_wait.wait(LONG_S)
        while not waited:
            with contextlib.suppress(RuntimeError):  # the other side was inside
                waited.extend(queue.reap(1, LONG_S))

    def try_until(words: str) -> None:
        while True:
            with pytest.raises(RuntimeError, match="another thread") as refused:
                queue.reap(0, 0.0)
            if words in str(refused.value):
                return

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_submitted.wait(LONG_S)
    try_until("has something in flight")
    with pytest.raises(RuntimeError, match="something in flight of another thread"):
        submit(queue, READ, fifo, [(-1, [data])], False)
    may_wait.set()
    try_until("is used")
    os.write(fifo, b"x")
    thread.join()
    os.close(fifo)
    assert [done[:3] for done in waited] == [(0, 0, 1)]
    assert data.tobytes() == b"x"
    assert queue.reap(1, 0.0) == [], "nothing is in flight: another thread may take over"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "max_in_flight"), ((5000,), "max_in_flight"), ((1, "aio"), "backend"), ((1, "best", 0), "num_threads")],
)
def test_what_makes_no_queue_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FileQueue(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operations", "ends", "sizes", "message"),
    [
        ([3], [1], [1], "operations"),
        ([0], [2], [1], "extent_ends"),
        ([0], [1], [-1], "num_bytes"),
        ([0], [], [1], "length"),
    ],
)
def test_requests_that_fit_no_call_are_refused(
    operations: list[int], ends: list[int], sizes: list[int], message: str
) -> None:
    queue = FileQueue(1, "threads")
    one = integers([0])
    with pytest.raises(ValueError, match=message):
        queue.submit(one, integers(operations), one, one, integers(ends), one, integers(sizes), False)
    assert queue.num_in_flight == 0
