"""The record queue of hybridkv.native: its arguments, and the lifetime of buffers that are in use."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import patience
import pytest
import xxhash

from hybridkv.native import RecordQueue, has_uring

LONG_S = patience.seconds(6.0)
DIGEST_AT = 8
HEADER = b"8 bytes." + bytes(16) + b"and a key"
DONE, FAILED, OTHER_HEADER, OTHER_PAYLOAD, CANCELLED = range(5)


@pytest.fixture(params=["threads", "io_uring"])
def queue(request: pytest.FixtureRequest) -> Iterator[RecordQueue]:
    if request.param == "io_uring" and not has_uring():
        pytest.skip("this kernel does not allow io_uring")
    queue = RecordQueue(2, 1 << 20, DIGEST_AT, request.param)
    assert queue.backend == request.param
    yield queue
    assert queue.close(LONG_S)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def only(queue: RecordQueue) -> tuple[int, int, int, bytes, bytes]:
    assert queue.wait_until_idle(LONG_S)
    [ended] = queue.take()
    return ended


def test_a_record_is_a_header_page_and_the_padded_payload(queue: RecordQueue, fd: int) -> None:
    parts = [b"x" * 5000, b"", memoryview(b"yz" * 10)]
    payload = b"".join(parts)
    assert queue.submit(7, True, fd, 8192, False, False, HEADER, parts)
    digest = xxhash.xxh3_128_digest(payload)
    assert only(queue) == (7, DONE, 0, digest, b"")
    header = HEADER[:DIGEST_AT] + digest + HEADER[DIGEST_AT + 16 :]
    page = (header + xxhash.xxh3_128_digest(header)).ljust(4096, b"\0")
    assert os.pread(fd, 1 << 20, 8192) == page + payload.ljust(8192, b"\0")
    destination = [bytearray(20), np.zeros(5000, dtype=np.uint8)]
    assert queue.submit(7, False, fd, 8192, False, False, HEADER, destination)
    assert only(queue) == (7, DONE, 0, digest, b"")
    assert b"".join(map(bytes, destination)) == payload
    other = HEADER.replace(b"key", b"kez")
    assert queue.submit(7, False, fd, 8192, False, False, other, destination)
    assert only(queue) == (7, OTHER_HEADER, 0, bytes(16), page)
    os.pwrite(fd, b"?", 8192 + 4096 + 5019)
    assert queue.submit(7, False, fd, 8192, False, False, HEADER, destination)
    assert only(queue)[1] == OTHER_PAYLOAD
    os.ftruncate(fd, 16384)
    assert queue.submit(7, False, fd, 8192, False, False, HEADER, destination)
    assert only(queue)[1:3] == (FAILED, errno.ENODATA)


def test_a_buffer_is_kept_until_its_result_is_taken(queue: RecordQueue, fd: int) -> None:
    destination = np.zeros(4096, dtype=np.uint8)
    is_gone = weakref.ref(destination)
    assert queue.submit(1, False, fd, 0, False, False, HEADER, [destination])
    del destination
    assert queue.wait_until_idle(LONG_S)
    gc.collect()
    assert is_gone() is not None
    queue.take()
    assert is_gone() is None


def test_a_closed_queue_accepts_no_record_and_keeps_no_buffer(queue: RecordQueue, fd: int) -> None:
    assert queue.close(LONG_S)
    destination = bytearray(10)
    assert not queue.submit(1, False, fd, 0, False, False, HEADER, [destination])
    destination.extend(b"not in use")
    assert queue.take() == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"offset": 100}, ValueError, "offset"),
        ({"offset": -4096}, ValueError, "offset"),
        ({"header": HEADER[: DIGEST_AT + 15]}, ValueError, "header"),
        ({"header": bytes(4081)}, ValueError, "header"),
        ({"buffers": []}, ValueError, "buffers"),
        ({"buffers": [b""], "is_store": True}, ValueError, "buffers"),
        ({"buffers": [b"read-only"]}, BufferError, "writable"),
        ({"buffers": [memoryview(bytearray(10))[::2]]}, BufferError, "contiguous"),
        ({"buffers": [1]}, TypeError, "bytes-like"),
    ],
)
def test_invalid_arguments_of_a_record_are_refused_by_name(
    queue: RecordQueue, fd: int, changes: dict[str, object], error: type[Exception], words: str
) -> None:
    arguments: dict[str, object] = {
        "tag": 1,
        "is_store": False,
        "fd": fd,
        "offset": 0,
        "is_direct": False,
        "syncs": False,
        "header": HEADER,
        "buffers": [bytearray(10)],
    }
    with pytest.raises(error, match=words):
        queue.submit(**arguments | changes)  # type: ignore[arg-type]
    assert queue.wait_until_idle(0.0) and queue.take() == []


def test_a_tag_is_in_use_until_its_result_is_taken(queue: RecordQueue, fd: int) -> None:
    assert queue.submit(1, True, fd, 0, False, False, HEADER, [b"x"])
    with pytest.raises(ValueError, match="tag"):
        queue.submit(1, True, fd, 0, False, False, HEADER, [b"x"])
    assert only(queue)[0] == 1
    assert queue.submit(1, True, fd, 0, False, False, HEADER, [b"x"])
    only(queue)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0, 1, 0, "best"), "max_in_flight"), ((1, 1, 0, "worst"), "backend"), ((1, 1, 4080), "digest_at")],
)
def test_invalid_arguments_of_a_queue_are_refused_by_name(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RecordQueue(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, threading.TIMEOUT_MAX])
def test_a_wait_longer_than_the_clocks_range_does_not_end_early(queue: RecordQueue, fd: int, timeout_s: float) -> None:
    assert queue.submit(1, True, fd, 0, False, False, HEADER, [bytes(1 << 20)])
    assert queue.wait_until_idle(timeout_s)
    assert queue.close(timeout_s)


def test_the_reason_for_a_missing_ring_is_reported() -> None:
    queue = RecordQueue(2, 1 << 20, DIGEST_AT)
    assert (queue.uring_error == 0) == has_uring() == (queue.backend == "io_uring")
    assert RecordQueue(2, 1 << 20, DIGEST_AT, "threads").uring_error == 0, "io_uring was not requested"


FEW_THREADS = """
import os, resource, sys
from hybridkv.native import MemoryCopier, RecordQueue

with open("/proc/self/statm") as statm:
    address_space_bytes = int(statm.read().split()[0]) * resource.getpagesize()
limit = address_space_bytes + int(sys.argv[1]) * (1 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
made = []
for make in (
    lambda: MemoryCopier(num_threads=256),
    lambda: RecordQueue(256, 1 << 20, 8, "threads"),
):
    try:
        make()
        made.append("made")
    except (RuntimeError, MemoryError):
        made.append("refused")
print(*made)
"""


@pytest.mark.parametrize(("num_mebibytes", "made"), [(2, "made refused"), (200, "made made")], ids=["none", "few"])
def test_a_class_works_with_few_threads_and_raises_without_any(num_mebibytes: int, made: str) -> None:
    finished = subprocess.run(
        ["bash", "-c", 'ulimit -s 8192 && exec "$@"', "-", sys.executable, "-c", FEW_THREADS, str(num_mebibytes)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (finished.returncode, finished.stdout.strip()) == (0, made), finished.stderr


def test_a_queue_dropped_during_work_keeps_its_buffers(fd: int) -> None:
    chunk = bytes(1 << 20)
    for _ in range(20):
        queue = RecordQueue(2, 1 << 20, DIGEST_AT)
        for tag in range(4):
            assert queue.submit(tag, True, fd, tag * (1 << 21), False, False, HEADER, [bytearray(chunk)])
        del queue
