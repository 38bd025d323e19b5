"""The copiers of hybridkv.native give the results of numpy and xxhash, at every CPU level."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.native import MemoryCopier, copy_with_memcpy, levels

CACHINGS = ("cached", "streamed")
WAYS = [(level, caching, threads) for level in levels() for caching in CACHINGS for threads in (1, 3)]
COPIERS = {way: MemoryCopier(num_threads=way[2], level=way[0], caching=way[1]) for way in WAYS}
POISON = 0xA5

copier = pytest.mark.parametrize("copier", COPIERS.values(), ids=["-".join(map(str, way)) for way in WAYS])


def integers(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def noise(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def digests(data: bytes) -> list[bytes]:
    return [data[start : start + 16] for start in range(0, len(data), 16)]


RUNS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5000), st.integers(0, 70)), max_size=40)
"""Runs as (offset in the source, bytes, gap before the run in the destination)."""


@settings(max_examples=60, deadline=None)
@given(RUNS, st.integers(0, 63), st.data())
def test_runs_and_digests_equal_numpy_and_xxhash(
    runs: list[tuple[int, int, int]], misalignment: int, data: st.DataObject
) -> None:
    source = noise(8000)
    starts = np.cumsum([0] + [gap + size for _, size, gap in runs])
    wanted = np.full(int(starts[-1]) + misalignment + 64, POISON, dtype=np.uint8)
    places = [misalignment + int(start) + gap for start, (_, _, gap) in zip(starts, runs, strict=False)]
    for place, (offset, size, _) in zip(places, runs, strict=True):
        wanted[place : place + size] = source[offset : offset + size]
    cuts = [*sorted(data.draw(st.lists(st.integers(0, len(runs)), max_size=4))), len(runs)]
    records = [
        b"".join(source[o : o + n].tobytes() for o, n, _ in runs[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)
    ]
    wanted_digests = [xxhash.xxh3_128_digest(record) for record in records]
    for one in COPIERS.values():
        target = np.full_like(wanted, POISON)
        arrays = (
            integers([source.ctypes.data + offset for offset, _, _ in runs]),
            integers([target.ctypes.data + place for place in places]),
            integers([size for _, size, _ in runs]),
        )
        one.copy(*arrays)
        assert np.array_equal(target, wanted)
        target[:] = POISON
        assert digests(one.copy_and_digest(*arrays, integers(cuts))) == wanted_digests
        assert np.array_equal(target, wanted)
        assert digests(one.digest(arrays[0], arrays[2], integers(cuts))) == wanted_digests


@copier
@pytest.mark.parametrize("num_bytes", [0, 1, 240, 241, 1024, 65536, 3_000_001])
def test_a_digest_equals_xxhash(copier: MemoryCopier, num_bytes: int) -> None:
    data = noise(num_bytes + 1)
    got = copier.digest(integers([data.ctypes.data]), integers([num_bytes]), integers([1]))
    assert got == xxhash.xxh3_128_digest(data[:num_bytes].tobytes())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1000, 65_536, 1_000_000, 5_000_000]), min_size=1, max_size=30), st.data())
def test_digests_of_records_split_over_threads_equal_xxhash(sizes: list[int], data: st.DataObject) -> None:
    """Includes empty records, records without runs, and records larger than all others together."""
    ends = [*sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=20))), len(sizes)]
    source = noise(6_000_000)
    offsets = [7919 * number for number in range(len(sizes))]
    runs = [source[offset : offset + size].tobytes() for offset, size in zip(offsets, sizes, strict=True)]
    wanted = [xxhash.xxh3_128_digest(b"".join(runs[a:b])) for a, b in zip([0, *ends], ends, strict=False)]
    addresses = integers([source.ctypes.data + offset for offset in offsets])
    for num_threads in (1, 2, 4):
        got = MemoryCopier(num_threads=num_threads).digest(addresses, integers(sizes), integers(ends))
        assert digests(got) == wanted


def test_copy_with_memcpy_copies_all_bytes() -> None:
    source, target = noise(1000), np.zeros(1000, dtype=np.uint8)
    copy_with_memcpy(source.ctypes.data, target.ctypes.data, 1000)
    assert np.array_equal(source, target)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MemoryCopier(num_threads=0), "num_threads"),
        (lambda: MemoryCopier(level="mmx"), "level"),
        (lambda: MemoryCopier(caching="never"), "caching"),
        (lambda: MemoryCopier().copy(integers([1]), integers([]), integers([1])), "one length"),
        (lambda: MemoryCopier().digest(integers([1]), integers([]), integers([])), "one length"),
        (lambda: MemoryCopier().digest(integers([]), integers([]), integers([1])), "record_ends"),
        (lambda: MemoryCopier().digest(integers([]), integers([]), integers([1, 0])), "record_ends"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_arrays_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError):
        MemoryCopier().copy(np.zeros(1, dtype=np.int32), integers([0]), integers([0]))  # type: ignore[arg-type]


RETURN_LATE = """
import builtins, threading
import numpy as np
from hybridkv.native import MemoryCopier

num_bytes = 64 << 20
builtins.kept = arrays = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
runs = [np.array([number], np.int64) for number in (arrays[0].ctypes.data, arrays[1].ctypes.data, num_bytes)]
has_begun = threading.Event()

def copy():
    copier = MemoryCopier()
    while True:
        has_begun.set()
        copier.copy(*runs)

threading.Thread(target=copy, daemon=True).start()
has_begun.wait()
"""


def test_a_daemon_thread_that_returns_late_does_not_abort_the_process() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(10):
        finished = subprocess.run(
            [sys.executable, "-c", RETURN_LATE], env=environment, capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0, finished.stderr
