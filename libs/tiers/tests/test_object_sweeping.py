"""Sweeps delete objects of a store that is too large or has leftovers, while engines use it."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import tracemalloc
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import patience
import pytest
from object_depots import depot_at, manifests, num_bytes_of, packs, patient
from object_engines import CHUNK_BYTES, Engine, chunks_of, path_of
from obstore.store import MemoryStore

from hybridkv.planner import LookupResult
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.files.directory import Directory
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.object import ObjectOptions, StoreLocation, open_index
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.format.manifest import ManifestNode, ManifestPart, encode_manifest
from hybridkv.tiers.object.format.seals import SEAL_BYTES, Seals
from hybridkv.tiers.object.inspection import ObjectVerifier
from hybridkv.tiers.object.names import ObjectKind, parse_name
from hybridkv.tiers.object.store import clock_ahead_s
from hybridkv.tiers.object.sweeping import (
    CapacitySweeper,
    NameFilter,
    Sweep,
    SweepReason,
    SweepReport,
    SweepRules,
    sweep_lock,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
HOUR_S = 3600.0
NUM_KEYS = 20
OPTIONS = patient(missing_s=0.01)


def stored(directory: Path, seed: bytes, age_s: float = 0.0) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Path that an engine stored `age_s` ago."""
    before = {*directory.glob("*/*/*"), *packs(directory)}
    keys = path_of(NUM_KEYS, seed)
    chunks = chunks_of(keys)
    engine = Engine(depot_at(directory), options=OPTIONS)
    engine.store(keys, chunks)
    engine.close()
    at_s = time.time() - age_s
    for path in {*directory.glob("*/*/*"), *packs(directory)} - before:
        os.utime(path, (at_s, at_s))
    return keys, chunks


def sweep(directory: Path, **rules: Any) -> SweepReport:
    rules = {"is_dry": False} | rules
    return Sweep(DirectoryStore(str(directory), True), SweepRules(**rules), time.time()).run()


def total_bytes(directory: Path) -> int:
    return num_bytes_of([*manifests(directory), *packs(directory)])


def found(directory: Path, keys: list[bytes], chunks: dict[bytes, bytes]) -> int:
    """Number of leading keys that a new engine restores."""
    engine = Engine(depot_at(directory), options=OPTIONS)
    try:
        answers = engine.look_up(keys)
        number = answers.index(MISS) if MISS in answers else len(answers)
        if number:
            assert engine.load(keys[:number]) == [chunks[key] for key in keys[:number]]
        return number
    finally:
        engine.close()


@pytest.fixture
def depot(tmp_path: Path) -> Path:
    return tmp_path / "fleet"


# Bounds.


def test_the_least_recently_used_path_is_deleted_and_the_rest_stays_whole(depot: Path) -> None:
    paths = [stored(depot, bytes([number + 1]), age_s) for number, age_s in enumerate((9000.0, 6000.0, 3000.0))]
    capacity = int(total_bytes(depot) * 0.75)
    report = sweep(depot, capacity_bytes=capacity)
    assert total_bytes(depot) <= capacity
    assert report.reasons.keys() == {SweepReason.LEAST_RECENTLY_USED}
    assert found(depot, *paths[0]) == 0
    assert [found(depot, *path) for path in paths[1:]] == [NUM_KEYS] * 2


def test_a_store_within_its_capacity_keeps_everything(depot: Path) -> None:
    path = stored(depot, b"a", 3 * HOUR_S)
    before = total_bytes(depot)
    assert sweep(depot, capacity_bytes=before).num_deleted == 0
    assert total_bytes(depot) == before
    assert found(depot, *path) == NUM_KEYS


def test_a_burst_of_equal_age_is_cut_only_to_the_capacity(depot: Path) -> None:
    """An order by coarse ages would delete everything."""
    for number in range(4):
        stored(depot, bytes([number + 1]), 5000.0)
        for path in (*manifests(depot), *packs(depot)):
            moved_s = path.stat().st_mtime + 0.001
            os.utime(path, (moved_s, moved_s))
    before = total_bytes(depot)
    sweep(depot, capacity_bytes=before // 2)
    assert 0 < total_bytes(depot) <= before // 2


def test_objects_with_equal_times_are_deleted_together(depot: Path) -> None:
    """A file system with times of one second, or a restored copy."""
    stored(depot, b"a")
    stored(depot, b"b")
    at_s = time.time() - 5000.0
    for path in (*manifests(depot), *packs(depot)):
        os.utime(path, (at_s, at_s))
    newer = stored(depot, b"c", 1000.0)
    capacity = int(total_bytes(depot) * 0.95)
    sweep(depot, capacity_bytes=capacity)
    assert total_bytes(depot) <= capacity
    assert found(depot, *newer) == NUM_KEYS


@pytest.mark.parametrize("older_rank", [0, 1])
@pytest.mark.parametrize("is_whole", [True, False], ids=["deleted now", "deleted before"])
def test_a_manifest_goes_with_the_object_of_any_rank(depot: Path, older_rank: int, is_whole: bool) -> None:
    """The age limit lies between the objects of two ranks. The other rank's object is unlisted then."""
    keys = path_of(NUM_KEYS)
    engine = Engine(depot_at(depot), 2, OPTIONS)
    engine.store(keys, chunks_of(keys))
    engine.close()
    at_s = time.time() - 5000.0
    for path in manifests(depot):
        os.utime(path, (at_s + 1.0, at_s + 1.0))
    for path in packs(depot):
        os.utime(path, (at_s, at_s) if path.name == str(older_rank) else (at_s + 0.01, at_s + 0.01))
    if is_whole:
        sweep(depot, capacity_bytes=total_bytes(depot) - 1)
    else:
        for path in packs(depot):
            if path.name == str(older_rank):
                path.unlink()
        sweep(depot)
    assert not packs(depot) and not manifests(depot)


def test_paths_unused_for_long_are_deleted(depot: Path) -> None:
    old, new = stored(depot, b"a", 50 * HOUR_S), stored(depot, b"b", 2 * HOUR_S)
    sweep(depot, unused_s=24 * HOUR_S)
    assert found(depot, *old) == 0
    assert found(depot, *new) == NUM_KEYS


def test_a_directory_stays_within_its_capacity_and_keeps_used_paths(depot: Path) -> None:
    options = patient(missing_s=0.01, capacity_bytes=4 * NUM_KEYS * CHUNK_BYTES, sweep_s=0.05)
    used, unused = stored(depot, b"u", 900.0), stored(depot, b"n", 800.0)
    engine = Engine(depot_at(depot), options=options)
    try:
        old = {path: path.stat().st_mtime for path in manifests(depot)}
        assert engine.look_up(used[0]) == [HIT] * NUM_KEYS
        patience.wait_until(
            lambda: any(path.exists() and path.stat().st_mtime > at + 500 for path, at in old.items()),
            "a use is renewed",
        )
        client: Any = engine.index._client
        patience.wait_until(client._renewer._renewal_task.done, "no renewal is running")
        for number in range(4):
            keys = path_of(NUM_KEYS, bytes([200 + number]))
            engine.store(keys, chunks_of(keys))
        patience.wait_until(lambda: total_bytes(depot) <= (options.capacity_bytes or 0), "the capacity holds")
        patience.wait_until(lambda: found(depot, *unused) == 0, "the least recently used path is deleted")
    finally:
        engine.close()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to files fail with ENOSPC."""

    def is_full(self: FileIO, fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileIO, "pwritev", is_full)


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_full_disk_is_swept(depot: Path, request: pytest.FixtureRequest, has_lock: bool) -> None:
    stored(depot, b"a", 900.0)
    if has_lock:
        (depot / "sweep.lock").touch()
        age(depot / "sweep.lock", 5 * HOUR_S)
    request.getfixturevalue("full_disk")
    store = DirectoryStore(str(depot), True)
    assert abs(clock_ahead_s(store, "doctor")) < 2.0
    report = CapacitySweeper(store, 1, lambda: clock_ahead_s(store, "doctor"), lambda: False).sweep()
    assert report is not None and report.num_deleted > 0
    assert not packs(depot)


def test_an_engine_that_starts_on_a_full_disk_sweeps_it(depot: Path, request: pytest.FixtureRequest) -> None:
    stored(depot, b"a", 900.0)
    request.getfixturevalue("full_disk")
    options = patient(capacity_bytes=1, sweep_s=0.05, first_retry_s=0.02)
    index = open_index(depot_at(depot), bytes(32), 1, options, time.monotonic)
    try:
        client: Any = index._client
        assert not client.takes_objects
        patience.wait_until(lambda: not packs(depot), "all packs are deleted")
    finally:
        index.close()


def test_a_server_accepts_no_capacity() -> None:
    settings = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b"}
    location = StoreLocation("s3://bucket/prefix", settings, b"secret")
    with pytest.raises(TierConfigurationError) as refused:
        open_index(location, bytes(32), 1, patient(capacity_bytes=1 << 30), time.monotonic)
    assert refused.value.field == "capacity_bytes"


# Leftovers.


def age(path: Path, age_s: float) -> None:
    at_s = time.time() - age_s
    os.utime(path, (at_s, at_s))


def leftovers(depot: Path, age_s: float) -> dict[SweepReason, list[Path]]:
    """Leftovers of kills at any moment, `age_s` ago. The manifests of one path list missing packs."""
    for seed in (b"x", b"y"):
        stored(depot, seed, age_s)
    namespace = packs(depot)[0].parts[-4]
    listed = manifests(depot)
    gone = sorted(packs(depot), key=lambda path: int(path.parts[-2].partition("-")[2]))[0]
    gone.unlink()
    unlisted = depot / namespace / "p" / f"{uuid.uuid4().hex}-1" / "0"
    short = depot / namespace / "proof" / uuid.uuid4().hex
    half = depot / namespace / "renewal" / uuid.uuid4().hex
    temporary = depot / namespace / "m" / f"{listed[0].name}.{uuid.uuid4().hex}.new"
    in_pack = depot / namespace / "p" / f"{uuid.uuid4().hex}-7" / f"0.{uuid.uuid4().hex}.new"
    for path in (unlisted, short, half, temporary, in_pack):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left")
        age(path, age_s)
        age(path.parent, age_s)
    unreadable = depot / namespace / "m" / ("ab" * 20)
    unreadable.write_bytes(b"x" * 100)
    age(unreadable, age_s)
    return {
        SweepReason.UNLISTED: [unlisted],
        SweepReason.SHORT_LIVED: [short, half],
        SweepReason.TEMPORARY: [temporary, in_pack],
        SweepReason.UNREADABLE: [unreadable],
    }


def test_only_leftovers_of_kills_are_deleted(depot: Path) -> None:
    left = leftovers(depot, 2 * HOUR_S)
    whole = stored(depot, b"w", 2 * HOUR_S)
    empty = depot / packs(depot)[0].parts[-4] / "p" / f"{uuid.uuid4().hex}-9"
    empty.mkdir()
    age(empty, 2 * HOUR_S)
    dry = sweep(depot, is_dry=True)
    assert all(path.exists() for paths in left.values() for path in paths), "a dry run deletes nothing"
    report = sweep(depot)
    assert dry.reasons == report.reasons
    for reason, paths in left.items():
        assert report.reasons[reason][0] >= len(paths), reason
        assert not any(path.exists() for path in paths), reason
    assert report.reasons[SweepReason.BROKEN][0] > 0
    assert not empty.exists() and not left[SweepReason.TEMPORARY][1].parent.exists()
    assert not left[SweepReason.UNLISTED][0].parent.exists()
    assert found(depot, *whole) == NUM_KEYS
    again = sweep(depot)
    assert again.num_deleted == 0, again


def test_objects_younger_than_an_hour_are_no_leftovers(depot: Path) -> None:
    left = leftovers(depot, 100.0)
    assert sweep(depot).num_deleted == 0
    assert all(path.exists() for paths in left.values() for path in paths)


def test_foreign_files_are_never_deleted(depot: Path) -> None:
    stored(depot, b"a", 50 * HOUR_S)
    namespace = packs(depot)[0].parts[-4]
    others = [depot / "README", depot / "ab" / "c", depot / namespace / "notes", depot / namespace / "m" / "mine.txt"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        age(path, 50 * HOUR_S)
    outside = depot.parent / "outside"
    outside.mkdir()
    (outside / ("cd" * 20)).write_bytes(b"mine")
    age(outside / ("cd" * 20), 50 * HOUR_S)
    (depot / ("ef" * 20)).mkdir()
    (depot / ("ef" * 20) / "m").symlink_to(outside)
    report = sweep(depot, unused_s=1.0, capacity_bytes=1)
    assert report.num_other == len(others)
    assert all(path.exists() for path in others) and (outside / ("cd" * 20)).exists()
    assert not packs(depot) and {path.name for path in depot.glob("*/m/*")} == {"mine.txt", "cd" * 20}


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_foreign_directory_without_access_does_not_stop_a_sweep(
    depot: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """For example root's lost+found."""
    stored(depot, b"a", 900.0)
    (depot / "lost+found").mkdir()
    real = Directory.child

    def child(self: Directory, path: str, create: bool) -> Directory:
        if path == "lost+found":
            raise error
        return real(self, path, create)

    monkeypatch.setattr(Directory, "child", child)
    report = sweep(depot, capacity_bytes=1)
    assert report.num_deleted > 0 and report.is_complete
    assert not packs(depot)


def test_packs_are_kept_while_manifests_cannot_be_listed(depot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(depot, b"a", 3 * HOUR_S)
    real = Directory.child

    def child(self: Directory, path: str, create: bool) -> Directory:
        if path == "m":
            raise PermissionError(13, "Permission denied")
        return real(self, path, create)

    monkeypatch.setattr(Directory, "child", child)
    before = packs(depot)
    report = sweep(depot)
    assert report.num_deleted == 0 and not report.is_complete
    assert packs(depot) == before


@pytest.mark.parametrize("at_s", [300_000_000_000, -300_000_000_000])
def test_a_file_with_an_impossible_time_does_not_stop_a_sweep(
    depot: Path, monkeypatch: pytest.MonkeyPatch, at_s: int
) -> None:
    stored(depot, b"a", 900.0)
    (depot / "note").write_bytes(b"mine")
    real = FileIO.stat_name

    def stat_name(self: FileIO, name: str, dir_fd: int) -> Any:
        found = real(self, name, dir_fd)
        if name != "note":
            return found
        more = {"st_mtime": float(at_s), "st_mtime_ns": at_s * 10**9}
        return SimpleNamespace(st_mode=found.st_mode, st_size=found.st_size, st_ino=found.st_ino, **more)

    monkeypatch.setattr(FileIO, "stat_name", stat_name)
    report = sweep(depot, capacity_bytes=1)
    assert report.num_deleted > 0 and report.num_other == 1
    assert not packs(depot) and (depot / "note").exists()


def test_an_unreadable_manifest_keeps_unlisted_packs(depot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leftovers(depot, 2 * HOUR_S)
    bad = manifests(depot)[0]
    real = DirectoryStore.get

    def failing(self: DirectoryStore, path: str, **more: Any) -> Any:
        if path.endswith(bad.name):
            raise OSError(5, "Input/output error")
        return real(self, path, **more)

    monkeypatch.setattr(DirectoryStore, "get", failing)
    report = sweep(depot)
    assert SweepReason.UNLISTED not in report.reasons and not report.is_complete
    assert bad.exists() and left[SweepReason.UNLISTED][0].exists()


def test_a_manifest_with_an_invalid_name_keeps_unlisted_packs() -> None:
    """obstore refuses the name with a `ValueError`."""
    store = MemoryStore()
    owner = "ab" * 20
    name = f"{owner}/m/{'cd' * 20}"
    part = ManifestPart(b"t", f"{owner}/p/../x", 0, 9)
    store.put(name, encode_manifest(Seals(b""), name, 1, [ManifestNode(b"p", [part])]))
    store.put(f"{owner}/p/{'ef' * 16}-1/0", b"x")
    report = Sweep(store, SweepRules(is_dry=False), time.time() + 2 * HOUR_S).run()
    assert report.num_deleted == 0 and not report.is_complete


@pytest.mark.parametrize("body", [[2, "other", {}], [2, 1, [], [], [], [], []], [9]])
def test_a_manifest_of_another_version_and_its_packs_are_kept(depot: Path, body: list[object]) -> None:
    """An engine of that version reads it."""
    stored(depot, b"a", 3 * HOUR_S)
    for path in manifests(depot):
        path.write_bytes(bytes(SEAL_BYTES) + msgspec.msgpack.encode(body))
        age(path, 3 * HOUR_S)
    before = [*manifests(depot), *packs(depot)]
    report = sweep(depot)
    assert report.num_deleted == 0 and not report.is_complete
    assert [*manifests(depot), *packs(depot)] == before
    verified = ObjectVerifier(DirectoryStore(str(depot), True), Seals(b"")).run()
    assert verified.num_damaged == 0 and verified.num_unread == len(manifests(depot))


@pytest.mark.parametrize("rules", [{}, {"unused_s": 2.9 * HOUR_S}])
def test_a_pack_without_readable_metadata_does_not_stop_a_sweep(
    depot: Path, monkeypatch: pytest.MonkeyPatch, rules: dict[str, float]
) -> None:
    stored(depot, b"a", 3 * HOUR_S)
    stored(depot, b"b", 2.8 * HOUR_S)
    for pack in packs(depot):
        pack.unlink()

    def failing(self: DirectoryStore, path: str) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DirectoryStore, "head", failing)
    report = sweep(depot, **rules)
    assert not report.is_complete
    assert bool(report.num_deleted) is bool(rules), "only those unused for long"
    assert manifests(depot), "the others stay"


# Concurrent sweeps and engines.


def test_one_sweep_runs_at_a_time(depot: Path) -> None:
    stored(depot, b"a", 2 * HOUR_S)
    store = DirectoryStore(str(depot), True)
    sweeper = CapacitySweeper(store, 1, lambda: 0.0, lambda: False)
    fd = os.open(depot / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert sweeper.sweep() is None
        with sweep_lock(store) as is_locked:
            assert not is_locked
    finally:
        os.close(fd)
    report = sweeper.sweep()
    assert report is not None and report.num_deleted > 0


@pytest.mark.parametrize("skew_s", [HOUR_S, -HOUR_S])
def test_a_host_with_a_wrong_clock_deletes_by_the_clock_of_the_store(
    depot: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    depot.mkdir()
    young, old = leftovers(depot / "young", 1800.0), leftovers(depot / "old", 3 * HOUR_S)
    real = time.time
    monkeypatch.setattr("hybridkv.tiers.object.sweeping.time.time", lambda: real() + skew_s)
    for name in ("young", "old"):
        store = DirectoryStore(str(depot / name), True)
        CapacitySweeper(store, 1 << 40, lambda: -skew_s, lambda: False).sweep()
    assert all(path.exists() for paths in young.values() for path in paths)
    assert not any(path.exists() for paths in old.values() for path in paths)


def test_engines_get_no_wrong_byte_during_sweeps(depot: Path) -> None:
    """With a capacity far too small, so that objects in use are deleted."""
    options = patient(missing_s=0.01, capacity_bytes=2 * NUM_KEYS * CHUNK_BYTES, sweep_s=0.01)
    engines = [Engine(depot_at(depot), options=options) for _ in range(2)]
    seeds = [bytes([number + 1]) for number in range(6)]
    chunks = {seed: chunks_of(path_of(NUM_KEYS, seed)) for seed in seeds}
    num_loaded = 0
    try:
        for number in range(18):
            seed = seeds[number % len(seeds)]
            keys = path_of(NUM_KEYS, seed)
            writer, reader = engines[number % 2], engines[(number + 1) % 2]
            for engine in engines:
                engine.primary.clear()
            writer.store(keys, chunks[seed])
            held = reader.look_up(keys)
            wanted = keys[: held.index(MISS)] if MISS in held else keys
            loaded = reader.load(wanted) if wanted else None
            if loaded is not None:
                num_loaded += len(loaded)
                assert loaded == [chunks[seed][key] for key in wanted]
    finally:
        for engine in engines:
            engine.close()
    assert num_loaded > 0


# Parts.


def test_a_sweep_of_many_objects_takes_bounded_memory() -> None:
    class Many:
        """Store with many unlisted packs."""

        def list(self) -> Iterator[Sequence[dict[str, Any]]]:
            at = datetime.fromtimestamp(1_000_000, UTC)
            for number in range(number_of_objects // 100):
                yield [
                    {"path": f"{'ab' * 20}/p/{'cd' * 16}-{number}{place:02}/0", "size": 1 << 24, "last_modified": at}
                    for place in range(100)
                ]

    peaks = []
    for number_of_objects in (2_000, 40_000):
        store: Any = Many()
        tracemalloc.start()
        report = Sweep(store, SweepRules(capacity_bytes=1, unused_s=10.0), 2_000_000.0).run()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert report.num_objects == report.num_deleted == number_of_objects
    assert peaks[1] < peaks[0] + (12 << 20), "the order of the last bucket of ages is exact"


def test_a_name_filter_has_no_false_negatives_and_few_false_positives() -> None:
    names = NameFilter(1 << 20)
    for number in range(50_000):
        names.add(f"in {number}")
    assert all(f"in {number}" in names for number in range(50_000))
    assert sum(f"out {number}" in names for number in range(10_000)) < 200


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{'ab' * 20}/p/{'0f' * 16}-12/3", ObjectKind.PACK),
        (f"{'ab' * 20}/m/{'cd' * 20}", ObjectKind.MANIFEST),
        (f"{'ab' * 20}/epoch", ObjectKind.EPOCH),
        (f"{'ab' * 20}/renewal/{'cd' * 16}", ObjectKind.SHORT_LIVED),
        (f"doctor/proof/{'cd' * 16}", ObjectKind.SHORT_LIVED),
        (f"{'ab' * 20}/m/{'cd' * 20}.{'ef' * 16}.new", ObjectKind.TEMPORARY),
        (f"{'ab' * 20}/p/{'0f' * 16}-12/3.{'ef' * 16}.new", ObjectKind.TEMPORARY),
        (f"{'ab' * 20}/m/{'cd' * 19}", ObjectKind.OTHER),
        (f"{'AB' * 20}/m/{'cd' * 20}", ObjectKind.OTHER),
        (f"x/{'ab' * 20}/m/{'cd' * 20}", ObjectKind.OTHER),
        (f"{'ab' * 20}/m/{'cd' * 20}\n", ObjectKind.OTHER),
        ("sweep.lock", ObjectKind.OTHER),
    ],
)
def test_object_names_are_parsed_to_their_kind(name: str, kind: ObjectKind) -> None:
    assert parse_name(name).kind is kind


def test_renewals_use_the_shorter_lifetime() -> None:
    assert ObjectOptions().renewal_life_s is None
    assert ObjectOptions(time_to_live_s=100.0).renewal_life_s == 100.0
    assert ObjectOptions(time_to_live_s=1e6, capacity_bytes=1).renewal_life_s == 600.0
