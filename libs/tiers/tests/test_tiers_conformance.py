"""Conformance of every tier of this library, alone and in an idle fault injector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

import disk_store  # noqa: E402
import numpy as np  # noqa: E402

from hybridkv.tiers import ExposesBytes, SealedMemory, Slot, TierIndex, TierMedium  # noqa: E402
from hybridkv.tiers.ram import RamArena, RamIndex  # noqa: E402
from kits.tiers.conformance import (  # noqa: E402
    CHUNK_BYTES,
    ChangesConformance,
    ExactTierConformance,
    LateConformance,
    LeafFirstConformance,
    SealedMemoryConformance,
    Tier,
    TierSuite,
)
from kits.tiers.copying import CopyingMedium  # noqa: E402
from kits.tiers.faults import FaultInjectingIndex, FaultInjectingMedium, FaultPlan  # noqa: E402
from kits.tiers.reference import (  # noqa: E402
    ReferenceIndex,
    ReferenceMedium,
    RemoteIndex,
    RemoteMedium,
    RemoteStore,
)

GRANULE_BYTES = 1024


def wrapped(tier: Tier) -> Tier:
    return Tier(FaultInjectingIndex(tier.index, FaultPlan()), FaultInjectingMedium(tier.medium, FaultPlan()))


class InMemoryTier(ExactTierConformance, LeafFirstConformance):
    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        assert isinstance(medium, ExposesBytes)
        medium.views(slot)[-1][-1] ^= 1


class TestReference(InMemoryTier):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return Tier(ReferenceIndex(capacity_bytes), ReferenceMedium())


class TestRemote(InMemoryTier, LateConformance):
    world: RemoteStore
    time_s = 0.0

    def make_tier(self, capacity_bytes: int) -> Tier:
        self.world = RemoteStore(1, self.now_s, answer_s=10.0)
        return Tier(RemoteIndex(self.world, capacity_bytes), RemoteMedium(self.world, 0))

    def make_late(self) -> TierIndex:
        capacity_bytes = 4 * CHUNK_BYTES
        tier = self.make_tier(capacity_bytes)
        for key in (b"key a", b"key b"):
            tier.index.reserve(key, CHUNK_BYTES)
            assert tier.index.commit(key)
        return RemoteIndex(self.world, capacity_bytes)

    def now_s(self) -> float:
        return self.time_s

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds

    def answer_all(self) -> None:
        self.pass_time(10.0)


class TestRam(InMemoryTier):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return Tier(RamIndex(capacity_bytes, GRANULE_BYTES), CopyingMedium(RamArena(capacity_bytes, GRANULE_BYTES)))


class TestChangesOfRam(ChangesConformance):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return Tier(RamIndex(capacity_bytes, GRANULE_BYTES), CopyingMedium(RamArena(capacity_bytes, GRANULE_BYTES)))


class TestReferenceInAnIdleFaultInjector(TestReference):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return wrapped(super().make_tier(capacity_bytes))


class TestRamInAnIdleFaultInjector(TestRam):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return wrapped(super().make_tier(capacity_bytes))


class DiskStores(TierSuite):
    """Stores in a directory of the test."""

    chunk_cost_bytes = 4096 + CHUNK_BYTES
    path: Path
    stores: list[Tier]

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> Iterator[None]:
        self.path = tmp_path
        self.stores = []
        yield
        for tier in self.stores:
            tier.medium.close()
            tier.index.close()

    def make_tier(self, capacity_bytes: int) -> Tier:
        path = self.path / f"store {len(self.stores)}"
        options = disk_store.options_for(capacity_bytes)
        self.stores.append(Tier(disk_store.make_index(path, options), disk_store.make_medium(path, options)))
        return self.stores[-1]


class TestChangesOfDisk(DiskStores, ChangesConformance):
    """No other engine writes there."""


class TestDisk(DiskStores, ExactTierConformance, LeafFirstConformance):
    """Exact, because the disk has nine times the capacity; with less, segments are given up earlier."""

    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        path = self.path / f"store {len(self.stores) - 1}"
        disk_store.flip(disk_store.segment_path(path, slot), disk_store.payload_offset(slot) + slot.num_bytes - 1)


class TestDiskThroughThePageCache(TestDisk):
    def make_tier(self, capacity_bytes: int) -> Tier:
        path = self.path / f"store {len(self.stores)}"
        options = disk_store.options_for(capacity_bytes, direct=False)
        self.stores.append(Tier(disk_store.make_index(path, options), disk_store.make_medium(path, options)))
        return self.stores[-1]


class TestDiskInAnIdleFaultInjector(TestDisk):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return wrapped(super().make_tier(capacity_bytes))


class TestRamArena(SealedMemoryConformance):
    def make_memory(self, capacity_bytes: int) -> SealedMemory:
        return RamArena(capacity_bytes, GRANULE_BYTES)


class TestRamArenaOverACallersBuffer(SealedMemoryConformance):
    def make_memory(self, capacity_bytes: int) -> SealedMemory:
        return RamArena(capacity_bytes, GRANULE_BYTES, np.zeros(capacity_bytes + 5, dtype=np.uint8))
