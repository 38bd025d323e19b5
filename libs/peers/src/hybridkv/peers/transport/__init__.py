"""Reads of another process's memory: the contract, and its implementation with NIXL.

Nothing here imports NIXL before a `NixlTransport` is made. `kits.peers.in_memory` is for tests.
"""

from hybridkv.peers.ranges import Ranges
from hybridkv.peers.transport.contract import (
    PENDING,
    Region,
    RemoteId,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferPending,
    TransferState,
    Transport,
)

__all__ = [
    "PENDING",
    "Ranges",
    "Region",
    "RemoteId",
    "TransferDone",
    "TransferFailed",
    "TransferFailureReason",
    "TransferId",
    "TransferPending",
    "TransferState",
    "Transport",
]
