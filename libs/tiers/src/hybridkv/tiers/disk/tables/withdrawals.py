"""Which records may never be offered again, as far as that is remembered. Touches no file."""

from __future__ import annotations

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.journal import Withdrawal, digest_of


class Withdrawals:
    """Those in force, the last one of each key, at most `max_entries`: the oldest are forgotten."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[bytes, Withdrawal] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Withdrawal) -> int:
        """How many had to be forgotten for it."""
        self._entries.pop(entry.key_digest, None)
        self._entries[entry.key_digest] = entry
        if len(self._entries) <= self._max_entries:
            return 0
        del self._entries[next(iter(self._entries))]
        return 1

    def covers(self, key: Key, address: int) -> bool:
        entry = self._entries.get(digest_of(key)) if self._entries else None
        return entry is not None and address < entry.bound

    def keep(self, first_address: int) -> None:
        """Forget those that can withdraw nothing that lies at `first_address` or behind it."""
        kept = {key: entry for key, entry in self._entries.items() if entry.bound > first_address}
        self._entries = kept

    def all(self) -> list[Withdrawal]:
        return list(self._entries.values())
