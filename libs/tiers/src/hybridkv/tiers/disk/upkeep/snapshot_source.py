"""Where a snapshot finds its records, while the index goes on using them. Reads and writes no file.

A million records are copied as four columns of numbers, 32 MB, and nothing else: a key is named by where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.tables.change_log import Cut
from hybridkv.tiers.disk.tables.records import Record
from hybridkv.tiers.ledger import KeyState
from hybridkv.tiers.leftovers import pieces

Numbers: TypeAlias = npt.NDArray[np.uint64]

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


class Committed(NamedTuple):
    """Records, least recently used first."""

    key_lists: Sequence[Sequence[Key]]
    places: Numbers
    addresses: Numbers
    payload_bytes: Numbers

    @property
    def keys(self) -> PlacedKeys:
        return PlacedKeys(self.key_lists, self.places)

    def last(self, count: int) -> Committed:
        """So many of them."""
        start = len(self.places) - count
        return Committed(self.key_lists, self.places[start:], self.addresses[start:], self.payload_bytes[start:])


class Source(NamedTuple):
    """The tables of an index.

    A list of keys only grows, and what is read of a record is true when it is read: it is committed, at an address that
    the snapshot speaks for or behind it. No step takes long without letting the index's thread run.
    """

    by_key: Mapping[Key, Record]
    key_lists: Sequence[Sequence[Key]]
    """Of each segment. A key may stand in several, or belong to no record any more."""

    def committed(self, cut: Cut) -> Committed:
        """What is offered. `GivenUpError` when the snapshot that was planned at this cut is not wanted any more."""
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
        if is_last.all():
            return Committed(self.key_lists, places, addresses, payload_bytes)
        return Committed(self.key_lists, places[is_last], addresses[is_last], payload_bytes[is_last])
