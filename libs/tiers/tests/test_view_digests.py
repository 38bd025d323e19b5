"""Checksums of memory equal those of xxhash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.tiers.digests import records_digest, view_digest

NOISE = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)


@pytest.mark.parametrize("native", [None, "class MemoryCopier: ..."], ids=["missing", "too old"])
def test_an_import_without_the_extension_fails_with_an_install_hint(tmp_path: Path, native: str | None) -> None:
    program = "import sys; sys.modules['hybridkv.native'] = None; import hybridkv.tiers"
    if native is not None:
        (tmp_path / "old_native.py").write_text(native)
        program = program.replace("= None", "= __import__('old_native')")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); {program}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1 and said.startswith("ImportError: hybridkv.tiers needs hybridkv-native>=0.1,<0.2")
    assert said.endswith("hint: pip install 'hybridkv-native>=0.1,<0.2'")


@given(st.lists(st.binary(max_size=3000), max_size=6))
def test_a_checksum_of_views_equals_xxhash(parts: list[bytes]) -> None:
    views = [memoryview(bytearray(part)) for part in parts]
    assert view_digest(views) == xxhash.xxh3_128_digest(b"".join(parts))


SIZES = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.integers(1 << 20, 1 << 21))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(SIZES, max_size=3), max_size=12), st.randoms(use_true_random=False))
def test_checksums_of_records_equal_xxhash_with_any_number_of_threads(records: list[list[int]], random: Random) -> None:
    starts = [[random.randrange(NOISE.nbytes - size) for size in sizes] for sizes in records]
    places = [place for one, sizes in zip(starts, records, strict=True) for place in zip(one, sizes, strict=True)]
    arrays = np.array(places, dtype=np.int64).reshape(-1, 2).T.copy()
    ends = np.cumsum([len(sizes) for sizes in records], dtype=np.int64)
    expected = [
        xxhash.xxh3_128_digest(b"".join(NOISE[at : at + size].tobytes() for at, size in zip(one, sizes, strict=True)))
        for one, sizes in zip(starts, records, strict=True)
    ]
    for num_threads in (1, 2, 4):
        assert records_digest(num_threads)(arrays[0] + NOISE.ctypes.data, arrays[1], ends) == b"".join(expected)
