"""Records of an index for a snapshot, read while the index continues to work. Reads and writes no file.

Copies keys and columns of numbers: 80 MB for a million records.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.snapshot import Numbers
from hybridkv.tiers.disk.index.change_log import Cut, SnapshotCancelledError
from hybridkv.tiers.yielding import ENTRIES_AT_A_TIME, YIELD_S

if TYPE_CHECKING:
    from hybridkv.tiers.native import RecordLedger

Lengths: TypeAlias = npt.NDArray[np.uint16]

_OFFSET_BITS = 32
"""Place of a key: number of the piece times 2^32, plus the offset in the piece."""


class CopiedKeys(Sequence[Key]):
    """Keys in a few large pieces of bytes. Creates key objects for one slice at a time."""

    def __init__(self, pieces_of_keys: Sequence[bytes], places: Numbers, lengths: Lengths) -> None:
        self._pieces, self._places, self._lengths = pieces_of_keys, places, lengths

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, part: int) -> Key: ...

    @overload
    def __getitem__(self, part: slice) -> list[Key]: ...

    def __getitem__(self, part: int | slice) -> Key | list[Key]:
        if isinstance(part, int):
            [key] = self[part : part + 1 or None]
            return key
        mask = (1 << _OFFSET_BITS) - 1
        rows = zip(self._places[part].tolist(), self._lengths[part].tolist(), strict=True)
        return [self._pieces[place >> _OFFSET_BITS][place & mask : (place & mask) + length] for place, length in rows]

    def last(self, count: int) -> CopiedKeys:
        """The last `count` keys."""
        start = len(self._places) - count
        return CopiedKeys(self._pieces, self._places[start:], self._lengths[start:])


class RecordColumns(NamedTuple):
    """Records as columns, least recently used first."""

    keys: CopiedKeys
    addresses: Numbers
    payload_bytes: Numbers

    def last(self, count: int) -> RecordColumns:
        """The last `count` records."""
        start = len(self.addresses) - count
        return RecordColumns(self.keys.last(count), self.addresses[start:], self.payload_bytes[start:])


class WalkedSource(NamedTuple):
    """Walk over the native ledger: begun when the snapshot is planned, read in the janitor's thread.

    Reads records that are committed when the walk reaches them. An address may be after `Snapshot.next_address`, if the
    record was appended during the walk. The walk often yields to the index's thread.
    """

    ledger: RecordLedger[Any, Any, Any, Any]
    number: int
    """Id of the walk in the ledger."""

    def committed(self, cut: Cut) -> RecordColumns:
        """Committed records, least recently used first. `SnapshotCancelledError` if the snapshot of this cut was
        cancelled, or the ledger ended the walk."""
        keys, columns = [], []
        goes_on = True
        while goes_on:
            cut.require_wanted()
            batch = self.ledger.walk(self.number, ENTRIES_AT_A_TIME)
            if batch is None:
                raise SnapshotCancelledError
            goes_on, of_keys, *numbers = batch
            if of_keys:
                keys.append(of_keys)
                columns.append(numbers)
            time.sleep(YIELD_S)
        lengths, addresses, payload_bytes, turns = (
            np.concatenate([np.zeros(0, kind), *[np.frombuffer(each[number], kind) for each in columns]])
            for number, kind in enumerate((np.uint16, np.uint64, np.uint64, np.uint32))
        )
        order = np.argsort(turns, kind="stable")
        places = _places([np.frombuffer(each[0], np.uint16) for each in columns])
        return RecordColumns(CopiedKeys(keys, places[order], lengths[order]), addresses[order], payload_bytes[order])


def _places(lengths_of_pieces: Sequence[Lengths]) -> Numbers:
    """Place of each key."""
    starts = [np.zeros(0, np.uint64)]
    for number, lengths in enumerate(lengths_of_pieces):
        ends = np.cumsum(lengths, dtype=np.uint64)
        starts.append(ends - lengths + np.uint64(number << _OFFSET_BITS))
    return np.concatenate(starts)
