"""Both halves over a directory: the conformance suites, and what one engine finds of another's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("hybridkv.tiers.testing.conformance")

from object_depots import (  # noqa: E402
    FINGERPRINT,
    TIMEOUT_S,
    depot_at,
    flip,
    flip_payload,
    heard,
    index_at,
    manifests,
    medium_at,
    pack_path,
    packs,
    wait_until,
)

from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import FailureReason, GathersStores, Slot, Ticket, TierConfigurationError, TierMedium  # noqa: E402
from hybridkv.tiers.object import ObjectIndex, ObjectMedium, ObjectOptions, open_index, open_medium  # noqa: E402
from hybridkv.tiers.object.names import manifest_name, prefix_of  # noqa: E402
from hybridkv.tiers.ram import RamArena, RamIndex  # noqa: E402
from hybridkv.tiers.stack import (  # noqa: E402
    Direction,
    MoveOutcome,
    PathPosition,
    SlowerTier,
    TierMover,
    TierStack,
)
from hybridkv.tiers.testing.conformance import (  # noqa: E402
    CHUNK_BYTES,
    ExactTierConformance,
    Tier,
)
from hybridkv.tiers.testing.faults import FaultInjectingIndex, FaultInjectingMedium, FaultPlan  # noqa: E402

HIT, MISS = LookupResult.HIT, LookupResult.MISS
FULL, WINDOW = b"f" * 16, b"w" * 16
"""Tags of two groups."""


class TestObjectTier(ExactTierConformance):
    path: Path
    tiers: list[Tier]

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> Iterator[None]:
        self.path, self.tiers = tmp_path, []
        yield
        for tier in self.tiers:
            tier.medium.close()
            tier.index.close()

    def make_tier(self, capacity_bytes: int) -> Tier:
        # A suite ends no batch, so each chunk is a pack of its own.
        options = ObjectOptions(known_bytes=capacity_bytes, pack_bytes=1)
        self.tiers.append(Tier(index_at(self.path, options), medium_at(self.path, options)))
        return self.tiers[-1]

    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        flip_payload(self.path, slot)

    def test_a_reused_slot_belongs_to_its_new_key(self) -> None:
        pytest.skip("no slot of a pack is used twice")


class TestObjectTierInAnIdleFaultInjector(TestObjectTier):
    def make_tier(self, capacity_bytes: int) -> Tier:
        tier = super().make_tier(capacity_bytes)
        return Tier(FaultInjectingIndex(tier.index, FaultPlan()), FaultInjectingMedium(tier.medium, FaultPlan()))


class Engine:
    """A stack of memory over the store, and each rank's mover, without an engine."""

    def __init__(
        self, directory: Path, num_ranks: int = 1, secret: bytes = b"", options: ObjectOptions | None = None
    ) -> None:
        options = options or ObjectOptions()
        depot = depot_at(directory, secret)
        self.index: ObjectIndex = open_index(depot, FINGERPRINT, num_ranks, options, time.monotonic)
        self.near = RamIndex(1 << 24, 4096)
        self.stack = TierStack(self.near, [SlowerTier("object", self.index)], num_ranks, time.monotonic)
        self.arenas = [RamArena(1 << 24, 4096) for _ in range(num_ranks)]
        self.media = [open_medium(depot, rank, options) for rank in range(num_ranks)]
        self.movers = [
            TierMover(arena, {"object": medium}, time.monotonic)
            for arena, medium in zip(self.arenas, self.media, strict=True)
        ]

    def step(self) -> None:
        moves = self.stack.take_moves()
        for mover in self.movers:
            mover.start(moves)
            for move, failure, _ in mover.poll():
                self.stack.on_move(move.move_id, MoveOutcome(1, failure))
        self.stack.tick()

    def run(self) -> None:
        """Until nothing moves."""

        def is_idle() -> bool:
            self.step()
            return not self.stack.has_moves_alive()

        wait_until(is_idle)

    def store(self, path: list[bytes], chunks: dict[bytes, bytes]) -> None:
        """Each needs the one before it."""
        for number, key in enumerate(path):
            slot = self.stack.reserve(key, len(chunks[key]))
            assert isinstance(slot, Slot)
            for rank, arena in enumerate(self.arenas):
                for view in arena.views(slot):
                    view[:] = bytes(byte ^ rank for byte in chunks[key])
                assert arena.seal(key, slot) is None
            self.stack.commit(key, PathPosition(tuple(path[number - 1 : number])))
        self.run()

    def hear(self, keys: list[bytes]) -> list[LookupResult]:
        self.stack.ask(keys)
        wait_until(lambda: not self.stack.any_pending(keys))
        return [self.stack.lookup(key) for key in keys]

    def load(self, keys: list[bytes]) -> list[bytes] | None:
        """The first rank's bytes, when all ranks' are right."""
        hold = self.stack.acquire("r", keys)
        assert not isinstance(hold, str), hold

        def is_over() -> bool:
            self.step()
            hold = self.stack.hold("r")
            assert hold is not None
            return not hold.waiting or hold.failure is not None

        wait_until(is_over)
        hold = self.stack.hold("r")
        assert hold is not None
        if hold.failure is not None:
            self.stack.release("r")
            return None
        slots = self.stack.pin_all(keys)
        assert slots is not None
        self.stack.release("r")
        found = []
        for rank, arena in enumerate(self.arenas):
            for key, slot in zip(keys, slots, strict=True):
                assert arena.check(key, slot) is None
                data = b"".join(bytes(view) for view in arena.views(slot))
                found += [data] if rank == 0 else []
                assert rank == 0 or data == bytes(byte ^ rank for byte in found[keys.index(key)])
        self.stack.unpin_all(keys)
        return found

    def close(self) -> None:
        for mover in self.movers:
            mover.close(TIMEOUT_S)
        self.stack.close()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def path_of(number: int, seed: bytes = b"") -> list[bytes]:
    """Keys of a path of one group."""
    return [FULL + seed + bytes([step]) * 32 for step in range(number)]


def _last_is_named(directory: Path, keys: list[bytes]) -> bool:
    """Whether the manifest of a whole path is there."""
    return any(path.name == manifest_name("", prefix_of(keys[-1]))[3:] for path in manifests(directory))


def chunks_of(keys: list[bytes]) -> dict[bytes, bytes]:
    return {key: os.urandom(CHUNK_BYTES) for key in keys}


def test_a_medium_of_objects_gathers_stores(tmp_path: Path) -> None:
    medium = medium_at(tmp_path)
    assert isinstance(medium, GathersStores)
    medium.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_one_engine_stored_another_finds_and_loads(tmp_path: Path, engines: list[Engine], num_ranks: int) -> None:
    engines += [Engine(tmp_path, num_ranks), Engine(tmp_path, num_ranks)]
    keys = path_of(40)
    chunks = chunks_of(keys)
    engines[0].store(keys, chunks)
    wait_until(lambda: _last_is_named(tmp_path, keys))
    more = [*keys, FULL + b"x" * 32]
    assert engines[1].hear(more) == [HIT] * 40 + [MISS]
    assert engines[1].load(keys) == [chunks[key] for key in keys]


def test_an_engine_that_closes_leaves_what_it_stored_to_the_next(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(20)
    chunks = chunks_of(keys)
    first = Engine(tmp_path)
    first.store(keys, chunks)
    first.close()
    engines.append(Engine(tmp_path))
    assert engines[0].hear(keys) == [HIT] * 20
    assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_a_conversation_that_goes_on_is_found_whole(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(30)
    chunks = chunks_of(keys)
    for stop in (7, 19, 30):
        engine = Engine(tmp_path)
        engine.hear(keys[:stop])
        engine.store(keys[:stop], chunks)
        engine.close()
    engines.append(Engine(tmp_path))
    assert engines[0].hear(keys) == [HIT] * 30
    assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_another_secret_finds_nothing(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(20)
    first = Engine(tmp_path, secret=b"one")
    first.store(keys, chunks_of(keys))
    first.close()
    engines += [Engine(tmp_path, secret=b"two"), Engine(tmp_path), Engine(tmp_path, secret=b"one")]
    assert [engine.hear(keys)[0] for engine in engines] == [MISS, MISS, HIT]


def test_another_number_of_ranks_finds_nothing(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(20)
    first = Engine(tmp_path)
    first.store(keys, chunks_of(keys))
    first.close()
    engines.append(Engine(tmp_path, 2))
    assert engines[0].hear(keys)[0] is MISS


@pytest.mark.parametrize("secret", [b"", b"one"])
@pytest.mark.parametrize("where", ["header", "bytes"])
def test_a_flipped_bit_is_no_hit(tmp_path: Path, engines: list[Engine], secret: bytes, where: str) -> None:
    keys = path_of(20)
    first = Engine(tmp_path, secret=secret)
    first.store(keys, chunks_of(keys))
    first.close()
    [pack] = packs(tmp_path)
    flip(pack, 20 if where == "header" else 200)
    engines.append(Engine(tmp_path, secret=secret, options=ObjectOptions(missing_s=0.01)))
    assert engines[0].hear(keys) == [HIT] * 20
    assert engines[0].load(keys) is None
    assert engines[0].index.lookup(keys[0]) is MISS
    time.sleep(0.02)
    assert engines[0].hear(keys)[0] is MISS, "its place is not learned again"


def test_a_flipped_bit_of_a_manifest_is_a_miss_and_it_is_deleted(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(4)[1:]
    first = Engine(tmp_path)
    first.store(keys, chunks_of(keys))
    first.close()
    for path in manifests(tmp_path):
        flip(path, 60)
    engines.append(Engine(tmp_path))
    assert engines[0].hear(keys) == [MISS] * 3
    assert not manifests(tmp_path)


def test_packs_that_expired_are_a_miss_and_their_manifest_is_withdrawn(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(6)
    first = Engine(tmp_path)
    first.store(keys, chunks_of(keys))
    first.close()
    for pack in packs(tmp_path):
        pack.unlink()
    number = len(manifests(tmp_path))
    engines.append(Engine(tmp_path))
    assert engines[0].hear(keys) == [HIT] * 6
    assert engines[0].load(keys) is None
    wait_until(lambda: len(manifests(tmp_path)) < number)


def test_a_pack_that_ends_too_early_is_missing(tmp_path: Path) -> None:
    index, medium = index_at(tmp_path), medium_at(tmp_path)
    slot = index.reserve(FULL + b"1" * 32, CHUNK_BYTES)
    assert isinstance(slot, Slot)
    medium.store(Ticket(1), FULL + b"1" * 32, slot, [bytes(CHUNK_BYTES)])
    assert medium.drain(TIMEOUT_S) and medium.poll()[0].failure is None
    path = pack_path(tmp_path, slot)
    data = path.read_bytes()
    for length in (len(data) - 1, 200, 100, 0):
        path.write_bytes(data[:length])
        medium.load(Ticket(2), FULL + b"1" * 32, slot, [bytearray(CHUNK_BYTES)])
        assert medium.drain(TIMEOUT_S)
        [completion] = medium.poll()
        assert completion.failure is not None
        assert completion.failure.reason is FailureReason.MISSING, (length, completion.failure)
    medium.close()
    index.close()


def test_neighbours_come_in_one_read(tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = path_of(20)
    chunks = chunks_of(keys)
    engines += [Engine(tmp_path), Engine(tmp_path)]
    engines[0].store(keys, chunks)
    assert len(packs(tmp_path)) == 1
    wait_until(lambda: _last_is_named(tmp_path, keys))
    reads: list[str] = []
    read = ObjectMedium._read

    def counted(medium: ObjectMedium, pack: str, run: list[Any]) -> None:
        reads.append(pack)
        read(medium, pack, run)

    monkeypatch.setattr(ObjectMedium, "_read", counted)
    assert engines[1].hear(keys) == [HIT] * 20
    assert engines[1].load(keys) == [chunks[key] for key in keys]
    assert len(reads) <= 3, "the dispatcher may begin before all are there"


def test_a_reset_for_all_hides_what_is_stored_from_everybody(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(5)
    first = Engine(tmp_path)
    first.store(keys, chunks_of(keys))
    first.close()
    resetting = open_index(depot_at(tmp_path), FINGERPRINT, 1, ObjectOptions(), time.monotonic, clears_all=True)
    assert heard(resetting, keys) == [HIT] * 5
    resetting.clear()
    assert heard(resetting, keys) == [MISS] * 5
    resetting.close()
    engines.append(Engine(tmp_path))
    assert engines[0].hear(keys) == [MISS] * 5


def test_a_store_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(TierConfigurationError, match="url"):
        index_at(tmp_path / "file")


def test_a_promotion_is_counted_by_its_bytes(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(4)
    first = Engine(tmp_path)
    first.store(keys, chunks_of(keys))
    assert first.stack.take_counts().tiers["object"].cascaded_bytes == 4 * CHUNK_BYTES
    first.close()
    engines.append(Engine(tmp_path))
    engines[0].hear(keys)
    engines[0].load(keys)
    counts = engines[0].stack.take_counts().tiers["object"]
    assert counts.promoted_bytes == 4 * CHUNK_BYTES
    assert not counts.failures
    assert Direction.PROMOTE not in counts.breaker_openings
