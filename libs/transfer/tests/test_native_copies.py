"""Who copies runs of host memory: the extension where it is, else the reference, which says so once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.transfer import CopyRuns, InlineCopyEngine, JobId, RecordDigests
from hybridkv.transfer.native import copy_one_by_one, runs_copier

COPY_TWICE = """
import logging, sys
{hide}
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
import numpy as np
from hybridkv.transfer import CopyRuns, InlineCopyEngine, JobId
source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
for _ in range(2):
    engine = InlineCopyEngine()
    engine.register(source.ctypes.data, 64, "source")
    engine.register(target.ctypes.data, 64, "target")
    engine.submit(JobId(1), CopyRuns.of([(source.ctypes.data, target.ctypes.data, 64)]))
    assert engine.poll()[0].failure is None
    assert (source == target).all()
    target[:] = 0
"""
HIDE = "sys.modules['hybridkv.native'] = None"


def words_of_a_process(hide: str) -> list[str]:
    program = COPY_TWICE.format(hide=hide)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_without_the_extension_the_reference_copies_and_says_so_once() -> None:
    [line] = words_of_a_process(HIDE)
    assert line.startswith("WARNING hybridkv.transfer.native hybridkv.native cannot be imported")
    assert "hint: " in line


def test_with_the_extension_nothing_is_said() -> None:
    pytest.importorskip("hybridkv.native", reason="the extension is not among this target's dependencies")
    assert words_of_a_process("") == []


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 3000), st.integers(0, 70)), max_size=30))
def test_whoever_copies_copies_what_the_reference_does(runs: list[tuple[int, int, int]]) -> None:
    source = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8)
    starts = np.cumsum([0] + [gap + size for _, size, gap in runs])
    places = [int(start) + gap for start, (_, _, gap) in zip(starts, runs, strict=False)]
    targets = [np.full(int(starts[-1]) + 1, 0xA5, dtype=np.uint8) for _ in range(3)]
    ends = np.arange(1, len(runs) + 1, dtype=np.int64)
    wanted = [xxhash.xxh3_128_digest(source[offset : offset + size]) for offset, size, _ in runs]
    ways = ((copy_one_by_one, None), (runs_copier(), None), (runs_copier(), ends))
    for target, (copy, record_ends) in zip(targets, ways, strict=True):
        triples = [
            (source.ctypes.data + offset, target.ctypes.data + place, size)
            for place, (offset, size, _) in zip(places, runs, strict=True)
        ]
        digests = copy(CopyRuns.of(triples), record_ends)
        takes_digests = copy is not copy_one_by_one and record_ends is not None
        assert digests == (wanted if takes_digests else None)
    assert targets[0].tobytes() == targets[1].tobytes() == targets[2].tobytes()


def test_with_the_extension_an_engine_takes_digests_while_it_copies() -> None:
    pytest.importorskip("hybridkv.native", reason="the extension is not among this target's dependencies")
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
    engine = InlineCopyEngine()
    engine.register(source.ctypes.data, 256, "source")
    engine.register(target.ctypes.data, 256, "target")
    records = RecordDigests(np.array([1], dtype=np.int64))
    engine.submit(JobId(1), CopyRuns.of([(source.ctypes.data, target.ctypes.data, 256)]), records=records)
    assert records.digests == [xxhash.xxh3_128_digest(target)]
