"""Transport that injects planned faults of networks and peers."""

from kits.peers.faults.plan import (
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
from kits.peers.faults.transport import FaultInjectingTransport

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
