"""Wrappers that make a working tier fail as planned."""

from kits.tiers.faults.index import FaultInjectingIndex
from kits.tiers.faults.medium import FaultInjectingMedium
from kits.tiers.faults.plan import Corrupt, Delay, Drop, Fail, FaultPlan, Operation, Refuse, Rule, Vanish

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
