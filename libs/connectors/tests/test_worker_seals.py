"""Seals of stored chunks: the checksum comes from the copy engine or from a second read.

The second read of the slot is the reference. Both must seal the same.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from msgspec.structs import replace

from hybridkv.canonical import GroupPages, PageRegion
from hybridkv.connectors.vllm.common.copies import devices
from hybridkv.connectors.vllm.common.copies.proof import CopyRates
from hybridkv.connectors.vllm.common.copies.ram_checks import (
    SAMPLED_ONE_IN,
    RamChecks,
    VerifyRam,
    choose_verify_ram,
)
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.connectors.vllm.common.messages import Load, StepPlan, Store
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload import worker as worker_module
from hybridkv.connectors.vllm.offload.worker import OffloadWorker
from hybridkv.tiers import FailureReason, Slot
from hybridkv.tiers.contract import Completion
from hybridkv.tiers.ram import RamArena
from hybridkv.tiers.stack import Direction, TierMove
from hybridkv.transfer import CopyEngine, CopyRuns, InlineCopyEngine
from hybridkv.transfer.jobs import Copier, copy_runs
from kits.tiers.reference import ReferenceMedium

BLOCKS = 16
STRIDE = 4096
PAGES = (3000, 1024, 500)
"""Page bytes of a block in each layer; the rest of the stride is padding."""
CHUNK_BYTES = 4 * (3008 + 1024 + 512)
"""Four blocks, each page padded to whole words of 16 bytes."""
SLOTS = (Slot(((40_000, CHUNK_BYTES),)), Slot(((80_000, 5000), (0, CHUNK_BYTES - 5000))))


class Rig:
    """Worker over one group of plain memory that copies with `copier`, or with an existing engine."""

    def __init__(
        self, copier: Copier = copy_runs, engine: CopyEngine | None = None, verify_ram: VerifyRam | None = None
    ) -> None:
        self.memory = np.random.default_rng(3).integers(0, 256, len(PAGES) * BLOCKS * STRIDE, dtype=np.uint8)
        self.arena = RamArena(128 * 1024, granule_bytes=4096)
        engine = engine or InlineCopyEngine(copier=lambda: copier)
        paths = CopyPaths(engine, engine, 30.0, lambda: 0.0)
        self.metrics = ConnectorMetrics()
        self.worker = OffloadWorker(cast(Any, None), self.arena, paths, self.metrics, verify_ram)
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


SETTINGS: tuple[VerifyRam, ...] = ("always", "sampled", "off")


def flip(rig: Rig, copy: ChunkCopy) -> None:
    rig.arena.views(copy.slot)[0][7] ^= 1


def test_without_the_check_a_flipped_byte_in_ram_is_loaded() -> None:
    """`verify_ram: "off"` means this."""
    rig = Rig(verify_ram="off")
    [copy] = rig.store(SLOTS[0])
    before = rig.memory.copy()
    flip(rig, copy)
    assert rig.load(copy) is None
    assert np.count_nonzero(rig.memory != before) == 1


@pytest.mark.parametrize("verify_ram", ["always", None])
def test_every_load_finds_a_flipped_byte_in_ram_by_default(verify_ram: VerifyRam | None) -> None:
    rig = Rig(verify_ram=verify_ram)
    [copy] = rig.store(SLOTS[0])
    flip(rig, copy)
    assert {rig.load(copy) for _ in range(40)} == {str(FailureReason.CHECKSUM)}


def test_sampled_loads_find_a_flipped_byte_in_ram_at_the_stated_rate() -> None:
    rig = Rig(verify_ram="sampled")
    [copy] = rig.store(SLOTS[0])
    flip(rig, copy)
    found = [rig.load(copy) for _ in range(100 * SAMPLED_ONE_IN)]
    assert set(found) == {None, str(FailureReason.CHECKSUM)}
    assert 70 <= len(found) - found.count(None) <= 130


def test_sampling_leaves_out_no_chunk_for_ever() -> None:
    """Also not one that is loaded at every 16th load, or always together with the same others."""
    arena = RamArena(1 << 20, 4096)
    chunks = [(f"key {number}".encode(), Slot(((4096 * number, 4096),))) for number in range(128)]
    arena.seal_all(chunks)
    for _, slot in chunks:
        arena.views(slot)[0][0] ^= 1
    for others in (0, SAMPLED_ONE_IN - 1):
        checks = RamChecks(arena, "sampled")
        num_found = np.zeros(len(chunks), dtype=int)
        for _ in range(20 * SAMPLED_ONE_IN):
            num_found += [failure is not None for failure in checks.check_all(chunks)]
            for _ in range(others):
                checks.check_all([])
        assert num_found.min() > 0
        assert 17 <= num_found.mean() <= 23


@pytest.mark.parametrize("verify_ram", SETTINGS)
def test_every_setting_compares_the_key_of_the_slot(verify_ram: VerifyRam) -> None:
    rig = Rig(verify_ram=verify_ram)
    first, second = rig.store(*SLOTS)
    rig.arena.seal_all([(b"another key", first.slot)])
    rig.arena.discard(second.slot)
    assert rig.load(first) == str(FailureReason.WRONG_KEY)
    assert rig.load(second) == str(FailureReason.MISSING)


@pytest.mark.parametrize("verify_ram", SETTINGS)
def test_a_failed_load_vouches_for_its_other_chunks_only_if_it_read_all(verify_ram: VerifyRam) -> None:
    rig = Rig(verify_ram=verify_ram)
    copies = rig.store(*SLOTS)
    rig.arena.discard(copies[1].slot)
    rig.worker.start_loads(StepPlan(loads=(Load("r", CopyTable.of(copies)),)))
    assert "r" in rig.worker.results().failed
    outcome = rig.worker.outcome()
    assert outcome is not None
    named = [failure.key for failure in outcome.load_failures["r"]]
    assert named == [copies[1].key] + ([] if verify_ram == "always" else [None])


@pytest.mark.parametrize(("configured", "num_ranks"), [("always", 2), (None, 1), (None, 2)])
def test_a_gpu_rank_does_not_know_what_other_ranks_chose(
    configured: VerifyRam | None, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(verify_ram=configured)
    memory = SimpleNamespace(pages={}, cut={}, zeros=None, register=lambda engines: None)
    monkeypatch.setattr(worker_module, "take_kv_memory", lambda *_, **__: memory)
    monkeypatch.setattr(worker_module, "prove_copies_at_start", lambda *_: rates(loads_gb=1, checksums_gb=1000))
    rig.worker._layout = cast(Any, SimpleNamespace(world_size=num_ranks))
    rig.worker.register({}, 0)
    assert rig.worker._all_ranks_read_all is (configured == "always" or num_ranks == 1)


@pytest.mark.parametrize("verify_ram", SETTINGS)
@pytest.mark.parametrize("reused_offset", [4096, 16384, 20480, 28672])
def test_no_setting_loads_a_slot_that_was_reused_in_part(verify_ram: VerifyRam, reused_offset: int) -> None:
    """Another chunk takes memory of one of three extents, and the first extent keeps its bytes."""
    rig = Rig(verify_ram=verify_ram)
    slot = Slot(((57344, 4096), (8192, 12288), (32768, CHUNK_BYTES)))
    [copy] = rig.store(slot)
    assert rig.load(copy) is None
    reused = Slot(((65536, 4096), (reused_offset, 8192)))
    rig.arena.views(reused)[1][:] = bytes(8192)
    assert rig.arena.seal_all([(b"another key", reused)]) == [None]
    assert (rig.load(copy) is None) == (reused_offset == 20480), "only that memory is free"


@pytest.mark.parametrize("verify_ram", SETTINGS)
def test_no_setting_loads_a_slot_that_another_store_overwrites(verify_ram: VerifyRam) -> None:
    rig = Rig(verify_ram=verify_ram)
    slot = Slot(((49152, 4096), (0, CHUNK_BYTES)))
    [copy] = rig.store(slot)
    rig.arena.discard(Slot(((4096, 4096),)))
    assert rig.load(copy) == str(FailureReason.MISSING)


@pytest.mark.parametrize("verify_ram", ["sampled", "off"])
def test_a_seal_of_other_extents_is_read_before_a_load(verify_ram: VerifyRam) -> None:
    """The index and the seal differ on the rest of the slot."""
    rig = Rig(verify_ram=verify_ram)
    [copy] = rig.store(Slot(((0, 4096), (8192, CHUNK_BYTES))))
    other = Slot(((0, 4096), (65536, CHUNK_BYTES)))
    assert RamChecks(rig.arena, verify_ram).check_all([(copy.key, copy.slot)]) == [None]
    [failure] = RamChecks(rig.arena, verify_ram).check_all([(copy.key, other)])
    assert failure is not None and failure.reason is FailureReason.CHECKSUM


@pytest.mark.parametrize("verify_ram", SETTINGS)
def test_no_setting_offers_bytes_of_a_secondary_tier_that_were_not_verified(verify_ram: VerifyRam) -> None:
    """A chunk is verified when it is promoted. Afterwards it is a chunk in RAM like others."""
    rig = Rig(verify_ram=verify_ram)
    medium, secondary = ReferenceMedium(), Slot(((0, CHUNK_BYTES),))
    rig.worker.bind_secondary_tiers({"disk": lambda namespace: medium})
    [copy] = rig.store(SLOTS[0])

    def move(move_id: int, direction: Direction) -> str | None:
        moves = (TierMove(move_id, direction, "disk", copy.key, copy.slot, secondary),)
        rig.worker.start_loads(StepPlan(moves=moves, namespace=b"n"))
        rig.worker.results()
        outcome = rig.worker.outcome()
        assert outcome is not None
        failure = outcome.moves[move_id].failure
        return None if failure is None else str(failure.reason)

    assert move(1, Direction.CASCADE) is None
    rig.arena.discard(copy.slot)
    assert move(2, Direction.PROMOTE) is None
    assert rig.arena.sealed_checksum(copy.key, copy.slot) == xxhash.xxh3_128_digest(rig.content(copy))
    assert rig.load(copy) is None

    rig.arena.discard(copy.slot)
    medium.views(secondary)[0][7] ^= 1
    assert move(3, Direction.PROMOTE) == str(FailureReason.CHECKSUM)
    assert {rig.load(copy) for _ in range(2 * SAMPLED_ONE_IN)} == {str(FailureReason.MISSING)}

    medium.views(secondary)[0][7] ^= 1
    assert move(4, Direction.PROMOTE) is None
    flip(rig, copy)
    found = {rig.load(copy) for _ in range(20 * SAMPLED_ONE_IN)}
    bad = str(FailureReason.CHECKSUM)
    assert found == {"always": {bad}, "sampled": {None, bad}, "off": {None}}[verify_ram]


@pytest.mark.parametrize("verify_ram", SETTINGS)
def test_no_setting_lets_a_disk_offer_bytes_that_changed_in_ram(verify_ram: VerifyRam) -> None:
    rig = Rig(verify_ram=verify_ram)
    medium = SummingMedium()
    rig.worker.bind_secondary_tiers({"disk": lambda namespace: medium})
    [copy] = rig.store(SLOTS[0])
    flip(rig, copy)
    moves = (TierMove(1, Direction.CASCADE, "disk", copy.key, copy.slot, Slot(((0, CHUNK_BYTES),))),)
    rig.worker.start_loads(StepPlan(moves=moves, namespace=b"n"))
    rig.worker.results()
    outcome = rig.worker.outcome()
    assert outcome is not None and outcome.moves[1].failure is not None
    assert outcome.moves[1].failure.reason is FailureReason.CHECKSUM


class SummingMedium(ReferenceMedium):
    """Returns the checksum of the bytes that it stored, as the disk tier does."""

    def poll(self) -> list[Completion]:
        [(_, _, present, _)] = self._stored.values()
        return [replace(each, checksum=xxhash.xxh3_128_digest(present)) for each in super().poll()]


def rates(loads_gb: float, checksums_gb: float) -> CopyRates:
    return CopyRates(1, (4096,), 1e9, loads_gb * 1e9, checksums_gb * 1e9, 0.1, ())


@pytest.mark.parametrize(
    ("configured", "measured", "is_overlapped", "chosen"),
    [
        (None, None, True, "always"),  # a CPU
        ("off", None, True, "off"),
        (None, rates(54, 72), True, "always"),
        (None, rates(54, 52), True, "always"),
        (None, rates(54, 51), True, "sampled"),
        (None, rates(54, 72), False, "sampled"),  # each load waits for its own checksums
        (None, rates(3, 72), False, "always"),
        (None, rates(0, 0), True, "always"),  # not measured
        ("always", rates(54, 14), True, "always"),
        ("off", rates(3, 72), True, "off"),
    ],
)
def test_the_default_reads_all_chunks_if_that_slows_loads_by_less_than_5_percent(
    configured: VerifyRam | None, measured: CopyRates | None, is_overlapped: bool, chosen: VerifyRam
) -> None:
    assert choose_verify_ram(configured, measured, is_overlapped=is_overlapped) == chosen


def test_the_start_says_which_chunks_are_verified_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.hybridkv.worker"):
        choose_verify_ram(None, rates(54, 14), is_overlapped=True)
        choose_verify_ram("off", None, is_overlapped=True)
        choose_verify_ram(None, None, is_overlapped=True)
    assert [record.message for record in caplog.records] == [
        'verify_ram is "sampled", the default here; checksums of all chunks would slow loads by 74 % '
        "(checksums 14.0 GB/s, loads 54.0 GB/s)",
        'verify_ram is "off", as configured',
    ]
