"""Where a snapshot finds its records, while the index goes on using them. Reads and writes no file.

Of a million records the one in Python copies four columns of numbers, 32 MB, and names a key by where it stands; the
native one copies the keys, too, 80 MB.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.tables.change_log import Cut, GivenUpError
from hybridkv.tiers.disk.tables.record import Record
from hybridkv.tiers.ledger import KeyState
from hybridkv.tiers.leftovers import ENTRIES_AT_A_TIME, YIELD_S, pieces

Numbers: TypeAlias = npt.NDArray[np.uint64]
Lengths: TypeAlias = npt.NDArray[np.uint16]

_LIST_BITS = 32
"""A place is the number of a list times 2^32, plus a position in it."""


class PlacedKeys(Sequence[Key]):
    """Keys that are looked up, a part at a time, where they stand in lists that only grow."""

    def __init__(self, key_lists: Sequence[Sequence[Key]], places: Numbers) -> None:
        self._key_lists = key_lists
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, part: int) -> Key: ...

    @overload
    def __getitem__(self, part: slice) -> list[Key]: ...

    def __getitem__(self, part: int | slice) -> Key | list[Key]:
        lists, mask = self._key_lists, (1 << _LIST_BITS) - 1
        if isinstance(part, int):
            place = int(self._places[part])
            return lists[place >> _LIST_BITS][place & mask]
        return [lists[place >> _LIST_BITS][place & mask] for place in self._places[part].tolist()]

    def last(self, count: int) -> PlacedKeys:
        """So many of them."""
        return PlacedKeys(self._key_lists, self._places[len(self._places) - count :])


class CopiedKeys(Sequence[Key]):
    """Keys in a few pieces of bytes, made objects of a part at a time."""

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
        mask = (1 << _LIST_BITS) - 1
        rows = zip(self._places[part].tolist(), self._lengths[part].tolist(), strict=True)
        return [self._pieces[place >> _LIST_BITS][place & mask : (place & mask) + length] for place, length in rows]

    def last(self, count: int) -> CopiedKeys:
        """So many of them."""
        start = len(self._places) - count
        return CopiedKeys(self._pieces, self._places[start:], self._lengths[start:])


class Committed(NamedTuple):
    """Records, least recently used first."""

    keys: PlacedKeys | CopiedKeys
    addresses: Numbers
    payload_bytes: Numbers

    def last(self, count: int) -> Committed:
        """So many of them."""
        start = len(self.addresses) - count
        return Committed(self.keys.last(count), self.addresses[start:], self.payload_bytes[start:])


class Source(Protocol):
    """The records of an index, for the janitor's thread.

    What is read of a record is true when it is read: it is committed, at an address that the snapshot speaks for or
    behind it. No step takes long without letting the index's thread run.
    """

    def committed(self, cut: Cut) -> Committed:
        """What is offered. `GivenUpError` when the snapshot that was planned at this cut is not wanted any more."""
        ...


class PlainSource(NamedTuple):
    """The tables of an index, whose lists of keys only grow."""

    by_key: Mapping[Key, Record]
    key_lists: Sequence[Sequence[Key]]
    """Of each segment. A key may stand in several, or belong to no record any more."""

    def committed(self, cut: Cut) -> Committed:
        counts = list(map(len, self.key_lists))
        columns = np.empty((4, sum(counts)), dtype=np.uint64)
        end = 0
        for number, count in enumerate(counts):
            for part in pieces(count):
                cut.require_wanted()
                rows = self._rows(number, part)
                columns[:, end : end + len(rows)] = np.array(rows, dtype=np.uint64).reshape(-1, 4).T
                end += len(rows)
        return self._in_order(columns[:, :end])

    def _rows(self, number: int, part: slice) -> list[tuple[int, int, int, int]]:
        """Last use, address, payload bytes and place of the records to which a part of a list leads."""
        find, committed = self.by_key.get, KeyState.COMMITTED
        rows = []
        for place, key in enumerate(self.key_lists[number][part], (number << _LIST_BITS) + part.start):
            record = find(key)
            if record is not None and record.state is committed:
                rows.append((record.last_used, record.address, record.payload_bytes, place))
        return rows

    def _in_order(self, columns: Numbers) -> Committed:
        """Sorted in place, and each address once: what stands in two lists was read twice."""
        order = np.argsort(columns[0], kind="stable")
        for column in columns[1:]:
            column[:] = column[order]
        _, addresses, payload_bytes, places = columns
        order = np.argsort(addresses, kind="stable")
        in_row = addresses[order]
        is_last = np.ones(len(order), dtype=np.bool_)
        is_last[order[:-1]] = in_row[:-1] != in_row[1:]
        if not is_last.all():
            places, addresses, payload_bytes = places[is_last], addresses[is_last], payload_bytes[is_last]
        return Committed(PlacedKeys(self.key_lists, places), addresses, payload_bytes)


class Walks(Protocol):
    """A native ledger, whose records can be walked over."""

    def walk(self, number: int, num_entries: int) -> tuple[bool, bytes, bytes, bytes, bytes, bytes] | None:
        """Whether it goes on; and of what was met: keys one behind the other, their lengths (16 bits), addresses,
        payload bytes (64 bits each) and turns (32 bits). None where another walk has begun since."""
        ...


class WalkedSource(NamedTuple):
    """A walk that was begun when the snapshot was planned."""

    ledger: Walks
    number: int

    def committed(self, cut: Cut) -> Committed:
        keys, columns = [], []
        goes_on = True
        while goes_on:
            cut.require_wanted()
            met = self.ledger.walk(self.number, ENTRIES_AT_A_TIME)
            if met is None:
                raise GivenUpError
            goes_on, of_keys, *numbers = met
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
        return Committed(CopiedKeys(keys, places[order], lengths[order]), addresses[order], payload_bytes[order])


def _places(lengths_of_pieces: Sequence[Lengths]) -> Numbers:
    """Where each key begins: the number of a piece times 2^32, plus a position in it."""
    starts = [np.zeros(0, np.uint64)]
    for number, lengths in enumerate(lengths_of_pieces):
        ends = np.cumsum(lengths, dtype=np.uint64)
        starts.append(ends - lengths + np.uint64(number << _LIST_BITS))
    return np.concatenate(starts)
