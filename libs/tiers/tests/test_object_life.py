"""Lifetime of objects in a store that deletes them after a time: used ones stay, unused ones expire."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patience
import pytest
from object_depots import FINGERPRINT, depot_at, manifests, packs, patient
from object_engines import CHUNK_BYTES, Engine, chunks_of, last_is_named, path_of, wait_until_named
from obstore.store import MemoryStore

from hybridkv.planner import LookupResult
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.object import ObjectOptions, keep_alive, open_index
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.format.manifest import ManifestNode, ManifestPart
from hybridkv.tiers.object.names import manifest_name, prefix_of

HIT, MISS = LookupResult.HIT, LookupResult.MISS
TO_LIVE_S = 1000.0
YOUNG_S, MIDDLE_S, OLD_S = 100.0, 400.0, 600.0
"""Ages before a quarter of the lifetime, after it, and in the second half."""
NUM_KEYS = 20


def options(**chosen: Any) -> ObjectOptions:
    return patient(**{"time_to_live_s": TO_LIVE_S, "renewals_per_s": 10_000.0, "missing_s": 0.01} | chosen)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def stored(directory: Path) -> tuple[list[bytes], dict[bytes, bytes]]:
    keys = path_of(NUM_KEYS)
    chunks = chunks_of(keys)
    engine = Engine(depot_at(directory))
    engine.store(keys, chunks)
    engine.close()
    return keys, chunks


def objects(directory: Path) -> list[Path]:
    return [*manifests(directory), *packs(directory)]


def make_old(paths: list[Path], age_s: float) -> dict[Path, int]:
    """Set the time of the last write to `age_s` ago."""
    at_s = time.time() - age_s
    for path in paths:
        os.utime(path, (at_s, at_s))
    return modified(paths)


def modified(paths: list[Path]) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in paths}


def start(directory: Path, engines: list[Engine], chosen: ObjectOptions | None = None) -> Engine:
    engines.append(Engine(depot_at(directory), options=chosen or options()))
    return engines[-1]


def wait_for_renewals(engine: Engine) -> None:
    """Wait until no renewal is running."""
    client: Any = engine.index._client
    patience.wait_until(
        lambda: client._renewer._renewal_task is None or client._renewer._renewal_task.done(), "no renewal is running"
    )


def test_found_objects_in_the_second_half_of_their_life_are_renewed(tmp_path: Path, engines: list[Engine]) -> None:
    keys, chunks = stored(tmp_path)
    old = make_old(objects(tmp_path), OLD_S)
    assert len(manifests(tmp_path)) > 1, "manifests at manifest points and at the end"
    engine = start(tmp_path, engines)
    assert engine.look_up(keys) == [HIT] * NUM_KEYS
    patience.wait_until(lambda: all(now > old[path] for path, now in modified(list(old)).items()), "all are renewed")
    assert engine.load(keys) == [chunks[key] for key in keys]
    assert {path.name for path in tmp_path.glob("*/*")} <= {"m", "p", "epoch", "proof", "renewal"}


@pytest.mark.parametrize(("age_s", "chosen"), [(YOUNG_S, {}), (MIDDLE_S, {}), (OLD_S, {"time_to_live_s": None})])
def test_young_or_permanent_objects_are_not_renewed(
    tmp_path: Path, engines: list[Engine], age_s: float, chosen: dict[str, Any]
) -> None:
    keys, _ = stored(tmp_path)
    old = make_old(objects(tmp_path), age_s)
    engine = start(tmp_path, engines, options(**chosen))
    assert engine.look_up(keys) == [HIT] * NUM_KEYS
    wait_for_renewals(engine)
    assert modified(list(old)) == old


def test_chunks_served_from_host_memory_are_renewed(tmp_path: Path, engines: list[Engine]) -> None:
    """The hottest prefixes are in host memory of every engine: no lookup finds them, and a new engine needs them."""
    keys = path_of(NUM_KEYS)
    engine = start(tmp_path, engines)
    engine.store(keys, chunks_of(keys))
    wait_until_named(engine, tmp_path, keys)
    wait_for_renewals(engine)
    client: Any = engine.index._client
    for known in client._renewer._keep_alive._manifests.values():
        known.due_s = 0.0  # as after half of its life
    client._renewer._keep_alive._packs.clear()
    old = make_old(objects(tmp_path), OLD_S)
    engine.stack.touch(keys[::-1])
    patience.wait_until(lambda: all(now > old[path] for path, now in modified(list(old)).items()), "all are renewed")


def test_a_new_manifest_renews_the_older_packs_that_it_lists(tmp_path: Path, engines: list[Engine]) -> None:
    keys, chunks = stored(tmp_path)
    before, named = packs(tmp_path), manifests(tmp_path)
    make_old(objects(tmp_path), MIDDLE_S)
    old = modified(before)
    engine = start(tmp_path, engines)
    assert engine.look_up(keys) == [HIT] * NUM_KEYS
    longer = [*keys, *(key for key in path_of(NUM_KEYS + 10) if key not in keys)]
    engine.store(longer, chunks | chunks_of(longer[NUM_KEYS:]))
    patience.wait_until(lambda: len(manifests(tmp_path)) > len(named), "the manifest of the longer path is written")
    patience.wait_until(lambda: all(now > old[path] for path, now in modified(before).items()), "all are renewed")


def test_a_manifest_of_a_missing_pack_is_not_renewed(tmp_path: Path, engines: list[Engine]) -> None:
    keys, _ = stored(tmp_path)
    for pack in packs(tmp_path):
        pack.unlink()
    old = make_old(manifests(tmp_path), OLD_S)
    engine = start(tmp_path, engines)
    engine.look_up(keys)
    wait_for_renewals(engine)
    assert modified(list(old)) == old


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0])
def test_a_clock_an_hour_off_renews_only_old_objects(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    keys, _ = stored(tmp_path)
    paths = objects(tmp_path)
    half = len(manifests(tmp_path)) // 2
    young, old = make_old(paths[:half], YOUNG_S), make_old(paths[half:], OLD_S)
    real = time.time
    monkeypatch.setattr("hybridkv.tiers.object.keep_alive.time.time", lambda: real() + skew_s)
    engine = start(tmp_path, engines)
    assert engine.look_up(keys) == [HIT] * NUM_KEYS
    patience.wait_until(lambda: all(now > old[path] for path, now in modified(list(old)).items()), "all are renewed")
    wait_for_renewals(engine)
    assert modified(list(young)) == young


def test_renewals_keep_to_their_rate(tmp_path: Path, engines: list[Engine]) -> None:
    keys, _ = stored(tmp_path)
    paths = objects(tmp_path)
    old = make_old(paths, OLD_S)
    engine = start(tmp_path, engines, options(renewals_per_s=0.4))
    began_s = time.monotonic()
    assert engine.look_up(keys) == [HIT] * NUM_KEYS
    patience.wait_until(lambda: all(now > old[path] for path, now in modified(list(old)).items()), "all are renewed")
    assert time.monotonic() - began_s >= 2 * (len(paths) - 1) / 20.0, "two requests each"


def test_renewals_beyond_the_queue_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "MAX_WAITING", 2)
    made: Any = keep_alive.KeepAlive
    kept = made(None, "c", 1, keep_alive.RenewalPace(TO_LIVE_S, 1.0), None, None, time.monotonic)
    for prefix in (b"a", b"b", b"c"):
        kept.found(prefix, f"n/m/{prefix.decode()}")
    kept.use([b"a", b"b", b"c", b"a", b"unknown"])
    assert kept.counts.dropped == 1


class TimedStore:
    """Store that deletes objects after a time, by the test's clock. Its objects have no bytes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.written_s: dict[str, float] = {}

    async def head_async(self, name: str) -> dict[str, datetime]:
        if self.now_s - self.written_s.get(name, -TO_LIVE_S) >= TO_LIVE_S:
            raise FileNotFoundError(name)
        return {"last_modified": datetime.fromtimestamp(self.written_s[name], UTC)}

    async def put_async(self, name: str, data: bytes, **more: Any) -> None:
        self.written_s[name] = self.now_s

    async def copy_async(self, name: str, other: str) -> None:
        await self.head_async(name)
        self.written_s[other] = self.now_s

    async def delete_async(self, names: list[str]) -> None:
        for name in names:
            del self.written_s[name]


@pytest.mark.parametrize("is_new", [True, False], ids=["written here", "found"])
@pytest.mark.parametrize("first_use", [0.02, 0.2, 0.249, 0.26, 0.499])
def test_a_prefix_used_once_per_half_life_keeps_its_packs(
    monkeypatch: pytest.MonkeyPatch, is_new: bool, first_use: float
) -> None:
    """The packs are almost a quarter of the lifetime old when their manifest is written."""
    store: Any = TimedStore()
    monkeypatch.setattr(keep_alive, "time", SimpleNamespace(time=lambda: store.now_s, monotonic=lambda: store.now_s))

    async def read(prefix: bytes, name: str) -> tuple[list[ManifestNode], bytes]:
        await store.head_async(name)
        return [ManifestNode(b"p", [ManifestPart(b"t", "pack", 0, 1)])], b"data"

    async def clock_ahead() -> float:
        return 0.0

    async def lives() -> None:
        pace = keep_alive.RenewalPace(TO_LIVE_S, 1e9)
        kept = keep_alive.KeepAlive(store, "c", 1, pace, read, clock_ahead, lambda: store.now_s)
        store.written_s = {"pack/0": 0.0, "m": 0.24 * TO_LIVE_S}
        store.now_s = 0.24 * TO_LIVE_S
        (kept.written if is_new else kept.found)(b"p", "m")
        await kept.renew_waiting()
        store.now_s += first_use * TO_LIVE_S
        for _ in range(6):
            kept.use([b"p"])
            await kept.renew_waiting()
            assert set(store.written_s) == {"pack/0", "m"} and kept.counts.failed == 0
            for name in store.written_s:
                await store.head_async(name)
            store.now_s += 0.499 * TO_LIVE_S

    asyncio.run(lives())
    assert store.now_s > 3 * TO_LIVE_S


def test_a_manifest_replaced_by_another_engine_is_not_overwritten() -> None:
    """Checks of its packs may take minutes after it was read."""
    store: Any = MemoryStore()
    store.put("m", b"old")
    store.put("pack/0", b"chunks")
    reads: list[bytes] = []

    async def read(prefix: bytes, name: str) -> tuple[list[ManifestNode], bytes]:
        data = bytes(store.get(name).bytes())
        reads.append(data)
        store.put(name, b"new")
        return [ManifestNode(b"p", [ManifestPart(b"t", "pack", 0, 1)])], data

    async def clock_ahead() -> float:
        return TO_LIVE_S

    kept = keep_alive.KeepAlive(
        store, "c", 1, keep_alive.RenewalPace(TO_LIVE_S, 1e9), read, clock_ahead, time.monotonic
    )
    kept.found(b"p", "m")
    kept.use([b"p"])
    asyncio.run(kept.renew_waiting())
    assert reads[0] == b"old" and bytes(store.get("m").bytes()) == b"new"
    assert kept.counts == (1, 0, 0), "only the pack"
    kept.use([b"p"])
    assert kept.has_waiting, "the packs of the new manifest are checked at the next use"


def test_a_found_chunk_is_cached_for_a_quarter_of_its_life(tmp_path: Path, engines: list[Engine]) -> None:
    engine = start(tmp_path, engines, options(time_to_live_s=40.0))
    assert engine.index._found_s == 10.0


def test_an_invalid_time_to_live_is_refused() -> None:
    with pytest.raises(TierConfigurationError) as refused:
        ObjectOptions(time_to_live_s=0.0)
    assert refused.value.field == "time_to_live_s"


def test_two_hosts_storing_one_path_at_once_count_duplicates(tmp_path: Path, engines: list[Engine]) -> None:
    """Neither finds it before its store, and both write under one prefix."""
    keys = path_of(NUM_KEYS)
    chunks = chunks_of(keys)
    first, second = start(tmp_path, engines), start(tmp_path, engines)
    first.store(keys, chunks)
    wait_until_named(first, tmp_path, keys)
    second.store(keys, chunks)
    counts: list[int] = []

    def all_are_counted() -> bool:
        counts.append(second.index.take_store_counts().duplicates)
        return sum(counts) == NUM_KEYS

    patience.wait_until(all_are_counted, "all are counted")
    assert first.index.take_store_counts().duplicates == 0
    reader = start(tmp_path, engines)
    assert reader.look_up(keys) == [HIT] * NUM_KEYS
    assert reader.load(keys) == [chunks[key] for key in keys]


def test_a_second_host_does_not_store_existing_chunks(tmp_path: Path, engines: list[Engine]) -> None:
    """It computed the prompt before the first one had stored it, and its last lookup is too old."""
    keys, chunks = stored(tmp_path)
    before = packs(tmp_path)
    engine = start(tmp_path, engines)
    more = [*keys, *(key for key in path_of(NUM_KEYS + 3) if key not in keys)]
    engine.stack.touch(more[::-1], [*((key,) for key in more[-2::-1]), ()])
    engine.begin_store(more, chunks | chunks_of(more[NUM_KEYS:]))

    def is_named() -> bool:
        engine.step()
        return last_is_named(tmp_path, more)

    patience.wait_until(is_named, "the manifest of the new end is written")
    new = set(packs(tmp_path)) - set(before)
    assert sum(path.stat().st_size for path in new) < 4 * (CHUNK_BYTES + 200), "only the three new chunks"
    assert engine.index.take_store_counts().duplicates == 0


@pytest.mark.parametrize(("fresh_s", "num_duplicates"), [(0.0, 0), (3600.0, NUM_KEYS)])
def test_an_old_answer_that_a_path_is_missing_is_not_used_for_a_store(
    fresh_s: float, num_duplicates: int, tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control uses the old answer, and stores everything a second time."""
    monkeypatch.setattr("hybridkv.tiers.object.store_checks.FRESH_ANSWER_S", fresh_s)
    keys = path_of(NUM_KEYS)
    engine = start(tmp_path, engines, options(missing_s=3600.0))
    engine.stack.touch(keys[::-1], [*((key,) for key in keys[-2::-1]), ()])
    assert engine.look_up(keys) == [MISS] * NUM_KEYS
    _, chunks = stored(tmp_path)
    before = len(packs(tmp_path))
    engine.begin_store(keys, chunks)
    counts: list[int] = []

    def is_over() -> bool:
        engine.step()
        counts.append(engine.index.take_store_counts().duplicates)
        is_settled = engine.index.lookup(keys[-1]) is HIT and not engine.stack.has_live_moves()
        return is_settled and sum(counts) == num_duplicates

    patience.wait_until(is_over, "the path is found or stored")
    assert (len(packs(tmp_path)) > before) == bool(num_duplicates)


def test_a_reader_of_an_expired_pack_gets_no_wrong_byte(tmp_path: Path, engines: list[Engine]) -> None:
    keys, chunks = stored(tmp_path)
    engine = start(tmp_path, engines)
    assert engine.look_up(keys) == [HIT] * NUM_KEYS
    for path in objects(tmp_path):
        path.unlink()
    assert engine.load(keys) is None
    assert engine.look_up(keys) == [LookupResult.MISS] * NUM_KEYS
    engine.primary.clear()
    engine.store(keys, chunks)
    patience.wait_until(lambda: last_is_named(tmp_path, keys), "the path is stored again")


def test_a_failed_renewal_is_counted_and_retried(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, chunks = stored(tmp_path)
    old = make_old(objects(tmp_path), OLD_S)
    real, is_ill = DirectoryStore.renew, True

    def renew(self: DirectoryStore, path: str) -> None:
        if is_ill:
            raise OSError(5, "Input/output error")
        real(self, path)

    monkeypatch.setattr(DirectoryStore, "renew", renew)
    monkeypatch.setattr(keep_alive, "RETRY_S", 0.01)
    engine = start(tmp_path, engines)
    assert engine.look_up(keys) == [HIT] * NUM_KEYS
    patience.wait_until(lambda: engine.index.take_store_counts().renewals_failed > 0, "a failure is counted")
    assert engine.load(keys) == [chunks[key] for key in keys]
    is_ill = False
    time.sleep(0.05)
    other = start(tmp_path, engines)
    assert other.look_up(keys) == [HIT] * NUM_KEYS
    patience.wait_until(lambda: all(now > old[path] for path, now in modified(list(old)).items()), "all are renewed")


def test_a_manifest_of_an_earlier_epoch_is_not_renewed(tmp_path: Path, engines: list[Engine]) -> None:
    """Its write ended after another engine had begun a new epoch."""
    engine = Engine(depot_at(tmp_path), options=options(epoch_check_s=0.02))
    engines.append(engine)
    client: Any = engine.index._client
    patience.wait_until(lambda: client._epochs.manifest_namespace is not None, "the store is reached")
    earlier = client._epochs.manifest_namespace
    resetting = open_index(depot_at(tmp_path), FINGERPRINT, 1, patient(), time.monotonic, clears_all=True)
    resetting.clear()
    resetting.close()
    patience.wait_until(lambda: client._epochs.manifest_namespace != earlier, "the new epoch is noticed")
    prefix = prefix_of(path_of(1)[0])
    client._renewer.on_written(prefix, manifest_name(earlier, prefix))
    assert not client._renewer._keep_alive._manifests
