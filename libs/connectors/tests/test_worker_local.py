"""A worker copies from block to block what the engine holds itself, and the rest of the same load from the tier."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from test_worker_seals import BLOCKS, CHUNK_BYTES, PAGES, SLOTS, STRIDE, Rig

from hybridkv.connectors.vllm.common.messages import ChunkCopy, CopyTable, Load, StepPlan, Store
from hybridkv.tiers import FailureReason, Slot
from hybridkv.transfer.jobs import copy_runs


@pytest.fixture
def rig() -> Rig:
    return Rig(copy_runs)


def pages(rig: Rig, block: int) -> list[bytes]:
    layers = rig.memory.reshape(len(PAGES), BLOCKS, STRIDE)
    return [layers[i, block, :num_bytes].tobytes() for i, num_bytes in enumerate(PAGES)]


def load(rig: Rig, *copies: ChunkCopy) -> str | None:
    """The reason why it failed."""
    rig.worker.start_loads(StepPlan(loads=(Load("r", CopyTable.of(copies)),)))
    failed = "r" in rig.worker.results().failed
    outcome = rig.worker.outcome()
    return outcome.load_failures["r"][0].reason if failed and outcome is not None else None


def test_blocks_are_copied_within_the_engine_and_beside_others_from_the_tier(rig: Rig) -> None:
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


def test_a_chunk_that_is_not_read_may_be_damaged_and_one_that_is_may_not(rig: Rig) -> None:
    first, second = rig.store(*SLOTS)
    others = tuple(block for block in range(BLOCKS) if block not in first.block_ids + second.block_ids)
    local = msgspec.structs.replace(first, block_ids=others[:4], local_blocks=first.block_ids)
    rig.arena.views(first.slot)[0][7] ^= 1
    assert load(rig, local) is None
    rig.arena.views(second.slot)[1][7] ^= 1
    assert load(rig, local, msgspec.structs.replace(second, block_ids=others[4:])) == str(FailureReason.CHECKSUM)


@pytest.mark.parametrize("local_blocks", [(0, 1, 2), (0, 1, 2, BLOCKS), (0, 1, 2, 4)], ids=["few", "outside", "itself"])
def test_blocks_that_cannot_be_copied_from_are_a_failed_load(rig: Rig, local_blocks: tuple[int, ...]) -> None:
    before = rig.memory.copy()
    copy = ChunkCopy(0, b"k", Slot(((0, CHUNK_BYTES),)), 0, 4, (4, 5, 6, 7), local_blocks=local_blocks)
    assert load(rig, copy) == "io"
    assert np.array_equal(rig.memory, before)


def test_what_cannot_be_lowered_is_a_failed_copy_and_raises_nothing(rig: Rig) -> None:
    """Whatever the reason: here the worker was given no memory."""
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
