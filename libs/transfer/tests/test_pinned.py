"""Host memory for a device."""

from __future__ import annotations

from pathlib import Path

from hybridkv.transfer.pinned import map_memory


def test_a_forked_child_does_not_have_the_memory() -> None:
    memory = map_memory(1 << 20)
    address, flags = int(memory.ctypes.data), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_it = start <= address < end
        elif first == "VmFlags:" and is_it:
            flags = rest
    assert "dc" in flags.split()
