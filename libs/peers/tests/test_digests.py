"""Digests: equal for content that arrived whole, whatever the layouts; different for the cell with a wrong byte."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from byte_model import Side as Memory
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peer_worlds import World, worlds
from plain_worlds import group, world
from world_reads import run_reads

from hybridkv.peers.cells import Side
from hybridkv.peers.digests import (
    DigestRequest,
    DigestRuns,
    DigestSpan,
    Mismatch,
    digest_request,
    digest_runs,
    mismatches,
    plain_digester,
)
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.tables import BlockTables
from hybridkv.planner import GroupKind

MODERATE = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def num_digests(request: DigestRequest) -> int:
    return sum(span.num_cells for span in request.spans)


def digests(memory: Memory, runs: DigestRuns | Incompatibility) -> list[bytes]:
    assert isinstance(runs, DigestRuns), runs
    # The model has one number per byte: eight bytes each.
    wide = DigestRuns(runs.regions, runs.offsets * 8, runs.num_bytes * 8, runs.ends)
    return list(plain_digester(memory.regions, hashlib.sha256)(wide))


@MODERATE
@given(worlds(), st.data())
def test_digests_are_equal_and_a_wrong_byte_is_found_in_its_cell(world: World, data: st.DataObject) -> None:
    outcome = run_reads(world, 0)
    assume(outcome.refusal is None)
    local = BlockTables.whole(world.num_tokens, world.tables[0])
    for pairing, (exchange, remote, theirs) in zip(outcome.pairings, outcome.remotes, strict=True):
        request = digest_request(pairing)
        runs = digest_runs(exchange, Side.OURS, local, request)
        assert isinstance(runs, DigestRuns) or not request.spans
        if not request.spans:
            continue
        assert runs.num_bytes.sum() == pairing.num_bytes
        mine = digests(outcome.ours, runs)
        yours = digests(theirs, digest_runs(exchange, Side.THEIRS, remote, request))
        assert len(mine) == num_digests(request)
        assert mismatches(request, mine, yours) == ()
        wrong = data.draw(st.integers(0, len(mine) - 1))
        first = int(runs.ends[wrong - 1]) if wrong else 0
        if first == runs.ends[wrong]:
            continue
        region, offset = runs.regions[first], runs.offsets[first]
        outcome.ours.regions[region][offset] ^= 1
        broken = digests(outcome.ours, runs)
        assert len(mismatches(request, broken, yours)) == 1
        assert broken[wrong] != yours[wrong]
        outcome.ours.regions[region][offset] ^= 1


WORLD = world(
    (group(GroupKind.FULL, (4, 2)), group(GroupKind.RECURRENT, (4, 4)), group(GroupKind.SCRATCH, (4, 4))), num_tokens=11
)


def test_each_digest_covers_the_bytes_of_its_cell() -> None:
    """Cells of 2 tokens, two per local block, block ids from 1; each cell is one run."""
    case = world((group(GroupKind.FULL, (4, 2)),), num_tokens=11, in_order=True)
    outcome = run_reads(case, 0)
    local = BlockTables.whole(11, case.tables[0])
    runs = digest_runs(outcome.remotes[0][0], Side.OURS, local, digest_request(outcome.pairings[0]))
    assert isinstance(runs, DigestRuns)
    assert runs.offsets.tolist() == [8, 12, 16, 20, 24, 28]
    assert runs.num_bytes.tolist() == [4, 4, 4, 4, 4, 2]
    assert runs.ends.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_mismatch_names_group_and_cell() -> None:
    outcome = run_reads(WORLD, 0)
    request = digest_request(outcome.pairings[0])
    assert request == DigestRequest(11, (DigestSpan(0, 0, 6), DigestSpan(1, 0, 1)))
    good = [bytes([i]) for i in range(7)]
    assert mismatches(request, good, [*good[:3], b"x", *good[4:6], b"y"]) == (Mismatch(0, 3), Mismatch(1, 0))


def test_missing_digests_are_mismatches() -> None:
    request = DigestRequest(11, (DigestSpan(0, 0, 2),))
    assert mismatches(request, [b"a", b"b"], [b"a"]) == (Mismatch(0, 0), Mismatch(0, 1))
    assert mismatches(DigestRequest(11, ()), [], [b"a"]) != ()


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("digests.num_tokens", DigestRequest(0, ())),
        ("digests.num_tokens", DigestRequest(12, ())),
        ("digests.num_tokens", DigestRequest(1 << 70, ())),
        # The state after 11 tokens lies in the block in which one after 10 would lie.
        ("digests.num_tokens", DigestRequest(10, (DigestSpan(1, 0, 1),))),
        ("digests.group_index", DigestRequest(11, (DigestSpan(3, 0, 1),))),
        ("digests.group_index", DigestRequest(11, (DigestSpan(0, 0, 1), DigestSpan(0, 0, 1)))),
        ("digests.cells of group 0", DigestRequest(11, (DigestSpan(0, 0, 1 << 60),))),
        ("digests.cells of group 0", DigestRequest(11, (DigestSpan(0, -1, 1),))),
        ("digests.cells of group 0", DigestRequest(11, (DigestSpan(0, 0, 0),))),
        ("digests.cells of group 1", DigestRequest(11, (DigestSpan(1, 0, 2),))),
        ("digests.cells of group 2", DigestRequest(11, (DigestSpan(2, 0, 1),))),
    ],
)
def test_blocks_outside_of_the_lease_are_not_digested(field: str, request_: DigestRequest) -> None:
    exchange, remote, _ = run_reads(WORLD, 0).remotes[0]
    found = digest_runs(exchange, Side.THEIRS, remote, request_)
    assert isinstance(found, Incompatibility)
    assert found.field == field


@MODERATE
@given(
    st.builds(
        DigestRequest,
        num_tokens=st.integers(-1, 12),
        spans=st.lists(
            st.builds(DigestSpan, st.integers(-1, 3), st.integers(-1, 8), st.integers(-1, 8)), max_size=3
        ).map(tuple),
    )
)
def test_any_request_is_answered_from_the_blocks_of_the_lease_or_refused(request_: DigestRequest) -> None:
    exchange, remote, theirs = run_reads(WORLD, 0).remotes[0]
    found = digest_runs(exchange, Side.THEIRS, remote, request_)
    if isinstance(found, Incompatibility):
        return
    assert found.ends.size == num_digests(request_)
    for region, offset, size in zip(found.regions, found.offsets, found.num_bytes, strict=True):
        assert offset >= 0 and offset + size <= theirs.regions[region].size


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 40)), max_size=5), st.integers(1, 20))
def test_a_split_request_covers_the_same_cells_in_the_same_order(rows: list[tuple[int, int, int]], most: int) -> None:
    def cells(asked: DigestRequest) -> list[tuple[int, int]]:
        return [(span.group_index, span.first_cell + i) for span in asked.spans for i in range(span.num_cells)]

    request = DigestRequest(7, tuple(DigestSpan(*row) for row in rows))
    parts = request.parts(most)
    assert [cell for part in parts for cell in cells(part)] == cells(request)
    assert all(0 < num_digests(part) <= most and part.num_tokens == 7 for part in parts)
    assert len(parts) == -(-num_digests(request) // most)
    assert DigestRequest.of(7, request.columns) == request


def test_a_run_outside_of_its_region_is_not_digested() -> None:
    column = lambda *numbers: np.array(numbers, dtype=np.int64)  # noqa: E731
    digest = plain_digester([b"1234"], hashlib.sha256)
    assert digest(DigestRuns(column(0), column(1), column(3), column(1))) == [hashlib.sha256(b"234").digest()]
    with pytest.raises(ValueError, match="outside region 0"):
        digest(DigestRuns(column(0), column(1), column(4), column(1)))


def test_no_bytes_give_no_digest() -> None:
    empty = np.empty(0, dtype=np.int64)
    assert list(plain_digester([b""], hashlib.sha256)(DigestRuns(empty, empty, empty, empty))) == []
