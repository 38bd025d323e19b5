"""Runs describe the same bytes after they are cut or reversed. The reference copies byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_simulation import CopyRow, runs_in_rows

from hybridkv.transfer import CopyRuns, RunsError
from hybridkv.transfer.memory import AddressRanges, RegisteredRanges

lengths = st.lists(st.integers(min_value=1, max_value=9), max_size=12)


def byte_pairs(runs: CopyRuns) -> list[tuple[int, int]]:
    """(source, destination) of each byte, in order: the reference for runs."""
    return [
        (source + position, destination + position)
        for source, destination, num_bytes in runs.triples()
        for position in range(num_bytes)
    ]


@st.composite
def copy_runs(draw: st.DrawFn) -> CopyRuns:
    """Runs with many neighbours that are adjacent on one side, on both, or on neither."""
    triples = []
    source, destination = 1000, 9000
    for num_bytes in draw(lengths):
        source += draw(st.sampled_from([0, 0, 3]))
        destination += draw(st.sampled_from([0, 0, 5]))
        triples.append((source, destination, num_bytes))
        source += num_bytes
        destination += num_bytes
    return CopyRuns.of(triples)


@given(copy_runs(), st.integers(min_value=1, max_value=20))
def test_cut_at_multiples_leaves_no_run_across_a_multiple(runs: CopyRuns, step: int) -> None:
    pieces = runs.cut_at_multiples(step)
    assert byte_pairs(pieces) == byte_pairs(runs)
    for source, destination, num_bytes in pieces.triples():
        assert source % step + num_bytes <= step and destination % step + num_bytes <= step
    assert (pieces is runs) == (len(pieces) == len(runs))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=4), st.lists(st.integers(0, 80), max_size=6))
def test_ranges_contain_the_addresses_between_their_ends(drawn: list[tuple[int, int]], addresses: list[int]) -> None:
    ranges = AddressRanges()
    for address, num_bytes in drawn:
        ranges = ranges.with_range(address, num_bytes)
    expected = [any(first <= each < first + size for first, size in drawn) for each in addresses]
    assert ranges.contain(np.array(addresses, dtype=np.int64)).tolist() == expected


@given(copy_runs())
def test_reversing_twice_changes_nothing(runs: CopyRuns) -> None:
    assert byte_pairs(runs.reversed()) == [(destination, source) for source, destination in byte_pairs(runs)]
    assert runs.reversed().reversed().triples() == runs.triples()


@st.composite
def row_tables(draw: st.DrawFn) -> list[CopyRow]:
    one = st.tuples(
        st.integers(200, 260),
        st.integers(500, 560),
        st.sampled_from([-20, 0, 10, 30]),
        st.sampled_from([4, 20]),
        st.integers(1, 4),
        st.integers(1, 9),
    )
    return draw(st.lists(one, max_size=5))


@given(row_tables())
def test_rows_give_their_runs_in_order(table: list[CopyRow]) -> None:
    runs = runs_in_rows(table)
    expected = [
        (source + run * source_step, destination + run * destination_step, num_bytes)
        for source, destination, source_step, destination_step, num_bytes, num_runs in table
        for run in range(num_runs)
    ]
    columns = [np.empty(len(runs), dtype=np.int64) for _ in range(3)]
    runs.fill(*columns)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert runs.triples() == expected
    again = CopyRuns.of(expected)
    assert again.total_bytes == runs.total_bytes
    if len({num_bytes for _, _, num_bytes in expected}) < 2:
        assert again.spans == runs.spans
    assert runs_in_rows([tuple(row) for row in again.rows.reshape(-1, 6).tolist()]).triples() == expected


@given(row_tables(), st.lists(st.tuples(st.integers(0, 800), st.integers(1, 400)), max_size=6))
def test_rows_are_checked_like_their_runs(table: list[CopyRow], drawn: list[tuple[int, int]]) -> None:
    memory = RegisteredRanges()
    for number, (address, num_bytes) in enumerate(drawn):
        memory = memory.with_region(address, num_bytes, f"region {number}")
    runs = runs_in_rows(table)
    assert memory.check(runs) == memory.check(CopyRuns.of(runs.triples()))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=4), st.integers(0, 80), st.integers(1, 9))
def test_contain_all_is_exact_or_unknown(drawn: list[tuple[int, int]], start: int, num_bytes: int) -> None:
    ranges = AddressRanges()
    for address, size in drawn:
        ranges = ranges.with_range(address, size)
    found = ranges.contain_all(start, start + num_bytes)
    inside = [any(first <= each < first + size for first, size in drawn) for each in range(start, start + num_bytes)]
    if found is not None:
        assert inside == [found] * num_bytes
    if any(first <= start and start + num_bytes <= first + size for first, size in drawn) and len(drawn) == 1:
        assert found is True


def test_an_empty_list_of_runs_is_valid() -> None:
    empty = CopyRuns.empty()
    assert (len(empty), empty.total_bytes, empty.triples()) == (0, 0, [])


@pytest.mark.parametrize("triple", [(0, 0, 0), (0, 0, -1), (-1, 0, 1), (0, -1, 1)])
def test_invalid_runs_are_refused(triple: tuple[int, int, int]) -> None:
    with pytest.raises(RunsError, match="expected"):
        CopyRuns.of([(1, 2, 3), triple])


def test_arrays_must_be_int64_of_one_length() -> None:
    one, two = np.ones(1, dtype=np.int64), np.ones(2, dtype=np.int64)
    for arrays in [(one, two, one), (one, one, two), (one, one.astype(np.int32), one), (one, one, one.reshape(1, 1))]:
        with pytest.raises(RunsError, match="one-dimensional int64"):
            CopyRuns(*arrays)


def test_runs_cannot_be_changed() -> None:
    runs = CopyRuns.of([(1, 2, 3)])
    with pytest.raises(ValueError, match="read-only"):
        runs.sources[0] = 7
