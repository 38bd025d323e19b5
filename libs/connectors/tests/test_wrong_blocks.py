"""Misled requests are exactly those that continue from a block that the engine copies wrongly, or from a state with a
dropped token."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request, RequestStatus

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import CorruptBlocks, SuspectGroups
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.planner import GroupKind, GroupSpec

STATES, ATTENTION = 0, 1
BLOCK = 16
HASHED = 4
"""Tokens of a hash of the engine with hits inside blocks."""
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
    """Engine with one RECURRENT and one FULL group. `first_kind` replaces RECURRENT."""

    def __init__(self, *, is_partial: bool, first_kind: GroupKind = GroupKind.RECURRENT) -> None:
        self.metrics = ConnectorMetrics()
        groups = [GroupSpec(first_kind, BLOCK), GroupSpec(GroupKind.FULL, BLOCK)]
        self.wrong = CorruptBlocks(groups, self.metrics)
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
        finished: Sequence[str] = (),
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
            finished_req_ids=set(finished),
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


@pytest.mark.parametrize(
    ("chunk", "boundary", "is_right"),
    [
        ((36, 90), 48, False),
        ((36, 90), 88, True),
        ((20, 36), 36, True),
        ((36, 51), 48, False),
        ((32, 51), 48, True),
    ],
)
def test_of_the_states_inside_a_chunk_only_the_saved_one_is_right(
    chunk: tuple[int, int], boundary: int, is_right: bool
) -> None:
    """The backend saves none in [36, 51): it would lie in the block in which the chunk begins."""
    spec = MambaSpec(BLOCK, ((4,),), (torch.int8,), num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
    groups = [SimpleNamespace(kv_cache_spec=spec), SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]
    config: Any = SimpleNamespace(
        kv_cache_groups=groups, hash_block_size=HASHED, cache_hit_alignment_tokens=HASHED, num_blocks=9
    )
    vllm_config: Any = SimpleNamespace(speculative_config=None)
    bench = Bench(is_partial=False)
    checkpoints = compat.inner_checkpoints(vllm_config, config)
    assert list(checkpoints) == [STATES]
    bench.wrong.suspects = SuspectGroups(inner_checkpoints=checkpoints)
    bench.step({"one": (0, ([1], [2]))})
    bench.step(running={"one": ([], [])}, handed_over={"one": [(STATES, 1, boundary)]}, chunks={"one": chunk})
    assert bench.wrong.is_corrupt(1) is not is_right
    config.cache_hit_alignment_tokens = config.hash_block_size = BLOCK
    assert compat.inner_checkpoints(vllm_config, config) == {}, "no chunk begins inside a block"


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
    bench.wrong.unmark_allocated(KVCacheBlocks(([], [KVCacheBlock(4)])))
    assert bench.step({"loaded": (16, ([10], [4])), "computes": (0, ([12], [6]))}) == set()
    assert not bench.wrong.is_corrupt(6)


def test_blocks_of_a_hit_keep_their_marks_and_new_ones_lose_theirs() -> None:
    bench = misled_bench()
    bench.step(gone=["misled"])
    hit = KVCacheBlock(4)
    hit.set_block_hash(make_block_hash_with_group_id(BlockHash(b"full"), ATTENTION))
    bench.wrong.unmark_allocated(KVCacheBlocks(([], [hit, KVCacheBlock(6)])))
    assert bench.wrong.is_corrupt(4) and not bench.wrong.is_corrupt(6)


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


def session(name: str = "session", *, computed_tokens: int = 0, is_session: bool = True) -> Any:
    return SimpleNamespace(
        request_id=name, resumable=is_session, num_computed_tokens=computed_tokens, is_finished=lambda: False
    )


def session_bench(first_kind: GroupKind = GroupKind.RECURRENT, *, is_session: bool = True) -> Bench:
    """Bench with a session that has computed 20 tokens, 18 of them in its first step."""
    bench = Bench(is_partial=False, first_kind=first_kind)
    bench.wrong.track(session(is_session=is_session))
    bench.step({"session": (0, ([1, 2], [3, 4]))}, chunks={"session": (0, 18)})
    for start in (18, 19):
        assert bench.step(running={"session": ([], [])}, chunks={"session": (start, start + 1)}) == set()
    return bench


def continues(bench: Bench, computed_tokens: int, num_tokens: int = 4) -> set[str]:
    """The session's next input arrives."""
    chunk = (computed_tokens, computed_tokens + num_tokens)
    return bench.step({"session": (computed_tokens, bench.tables["session"])}, chunks={"session": chunk})


def test_a_session_is_misled_if_its_state_contains_a_dropped_token() -> None:
    bench = session_bench()
    assert continues(bench, 19) == {"session"}
    assert [bench.wrong.is_corrupt(each) for each in (1, 2, 3, 4)] == [False, True, False, True]
    assert list(bench.causes()) == ["vllm:hybridkv_misled_requests_total"]


@pytest.mark.parametrize("case", ["all_computed", "no_session", "no_states"])
def test_other_requests_that_continue_are_not_misled(case: str) -> None:
    bench = session_bench(
        GroupKind.FULL if case == "no_states" else GroupKind.RECURRENT, is_session=case != "no_session"
    )
    assert continues(bench, 20 if case == "all_computed" else 19) == set()


@pytest.mark.parametrize("num_accepted", [0, 1])
@pytest.mark.parametrize("has_later_step", [False, True])
def test_a_session_with_drafts_is_misled(num_accepted: int, has_later_step: bool) -> None:
    """The start of a later step contains drafts that may still be rejected, so no end of a step is certain."""
    bench = session_bench()
    bench.step(running={"session": ([], [])}, chunks={"session": (20, 23)}, drafts={"session": (7, 7)})
    if has_later_step:
        bench.step(running={"session": ([], [])}, chunks={"session": (23, 24)})
    assert continues(bench, 21 + num_accepted + has_later_step) == {"session"}
    assert continues(bench, 40) == {"session"}
    bench.step(gone=["session"])
    assert bench.step({"session": (16, ([9, 10], [11, 12]))}, chunks={"session": (16, 20)}) == set()


def test_a_misled_session_remains_misled_and_counts_once() -> None:
    bench = session_bench()
    continues(bench, 19)
    assert continues(bench, 23) == {"session"}
    assert list(bench.causes().values()) == [1]


def test_a_request_that_hits_a_block_of_a_misled_session_is_misled() -> None:
    bench = session_bench()
    continues(bench, 19, 13)
    bench.pool.name(4, "full", 32)
    bench.step(running={"session": ([5], [6])}, chunks={"session": (32, 33)})
    assert bench.step({"follower": (32, ([0, 2, 7], [3, 4, 8]))}) == {"session", "follower"}


@pytest.mark.parametrize("way", ["preempted", "finished"])
def test_a_session_that_starts_over_is_not_misled(way: str) -> None:
    """It may resume from a hit."""
    bench = session_bench()
    continues(bench, 19)
    if way == "preempted":
        bench.step(gone=["session"])
    else:
        bench.wrong.track(session())
        bench.step(finished=["session"])
    assert bench.step({"session": (16, ([9, 10], [11, 12]))}, chunks={"session": (16, 20)}) == set()
    assert continues(bench, 20) == set()


def test_a_session_with_an_unknown_last_step_is_misled() -> None:
    bench = Bench(is_partial=False)
    bench.wrong.track(session(computed_tokens=20))
    assert bench.step({"session": (20, ([1, 2], [3, 4]))}) == {"session"}


def own_hash(value: Any) -> bytes:
    return repr(value).encode()


class PriorityBench(Bench):
    """Engine with priority scheduling and a real pool, in which requests have all their blocks cached by hash."""

    def __init__(self, *, max_tokens: int = 64) -> None:
        super().__init__(is_partial=False)
        self.wrong.suspects = SuspectGroups(max_uncomputed_tokens=max_tokens)
        self.real_pool = BlockPool(64, enable_caching=True, hash_block_size=HASHED)
        self.wrong.bind(self.real_pool)
        init_none_hash(own_hash)
        self.requests: dict[str, Request] = {}

    def add(self, name: str, *, first_token: int = 0, num_tokens: int = 96) -> list[list[KVCacheBlock]]:
        """Adds a request, and caches its blocks of both groups, as if all its tokens were scheduled."""
        tokens = list(range(first_token, first_token + num_tokens))
        hasher = get_request_block_hasher(HASHED, own_hash)
        self.requests[name] = request = Request(name, tokens, SamplingParams(max_tokens=9), None, block_hasher=hasher)
        self.wrong.track(request)
        groups = []
        for group in (STATES, ATTENTION):
            groups.append(self.real_pool.get_new_blocks(num_tokens // BLOCK))
            self.real_pool.cache_full_blocks(request, groups[-1], 0, len(groups[-1]), BLOCK, group)
        return groups


def num_cached(groups: Sequence[Sequence[KVCacheBlock]]) -> list[int]:
    return [sum(block.block_hash is not None for block in blocks) for blocks in groups]


def test_blocks_of_a_preempted_request_beyond_its_last_step_are_evicted() -> None:
    """In each group, also the block in which the step ended, and those of another request with the same tokens."""
    bench = PriorityBench()
    one, two, same, other = (
        bench.add(name, first_token=at) for name, at in (("one", 0), ("two", 200), ("same", 0), ("other", 400))
    )
    bench.step({"one": (0, ([], [])), "two": (0, ([], []))}, chunks={"one": (0, 40), "two": (0, 32)})
    bench.step(gone=["one", "two"])
    assert [num_cached(each) for each in (one, two, same, other)] == [[2, 2], [2, 2], [2, 2], [6, 6]]
    bench.step(gone=["other"])
    assert num_cached(other) == [2, 2], "no step is known, and a step has 64 tokens"
    assert [block.block_hash is not None for block in other[0]] == [False] * 4 + [True] * 2


def test_an_entry_inside_a_block_is_evicted_too() -> None:
    bench = PriorityBench()
    bench.add("one", num_tokens=HASHED * 7)
    (block,) = bench.real_pool.get_new_blocks(1)
    bench.real_pool.cache_partial_block(bench.requests["one"], block, HASHED * 6, ATTENTION, BLOCK)
    bench.step({"one": (0, ([], []))}, chunks={"one": (0, HASHED * 6)})
    bench.step(gone=["unknown"])
    assert block.block_hash is not None
    bench.step(running={"one": ([], [])}, chunks={"one": (HASHED * 4, HASHED * 5)})
    bench.step(gone=["one"])
    assert block.block_hash is None


def test_drafts_do_not_move_the_end_of_a_step() -> None:
    bench = PriorityBench()
    blocks = bench.add("one")
    bench.step({"one": (0, ([], []))}, chunks={"one": (44, 48)}, drafts={"one": (7, 7)})
    bench.step(gone=["one"])
    assert num_cached(blocks) == [2, 2]


def test_drafts_that_are_still_counted_as_computed_do_not_move_the_end() -> None:
    """With asynchronous scheduling, a step begins after the drafts of the step in flight. They may be rejected."""
    bench = PriorityBench()
    blocks = bench.add("one")
    bench.step({"one": (0, ([], []))}, chunks={"one": (44, 47)}, drafts={"one": (7, 7)})
    bench.step(running={"one": ([], [])}, chunks={"one": (47, 50)}, drafts={"one": (7, 7)})
    bench.step(gone=["one"])
    assert num_cached(blocks) == [2, 2]


@pytest.mark.parametrize("case", ["other_policy", "resumed", "ended", "id_in_use_again"])
def test_other_preemptions_evict_nothing(case: str) -> None:
    """A reset of the engine's cache preempts requests between two steps. They may resume in the next one."""
    bench = PriorityBench(max_tokens=0 if case == "other_policy" else 64)
    blocks = bench.add("one")
    bench.step({"one": (0, ([], []))}, chunks={"one": (0, 40)})
    if case == "resumed":
        bench.step({"one": (0, ([], []))}, gone=["one"], chunks={"one": (0, 96)})
        assert num_cached(blocks) == [6, 6]
        bench.step(gone=["one"])
    elif case == "other_policy":
        bench.step(gone=["one"])
    else:
        bench.requests["one"].status = RequestStatus.FINISHED_ABORTED
        if case == "id_in_use_again":
            bench.add("one", first_token=200)
        bench.step(finished=["one"])
        bench.step(gone=["one"])
    assert num_cached(blocks) == [6, 6]


@pytest.mark.parametrize(("policy", "num_tokens"), [("fcfs", 0), ("priority", 64 + 2 * 3)])
def test_blocks_of_one_step_and_its_drafts_may_be_uncomputed(policy: str, num_tokens: int) -> None:
    scheduler = SimpleNamespace(policy=policy, max_num_batched_tokens=64)
    config: Any = SimpleNamespace(
        scheduler_config=scheduler, speculative_config=SimpleNamespace(num_speculative_tokens=3)
    )
    assert compat.max_uncomputed_tokens(config) == num_tokens
