"""Misled requests are exactly those that continue from a block that the engine copies wrongly."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import CorruptBlocks, SuspectGroups
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics

STATES, ATTENTION = 0, 1
BLOCK = 16
Table = tuple[list[int], list[int]]


class Pool:
    """Hashes of the engine's blocks."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_hash=None, block_hash_num_tokens=None) for _ in range(64)]
        self.evicted: set[int] = set()

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids
        for block_id in block_ids:
            self.blocks[block_id].block_hash = None

    def name(self, block_id: int, name: str, num_tokens: int) -> None:
        self.blocks[block_id].block_hash = name
        self.blocks[block_id].block_hash_num_tokens = num_tokens


class Bench:
    """Engine with one RECURRENT and one FULL group."""

    def __init__(self, *, is_partial: bool) -> None:
        self.metrics = ConnectorMetrics()
        self.wrong = CorruptBlocks([BLOCK, BLOCK], self.metrics)
        self.wrong.suspects = SuspectGroups(frozenset({ATTENTION} if is_partial else ()))
        self.pool = Pool()
        self.wrong.bind(self.pool)  # type: ignore[arg-type]
        self.tables: dict[str, Table] = {}

    def step(
        self,
        new: Mapping[str, tuple[int, Table]] | None = None,
        copies: Sequence[tuple[int, int]] = (),
        *,
        running: Mapping[str, Table] | None = None,
        handed_over: Mapping[str, Any] | None = None,
        gone: Sequence[str] = (),
        chunks: Mapping[str, tuple[int, int]] | None = None,
        drafts: Mapping[str, Sequence[int]] | None = None,
    ) -> set[str]:
        """Run a step: new requests with their computed tokens and table, and running ones with new blocks. Returns the
        misled requests.

        `chunks` gives the tokens that the step computes for some requests, drafts included.
        """
        new, running, chunks = new or {}, running or {}, chunks or {}
        self.tables |= {name: table for name, (_, table) in new.items()}
        for name, added in running.items():
            for blocks, more in zip(self.tables[name], added, strict=True):
                blocks.extend(more)
        output: Any = SimpleNamespace(
            kv_cache_block_copies=list(copies),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=computed) for name, (computed, _) in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(running),
                resumed_req_ids=set(),
                num_computed_tokens=[chunks.get(name, (0, 1))[0] for name in running],
                new_block_ids=list(running.values()),
            ),
            num_scheduled_tokens={
                name: end - start for name in (*running, *new) for start, end in [chunks.get(name, (0, 1))]
            },
            scheduled_spec_decode_tokens=drafts or {},
            preempted_req_ids=set(gone),
            finished_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=handed_over or {}),
        )
        self.wrong.follow_step(output, self.tables.__getitem__)
        return set(self.wrong.misled)

    def causes(self) -> dict[str, float]:
        stats = self.metrics.take()
        return {} if stats is None else {str(key): value for key, value in stats.reduce().items()}


def test_a_hit_on_a_partially_copied_block_misleads_only_its_request() -> None:
    bench = Bench(is_partial=True)
    hits = {"inside": (14, ([3], [4])), "at_the_end": (16, ([5], [6])), "cold": (0, ([7], [8]))}
    assert bench.step(hits, [(1, 3), (2, 4)]) == {"inside"}


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_copy_of_a_copy_misleads_if_blocks_are_copied_whole(is_chain: bool) -> None:
    bench = Bench(is_partial=False)
    copies = [(1, 3), (1, 5), (2, 4), (4 if is_chain else 2, 6)]
    requests = {"first": (14, ([3], [4])), "second": (14, ([5], [6]))}
    assert bench.step(requests, copies) == ({"second"} if is_chain else set())


def test_a_copied_state_that_is_handed_over_misleads_no_request() -> None:
    bench = Bench(is_partial=True)
    assert bench.step({"one": (0, ([1], [2]))}) == set()
    assert bench.step(None, [(1, 9)], running={"one": ([], [])}, handed_over={"one": [(STATES, 9, 14)]}) == set()
    assert not bench.wrong.is_corrupt(9)


def test_a_partially_copied_state_is_wrong() -> None:
    bench = Bench(is_partial=True)
    bench.wrong.suspects = SuspectGroups(frozenset({STATES}))
    bench.step({"one": (0, ([1], [2]))})
    assert bench.step(None, [(1, 9)], running={"one": ([], [])}, handed_over={"one": [(STATES, 9, 14)]}) == set()
    assert bench.wrong.is_corrupt(9)


@pytest.mark.parametrize(
    ("chunk", "drafts", "is_right"),
    [
        ((48, 80), (), False),
        ((0, 80), (), False),
        ((48, 64), (), True),
        ((64, 80), (), True),
        ((63, 67), (7, 7, 7), True),
        ((62, 66), (7, 7), True),
        ((66, 67), (), True),
    ],
)
@pytest.mark.parametrize("is_larger", [True, False])
def test_a_state_is_misfiled_if_a_chunk_passes_its_boundary(
    chunk: tuple[int, int], drafts: Sequence[int], is_right: bool, is_larger: bool
) -> None:
    """If no group has smaller blocks than the states, every boundary is right."""
    bench = Bench(is_partial=False)
    bench.wrong.suspects = SuspectGroups(with_misfiled_states=frozenset({STATES} if is_larger else ()))
    bench.step({"one": (0, ([1, 2, 3, 4], [5]))})
    bench.pool.name(4, "state", 64)
    states = [(STATES, 4, 64)]
    misled = bench.step(
        running={"one": ([], [])}, handed_over={"one": states}, chunks={"one": chunk}, drafts={"one": drafts}
    )
    assert misled == set()
    is_kept = is_right or not is_larger
    assert bench.pool.evicted == (set() if is_kept else {4})
    assert len(bench.wrong.correct_states(states, bench.metrics)) == is_kept
    assert sum(bench.causes().values()) == (not is_kept)


def test_a_misfiled_state_of_a_new_request_is_detected() -> None:
    """It began inside a block, with a state left by another connector or a copy."""
    bench = Bench(is_partial=False)
    bench.wrong.suspects = SuspectGroups(with_misfiled_states=frozenset({STATES}))
    bench.step({"one": (8, ([1], [2]))}, handed_over={"one": [(STATES, 1, 16)]}, chunks={"one": (8, 20)})
    assert bench.wrong.is_corrupt(1)


def test_a_hit_on_a_misfiled_state_misleads_if_it_cannot_be_evicted() -> None:
    bench = Bench(is_partial=False)
    bench.wrong.suspects = SuspectGroups(with_misfiled_states=frozenset({STATES}))
    bench.pool.evict_blocks = lambda block_ids: None  # type: ignore[method-assign]
    bench.pool.name(1, "state", 16)
    bench.step({"one": (0, ([1, 3], [2]))}, handed_over={"one": [(STATES, 1, 16)]}, chunks={"one": (0, 20)})
    assert bench.step({"two": (16, ([1], [2]))}) == {"two"}
    bench.pool.name(1, "another", 16)
    assert bench.step({"three": (16, ([1], [2]))}) == {"two"}


def misled_bench() -> Bench:
    """Bench with one misled request that has filled its first block since."""
    bench = Bench(is_partial=True)
    bench.step({"misled": (14, ([3], [4]))}, [(1, 3), (2, 4)])
    bench.pool.name(4, "full", 16)
    assert bench.step(running={"misled": ([5], [6])}) == {"misled"}
    return bench


@pytest.mark.parametrize("is_over", [True, False])
def test_a_hit_on_a_block_of_a_misled_request_misleads_too(is_over: bool) -> None:
    bench = misled_bench()
    if is_over:
        bench.step(gone=["misled"])
    hit = {"follower": (16, ([10], [4])), "other": (16, ([11], [2]))}
    assert bench.step(hit) == {"follower"} | (set() if is_over else {"misled"})


def test_a_block_reused_by_another_request_is_right_again() -> None:
    bench = misled_bench()
    bench.step(gone=["misled"])
    bench.pool.name(4, "another", 16)
    assert bench.step({"other": (16, ([10], [4]))}) == set()


def test_a_block_computed_or_loaded_again_is_right_despite_an_equal_hash() -> None:
    bench = misled_bench()
    bench.step(gone=["misled"])
    table: Any = SimpleNamespace(blocks=[[SimpleNamespace(block_id=each)] for each in (0, 4)])
    bench.wrong.unmark_loaded(table, 0)
    assert bench.step({"loaded": (16, ([10], [4])), "computes": (0, ([12], [6]))}) == set()
    assert not bench.wrong.is_corrupt(6)


def test_a_copy_of_a_wrong_block_is_wrong() -> None:
    bench = misled_bench()
    bench.wrong.suspects = SuspectGroups()
    assert bench.step({"inside": (14, ([10], [11]))}, [(1, 10), (4, 11)]) == {"misled", "inside"}


def test_a_restarted_request_is_no_longer_misled() -> None:
    bench = misled_bench()
    assert bench.step(gone=["misled"]) == set()
    assert bench.step({"misled": (0, ([20], [21]))}) == set()


def test_misled_requests_are_counted_and_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(is_partial=True)
    with caplog.at_level(logging.WARNING, "vllm.hybridkv"):
        bench.step({"one": (14, ([3], [4])), "two": (14, ([5], [6]))}, [(1, 3), (2, 4), (1, 5), (2, 6)])
    assert [record.args[0] for record in caplog.records if record.args] == ["one"]
    assert list(bench.causes().values()) == [2]
