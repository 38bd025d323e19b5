"""Refusals of an object store are reported with status and code; refused writes do not stop reads."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
import patience
import pytest
from object_depots import FINGERPRINT, depot_at, patient
from object_engines import Engine, chunks_of, path_of
from obstore import exceptions

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, TierConfigurationError
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.object import StoreLocation, open_index
from hybridkv.tiers.object.store import describe
from hybridkv.tiers.stack import BreakerOptions, Direction, SecondaryTierOptions
from kits.tiers.played_s3 import PlayedS3, Request, Trouble

HIT, MISS = LookupResult.HIT, LookupResult.MISS
OPTIONS = patient(missing_s=0.01, first_retry_s=0.05, last_retry_s=0.1, epoch_check_s=0.05)
BREAKER = BreakerOptions(failures=3, first_backoff_s=0.1, max_backoff_s=0.2)
PATIENT = SecondaryTierOptions(
    async_lookup_timeout_s=patience.seconds(6.0), load_timeout_s=patience.seconds(6.0), breaker=BREAKER
)
FULL = Trouble(507, code="XMinioStorageFull", message="Storage backend has reached its minimum free drive threshold.")
READER = Trouble(403, code="AccessDenied", message="Access Denied.")


def nothing(request: Request) -> Trouble | None:
    return None


def puts(trouble: Trouble) -> Callable[[Request], Trouble | None]:
    return lambda request: trouble if request.method == "PUT" else None


def depot(store: PlayedS3, secret: bytes = b"s") -> StoreLocation:
    return StoreLocation("s3://fleet/cache", store.settings("AKOWNER"), secret)


@pytest.fixture
def store() -> Iterator[PlayedS3]:
    with PlayedS3() as running:
        yield running


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def stored(place: StoreLocation, number: int = 10) -> tuple[list[bytes], dict[bytes, bytes]]:
    keys = path_of(number)
    chunks = chunks_of(keys)
    engine = Engine(place, options=OPTIONS, slower=PATIENT)
    engine.store(keys, chunks)
    engine.close()
    return keys, chunks


def restores(engine: Engine, keys: list[bytes], chunks: dict[bytes, bytes]) -> bool:
    return engine.look_up(keys) == [HIT] * len(keys) and engine.load(keys) == [chunks[key] for key in keys]


def is_stored(engine: Engine, keys: list[bytes]) -> bool:
    engine.step()
    return all(engine.index.lookup(key) is HIT for key in keys)


# Text of errors.


@pytest.mark.parametrize(
    "refused",
    [
        Trouble(403, code="InvalidAccessKeyId", message="The AWS Access Key Id you provided does not exist."),
        Trouble(403, code="SignatureDoesNotMatch", message="The request signature we calculated does not match."),
        READER,
        Trouble(404, code="NoSuchBucket", message="The specified bucket does not exist."),
    ],
)
def test_a_refused_start_reports_status_and_code(store: PlayedS3, refused: Trouble) -> None:
    store.trouble = lambda request: refused
    with pytest.raises(TierConfigurationError) as raised:
        open_index(depot(store), FINGERPRINT, 1, OPTIONS, time.monotonic)
    assert raised.value.field == "url"
    got = str(raised.value.got)
    assert (
        0 < got.index(str(refused.status)) < got.index(refused.code) < got.index(refused.message) < got.index("cache/")
    )
    assert "AKOWNER" not in str(raised.value), "the rest of the server's answer is not repeated"


def test_an_error_without_a_response_reports_its_cause_first(store: PlayedS3) -> None:
    with PlayedS3() as other:
        place = depot(other)
    with pytest.raises(exceptions.GenericError) as raised:
        place.open(OPTIONS).get("name")
    words = describe(raised.value)
    assert 0 < words.index("error sending request") < words.index("Error performing GET")
    assert "\n" not in words and "Debug" not in words


def test_other_errors_are_reported_whole() -> None:
    assert describe(ValueError("a - b: c\nd")) == "ValueError: a - b: c d"
    assert describe(OSError(errno.ENOSPC, "No space left on device", "/a")).startswith("OSError: [Errno 28] No space")


# Full or read-only stores.


@pytest.mark.parametrize(
    "refused", [FULL, READER, Trouble(400, code="QuotaExceeded"), Trouble(500, code="InternalError")]
)
def test_a_store_that_refuses_writes_at_the_start_is_read_at_once(
    store: PlayedS3, engines: list[Engine], refused: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    keys, chunks = stored(depot(store))
    store.trouble = puts(refused)
    options = patient(missing_s=0.01, first_retry_s=1e6, last_retry_s=1e6)
    with caplog.at_level(logging.WARNING, "hybridkv"):
        engines.append(Engine(depot(store), options=options, slower=PATIENT))
        assert engines[0].index._client.namespace is not None, "the start does not wait for a put"
        assert restores(engines[0], keys, chunks)
    said = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(said) == 1 and f"{refused.status} " in said[0] and refused.code in said[0]
    assert engines[0].index.reserve(b"f" * 16 + b"n" * 32, 10) is Refusal.BUSY


def test_a_store_that_accepts_writes_again_is_written(
    store: PlayedS3, engines: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    store.trouble = puts(FULL)
    with caplog.at_level(logging.INFO, "hybridkv"):
        engines.append(Engine(depot(store), options=OPTIONS, slower=PATIENT))
        keys = path_of(3, b"new")
        engines[0].begin_store(keys, chunks_of(keys))
        assert not is_stored(engines[0], keys)
        tried = store.counts["PUT"]
        patience.wait_until(lambda: store.counts["PUT"] >= tried + 3, "writes are tried again and again")
        store.trouble = nothing
        patience.wait_until(lambda: is_stored(engines[0], keys), "the queued chunks are stored")
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written" in words for words in said) == 1
    assert sum("can be written again" in words for words in said) == 1


def test_a_store_that_fills_up_is_still_read(store: PlayedS3, engines: list[Engine]) -> None:
    keys, chunks = stored(depot(store))
    engines.append(Engine(depot(store), options=OPTIONS, slower=PATIENT))
    store.trouble = puts(FULL)
    for number in range(5):
        others = path_of(3, b"o%d" % number)
        engines[0].store(others, chunks_of(others))
    assert engines[0].stack.take_counts().tiers["object"].failures
    assert restores(engines[0], keys, chunks)
    assert Direction.PROMOTE not in engines[0].stack.take_counts().tiers["object"].breaker_openings
    store.trouble = nothing
    tries = count()
    patience.wait_until(lambda: _takes(engines[0], path_of(2, b"%04d" % next(tries))), "something is stored again")


def _takes(engine: Engine, keys: list[bytes]) -> bool:
    engine.store(keys, chunks_of(keys))
    return is_stored(engine, keys)


def test_a_store_that_refuses_everything_counts_as_unreachable(store: PlayedS3, engines: list[Engine]) -> None:
    keys, chunks = stored(depot(store))
    store.trouble = lambda request: Trouble(503)
    options = msgspec.structs.replace(OPTIONS, opening_timeout_s=0.2)
    engines.append(Engine(depot(store), options=options, slower=PATIENT))
    assert engines[0].index._client.namespace is None
    store.trouble = nothing
    patience.wait_until(lambda: restores(engines[0], keys, chunks), "the stored chunks are restored")


class FullDisk(FileIO):
    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_directory_is_read_and_keeps_no_half_written_file(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, chunks = stored(depot_at(tmp_path))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setattr(FileIO, "pwritev", FullDisk.pwritev)
    engines.append(Engine(depot_at(tmp_path), options=OPTIONS, slower=PATIENT))
    assert restores(engines[0], keys, chunks)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file() and "proof" not in path.parts) == files
    others = path_of(2, b"other")
    engines[0].begin_store(others, chunks_of(others))
    monkeypatch.undo()
    patience.wait_until(lambda: is_stored(engines[0], others), "the queued chunks are stored")


# Without a secret.


@pytest.mark.parametrize(("secret", "number"), [(b"", 1), (b"s", 0)])
def test_a_server_without_a_secret_logs_a_warning(
    store: PlayedS3, engines: list[Engine], secret: bytes, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hybridkv"):
        engines.append(Engine(depot(store, secret), options=OPTIONS, slower=PATIENT))
    said = [record.getMessage() for record in caplog.records if "without a secret" in record.getMessage()]
    assert len(said) == number
    assert all("s3://fleet/cache" in words and "secret_file" in words for words in said)


def test_a_private_directory_needs_no_secret(
    tmp_path: Path, engines: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hybridkv"):
        engines.append(Engine(depot_at(tmp_path / "fleet"), options=OPTIONS, slower=PATIENT))
    assert not caplog.records
