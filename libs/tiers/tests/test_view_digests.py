"""Who takes checksums: the extension where it is, else xxhash, which is said once. They agree on every byte."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.tiers.digests import digest_by_xxhash, view_digest

SEAL_TWICE = """
import logging, sys
{hide}
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
from hybridkv.tiers import Key, Slot
from hybridkv.tiers.ram import RamArena
arena = RamArena(65536, 4096)
for _ in range(2):
    assert arena.seal(Key(b"k" * 32), Slot(((0, 4096), (8192, 100)))) is None
    assert arena.check(Key(b"k" * 32), Slot(((0, 4096), (8192, 100)))) is None
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
def test_whoever_takes_a_checksum_gives_that_of_xxhash(parts: list[bytes]) -> None:
    views = [memoryview(bytearray(part)) for part in parts]
    assert view_digest()(views) == digest_by_xxhash(views)
