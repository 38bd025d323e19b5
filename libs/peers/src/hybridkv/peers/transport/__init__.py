"""Reading another process's memory: the contract, and the two ways that keep it, `tcp` and `nixl`.

`hybridkv.peers.transport.nixl` is imported only by who asks for it.
"""

from hybridkv.peers.ranges import Ranges
from hybridkv.peers.transport.contract import (
    PENDING,
    Done,
    Failed,
    FailureReason,
    MayReach,
    Pending,
    Region,
    RemoteId,
    TransferId,
    TransferState,
    Transport,
)

__all__ = [
    "PENDING",
    "Done",
    "Failed",
    "FailureReason",
    "MayReach",
    "Pending",
    "Ranges",
    "Region",
    "RemoteId",
    "TransferId",
    "TransferState",
    "Transport",
]
