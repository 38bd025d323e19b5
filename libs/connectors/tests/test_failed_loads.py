"""After a failed load, requests are offered only chunks that the load verified."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_lookups import BLOCK, FULL, HASHES, STATE, make_layout

from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines, LoadPlanner
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.planner import GroupKind, GroupSpec, LoadAdmission, resume_start
from hybridkv.tiers import Slot
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import TierStack

CHUNKS = 12
CHUNK_TOKENS = 2 * BLOCK
NUM_TOKENS = CHUNKS * CHUNK_TOKENS
WINDOW = GroupSpec(GroupKind.WINDOW, BLOCK, window_tokens=12)
"""Its resumes read two chunks."""


class Engine:
    """Scheduler half over host memory with one stored prompt, and a worker that finds some chunks damaged."""

    def __init__(self, other: GroupSpec) -> None:
        self.keyed = make_layout([FULL, other])
        self.primary = RamIndex(1 << 22, 4096)
        self.stack = TierStack(self.primary, [], 1, lambda: 0.0)
        self.admission, metrics = LoadAdmission(self.keyed.spec, 64), ConnectorMetrics()
        admission = self.admission
        self.in_flight = LoadsInFlight(self.keyed.layout, self.stack, admission, metrics)
        deadlines = Deadlines(10.0, 10.0, lambda: 0.0)
        self.planner = LoadPlanner(self.keyed.layout, self.stack, admission, deadlines, metrics, self.in_flight)
        self.damaged: set[bytes] = set()
        self.blames = True
        """Whether the worker reports the damaged chunks."""
        self.reasons: tuple[str, ...] = ()
        """Failures of every load that name no chunk."""
        self.compute()

    def key(self, group: int, chunk: int) -> bytes:
        return self.keyed.key(group, HASHES, (chunk + 1) * CHUNK_TOKENS)

    def compute(self) -> None:
        """Compute the prompt and store the missing chunks, which are intact then."""
        for group in (0, 1):
            for chunk in range(CHUNKS):
                key = self.key(group, chunk)
                if isinstance(self.primary.reserve(key, 1), Slot) and self.primary.commit(key):
                    self.damaged.discard(key)

    def damage(self, group: int, chunks: Iterable[int]) -> None:
        self.damaged |= {self.key(group, chunk) for chunk in chunks}

    def serve(self, name: str) -> tuple[int, bool]:
        """Serve a new request for the prompt under `kv_load_failure_policy: fail`. Its loaded tokens, and whether the
        load fails. A request without a failure computes the rest.
        """
        request = SimpleNamespace(request_id=name, num_tokens=NUM_TOKENS + 1, block_hashes=HASHES[: CHUNKS * 2])
        tracked = TrackedRequest(cast(Any, request), None, RequestKeys(self.keyed.spec, self.keyed.keys))
        offered = self.planner.matched_tokens(tracked, 0)
        assert offered is not None
        failures: list[LoadFailure] = []
        load = self.planner.on_allocated(tracked, cast(Any, SimpleNamespace(blocks=self._blocks(offered))), offered)
        if load is not None:
            assert load.refused is None
            bad = [key for key, _, _ in load.copies.chunks() if key in self.damaged]
            failures = [LoadFailure("checksum", "", key) if self.blames else LoadFailure("io", "") for key in bad]
            failures += [LoadFailure(reason, "") for reason in self.reasons]
            self.in_flight.on_failures(name, failures)
            self.in_flight.on_ended(name, tracked, failed=bool(failures))
        self.planner.on_request_finished(name)
        if not failures:
            self.compute()
        return offered, bool(failures)

    def _blocks(self, boundary: int) -> list[list[Any]]:
        firsts = [resume_start(group, boundary) // group.block_tokens for group in self.keyed.spec.groups]
        return [
            [SimpleNamespace(block_id=at + 1 if at >= first else NULL_BLOCK) for at in range(boundary // block_tokens)]
            for first, block_tokens in zip(
                firsts, (group.block_tokens for group in self.keyed.spec.groups), strict=True
            )
        ]

    def num_failed(self, num_requests: int = 8) -> int:
        """Number of requests that end with an error, of several in a row."""
        return sum(self.serve(f"r{number}")[1] for number in range(num_requests))


@pytest.mark.parametrize("chunks", [range(9, 12), range(6, 12), range(12), (1, 4, 7, 11)])
@pytest.mark.parametrize("other", [WINDOW, STATE], ids=["window", "state"])
def test_one_damaged_prefix_fails_one_request(other: GroupSpec, chunks: Iterable[int]) -> None:
    engine = Engine(other)
    engine.damage(1, chunks)
    assert engine.num_failed() == 1
    assert engine.serve("last") == (NUM_TOKENS, False)
    assert engine.primary.used_bytes == 2 * CHUNKS * 4096
    engine.primary.clear()
    assert engine.primary.used_bytes == 0, "no chunk stays pinned"


def test_chunks_that_a_failed_load_verified_stay() -> None:
    engine = Engine(WINDOW)
    engine.damage(1, [CHUNKS - 1])
    assert engine.num_failed(1) == 1
    assert engine.primary.leading([engine.key(0, chunk) for chunk in range(CHUNKS)]) == CHUNKS
    assert engine.stack.in_primary(engine.key(1, CHUNKS - 2))
    assert not any(engine.stack.in_primary(engine.key(1, chunk)) for chunk in (*range(CHUNKS - 2), CHUNKS - 1))


def test_a_failure_without_a_chunk_withdraws_all_chunks_of_the_load() -> None:
    engine = Engine(WINDOW)
    engine.blames = False
    engine.damage(0, [3])
    assert engine.num_failed() == 1
    assert engine.serve("last") == (NUM_TOKENS, False)


@pytest.mark.parametrize("reason", ["timeout", "busy"])
def test_a_load_that_read_nothing_withdraws_no_chunk(reason: str) -> None:
    engine = Engine(WINDOW)
    engine.reasons = (reason,)
    assert engine.num_failed(1) == 1
    engine.reasons = ()
    assert engine.serve("next") == (NUM_TOKENS, False)


def test_a_verification_by_one_rank_does_not_cover_another() -> None:
    engine = Engine(WINDOW)
    engine.damage(1, [CHUNKS - 1])
    engine.reasons = ("timeout",)
    assert engine.num_failed(1) == 1
    assert engine.primary.used_bytes == 0


@pytest.mark.parametrize("is_child", [False, True])
def test_below_a_parent_that_admits_loads_a_hit_is_offered_at_once(is_child: bool) -> None:
    engine = Engine(WINDOW)
    engine.planner.admits_loads = not is_child
    engine.admission.fail("other", NUM_TOKENS)
    request = SimpleNamespace(request_id="r", num_tokens=NUM_TOKENS + 1, block_hashes=HASHES[: CHUNKS * 2])
    tracked = TrackedRequest(cast(Any, request), None, RequestKeys(engine.keyed.spec, engine.keyed.keys))
    assert engine.planner.matched_tokens(tracked, 0) == (NUM_TOKENS if is_child else None)
