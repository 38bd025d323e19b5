"""Worker of HybridLMCacheConnector with servers that do not answer: each load and store ends in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import patience
import pytest
from lmcache_ranks import DEEPSEEK_V4, GEMMA, QWEN3_NEXT, WAIT_S, Model, Rank, digests_of, pool_of

from hybridkv.connectors.vllm.common.copies.rank_worker import CopyJob
from hybridkv.connectors.vllm.common.messages import StoreOutcome
from hybridkv.connectors.vllm.common.stats import GAUGE_RESEND_INTERVAL
from hybridkv.connectors.vllm.lmcache.messages import LMCachePlan, PageCopy, PageLoad, PageStore, StoreRelease
from hybridkv.lmcache.connection import ConnectionOptions, Down, Ready, ServerAddress
from hybridkv.lmcache.page import HEADER_BYTES
from hybridkv.transfer import CopyRuns, CpuCopyEngine
from kits.lmcache.scripted_server import Frames, ScriptedServer, polite
from kits.lmcache.server_process import eventually

FOREVER_S = 1e6
QUIET = ConnectionOptions(call_timeout_s=patience.seconds(1.0), beat_s=FOREVER_S, retry_s=0.01)
"""With a jumping clock, the answer to a heartbeat would be late."""
NAMESPACE = b"namespace"
DIGESTS = digests_of("prompt", 2)


class Clock:
    """Clock that advances only when a test calls `advance`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_s = 0.0

    def __call__(self) -> float:
        with self._lock:
            return self._now_s

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds


class SilentServer:
    """Fake server that has every chunk, and delays the answers to some calls until `send_delayed`."""

    def __init__(self, server: ScriptedServer, num_found: int, *kept: str) -> None:
        self.num_found = num_found
        self.kept = set(kept)
        self.held_back: list[list[bytes]] = []
        server.script = self

    def __call__(self, name: str, frames: Frames) -> Sequence[Frames]:
        if name in self.kept:
            self.held_back.append(list(frames))
            return []
        if name == "query_prefetch_status":
            return [[*frames[:3], msgspec.msgpack.encode(self.num_found)]]
        # Delayed answers are sent with the next one.
        late, self.held_back = ([], self.held_back) if self.kept else (self.held_back, [])
        answers = [answer for each in late for answer in polite("store", each)]
        return [*polite(name, frames), *answers]

    def send_delayed(self, rank: Rank) -> None:
        """Sends the delayed answers."""
        self.kept.clear()
        rank.session.connection.check_registration()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


MakeRank = Callable[..., Rank]


@pytest.fixture
def rank() -> Iterator[MakeRank]:
    made: list[Rank] = []

    def make(address: ServerAddress, model: Model = GEMMA, **keys: Any) -> Rank:
        made.append(Rank(model, address, NAMESPACE, **keys))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def ready(rank: Rank, clock: Clock | None = None) -> Rank:
    """Open the session and wait until the server is usable. Unsent calls are sent again soon."""
    rank.begin()
    if clock is None:
        assert isinstance(rank.session.connection.wait_ready(WAIT_S), Ready)
    else:
        assert eventually(lambda: clock.advance(0.02) is None and rank.session.ready is not None)
    return rank


def reasons(rank: Rank, load: PageLoad) -> list[str]:
    """Failure reasons of a load."""
    ended = rank.run(loads=[load])
    assert (ended.finished, ended.failed) == ({load.request_id}, {load.request_id})
    return [failure.reason for failure in ended.failures[load.request_id]]


# Loads.


def test_a_load_fails_as_missing_if_the_server_has_fewer_chunks(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address))
    tables = worker.tables(1, 2)
    before = worker.everything()
    SilentServer(server, num_found=1)
    releases = server.calls.count("free_lookup_locks")
    assert reasons(worker, worker.load_of("r", DIGESTS, tables)) == ["missing"]
    assert worker.everything() == before
    assert "retrieve" not in server.calls
    assert eventually(lambda: server.calls.count("free_lookup_locks") == releases + 1)
    assert worker.all_pages_are_free()


def test_pages_reported_but_not_written_are_missing_and_withdrawn(server: ScriptedServer, rank: MakeRank) -> None:
    """Pages may hold earlier content, even valid pages of the same prefix, so their headers are cleared first."""
    worker = rank(server.address)
    tables = worker.tables(1, 2)
    worker.run(stores=[worker.store_of(DIGESTS, tables)])
    before = worker.everything()
    SilentServer(server, num_found=2)
    ended = worker.run(loads=[worker.load_of("r", DIGESTS, worker.tables(2, 2))])
    assert {(failure.reason, failure.key) for failure in ended.failures["r"]} == {
        ("missing", DIGESTS[0]),
        ("missing", DIGESTS[1]),
    }
    assert worker.everything() == before
    assert worker.counted()["lmcache_withdrawals_total"] == 2
    assert worker.all_pages_are_free()


def test_an_unanswered_retrieve_fails_at_the_deadline_and_keeps_its_pages(
    server: ScriptedServer, rank: MakeRank
) -> None:
    clock = Clock()
    worker = ready(rank(server.address, clock=clock, connection=QUIET, load_timeout_s=30.0), clock)
    before = worker.everything()
    silent = SilentServer(server, 2, "retrieve")
    worker.begin(loads=[worker.load_of("r", DIGESTS, worker.tables(1, 2))])
    assert eventually(lambda: bool(silent.held_back))
    clock.advance(29.0)
    assert worker.worker.results().finished == set(), "not before the deadline"
    clock.advance(1.5)
    ended = worker.finish(1, 0)
    assert [failure.reason for failure in ended.failures["r"]] == ["timeout"]
    assert worker.session.used_bytes > 0, "the server may still write there"
    assert worker.everything() == before
    silent.send_delayed(worker)
    assert worker.all_pages_are_free()
    assert worker.everything() == before


def test_an_unanswered_lookup_fails_its_load_and_keeps_no_page(server: ScriptedServer, rank: MakeRank) -> None:
    clock = Clock()
    worker = ready(rank(server.address, clock=clock, connection=QUIET, load_timeout_s=30.0), clock)
    silent = SilentServer(server, 2, "query_prefetch_status")
    worker.begin(loads=[worker.load_of("r", DIGESTS, worker.tables(1, 2))])
    assert eventually(lambda: bool(silent.held_back))
    assert worker.worker.results().finished == set()
    clock.advance(31.0)
    ended = worker.finish(1, 0)
    assert [failure.reason for failure in ended.failures["r"]] == ["timeout"]
    assert worker.all_pages_are_free()


@pytest.fixture
def blocked() -> Iterator[Callable[[Rank], threading.Event]]:
    """Occupies the copy thread of a rank until the event is set."""
    events: list[threading.Event] = []

    def block(rank: Rank) -> threading.Event:
        is_free, began = threading.Event(), threading.Event()
        events.append(is_free)

        def occupy(_: CopyJob) -> None:
            began.set()
            is_free.wait(WAIT_S)

        rank.worker._copies.submit(CopyJob(True, lambda _: CopyRuns.empty(), lambda _: None, occupy))
        assert began.wait(WAIT_S)
        return is_free

    yield block
    for event in events:
        event.set()


def test_a_load_copied_after_its_deadline_fails(
    server: ScriptedServer, rank: MakeRank, blocked: Callable[[Rank], threading.Event]
) -> None:
    clock = Clock()
    worker = ready(rank(server.address, clock=clock, connection=QUIET, load_timeout_s=30.0), clock)
    SilentServer(server, num_found=2)
    before = worker.everything()
    is_free = blocked(worker)
    worker.begin(loads=[worker.load_of("r", DIGESTS, worker.tables(1, 2))])
    assert eventually(lambda: worker.worker.results() is not None and len(worker.worker._copies._open) == 2)
    clock.advance(31.0)
    assert worker.worker.results().finished == set(), "its copy was submitted, so the load ends with the copy"
    is_free.set()
    ended = worker.finish(1, 0)
    assert [failure.reason for failure in ended.failures["r"]] == ["timeout"]
    assert "copy thread" in ended.failures["r"][0].detail
    assert worker.everything() == before
    assert worker.all_pages_are_free()


def test_a_full_copy_queue_fails_the_next_load_and_store(
    server: ScriptedServer, rank: MakeRank, blocked: Callable[[Rank], threading.Event]
) -> None:
    worker = ready(rank(server.address, engine=CpuCopyEngine(max_queued_jobs=1)))
    SilentServer(server, num_found=2)
    is_free = blocked(worker)
    tables = worker.tables(1, 2)
    ended = worker.run(loads=[worker.load_of("r", DIGESTS, tables)], stores=[worker.store_of(DIGESTS, tables)])
    assert [failure.reason for failure in ended.failures["r"]] == ["busy"]
    assert [outcome.reason for outcome in ended.stores.values()] == ["busy"]
    assert worker.all_pages_are_free()
    is_free.set()
    assert eventually(lambda: worker.worker.results() is not None and not worker.worker._copies._open)
    ended = worker.run(stores=[worker.store_of(DIGESTS, tables)])
    assert list(ended.stores.values()) == [StoreOutcome(1)]


def test_a_refused_or_invalid_load_fails_alone(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address, num_blocks=64))
    SilentServer(server, num_found=2)
    good = worker.load_of("good", DIGESTS, {group: list(range(1, 33)) for group in range(3)})
    twice = PageCopy(0, 0, 0, (1,))
    bad = {
        "refused": PageLoad("refused", DIGESTS, 0, (), refused="this rank must not"),
        "no such group": PageLoad("no such group", DIGESTS, 0, (PageCopy(7, 0, 0, (1,)),)),
        "beyond its chunk": PageLoad("beyond its chunk", DIGESTS, 0, (PageCopy(0, 0, 15, (1, 2)),)),
        "twice": PageLoad("twice", DIGESTS, 0, (twice, twice)),
        "no such block": PageLoad("no such block", DIGESTS, 0, (PageCopy(0, 1, 0, (99,)),)),
        "what no server keeps": PageLoad("what no server keeps", DIGESTS, 0, (PageCopy(1, 1, 0, (1,)),)),
    }
    before = worker.everything()
    ended = worker.run(loads=[*bad.values(), good])
    assert ended.failed == ended.finished == {*bad, "good"}
    why = {name: failures[0].reason for name, failures in ended.failures.items()}
    assert why == {**dict.fromkeys(bad, "io"), "what no server keeps": "missing", "good": "missing"}
    assert "this rank must not" in ended.failures["refused"][0].detail
    assert worker.everything() == before
    assert worker.all_pages_are_free()


def test_an_empty_load_succeeds(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address))
    ended = worker.run(loads=[PageLoad("nothing", DIGESTS, 1, ())])
    assert (ended.finished, ended.failed) == ({"nothing"}, set())
    assert "lookup" not in server.calls


# The server.


def test_without_a_server_loads_and_stores_end(rank: MakeRank) -> None:
    with ScriptedServer() as server:
        address = server.address
    clock = Clock()
    worker = rank(address, clock=clock, connect_timeout_seconds=5.0)
    tables = worker.tables(1, 2)
    worker.begin(loads=[worker.load_of("first", DIGESTS, tables)], stores=[worker.store_of(DIGESTS, tables)])
    assert eventually(lambda: isinstance(worker.session.connection.state, Down))
    assert worker.worker.results().finished == set(), "the server may still start"
    clock.advance(5.0)
    ended = worker.finish(1, 1)
    assert [failure.reason for failure in ended.failures["first"]] == ["io"]
    assert [outcome.reason for outcome in ended.stores.values()] == ["io"]
    worker.begin(loads=[worker.load_of("second", DIGESTS, tables)])
    assert worker.worker.results().failed == {"second"}, "a second load does not wait"
    assert worker.counted()["lmcache_up"] == 0


def test_the_gauges_of_a_server_are_sent_again_after_a_while(rank: MakeRank) -> None:
    with ScriptedServer() as server:
        address = server.address
    worker = rank(address)
    worker.begin()
    sent = []
    for _ in range(3 * GAUGE_RESEND_INTERVAL):
        worker.worker.results()
        sent.append(worker.counted())
    for gauge in ("lmcache_up", "lmcache_pool_used_bytes", "lmcache_pool_capacity_bytes"):
        assert sum(gauge in counts for counts in sent) == 3, gauge


def test_a_server_that_was_connected_and_is_gone_is_not_waited_for(rank: MakeRank) -> None:
    with ScriptedServer() as server:
        worker = ready(rank(server.address, connect_timeout_seconds=3600.0))
    assert eventually(lambda: isinstance(worker.session.connection.state, Down))
    tables = worker.tables(1, 2)
    worker.begin(loads=[worker.load_of("r", DIGESTS, tables)], stores=[worker.store_of(DIGESTS, tables)])
    ended = worker.finish(1, 1)
    assert [failure.reason for failure in ended.failures["r"]] == ["io"]
    assert [outcome.reason for outcome in ended.stores.values()] == ["io"]


def test_without_a_namespace_no_session_is_opened(server: ScriptedServer, rank: MakeRank) -> None:
    worker = rank(server.address)
    tables = worker.tables(1, 2)
    plan = LMCachePlan((worker.load_of("r", DIGESTS, tables),), (worker.store_of(DIGESTS, tables),))
    worker.worker.start_loads(plan)
    worker.worker.start_stores(plan)
    ended = worker.finish(1, 1)
    assert ended.failures["r"][0].reason == "closed"
    assert [outcome.reason for outcome in ended.stores.values()] == ["closed"]
    assert server.calls == []


def test_a_server_with_another_chunk_size_is_not_used(rank: MakeRank) -> None:
    def other_chunk(name: str, frames: Frames) -> Sequence[Frames]:
        [answer] = polite(name, frames)
        is_chunk = answer[3:] == [msgspec.msgpack.encode(256)]
        return [[*frames[:3], msgspec.msgpack.encode(512)] if is_chunk else answer]

    with ScriptedServer(other_chunk) as server:
        worker = rank(server.address)
        worker.begin()
        state = worker.session.connection.wait_ready(WAIT_S)
        assert isinstance(state, Down) and state.refusal is not None
        assert (state.refusal.field, state.refusal.got) == ("chunk_size", 512)
        assert reasons(worker, worker.load_of("r", DIGESTS, worker.tables(1, 2))) == ["io"]


def test_page_sizes_smaller_than_blocks_are_refused(server: ScriptedServer, rank: MakeRank) -> None:
    worker = rank(server.address)
    tables = worker.tables(1, 2)
    sizes = worker.session_spec.payload_bytes
    larger, smaller = (sizes[0] + 64, *sizes[1:]), (sizes[0] - 64, *sizes[1:])
    plan = LMCachePlan((worker.load_of("r", DIGESTS, tables),), (), NAMESPACE, smaller)
    worker.worker.start_loads(plan)
    assert worker.finish(1, 0).failures["r"][0].reason == "closed"
    other = rank(server.address)
    other.worker.start_stores(LMCachePlan((), (other.store_of(DIGESTS, tables),), NAMESPACE, larger))
    assert list(other.finish(0, 1).stores.values()) == [StoreOutcome(1)]


def test_each_rank_has_its_own_page_identities(server: ScriptedServer, rank: MakeRank) -> None:
    ranks = [ready(rank(server.address, rank=number, world_size=2)) for number in (0, 1)]
    assert len({each.session.spec.identity(DIGESTS[0], 0, 0) for each in ranks}) == 2


# Stores and room.


def test_the_rest_of_a_page_after_a_block_is_zero(server: ScriptedServer, rank: MakeRank) -> None:
    """The page had other bytes before, which the server would store too."""
    worker = rank(server.address)
    sizes = tuple(size + 64 for size in worker.session_spec.payload_bytes)
    plan = LMCachePlan((), (), NAMESPACE, sizes)
    worker.worker.start_stores(plan)
    assert isinstance(worker.session.connection.wait_ready(WAIT_S), Ready)
    pool = worker.session._registration.pool
    pool.view[:] = b"\xee" * len(pool.view)
    SilentServer(server, 0, "store")
    worker.run(stores=[worker.store_of(DIGESTS, worker.tables(1, 2))])
    [lease] = worker.session._leases
    for group, blocks in lease.taken.blocks.items():
        for block in blocks:
            page = bytes(pool.page(group, block))
            assert page[: HEADER_BYTES + 1] != b"\xee" * (HEADER_BYTES + 1)
            assert page[-64:] == bytes(64)


def test_a_store_ends_when_its_bytes_are_copied_from_the_engine(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address))
    silent = SilentServer(server, 0, "store")
    ended = worker.run(stores=[worker.store_of(DIGESTS, worker.tables(1, 2))])
    assert list(ended.stores.values()) == [StoreOutcome(1)]
    assert eventually(lambda: bool(silent.held_back))
    assert worker.session.used_bytes > 0
    silent.send_delayed(worker)
    assert worker.all_pages_are_free()
    counted = worker.counted()
    assert (counted["lmcache_operations_total store done"], counted["lmcache_chunks_total store"]) == (1, 2)


def test_an_unanswered_store_keeps_its_pages_until_new_memory_is_registered(
    server: ScriptedServer, rank: MakeRank
) -> None:
    clock = Clock()
    pool = pool_of(GEMMA, 4)
    worker = ready(rank(server.address, clock=clock, connection=QUIET, pool=pool, store_timeout_seconds=10.0), clock)
    SilentServer(server, 0, "store")
    tables = worker.tables(1, 16)
    digests = digests_of("long", 3)
    instance = worker.session.connection.ready.registration.instance  # type: ignore[union-attr]
    ended = worker.run(stores=[worker.store_of(digests, tables)])
    assert list(ended.stores.values()) == [StoreOutcome(1)], "three of four chunks; the last is left to loads"
    worker.begin(stores=[worker.store_of(digests, tables)])
    assert worker.worker.results().finished == set()
    assert worker.worker.outcome() is None, "it waits for room"
    assert reasons(worker, worker.load_of("r", digests[:1], tables)) == ["missing"], "a load need not wait"
    clock.advance(11.0)
    ended = worker.finish(0, 1)
    assert [outcome.reason for outcome in ended.stores.values()] == ["busy"]
    server.script = polite
    assert eventually(lambda: clock.advance(0.02) is None and is_new_memory(worker, instance))
    assert worker.session.used_bytes == 0
    ended = worker.run(stores=[worker.store_of(digests, tables)])
    assert list(ended.stores.values()) == [StoreOutcome(1)], "copied into the new memory"
    assert worker.all_pages_are_free()


def test_loads_without_room_after_unanswered_calls_get_new_memory(server: ScriptedServer, rank: MakeRank) -> None:
    clock = Clock()
    pool = pool_of(GEMMA, 2)
    worker = ready(rank(server.address, clock=clock, connection=QUIET, pool=pool, load_timeout_s=30.0), clock)
    instance = worker.session.connection.ready.registration.instance  # type: ignore[union-attr]
    silent = SilentServer(server, 2, "retrieve")
    tables = worker.tables(1, 2)
    worker.begin(loads=[worker.load_of("first", DIGESTS, tables)])
    assert eventually(lambda: bool(silent.held_back))
    clock.advance(20.0)
    worker.begin(loads=[worker.load_of("second", DIGESTS, tables)])
    clock.advance(15.0)
    assert worker.finish(1, 0).failed == {"first"}
    clock.advance(20.0)
    ended = worker.finish(1, 0)
    assert [failure.reason for failure in ended.failures["second"]] == ["timeout"]
    assert eventually(lambda: clock.advance(0.02) is None and is_new_memory(worker, instance))
    server.script = polite
    assert reasons(worker, worker.load_of("third", DIGESTS, tables)) == ["missing"]
    assert worker.all_pages_are_free()


def is_new_memory(worker: Rank, instance: int) -> bool:
    """True if the server knows other memory of this rank than before."""
    now = worker.session.ready
    return now is not None and now.registration is not None and now.registration.instance != instance


def test_a_store_larger_than_the_pool_is_split(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address, DEEPSEEK_V4, pool=pool_of(DEEPSEEK_V4, 4)))
    ended = worker.run(stores=[worker.store_of(digests_of("long", 16), worker.tables(1, 16))])
    assert list(ended.stores.values()) == [StoreOutcome(1)]
    assert eventually(lambda: server.calls.count("store") == 16)
    assert worker.all_pages_are_free()


def test_a_load_larger_than_the_pool_fails_at_once(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address, DEEPSEEK_V4, pool=pool_of(DEEPSEEK_V4, 4)))
    assert reasons(worker, worker.load_of("r", digests_of("long", 5), worker.tables(1, 5))) == ["busy"]
    SilentServer(server, num_found=4)
    assert reasons(worker, worker.load_of("r", digests_of("long", 4), worker.tables(1, 4))) == ["missing"] * 4


def test_waiting_loads_get_room_before_stores(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address, QWEN3_NEXT, pool=pool_of(QWEN3_NEXT, 4)))
    silent = SilentServer(server, 4, "retrieve")
    digests = digests_of("long", 4)
    tables = worker.tables(1, 4)
    worker.begin(loads=[worker.load_of("first", digests, tables, 2)])
    assert eventually(lambda: len(silent.held_back) == 1)
    used_bytes = worker.session.used_bytes
    assert 0 < used_bytes < worker.session.capacity_bytes
    worker.begin(loads=[worker.load_of("second", digests, tables)], stores=[worker.store_of(digests[:1], tables)])
    assert worker.worker.results().finished == set()
    assert worker.session.used_bytes == used_bytes, "the load has no room, and the store must not take the rest"
    silent.send_delayed(worker)
    ended = worker.finish(2, 1)
    assert ended.finished == {"first", "second"}
    assert eventually(lambda: "store" in server.calls)
    assert [name for name in server.calls if name in ("retrieve", "store")] == ["retrieve", "retrieve", "store"]


def test_a_store_times_out_while_loads_wait_and_fails_none_of_them(server: ScriptedServer, rank: MakeRank) -> None:
    """The store pins blocks of the engine. A load may wait longer than a store: nothing is overdue."""
    clock = Clock()
    connection = ConnectionOptions(beat_s=FOREVER_S)
    keys: dict[str, Any] = {"pool": pool_of(QWEN3_NEXT, 4), "load_timeout_s": 30.0, "store_timeout_seconds": 10.0}
    worker = ready(rank(server.address, QWEN3_NEXT, clock=clock, connection=connection, **keys), clock)
    silent = SilentServer(server, 4, "retrieve")
    digests = digests_of("long", 4)
    tables = worker.tables(1, 4)
    worker.begin(loads=[worker.load_of(name, digests, tables) for name in ("first", "second")])
    assert eventually(lambda: len(silent.held_back) == 1)
    instance = worker.session.connection.ready.registration.instance  # type: ignore[union-attr]
    worker.begin(stores=[worker.store_of(digests[:1], tables)])
    clock.advance(11.0)
    ended = worker.finish(0, 1)
    assert [outcome.reason for outcome in ended.stores.values()] == ["busy"]
    assert not ended.finished
    silent.send_delayed(worker)
    ended = worker.finish(2, 0)
    assert {failure.reason for each in ended.failures.values() for failure in each} == {"missing"}
    assert not is_new_memory(worker, instance)


def test_a_store_with_an_invalid_block_fails_alone(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address, num_blocks=64))
    bad = PageStore(100, DIGESTS, 0, (PageCopy(0, 0, 0, (99,)),))
    good = worker.store_of(DIGESTS, {group: list(range(1, 33)) for group in range(3)})
    ended = worker.run(stores=[bad, good, PageStore(101, DIGESTS, 0, ())])
    assert ended.stores[good.store_id] == ended.stores[101] == StoreOutcome(1)
    assert ended.stores[100].reason == "io"
    assert worker.all_pages_are_free()


def held_back(store: PageStore) -> PageStore:
    """The same store, not to be handed over yet."""
    return msgspec.structs.replace(store, is_held=True)


def test_a_held_store_is_handed_over_on_release_or_dropped(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address, DEEPSEEK_V4, pool=pool_of(DEEPSEEK_V4, 8)))
    tables = worker.tables(1, 4)
    good, bad = (held_back(worker.store_of(digests_of(name, 3), tables)) for name in ("good", "bad"))
    for store in (good, bad):
        assert worker.run(stores=[store]).stores[store.store_id] == StoreOutcome(1), (
            "its bytes are copied from the engine"
        )
    assert "store" not in server.calls
    used_bytes = worker.session.used_bytes
    worker.begin(releases=[StoreRelease(bad.store_id, False)])
    assert worker.session.used_bytes == used_bytes // 2
    assert "store" not in server.calls
    worker.begin(
        releases=[StoreRelease(good.store_id, True), StoreRelease(good.store_id, True), StoreRelease(77, True)]
    )
    assert worker.all_pages_are_free()
    # In runs of two chunks, as it was copied; each run once.
    assert server.calls.count("store") == 2
    assert worker.counted()["lmcache_chunks_total store"] == 3


def test_pages_of_held_stores_do_not_count_as_overdue(server: ScriptedServer, rank: MakeRank) -> None:
    clock = Clock()
    pool = pool_of(GEMMA, 2)
    timeouts = {"load_timeout_s": 30.0, "store_timeout_seconds": 10.0}
    worker = ready(rank(server.address, clock=clock, connection=QUIET, pool=pool, **timeouts), clock)
    instance = worker.session.connection.ready.registration.instance  # type: ignore[union-attr]
    tables = worker.tables(1, 2)
    store = held_back(worker.store_of(DIGESTS[:1], tables))
    worker.run(stores=[store])
    SilentServer(server, num_found=1)
    worker.begin(loads=[worker.load_of("too large", DIGESTS, tables)])
    clock.advance(29.0)
    other = worker.load_of("goes on", DIGESTS[:1], tables)
    clock.advance(2.0)
    assert [failure.reason for failure in worker.finish(1, 0).failures["too large"]] == ["timeout"]
    assert reasons(worker, other) == ["missing"]
    worker.begin(releases=[StoreRelease(store.store_id, True)])
    assert worker.all_pages_are_free()
    assert "store" in server.calls and not is_new_memory(worker, instance)


def test_open_loads_end_when_the_worker_is_closed(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address))
    silent = SilentServer(server, 2, "query_prefetch_status")
    worker.begin(loads=[worker.load_of("r", DIGESTS, worker.tables(1, 2))])
    assert eventually(lambda: bool(silent.held_back))
    silent.send_delayed(worker)
    worker.close()
    results = worker.worker._outcomes.take_results()
    assert results.finished == results.failed == {"r"}
    assert "unregister_kv_cache" in server.calls


def test_a_load_waiting_for_the_server_copies_nothing_after_a_sleep(server: ScriptedServer, rank: MakeRank) -> None:
    worker = ready(rank(server.address))
    silent, before, tables = SilentServer(server, 2, "retrieve"), worker.everything(), worker.tables(1, 2)
    worker.begin(loads=[worker.load_of("r", DIGESTS, tables)])
    assert eventually(lambda: bool(silent.held_back))
    assert worker.worker.suspend(WAIT_S)
    ended = worker.finish(1, 0)
    assert [failure.reason for failure in ended.failures["r"]] == ["busy"]
    ended = worker.run(stores=[worker.store_of(DIGESTS, tables)])
    assert [outcome.reason for outcome in ended.stores.values()] == ["busy"]
    worker.worker.resume()
    silent.send_delayed(worker)
    assert worker.all_pages_are_free()
    assert worker.everything() == before
    assert list(worker.run(stores=[worker.store_of(DIGESTS, tables)]).stores.values()) == [StoreOutcome(1)]


def test_facts_are_returned_once(rank: MakeRank) -> None:
    with ScriptedServer() as server:
        worker = rank(server.address).worker
        assert worker.take_facts() is None
        worker.set_facts({"a": "b"})
        assert worker.take_facts() == {"a": "b"}
        assert worker.take_facts() is None
