"""What a snapshot says together with the changes behind it: which records, in which order, and what may lie beside.

A snapshot is read from an index that goes on working, so it may know of changes that are still to come here. Of two
records with one key the one with the higher address counts, whichever was named first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.changes import Change, Committed, Gone, Relocated, Reserved, Used
from hybridkv.tiers.disk.format.layout import number_of, offset_of, record_bytes
from hybridkv.tiers.disk.format.snapshot import Snapshot
from hybridkv.tiers.disk.tables.found import FoundRecord, FoundRecords


class Frontier(NamedTuple):
    """Where there may be records that are not named."""

    next_number: int
    """No segment had this number or a higher one."""
    first_number: int
    """Nothing was appended to a segment before this one since, and in it only behind `next_address`."""
    next_address: int
    """No record had this address or a higher one."""
    pending: frozenset[int]
    """Addresses of records that were being written."""


def frontier_of(saved: Snapshot, changes: Iterable[Change]) -> Frontier:
    """After these changes."""
    next_address, pending = saved.next_address, set(saved.pending)
    for change in changes:
        if isinstance(change, Reserved):
            pending.add(change.address)
            next_address = max(next_address, change.address + record_bytes(change.payload_bytes))
        elif isinstance(change, Relocated):
            pending.discard(change.new_address)
        elif isinstance(change, (Committed, Gone)):
            pending.discard(change.address)
    return Frontier(
        max(saved.next_number, number_of(next_address) + bool(offset_of(next_address))),
        max(saved.scan_from, number_of(next_address)),
        next_address,
        frozenset(pending),
    )


def keys_at(saved: Snapshot, changes: Iterable[Change]) -> dict[int, Key]:
    """Of the addresses that these changes are about, those that the snapshot names. Most of a large one are not."""
    wanted = {change.address for change in changes}
    addresses = np.asarray(saved.addresses, dtype=np.uint64)
    places = np.flatnonzero(np.isin(addresses, np.fromiter(wanted, dtype=np.uint64, count=len(wanted))))
    return {int(addresses[place]): saved.keys[place] for place in places.tolist()}


def replay(records: FoundRecords, key_at: dict[int, Key], changes: Iterable[Change]) -> set[Key]:
    """Bring what a snapshot named, least recently used first, up to date. The keys of records that lie elsewhere now.

    What lies in segments that are gone has to be among the records: it may have been moved before they went.
    """
    placed: set[Key] = set()
    for change in changes:
        if isinstance(change, Used):
            key = key_at.get(change.address)
            if key is not None and key in records:
                records.use(key)
        elif isinstance(change, Committed):
            before = records.get(change.key)
            if before is None or before.address <= change.address:
                records.put(FoundRecord(change.key, change.address, change.payload_bytes))
                key_at[change.address] = change.key
                placed.add(change.key)
        elif isinstance(change, Relocated):
            key = key_at.pop(change.address, None)
            record = records.get(key) if key is not None else None
            if record is not None and record.address == change.address:
                records.replace(record._replace(address=change.new_address))
                key_at[change.new_address] = record.key
                placed.add(record.key)
        elif isinstance(change, Gone):
            key = key_at.pop(change.address, None)
            record = records.get(key) if key is not None else None
            if record is not None and record.address == change.address:
                records.remove(record.key)
    return placed


def keep_those_in(end_of: Mapping[int, int], records: FoundRecords, doubtful: Iterable[Key]) -> None:
    """Forget the doubtful ones whose place is none in the segments that are there, whose sizes are these."""
    for key in doubtful:
        record = records.get(key)
        if record is None:
            continue
        end_offset = offset_of(record.address) + record_bytes(record.payload_bytes)
        if end_offset > end_of.get(number_of(record.address), 0):
            records.remove(key)
