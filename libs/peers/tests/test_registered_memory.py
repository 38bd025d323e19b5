"""Ranges are checked against registered memory, whatever their numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.peers.transport import Region
from hybridkv.peers.transport.memory import RegisteredMemory

wide = st.integers(-(1 << 63), (1 << 63) - 1)


@given(
    st.lists(st.tuples(wide | st.integers(-1, 3), wide | st.integers(-2, 70), wide | st.integers(-1, 70)), max_size=9)
)
def test_only_ranges_in_registered_memory_pass_whatever_the_numbers(found: list[tuple[int, int, int]]) -> None:
    sizes = [64, 0, 32]
    memory = RegisteredMemory((Region(4096, 64), None, Region(8192, 32)))
    columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
    is_inside = all(
        0 <= region < 3 and size > 0 and offset >= 0 and offset + size <= sizes[region]
        for region, offset, size in found
    )
    assert (memory.bounds_error("remote", *columns) is None) is is_inside
