"""A removed directory is made again as soon as possible, after any obstacle."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import disk_store
import pytest
from disk_faults import OPTIONS, Store

from hybridkv.planner import LookupResult
from hybridkv.tiers.disk import FileIO
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.files.segment_files import Relocation, SegmentFiles
from hybridkv.tiers.disk.format.layout import segment_number

NUM_OLD = 8


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Store with a few chunks, in a directory with a parent that the test made."""
    (tmp_path / "mounted").mkdir(mode=0o700)
    store = Store(tmp_path / "mounted" / "store")
    for number in range(NUM_OLD):
        assert store.store(b"old %d" % number)
    return store


def store_repeatedly(store: Store) -> list[bool]:
    """Whether each of some stores succeeded, with a backoff of file work between them."""
    outcomes = []
    for _ in range(30):
        store.clock.now_s += OPTIONS.retry_interval_s
        outcomes.append(store.store())
    return outcomes


def require_a_working_store(store: Store) -> None:
    assert all(store_repeatedly(store)[10:])
    assert all(store.index.lookup(b"old %d" % number) is LookupResult.MISS for number in range(NUM_OLD))
    assert store.store(b"new")
    assert store.load_fails_with(b"new") is None
    directory = store.path / disk_store.FINGERPRINT.digest().hex() / "rank-0"
    assert set(store.index._segments.by_number) == {segment_number(file.name) for file in directory.iterdir()}
    store.close()
    reopened = disk_store.make_index(store.path, OPTIONS)
    assert reopened.lookup(b"new") is LookupResult.HIT
    reopened.close()


def test_a_directory_removed_with_its_parent_is_made_again_after_the_parent(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(store.path.parent)
    assert not any(store_repeatedly(store)[10:])
    store.path.parent.mkdir(mode=0o700)
    require_a_working_store(store)
    assert caplog.text.count("was removed; making it anew") == 1
    assert "bug in the file work" not in caplog.text


@pytest.mark.parametrize("name", ["the root", "the namespace", "LOCK", "rank-0"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_a_directory_that_cannot_be_made_at_once_is_made_later(
    store: Store, caplog: pytest.LogCaptureFixture, name: str, number: int
) -> None:
    """Also if the operator makes it, because its user may not write to the parent."""
    names = {"the root": str(store.path), "the namespace": disk_store.FINGERPRINT.digest().hex()}
    shutil.rmtree(store.path)
    store.io.failing_names[names.get(name, name)] = number
    assert not any(store_repeatedly(store)[10:])
    if name == "the root":
        store.path.mkdir(mode=0o700)
    store.io.failing_names.clear()
    require_a_working_store(store)
    assert caplog.text.count("was removed; making it anew") == 1
    assert "bug in the file work" not in caplog.text


def test_a_directory_without_its_new_epoch_offers_no_old_record(store: Store) -> None:
    shutil.rmtree(store.path)
    store.io.failing["rename"] = errno.EIO
    store_repeatedly(store)
    store.io.failing.clear()
    require_a_working_store(store)


def test_two_losses_are_logged_twice(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        shutil.rmtree(store.path)
        assert all(store_repeatedly(store)[10:])
    assert caplog.text.count("was removed; making it anew") == 2
    store.close()


def test_a_removed_rank_is_made_again_under_the_same_lock(store: Store) -> None:
    shutil.rmtree(store.path / disk_store.FINGERPRINT.digest().hex() / "rank-0")
    assert all(store_repeatedly(store)[10:])
    with pytest.raises(ValueError, match="no other engine"):
        disk_store.make_index(store.path, OPTIONS)
    require_a_working_store(store)


@pytest.mark.parametrize("how", ["removed", "moved away"])
def test_the_next_write_notices_a_missing_rank(store: Store, how: str) -> None:
    """Not only when the ready segments are used up, which may take long while every store fails."""
    rank = store.path / disk_store.FINGERPRINT.digest().hex() / "rank-0"
    if how == "removed":
        shutil.rmtree(rank)
    else:
        rank.rename(store.path.parent / "away")
    store.clock.now_s += OPTIONS.changes_interval_s
    store.index.touch([b"old 0"])
    assert store.index.drain(disk_store.TIMEOUT_S)
    assert all(store.index.lookup(b"old %d" % number) is LookupResult.MISS for number in range(NUM_OLD))
    assert store.store(b"next")
    store.close()


@pytest.mark.parametrize("are_open", [False, True])
def test_deleted_segments_are_noticed_in_a_directory_that_stays(store: Store, are_open: bool) -> None:
    """As by a program that deletes old files. Every store to such a segment fails if the medium must open it, so that
    the breaker opens, and few stores are tried."""
    for segment in (store.path / disk_store.FINGERPRINT.digest().hex() / "rank-0").iterdir():
        if not are_open:
            number = segment_number(segment.name)
            assert number is not None
            store.medium._cache.forget(number)
        segment.unlink()
    outcomes = store_repeatedly(store)
    assert outcomes.count(False) <= 1, outcomes
    if not are_open:
        require_a_working_store(store)


def test_a_deleted_segment_in_use_is_lost_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A pinned chunk keeps it in the tables, and later failures must not count it again."""
    assert store.index.pin(b"old 7") is not None
    for segment in (store.path / disk_store.FINGERPRINT.digest().hex() / "rank-0").iterdir():
        number = segment_number(segment.name)
        assert number is not None
        store.medium._cache.forget(number)
        segment.unlink()
    store_repeatedly(store)
    for _ in range(5):
        store.io.failing["pwritev"] = errno.EIO
        store.clock.now_s += OPTIONS.retry_interval_s
        assert not store.store()
        store.io.failing.clear()
        store.clock.now_s += OPTIONS.retry_interval_s
        assert store.store()
    assert caplog.text.count("segments are missing") == 1
    store.index.unpin(b"old 7")
    require_a_working_store(store)


def test_a_directory_that_cannot_be_read_is_not_removed(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.io.failing |= {"pwritev": errno.EIO, "open": errno.EIO}
    assert not any(store_repeatedly(store))
    store.io.failing.clear()
    assert all(store_repeatedly(store)[1:])
    assert "was removed" not in caplog.text and "are missing" not in caplog.text
    store.close()


def test_failed_stores_look_for_missing_files_at_intervals(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    present, num_looks = Namespace.is_present, 0

    def counting(namespace: Namespace) -> bool:
        nonlocal num_looks
        num_looks += 1
        return present(namespace)

    monkeypatch.setattr(Namespace, "is_present", counting)
    store.io.failing["pwritev"] = errno.EIO
    for expected in (1, 1, 1, 2):
        store.clock.now_s += OPTIONS.retry_interval_s if expected == 2 else 0
        assert not store.store() and store.index.drain(disk_store.TIMEOUT_S)
        assert num_looks == expected
    store.close()


def test_a_closed_namespace_makes_and_deletes_no_files(tmp_path: Path) -> None:
    namespace = Namespace(FileIO(), str(tmp_path / "store"), disk_store.FINGERPRINT)
    namespace.close()
    files = SegmentFiles(namespace, OPTIONS.capacity_bytes, False)
    for call in (
        lambda: files.create(0, 0, 1 << 20, 0),
        lambda: files.seal(0, 0, 8192),
        lambda: files.drop(0),
        lambda: files.copy([Relocation(b"key", 8192, 1 << 32 | 8192, 100)]),
    ):
        with pytest.raises(OSError, match="is not open"):
            call()
