"""Object store on a real server: engines find each other's chunks, and a failing server costs a bounded wait and no
wrong byte.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import patience
import pytest
from object_depots import FINGERPRINT, patient
from object_engines import FULL, Engine, chunks_of, path_of
from slow_link import SlowLink

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, TierConfigurationError
from hybridkv.tiers.object import StoreLocation, open_index
from hybridkv.tiers.object.inspection import ObjectVerifier, inspect_objects
from hybridkv.tiers.object.sweeping import Sweep, SweepReason, SweepRules
from hybridkv.tiers.stack import BreakerOptions, BreakerState, Direction, SecondaryTierOptions
from kits.tiers.object_server import BUCKET, VARIABLE, ObjectServer, command

HIT, MISS = LookupResult.HIT, LookupResult.MISS
OPTIONS = patient(missing_s=0.05)
BREAKER = BreakerOptions(failures=3, first_backoff_s=0.2, max_backoff_s=1.0)
PATIENT = SecondaryTierOptions(
    async_lookup_timeout_s=patience.seconds(6.0), load_timeout_s=patience.seconds(6.0), breaker=BREAKER
)
BOUND_S = patience.seconds(6.0)
"""Time for everything that does not wait for the server."""
# For requests that are expected to fail. Those expected to succeed are repeated until they do.
QUICK = msgspec.structs.replace(
    OPTIONS,
    request_timeout_s=patience.seconds(0.2),
    connect_timeout_s=patience.seconds(0.1),
    close_timeout_s=patience.seconds(1.0),
)
HASTY = SecondaryTierOptions(
    async_lookup_timeout_s=patience.seconds(0.05), load_timeout_s=patience.seconds(0.3), breaker=BREAKER
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    weed = command()
    if weed is None:
        pytest.skip(f"{VARIABLE} names no object server")
    with ObjectServer(weed, tmp_path_factory.mktemp("weed")) as running:
        yield running


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """URL for the objects of one test."""
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


def depot(server: ObjectServer, url: str, who: str = "owner", secret: bytes = b"s", port: int = 0) -> StoreLocation:
    endpoint = f"http://127.0.0.1:{port}" if port else None
    return StoreLocation(url, server.settings(who, endpoint), secret)


def stored(place: StoreLocation, number: int = 40) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Chunks that an engine stored before it ended."""
    keys = path_of(number)
    chunks = chunks_of(keys)
    engine = Engine(place, options=OPTIONS, slower=PATIENT)
    engine.store(keys, chunks)
    engine.close()
    return keys, chunks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_one_engine_stored_another_restores(
    server: ObjectServer, prefix: str, engines: list[Engine], num_ranks: int
) -> None:
    keys = path_of(40)
    chunks = chunks_of(keys)
    first = Engine(depot(server, prefix), num_ranks, OPTIONS, PATIENT)
    first.store(keys, chunks)
    first.close()
    engines.append(Engine(depot(server, prefix), num_ranks, OPTIONS, PATIENT))
    assert engines[0].look_up([*keys, FULL + b"x" * 32]) == [HIT] * 40 + [MISS]
    assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_a_tenant_reads_nothing_of_anothers(server: ObjectServer, prefix: str) -> None:
    stored(depot(server, prefix))
    with pytest.raises(TierConfigurationError) as refused:
        open_index(depot(server, prefix, "tenant"), FINGERPRINT, 1, OPTIONS, time.monotonic)
    assert "PermissionDenied" in str(refused.value)


def test_a_tenant_has_a_store_of_its_own(server: ObjectServer, engines: list[Engine]) -> None:
    stored(depot(server, "s3://tenant/of-the-owner"), 1)  # a user who may create buckets creates it
    place = depot(server, "s3://tenant/cache", "tenant")
    keys, chunks = stored(place)
    engines.append(Engine(place, options=OPTIONS, slower=PATIENT))
    assert engines[0].look_up(keys) == [HIT] * 40
    assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_who_may_only_read_restores_and_stores_nothing(
    server: ObjectServer, prefix: str, engines: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    keys, chunks = stored(depot(server, prefix))
    with caplog.at_level(logging.WARNING, "hybridkv"):
        engines.append(Engine(depot(server, prefix, "reader"), options=OPTIONS, slower=PATIENT))
    assert "cannot be written" in caplog.text and "403 Forbidden: AccessDenied" in caplog.text
    assert engines[0].look_up(keys) == [HIT] * 40
    assert engines[0].load(keys) == [chunks[key] for key in keys]
    assert engines[0].index.reserve(FULL + b"n" * 32, 10) is Refusal.BUSY


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"secret_access_key": "SKWRONG00000"}, "SignatureDoesNotMatch"),
        ({"access_key_id": "AKWRONG00000"}, "InvalidAccessKeyId"),
    ],
)
def test_wrong_credentials_are_refused_at_the_start_and_not_shown(
    server: ObjectServer, prefix: str, wrong: dict[str, str], code: str
) -> None:
    settings = {**server.settings(), **wrong}
    with pytest.raises(TierConfigurationError) as refused:
        open_index(StoreLocation(prefix, settings), FINGERPRINT, 1, OPTIONS, time.monotonic)
    assert f"403 Forbidden: {code}" in str(refused.value)
    for secret in ("SKWRONG", "SKOWNER", "AKOWNER", "AKWRONG"):
        assert secret not in str(refused.value)
        assert secret not in repr(StoreLocation(prefix, settings))


def test_another_secret_finds_nothing(server: ObjectServer, prefix: str, engines: list[Engine]) -> None:
    keys, _ = stored(depot(server, prefix))
    engines.append(Engine(depot(server, prefix, secret=b"t"), options=OPTIONS, slower=PATIENT))
    assert engines[0].look_up(keys)[0] is MISS


def test_an_engine_starts_without_its_server_and_finds_it_later(
    server: ObjectServer, prefix: str, engines: list[Engine]
) -> None:
    keys, chunks = stored(depot(server, prefix))
    options = msgspec.structs.replace(OPTIONS, opening_timeout_s=0.5, first_retry_s=0.1, last_retry_s=0.2)
    with SlowLink(server.port) as link:
        link.is_refusing = True
        began_s = time.monotonic()
        engines.append(Engine(depot(server, prefix, port=link.port), options=options, slower=PATIENT))
        assert time.monotonic() - began_s < BOUND_S
        assert engines[0].look_up(keys) == [MISS] * 40
        others = path_of(2, b"other")
        engines[0].begin_store(others, chunks_of(others))
        link.is_refusing = False
        patience.wait_until(lambda: _is_loaded(engines[0], keys, chunks), "the stored chunks are loaded")
        patience.wait_until(lambda: _is_stored(engines[0], others), "the queued chunks are stored")


def _is_stored(engine: Engine, keys: list[bytes]) -> bool:
    engine.step()
    return all(engine.index.lookup(key) is HIT for key in keys)


def test_a_stalled_connection_costs_a_question_its_deadline_and_a_load_its_own(
    server: ObjectServer, prefix: str, engines: list[Engine]
) -> None:
    keys, chunks = stored(depot(server, prefix))
    with SlowLink(server.port) as link:
        engines.append(Engine(depot(server, prefix, port=link.port), options=QUICK, slower=HASTY))
        link.is_stalled = True
        began_s = time.monotonic()
        assert engines[0].look_up(keys) == [MISS] * 40
        assert time.monotonic() - began_s < BOUND_S
        link.is_stalled = False
        link.cut()
        patience.wait_until(lambda: engines[0].look_up(keys) == [HIT] * 40, "all is found")
        link.is_stalled = True
        assert engines[0].load(keys) is None
        link.is_stalled = False
        link.cut()
        patience.wait_until(lambda: _is_loaded(engines[0], keys, chunks), "the stored chunks are loaded")


def _is_loaded(engine: Engine, keys: list[bytes], chunks: dict[bytes, bytes]) -> bool:
    """Whether a load succeeded. Wrong bytes are a failure."""
    engine.step()
    if set(engine.look_up(keys)) != {HIT}:
        return False
    found = engine.load(keys)
    assert found is None or found == [chunks[key] for key in keys]
    return found is not None


def test_a_slow_connection_is_waited_for_as_long_as_a_load_may_take(
    server: ObjectServer, prefix: str, engines: list[Engine]
) -> None:
    keys, chunks = stored(depot(server, prefix))
    with SlowLink(server.port) as link:
        engines.append(Engine(depot(server, prefix, port=link.port), options=OPTIONS, slower=PATIENT))
        link.bytes_per_s = 1_000_000.0
        assert engines[0].look_up(keys) == [HIT] * 40
        assert engines[0].load(keys) == [chunks[key] for key in keys]


@pytest.mark.full
def test_a_killed_server_is_skipped_and_used_again_once_it_is_back(tmp_path: Path, engines: list[Engine]) -> None:
    weed = command()
    if weed is None:
        pytest.skip(f"{VARIABLE} names no object server")
    server = ObjectServer(weed, tmp_path).wait()
    try:
        place = depot(server, f"s3://{BUCKET}/killed")
        keys, chunks = stored(place)
        engines.append(Engine(place, options=QUICK, slower=HASTY))
        patience.wait_until(lambda: engines[0].look_up(keys) == [HIT] * 40, "all is found")
        server.kill()
        began_s = time.monotonic()
        assert engines[0].load(keys) is None
        assert time.monotonic() - began_s < BOUND_S
        others = path_of(4, b"other")
        engines[0].store(others, chunks_of(others))
        patience.wait_until(lambda: _is_breaker_open(engines[0]), "the breaker of the server is open")
        server = ObjectServer(weed, tmp_path, server.ports).wait()
        patience.wait_until(lambda: _is_loaded(engines[0], keys, chunks), "the stored chunks are loaded")
    finally:
        server.kill()


def _is_breaker_open(engine: Engine) -> bool:
    engine.step()
    states = [engine.stack.breaker_state(direction, "object") for direction in Direction]
    return BreakerState.OPEN in states or BreakerState.PROBING in states


def test_a_stopped_server_does_not_hold_up_the_close_of_an_engine(tmp_path: Path) -> None:
    weed = command()
    if weed is None:
        pytest.skip(f"{VARIABLE} names no object server")
    with ObjectServer(weed, tmp_path) as server:
        engine = Engine(depot(server, f"s3://{BUCKET}/still"), options=QUICK, slower=HASTY)
        keys = path_of(4)
        engine.begin_store(keys, chunks_of(keys))
        server.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        engine.close(within_s=1.0)
        assert time.monotonic() - began_s < BOUND_S


def test_what_is_in_use_is_written_again_at_the_server(
    server: ObjectServer, prefix: str, engines: list[Engine]
) -> None:
    """S3 refuses a copy of an object to itself, and only the store's clock counts."""
    keys, chunks = stored(depot(server, prefix))
    location = depot(server, prefix)
    store: Any = location.open(OPTIONS)

    def modified() -> dict[str, datetime]:
        return {each["path"]: each["last_modified"] for page in store.list() for each in page}

    old = {path: at for path, at in modified().items() if "/m/" in path or "/p/" in path}
    assert len(old) > 2
    to_live_s = 4.0
    time.sleep(to_live_s / 2 + 1.0)
    options = msgspec.structs.replace(OPTIONS, time_to_live_s=to_live_s, renewals_per_s=10_000.0, found_s=600.0)
    engines.append(Engine(location, options=options, slower=PATIENT))
    # A found chunk is a miss again after a second.
    patience.wait_until(lambda: engines[0].look_up(keys) == [HIT] * 40, "all are found")
    patience.wait_until(lambda: all(modified()[path] > at for path, at in old.items()), "all are renewed")
    client: Any = engines[0].index._client
    patience.wait_until(client._renewer._renewal_task.done, "no renewal is running")
    assert not any("/renewal/" in path or "/proof/" in path for path in modified())
    engines.append(Engine(location, options=OPTIONS, slower=PATIENT))
    assert engines[1].look_up(keys) == [HIT] * 40
    assert engines[1].load(keys) == [chunks[key] for key in keys]


def test_a_server_is_inspected_verified_and_swept(server: ObjectServer, prefix: str, engines: list[Engine]) -> None:
    keys, chunks = stored(depot(server, prefix))
    location = depot(server, prefix)
    store: Any = location.open(OPTIONS)
    [cache] = inspect_objects(store).caches
    assert cache.num_packs > 0 and cache.num_manifests > 0 and cache.pack_bytes > 40 * len(chunks[keys[0]])
    found = ObjectVerifier(store, location.seals).run()
    assert found.is_intact and found.num_records == 40 and not found.num_other_secret
    store.put(f"{cache.name}/p/{'ab' * 16}-1/0", b"left", use_multipart=False)
    later_s = time.time() + 2 * 3600.0
    report = Sweep(store, SweepRules(is_dry=False), later_s).run()
    assert report.reasons == {SweepReason.UNLISTED: (1, 4)} and not report.num_failed
    engines.append(Engine(location, options=OPTIONS, slower=PATIENT))
    assert engines[0].look_up(keys) == [HIT] * 40
    assert engines[0].load(keys) == [chunks[key] for key in keys]
    assert Sweep(store, SweepRules(unused_s=1.0, is_dry=False), later_s).run().num_deleted > 2
    assert not inspect_objects(store).caches
