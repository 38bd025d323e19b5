"""Who takes checksums: the extension where it is, else xxhash, which is said once. They agree on every byte."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.tiers.digests import digest_by_xxhash, records_digest, view_digest

NOISE = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)

SEAL_TWICE = """
import logging, sys
{hide}
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
from hybridkv.tiers import Key, Slot
from hybridkv.tiers.ram import RamArena
arena = RamArena(65536, 4096)
for _ in range(2):
    assert arena.seal_all([(Key(b"k" * 32), Slot(((0, 4096), (8192, 100))))]) == [None]
    assert arena.check_all([(Key(b"k" * 32), Slot(((0, 4096), (8192, 100))))]) == [None]
"""
HIDE = "sys.modules['hybridkv.native'] = None"


def words_of_a_process(hide: str) -> list[str]:
    program = SEAL_TWICE.format(hide=hide)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_without_the_extension_xxhash_takes_checksums_and_that_is_said_once() -> None:
    [line] = words_of_a_process(HIDE)
    assert line.startswith("WARNING hybridkv.tiers.digests hybridkv.native cannot be imported")
    assert "hint: " in line


def test_with_the_extension_nothing_is_said() -> None:
    pytest.importorskip("hybridkv.native", reason="the extension is not among this target's dependencies")
    assert words_of_a_process("") == []


@given(st.lists(st.binary(max_size=3000), max_size=6))
def test_a_checksum_of_views_is_that_of_xxhash(parts: list[bytes]) -> None:
    views = [memoryview(bytearray(part)) for part in parts]
    assert view_digest(views) == xxhash.xxh3_128_digest(b"".join(parts))


SIZES = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.integers(1 << 20, 1 << 21))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(SIZES, max_size=3), max_size=12), st.randoms(use_true_random=False))
def test_checksums_of_records_are_those_of_xxhash_by_any_number_of_threads(
    records: list[list[int]], random: Random
) -> None:
    starts = [[random.randrange(NOISE.nbytes - size) for size in sizes] for sizes in records]
    places = [place for one, sizes in zip(starts, records, strict=True) for place in zip(one, sizes, strict=True)]
    arrays = np.array(places, dtype=np.int64).reshape(-1, 2).T.copy()
    ends = np.cumsum([len(sizes) for sizes in records], dtype=np.int64)
    expected = [
        xxhash.xxh3_128_digest(b"".join(NOISE[at : at + size].tobytes() for at, size in zip(one, sizes, strict=True)))
        for one, sizes in zip(starts, records, strict=True)
    ]
    for digest in (digest_by_xxhash, *(records_digest(num_threads) for num_threads in (1, 2, 4))):
        assert digest(arrays[0] + NOISE.ctypes.data, arrays[1], ends) == b"".join(expected)
