"""Native code copies runs and computes digests of records in the same pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.transfer import CopyRuns, InlineCopyEngine, JobId, RecordDigests
from hybridkv.transfer.jobs import copy_runs


@pytest.mark.parametrize("native", [None, "class MemoryCopier: ..."], ids=["missing", "too old"])
def test_the_error_without_the_extension_says_what_to_install(tmp_path: Path, native: str | None) -> None:
    program = "import sys; sys.modules['hybridkv.native'] = None; import hybridkv.transfer"
    if native is not None:
        (tmp_path / "old_native.py").write_text(native)
        program = program.replace("= None", "= __import__('old_native')")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); {program}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1 and said.startswith("ImportError: hybridkv.transfer needs hybridkv-native>=0.1,<0.2")
    assert said.endswith("hint: pip install 'hybridkv-native>=0.1,<0.2'")


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 3000), st.integers(0, 70)), max_size=30))
def test_every_byte_is_copied_and_digests_equal_those_of_xxhash(runs: list[tuple[int, int, int]]) -> None:
    source = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8)
    starts = np.cumsum([0] + [gap + size for _, size, gap in runs])
    places = [int(start) + gap for start, (_, _, gap) in zip(starts, runs, strict=False)]
    expected = np.full(int(starts[-1]) + 1, 0xA5, dtype=np.uint8)
    for place, (offset, size, _) in zip(places, runs, strict=True):
        expected[place : place + size] = source[offset : offset + size]
    digests = [xxhash.xxh3_128_digest(source[offset : offset + size]) for offset, size, _ in runs]
    for record_ends in (None, np.arange(1, len(runs) + 1, dtype=np.int64)):
        target = np.full(len(expected), 0xA5, dtype=np.uint8)
        triples = [
            (source.ctypes.data + offset, target.ctypes.data + place, size)
            for place, (offset, size, _) in zip(places, runs, strict=True)
        ]
        assert copy_runs(CopyRuns.of(triples), record_ends) == (None if record_ends is None else digests)
        assert target.tobytes() == expected.tobytes()


def test_an_engine_computes_digests_while_it_copies() -> None:
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
    engine = InlineCopyEngine()
    engine.register(source.ctypes.data, 256, "source")
    engine.register(target.ctypes.data, 256, "target")
    records = RecordDigests(np.array([1], dtype=np.int64))
    engine.submit(JobId(1), CopyRuns.of([(source.ctypes.data, target.ctypes.data, 256)]), records=records)
    assert records.digests == [xxhash.xxh3_128_digest(target)]
