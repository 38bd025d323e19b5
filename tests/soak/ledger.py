"""What must be true of the disk, as an engine tells it line by line in memory that outlives its process.

A line is said after what it promises is done, and before what it takes back is begun, so that every word is true
wherever the process is killed.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field

NOTE = "# "
MAX_BYTES = 64 << 20
HEAD = struct.Struct("<qq")
"""Where the script ends, and how many lines it has."""
HEAD_BYTES = HEAD.size


@dataclass
class Ledger:
    """Keys by what may be said of them.

    Attributes:
        must: committed, and neither evicted nor withdrawn since; with the segment that each lies in.
        begun: stored, or being stored, since they were last withdrawn: they may be offered.
        banned: cleared, durably, and not begun again: they may not be offered.
        excused: segments that were damaged from outside.
        most_records: that an index could hold so far.
        is_short: an index was opened that can hold fewer, and nobody looked yet at what it passed over.
        is_torn: power was lost: what is offered beside may be torn, from then on, since what was evicted may come back.
        is_unsettled: the directory was taken away, and nobody said yet that it was made anew.
        is_damaged: something in the directory was damaged from outside.
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
        """`VERB WORDS...`: a method here says what each verb means. `ValueError` for any other."""
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
        """Evicted or withdrawn."""
        self.must.pop(bytes.fromhex(key_hex), None)

    def _on_withdrawn(self) -> None:
        """All of them; not yet for certain."""
        self.must.clear()

    def _on_cleared(self) -> None:
        self.banned |= self.begun
        self.begun.clear()

    def _on_opening(self, max_records: str) -> None:
        """An index that can hold fewer passes over the rest, and evicts nothing for that."""
        self.is_short = self.is_short or int(max_records) < min(self.most_records, len(self.begun))
        self.most_records = max(self.most_records, int(max_records))

    def _on_opened(self) -> None:
        self.is_short = False

    # What was done to the files.

    def _on_excused(self, segment: str) -> None:
        self.excused.add(int(segment))
        self.is_damaged = True
        for key in list(self.must):
            self._forgive(key)

    def _on_damaged(self) -> None:
        """What was withdrawn may come back, since what said so may be gone."""
        self.banned.clear()
        self.is_damaged = True

    def _on_forgotten(self) -> None:
        """The directory is gone; so may be what is committed until somebody notices."""
        self.must.clear()
        self.is_unsettled = self.is_damaged = True

    def _on_settled(self) -> None:
        self.is_unsettled = False

    def _forgive(self, key: bytes) -> None:
        """A key need not be there that lies in a damaged segment."""
        if self.must[key] in self.excused:
            del self.must[key]


class Script:
    """Lines in memory that a process shares with those it forks: no limit and no full disk stands against them."""

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
        # A process that is killed in between never said it.
        self._memory[:HEAD_BYTES] = HEAD.pack(self._end, self.num_lines + 1)

    def lines(self) -> list[str]:
        return self._memory[HEAD_BYTES : max(self._head()[0], HEAD_BYTES)].decode().splitlines()

    def close(self) -> None:
        self._memory.close()

    def _head(self) -> tuple[int, int]:
        end, num_lines = HEAD.unpack(self._memory[:HEAD_BYTES])
        return end, num_lines


class Log:
    """A ledger, and the script that says the same."""

    def __init__(self, ledger: Ledger, script: Script) -> None:
        self.ledger = ledger
        self.is_silent = False
        """Nothing that an index does now is to be said."""
        self._script = script

    def note(self, line: str) -> None:
        """Something that is not about the ledger."""
        self._script.add(f"{NOTE}{line}")

    def say(self, line: str) -> None:
        self._script.add(line)
        self.ledger.apply(line)


def read_script(ledger: Ledger, script: Script) -> list[str]:
    """Take over what a process said until its end. The lines that are not about the ledger."""
    notes = []
    for line in script.lines():
        if line.startswith(NOTE):
            notes.append(line.removeprefix(NOTE))
        else:
            ledger.apply(line)
    return notes
