"""The kernel's table describes the same copies as the runs it was made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.cuda import FragmentTable, fragment_table, table

Triples = list[tuple[int, int, int]]


def fragments(made: FragmentTable) -> Triples:
    """The meaning of a table, row by row."""
    return [
        (source + i * source_step, destination + i * destination_step, size)
        for source, destination, source_step, destination_step, size, count, _, _ in made.rows.tolist()
        for i in range(count)
    ]


@st.composite
def runs_with_steps(draw: st.DrawFn) -> Triples:
    """Stretches of equal steps that touch, share steps, or hold a single run."""
    triples: Triples = []
    source, destination = 10_000, 50_000
    for _ in range(draw(st.integers(0, 6))):
        size = draw(st.sampled_from([1, 8, 64]))
        steps = draw(st.sampled_from([(0, 64), (64, 64), (-100, 64), (128, 200)]))
        for _ in range(draw(st.integers(1, 4))):
            triples.append((source, destination, size))
            source, destination = source + steps[0], destination + steps[1]
    return triples


@given(runs_with_steps(), st.integers(1, 100))
def test_a_table_holds_the_same_fragments_in_the_same_order(triples: Triples, tile_bytes: int) -> None:
    assert fragments(fragment_table(CopyRuns.of(triples), tile_bytes)) == triples


@given(runs_with_steps(), st.integers(1, 100))
def test_tiles_are_counted_without_a_gap(triples: Triples, tile_bytes: int) -> None:
    made = fragment_table(CopyRuns.of(triples), tile_bytes)
    tiles = 0
    for *_, size, count, first_tile, tiles_per_fragment in made.rows.tolist():
        assert first_tile == tiles
        assert (tiles_per_fragment - 1) * tile_bytes < size <= tiles_per_fragment * tile_bytes
        tiles += count * tiles_per_fragment
    assert made.num_tiles == tiles


def test_equal_steps_become_one_row() -> None:
    layers = [
        (block * 100_000 + layer * 4096, (block * 8 + layer) * 4096, 4096) for block in (7, 2, 9) for layer in range(8)
    ]
    made = fragment_table(CopyRuns.of(layers), 4096)
    assert made.rows[:, 5].tolist() == [8, 8, 8]
    assert made.num_tiles == 24


def test_no_runs_are_no_rows() -> None:
    made = fragment_table(CopyRuns.empty(), 4096)
    assert (made.rows.shape, made.num_tiles) == ((0, 8), 0)


def test_a_table_is_read_only_and_contiguous() -> None:
    made = fragment_table(CopyRuns.of([(0, 100, 4)]), 4096)
    assert made.rows.flags.c_contiguous
    assert made.rows.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        made.rows[0, 0] = 1


def test_more_tiles_than_the_kernel_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 4294967295 tiles"):
        fragment_table(CopyRuns.of([(0, 1 << 60, table.MAX_TILES + 1)]), 1)
