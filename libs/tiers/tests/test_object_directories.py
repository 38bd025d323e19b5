"""A store in a directory: whose it may be, what is never followed or opened, and what a shared one needs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
from object_depots import FINGERPRINT, depot_at, manifests, packs, patient
from object_engines import Engine, chunks_of, path_of
from obstore.exceptions import AlreadyExistsError, NotModifiedError

from hybridkv.planner import LookupResult
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.object import open_index
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.directory_store import path_of as directory_of
from hybridkv.tiers.object.store import open_object_store

HIT, MISS = LookupResult.HIT, LookupResult.MISS
SECRET = b"a secret of sixteen or more"
ANOTHER = 54321
"""A user's number."""
OPTIONS = patient(missing_s=0.01)


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def stored(directory: Path, secret: bytes = b"") -> tuple[list[bytes], dict[bytes, bytes]]:
    keys = path_of(20)
    chunks = chunks_of(keys)
    engine = Engine(depot_at(directory, secret))
    engine.store(keys, chunks)
    engine.close()
    return keys, chunks


def start(directory: Path, secret: bytes = b"") -> Engine:
    return Engine(depot_at(directory, secret), options=OPTIONS)


def modes(directory: Path) -> tuple[set[int], set[int]]:
    """Of the directories and of the files below."""
    found = [(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in directory.rglob("*")]
    return {mode for is_dir, mode in found if is_dir}, {mode for is_dir, mode in found if not is_dir}


def give_away(path: Path) -> None:
    try:
        os.chown(path, ANOTHER, -1)
    except OSError as error:
        pytest.skip(f"this process cannot give files away: {error.strerror}")


def refusal(directory: Path, secret: bytes = b"") -> str:
    with pytest.raises(TierConfigurationError) as raised:
        open_index(depot_at(directory, secret), FINGERPRINT, 1, patient(), time.monotonic)
    assert raised.value.field == "url"
    return str(raised.value)


# Whose it is.


def test_a_store_that_is_made_is_its_users_alone(tmp_path: Path, umask: int) -> None:
    stored(tmp_path / "fleet")
    assert stat.S_IMODE((tmp_path / "fleet").stat().st_mode) == 0o700
    assert modes(tmp_path / "fleet") == ({0o700}, {0o600})


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused_without_a_secret(tmp_path: Path, mode: int) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet").chmod(mode)
    words = refusal(tmp_path / "fleet")
    assert "others may write to it" in words and "secret_file" in words
    assert not os.listdir(tmp_path / "fleet")


def test_a_directory_of_another_user_is_refused_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet").mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    words = refusal(tmp_path / "fleet")
    assert f"belongs to user {os.getuid()}, not {ANOTHER}" in words and "secret_file" in words
    assert not os.listdir(tmp_path / "fleet")


def test_a_file_of_another_user_is_no_object_of_an_own_store(tmp_path: Path) -> None:
    """As one that was there before the directory was closed to others."""
    keys, _ = stored(tmp_path)
    for path in manifests(tmp_path):
        give_away(path)
    engine = start(tmp_path)
    assert engine.hear(keys) == [MISS] * 20
    engine.close()


def test_a_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "fleet").symlink_to(tmp_path / "elsewhere")
    for secret in (b"", SECRET):
        for directory in (tmp_path / "fleet", Path(f"{tmp_path}/fleet/.")):
            assert "symbolic link" in refusal(directory, secret)
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize("url", ["file://host/directory", "file:///directory?x", "file:///directory#x", "file:d"])
def test_a_url_that_names_more_than_a_directory_is_refused(url: str) -> None:
    with pytest.raises(TierConfigurationError) as raised:
        DirectoryStore(directory_of(url), may_be_shared=False).check()
    assert raised.value.field == "url"


def test_a_url_may_have_any_character(tmp_path: Path) -> None:
    assert directory_of("file:///a%20b%3Fc%23") == "/a b?c#"
    assert directory_of("file://localhost/a") == "/a"


# Shared between users.


@pytest.mark.parametrize(
    ("mode", "directories", "files"),
    [(0o2770, 0o2770, 0o640), (0o1777, 0o1777, 0o644), (0o700, 0o700, 0o600)],
)
def test_with_a_secret_what_is_made_can_be_used_by_whoever_may_use_the_directory(
    tmp_path: Path, umask: int, mode: int, directories: int, files: int
) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet").chmod(mode)
    keys, chunks = stored(tmp_path / "fleet", SECRET)
    assert modes(tmp_path / "fleet") == ({directories}, {files})
    engine = start(tmp_path / "fleet", SECRET)
    assert engine.hear(keys) == [HIT] * 20
    assert engine.load(keys) == [chunks[key] for key in keys]
    engine.close()


def test_with_a_secret_other_users_files_are_believed_by_their_seals_alone(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet").chmod(0o777)
    keys, chunks = stored(tmp_path / "fleet", SECRET)
    for path in (tmp_path / "fleet").rglob("*"):
        give_away(path)
    engine = start(tmp_path / "fleet", SECRET)
    assert engine.hear(keys) == [HIT] * 20
    assert engine.load(keys) == [chunks[key] for key in keys]
    engine.close()
    for path in packs(tmp_path / "fleet"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    engine = start(tmp_path / "fleet", SECRET)
    assert engine.hear(keys) == [HIT] * 20
    assert engine.load(keys) is None
    engine.close()


# What is never followed, and never opened.


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("folder", ["m", "p"])
def test_nothing_is_written_through_a_link_inside_the_store(tmp_path: Path, secret: bytes, folder: str) -> None:
    fleet, elsewhere = tmp_path / "fleet", tmp_path / "elsewhere"
    elsewhere.mkdir()
    fleet.mkdir()
    fleet.chmod(0o777 if secret else 0o700)
    engine = start(fleet, secret)
    namespace = fleet / str(engine.index._client.namespace)
    namespace.mkdir()
    (namespace / folder).symlink_to(elsewhere)
    keys = path_of(5)
    engine.store(keys, chunks_of(keys))
    engine.close()
    assert not os.listdir(elsewhere)


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_nothing_is_read_through_a_link_inside_the_store(tmp_path: Path, secret: bytes) -> None:
    fleet = tmp_path / "fleet"
    keys, _ = stored(fleet, secret)
    for number, path in enumerate(manifests(fleet)):
        path.rename(tmp_path / str(number))
        path.symlink_to(tmp_path / str(number))
    engine = start(fleet, secret)
    assert engine.hear(keys) == [MISS] * 20
    engine.close()


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "/outside", "a//b", ".", "", "a/\0", "x" * 300, "\u00e9"]
)
def test_a_name_that_leads_out_of_the_store_is_no_object(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(b"1")
    store = DirectoryStore(str(tmp_path / "fleet"), may_be_shared=False)
    store.check()
    for call in (lambda: store.get(name), lambda: store.put(name, b"2"), lambda: store.delete([name])):
        with contextlib.suppress(FileNotFoundError):
            call()
    assert (tmp_path / "outside").read_bytes() == b"1"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "outside"]


@pytest.mark.parametrize("what", ["manifests", "packs"])
def test_a_pipe_in_an_objects_place_is_a_miss_and_stops_nobody(tmp_path: Path, what: str) -> None:
    keys, _ = stored(tmp_path)
    for path in manifests(tmp_path) if what == "manifests" else packs(tmp_path):
        path.unlink()
        os.mkfifo(path)
    engine = start(tmp_path)
    found = engine.hear(keys)
    assert found == [MISS if what == "manifests" else HIT] * 20
    if what == "packs":
        assert engine.load(keys) is None
        assert engine.index.lookup(keys[0]) is MISS, "its place is believed no more"
    others = path_of(3, b"other")
    engine.store(others, chunks_of(others))
    assert engine.index.lookup(others[0]) is HIT
    engine.close()


# As a store of obstore's.


def test_an_object_is_put_once_or_over(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path), may_be_shared=False)
    store.put("a/b/c", [b"12", memoryview(b"345"), bytearray(b"")], mode="create")
    with pytest.raises(AlreadyExistsError):
        store.put("a/b/c", b"x", mode="create")
    assert b"".join(store.get("a/b/c")) == b"12345"
    store.put("a/b/c", b"67")
    assert b"".join(store.get("a/b/c")) == b"67"
    store.delete(["a/b/c", "a/b/d"])
    with pytest.raises(FileNotFoundError):
        store.get("a/b/c")
    assert not os.listdir(tmp_path / "a/b"), "nothing is left beside it"


def test_a_part_of_an_object_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path), may_be_shared=False)
    data = os.urandom(3 << 20)
    store.put("a", data)
    for first, last in [(0, 10), (5, 2 << 20), (1 << 20, 9 << 20), (4 << 20, 5 << 20)]:
        found = store.get("a", options={"range": (first, last)})
        assert b"".join(found) == data[first:last] and found.meta["size"] == len(data)


def test_an_event_loop_reads_and_writes_the_same(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path), may_be_shared=False)
    data = os.urandom(3 << 20)

    async def work() -> None:
        await store.put_async("a", data, mode="create")
        found = await store.get_async("a")
        assert b"".join([bytes(piece) async for piece in found.stream()]) == data
        with pytest.raises(NotModifiedError):
            await store.get_async("a", options={"if_none_match": found.meta["e_tag"]})
        await store.put_async("a", b"other")
        assert b"".join(await store.get_async("a", options={"if_none_match": found.meta["e_tag"]})) == b"other"
        with pytest.raises(FileNotFoundError):
            await store.get_async("b")

    asyncio.run(work())


def test_no_file_is_left_open(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path), may_be_shared=False)
    store.put("a/b", b"1")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        b"".join(store.get("a/b"))
        store.put("a/b", b"1")
        with pytest.raises(FileNotFoundError):
            store.get("a/c")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    keys, _ = stored(tmp_path / "fleet")
    engine = start(tmp_path / "fleet")
    (tmp_path / "fleet").rename(tmp_path / "gone")
    assert engine.hear(keys)[0] is MISS
    engine.store(keys, chunks_of(keys))
    engine.close()
    engine = start(tmp_path / "fleet")
    assert engine.hear(keys)[0] is HIT
    engine.close()


# A read that never ends.

_STUCK = """
import sys, threading, time
from pathlib import Path
from object_engines import Engine, path_of
from object_depots import TIMEOUT_S, depot_at, patient
from hybridkv.planner import LookupResult
from hybridkv.tiers.files.file_io import FileIO

directory, what = Path(sys.argv[1]), sys.argv[2]
engine = Engine(depot_at(directory), options=patient(missing_s=0.01, close_timeout_s=0.3))
keys = path_of(20)
begun = threading.Event()
if what == "packs":
    assert engine.hear(keys)[0] is LookupResult.HIT

def hang(*arguments):
    begun.set()
    threading.Event().wait()

FileIO.preadv = hang
if what == "packs":
    engine.stack.acquire("r", keys)
    engine.step()
else:
    engine.stack.start_lookup(keys)
assert begun.wait(TIMEOUT_S)
if what != "unclosed":
    engine.close(within_s=0.3)
print("over", flush=True)
"""


@pytest.mark.parametrize("what", ["packs", "manifests", "unclosed"])
def test_a_read_that_never_ends_does_not_keep_its_process_alive(tmp_path: Path, what: str) -> None:
    stored(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, str(tmp_path), what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "over\n"
        assert process.wait(patience.seconds(6.0)) == 0, "it is gone after its end"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("url", ["FILE:///tmp/x", "File:///tmp/x", " file:///tmp/x", "fi\tle:///tmp/x", "S3://b/x"])
def test_a_scheme_that_is_not_in_lower_case_is_refused(url: str) -> None:
    """obstore would open the directory without the checks of this tier."""
    with pytest.raises(TierConfigurationError, match="lower case"):
        open_object_store(url, {}, patient(), has_secret=False)
