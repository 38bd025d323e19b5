"""A transport that does what networks and peers do, as planned."""

from hybridkv.peers.testing.faults.plan import (
    Action,
    Fail,
    FaultPlan,
    HalfDone,
    Late,
    Lost,
    Rule,
    Vanish,
    WrongBytes,
)
from hybridkv.peers.testing.faults.transport import FaultInjectingTransport

__all__ = [
    "Action",
    "Fail",
    "FaultInjectingTransport",
    "FaultPlan",
    "HalfDone",
    "Late",
    "Lost",
    "Rule",
    "Vanish",
    "WrongBytes",
]
