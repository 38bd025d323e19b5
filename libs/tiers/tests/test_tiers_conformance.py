"""Every tier of this library, alone and in an idle fault injector, passes the same suite."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("hybridkv.tiers.conformance")

from hybridkv.tiers import ExposesBytes, Slot, TierMedium  # noqa: E402
from hybridkv.tiers.conformance import Tier, TierConformance  # noqa: E402
from hybridkv.tiers.faults import FaultInjectingIndex, FaultInjectingMedium, FaultPlan  # noqa: E402
from hybridkv.tiers.ram import RamArena, RamIndex  # noqa: E402
from hybridkv.tiers.reference import ReferenceIndex, ReferenceMedium  # noqa: E402

GRANULE_BYTES = 1024


def wrapped(tier: Tier) -> Tier:
    return Tier(FaultInjectingIndex(tier.index, FaultPlan()), FaultInjectingMedium(tier.medium, FaultPlan()))


class InMemoryTier(TierConformance):
    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        assert isinstance(medium, ExposesBytes)
        medium.views(slot)[-1][-1] ^= 1


class TestReference(InMemoryTier):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return Tier(ReferenceIndex(capacity_bytes), ReferenceMedium())


class TestRam(InMemoryTier):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return Tier(RamIndex(capacity_bytes, GRANULE_BYTES), RamArena(capacity_bytes, GRANULE_BYTES))


class TestReferenceInAnIdleFaultInjector(TestReference):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return wrapped(super().make_tier(capacity_bytes))


class TestRamInAnIdleFaultInjector(TestRam):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return wrapped(super().make_tier(capacity_bytes))
