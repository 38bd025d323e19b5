"""Workers of HybridLMCacheConnector with real servers: chunks of one worker load at another, byte for byte, or not at
all.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import patience
import pytest
from examples import thinned
from lmcache_ranks import DEEPSEEK_V4, GEMMA, MODELS, QWEN3_NEXT, WAIT_S, Model, Rank, digests_of, loaded, pool_of

from hybridkv.connectors.vllm.common.messages import StoreOutcome
from hybridkv.connectors.vllm.lmcache.pages import ChunkSpan, block_tables, page_transfer
from hybridkv.lmcache.calls import CallAnswer
from hybridkv.lmcache.connection import ConnectionOptions
from hybridkv.lmcache.operations import Operations, Pages
from hybridkv.lmcache.page import HEADER_BYTES, seal
from hybridkv.lmcache.wire import CODECS
from kits.lmcache.rig import wait
from kits.lmcache.server_process import ServerProcess, command, eventually, variable

ARGUMENTS = ["--chunk-size", "256", "--separate-object-groups"]
FOREVER_S = 1e6
SOON = ConnectionOptions(call_timeout_s=patience.seconds(0.3), beat_s=0.2, retry_s=0.1, retry_max_s=0.5)


@pytest.fixture(scope="module", params=sorted(CODECS))
def lmcache(request: pytest.FixtureRequest) -> list[str]:
    """Command that starts a server of each version."""
    found = command(request.param)
    if found is None:
        pytest.skip(f"{variable(request.param)} names no lmcache of version {request.param}")
    return found


@pytest.fixture(scope="module")
def server(lmcache: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory: Path = tmp_path_factory.mktemp("lmcache")
    with ServerProcess(lmcache, directory, ARGUMENTS) as process:
        yield process


MakeRank = Callable[..., Rank]


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[MakeRank]:
    made: list[Rank] = []

    def make(model: Model, server: ServerProcess, **keys: Any) -> Rank:
        namespace = keys.pop("namespace", repr(request.node.name).encode())
        made.append(Rank(model, server.address, namespace, **keys))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def changed(rank: Rank, before: dict[tuple[int, int], bytes]) -> set[tuple[int, int]]:
    """Blocks with changed bytes."""
    now = rank.everything()
    return {key for key in now if now[key] != before[key]}


# Bytes.


@pytest.mark.parametrize(("name", "start_chunk"), thinned([*itertools.product(sorted(MODELS), [0, 5])], 5))
def test_what_one_worker_stored_another_loads_into_other_blocks(
    server: ServerProcess, rank: MakeRank, name: str, start_chunk: int
) -> None:
    model = MODELS[name]
    first, second = rank(model, server), rank(model, server)
    digests = digests_of(name, 16)
    stored, wanted = first.tables(1, 16), second.tables(2, 16)
    first.fill(stored, seed=3)
    before, poison = first.everything(), second.everything()
    first.store(digests, stored)
    assert first.everything() == before
    ended = second.run(loads=[second.load_of("r", digests, wanted, start_chunk)])
    assert (ended.finished, ended.failed) == ({"r"}, set()), ended
    positions = second.needed(16, start_chunk)
    assert loaded(second, wanted, positions) == loaded(first, stored, positions)
    assert loaded(second, wanted, positions) != loaded(first, wanted, positions), "the same block IDs hold other bytes"
    named = {(group, wanted[group][at]) for group, each in positions.items() for at in each}
    assert changed(second, poison) == named
    assert first.all_pages_are_free() and second.all_pages_are_free()


def test_a_prompt_of_deepseek_v4_has_the_blocks_that_its_groups_have_and_equal_groups_stay_apart(
    server: ServerProcess, rank: MakeRank
) -> None:
    first, second = rank(DEEPSEEK_V4, server), rank(DEEPSEEK_V4, server)
    digests = digests_of("v4", 16)
    stored, wanted = first.tables(1, 16), second.tables(2, 16)
    assert [len(stored[group]) for group in range(5)] == [16, 64, 64, 1024, 512]
    store = first.store_of(digests, stored)
    parts = page_transfer(first.session_spec, first.geometry, store.copies, ChunkSpan(0, 16))
    pages = {part.group: range(1, 1 + len(part.positions)) for part in parts.parts}
    tables = block_tables(first.geometry, parts, pages)
    # In the server's order; of each window chunk two of four blocks are kept.
    assert [len(table) for table in tables] == [16, 1024, 512, 64, 64]
    assert [sum(page > 0 for page in table) for table in tables] == [16, 1024, 512, 32, 32]
    first.fill(stored, seed=1)
    first.store(digests, stored)
    ended = second.run(loads=[second.load_of("r", digests, wanted)])
    assert ended.failed == set()
    for one, other in ((1, 2), (2, 1)):
        for at in second.needed(16)[one]:
            assert second.block(one, wanted[one][at]) == first.block(one, stored[one][at])
            assert second.block(one, wanted[one][at]) != first.block(other, stored[other][at])


def test_a_prompt_that_grew_is_stored_behind_what_was_stored(server: ServerProcess, rank: MakeRank) -> None:
    first, second = rank(GEMMA, server), rank(GEMMA, server)
    digests = digests_of("grown", 6)
    stored, wanted = first.tables(1, 6), second.tables(2, 6)
    first.fill(stored, seed=1)
    first.store(digests[:2], stored)
    first.store(digests, stored, start_chunk=2)
    assert second.run(loads=[second.load_of("r", digests, wanted)]).failed == set()
    positions = second.needed(6)
    assert loaded(second, wanted, positions) == loaded(first, stored, positions)
    assert loaded(second, wanted, positions) != loaded(second, stored, positions)


def test_a_state_is_resumed_where_it_stands_and_nowhere_else(server: ServerProcess, rank: MakeRank) -> None:
    first, second = rank(QWEN3_NEXT, server), rank(QWEN3_NEXT, server)
    digests = digests_of("states", 4)
    stored, wanted = first.tables(1, 4), second.tables(2, 4)
    first.fill(stored, seed=1)
    [outcome] = first.run(stores=[first.store_of(digests, stored, states_at=[2])]).stores.values()
    assert outcome == StoreOutcome(1)
    assert first.is_readable(digests[:2])
    before = second.everything()
    ended = second.run(loads=[second.load_of("4", digests, wanted)])
    assert [failure.reason for failure in ended.failures["4"]] == ["missing"]
    assert not changed(second, before)
    assert second.run(loads=[second.load_of("2", digests[:2], wanted)]).failed == set()
    positions = second.needed(2)
    assert loaded(second, wanted, positions) == loaded(first, stored, positions)
    assert changed(second, before)


def test_ranks_load_their_own_part_of_what_all_of_them_have(server: ServerProcess, rank: MakeRank) -> None:
    ranks = [rank(GEMMA, server, rank=each, world_size=2) for each in (0, 1)]
    digests = digests_of("ranks", 3)
    stored, wanted = ranks[0].tables(1, 3), ranks[0].tables(2, 3)
    for each in ranks:
        each.fill(stored, seed=1)
    positions = ranks[0].needed(3)
    parts = [loaded(each, stored, positions) for each in ranks]
    ranks[0].store(digests, stored)
    before = ranks[1].everything()
    ended = ranks[1].run(loads=[ranks[1].load_of("early", digests, wanted)])
    assert [failure.reason for failure in ended.failures["early"]] == ["missing"]
    assert not changed(ranks[1], before)
    ranks[1].store(digests, stored)
    # As in the scheduler: one lookup for all ranks. Its locks stay until each rank has loaded its part.
    operations = ranks[0].session.operations
    everybody = wait(lambda end: operations.lookup(ranks[0].session.prefix(digests), None, WAIT_S, end))
    assert isinstance(everybody, CallAnswer) and everybody.value.num_chunks == 3
    for each in ranks:
        assert each.run(loads=[each.load_of("r", digests, wanted)]).failed == set()
    operations.release(everybody.value)
    assert [loaded(each, wanted, positions) for each in ranks] == parts
    assert parts[0] != parts[1]
    assert eventually(lambda: locks(server) == (0, 0))


def locks(server: ServerProcess) -> tuple[int, int]:
    """Numbers of read-locked objects and of sessions."""
    status = server.status()
    return status["storage_manager"]["l1_manager"]["read_locked_count"], status["active_sessions"]


def test_more_loads_and_stores_than_the_pool_has_room_for_all_end_well(server: ServerProcess, rank: MakeRank) -> None:
    pool = pool_of(GEMMA, 4)
    first, second = rank(GEMMA, server, pool=pool, num_blocks=700), rank(GEMMA, server, pool=pool, num_blocks=700)
    chance_tables = first.tables(1, 40)
    tables = [{group: table[64 * n : 64 * (n + 1)] for group, table in chance_tables.items()} for n in range(10)]
    digests = [digests_of(("crowd", n), 4) for n in range(10)]
    for n, each in enumerate(tables):
        first.fill(each, seed=n)
    ended = first.run(stores=[first.store_of(digests[n], tables[n]) for n in range(10)])
    assert set(ended.stores.values()) == {StoreOutcome(1)}
    assert all(first.is_readable(each) for each in digests)
    loads = [second.load_of(str(n), digests[n], tables[n]) for n in range(10)]
    assert second.run(loads=loads).failed == set()
    positions = second.needed(4)
    for each in tables:
        assert loaded(second, each, positions) == loaded(first, each, positions)
    assert loaded(second, tables[0], positions) != loaded(first, tables[1], positions)
    assert second.all_pages_are_free()


# Faults of the server.


def flip(page: memoryview, payload_bytes: int) -> None:
    page[HEADER_BYTES + payload_bytes // 2] ^= 1


def mistake(page: memoryview, payload_bytes: int) -> None:
    seal(page, b"of another page.", payload_bytes)


def forget(page: memoryview, payload_bytes: int) -> None:
    page[:HEADER_BYTES] = bytes(HEADER_BYTES)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(flip, "checksum"), (mistake, "wrong_key"), (forget, "missing")],
    ids=["flip", "mistake", "forget"],
)
def test_a_page_that_is_wrong_fails_its_load_is_withdrawn_and_stored_anew(
    server: ServerProcess,
    rank: MakeRank,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[memoryview, int], None],
    reason: str,
) -> None:
    first, second = rank(DEEPSEEK_V4, server), rank(DEEPSEEK_V4, server)
    digests = digests_of("wrong", 4)
    stored, wanted = first.tables(1, 4), second.tables(2, 4)
    first.fill(stored, seed=1)
    real = Operations.store

    def store(self: Operations, prefix: Any, rank: int, chunks: Any, pages: Pages, *rest: Any) -> None:
        """Damage one page of chunk 2 on its way to the server, after it was sealed."""
        if chunks[0] <= 2 < chunks[1]:
            group, page = 3, pages.taken.blocks[3][(2 - chunks[0]) * 64 + 7]
            damage(first.session._registration.pool.page(group, page), first.session_spec.groups[group].payload_bytes)
        real(self, prefix, rank, chunks, pages, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Operations, "store", store)
        first.store(digests, stored)
    before = second.everything()
    ended = second.run(loads=[second.load_of("r", digests, wanted)])
    assert ended.failed == {"r"}
    assert [(failure.reason, failure.key) for failure in ended.failures["r"]] == [(reason, digests[2])]
    assert not changed(second, before), "no byte of the good pages either"
    assert second.counted()["lmcache_withdrawals_total"] == 1
    assert eventually(lambda: not second.is_readable(digests, timeout_s=patience.seconds(0.1)))
    assert second.is_readable(digests[:2])
    first.store(digests, stored, start_chunk=2)
    assert second.run(loads=[second.load_of("again", digests, wanted)]).failed == set()
    positions = second.needed(4)
    assert loaded(second, wanted, positions) == loaded(first, stored, positions)
    assert changed(second, before)


# Servers that end or stop.


@pytest.fixture
def mortal(lmcache: Sequence[str], tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers that a test may end."""
    started: list[ServerProcess] = []

    def start(before: ServerProcess | None = None) -> ServerProcess:
        started.append(ServerProcess(lmcache, tmp_path, ARGUMENTS, before.address if before else None))
        return started[-1].wait()

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[ServerProcess], threading.Event]:
    """Stops a server at the first retrieve, so that the retrieve is in flight for certain."""

    def stop(server: ServerProcess) -> threading.Event:
        real, is_asked = Operations.retrieve, threading.Event()

        def retrieve(self: Operations, *arguments: Any) -> None:
            if not is_asked.is_set():
                server.signal(signal.SIGSTOP)
            real(self, *arguments)
            is_asked.set()

        monkeypatch.setattr(Operations, "retrieve", retrieve)
        return is_asked

    return stop


@pytest.mark.full
def test_a_server_that_is_killed_in_mid_flight_fails_what_is_under_way_and_serves_again(
    mortal: Callable[..., ServerProcess], rank: MakeRank, stopping: Callable[[ServerProcess], threading.Event]
) -> None:
    server = mortal()
    worker = rank(GEMMA, server, connection=SOON)
    digests, others = digests_of("before", 4), digests_of("under way", 4)
    stored, wanted = worker.tables(1, 4), worker.tables(2, 4)
    worker.fill(stored, seed=1)
    positions = worker.needed(4)
    content = loaded(worker, stored, positions)
    worker.store(digests, stored)
    before = worker.everything()
    is_asked = stopping(server)
    worker.begin(loads=[worker.load_of("r", digests, wanted)])
    assert is_asked.wait(WAIT_S)
    worker.begin(stores=[worker.store_of(others, stored)])
    assert eventually(lambda: worker.session.connection.channel.num_open >= 2)
    server.kill()
    ended = worker.finish(1, 1)
    assert [failure.reason for failure in ended.failures["r"]] == ["io"]
    assert list(ended.stores.values()) == [StoreOutcome(1)], "its bytes are copied from the engine's blocks"
    assert not changed(worker, before)
    assert eventually(lambda: worker.session.ready is None)
    ended = worker.run(loads=[worker.load_of("gone", digests, wanted)], stores=[worker.store_of(others, stored)])
    assert ended.failures["gone"][0].reason == "io"
    assert [outcome.reason for outcome in ended.stores.values()] == ["io"]
    counted = worker.counted()
    assert (counted["lmcache_up"], counted["lmcache_operations_total retrieve lost"]) == (0, 1)
    mortal(server)
    assert eventually(lambda: worker.session.ready is not None)
    ended = worker.run(loads=[worker.load_of("back", digests, wanted)])
    assert [failure.reason for failure in ended.failures["back"]] == ["missing"], "the restarted server has no chunks"
    worker.store(digests, stored)
    assert worker.run(loads=[worker.load_of("again", digests, wanted)]).failed == set()
    assert loaded(worker, wanted, positions) == content
    assert changed(worker, before)
    assert worker.all_pages_are_free()
    assert worker.counted()["lmcache_up"] == 1


def test_a_server_that_stands_still_fails_a_load_at_its_deadline_and_writes_to_no_block(
    server: ServerProcess,
    rank: MakeRank,
    stopping: Callable[[ServerProcess], threading.Event],
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(lambda: server.signal(signal.SIGCONT))
    still, skipped = ConnectionOptions(call_timeout_s=FOREVER_S, beat_s=FOREVER_S), [0.0]
    worker = rank(
        GEMMA,
        server,
        load_timeout_s=FOREVER_S,
        connection=still,
        clock=lambda: time.monotonic() + skipped[0],
    )
    digests = digests_of("still", 4)
    stored, wanted = worker.tables(1, 4), worker.tables(2, 4)
    worker.fill(stored, seed=1)
    worker.store(digests, stored)
    before = worker.everything()
    is_asked = stopping(server)
    worker.begin(loads=[worker.load_of("r", digests, wanted)])
    assert is_asked.wait(WAIT_S)
    assert worker.worker.results().finished == set(), "not before the deadline"
    skipped[0] = FOREVER_S
    ended = worker.finish(1, 0)
    assert [failure.reason for failure in ended.failures["r"]] == ["timeout"]
    assert worker.session.used_bytes > 0, "the server may still write there"
    server.signal(signal.SIGCONT)
    assert worker.all_pages_are_free()
    assert not changed(worker, before)
