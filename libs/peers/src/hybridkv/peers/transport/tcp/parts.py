"""What a read is made of: parts, each one request on one connection. Values and sums; no sockets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from hybridkv.peers.ranges import Ranges
from hybridkv.peers.transport.contract import PENDING, TransferId, TransferState
from hybridkv.peers.transport.memory import Pieces
from hybridkv.peers.wire import pack_columns


class Transfer:
    """One read, for the client's thread; `state` is written last, and read by anybody."""

    __slots__ = ("began_s", "deadline_s", "num_bytes", "num_descriptors", "parts_left", "remote", "state", "transfer")

    def __init__(self, transfer: TransferId, remote: int, began_s: float, deadline_s: float) -> None:
        self.transfer = transfer
        self.remote = remote
        self.began_s = began_s
        self.deadline_s = deadline_s
        self.num_bytes = 0
        self.num_descriptors = 0
        self.parts_left = 0
        self.state: TransferState = PENDING


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Asked for as `columns`, received into `local`."""

    transfer: Transfer
    columns: bytes
    local: Pieces
    num_bytes: int


def parts_of(transfer: Transfer, ranges: Ranges, share_bytes: int, max_ranges: int) -> list[Part]:
    """The read in parts of about `share_bytes`, always less than twice as much, and at most `max_ranges` ranges.

    Counts them into the transfer.
    """
    ranges = ranges.cut(share_bytes)
    begins = np.cumsum(ranges.num_bytes) - ranges.num_bytes
    share = begins // share_bytes
    bounds = [0, *(np.flatnonzero(share[1:] != share[:-1]) + 1).tolist(), len(ranges)]
    parts = []
    for first, last in itertools.pairwise(bounds):
        for start in range(first, last, max_ranges):
            parts.append(_part(transfer, ranges.rows(start, min(start + max_ranges, last))))
    transfer.parts_left = len(parts)
    return parts


def _part(transfer: Transfer, rows: Ranges) -> Part:
    # The stream is the same bytes however either side cuts it: each joins its own neighbours.
    remote = Pieces.of(rows.remote_regions, rows.remote_offsets, rows.num_bytes)
    local = Pieces.of(rows.local_regions, rows.local_offsets, rows.num_bytes)
    transfer.num_descriptors += len(remote)
    transfer.num_bytes += rows.total_bytes
    columns = pack_columns((remote.regions, remote.offsets, remote.num_bytes))
    return Part(transfer, columns, local, rows.total_bytes)
