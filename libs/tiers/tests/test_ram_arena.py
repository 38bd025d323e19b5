"""Host memory tier beyond the contract: memory, slots and sizes."""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hybridkv.tiers import FailureReason, Slot, TierConfigurationError
from hybridkv.tiers.ram import RamArena, RamIndex, choose_granule_bytes
from hybridkv.tiers.ram import arena as arena_module

GRANULE_BYTES = 4096
KIB = 1024
MIB = 1024 * KIB


def scattered_slot(index: RamIndex) -> Slot:
    """Slot of several extents; the last one is not a whole granule."""
    for number in range(8):
        index.reserve(bytes([number]), GRANULE_BYTES)
    for number in (1, 4, 6):
        index.abort(bytes([number]))
    slot = index.reserve(b"scattered", 2 * GRANULE_BYTES + 100)
    assert isinstance(slot, Slot)
    return slot


@pytest.fixture
def arena() -> RamArena:
    return RamArena(8 * GRANULE_BYTES, GRANULE_BYTES)


@pytest.fixture
def slot() -> Slot:
    return scattered_slot(RamIndex(8 * GRANULE_BYTES, GRANULE_BYTES))


def test_a_scattered_slot_is_trimmed_in_its_last_extent(slot: Slot) -> None:
    assert slot.extents == (
        (1 * GRANULE_BYTES, GRANULE_BYTES),
        (4 * GRANULE_BYTES, GRANULE_BYTES),
        (6 * GRANULE_BYTES, 100),
    )


def test_adjacent_granules_are_one_extent() -> None:
    index = RamIndex(8 * GRANULE_BYTES, GRANULE_BYTES)
    for number in range(8):
        index.reserve(bytes([number]), GRANULE_BYTES)
    for number in (5, 3, 4):
        index.abort(bytes([number]))
    assert index.reserve(b"key", 3 * GRANULE_BYTES) == Slot(((3 * GRANULE_BYTES, 3 * GRANULE_BYTES),))


def test_memory_is_page_aligned(arena: RamArena) -> None:
    assert arena.base_address % mmap.PAGESIZE == 0


def test_memory_is_committed_only_when_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    arena = RamArena(1024 * MIB)
    assert resident_bytes() - before < 256 * MIB
    arena.close()


def test_a_buffer_of_the_caller_is_used() -> None:
    buffer = np.zeros(10 * GRANULE_BYTES, dtype=np.uint8)
    arena = RamArena(2 * GRANULE_BYTES, GRANULE_BYTES, buffer)
    arena.views(Slot(((GRANULE_BYTES, 3),)))[0][:] = b"abc"
    assert arena.base_address == buffer.ctypes.data
    assert buffer[GRANULE_BYTES : GRANULE_BYTES + 3].tobytes() == b"abc"


@pytest.mark.parametrize("digest_threads", [1, 2, 4])
def test_a_flipped_byte_fails_only_its_own_chunk(digest_threads: int) -> None:
    """In a job of 8 MiB, shared between threads."""
    arena = RamArena(8 * MIB, GRANULE_BYTES, digest_threads=digest_threads)
    random = np.random.default_rng(digest_threads)
    [whole] = arena.views(Slot(((0, 8 * MIB),)))
    whole[:] = random.bytes(8 * MIB)
    edges = [0, *np.sort(random.choice(np.arange(1, 8 * MIB), 99, replace=False)).tolist(), 8 * MIB]
    chunks = [(bytes([number]), Slot(((start, end - start),))) for number, (start, end) in enumerate(pairwise(edges))]
    assert arena.seal_all(chunks) == [None] * 100
    assert arena.check_all(chunks) == [None] * 100
    for damaged in (0, 41, 99):
        position = int(random.integers(edges[damaged], edges[damaged + 1]))
        whole[position] ^= 1
        failures = arena.check_all(chunks)
        whole[position] ^= 1
        assert [number for number, failure in enumerate(failures) if failure is not None] == [damaged]
        assert failures[damaged].reason is FailureReason.CHECKSUM


def test_a_check_goes_on_if_the_arena_is_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, chunk = RamArena(MIB, GRANULE_BYTES), (b"key", Slot(((0, MIB),)))
    arena.views(chunk[1])[0][:] = b"x" * MIB
    assert arena.seal_all([chunk]) == [None]
    digest = arena_module.records_digest(1)

    def close_first(*arrays: np.ndarray) -> bytes:
        arena.close()
        return digest(*arrays)

    monkeypatch.setattr(arena_module, "records_digest", lambda num_threads: close_first)
    assert arena.check_all([chunk]) == [None]


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(GRANULE_BYTES - 1, dtype=np.uint8),
        np.zeros(GRANULE_BYTES, dtype=np.int8),
        np.zeros((2, GRANULE_BYTES), dtype=np.uint8),
        np.zeros(2 * GRANULE_BYTES, dtype=np.uint8)[::2],
        np.frombuffer(bytes(GRANULE_BYTES), dtype=np.uint8),
    ],
    ids=["too small", "not uint8", "two-dimensional", "strided", "read-only"],
)
def test_an_unsuitable_buffer_is_refused(buffer: np.ndarray) -> None:
    with pytest.raises(TierConfigurationError) as caught:
        RamArena(GRANULE_BYTES, GRANULE_BYTES, buffer)
    assert caught.value.field == "buffer"


@pytest.mark.parametrize("tier", [RamIndex, RamArena])
@pytest.mark.parametrize("capacity_bytes", [-1, 0, GRANULE_BYTES - 1])
def test_a_bad_capacity_is_refused_with_the_expected_value(
    tier: type[RamIndex | RamArena], capacity_bytes: int
) -> None:
    with pytest.raises(ValueError, match="capacity_bytes: expected") as caught:
        tier(capacity_bytes, GRANULE_BYTES)
    assert isinstance(caught.value, TierConfigurationError)
    assert (caught.value.field, caught.value.got) == ("capacity_bytes", capacity_bytes)
    assert caught.value.expected


def test_memory_that_cannot_be_mapped_is_a_configuration_error() -> None:
    with pytest.raises(TierConfigurationError, match="hint: give the tier less memory"):
        RamArena(1 << 62)


def test_index_and_arena_round_the_capacity_alike() -> None:
    capacity_bytes = 3 * GRANULE_BYTES + 17
    index = RamIndex(capacity_bytes, GRANULE_BYTES)
    assert index.capacity_bytes == RamArena(capacity_bytes, GRANULE_BYTES).capacity_bytes == 3 * GRANULE_BYTES


@pytest.mark.parametrize(
    ("chunk_sizes", "granule_bytes"),
    [
        ([1], 4 * KIB),
        ([64 * KIB], 4 * KIB),
        ([128 * KIB - 1], 4 * KIB),
        ([128 * KIB], 8 * KIB),
        ([10 * MIB, 300 * KIB], 16 * KIB),
        ([16 * MIB], MIB),
        ([1024 * MIB], MIB),
    ],
)
def test_a_granule_is_a_sixteenth_of_the_smallest_chunk_within_bounds(
    chunk_sizes: list[int], granule_bytes: int
) -> None:
    assert choose_granule_bytes(chunk_sizes) == granule_bytes


@pytest.mark.parametrize("chunk_sizes", [[], [0], [4096, -1]])
def test_a_granule_cannot_be_chosen_for_no_bytes(chunk_sizes: list[int]) -> None:
    with pytest.raises(TierConfigurationError, match="chunk_sizes"):
        choose_granule_bytes(chunk_sizes)
