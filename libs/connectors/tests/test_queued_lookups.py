"""Queued requests, and requests that wait for a lookup, cost little and lose no answer."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_lookups import FULL, STATE, chain, make_layout

from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads import load_planner
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines, LoadPlanner
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.connectors.vllm.offload.loads.lookup_sender import LOOKUP_AGAIN_S
from hybridkv.planner import LoadAdmission, LookupResult, longest_hit
from hybridkv.tiers import Key, Slot
from hybridkv.tiers.object.client import ClientEvent, LookupAnswered
from hybridkv.tiers.object.index import ObjectIndex
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import PackPlace, Stored
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import SecondaryTier, SecondaryTierOptions, TierStack

CHUNKS, CHUNK_TOKENS = 20, 8
BELIEVED_S = 30.0


class Client:
    """Object client that answers when the test says so."""

    def __init__(self) -> None:
        self.events: deque[ClientEvent] = deque()
        self.namespace, self.takes_objects = "cache", True
        self.asked: list[tuple[int, Sequence[Key]]] = []

    def send_lookup(self, request: int, keys: Sequence[Key], until_s: float, *, is_for_store: bool = False) -> bool:
        self.asked.append((request, keys))
        return True

    def publish(self, stored: Sequence[Stored]) -> None: ...

    def retract(self, key: Key, place: PackPlace) -> None: ...

    def clear(self, *, is_for_all: bool) -> None: ...

    def close(self) -> None: ...


class Bench:
    """Load planner over an object tier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.client = Client()
        self.layout = make_layout([FULL, STATE])
        options = ObjectOptions(found_s=BELIEVED_S, max_open_keys=1 << 20)
        self.index = ObjectIndex(cast(Any, self.client), options, lambda: self.now_s)
        tier = SecondaryTier("object", self.index, SecondaryTierOptions(async_lookup_timeout_s=1.0))
        self.stack = TierStack(RamIndex(1 << 26, 4096), [tier], 1, lambda: self.now_s)
        admission, metrics = LoadAdmission(self.layout.spec, 64), ConnectorMetrics()
        in_flight = LoadsInFlight(self.layout.layout, self.stack, admission, metrics)
        deadlines = Deadlines(10.0, 30.0, lambda: self.now_s, 10.0)
        self.planner = LoadPlanner(self.layout.layout, self.stack, admission, deadlines, metrics, in_flight)
        self.num_searches = 0
        search = longest_hit

        def counting(*arguments: Any) -> Any:
            self.num_searches += 1
            return search(*arguments)

        monkeypatch.setattr(load_planner, "longest_hit", counting)

    def request(self, name: str) -> TrackedRequest:
        hashes = chain(2 * CHUNKS, name.encode())
        request = SimpleNamespace(request_id=name, num_tokens=CHUNKS * CHUNK_TOKENS + 1, block_hashes=hashes)
        return TrackedRequest(cast(Any, request), None, RequestKeys(self.layout.spec, self.layout.keys))

    def answer(self, number: int, keys: Sequence[Key]) -> None:
        """Report all of these keys as stored."""
        places: Mapping[Key, PackPlace] = {key: PackPlace("pack", 100 * at, 64) for at, key in enumerate(keys)}
        self.client.events.append(LookupAnswered(number, places, self.now_s))

    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self.stack.tick()
        self.planner.begin_step({"other": 1})


def test_an_answer_is_searched_only_by_the_requests_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    waiting = [bench.request(str(number)) for number in range(64)]
    assert [bench.planner.matched_tokens(each, 0) for each in waiting] == [None] * 64
    for number, keys in list(bench.client.asked):
        bench.answer(number, keys)
        bench.step(0.001)
        bench.num_searches = 0
        for each in waiting:
            bench.planner.matched_tokens(each, 0)
        assert bench.num_searches <= 2, "the others still wait for their own answers"
    for each in waiting:
        hold = bench.stack.lease(each.request_id)
        assert hold is not None, "its chunks are promoted"


def test_a_request_looked_up_ahead_is_looked_up_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    queued = bench.request("queued")
    bench.planner.lookups.enqueue(queued)
    bench.step(0.001)
    with monkeypatch.context() as patch:
        patch.setattr(bench.stack, "start_lookup", lambda keys: pytest.fail("the lookups are in flight"))
        assert bench.planner.matched_tokens(queued, 0) is None
    assert bench.num_searches == 2, "once with unanswered lookups, and once without"


@pytest.mark.parametrize("is_polled", [False, True])
def test_answers_of_a_queued_request_are_renewed(is_polled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    queued = bench.request("queued")
    bench.planner.lookups.enqueue(queued)
    if is_polled:
        assert bench.planner.matched_tokens(queued, 0) is None
    key = bench.layout.keys.key(0, queued.request.block_hashes, CHUNK_TOKENS)
    for _ in range(3):
        ((number, keys),) = bench.client.asked
        bench.client.asked.clear()
        bench.answer(number, keys)
        bench.step(0.001)
        assert bench.stack.lookup(key) is LookupResult.HIT
        for _ in range(100):
            bench.step(LOOKUP_AGAIN_S / 100)
    bench.answer(*bench.client.asked[0])
    bench.step(0.001)
    assert bench.planner.matched_tokens(queued, 0) is None and bench.stack.lease("queued") is not None


def test_a_slow_answer_is_renewed_soon_after_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    queued = bench.request("queued")
    bench.planner.lookups.enqueue(queued)
    ((number, keys),) = bench.client.asked
    bench.client.asked.clear()
    bench.step(0.9)
    bench.answer(number, keys)
    for _ in range(320):  # the answer expires after 30.9 s, and the first check is after 30.5 s
        bench.step(0.1)
    assert len(bench.client.asked) == 1


def test_an_expired_state_is_renewed_if_host_memory_has_all_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    queued = bench.request("queued")
    for end in range(CHUNK_TOKENS, CHUNKS * CHUNK_TOKENS + 1, CHUNK_TOKENS):
        key = bench.layout.keys.key(0, queued.request.block_hashes, end)
        assert isinstance(bench.stack.primary.reserve(key, 64), Slot) and bench.stack.primary.commit(key)
    bench.planner.lookups.enqueue(queued)
    ((number, keys),) = bench.client.asked
    bench.client.asked.clear()
    bench.answer(number, keys)
    for _ in range(320):
        bench.step(0.1)
    assert len(bench.client.asked) == 1


def test_missing_keys_of_a_queued_request_are_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.planner.lookups.enqueue(bench.request("queued"))
    ((number, _),) = bench.client.asked
    bench.answer(number, ())
    for _ in range(200):
        bench.step(1.0)
    assert len(bench.client.asked) == 1


def test_a_finished_request_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.planner.lookups.enqueue(bench.request("queued"))
    bench.answer(*bench.client.asked[0])
    bench.step(0.001)
    bench.planner.on_request_finished("queued")
    for _ in range(100):
        bench.step(1.0)
    assert len(bench.client.asked) == 1


def test_the_break_even_is_logged_after_the_first_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(monkeypatch)
    bench.planner.lookups.enqueue(bench.request("queued"))
    bench.step(0.02)
    assert not caplog.records, "no answer time is known yet"
    bench.answer(*bench.client.asked[0])
    for _ in range(3):
        bench.step(1.0)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("break-even of object: requests wait for hits of 1 tokens or more"), "a token takes 0.1 s"


def test_after_three_requests_none_waits_for_a_store_slower_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    late: deque[tuple[float, int, Sequence[Key]]] = deque()
    waits: list[float] = []
    for number in range(20):
        request = bench.request(str(number))
        bench.planner.lookups.enqueue(request)
        began_s = bench.now_s
        while bench.planner.matched_tokens(request, 0) is None:
            late.extend((bench.now_s + 5.0, *asked) for asked in bench.client.asked)
            bench.client.asked.clear()
            while late and late[0][0] <= bench.now_s:
                _, at, keys = late.popleft()
                bench.answer(at, keys)
            bench.step(0.005)
        waits.append(bench.now_s - began_s)
        bench.planner.on_request_finished(request.request_id)
        bench.step(0.5)
    assert waits[0] > 0.5, "the first waits for its deadline"
    assert sum(waits[3:]) / len(waits[3:]) < 0.02, waits
