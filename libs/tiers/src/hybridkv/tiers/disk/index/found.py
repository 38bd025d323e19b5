"""Records found at a start, as columns: a store may have millions of records, too many for one object each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.snapshot import Numbers


class FoundRecord(NamedTuple):
    """One record that may be offered."""

    key: Key
    address: int
    payload_bytes: int


class FoundRecords:
    """Records by key, least recently used first.

    Args:
        keys: keys of the initial records. If a key occurs twice, the last record counts, at the place of the first in
            the LRU order.
        addresses: addresses of the initial records.
        payload_bytes: payload sizes of the initial records.
    """

    def __init__(
        self,
        keys: Sequence[Key] = (),
        addresses: Sequence[int] | Numbers = (),
        payload_bytes: Sequence[int] | Numbers = (),
    ) -> None:
        self._known = keys
        self._addresses = np.asarray(addresses, dtype=np.uint64)
        self._payload_bytes = np.asarray(payload_bytes, dtype=np.uint64)
        self._added: list[tuple[int, int]] = []
        """Address and payload bytes of records added later. In positions, these follow the initial records."""

    @cached_property
    def _place_of(self) -> dict[Key, int]:
        """Position of each key in the columns. Built on first use: a million keys take long, and a start after a clean
        end queries no key."""
        return dict(zip(self._known, range(len(self._known)), strict=True))

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._place_of

    def get(self, key: Key) -> FoundRecord | None:
        place = self._place_of.get(key)
        return None if place is None else FoundRecord(key, *self._at(place))

    def put(self, record: FoundRecord) -> None:
        """Add a record as the most recently used one. Replaces a record with the same key."""
        self._place_of.pop(record.key, None)
        self.replace(record)

    def replace(self, record: FoundRecord) -> None:
        """Replace the record with the same key. Its place in the LRU order does not change."""
        self._place_of[record.key] = len(self._addresses) + len(self._added)
        self._added.append((record.address, record.payload_bytes))

    def use(self, key: Key) -> None:
        """Make the record of this key the most recently used one."""
        self._place_of[key] = self._place_of.pop(key)

    def remove(self, key: Key) -> None:
        del self._place_of[key]

    def in_order(self) -> Iterator[FoundRecord]:
        keys, addresses, payload_bytes = self.columns()
        return map(FoundRecord, keys, addresses.tolist(), payload_bytes.tolist())

    def columns_as_known(self) -> tuple[Sequence[Key], Numbers, Numbers] | None:
        """`columns` if no key was queried yet, else None. A key may occur twice."""
        if "_place_of" in vars(self):
            return None
        return self._known, self._addresses, self._payload_bytes

    def columns(self) -> tuple[list[Key], Numbers, Numbers]:
        """Keys, addresses and payload bytes, in order. Each key occurs once."""
        places = np.fromiter(self._place_of.values(), dtype=np.int64, count=len(self._place_of))
        added = np.array(self._added, dtype=np.uint64).reshape(-1, 2)
        columns = (
            np.concatenate([known, more])[places]
            for known, more in zip((self._addresses, self._payload_bytes), added.T, strict=True)
        )
        return list(self._place_of), *columns  # type: ignore[return-value]

    def _at(self, place: int) -> tuple[int, int]:
        if place >= len(self._addresses):
            return self._added[place - len(self._addresses)]
        return int(self._addresses[place]), int(self._payload_bytes[place])
