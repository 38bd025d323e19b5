"""Prefetch hints bring chunks to host memory, whatever happens to the request, within the share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_lookups import FULL, make_layout
from test_requests import SOON_S, lora_request, module, new_request
from test_store_bursts import CHUNK_TOKENS, MIB, PAIR_BYTES, Engine

from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.requests import Requests
from hybridkv.connectors.vllm.common.role import BOTH, Role
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload import prefetching
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines, LoadPlanner
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.connectors.vllm.offload.prefetching import MAX_TRIED, Prefetcher
from hybridkv.connectors.vllm.offload.scheduler import Identity, OffloadScheduler
from hybridkv.connectors.vllm.offload.stores.keeping import Keeper
from hybridkv.metrics import Counts
from hybridkv.planner import LoadAdmission
from hybridkv.planner.hints import Hints, Prefetch, plan_prefetch
from hybridkv.tiers import Slot, TierIndex
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import SecondaryTier, SecondaryTierOptions, TierStack
from kits.tiers.reference import RemoteIndex, RemoteStore

NEAR_BYTES = 16 * MIB
NUM_FITTING = NEAR_BYTES // PAIR_BYTES
SHARE_BYTES = NEAR_BYTES // 4
HINT = {"hybridkv_hints": {"prefetch": True}}


def counted(metrics: ConnectorMetrics, name: str = "prefetches_total") -> dict[str, float]:
    stats = metrics.take()
    if stats is None:
        return {}
    counters = Counts.from_dict(stats.data).data().counters
    return {labels[0]: value for found, labels, value in counters if found == f"vllm:hybridkv_{name}"}


class DiskBench:
    """Host memory over a real disk with the chunks of earlier requests."""

    def __init__(self, path: Path) -> None:
        self.engine = engine = Engine(path / "store", NEAR_BYTES)
        self.now_s, self.metrics = 0.0, ConnectorMetrics()
        layout = engine.planner._layout
        requests = Requests(layout, engine._keys, Adapters(engine._keys, 0))
        clock = lambda: self.now_s  # noqa: E731
        waits, admission = Deadlines(10.0, 30.0, clock), LoadAdmission(engine.spec, 64)
        in_flight = LoadsInFlight(layout, engine.stack, admission, self.metrics)
        loads = LoadPlanner(layout, engine.stack, admission, waits, self.metrics, in_flight)
        self.keeper = engine.planner._keeper = Keeper(layout, engine.stack, clock, self.metrics)
        self.prefetcher = Prefetcher(layout, requests, engine.stack, loads.lookups.send, clock, self.metrics)

    def serve(self, name: str, num_chunks: int, keep_seconds: float = 0.0) -> None:
        self.engine._begin(name).hints = Hints(keep_seconds=keep_seconds)
        self.engine.compute(name, num_chunks)
        self.engine.end(name)
        self.engine.settle()
        self.keeper.renew()

    def prefetch(self, name: str, most_bytes: int = SHARE_BYTES) -> None:
        self.prefetcher.begin(self.engine.states[name].request, most_bytes)
        self.engine.settle()
        self.engine.stack.take_moves()

    def in_primary(self, name: str) -> int:
        return self.engine.resumable(name, self.engine.primary) // CHUNK_TOKENS

    def outcomes(self) -> dict[str, float]:
        self.metrics.tiers(self.engine.stack, 1)
        return counted(self.metrics)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_prefetch_brings_a_prefix_from_disk_to_host_memory(tmp_path: Path, is_asked: bool) -> None:
    bench = DiskBench(tmp_path)
    with bench.engine:
        bench.serve("a", 8)
        bench.engine.primary.clear()
        assert bench.in_primary("a") == 0
        if is_asked:
            bench.prefetch("a")
        assert bench.in_primary("a") == (8 if is_asked else 0)
        assert bench.outcomes() == ({"promoted": 1} if is_asked else {})


def test_only_the_last_state_of_a_prefix_is_prefetched(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    with bench.engine:
        bench.serve("a", 8)
        bench.engine.primary.clear()
        bench.prefetch("a")
        keys = bench.engine.states["a"].keys()
        ends = range(CHUNK_TOKENS, 8 * CHUNK_TOKENS + 1, CHUNK_TOKENS)
        assert [end for end in ends if not bench.engine.primary.lacks(keys.key(1, end))] == [8 * CHUNK_TOKENS]


def test_a_present_or_unknown_prefix_needs_no_prefetch(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    with bench.engine:
        bench.serve("a", 2)
        bench.engine._begin("unknown")
        bench.prefetch("a")
        bench.prefetch("unknown")
        assert bench.outcomes() == {"nothing": 2}


def test_a_share_of_zero_prefetches_nothing(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    with bench.engine:
        bench.serve("a", 2)
        bench.engine.primary.clear()
        bench.keeper.keep_share = 0.0
        bench.prefetch("a", bench.keeper.ram_bytes_left)
        assert bench.engine.primary.num_keys == 0 and bench.outcomes() == {"no_room": 1}


def test_a_prefetch_fits_the_share_beside_kept_prefixes(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    with bench.engine:
        bench.serve("a", NUM_FITTING // 4)
        bench.serve("kept", NUM_FITTING // 8, keep_seconds=60.0)
        bench.engine.primary.clear()
        left = bench.keeper.ram_bytes_left
        assert 0 < left <= SHARE_BYTES - bench.keeper._kept_bytes[0]
        bench.prefetch("a", left)
        assert 0 < bench.engine.primary.used_bytes <= left and bench.outcomes() == {"no_room": 1}


def test_a_running_prefetch_obeys_a_lower_limit(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path)
    with bench.engine:
        bench.serve("a", NUM_FITTING // 8)
        bench.engine.primary.clear()
        bench.prefetcher.begin(bench.engine.states["a"].request, SHARE_BYTES)
        bench.prefetcher.advance(0)
        bench.engine.settle()
        assert bench.engine.primary.num_keys == 0 and bench.outcomes() == {"no_room": 1}


@pytest.mark.parametrize("keep_share", [0.25, 1.0])
def test_a_kept_prefix_outlives_any_number_of_prefetches(tmp_path: Path, keep_share: float) -> None:
    bench = DiskBench(tmp_path)
    bench.keeper.keep_share = keep_share
    with bench.engine:
        names = [f"other {number}" for number in range(24)]
        for name in names:
            bench.serve(name, NUM_FITTING // 12)
        bench.serve("kept", NUM_FITTING // 8, keep_seconds=600.0)
        for name in names:
            bench.prefetch(name, bench.keeper.ram_bytes_left)
            bench.keeper.renew()
        assert bench.in_primary(names[-1]) == NUM_FITTING // 12, "the last prefetch arrived"
        assert bench.in_primary("kept") == NUM_FITTING // 8


class AsyncBench:
    """Host memory over a remote store that answers lookups."""

    def __init__(self, is_silent: bool = False) -> None:
        self.now_s, self.metrics = 100.0, ConnectorMetrics()
        made = make_layout([FULL])
        clock = lambda: self.now_s  # noqa: E731
        self.world = RemoteStore(1, clock, answer_s=0.5, is_silent=is_silent)
        peer = SecondaryTier("peer", RemoteIndex(self.world, 1 << 22), SecondaryTierOptions(async_lookup_timeout_s=1.0))
        self.stack = TierStack(RamIndex(1 << 22, 4096), [peer], 1, clock)
        requests = Requests(made.layout, made.keys, Adapters(made.keys, 0))
        waits, admission = Deadlines(10.0, 30.0, clock), LoadAdmission(made.spec, 64)
        in_flight = LoadsInFlight(made.layout, self.stack, admission, self.metrics)
        loads = LoadPlanner(made.layout, self.stack, admission, waits, self.metrics, in_flight)
        self.prefetcher = Prefetcher(made.layout, requests, self.stack, loads.lookups.send, clock, self.metrics)
        self.request = new_request()
        self.keys = [requests.untracked_copy(self.request).keys().key(0, end) for end in (8, 16)]

    def advance(self, seconds: float) -> list[bytes]:
        """Keys being promoted after the given time."""
        self.now_s += seconds
        self.stack.tick()
        self.prefetcher.advance(1 << 22)
        return [move.key for move in self.stack.take_moves()]


def test_an_async_tier_is_looked_up_and_then_prefetched_from() -> None:
    bench = AsyncBench()
    for key in bench.keys:
        bench.world.lie(key, 4096)
    bench.prefetcher.begin(bench.request, 1 << 22)
    assert bench.prefetcher.has_work() and bench.advance(0.25) == []
    assert bench.advance(0.5) == bench.keys
    assert not bench.prefetcher.has_work()


def test_a_prefetch_ends_at_its_lookup_timeout() -> None:
    bench = AsyncBench(is_silent=True)
    bench.prefetcher.begin(bench.request, 1 << 22)
    assert bench.advance(0.5) == [] and bench.prefetcher.has_work()
    bench.now_s += 0.5
    bench.stack.start_lookup(bench.keys)  # for another request with a later deadline
    assert bench.advance(0.0) == [] and not bench.prefetcher.has_work()
    assert counted(bench.metrics) == {"nothing": 1}


def start_many(bench: AsyncBench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Start more prefetches than one step may plan. The returned list grows with each plan."""
    looked: list[int] = []

    def count(*args: Any) -> Prefetch:
        looked.append(len(looked))
        return plan_prefetch(*args)

    for _ in range(2 * MAX_TRIED + 3):
        bench.prefetcher.begin(bench.request, 1 << 22)
    monkeypatch.setattr(prefetching, "plan_prefetch", count)
    return looked


def test_prefetches_are_not_planned_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = AsyncBench(is_silent=True)
    looked = start_many(bench, monkeypatch)
    for _ in range(3):
        bench.advance(0.0)
    looked.clear()
    assert bench.advance(0.25) == [] and looked == []


def test_few_prefetches_are_planned_per_step_and_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = AsyncBench(is_silent=True)
    looked = start_many(bench, monkeypatch)
    waiting = set(bench.prefetcher._waiting)
    for number in range(3):
        looked.clear()
        put(bench.stack.primary, bytes([number]))
        assert bench.advance(0.0) == [] and 0 < len(looked) <= 2 * MAX_TRIED
    assert set(bench.prefetcher._waiting) == waiting
    bench.now_s += 1.0
    while bench.prefetcher.has_work():
        assert bench.advance(0.0) == []
    assert counted(bench.metrics) == {"nothing": len(waiting)}


def test_a_prefetch_with_a_doubtful_adapter_ends_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = AsyncBench(is_silent=True)
    bench.prefetcher.begin(bench.request, 1 << 22)
    assert bench.prefetcher.has_work()
    monkeypatch.setattr(bench.prefetcher._requests, "identify", lambda tracked: False)
    bench.now_s += 1.0
    assert bench.advance(0.0) == [] and not bench.prefetcher.has_work()


def test_waiting_prefetches_are_limited_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "MAX_WAITING", 2)
    bench = AsyncBench()
    for _ in range(5):
        bench.prefetcher.begin(bench.request, 1 << 22)
    assert counted(bench.metrics) == {"crowded": 3}


def test_end_drops_waiting_prefetches() -> None:
    bench = AsyncBench()
    for key in bench.keys:
        bench.world.lie(key, 4096)
    bench.prefetcher.begin(bench.request, 1 << 22)
    bench.prefetcher.end()
    assert bench.advance(0.75) == [] and not bench.prefetcher.has_work()
    assert counted(bench.metrics) == {"lost": 1}


def scheduler_over(*slower: TierIndex, kv_role: Role = BOTH) -> OffloadScheduler:
    """Scheduler of an engine with one FULL group; tiers are named by their positions."""
    made, later_ns = make_layout((FULL,)), time.time_ns() + 3600 * 10**9
    below = [SecondaryTier(str(place), index) for place, index in enumerate(slower)]
    return OffloadScheduler(
        made.layout,
        Identity(made.keys, Adapters(made.keys, later_ns, lambda: later_ns)),
        TierStack(RamIndex(1 << 20, 4096), below, 1, lambda: 0.0),
        LoadAdmission(made.spec, 64),
        Deadlines(1.0, 1.0, lambda: 0.0),
        ConnectorMetrics(),
        kv_role,
    )


def put(index: TierIndex, key: bytes) -> None:
    assert isinstance(index.reserve(key, 4096), Slot) and index.commit(key)


def hinting(request: Any, params: object = HINT) -> Any:
    request.kv_transfer_params = params
    return request


def num_promoted(scheduler: OffloadScheduler, request: Any) -> int:
    """Number of chunks being promoted after the request was tracked."""
    secondary = RamIndex(1 << 20, 4096) if not scheduler._stack.secondary else scheduler._stack.secondary["0"]
    for end in (8, 16):
        put(secondary, scheduler._requests.untracked_copy(request).keys().key(0, end))
    scheduler.track(request)
    scheduler.track(request)
    return len(scheduler._stack.take_moves())


@pytest.mark.parametrize(
    ("kv_role", "said", "num_chunks"),
    [
        (BOTH, {"prefetch": True}, 2),
        (BOTH, {"prefetch": True, "load": False}, 2),
        (BOTH, {"prefetch": True, "store": False}, 2),
        (Role(stores=False, loads=True), {"prefetch": True}, 2),
        (Role(stores=True, loads=False), {"prefetch": True}, 0),
        (BOTH, {"prefetch": False}, 0),
        (BOTH, {}, 0),
    ],
    ids=["alone", "not loaded", "not stored", "consumer", "producer", "refused", "nothing said"],
)
def test_a_prefetch_starts_when_its_request_is_tracked_by_a_loading_role(
    kv_role: Role, said: dict[str, bool], num_chunks: int
) -> None:
    scheduler = scheduler_over(RamIndex(1 << 20, 4096), kv_role=kv_role)
    assert num_promoted(scheduler, hinting(new_request(), {"hybridkv_hints": said})) == num_chunks


def test_without_a_secondary_tier_a_prefetch_does_nothing() -> None:
    scheduler = scheduler_over()
    assert num_promoted(scheduler, hinting(new_request())) == 0
    assert counted(scheduler._metrics) == {"nothing": 1}


def test_a_reset_drops_waiting_prefetches() -> None:
    scheduler = scheduler_over(RemoteIndex(RemoteStore(1, lambda: 0.0, is_silent=True), 1 << 20))
    scheduler.track(hinting(new_request()))
    assert scheduler.has_work_in_flight()
    scheduler.reset()
    assert not scheduler.has_work_in_flight() and counted(scheduler._metrics) == {"lost": 1}


@pytest.mark.parametrize("said", [{}, {"prefetch": True}], ids=["queued", "prefetched"])
@pytest.mark.parametrize("kv_role", [BOTH, Role(stores=True, loads=False)])
def test_the_lookups_of_a_request_go_to_its_hinted_peers(said: dict[str, Any], kv_role: Role) -> None:
    hinted: list[tuple[str, int]] = []

    class HintedIndex(RemoteIndex):
        def start_lookup_at(
            self, addresses: Sequence[tuple[str, int]], keys: Iterable[bytes], deadline_s: float
        ) -> None:
            hinted.extend(addresses)
            self.start_lookup(keys, deadline_s)

    scheduler = scheduler_over(HintedIndex(RemoteStore(1, lambda: 0.0, answer_s=0.5), 1 << 20), kv_role=kv_role)
    scheduler.allow_hinted_peers(lambda address: address[0] == "10.0.0.7")
    peers = ["10.0.0.7:7900", "10.0.0.8:7900"]
    scheduler.track(hinting(new_request(), {"hybridkv_hints": {**said, "peers": peers}}))
    assert hinted == ([("10.0.0.7", 7900)] if kv_role.loads else [])


def test_a_shutdown_starts_no_prefetch() -> None:
    secondary = RamIndex(1 << 20, 4096)
    scheduler = scheduler_over(secondary)
    request = hinting(new_request())
    put(secondary, scheduler._requests.untracked_copy(request).keys().key(0, 8))
    scheduler.track(request)
    assert scheduler.plan_moves().moves == () and not scheduler.has_work_in_flight()


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_prefetch_with_an_adapter_waits_until_its_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    monkeypatch.setattr(module, "LOOK_S", SOON_S)
    secondary = RamIndex(1 << 20, 4096)
    scheduler = scheduler_over(secondary)
    request = hinting(lora_request(tmp_path / "a"))
    tracked = scheduler.track(request)
    assert scheduler._identity.adapters.wait_until_idle(SOON_S)
    assert scheduler._requests.identify(tracked)
    put(secondary, tracked.keys().key(0, 8))
    if not is_trusted:
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"retrained")
    scheduler._prefetcher.advance(1 << 20)
    assert len(scheduler._stack.take_moves()) == is_trusted
