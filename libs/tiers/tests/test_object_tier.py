"""Scheduler half and worker half over a directory: conformance, and chunks shared between engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import patience
import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from object_depots import (  # noqa: E402
    FINGERPRINT,
    TIMEOUT_S,
    depot_at,
    flip,
    flip_payload,
    index_at,
    look_up,
    manifests,
    medium_at,
    pack_path,
    packs,
    patient,
)
from object_engines import FULL, WINDOW, Engine, chunks_of, last_is_named, path_of, wait_until_named  # noqa: E402

from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import (  # noqa: E402
    BatchedMedium,
    Completion,
    FailureReason,
    Slot,
    Ticket,
    TierConfigurationError,
    TierMedium,
)
from hybridkv.tiers.object import ObjectMedium, open_index  # noqa: E402
from hybridkv.tiers.object import medium as object_medium  # noqa: E402
from hybridkv.tiers.object.directory_store import DirectoryStore  # noqa: E402
from hybridkv.tiers.object.format.manifest import ManifestNode, ManifestPart, encode_manifest  # noqa: E402
from hybridkv.tiers.object.format.seals import Seals  # noqa: E402
from hybridkv.tiers.object.names import manifest_name, prefix_of  # noqa: E402
from hybridkv.tiers.stack import (  # noqa: E402
    Direction,
)
from kits.tiers.conformance import (  # noqa: E402
    CHUNK_BYTES,
    ExactTierConformance,
    Tier,
)
from kits.tiers.faults import FaultInjectingIndex, FaultInjectingMedium, FaultPlan  # noqa: E402

HIT, MISS = LookupResult.HIT, LookupResult.MISS


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
        # The suite never ends a batch, so that each chunk needs its own pack.
        options = patient(known_bytes=capacity_bytes, pack_bytes=1)
        self.tiers.append(Tier(index_at(self.path, options), medium_at(self.path, options)))
        return self.tiers[-1]

    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        flip_payload(self.path, slot)

    def test_a_reused_slot_belongs_to_its_new_key(self) -> None:
        pytest.skip("no place in a pack is reused")


class TestObjectTierInAnIdleFaultInjector(TestObjectTier):
    def make_tier(self, capacity_bytes: int) -> Tier:
        tier = super().make_tier(capacity_bytes)
        return Tier(FaultInjectingIndex(tier.index, FaultPlan()), FaultInjectingMedium(tier.medium, FaultPlan()))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def test_an_object_medium_is_a_batched_medium(tmp_path: Path) -> None:
    medium = medium_at(tmp_path)
    assert isinstance(medium, BatchedMedium)
    medium.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_chunk_of_one_engine_is_found_and_loaded_by_another(
    tmp_path: Path, engines: list[Engine], num_ranks: int
) -> None:
    engines += [Engine(depot_at(tmp_path), num_ranks), Engine(depot_at(tmp_path), num_ranks)]
    keys = path_of(40)
    chunks = chunks_of(keys)
    engines[0].store(keys, chunks)
    wait_until_named(engines[0], tmp_path, keys)
    more = [*keys, FULL + b"x" * 32]
    assert engines[1].look_up(more) == [HIT] * 40 + [MISS]
    assert engines[1].load(keys) == [chunks[key] for key in keys]


def test_a_closed_engine_leaves_its_chunks_to_the_next(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(20)
    chunks = chunks_of(keys)
    first = Engine(depot_at(tmp_path))
    first.store(keys, chunks)
    first.close()
    engines.append(Engine(depot_at(tmp_path)))
    assert engines[0].look_up(keys) == [HIT] * 20
    assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_a_growing_conversation_is_found_whole(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(30)
    chunks = chunks_of(keys)
    for stop in (7, 19, 30):
        engine = Engine(depot_at(tmp_path))
        engine.look_up(keys[:stop])
        engine.store(keys[:stop], chunks)
        engine.close()
    engines.append(Engine(depot_at(tmp_path)))
    assert engines[0].look_up(keys) == [HIT] * 30
    assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_another_secret_finds_nothing(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(20)
    first = Engine(depot_at(tmp_path, b"one"))
    first.store(keys, chunks_of(keys))
    first.close()
    engines += [Engine(depot_at(tmp_path, b"two")), Engine(depot_at(tmp_path)), Engine(depot_at(tmp_path, b"one"))]
    assert [engine.look_up(keys)[0] for engine in engines] == [MISS, MISS, HIT]


def test_another_number_of_ranks_finds_nothing(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(20)
    first = Engine(depot_at(tmp_path))
    first.store(keys, chunks_of(keys))
    first.close()
    engines.append(Engine(depot_at(tmp_path), 2))
    assert engines[0].look_up(keys)[0] is MISS


@pytest.mark.parametrize("secret", [b"", b"one"])
@pytest.mark.parametrize("where", ["header", "bytes"])
def test_a_flipped_bit_fails_the_load_and_then_misses(
    tmp_path: Path, engines: list[Engine], secret: bytes, where: str
) -> None:
    keys = path_of(20)
    first = Engine(depot_at(tmp_path, secret))
    first.store(keys, chunks_of(keys))
    first.close()
    [pack] = packs(tmp_path)
    flip(pack, 20 if where == "header" else 200)
    engines.append(Engine(depot_at(tmp_path, secret), options=patient(missing_s=0.01)))
    assert engines[0].look_up(keys) == [HIT] * 20
    assert engines[0].load(keys) is None
    assert engines[0].index.lookup(keys[0]) is MISS
    time.sleep(0.02)
    assert engines[0].look_up(keys)[0] is MISS, "its place is not cached again"


def test_a_manifest_with_a_flipped_bit_is_a_miss_and_is_kept(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(4)[1:]
    first = Engine(depot_at(tmp_path))
    first.store(keys, chunks_of(keys))
    first.close()
    for path in manifests(tmp_path):
        flip(path, 60)
    engines.append(Engine(depot_at(tmp_path)))
    number = len(manifests(tmp_path))
    assert engines[0].look_up(keys) == [MISS] * 3
    assert len(manifests(tmp_path)) == number


def test_expired_packs_are_a_miss_and_their_manifest_is_kept(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(6)
    first = Engine(depot_at(tmp_path))
    first.store(keys, chunks_of(keys))
    first.close()
    for pack in packs(tmp_path):
        pack.unlink()
    before = manifests(tmp_path)
    engines.append(Engine(depot_at(tmp_path)))
    assert engines[0].look_up(keys) == [HIT] * 6
    assert engines[0].load(keys) is None
    engines[0].close()
    engines[:] = []
    assert manifests(tmp_path) == before


def test_a_short_pack_is_missing(tmp_path: Path) -> None:
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


def test_a_bug_in_a_store_ends_its_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, medium = index_at(tmp_path), medium_at(tmp_path)
    slot = index.reserve(FULL + b"1" * 32, CHUNK_BYTES)
    assert isinstance(slot, Slot)
    monkeypatch.setattr(object_medium, "rank_name", lambda pack, rank: 1 // 0)
    medium.store(Ticket(1), FULL + b"1" * 32, slot, [bytes(CHUNK_BYTES)])
    assert medium.drain(TIMEOUT_S)
    [completion] = medium.poll()
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO
    medium.close()
    index.close()


class Panic(BaseException):
    """Not an `Exception`, like a panic of obstore."""


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_bug_in_a_load_ends_each_operation_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    num_bytes, keys = object_medium.BATCH_BYTES, path_of(3)
    index, medium = index_at(tmp_path), medium_at(tmp_path)
    slots = index.reserve_all([(key, num_bytes) for key in keys])
    for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        assert isinstance(slot, Slot)
        medium.store(Ticket(number), key, slot, [bytes(num_bytes)])
    assert medium.drain(TIMEOUT_S) and all(completion.failure is None for completion in medium.poll())
    digests, calls = object_medium.view_digests, iter(range(10))

    def fail_later(chunks: Sequence[list[memoryview]]) -> list[bytes]:
        if next(calls) >= num_good:
            raise Panic
        return digests(chunks)

    monkeypatch.setattr(object_medium, "view_digests", fail_later)
    for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        assert isinstance(slot, Slot)
        medium.load(Ticket(number), key, slot, [bytearray(num_bytes)])
    assert medium.drain(TIMEOUT_S)
    completions = sorted(medium.poll(), key=lambda each: each.ticket)
    assert [completion.ticket for completion in completions] == [0, 1, 2]
    failed = [completion.failure is not None for completion in completions]
    assert failed == [number >= num_good for number in range(3)]
    medium.close()
    index.close()


def test_a_bug_at_the_start_of_a_read_ends_no_operation_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That thread still writes into the operation's memory."""
    one_chunk_a_pack = patient(pack_bytes=1)  # so that each load is a read
    index, medium = index_at(tmp_path, one_chunk_a_pack), medium_at(tmp_path, one_chunk_a_pack)
    keys = path_of(2)
    slots = [index.reserve(key, CHUNK_BYTES) for key in keys]
    for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        assert isinstance(slot, Slot)
        medium.store(Ticket(number), key, slot, [bytes(CHUNK_BYTES)])
    assert medium.drain(TIMEOUT_S) and len(medium.poll()) == 2
    digests, submit, may_read, calls = (
        object_medium.view_digests,
        medium._pool.submit,
        threading.Event(),
        iter(range(9)),
    )

    def wait_and_digest(chunks: Sequence[list[memoryview]]) -> list[bytes]:
        assert may_read.wait(TIMEOUT_S)
        return digests(chunks)

    has_failed = threading.Event()

    def fail_at_the_second_read(work: Callable[[], None]) -> None:
        if next(calls) == 2:
            has_failed.set()
            raise KeyError
        submit(work)

    monkeypatch.setattr(object_medium, "view_digests", wait_and_digest)
    monkeypatch.setattr(medium._pool, "submit", fail_at_the_second_read)
    for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        assert isinstance(slot, Slot)
        medium.load(Ticket(number), key, slot, [bytearray(CHUNK_BYTES)])
    assert not medium.drain(0.1) and has_failed.wait(TIMEOUT_S)
    assert medium.poll() == []
    may_read.set()
    ended: list[Completion] = []
    patience.wait_until(lambda: ended.extend(medium.poll()) or ended, "the first read ends")
    assert not medium.drain(0.1)
    ended += medium.poll()
    assert [completion.failure for completion in ended] == [None]
    medium.close()
    index.close()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_an_operation_without_a_thread_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    index, medium = index_at(tmp_path), medium_at(tmp_path)
    slot = index.reserve(FULL + b"1" * 32, CHUNK_BYTES)
    assert isinstance(slot, Slot)

    def refuse(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(medium._pool, "submit", refuse)
    medium.store(Ticket(1), FULL + b"1" * 32, slot, [bytes(CHUNK_BYTES)])
    medium.load(Ticket(2), FULL + b"1" * 32, slot, [bytearray(CHUNK_BYTES)])
    assert medium.drain(0.0)
    assert sorted(completion.ticket for completion in medium.poll() if completion.failure) == [1, 2]
    medium.close()
    index.close()


def test_adjacent_chunks_are_loaded_in_one_read(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = path_of(20)
    chunks = chunks_of(keys)
    engines += [Engine(depot_at(tmp_path)), Engine(depot_at(tmp_path))]
    engines[0].store(keys, chunks)
    assert len(packs(tmp_path)) == 1
    wait_until_named(engines[0], tmp_path, keys)
    reads: list[str] = []
    read = ObjectMedium._read

    def counted(medium: ObjectMedium, pack: str, run: list[Any]) -> None:
        reads.append(pack)
        read(medium, pack, run)

    monkeypatch.setattr(ObjectMedium, "_read", counted)
    assert engines[1].look_up(keys) == [HIT] * 20
    assert engines[1].load(keys) == [chunks[key] for key in keys]
    assert len(reads) == 1


def test_a_reset_for_all_hides_stored_chunks_from_every_engine(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(5)
    first = Engine(depot_at(tmp_path))
    first.store(keys, chunks_of(keys))
    first.close()
    resetting = open_index(depot_at(tmp_path), FINGERPRINT, 1, patient(), time.monotonic, clears_all=True)
    assert look_up(resetting, keys) == [HIT] * 5
    resetting.clear()
    assert look_up(resetting, keys) == [MISS] * 5
    resetting.close()
    engines.append(Engine(depot_at(tmp_path)))
    assert engines[0].look_up(keys) == [MISS] * 5


def test_a_store_that_overwrites_on_create_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = DirectoryStore.put
    monkeypatch.setattr(DirectoryStore, "put", lambda store, name, data, **more: put(store, name, data))
    with pytest.raises(TierConfigurationError, match="If-None-Match"):
        index_at(tmp_path)


def test_a_store_without_range_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = DirectoryStore.get
    monkeypatch.setattr(DirectoryStore, "get", lambda store, name, **more: get(store, name))
    with pytest.raises(TierConfigurationError, match="range"):
        index_at(tmp_path)


def test_a_manifest_that_failed_to_write_is_written_at_the_next_store(tmp_path: Path, engines: list[Engine]) -> None:
    engines.append(Engine(depot_at(tmp_path)))
    others, client = path_of(3, b"other"), engines[0].index._client
    store = client._writer._store
    client._writer._store = SimpleNamespace(put_async=fails)
    keys = path_of(5)
    chunks = chunks_of(keys)
    engines[0].store(keys, chunks)
    patience.wait_until(lambda: bool(client._writer._unpublished), "the manifest was not written")
    client._writer._store = store
    engines[0].store(others, chunks_of(others))
    patience.wait_until(lambda: last_is_named(tmp_path, keys), "the last manifest is written")


def test_chunks_stored_later_under_the_same_prefixes_are_found(tmp_path: Path, engines: list[Engine]) -> None:
    """The existing manifests list no window."""
    engines.append(Engine(depot_at(tmp_path), options=patient(missing_s=0.01)))
    keys = path_of(12)
    windows = [WINDOW + prefix_of(key) for key in keys]
    chunks = chunks_of([*keys, *windows])
    engines[0].store(keys, chunks)
    patience.wait_until(lambda: last_is_named(tmp_path, keys), "the manifests are written")
    engines[0].store(windows, chunks)
    engines[0].close()
    engines[:] = [Engine(depot_at(tmp_path))]
    assert engines[0].look_up([*keys, *windows]) == [HIT] * 24
    assert engines[0].load([*keys, *windows]) == [chunks[key] for key in (*keys, *windows)]


def test_a_manifest_of_another_version_is_not_overwritten(tmp_path: Path, engines: list[Engine]) -> None:
    engines.append(Engine(depot_at(tmp_path), options=patient(missing_s=0.01)))
    keys = path_of(1)
    client: Any = engines[0].index._client
    name = manifest_name(client.namespace, prefix_of(keys[0]))
    body = msgspec.msgpack.encode([2, "of another version"])
    sealed = Seals(b"").of(name.encode(), body) + body
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(sealed)
    judged = client._writer._is_worse
    ends: list[bool] = []

    async def judge(*arguments: Any) -> bool:
        ends.append(await judged(*arguments))
        return ends[-1]

    client._writer._is_worse = judge
    engines[0].store(keys, chunks_of(keys))
    patience.wait_until(lambda: bool(ends), "the existing manifest is read")
    engines.pop().close()
    assert (tmp_path / name).read_bytes() == sealed


async def fails(*arguments: object, **more: object) -> None:
    raise ConnectionError("no")


def test_an_engine_notices_a_new_epoch_of_another_engine(tmp_path: Path, engines: list[Engine]) -> None:
    engines += [Engine(depot_at(tmp_path), options=patient(epoch_check_s=0.02)) for _ in range(2)]
    keys = path_of(5)
    engines[0].store(keys, chunks_of(keys))
    assert engines[0].index.lookup(keys[0]) is HIT
    resetting = open_index(depot_at(tmp_path), FINGERPRINT, 1, patient(), time.monotonic, clears_all=True)
    resetting.clear()
    resetting.close()
    patience.wait_until(lambda: engines[0].index.lookup(keys[0]) is MISS, "the new epoch is noticed")
    chunks = chunks_of(keys)
    other = Engine(depot_at(tmp_path))
    other.store(keys, chunks)
    other.close()
    patience.wait_until(lambda: engines[1].look_up(keys[:1]) == [HIT], "the new epoch is noticed")


def test_a_store_that_ends_after_a_reset_is_in_no_manifest(tmp_path: Path) -> None:
    """The scheduler's thread commits before it processes the event of the new epoch."""
    options = patient(epoch_check_s=0.02, missing_s=0.01)
    key = path_of(1)[0]
    indexes = [index_at(tmp_path, options)]
    medium = medium_at(tmp_path, options)
    try:
        slot = indexes[0].reserve(key, CHUNK_BYTES, ())
        assert isinstance(slot, Slot)
        indexes[0].end_batch()
        medium.store(Ticket(1), key, slot, [bytes(CHUNK_BYTES)])
        medium.flush()
        patience.wait_until(lambda: bool(packs(tmp_path)), "the pack is written")
        indexes.append(open_index(depot_at(tmp_path), FINGERPRINT, 1, options, time.monotonic, clears_all=True))
        clients: list[Any] = [index._client for index in indexes]
        indexes[1].clear()
        patience.wait_until(lambda: clients[0].namespace == clients[1].namespace, "the new epoch is noticed")
        assert indexes[0].commit(key)
        other = path_of(1, b"new")[0]
        slot = indexes[1].reserve(other, CHUNK_BYTES, ())
        assert isinstance(slot, Slot)
        indexes[1].end_batch()
        medium.store(Ticket(2), other, slot, [bytes(CHUNK_BYTES)])
        medium.flush()
        indexes[1].commit(other)
        patience.wait_until(lambda: last_is_named(tmp_path, [other]), "the new epoch is used")
        indexes[0].close()
        assert not last_is_named(tmp_path, [key])
    finally:
        for index in indexes:
            index.close()
        medium.close()


def test_a_manifest_with_a_pack_of_another_epoch_is_not_read(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    try:
        client: Any = index._client
        key = path_of(1)[0]
        name = manifest_name(client.namespace, prefix_of(key))
        path = [ManifestNode(prefix_of(key), [ManifestPart(FULL, f"{'ab' * 20}/p/{'cd' * 16}-1", 0, 9)])]
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(encode_manifest(Seals(b""), name, 1, path))
        assert look_up(index, [key]) == [MISS]
    finally:
        index.close()


def test_a_reset_clears_and_changes_the_namespace_in_one_step(tmp_path: Path) -> None:
    """Tasks that the loop runs before it belong to the old epoch."""
    index = open_index(depot_at(tmp_path), FINGERPRINT, 1, patient(), time.monotonic, clears_all=True)
    try:
        client: Any = index._client
        old = client.namespace
        seen: list[str] = []
        forget = client._forget
        held, free = threading.Event(), threading.Event()

        def forgets() -> None:
            seen.append(client._epochs.manifest_namespace)
            forget()

        def waits() -> None:
            held.set()
            free.wait(TIMEOUT_S)
            seen.append(client._epochs.manifest_namespace)

        client._forget = forgets
        client._loop.post(waits)
        assert held.wait(TIMEOUT_S)
        index.clear()
        free.set()
        patience.wait_until(lambda: len(seen) == 2, "the loop has cleared")
        assert seen == [old, client.namespace] and old != client.namespace
    finally:
        index.close()


def test_a_store_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(TierConfigurationError, match="url"):
        index_at(tmp_path / "file")


def test_promotions_and_cascades_count_their_bytes(tmp_path: Path, engines: list[Engine]) -> None:
    keys = path_of(4)
    first = Engine(depot_at(tmp_path))
    first.store(keys, chunks_of(keys))
    assert first.stack.take_counts().tiers["object"].cascaded_bytes == 4 * CHUNK_BYTES
    first.close()
    engines.append(Engine(depot_at(tmp_path)))
    engines[0].look_up(keys)
    engines[0].load(keys)
    counts = engines[0].stack.take_counts().tiers["object"]
    assert counts.promoted_bytes == 4 * CHUNK_BYTES
    assert not counts.failures
    assert Direction.PROMOTE not in counts.breaker_openings
