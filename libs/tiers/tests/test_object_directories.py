"""Object stores in directories: their owner, paths that are never followed or opened, and the needs of a shared one."""

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
"""Number of a user."""
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
    """Modes of the directories and of the files below."""
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


# Owner.


def test_a_new_store_is_accessible_only_to_its_user(tmp_path: Path, umask: int) -> None:
    stored(tmp_path / "fleet")
    assert stat.S_IMODE((tmp_path / "fleet").stat().st_mode) == 0o700
    assert modes(tmp_path / "fleet") == ({0o700}, {0o600})


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_writable_by_others_needs_a_secret(tmp_path: Path, mode: int) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet").chmod(mode)
    words = refusal(tmp_path / "fleet")
    assert "others may write to it" in words and "secret_file" in words
    assert not os.listdir(tmp_path / "fleet")


def test_a_directory_of_another_user_needs_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleet").mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    words = refusal(tmp_path / "fleet")
    assert f"belongs to user {os.getuid()}, not {ANOTHER}" in words and "secret_file" in words
    assert not os.listdir(tmp_path / "fleet")


def test_a_file_of_another_user_is_no_object_without_a_secret(tmp_path: Path) -> None:
    """For example a file that was added before the directory was closed to others."""
    keys, _ = stored(tmp_path)
    for path in manifests(tmp_path):
        give_away(path)
    engine = start(tmp_path)
    assert engine.look_up(keys) == [MISS] * 20
    engine.close()


def test_a_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "fleet").symlink_to(tmp_path / "elsewhere")
    for secret in (b"", SECRET):
        for directory in (tmp_path / "fleet", Path(f"{tmp_path}/fleet/.")):
            assert "symbolic link" in refusal(directory, secret)
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize("url", ["file://host/directory", "file:///directory?x", "file:///directory#x", "file:d"])
def test_a_url_with_more_than_a_directory_is_refused(url: str) -> None:
    with pytest.raises(TierConfigurationError) as raised:
        DirectoryStore(directory_of(url), may_be_shared=False).check()
    assert raised.value.field == "url"


def test_a_url_may_contain_any_character(tmp_path: Path) -> None:
    assert directory_of("file:///a%20b%3Fc%23") == "/a b?c#"
    assert directory_of("file://localhost/a") == "/a"


# Shared between users.


@pytest.mark.parametrize(
    ("mode", "directories", "files"),
    [(0o2770, 0o2770, 0o640), (0o1777, 0o1777, 0o644), (0o700, 0o700, 0o600)],
)
def test_a_secret_gives_new_files_the_access_of_the_directory(
    tmp_path: Path, umask: int, mode: int, directories: int, files: int
) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet").chmod(mode)
    keys, chunks = stored(tmp_path / "fleet", SECRET)
    assert modes(tmp_path / "fleet") == ({directories}, {files})
    engine = start(tmp_path / "fleet", SECRET)
    assert engine.look_up(keys) == [HIT] * 20
    assert engine.load(keys) == [chunks[key] for key in keys]
    engine.close()


def test_a_secret_allows_files_of_other_users_with_a_valid_seal(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet").chmod(0o777)
    keys, chunks = stored(tmp_path / "fleet", SECRET)
    for path in (tmp_path / "fleet").rglob("*"):
        give_away(path)
    engine = start(tmp_path / "fleet", SECRET)
    assert engine.look_up(keys) == [HIT] * 20
    assert engine.load(keys) == [chunks[key] for key in keys]
    engine.close()
    for path in packs(tmp_path / "fleet"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    engine = start(tmp_path / "fleet", SECRET)
    assert engine.look_up(keys) == [HIT] * 20
    assert engine.load(keys) is None
    engine.close()


# Paths that are never followed or opened.


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("folder", ["m", "p"])
def test_no_write_follows_a_link_inside_the_store(tmp_path: Path, secret: bytes, folder: str) -> None:
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
def test_no_read_follows_a_link_inside_the_store(tmp_path: Path, secret: bytes) -> None:
    fleet = tmp_path / "fleet"
    keys, _ = stored(fleet, secret)
    for number, path in enumerate(manifests(fleet)):
        path.rename(tmp_path / str(number))
        path.symlink_to(tmp_path / str(number))
    engine = start(fleet, secret)
    assert engine.look_up(keys) == [MISS] * 20
    engine.close()


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "/outside", "a//b", ".", "", "a/\0", "x" * 300, "\u00e9"]
)
def test_a_name_outside_the_store_is_no_object(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(b"1")
    store = DirectoryStore(str(tmp_path / "fleet"), may_be_shared=False)
    store.check()
    for call in (lambda: store.get(name), lambda: store.put(name, b"2"), lambda: store.delete([name])):
        with contextlib.suppress(FileNotFoundError):
            call()
    assert (tmp_path / "outside").read_bytes() == b"1"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "outside"]


@pytest.mark.parametrize("what", ["manifests", "packs"])
def test_a_pipe_in_the_place_of_an_object_is_a_miss_and_blocks_nothing(tmp_path: Path, what: str) -> None:
    keys, _ = stored(tmp_path)
    for path in manifests(tmp_path) if what == "manifests" else packs(tmp_path):
        path.unlink()
        os.mkfifo(path)
    engine = start(tmp_path)
    found = engine.look_up(keys)
    assert found == [MISS if what == "manifests" else HIT] * 20
    if what == "packs":
        assert engine.load(keys) is None
        assert engine.index.lookup(keys[0]) is MISS, "its place is no longer used"
    others = path_of(3, b"other")
    engine.store(others, chunks_of(others))
    assert engine.index.lookup(others[0]) is HIT
    engine.close()


# Interface of an obstore store.


def test_an_object_is_created_once_or_overwritten(tmp_path: Path) -> None:
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
    assert not os.listdir(tmp_path / "a/b"), "no file is left beside it"


def test_a_range_beyond_the_end_is_cut(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path), may_be_shared=False)
    data = os.urandom(3 << 20)
    store.put("a", data)
    for first, last in [(0, 10), (5, 2 << 20), (1 << 20, 9 << 20), (4 << 20, 5 << 20)]:
        found = store.get("a", options={"range": (first, last)})
        assert b"".join(found) == data[first:last] and found.meta["size"] == len(data)


def test_async_calls_read_and_write_the_same(tmp_path: Path) -> None:
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


def test_no_file_stays_open(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path), may_be_shared=False)
    store.put("a/b", b"1")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        b"".join(store.get("a/b"))
        store.put("a/b", b"1")
        with pytest.raises(FileNotFoundError):
            store.get("a/c")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_removed_object_directory_is_made_again(tmp_path: Path) -> None:
    keys, _ = stored(tmp_path / "fleet")
    engine = start(tmp_path / "fleet")
    (tmp_path / "fleet").rename(tmp_path / "gone")
    assert engine.look_up(keys)[0] is MISS
    engine.store(keys, chunks_of(keys))
    engine.close()
    engine = start(tmp_path / "fleet")
    assert engine.look_up(keys)[0] is HIT
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
    assert engine.look_up(keys)[0] is LookupResult.HIT

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
        assert process.wait(patience.seconds(6.0)) == 0, "the process ends after its last statement"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("url", ["FILE:///tmp/x", "File:///tmp/x", " file:///tmp/x", "fi\tle:///tmp/x", "S3://b/x"])
def test_a_scheme_in_upper_case_is_refused(url: str) -> None:
    """obstore would open the directory without the checks of this tier."""
    with pytest.raises(TierConfigurationError, match="lower case"):
        open_object_store(url, {}, patient(), has_secret=False)
