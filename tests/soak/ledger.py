"""The state that the disk must have, reported by an engine line by line in memory that outlives its process.

A line that adds a promise is written after the work is done, and a line that revokes one before the work begins. So
every line is true no matter when the process is killed.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field

NOTE = "# "
MAX_BYTES = 64 << 20
HEAD = struct.Struct("<qq")
"""The end of the script in bytes, and its number of lines."""
HEAD_BYTES = HEAD.size


@dataclass
class Ledger:
    """Keys by their state.

    Attributes:
        must: committed, and not evicted or withdrawn since; with the segment of each.
        begun: stored, or being stored, since they were last withdrawn. They may be offered.
        banned: durably cleared and not begun again. They must not be offered.
        excused: segments that were damaged from outside.
        most_records: the largest capacity of an index so far, in records.
        is_short: an index of smaller capacity was opened, and the records that it ignored are not known yet.
        is_torn: power was lost. From then on other offered chunks may be torn, because evicted chunks may come back.
        is_unsettled: the directory was removed, and its new creation was not reported yet.
        is_damaged: files in the directory were damaged from outside.
    """

    must: dict[bytes, int] = field(default_factory=dict)
    begun: set[bytes] = field(default_factory=set)
    banned: set[bytes] = field(default_factory=set)
    excused: set[int] = field(default_factory=set)
    most_records: int = 0
    is_short: bool = False
    is_torn: bool = False
    is_unsettled: bool = False
    is_damaged: bool = False

    def apply(self, line: str) -> None:
        """Apply a line `VERB WORDS...`; the methods below define the verbs. `ValueError` for an unknown verb."""
        verb, *words = line.split()
        method = getattr(self, f"_on_{verb}", None)
        if method is None:
            raise ValueError(f"unknown line: {line}")
        method(*words)

    def _on_begun(self, key_hex: str) -> None:
        key = bytes.fromhex(key_hex)
        self.begun.add(key)
        self.banned.discard(key)

    def _on_committed(self, key_hex: str, segment: str) -> None:
        key = bytes.fromhex(key_hex)
        self.must[key] = int(segment)
        self._forgive(key)

    def _on_moved(self, key_hex: str, segment: str) -> None:
        if bytes.fromhex(key_hex) in self.must:
            self._on_committed(key_hex, segment)

    def _on_gone(self, key_hex: str) -> None:
        """The key was evicted or withdrawn."""
        self.must.pop(bytes.fromhex(key_hex), None)

    def _on_withdrawn(self) -> None:
        """All keys were withdrawn, not yet durably."""
        self.must.clear()

    def _on_cleared(self) -> None:
        self.banned |= self.begun
        self.begun.clear()

    def _on_opening(self, max_records: str) -> None:
        """An index of smaller capacity ignores the remaining records without evicting them."""
        self.is_short = self.is_short or int(max_records) < min(self.most_records, len(self.begun))
        self.most_records = max(self.most_records, int(max_records))

    def _on_opened(self) -> None:
        self.is_short = False

    # Damage to files.

    def _on_excused(self, segment: str) -> None:
        self.excused.add(int(segment))
        self.is_damaged = True
        for key in list(self.must):
            self._forgive(key)

    def _on_damaged(self) -> None:
        """Withdrawn chunks may come back, because the record of the withdrawal may be lost."""
        self.banned.clear()
        self.is_damaged = True

    def _on_forgotten(self) -> None:
        """The directory is gone, so committed chunks may be lost until the engine notices."""
        self.must.clear()
        self.is_unsettled = self.is_damaged = True

    def _on_settled(self) -> None:
        self.is_unsettled = False

    def _forgive(self, key: bytes) -> None:
        """A key in a damaged segment need not be there."""
        if self.must[key] in self.excused:
            del self.must[key]


class Script:
    """Lines in memory shared with forked processes, so that no limit and no full disk affects them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MAX_BYTES)
        self._end = HEAD_BYTES

    @property
    def num_lines(self) -> int:
        return self._head()[1]

    def add(self, line: str) -> None:
        data = f"{line}\n".encode()
        if self._end + len(data) > MAX_BYTES:
            raise MemoryError("the script of one process is full")
        self._memory[self._end : self._end + len(data)] = data
        self._end += len(data)
        # If the process is killed before this write, the line does not count.
        self._memory[:HEAD_BYTES] = HEAD.pack(self._end, self.num_lines + 1)

    def lines(self) -> list[str]:
        return self._memory[HEAD_BYTES : max(self._head()[0], HEAD_BYTES)].decode().splitlines()

    def close(self) -> None:
        self._memory.close()

    def _head(self) -> tuple[int, int]:
        end, num_lines = HEAD.unpack(self._memory[:HEAD_BYTES])
        return end, num_lines


class Log:
    """A ledger, and the script with the same lines."""

    def __init__(self, ledger: Ledger, script: Script) -> None:
        self.ledger = ledger
        self.is_silent = False
        """Whether lines about the index's keys are suppressed."""
        self._script = script

    def note(self, line: str) -> None:
        """Add a line that does not concern the ledger."""
        self._script.add(f"{NOTE}{line}")

    def say(self, line: str) -> None:
        self._script.add(line)
        self.ledger.apply(line)


def read_script(ledger: Ledger, script: Script) -> list[str]:
    """Apply the lines of a process that has ended. Returns the lines that do not concern the ledger."""
    notes = []
    for line in script.lines():
        if line.startswith(NOTE):
            notes.append(line.removeprefix(NOTE))
        else:
            ledger.apply(line)
    return notes
