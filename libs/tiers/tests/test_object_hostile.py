"""Object stores with hostile contents, and hosts with faults: they do little harm to other engines."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import patience
import pytest
from object_depots import FINGERPRINT, look_up, patient
from object_engines import FULL, WINDOW, Engine, chunks_of, path_of

from hybridkv.planner import LookupResult
from hybridkv.tiers.object import ObjectOptions, StoreLocation, open_index
from hybridkv.tiers.object.bodies import ReadMemoryLimit
from hybridkv.tiers.object.format.epoch import decode_epoch, encode_epoch
from hybridkv.tiers.object.format.manifest import MAX_PARTS, ManifestNode, ManifestPart, encode_manifest
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.index import ObjectIndex
from hybridkv.tiers.object.manifests.epochs import next_epoch
from hybridkv.tiers.object.manifests.reader import Quarantine
from hybridkv.tiers.object.names import MANIFEST_EVERY, cache_name, epoch_name, manifest_name, namespace_of, prefix_of
from hybridkv.tiers.stack import BreakerOptions, SecondaryTierOptions
from kits.tiers.played_s3 import PlayedS3, Request, Trouble, Zeros

HIT, MISS = LookupResult.HIT, LookupResult.MISS
MIB = 1 << 20
OPTIONS = patient(missing_s=0.01, first_retry_s=0.02, last_retry_s=0.1, epoch_check_s=0.02)


@pytest.fixture
def s3() -> Iterator[PlayedS3]:
    with PlayedS3() as server:
        yield server


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def engine_at(s3: PlayedS3, who: str = "owner", secret: bytes = b"s", options: ObjectOptions = OPTIONS) -> Engine:
    return Engine(StoreLocation("s3://fleet", s3.settings(who), secret), options=options)


def stored(s3: PlayedS3, keys: list[bytes], secret: bytes = b"s") -> dict[bytes, bytes]:
    """Chunks that an engine stored before it ended."""
    chunks = chunks_of(keys)
    engine = engine_at(s3, secret=secret)
    engine.store(keys, chunks)
    engine.close()
    return chunks


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def loaded(s3: PlayedS3, keys: list[bytes]) -> list[bytes] | None:
    """Chunks that a new engine loads."""
    engine = engine_at(s3)
    try:
        return engine.load(keys) if engine.look_up(keys) == [HIT] * len(keys) else None
    finally:
        engine.close()


# Hosts with faults.


def test_a_host_with_damaged_reads_harms_no_other_host(s3: PlayedS3, engines: list[Engine]) -> None:
    """It finds nothing; the objects stay as they are, and other hosts find them."""
    paths = [path_of(12, bytes([number])) for number in range(8)]
    chunks = {key: chunk for keys in paths for key, chunk in stored(s3, keys).items()}
    before = dict(s3.objects)
    s3.trouble = lambda request: Trouble(damage=flipped) if request.who == "sick" and "/m/" in request.name else None
    engines.append(engine_at(s3, "sick"))
    for keys in paths:
        assert engines[0].look_up(keys) == [MISS] * 12
    engines[0].close()
    assert {name: data for name, data in s3.objects.items() if "/proof/" not in name} == before
    engines[:] = [engine_at(s3)]
    for keys in paths:
        assert engines[0].look_up(keys) == [HIT] * 12
        assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_a_storing_host_with_damaged_reads_harms_no_other_host(s3: PlayedS3, engines: list[Engine]) -> None:
    keys = path_of(12)
    chunks = stored(s3, keys)
    s3.trouble = lambda request: Trouble(damage=flipped) if request.who == "sick" and "/m/" in request.name else None
    engines.append(engine_at(s3, "sick"))
    assert engines[0].look_up(keys) == [MISS] * 12
    engines[0].store(keys, chunks)
    engines[0].close()
    engines[:] = []
    assert loaded(s3, keys) == [chunks[key] for key in keys]


def test_a_host_that_cannot_read_packs_harms_no_other_host(s3: PlayedS3, engines: list[Engine]) -> None:
    keys = path_of(12)
    chunks = stored(s3, keys)
    number = len(s3.names("/m/"))
    s3.trouble = lambda request: Trouble(damage=flipped) if request.who == "sick" and "/p/" in request.name else None
    engines.append(engine_at(s3, "sick"))
    assert engines[0].look_up(keys) == [HIT] * 12
    assert engines[0].load(keys) is None
    engines[0].close()
    engines[:] = []
    assert len(s3.names("/m/")) == number
    assert loaded(s3, keys) == [chunks[key] for key in keys]


def test_manifests_of_a_faulty_host_omit_no_chunk_of_others(s3: PlayedS3, engines: list[Engine]) -> None:
    """It reads the packs of one group badly, stores that group again, and its manifests replace the others."""
    keys = path_of(12)
    windows = [WINDOW + prefix_of(key) for key in keys]
    chunks = stored(s3, [key for pair in zip(keys, windows, strict=True) for key in pair])
    first = keys[0]
    bad = [name for name in s3.names("/p/") if loadable_part(s3, name, chunks[first])]
    before = {name: s3.objects[name] for name in s3.names("/m/")}
    zeroed = Trouble(damage=lambda data: bytes(len(data)))
    s3.trouble = lambda request: zeroed if request.who == "sick" and request.name in bad else None
    engines.append(engine_at(s3, "sick"))
    assert engines[0].look_up([*keys, *windows]) == [HIT] * 24
    assert engines[0].load(keys) is None
    engines[0].store(keys, chunks)
    engines[0].close()
    engines[:] = []
    assert any(s3.objects[name] != data for name, data in before.items()), "some manifests were replaced"
    assert loaded(s3, [*keys, *windows]) == [chunks[key] for key in (*keys, *windows)]


def test_a_pack_missing_once_is_read_again(s3: PlayedS3, engines: list[Engine]) -> None:
    """As while a store comes back."""
    keys = path_of(12)
    chunks = stored(s3, keys)
    answers = [404]
    s3.trouble = lambda request: Trouble(answers.pop()) if "/p/" in request.name and answers else None
    engines.append(engine_at(s3))
    assert engines[0].look_up(keys) == [HIT] * 12
    assert engines[0].load(keys) == [chunks[key] for key in keys]
    assert not answers


@pytest.mark.parametrize("part", ["/m/", "/p/"])
def test_a_damaged_read_is_repeated_another_way(s3: PlayedS3, engines: list[Engine], part: str) -> None:
    keys = path_of(12)
    chunks = stored(s3, keys)
    reads: Counter[str] = Counter()

    def trouble(request: Request) -> Trouble | None:
        if request.method != "GET" or part not in request.name:
            return None
        reads[request.name] += 1
        return Trouble(damage=flipped) if reads[request.name] == 1 else None

    s3.trouble = trouble
    engines.append(engine_at(s3))
    assert engines[0].look_up(keys) == [HIT] * 12
    assert engines[0].load(keys) == [chunks[key] for key in keys]
    assert max(reads.values()) > 1


@pytest.mark.parametrize("junk", [b"", b"junk", bytes(5000)])
def test_a_bad_manifest_is_replaced_at_the_next_store_of_its_path(
    s3: PlayedS3, engines: list[Engine], junk: bytes
) -> None:
    keys = path_of(12)
    stored(s3, keys)
    for name in s3.names("/m/"):
        s3.objects[name] = junk
    engines.append(engine_at(s3))
    assert engines[0].look_up(keys) == [MISS] * 12
    chunks = chunks_of(keys)
    engines[0].store(keys, chunks)
    engines[0].close()
    engines[:] = []
    assert loaded(s3, keys) == [chunks[key] for key in keys]


def test_a_manifest_of_an_expired_pack_is_replaced_at_the_next_store(s3: PlayedS3, engines: list[Engine]) -> None:
    """That manifest, and the later ones on its path, which list the pack too."""
    keys = path_of(12)
    chunks = chunks_of(keys)
    for first, stop in ((0, 5), (5, 12)):
        engine = engine_at(s3)
        engine.look_up(keys[:first])
        engine.store(keys[:stop], chunks)
        engine.close()
    [pack] = [name for name in s3.names("/p/") if loadable_part(s3, name, chunks[keys[0]])]
    del s3.objects[pack]
    engines.append(engine_at(s3))
    assert engines[0].look_up(keys) == [HIT] * 12
    assert engines[0].load(keys) is None
    number = len(s3.names("/m/"))
    missing = [key for key in keys if engines[0].index.lookup(key) is MISS]
    assert missing and set(missing) <= set(keys[:5])
    engines[0].store(keys[:5], chunks)
    engines[0].close()
    engines[:] = []
    assert len(s3.names("/m/")) >= number
    assert loaded(s3, keys) == [chunks[key] for key in keys]


def loadable_part(s3: PlayedS3, name: str, chunk: bytes) -> bool:
    data = s3.objects[name]
    return isinstance(data, bytes) and chunk in data


def test_a_reader_deletes_no_object(s3: PlayedS3, engines: list[Engine]) -> None:
    keys = path_of(6)
    stored(s3, keys)
    for name in s3.names("/p/"):
        del s3.objects[name]
    deleted: list[str] = []
    s3.trouble = lambda request: deleted.append(request.name) if request.method == "DELETE" else None
    engines.append(engine_at(s3))
    engines[0].look_up(keys)
    assert engines[0].load(keys) is None
    engines[0].close()
    engines[:] = []
    assert not [name for name in deleted if "/proof/" not in name]


# Memory.


def manifest_names(keys: list[bytes], secret: bytes = b"s") -> list[str]:
    cache = cache_name(secret, FINGERPRINT, MANIFEST_EVERY)
    return [manifest_name(namespace_of(cache, 0), prefix_of(key)) for key in keys]


def test_an_oversized_manifest_is_read_only_up_to_the_limit(s3: PlayedS3, engines: list[Engine]) -> None:
    keys = path_of(20)
    for name in manifest_names(keys):
        s3.objects[name] = Zeros(64 * MIB)
    engines.append(engine_at(s3))
    assert engines[0].look_up(keys) == [MISS] * 20
    # Data in the system's socket buffers counts as sent, though it is not read.
    assert s3.sent_bytes < 20 * 8 * MIB


JUNK = """
import resource, sys, time
from object_depots import patient
from object_engines import Engine, path_of
from hybridkv.tiers.object import StoreLocation
from hybridkv.planner import LookupResult
url, port, secret = sys.argv[1], sys.argv[2], sys.argv[3].encode()
settings = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "access_key_id": "a",
            "secret_access_key": "b"}
engine = Engine(StoreLocation(url, settings, secret), options=patient(missing_s=0.01))
engine.look_up(path_of(1, b"warm"))
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, most = rss(), 0
import threading
over = threading.Event()
def watch():
    global most
    while not over.wait(0.002):
        most = max(most, rss())
threading.Thread(target=watch, daemon=True).start()
keys = path_of(int(sys.argv[4]))
for _ in range(3):
    engine.look_up(keys)
    time.sleep(0.02)
over.set()
began = time.monotonic()
engine.close()
print(max(most, rss()) - before, time.monotonic() - began)
"""


def grown_bytes(s3: PlayedS3, secret: str, number: int) -> int:
    """Largest growth of a scheduler's process during a lookup. Checks that its close does not wait for the junk."""
    command = [sys.executable, "-c", JUNK, "s3://fleet", str(s3.port), secret, str(number)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience.seconds(60.0))
    grown, close_s = done.stdout.split()
    assert float(close_s) < patience.seconds(6.0)
    return int(grown)


@pytest.mark.parametrize("num_bytes", [pytest.param(64 * MIB, marks=pytest.mark.full), OPTIONS.manifest_bytes])
def test_junk_under_the_names_of_manifests_costs_little_memory(s3: PlayedS3, num_bytes: int) -> None:
    for name in manifest_names(path_of(100)):
        s3.objects[name] = Zeros(num_bytes)
    assert grown_bytes(s3, "s", 100) < 64 * MIB


def crafted(name: str, prefix: bytes, pack: str) -> bytes:
    """Manifest of the largest number of chunks. Without a secret anyone can make one."""
    tags = [bytes([number]) * 16 for number in range(4)]
    own = [prefix[:16] + number.to_bytes(16, "little") for number in range(MAX_PARTS // 4 - 1)] + [prefix]
    path = [
        ManifestNode(each, [ManifestPart(tag, f"{pack}{at % 7}", 1 << 40, 1 << 20) for tag in tags])
        for at, each in enumerate(own)
    ]
    return encode_manifest(Seals(), name, 1, path)


def test_crafted_manifests_cost_little_memory(s3: PlayedS3) -> None:
    keys = path_of(8)
    for name, key in zip(manifest_names(keys, b""), keys, strict=True):
        s3.objects[name] = crafted(name, prefix_of(key), name[:8])
    assert grown_bytes(s3, "", 8) < 64 * MIB


def test_a_manifest_above_the_size_limit_is_not_written(s3: PlayedS3, engines: list[Engine]) -> None:
    """No reader would accept it."""
    engines.append(engine_at(s3, options=msgspec.structs.replace(OPTIONS, manifest_bytes=300)))
    keys = path_of(12)
    engines[0].store(keys, chunks_of(keys))
    engines[0].close()
    engines[:] = []
    assert all(len(s3.objects[name]) <= 300 for name in s3.names("/m/"))  # type: ignore[arg-type]


def test_a_manifest_too_large_to_cache_still_finds_its_chunks(s3: PlayedS3, engines: list[Engine]) -> None:
    keys = path_of(12)
    chunks = stored(s3, keys)
    engines.append(engine_at(s3, options=msgspec.structs.replace(OPTIONS, lookup_bytes=100)))
    assert engines[0].look_up(keys) == [HIT] * 12
    assert engines[0].load(keys) == [chunks[key] for key in keys]


def test_an_unreadable_object_hides_no_other(s3: PlayedS3, engines: list[Engine]) -> None:
    keys = path_of(12)
    stored(s3, keys)
    other = manifest_names([*keys, FULL + b"x" * 32])[-1]
    s3.objects[other] = b""
    s3.trouble = lambda request: Trouble(403) if request.name == other else None
    engines.append(engine_at(s3))
    assert engines[0].look_up([*keys, FULL + b"x" * 32]) == [HIT] * 12 + [MISS]


@pytest.mark.parametrize("part", ["/m/", "/p/", "/epoch"])
def test_a_response_longer_than_requested_is_not_read(s3: PlayedS3, engines: list[Engine], part: str) -> None:
    keys = path_of(12)
    stored(s3, keys)
    s3.trouble = lambda request: Trouble(more_bytes=64 * MIB) if part in request.name else None
    engines.append(engine_at(s3))
    before = s3.sent_bytes
    engines[0].look_up(keys)
    engines[0].load(keys)
    assert s3.sent_bytes - before < 64 * MIB


def test_the_read_memory_limit_is_never_exceeded() -> None:
    async def run() -> int:
        room, held, most = ReadMemoryLimit(100), 0, 0

        async def take(num_bytes: int) -> None:
            nonlocal held, most
            async with room.taken(num_bytes):
                held += num_bytes
                most = max(most, held)
                await asyncio.sleep(0)
                held -= num_bytes

        given_up = [asyncio.create_task(take(90)) for _ in range(3)]
        await asyncio.sleep(0)
        given_up[1].cancel()
        await asyncio.gather(*(take(num_bytes) for num_bytes in (60, 50, 40, 100, 1)))
        return most

    assert 90 <= asyncio.run(run()) <= 100


@pytest.mark.parametrize("later_s", [10.0, 11.0])
def test_a_quarantine_is_bounded_and_ends(later_s: float) -> None:
    now = [0.0]
    bad: Quarantine[str, int] = Quarantine(2, 10.0, lambda: now[0])
    for number, name in enumerate("abc"):
        bad.add(name, number)
    assert ["a" in bad, "b" in bad, bad.get("c")] == [False, True, 2]
    bad.release("c")
    now[0] = later_s
    assert "b" not in bad and "c" not in bad


# Epochs.


def mark_name(secret: bytes = b"s") -> str:
    return epoch_name(cache_name(secret, FINGERPRINT, MANIFEST_EVERY))


@pytest.mark.parametrize("secret", [b"", b"s"])
def test_a_foreign_epoch_mark_hides_nothing(s3: PlayedS3, engines: list[Engine], secret: bytes) -> None:
    """Sealed with another secret, or from the far future."""
    keys = path_of(5)
    stored(s3, keys, secret)
    name = mark_name(secret)
    far = int(time.time()) + 10 * 86_400
    marks = [b"", b"junk", encode_epoch(Seals(secret), name, far), encode_epoch(Seals(b"t"), name, int(time.time()))]
    for mark in marks:
        s3.objects[name] = mark
        s3.objects[f"{name.removesuffix('poch')}/9999999999"] = b""
        engines.append(engine_at(s3, secret=secret))
        assert engines[-1].look_up(keys) == [HIT] * 5


def test_a_lost_or_overwritten_mark_is_written_again(s3: PlayedS3, engines: list[Engine]) -> None:
    place = StoreLocation("s3://fleet", s3.settings(), b"s")
    resetting = open_index(place, FINGERPRINT, 1, OPTIONS, time.monotonic, clears_all=True)
    resetting.clear()
    name = mark_name()
    patience.wait_until(lambda: name in s3.objects, "the mark is written")
    mark = s3.objects[name]
    keys = path_of(5)
    engines.append(engine_at(s3))
    engines[0].store(keys, chunks_of(keys))
    del s3.objects[name]
    patience.wait_until(lambda: s3.objects.get(name) == mark, "the lost mark is written again")
    s3.objects[name] = b"junk"
    patience.wait_until(lambda: s3.objects.get(name) == mark, "the junk is overwritten")
    resetting.close()
    engines.pop().close()
    assert loaded(s3, keys) is not None


def test_a_reset_before_the_store_is_reached_hides_older_chunks(s3: PlayedS3) -> None:
    keys = path_of(5)
    stored(s3, keys)
    s3.trouble = lambda request: Trouble(503)
    place = StoreLocation("s3://fleet", s3.settings(), b"s")
    options = msgspec.structs.replace(OPTIONS, opening_timeout_s=0.1)
    resetting = open_index(place, FINGERPRINT, 1, options, time.monotonic, clears_all=True)
    try:
        resetting.clear()
        s3.trouble = lambda request: None
        patience.wait_until(lambda: resetting._client.namespace is not None, "the store is reached")
        assert look_up(resetting, keys) == [MISS] * 5
        patience.wait_until(lambda: mark_name() in s3.objects, "the mark is written")
        assert loaded(s3, keys) is None
    finally:
        resetting.close()


def reset_unreached(s3: PlayedS3) -> ObjectIndex:
    """Index that resets while the store refuses all requests."""
    s3.trouble = lambda request: Trouble(503)
    options = msgspec.structs.replace(OPTIONS, opening_timeout_s=0.1, close_timeout_s=patience.seconds(1))
    place = StoreLocation("s3://fleet", s3.settings(), b"s")
    resetting = open_index(place, FINGERPRINT, 1, options, time.monotonic, clears_all=True)
    resetting.clear()
    return resetting


def test_a_close_waits_for_the_mark_of_a_reset_before_the_store_was_reached(
    s3: PlayedS3, caplog: pytest.LogCaptureFixture
) -> None:
    keys = path_of(5)
    stored(s3, keys)
    resetting, refusals = reset_unreached(s3), [503]

    def refuse_one_mark(request: Request) -> Trouble | None:
        is_mark = request.method == "PUT" and request.name == mark_name()
        return Trouble(refusals.pop()) if is_mark and refusals else None

    s3.trouble = refuse_one_mark
    patience.wait_until(lambda: resetting._client.namespace is not None, "the store is reached")
    resetting.close()
    assert not refusals and mark_name() in s3.objects
    assert loaded(s3, keys) is None
    assert "a reset is not in the object store" not in caplog.text


def test_the_mark_of_the_last_reset_is_written_last(s3: PlayedS3) -> None:
    place = StoreLocation("s3://fleet", s3.settings(), b"s")
    options = msgspec.structs.replace(OPTIONS, close_timeout_s=patience.seconds(1))
    resetting = open_index(place, FINGERPRINT, 1, options, time.monotonic, clears_all=True)
    is_first_mark, release = threading.Event(), threading.Event()

    def hold_first_mark(request: Request) -> Trouble | None:
        if request.method == "PUT" and request.name == mark_name() and not is_first_mark.is_set():
            is_first_mark.set()
            release.wait(patience.seconds(1))
        return None

    s3.trouble = hold_first_mark
    resetting.clear()
    assert is_first_mark.wait(patience.seconds(1))
    resetting.clear()
    threading.Timer(0.1, release.set).start()
    namespace = resetting._client.namespace
    resetting.close()
    epoch = decode_epoch(Seals(b"s"), mark_name(), s3.objects[mark_name()])
    assert epoch is not None and namespace_of(cache_name(b"s", FINGERPRINT, MANIFEST_EVERY), epoch) == namespace


def test_a_mark_without_an_answer_is_no_lost_reset(s3: PlayedS3, caplog: pytest.LogCaptureFixture) -> None:
    place = StoreLocation("s3://fleet", s3.settings(), b"s")
    resetting = open_index(place, FINGERPRINT, 1, OPTIONS, time.monotonic, clears_all=True)
    epochs = resetting._client._epochs

    def lose_the_answer(request: Request) -> Trouble | None:
        if request.method != "PUT" or request.name != mark_name():
            return None
        s3.objects[mark_name()] = encode_epoch(Seals(b"s"), mark_name(), epochs._epoch)
        return Trouble(403)

    s3.trouble = lose_the_answer
    resetting.clear()
    patience.wait_until(lambda: epochs._is_written, "the mark is read")
    resetting.close()
    assert "a reset is not in the object store" not in caplog.text


def test_a_reset_that_does_not_reach_the_store_is_a_warning_at_the_end(
    s3: PlayedS3, caplog: pytest.LogCaptureFixture
) -> None:
    reset_unreached(s3).close()
    assert "a reset is not in the object store" in caplog.text


def test_epochs_go_on_ahead_of_the_clock() -> None:
    assert next_epoch(0, 1_800_000_000.5) == 1_800_000_000
    assert next_epoch(1_800_000_000, 1_800_000_000.5) == 1_800_000_001


# A store that comes back.


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_store_that_refuses_at_first_is_used_once_it_accepts(
    s3: PlayedS3, engines: list[Engine], status: int
) -> None:
    keys = path_of(5)
    chunks = stored(s3, keys)
    answers = [status] * 4
    is_gone = threading.Event()
    is_gone.set()

    def trouble(request: Request) -> Trouble | None:
        if is_gone.is_set():
            return Trouble(503)
        return Trouble(answers.pop()) if answers else None

    s3.trouble = trouble
    engines.append(engine_at(s3, options=msgspec.structs.replace(OPTIONS, opening_timeout_s=0.1)))
    is_gone.clear()
    patience.wait_until(lambda: not answers and engines[0].look_up(keys) == [HIT] * 5, "the store is used again")
    assert engines[0].load(keys) == [chunks[key] for key in keys]


@pytest.mark.parametrize("status", [500, 503])
def test_a_failing_store_loses_chunks_and_returns_no_wrong_byte(
    s3: PlayedS3, engines: list[Engine], status: int
) -> None:
    """Most requests fail while two engines write and read under one prefix. Then the store is used again."""
    draw = random.Random(status)
    is_ill = threading.Event()
    s3.trouble = lambda request: Trouble(status) if is_ill.is_set() and draw.random() < 0.6 else None
    quick = SecondaryTierOptions(
        async_lookup_timeout_s=patience.seconds(6.0),
        load_timeout_s=patience.seconds(6.0),
        breaker=BreakerOptions(failures=3, first_backoff_s=0.02, max_backoff_s=0.1),
    )
    location = StoreLocation("s3://fleet", s3.settings(), b"s")
    engines += [Engine(location, options=OPTIONS, slower=quick) for _ in range(2)]
    is_ill.set()
    for number in range(10):
        keys = path_of(12, bytes([number + 1]))
        chunks = chunks_of(keys)
        writer, reader = engines[number % 2], engines[1 - number % 2]
        writer.store(keys, chunks)
        answers = reader.look_up(keys)
        held = keys[: answers.index(MISS)] if MISS in answers else keys
        if held and (found := reader.load(held)) is not None:
            assert found == [chunks[key] for key in held]
    is_ill.clear()
    keys = path_of(12, b"z")
    chunks = chunks_of(keys)

    def is_stored() -> bool:
        engines[0].primary.clear()
        engines[0].store(keys, chunks)
        return loaded(s3, keys) == [chunks[key] for key in keys]

    patience.wait_until(is_stored, "the store is used again")


def test_two_writers_of_one_prefix_leave_one_whole_path(s3: PlayedS3, engines: list[Engine]) -> None:
    """They write different bytes at the same time: each manifest lists chunks of one or the other."""
    keys = path_of(20)
    chunks = chunks_of(keys)
    engines += [engine_at(s3) for _ in range(2)]
    for engine in engines:
        engine.begin_store(keys, chunks)
    for engine in engines:
        engine.run()
    patience.wait_until(lambda: loaded(s3, keys) == [chunks[key] for key in keys], "the path is found whole")
