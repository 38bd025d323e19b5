"""Packs that a store has lost, by a sweep or by their age, while engines still know their places."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import patience
import pytest
from object_depots import depot_at, manifests, packs, patient
from object_engines import Engine, chunks_of, path_of, wait_until_named

from hybridkv.planner import LookupResult
from hybridkv.tiers import Slot
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.manifests.pack_checks import MAX_CHECKING, REMEMBERED_S, PackChecks
from hybridkv.tiers.object.manifests.writer import MAX_AGAIN, ManifestWriter
from hybridkv.tiers.object.names import manifest_name, pack_name, prefix_of
from hybridkv.tiers.object.packs import PackPlace, Stored
from hybridkv.tiers.object.sweeping import Sweep, SweepRules

HIT, MISS = LookupResult.HIT, LookupResult.MISS
FOUND_S = 600.0
PATH = path_of(16)
PREFIX = PATH[:12]


class Fleet:
    """Engines of one store, with a clock that a test moves."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ahead_s = 0.0
        self._engines: list[Engine] = []

    def start(self, **chosen: Any) -> Engine:
        options = patient(**{"found_s": FOUND_S, "missing_s": 1e-6} | chosen)
        engine = Engine(depot_at(self._directory), options=options, clock=lambda: time.monotonic() + self._ahead_s)
        self._engines.append(engine)
        return engine

    def expire(self) -> None:
        """Let the known chunks of all engines expire."""
        self._ahead_s += FOUND_S

    def restores(self, chunks: dict[bytes, bytes]) -> bool:
        """True if a new engine loads all chunks of the path at the first attempt."""
        engine, keys = self.start(), list(chunks)
        return engine.look_up(keys) == [HIT] * len(keys) and engine.load(keys) == list(chunks.values())

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def store(engine: Engine, chunks: dict[bytes, bytes], first: int = 0) -> None:
    """Store the chunks of the path from `first` on."""
    for at, key in enumerate(PATH[: len(chunks)]):
        if at < first:
            continue
        slot = engine.stack.reserve(key, len(chunks[key]))
        assert isinstance(slot, Slot)
        [arena] = engine.arenas
        for view in arena.views(slot):
            view[:] = chunks[key]
        assert arena.seal_all([(key, slot)]) == [None]
        engine.stack.commit(key, tuple(PATH[max(0, at - 1) : at]))
    engine.run()


def forget(engine: Engine, keys: list[bytes]) -> None:
    """Drop chunks from host memory, as evictions do."""
    for key in keys:
        engine.primary.invalidate(key)


def prefix_of_chunks(chunks: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {key: chunks[key] for key in PREFIX}


def sweep_all(directory: Path) -> None:
    """Delete all packs and manifests, as a sweep after a night without use."""
    Sweep(DirectoryStore(str(directory), False), SweepRules(unused_s=4000.0, is_dry=False), time.time() + 5000.0).run()
    assert not packs(directory) and not manifests(directory)


@pytest.mark.parametrize("is_own", [True, False], ids=["stored here", "read"])
def test_a_new_manifest_lists_the_place_that_was_just_read(tmp_path: Path, fleet: Fleet, is_own: bool) -> None:
    """The engine knows an older place, which was swept. Another engine has stored the prefix again."""
    chunks = chunks_of(PATH)
    first = fleet.start()
    storing = first if is_own else fleet.start()
    store(storing, prefix_of_chunks(chunks))
    wait_until_named(storing, tmp_path, PREFIX)
    if not is_own:
        assert first.look_up(PREFIX) == [HIT] * 12
    fleet.expire()
    sweep_all(tmp_path)
    other = fleet.start()
    store(other, prefix_of_chunks(chunks))
    wait_until_named(other, tmp_path, PREFIX)
    forget(first, PREFIX)
    assert first.look_up(PREFIX) == [HIT] * 12
    assert first.load(PREFIX) == [chunks[key] for key in PREFIX]
    store(first, chunks, 12)
    wait_until_named(first, tmp_path, PATH)
    assert fleet.restores(chunks)


def test_a_manifest_lists_no_pack_that_is_gone(tmp_path: Path, fleet: Fleet) -> None:
    """The prefix is in host memory, and the store has lost it. The extension is stored."""
    chunks = chunks_of(PATH)
    first = fleet.start()
    store(first, prefix_of_chunks(chunks))
    wait_until_named(first, tmp_path, PREFIX)
    fleet.expire()
    sweep_all(tmp_path)
    store(first, chunks, 12)
    second = fleet.start()
    first.close()
    assert second.look_up(PATH) == [MISS] * 16
    store(second, chunks)
    wait_until_named(second, tmp_path, PATH)
    assert fleet.restores(chunks)


def test_a_manifest_of_a_missing_pack_is_replaced_by_an_engine_that_never_read_it(tmp_path: Path, fleet: Fleet) -> None:
    """Its manifest points are gone too, so the lookup of the engine found no manifest."""
    chunks = chunks_of(PATH)
    first = fleet.start()
    store(first, prefix_of_chunks(chunks))
    wait_until_named(first, tmp_path, PREFIX)
    [lost] = packs(tmp_path)
    store(first, chunks, 12)
    wait_until_named(first, tmp_path, PATH)
    first.close()
    second = fleet.start()
    shutil.rmtree(lost.parent)
    store(second, chunks)
    second.close()
    assert fleet.restores(chunks)


@pytest.mark.parametrize("is_swept", [True, False], ids=["swept", "kept"])
def test_a_prefix_in_host_memory_is_stored_again_after_the_store_lost_it(
    tmp_path: Path, fleet: Fleet, is_swept: bool
) -> None:
    """No request looks the prefix up in the store, because all find it in host memory."""
    chunks = prefix_of_chunks(chunks_of(PATH))
    engine = fleet.start()
    store(engine, chunks)
    wait_until_named(engine, tmp_path, PREFIX)
    before = packs(tmp_path)
    fleet.expire()
    if is_swept:
        sweep_all(tmp_path)
    extends = [tuple(PREFIX[max(0, at - 1) : at]) for at in range(12)]
    engine.stack.touch(PREFIX[::-1], extends[::-1])
    for key, extended in zip(PREFIX, extends, strict=True):
        if engine.stack.missing_in_cascading(key):
            engine.stack.cascade(key, extended)

    def is_held() -> bool:
        engine.step()
        return all(engine.index.lookup(key) is HIT for key in PREFIX)

    patience.wait_until(is_held, "the prefix is found or stored")
    engine.run()
    assert (packs(tmp_path) == before) is not is_swept
    wait_until_named(engine, tmp_path, PREFIX)
    assert fleet.restores(chunks)


def test_longer_manifests_are_replaced_after_an_engine_stores_its_own_lost_chunks_again(
    tmp_path: Path, fleet: Fleet
) -> None:
    chunks = chunks_of(PATH)
    engine = fleet.start()
    store(engine, prefix_of_chunks(chunks))
    wait_until_named(engine, tmp_path, PREFIX)
    [lost] = packs(tmp_path)
    store(engine, chunks, 12)
    wait_until_named(engine, tmp_path, PATH)
    shutil.rmtree(lost.parent)
    forget(engine, PATH)
    assert engine.load(PATH) is None
    forget(engine, PATH)
    store(engine, prefix_of_chunks(chunks))
    engine.close()
    assert fleet.restores(chunks)


def test_a_place_that_this_engine_stored_is_not_replaced_by_an_older_manifest(tmp_path: Path, fleet: Fleet) -> None:
    chunks = chunks_of(PATH)
    first = fleet.start()
    store(first, prefix_of_chunks(chunks))
    wait_until_named(first, tmp_path, PREFIX)
    [lost] = packs(tmp_path)
    store(first, {key: chunks[key] for key in PATH[:14]}, len(PREFIX))
    wait_until_named(first, tmp_path, PATH[:14])
    first.close()
    shutil.rmtree(lost.parent)
    kept = {manifest_name("", prefix_of(key))[3:] for key in PATH[12:14]}
    for manifest in manifests(tmp_path):
        if manifest.name not in kept:
            manifest.unlink()
    second = fleet.start()
    store(second, prefix_of_chunks(chunks))
    wait_until_named(second, tmp_path, PREFIX)
    assert second.look_up(PATH[:14]) == [HIT] * 14
    assert second.load(PATH[:14]) == [chunks[key] for key in PATH[:14]]
    store(second, chunks, 14)
    second.close()
    assert fleet.restores(chunks)


class FailingStore:
    """A store in which each read raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.num_reads = 0

    async def get_async(self, name: str, options: Any = None) -> None:
        self.num_reads += 1
        await asyncio.sleep(0)
        raise self._error


@pytest.mark.parametrize("error", [OSError("failed"), FileNotFoundError("missing")])
def test_checks_of_many_manifests_do_not_repeat_a_failed_or_missing_read(error: Exception) -> None:
    store, now_s = FailingStore(error), 0.0
    checks = PackChecks(store, 1, FOUND_S, lambda: now_s)  # type: ignore[arg-type]
    names = [f"pack-{number}" for number in range(20)]
    missing = set(names) if isinstance(error, FileNotFoundError) else set()
    num_reads = 2 * len(names) if missing else MAX_CHECKING

    async def check() -> None:
        assert await asyncio.gather(*(checks.missing(names) for _ in range(16))) == [missing] * 16

    async def check_twice() -> None:
        nonlocal now_s
        await check()
        assert store.num_reads <= num_reads
        now_s += REMEMBERED_S
        await check()
        assert num_reads < store.num_reads <= 2 * num_reads

    asyncio.run(check_twice())


def test_one_store_writes_a_limited_number_of_the_manifests_through_a_lost_prefix() -> None:
    epochs, loop = MagicMock(manifest_namespace=""), MagicMock()
    loop.spawn.side_effect = lambda work, is_write: work.close()
    writer = ManifestWriter(MagicMock(), MagicMock(), MagicMock(), MagicMock(), epochs, loop)
    root, *ends = (PATH[0][:16] + number.to_bytes(32, "little") for number in range(MAX_AGAIN + 100))
    place = PackPlace(pack_name("", "pack"), 0, 9)
    writer.publish([Stored(root, place, []), *(Stored(end, place, [root]) for end in ends)])
    writer.retract(root, place)
    loop.spawn.reset_mock()
    writer.publish([Stored(root, place, [])])
    assert loop.spawn.call_count == MAX_AGAIN + 1
    writer.publish([])
    assert loop.spawn.call_count == len(ends) + 1
