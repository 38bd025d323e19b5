"""Wrappers that make a working tier fail in a way that is written down beforehand."""

from hybridkv.tiers.testing.faults.index import FaultInjectingIndex
from hybridkv.tiers.testing.faults.medium import FaultInjectingMedium
from hybridkv.tiers.testing.faults.plan import Corrupt, Delay, Drop, Fail, FaultPlan, Operation, Refuse, Rule, Vanish

__all__ = [
    "Corrupt",
    "Delay",
    "Drop",
    "Fail",
    "FaultInjectingIndex",
    "FaultInjectingMedium",
    "FaultPlan",
    "Operation",
    "Refuse",
    "Rule",
    "Vanish",
]
