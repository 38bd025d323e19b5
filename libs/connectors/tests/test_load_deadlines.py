"""Deadlines of a request: all its waits for a secondary tier together stay within the load timeout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_lookups import FULL, HASHES, STATE, make_layout

from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines, LoadPlanner
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.metrics import Counts
from hybridkv.planner import LoadAdmission
from hybridkv.planner.admission import MAX_GATE_S, MAX_GATED_POLLS
from hybridkv.planner.life import allocated
from hybridkv.planner.stages import MAX_FAILED_LOADS
from hybridkv.tiers import Failure, FailureReason
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import MoveOutcome, SecondaryTier, TierMove, TierStack
from hybridkv.tiers.stack.options import SecondaryTierOptions

CHUNKS = 20
CHUNK_TOKENS = 8
LOAD_TIMEOUT_S = 30.0
STEP_S = 0.25


class Bench:
    """Load planner over two tiers. The secondary tier holds every chunk of the first `CHUNKS`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.layout = make_layout([FULL, STATE])
        self.primary, self.secondary = RamIndex(1 << 22, 4096), RamIndex(1 << 22, 4096)
        options = SecondaryTierOptions(load_timeout_s=LOAD_TIMEOUT_S)
        self.stack = TierStack(self.primary, [SecondaryTier("disk", self.secondary, options)], 1, lambda: self.now_s)
        deadlines = Deadlines(10.0, LOAD_TIMEOUT_S, lambda: self.now_s)
        self.admission = LoadAdmission(self.layout.spec, 64)
        self.metrics = ConnectorMetrics()
        layout, admission = self.layout.layout, self.admission
        self.in_flight = LoadsInFlight(layout, self.stack, admission, self.metrics)
        self.planner = LoadPlanner(layout, self.stack, admission, deadlines, self.metrics, self.in_flight)
        self.hashes = HASHES[: CHUNKS * 2]
        for group in (0, 1):
            for end in range(CHUNK_TOKENS, CHUNKS * CHUNK_TOKENS + 1, CHUNK_TOKENS):
                self.secondary.reserve(self.key(group, end), 1)
                self.secondary.commit(self.key(group, end))
        self.states = {self.key(1, end) for end in range(CHUNK_TOKENS, CHUNKS * CHUNK_TOKENS + 1, CHUNK_TOKENS)}

    def key(self, group: int, end: int) -> bytes:
        return self.layout.keys.key(group, self.hashes, end)

    def ask(
        self, name: str, read_s: float, reason: FailureReason | None, steps: bool = True, step_s: float = STEP_S
    ) -> tuple[int, float]:
        """Tokens that a request is offered in the end, and its waiting time. Each state takes `read_s` and fails with
        `reason`.

        `steps`: the engine takes steps; otherwise it only polls.
        """
        request = SimpleNamespace(request_id=name, num_tokens=CHUNKS * CHUNK_TOKENS + 1, block_hashes=self.hashes)
        tracked = TrackedRequest(cast(Any, request), None, RequestKeys(self.layout.spec, self.layout.keys))
        began_s = self.now_s
        reading: list[tuple[float, TierMove]] = []
        while True:
            assert self.now_s - began_s < 20 * LOAD_TIMEOUT_S, "the request waits for ever"
            offered = self.planner.matched_tokens(tracked, 0)
            if offered is not None:
                self.planner.on_request_finished(name)
                return offered, self.now_s - began_s
            if steps:
                self.stack.tick()
            for move in self.stack.take_moves():
                reading.append((self.now_s + (read_s if move.key in self.states else 0.0), move))
            self.now_s += step_s
            for due in [entry for entry in reading if entry[0] <= self.now_s]:
                reading.remove(due)
                bad = reason is not None and due[1].key in self.states
                self.stack.on_move(due[1].move_id, MoveOutcome(1, Failure(reason) if bad and reason else None))


def test_saved_time_and_the_whole_wait_are_counted() -> None:
    bench = Bench()
    request = SimpleNamespace(request_id="a", num_tokens=CHUNKS * CHUNK_TOKENS + 1, block_hashes=bench.hashes)
    tracked = TrackedRequest(cast(Any, request), None, RequestKeys(bench.layout.spec, bench.layout.keys))
    assert bench.planner.matched_tokens(tracked, 0) is None
    bench.now_s += 2.0  # the promotion
    for move in bench.stack.take_moves():
        bench.stack.on_move(move.move_id, MoveOutcome(1, None))
    offered = bench.planner.matched_tokens(tracked, 0)
    assert offered == CHUNKS * CHUNK_TOKENS
    blocks = [
        [SimpleNamespace(block_id=number + 1 if number >= first else NULL_BLOCK) for number in range(length)]
        for first, length in ((0, CHUNKS * 2), (CHUNKS - 1, CHUNKS))
    ]
    bench.planner.on_allocated(tracked, cast(Any, SimpleNamespace(blocks=blocks)), offered)
    bench.now_s += 0.5  # the load
    bench.planner.end_load(tracked, bench.in_flight.on_ended("a", tracked, failed=False))
    bench.now_s += 9.0
    bench.planner.end_wait(tracked)
    metrics = bench.metrics
    assert (metrics.restored_tokens, metrics.waited_s) == (offered, 2.5)
    assert metrics.saved_s == pytest.approx(offered / 10_000)


@pytest.mark.parametrize(("steps", "is_hit"), [(100, True), (0, False)])
def test_a_request_without_polls_for_long_keeps_its_hit(steps: int, is_hit: bool) -> None:
    """It waits for a promotion while other requests fill the engine. If the engine takes no step either, the tier is
    late.
    """
    bench = Bench()
    request = SimpleNamespace(request_id="a", num_tokens=CHUNKS * CHUNK_TOKENS + 1, block_hashes=bench.hashes)
    tracked = TrackedRequest(cast(Any, request), None, RequestKeys(bench.layout.spec, bench.layout.keys))
    bench.planner.begin_step({})
    assert bench.planner.matched_tokens(tracked, 0) is None
    # Its promotion fails, and the next one can only start at the next poll.
    for move in bench.stack.take_moves():
        bench.stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.BUSY)))
    for _ in range(steps):
        bench.planner.begin_step({"other": 1})
    bench.now_s += 2 * LOAD_TIMEOUT_S
    bench.stack.tick()
    offered = bench.planner.matched_tokens(tracked, 0)
    bench.now_s += STEP_S
    for move in bench.stack.take_moves():
        bench.stack.on_move(move.move_id, MoveOutcome(1, None))
    if offered is None:
        offered = bench.planner.matched_tokens(tracked, 0)
    assert (offered == CHUNKS * CHUNK_TOKENS) is is_hit


def test_distant_polls_end_a_wait_too() -> None:
    """The tier never accepts the promotion, and the engine polls the request in every second step, a minute apart."""
    bench = Bench()
    request = SimpleNamespace(request_id="a", num_tokens=CHUNKS * CHUNK_TOKENS + 1, block_hashes=bench.hashes)
    tracked = TrackedRequest(cast(Any, request), None, RequestKeys(bench.layout.spec, bench.layout.keys))
    for polls in range(100):
        if bench.planner.matched_tokens(tracked, 0) is not None:
            assert polls > 10
            return
        for move in bench.stack.take_moves():
            bench.stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.BUSY)))
        bench.planner.begin_step({})
        bench.planner.begin_step({})
        bench.now_s += 60.0
        bench.stack.tick()
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("has_async_lookups", [True, False])
def test_a_chunk_of_another_length_is_not_loaded_and_withdrawn(has_async_lookups: bool) -> None:
    bench = Bench()
    # An async tier reports the length of its chunks; here each has 1 byte.
    bench.stack.has_async_lookups = has_async_lookups
    request = SimpleNamespace(request_id="a", num_tokens=CHUNKS * CHUNK_TOKENS + 1, block_hashes=bench.hashes)
    tracked = TrackedRequest(cast(Any, request), None, RequestKeys(bench.layout.spec, bench.layout.keys))
    assert bench.planner.matched_tokens(tracked, 0) is None
    for move in bench.stack.take_moves():
        bench.stack.on_move(move.move_id, MoveOutcome(1, None))
    offered = bench.planner.matched_tokens(tracked, 0)
    assert offered == CHUNKS * CHUNK_TOKENS
    blocks = [
        [SimpleNamespace(block_id=number + 1 if number >= first else NULL_BLOCK) for number in range(length)]
        for first, length in ((0, CHUNKS * 2), (CHUNKS - 1, CHUNKS))
    ]
    load = bench.planner.on_allocated(tracked, cast(Any, SimpleNamespace(blocks=blocks)), offered)
    assert load is not None and bool(load.copies) is not has_async_lookups
    is_there = bench.stack.leading([bench.key(0, end) for end in range(CHUNK_TOKENS, offered + 1, CHUNK_TOKENS)])
    assert is_there == (0 if has_async_lookups else CHUNKS)
    bench.in_flight.on_ended("a", tracked, failed=has_async_lookups)
    bench.primary.clear()
    assert bench.primary.used_bytes == 0, "no chunk stays pinned"


@pytest.mark.parametrize("reason", [FailureReason.CHECKSUM, FailureReason.MISSING, FailureReason.IO])
def test_repeated_losses_do_not_extend_the_wait(
    reason: FailureReason,
) -> None:
    offered, waited_s = Bench().ask("a", 20.0, reason)
    assert offered == 0 and waited_s <= LOAD_TIMEOUT_S + 2 * STEP_S


def test_chunks_that_arrive_in_time_are_used() -> None:
    offered, waited_s = Bench().ask("a", 20.0, None)
    assert offered == CHUNKS * CHUNK_TOKENS and 20.0 <= waited_s <= 20.0 + 2 * STEP_S


def test_quick_losses_leave_time_for_a_shorter_boundary() -> None:
    bench = Bench()
    bench.states = {bench.key(1, end) for end in (19 * CHUNK_TOKENS, 20 * CHUNK_TOKENS)}
    offered, waited_s = bench.ask("a", 5.0, FailureReason.CHECKSUM)
    assert offered == 18 * CHUNK_TOKENS and waited_s < LOAD_TIMEOUT_S


def test_a_timeout_of_one_request_costs_the_next_no_wait() -> None:
    bench = Bench()
    assert bench.ask("a", 1e9, None) == (0, pytest.approx(LOAD_TIMEOUT_S, abs=2 * STEP_S))
    bench.now_s += 600
    # The late read is of the longest boundary: its chunk is computed, and the chunks before it are offered.
    for name in "bcd":
        offered, waited_s = bench.ask(name, 0.0, None)
        assert offered == (CHUNKS - 1) * CHUNK_TOKENS and waited_s <= 4 * STEP_S
        bench.now_s += 600


def test_a_request_polled_without_steps_waits_no_longer() -> None:
    bench = Bench()
    assert bench.ask("a", 1e9, None, steps=False) == (0, pytest.approx(LOAD_TIMEOUT_S, abs=2 * STEP_S))


@pytest.mark.parametrize("step_s", [1e-3, 10.0])
def test_the_wait_for_room_is_bounded_for_any_step_length(step_s: float) -> None:
    bench = Bench()
    bench.planner.bind_block_pool(cast(Any, SimpleNamespace(num_gpu_blocks=32, get_num_free_blocks=lambda: 16)))
    bench.admission.take("somebody", 10_000)
    offered, waited_s = bench.ask("a", 0.0, None, step_s=step_s)
    bound_s = min(MAX_GATE_S, MAX_GATED_POLLS * step_s)
    assert offered == 0 and bound_s <= waited_s + 1e-9 and waited_s <= bound_s + 4 * step_s


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "not asked"])
def test_only_a_looked_up_request_counts_as_a_lookup(is_asked: bool) -> None:
    """The engine looks nothing up when a request goes on from its own blocks after a failed load."""
    bench = Bench()
    request = SimpleNamespace(request_id="a", num_tokens=CHUNKS * CHUNK_TOKENS + 1, block_hashes=bench.hashes)
    tracked = TrackedRequest(cast(Any, request), None, RequestKeys(bench.layout.spec, bench.layout.keys))
    for _ in range(MAX_FAILED_LOADS):
        tracked.stage = allocated(tracked.stage, CHUNK_TOKENS)
        tracked.load_ended(failed=True, is_explained=True)
    if is_asked:
        assert bench.planner.matched_tokens(tracked, 0) == 0
    blocks = cast(Any, SimpleNamespace(blocks=()))
    for _ in range(2):
        assert bench.planner.on_allocated(tracked, blocks, 0) is None
    stats = bench.metrics.take()
    totals = {} if stats is None else Counts.from_dict(stats.data).totals()
    assert totals.get("vllm:hybridkv_lookups_total", 0) == int(is_asked), totals
