"""One record of a disk tier, and what it takes up."""

from __future__ import annotations

from functools import lru_cache

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.disk.format.layout import record_bytes
from hybridkv.tiers.ledger import Entry

MAX_SIZES = 1024
"""Of payloads, whose cost is remembered: all records that cost the same then share one number."""

cost_of = lru_cache(MAX_SIZES)(record_bytes)
"""What a record of a payload of so many bytes takes up."""


class Record(Entry):
    """One key's record. Another thread may read it at any time, but for `num_pins`."""

    key: Key
    address: int
    payload_bytes: int

    @property
    def slot(self) -> Slot:
        return Slot(((self.address, self.payload_bytes),))
