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
        is_torn: power was lost, and nobody looked yet at what was not promised.
        is_unsettled: the directory was taken away, and nobody said yet that it was made anew.
        is_damaged: something in the directory was damaged from outside.
    """

    must: dict[bytes, int] = field(default_factory=dict)
    begun: set[bytes] = field(default_factory=set)
    banned: set[bytes] = field(default_factory=set)
    excused: set[int] = field(default_factory=set)
    most_records: int = 0
    is_torn: bool = False
    is_unsettled: bool = False
    is_damaged: bool = False

    def apply(self, line: str) -> None:
        verb, *rest = line.split()
        key = bytes.fromhex(rest[0]) if rest and verb in ("begun", "committed", "gone", "moved") else b""
        if verb == "begun":
            self.begun.add(key)
            self.banned.discard(key)
        elif verb == "committed" or (verb == "moved" and key in self.must):
            self.must[key] = int(rest[1])
            self.forgive(key)
        elif verb == "moved":
            pass  # not one that has to be there
        elif verb == "gone":
            self.must.pop(key, None)
        elif verb == "excused":
            self.excused.add(int(rest[0]))
            self.is_damaged = True
            for damaged in list(self.must):
                self.forgive(damaged)
        elif verb == "forgotten":
            # What is committed until somebody notices may be forgotten too.
            self.must.clear()
            self.is_unsettled = self.is_damaged = True
        elif verb == "held":
            self.most_records = max(self.most_records, int(rest[0]))
        elif verb == "whole":
            self.is_torn = False
        elif verb == "settled":
            self.is_unsettled = False
        elif verb == "damaged":
            # What was withdrawn may come back, since what said so may be gone.
            self.banned.clear()
            self.is_damaged = True
        elif verb == "cleared":
            self.banned |= self.begun
            self.begun.clear()
        else:
            raise ValueError(f"unknown line: {line}")

    def forgive(self, key: bytes) -> None:
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
