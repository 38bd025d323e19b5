"""Worker loads: local chunks are copied from block to block, and other chunks of the same load from the tier."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from test_worker_seals import BLOCKS, CHUNK_BYTES, PAGES, SLOTS, STRIDE, Rig

from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.connectors.vllm.common.messages import Load, StepPlan, Store
from hybridkv.tiers import FailureReason, Slot
from hybridkv.transfer.jobs import copy_runs


@pytest.fixture
def rig() -> Rig:
    return Rig(copy_runs)


def pages(rig: Rig, block: int) -> list[bytes]:
    layers = rig.memory.reshape(len(PAGES), BLOCKS, STRIDE)
    return [layers[i, block, :num_bytes].tobytes() for i, num_bytes in enumerate(PAGES)]


def load(rig: Rig, *copies: ChunkCopy) -> str | None:
    """Reason of the failed load, or None."""
    rig.worker.start_loads(StepPlan(loads=(Load("r", CopyTable.of(copies)),)))
    failed = "r" in rig.worker.results().failed
    outcome = rig.worker.outcome()
    return outcome.load_failures["r"][0].reason if failed and outcome is not None else None


def test_local_blocks_are_copied_beside_blocks_from_the_tier(rig: Rig) -> None:
    first, second = rig.store(*SLOTS)
    others = [block for block in range(BLOCKS) if block not in first.block_ids + second.block_ids]
    before = rig.memory.copy()
    local = msgspec.structs.replace(first, block_ids=tuple(others[:4]), local_blocks=first.block_ids)
    stored = msgspec.structs.replace(second, block_ids=tuple(others[4:]))
    expected = [pages(rig, block) for block in (*first.block_ids, *second.block_ids)]
    assert load(rig, stored, local) is None
    assert [pages(rig, block) for block in others] == expected
    rig.memory.reshape(len(PAGES), BLOCKS, STRIDE)[:, others] = before.reshape(len(PAGES), BLOCKS, STRIDE)[:, others]
    for i, num_bytes in enumerate(PAGES):
        changed = rig.memory.reshape(len(PAGES), BLOCKS, STRIDE)[i, :, num_bytes:]
        assert np.array_equal(changed, before.reshape(len(PAGES), BLOCKS, STRIDE)[i, :, num_bytes:]), "padding"
    assert np.array_equal(rig.memory, before), "other blocks"


def test_only_chunks_read_from_the_tier_are_verified(rig: Rig) -> None:
    first, second = rig.store(*SLOTS)
    others = tuple(block for block in range(BLOCKS) if block not in first.block_ids + second.block_ids)
    local = msgspec.structs.replace(first, block_ids=others[:4], local_blocks=first.block_ids)
    rig.arena.views(first.slot)[0][7] ^= 1
    assert load(rig, local) is None
    rig.arena.views(second.slot)[1][7] ^= 1
    assert load(rig, local, msgspec.structs.replace(second, block_ids=others[4:])) == str(FailureReason.CHECKSUM)


@pytest.mark.parametrize("local_blocks", [(0, 1, 2), (0, 1, 2, BLOCKS), (0, 1, 2, 4)], ids=["few", "outside", "itself"])
def test_invalid_local_blocks_fail_the_load(rig: Rig, local_blocks: tuple[int, ...]) -> None:
    before = rig.memory.copy()
    copy = ChunkCopy(0, b"k", Slot(((0, CHUNK_BYTES),)), 0, 4, (4, 5, 6, 7), local_blocks=local_blocks)
    assert load(rig, copy) == "io"
    assert np.array_equal(rig.memory, before)


def test_a_lowering_error_is_a_failed_copy(rig: Rig) -> None:
    """For any error: here the worker has no memory of zeros."""
    copy = ChunkCopy(0, b"k", SLOTS[0], 0, 4, (4, 5, 6, 7))
    zeros, rig.worker._zero_memory = rig.worker._zero_memory, None
    assert load(rig, copy) == "io"
    rig.worker.start_stores(StepPlan(stores=(Store(1, CopyTable.of([copy])),)))
    rig.worker.results()
    outcome = rig.worker.outcome()
    assert outcome is not None and outcome.stores[1].reason == "io"
    rig.worker._zero_memory = zeros
    [stored] = rig.store(SLOTS[0])
    assert load(rig, stored) is None
