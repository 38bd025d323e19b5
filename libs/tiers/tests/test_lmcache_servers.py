"""A tier of LMCache's servers over real ones of both versions: the suite of media, and what engines share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from lmcache_servers import CHUNK_BYTES, SIZES, Engine, chunk_bytes, engine_at  # noqa: E402

from hybridkv.lmcache.calls import Ended  # noqa: E402
from hybridkv.lmcache.operations import Prefix  # noqa: E402
from hybridkv.lmcache.page import HEADER_BYTES  # noqa: E402
from hybridkv.lmcache.wire import CODECS  # noqa: E402
from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import FailureReason, Slot, Ticket, TierMedium  # noqa: E402
from hybridkv.tiers.lmcache import LMCacheMedium, LMCacheOptions  # noqa: E402
from hybridkv.tiers.lmcache.moving import RankMove, _Row  # noqa: E402
from hybridkv.tiers.lmcache.shelf import Page  # noqa: E402
from kits.lmcache.segments import segments_of  # noqa: E402
from kits.lmcache.server_process import ServerProcess, command, eventually, variable  # noqa: E402
from kits.tiers.conformance import MediumConformance, Tier  # noqa: E402
from kits.tiers.conformance.medium import NUM_BYTES  # noqa: E402

A, B, C = b"key a", b"key b", b"key c"
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture(scope="module", params=sorted(CODECS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One of each version. A chunk of the server has nothing to do with one of the engine."""
    lmcache = command(request.param)
    if lmcache is None:
        pytest.skip(f"{variable(request.param)} names no lmcache of version {request.param}")
    directory: Path = tmp_path_factory.mktemp("lmcache")
    with ServerProcess(lmcache, directory, ["--chunk-size", "48"]) as process:
        yield process


class TestLMCacheMedium(MediumConformance):
    """Bytes lie under keys and not in slots, so a slot says nothing about what another key finds."""

    @pytest.fixture(autouse=True)
    def engines(self, server: ServerProcess) -> Iterator[None]:
        self.server = server
        self.made: list[Engine] = []
        yield
        for engine in self.made:
            engine.close()

    def make_tier(self, capacity_bytes: int) -> Tier:
        self.made.append(engine_at(self.server.address, sizes=(NUM_BYTES,)))
        return Tier(self.made[-1].index, self.made[-1].medium)

    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        """What comes back is changed before it is looked at."""
        assert isinstance(medium, LMCacheMedium)
        moving = medium._moving
        read = moving._read

        def changed(row: _Row, move: RankMove, page: Page, prefix: Prefix, ended: Ended[None]) -> None:
            page.view[HEADER_BYTES + NUM_BYTES - 1] ^= 1
            read(row, move, page, prefix, ended)

        moving._read = changed  # type: ignore[method-assign]

    def test_another_keys_bytes_are_not_loaded(self) -> None:
        tier, slot = self.stored()
        self._expect_failed_load(tier.medium, B, slot, FailureReason.MISSING)

    def test_a_reused_slot_belongs_to_its_new_key(self) -> None:
        tier, slot = self.stored()
        tier.medium.store(Ticket(7), B, slot, [chunk_bytes(2, NUM_BYTES)])
        assert tier.medium.drain(60.0) and [each.failure for each in tier.medium.poll()] == [None]
        for key, seed in ((A, None), (B, 2)):
            destination = bytearray(NUM_BYTES)
            tier.medium.load(Ticket(8), key, slot, [destination])
            assert tier.medium.drain(60.0) and [each.failure for each in tier.medium.poll()] == [None]
            assert seed is None or destination == chunk_bytes(seed, NUM_BYTES)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(**keys: Any) -> Engine:
        made.append(engine_at(server.address, **keys))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_engines_find_what_others_of_the_same_content_stored(engine: MakeEngine) -> None:
    first = engine()
    second, stranger = engine(namespace=first.namespace), engine()
    assert second.found(A, B) == [MISS, MISS]
    assert first.put(A, chunk_bytes(1)) is None and first.put(B, chunk_bytes(2, SIZES[1])) is None
    assert eventually(lambda: second.found(A, B) == [HIT, HIT]), "missing for a second"
    assert [second.get(key) for key in (A, B)] == [chunk_bytes(1), chunk_bytes(2, SIZES[1])]
    assert second.get(A) != chunk_bytes(2)
    assert stranger.found(A, B) == [MISS, MISS]


def test_what_another_has_stored_already_is_stored_at_no_cost(engine: MakeEngine) -> None:
    first = engine()
    second = engine(namespace=first.namespace)
    assert first.put(A, chunk_bytes(1)) is None
    assert second.put(A, chunk_bytes(1)) is None
    assert second.get(A) == chunk_bytes(1)


def test_a_chunk_is_there_when_every_ranks_part_is(engine: MakeEngine) -> None:
    both = engine(num_ranks=2)
    asker = engine(num_ranks=2, namespace=both.namespace)
    slot = both.index.reserve(A, CHUNK_BYTES)
    assert isinstance(slot, Slot)
    both.media[1].store(Ticket(1), A, slot, [chunk_bytes(1)])
    assert both.media[1].drain(60.0) and both.media[1].poll()[0].failure is None
    assert asker.found(A) == [MISS]
    both.media[0].store(Ticket(1), A, slot, [chunk_bytes(2)])
    assert both.media[0].drain(60.0) and both.media[0].poll()[0].failure is None
    assert eventually(lambda: asker.found(A) == [HIT])
    assert [asker.get(A, rank) for rank in (0, 1)] == [chunk_bytes(2), chunk_bytes(1)]


def test_many_chunks_are_asked_for_at_once_and_fewer_are_on_their_way(engine: MakeEngine) -> None:
    options = LMCacheOptions(max_looking=16, max_moving=3, max_waiting=40, believed_s=1e6)
    holder = engine(options=options)
    keys = [b"%d" % number for number in range(60)]
    for number, key in enumerate(keys[:20]):
        assert holder.put(key, chunk_bytes(number)) is None
    asker = engine(options=options, namespace=holder.namespace)
    assert asker.found(*keys) == [HIT] * 20 + [MISS] * 40
    slots = {key: asker.index.pin(key) for key in keys[:20]}
    buffers = [bytearray(CHUNK_BYTES) for _ in range(100)]
    for number, buffer in enumerate(buffers):
        slot = slots[keys[number % 20]]
        assert slot is not None
        asker.medium.load(Ticket(number), keys[number % 20], slot, [buffer])
    assert asker.medium.drain(60.0)
    done = {completion.ticket: completion.failure for completion in asker.medium.poll()}
    right = [ticket for ticket, failure in done.items() if failure is None]
    assert len(done) == 100 and len(right) >= 40
    assert all(buffers[ticket] == chunk_bytes(ticket % 20) for ticket in right)
    assert {failure.reason for failure in done.values() if failure} <= {FailureReason.BUSY}


def test_a_chunk_of_a_size_that_was_not_told_is_not_moved(engine: MakeEngine) -> None:
    made = engine()
    made.medium.load(Ticket(1), A, Slot(((0, 7),)), [bytearray(7)])
    [completion] = made.medium.poll()
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO


def test_an_end_leaves_nothing_registered_and_nothing_shared(server: ServerProcess, engine: MakeEngine) -> None:
    made = engine()
    before = set(server.status()["registered_gpu_ids"])
    assert made.put(A, chunk_bytes(1)) is None and made.found(A, B) == [HIT, MISS]
    assert made.get(A) == chunk_bytes(1)
    segments = segments_of(os.getpid())
    made.close()
    assert len(before - set(server.status()["registered_gpu_ids"])) == len(SIZES)
    assert len(segments - segments_of(os.getpid())) == len(SIZES)
