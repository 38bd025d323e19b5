"""The kernel's table describes the same copies as its runs: `Table` of csrc/cuda/job.cc."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kernel_simulation import CopyRow, runs_in_rows, table_of
from simulated_device import fragments

from hybridkv.transfer import CopyRuns

Triples = list[tuple[int, int, int]]


@st.composite
def runs_with_steps(draw: st.DrawFn) -> Triples:
    """Ranges with equal steps that touch, share steps, or hold a single run."""
    triples: Triples = []
    source, destination = 10_000, 50_000
    for _ in range(draw(st.integers(0, 6))):
        size = draw(st.sampled_from([1, 8, 64]))
        steps = draw(st.sampled_from([(0, 64), (64, 64), (-100, 64), (128, 200)]))
        for _ in range(draw(st.integers(1, 4))):
            triples.append((source, destination, size))
            source, destination = source + steps[0], destination + steps[1]
    return triples


@given(runs_with_steps(), st.integers(1, 100), st.integers(1, 8))
def test_a_table_holds_the_same_fragments_in_the_same_order(triples: Triples, tile_bytes: int, max_rows: int) -> None:
    rows, _, done = table_of(CopyRuns.of(triples), tile_bytes, max_rows)
    assert fragments(rows) == triples[:done]
    assert done == len(triples) or len(rows) == max_rows


@given(runs_with_steps(), st.integers(1, 100))
def test_tiles_are_counted_without_a_gap(triples: Triples, tile_bytes: int) -> None:
    rows, num_tiles, _ = table_of(CopyRuns.of(triples), tile_bytes)
    tiles = 0
    for *_, size, count, first_tile, tiles_per_fragment in rows.tolist():
        assert first_tile == tiles
        assert (tiles_per_fragment - 1) * tile_bytes < size <= tiles_per_fragment * tile_bytes
        tiles += count * tiles_per_fragment
    assert num_tiles == tiles


def test_equal_steps_become_one_row() -> None:
    layers = [
        (block * 100_000 + layer * 4096, (block * 8 + layer) * 4096, 4096) for block in (7, 2, 9) for layer in range(8)
    ]
    rows, num_tiles, _ = table_of(CopyRuns.of(layers), 4096)
    assert rows[:, 5].tolist() == [8, 8, 8]
    assert num_tiles == 24


@given(
    st.lists(
        st.tuples(
            st.just(10_000),
            st.just(50_000),
            st.sampled_from([-100, 64, 128]),
            st.sampled_from([64, 200]),
            st.sampled_from([1, 64]),
            st.integers(1, 5),
        ),
        max_size=6,
    ),
    st.integers(1, 100),
    st.integers(1, 8),
)
def test_a_table_of_rows_holds_the_same_fragments_in_the_same_order(
    rows: list[CopyRow], tile_bytes: int, max_rows: int
) -> None:
    runs = runs_in_rows(rows)
    table, _, done = table_of(runs, tile_bytes, max_rows)
    assert fragments(table) == runs.triples()[:done]
    assert done == len(runs) or len(table) == max_rows


def test_a_row_is_cut_at_the_tile_limit_of_the_kernel() -> None:
    row = (0, 1 << 60, 1 << 40, 1 << 41, 1 << 29, 5)
    table, num_tiles, done = table_of(runs_in_rows([row]), 1)
    assert (num_tiles, done) == (1 << 31, 4)
    assert fragments(table) == runs_in_rows([row]).triples()[:4]


def test_an_empty_list_of_runs_gives_no_rows() -> None:
    rows, num_tiles, _ = table_of(CopyRuns.empty(), 4096)
    assert (len(rows), num_tiles) == (0, 0)


def test_a_table_ends_before_the_tile_limit_of_the_kernel() -> None:
    half = CopyRuns.of([(0, 1 << 60, 1 << 30), (1 << 40, 1 << 61, 1 << 30), (1 << 41, 1 << 50, 1)])
    _, num_tiles, done = table_of(half, 1)
    assert (num_tiles, done) == (1 << 31, 2)


def test_a_first_run_above_the_tile_limit_is_alone_in_its_table() -> None:
    too_many = CopyRuns.of([(0, 1 << 40, (1 << 31) + 5), (1 << 41, 1 << 42, 8)])
    _, num_tiles, done = table_of(too_many, 1)
    assert (num_tiles, done) == ((1 << 31) + 5, 1)
