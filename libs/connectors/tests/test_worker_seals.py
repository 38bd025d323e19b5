"""Seals of stored chunks: the checksum comes from the copy engine or from a second read.

The second read of the slot is the reference. Both must seal the same.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import xxhash

from hybridkv.canonical import GroupPages, PageRegion
from hybridkv.connectors.vllm.common.copies import devices
from hybridkv.connectors.vllm.common.messages import ChunkCopy, CopyTable, Load, StepPlan, Store
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.worker import CopyPaths, OffloadWorker
from hybridkv.tiers import FailureReason, Slot
from hybridkv.tiers.ram import RamArena
from hybridkv.transfer import CopyEngine, CopyRuns, InlineCopyEngine
from hybridkv.transfer.jobs import Copier, copy_runs

BLOCKS = 16
STRIDE = 4096
PAGES = (3000, 1024, 500)
"""Page bytes of a block in each layer; the rest of the stride is padding."""
CHUNK_BYTES = 4 * (3008 + 1024 + 512)
"""Four blocks, each page padded to whole words of 16 bytes."""
SLOTS = (Slot(((40_000, CHUNK_BYTES),)), Slot(((80_000, 5000), (0, CHUNK_BYTES - 5000))))


class Rig:
    """Worker over one group of plain memory that copies with `copier`, or with an existing engine."""

    def __init__(self, copier: Copier, engine: CopyEngine | None = None) -> None:
        self.memory = np.random.default_rng(3).integers(0, 256, len(PAGES) * BLOCKS * STRIDE, dtype=np.uint8)
        self.arena = RamArena(128 * 1024)
        engine = engine or InlineCopyEngine(copier=lambda: copier)
        paths = CopyPaths(engine, engine, 30.0, lambda: 0.0)
        self.metrics = ConnectorMetrics()
        self.worker = OffloadWorker(cast(Any, None), self.arena, paths, self.metrics)
        base = self.memory.ctypes.data
        regions = [PageRegion(base + i * BLOCKS * STRIDE, STRIDE, num_bytes) for i, num_bytes in enumerate(PAGES)]
        self.worker._pages = {0: GroupPages([[region] for region in regions], BLOCKS)}
        self.worker._zero_memory = devices.zero_memory("cpu")
        self.arena.views(Slot(((0, self.arena.capacity_bytes),)))[0][:] = b"\xee" * self.arena.capacity_bytes
        engine.register(base, self.memory.nbytes, "kv cache")
        engine.register(self.worker._zero_memory.data_ptr(), self.worker._zero_memory.nbytes, "zeros")
        engine.register(self.arena.base_address, self.arena.capacity_bytes, "arena")

    def store(self, *slots: Slot) -> list[ChunkCopy]:
        blocks = np.random.default_rng(4).permutation(BLOCKS).tolist()
        copies = [
            ChunkCopy(0, f"key {number}".encode(), slot, 0, 4, tuple(blocks[4 * number : 4 * number + 4]))
            for number, slot in enumerate(slots)
        ]
        self.worker.start_stores(StepPlan(stores=(Store(1, CopyTable.of(copies)),)))
        self.worker.results()
        outcome = self.worker.outcome()
        assert outcome is not None
        assert outcome.stores[1].failure is None
        return copies

    def load(self, copy: ChunkCopy) -> str | None:
        """Reason of the failed load, or None."""
        self.worker.start_loads(StepPlan(loads=(Load("r", CopyTable.of([copy])),)))
        failed = "r" in self.worker.results().failed
        outcome = self.worker.outcome()
        return outcome.load_failures["r"][0].reason if failed and outcome is not None else None

    def content(self, copy: ChunkCopy) -> bytes:
        """Expected bytes of the slot, read from the blocks: block by block, with zeros after each page and after the
        chunk.
        """
        layers = self.memory.reshape(len(PAGES), BLOCKS, STRIDE)
        pages = [layers[i, block, :num_bytes] for block in copy.block_ids for i, num_bytes in enumerate(PAGES)]
        content = b"".join(page.tobytes() + bytes(-len(page) % 16) for page in pages)
        return content.ljust(copy.slot.num_bytes, b"\0")


def without_digests(runs: CopyRuns, record_ends: Any = None) -> None:
    """Copier that computes no digests, as some engines do."""
    copy_runs(runs)


@pytest.fixture(params=[copy_runs, without_digests], ids=["on the way", "read again"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_a_store_is_sealed_with_the_checksum_of_its_content(rig: Rig) -> None:
    for copy in rig.store(*SLOTS):
        assert rig.arena.sealed_checksum(copy.key, copy.slot) == xxhash.xxh3_128_digest(rig.content(copy))
        assert b"".join(rig.arena.views(copy.slot)) == rig.content(copy)
        assert rig.load(copy) is None


@pytest.mark.parametrize("spare_bytes", [1, 100, 70_000])
def test_the_rest_of_a_slot_after_its_chunk_is_zero_and_sealed(rig: Rig, spare_bytes: int) -> None:
    """The arena held other bytes, which a disk tier would store with the slot."""
    larger = Slot(((20_480, CHUNK_BYTES + spare_bytes),))
    [copy] = rig.store(larger)
    assert rig.arena.views(larger)[0] == rig.content(copy)
    assert rig.arena.sealed_checksum(copy.key, larger) == xxhash.xxh3_128_digest(rig.content(copy))
    assert rig.load(copy) is None


def test_a_chunk_counts_the_same_bytes_stored_and_loaded(rig: Rig) -> None:
    """Bytes of its pages, without the zeros after each page and after the chunk."""
    [copy] = rig.store(Slot(((20_480, CHUNK_BYTES + 100),)))
    assert rig.load(copy) is None
    stats = rig.metrics.take()
    assert stats is not None
    counted = {name: sum(total for _, total in buckets) for name, _, buckets in stats.data["histograms"]}
    sizes = [counted[f"vllm:hybridkv_{job}_size_bytes"] for job in ("store", "load")]
    assert sizes == [4 * sum(PAGES)] * 2


def test_a_flipped_bit_of_the_padding_fails_the_load(rig: Rig) -> None:
    [copy] = rig.store(SLOTS[0])
    view = rig.arena.views(copy.slot)[0]
    assert view[3007] == 0, "the zeros after the first page"
    view[3007] ^= 1
    assert rig.load(copy) == str(FailureReason.CHECKSUM)


def test_a_flipped_bit_fails_the_load(rig: Rig) -> None:
    first, second = rig.store(*SLOTS)
    rig.arena.views(second.slot)[1][7] ^= 1
    assert rig.load(second) == str(FailureReason.CHECKSUM)
    assert rig.load(first) is None


def test_a_chunk_digested_during_the_copy_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(copy_runs)
    monkeypatch.setattr(rig.arena, "_checksums", lambda buffer, slots: pytest.fail("the slot was read again"))
    rig.store(*SLOTS)


def damaging(copy: Copier) -> Copier:
    """Copier that flips a bit of the last destination after the copy."""

    def copy_and_damage(runs: CopyRuns, record_ends: Any = None) -> list[bytes] | None:
        digests = copy(runs, record_ends)
        damaged = np.array([0], dtype=np.uint8)
        address = int(runs.destinations[-1])
        copy_runs(CopyRuns.of([(address, damaged.ctypes.data, 1)]))
        damaged ^= 1
        copy_runs(CopyRuns.of([(damaged.ctypes.data, address, 1)]))
        return digests

    return copy_and_damage


def test_damage_between_copy_and_seal_fails_the_load() -> None:
    rig = Rig(damaging(copy_runs))
    [copy] = rig.store(SLOTS[0])
    assert rig.load(copy) == str(FailureReason.CHECKSUM)


def test_a_wrong_digest_of_the_copy_engine_fails_the_load() -> None:
    def wrong(runs: CopyRuns, record_ends: Any = None) -> list[bytes] | None:
        copy_runs(runs)
        return None if record_ends is None else [bytes(16)] * len(record_ends)

    rig = Rig(wrong)
    [copy] = rig.store(SLOTS[0])
    assert rig.load(copy) == str(FailureReason.CHECKSUM)
