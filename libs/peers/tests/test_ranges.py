"""Ranges are merged where both sides are adjacent, and only there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.ranges import Ranges, joined, merged, template


def bytes_of(ranges: Ranges) -> dict[tuple[int, int], tuple[int, int]]:
    """Maps each local byte to the remote byte that it is read from."""
    return {
        (lr, lo + i): (rr, ro + i) for lr, lo, rr, ro, size in zip(*ranges.columns, strict=True) for i in range(size)
    }


@st.composite
def some(draw: st.DrawFn) -> Ranges:
    """A few short ranges that write no local byte twice."""
    cuts = sorted(draw(st.sets(st.integers(0, 24), min_size=2, max_size=12)))
    rows = [
        (place // 12, place, draw(st.integers(0, 1)), place + draw(st.sampled_from([0, 0, 0, 30])), end - place)
        for place, end in itertools.pairwise(cuts)
        if draw(st.booleans())
    ]
    return Ranges.of(draw(st.permutations(rows)))


@settings(max_examples=examples(200), deadline=None)
@given(some())
def test_merging_keeps_every_byte_and_leaves_no_adjacent_ranges(ranges: Ranges) -> None:
    found = merged(ranges)
    assert bytes_of(found) == bytes_of(ranges)
    assert not found.overlap
    rows = list(zip(*found.columns, strict=True))
    ends = {(lr, lo + size, rr, ro + size) for lr, lo, rr, ro, size in rows}
    assert not any((lr, lo, rr, ro) in ends for lr, lo, rr, ro, _ in rows)


@settings(deadline=None)
@given(some(), st.integers(1, 30))
def test_cutting_keeps_every_byte_in_order(ranges: Ranges, most: int) -> None:
    cut = ranges.cut(most)
    assert list(bytes_of(cut).items()) == list(bytes_of(ranges).items())
    assert all(cut.num_bytes <= most)


def test_a_local_byte_that_is_written_twice_is_an_overlap() -> None:
    assert Ranges.of([(0, 0, 0, 0, 4), (0, 3, 0, 8, 4)]).overlap
    assert not Ranges.of([(0, 0, 0, 0, 4), (0, 4, 0, 0, 4), (1, 0, 0, 0, 4)]).overlap


def columns(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).T


def test_parts_of_a_block_join_only_if_adjacent_in_every_block() -> None:
    size = [np.array([4], dtype=np.int64)] * 2
    near, far = columns((0, 4, 32)), columns((0, 4, 64))
    first = columns((0, 0, 32))
    assert template([first, near], [first, near], size).num_bytes.tolist() == [8]
    assert template([first, far], [first, near], size).num_bytes.tolist() == [4, 4]
    assert template([first, near], [first, far], size).num_bytes.tolist() == [4, 4]


def test_columns_of_different_lengths_are_a_protocol_error() -> None:
    short, long = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    with pytest.raises(PeersProtocolError, match="remote_offsets"):
        Ranges(short, short, short, long, short)
    assert joined([]).total_bytes == 0
