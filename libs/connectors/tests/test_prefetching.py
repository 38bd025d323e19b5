"""What a request asks to have near comes there whatever becomes of the request, and no more than may."""

from __future__ import annotations

import time
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


class Disk:
    """Host memory over a real disk that holds what was asked before."""

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

    def ask(self, name: str, num_chunks: int, keep_seconds: float = 0.0) -> None:
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
def test_a_prefix_that_only_the_disk_holds_comes_into_host_memory_if_it_is_asked_for(
    tmp_path: Path, is_asked: bool
) -> None:
    it = Disk(tmp_path)
    with it.engine:
        it.ask("a", 8)
        it.engine.primary.clear()
        assert it.in_primary("a") == 0
        if is_asked:
            it.prefetch("a")
        assert it.in_primary("a") == (8 if is_asked else 0)
        assert it.outcomes() == ({"promoted": 1} if is_asked else {})


def test_of_states_only_the_last_one_comes(tmp_path: Path) -> None:
    it = Disk(tmp_path)
    with it.engine:
        it.ask("a", 8)
        it.engine.primary.clear()
        it.prefetch("a")
        keys = it.engine.states["a"].keys()
        ends = range(CHUNK_TOKENS, 8 * CHUNK_TOKENS + 1, CHUNK_TOKENS)
        assert [end for end in ends if not it.engine.primary.lacks(keys.key(1, end))] == [8 * CHUNK_TOKENS]


def test_what_is_near_or_nowhere_is_nothing_to_bring(tmp_path: Path) -> None:
    it = Disk(tmp_path)
    with it.engine:
        it.ask("a", 2)
        it.engine._begin("unknown")
        it.prefetch("a")
        it.prefetch("unknown")
        assert it.outcomes() == {"nothing": 2}


def test_where_the_share_is_none_nothing_comes(tmp_path: Path) -> None:
    it = Disk(tmp_path)
    with it.engine:
        it.ask("a", 2)
        it.engine.primary.clear()
        it.keeper.keep_share = 0.0
        it.prefetch("a", it.keeper.near_bytes_left)
        assert it.engine.primary.num_keys == 0 and it.outcomes() == {"no_room": 1}


def test_no_more_comes_than_the_share_has_room_for_beside_what_is_kept(tmp_path: Path) -> None:
    it = Disk(tmp_path)
    with it.engine:
        it.ask("a", NUM_FITTING // 4)
        it.ask("kept", NUM_FITTING // 8, keep_seconds=60.0)
        it.engine.primary.clear()
        left = it.keeper.near_bytes_left
        assert 0 < left <= SHARE_BYTES - it.keeper._kept_bytes[0]
        it.prefetch("a", left)
        assert 0 < it.engine.primary.used_bytes <= left and it.outcomes() == {"no_room": 1}


def test_what_is_kept_meanwhile_leaves_less_to_what_has_begun(tmp_path: Path) -> None:
    it = Disk(tmp_path)
    with it.engine:
        it.ask("a", NUM_FITTING // 8)
        it.engine.primary.clear()
        it.prefetcher.begin(it.engine.states["a"].request, SHARE_BYTES)
        it.prefetcher.advance(0)
        it.engine.settle()
        assert it.engine.primary.num_keys == 0 and it.outcomes() == {"no_room": 1}


@pytest.mark.parametrize("keep_share", [0.25, 1.0])
def test_what_is_kept_outlives_any_number_of_prefetches(tmp_path: Path, keep_share: float) -> None:
    it = Disk(tmp_path)
    it.keeper.keep_share = keep_share
    with it.engine:
        names = [f"other {number}" for number in range(24)]
        for name in names:
            it.ask(name, NUM_FITTING // 12)
        it.ask("kept", NUM_FITTING // 8, keep_seconds=600.0)
        for name in names:
            it.prefetch(name, it.keeper.near_bytes_left)
            it.keeper.renew()
        assert it.in_primary(names[-1]) == NUM_FITTING // 12, "they came"
        assert it.in_primary("kept") == NUM_FITTING // 8


class Late:
    """Host memory over a store elsewhere that says what it holds when it is asked."""

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
        self.keys = [requests.beside(self.request).keys().key(0, end) for end in (8, 16)]

    def advance(self, seconds: float) -> list[bytes]:
        """What is on its way up after so much time."""
        self.now_s += seconds
        self.stack.tick()
        self.prefetcher.advance(1 << 22)
        return [move.key for move in self.stack.take_moves()]


def test_a_tier_that_answers_late_is_asked_and_then_brings_it() -> None:
    it = Late()
    for key in it.keys:
        it.world.lie(key, 4096)
    it.prefetcher.begin(it.request, 1 << 22)
    assert it.prefetcher.has_work() and it.advance(0.25) == []
    assert it.advance(0.5) == it.keys
    assert not it.prefetcher.has_work()


def test_one_that_does_not_answer_is_not_waited_for_after_its_time() -> None:
    it = Late(is_silent=True)
    it.prefetcher.begin(it.request, 1 << 22)
    assert it.advance(0.5) == [] and it.prefetcher.has_work()
    it.now_s += 0.5
    it.stack.start_lookup(it.keys)  # for another, who waits longer
    assert it.advance(0.0) == [] and not it.prefetcher.has_work()
    assert counted(it.metrics) == {"nothing": 1}


def many(it: Late, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let more wait than may be looked for in a step. Grows with each time that one is looked for."""
    looked: list[int] = []

    def count(*args: Any) -> Prefetch:
        looked.append(len(looked))
        return plan_prefetch(*args)

    for _ in range(2 * MAX_TRIED + 3):
        it.prefetcher.begin(it.request, 1 << 22)
    monkeypatch.setattr(prefetching, "plan_prefetch", count)
    return looked


def test_while_nothing_changes_nobody_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Late(is_silent=True)
    looked = many(it, monkeypatch)
    for _ in range(3):
        it.advance(0.0)
    looked.clear()
    assert it.advance(0.25) == [] and looked == []


def test_few_are_looked_for_in_one_step_and_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Late(is_silent=True)
    looked = many(it, monkeypatch)
    waiting = set(it.prefetcher._waiting)
    for number in range(3):
        looked.clear()
        put(it.stack.primary, bytes([number]))
        assert it.advance(0.0) == [] and 0 < len(looked) <= 2 * MAX_TRIED
    assert set(it.prefetcher._waiting) == waiting
    it.now_s += 1.0
    while it.prefetcher.has_work():
        assert it.advance(0.0) == []
    assert counted(it.metrics) == {"nothing": len(waiting)}


def test_an_adapter_that_is_in_doubt_again_is_waited_for_no_longer_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Late(is_silent=True)
    it.prefetcher.begin(it.request, 1 << 22)
    assert it.prefetcher.has_work()
    monkeypatch.setattr(it.prefetcher._requests, "identify", lambda tracked: False)
    it.now_s += 1.0
    assert it.advance(0.0) == [] and not it.prefetcher.has_work()


def test_no_more_wait_than_may_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "MAX_WAITING", 2)
    it = Late()
    for _ in range(5):
        it.prefetcher.begin(it.request, 1 << 22)
    assert counted(it.metrics) == {"crowded": 3}


def test_an_end_waits_for_nobody() -> None:
    it = Late()
    for key in it.keys:
        it.world.lie(key, 4096)
    it.prefetcher.begin(it.request, 1 << 22)
    it.prefetcher.end()
    assert it.advance(0.75) == [] and not it.prefetcher.has_work()
    assert counted(it.metrics) == {"lost": 1}


def scheduler_over(*slower: TierIndex, kv_role: Role = BOTH) -> OffloadScheduler:
    """Of an engine with one FULL group; its tiers are named by their places."""
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


def brought(scheduler: OffloadScheduler, request: Any) -> int:
    """Chunks that are on their way up after the request was heard of."""
    far = RamIndex(1 << 20, 4096) if not scheduler._stack.secondary else scheduler._stack.secondary["0"]
    for end in (8, 16):
        put(far, scheduler._requests.beside(request).keys().key(0, end))
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
def test_it_comes_as_soon_as_its_request_is_heard_of_where_it_is_loaded(
    kv_role: Role, said: dict[str, bool], num_chunks: int
) -> None:
    scheduler = scheduler_over(RamIndex(1 << 20, 4096), kv_role=kv_role)
    assert brought(scheduler, hinting(new_request(), {"hybridkv_hints": said})) == num_chunks


def test_without_a_tier_below_host_memory_there_is_nothing_to_bring() -> None:
    scheduler = scheduler_over()
    assert brought(scheduler, hinting(new_request())) == 0
    assert counted(scheduler._metrics) == {"nothing": 1}


def test_a_reset_waits_for_nothing_of_before() -> None:
    scheduler = scheduler_over(RemoteIndex(RemoteStore(1, lambda: 0.0, is_silent=True), 1 << 20))
    scheduler.track(hinting(new_request()))
    assert scheduler.has_work_in_flight()
    scheduler.reset()
    assert not scheduler.has_work_in_flight() and counted(scheduler._metrics) == {"lost": 1}


def test_an_end_begins_no_prefetch() -> None:
    far = RamIndex(1 << 20, 4096)
    scheduler = scheduler_over(far)
    request = hinting(new_request())
    put(far, scheduler._requests.beside(request).keys().key(0, 8))
    scheduler.track(request)
    assert scheduler.plan_moves().moves == () and not scheduler.has_work_in_flight()


@pytest.mark.parametrize("is_trusted", [True, False])
def test_with_an_adapter_it_waits_until_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    monkeypatch.setattr(module, "LOOK_S", SOON_S)
    far = RamIndex(1 << 20, 4096)
    scheduler = scheduler_over(far)
    request = hinting(lora_request(tmp_path / "a"))
    tracked = scheduler.track(request)
    assert scheduler._identity.adapters.settle(SOON_S)
    assert scheduler._requests.identify(tracked)
    put(far, tracked.keys().key(0, 8))
    if not is_trusted:
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"retrained")
    scheduler._prefetcher.advance(1 << 20)
    assert len(scheduler._stack.take_moves()) == is_trusted
