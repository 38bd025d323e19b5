"""Several caches in one directory share its capacity, never mix, and touch no other files."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import disk_store
import msgspec
import pytest

from hybridkv.hashing import FORMAT_VERSION
from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, Slot, TierConfigurationError
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, FileIO
from hybridkv.tiers.files.directory import Directory, open_or_create_root, require_directory
from kits.tiers.inline_janitor import InlineJanitor

OPTIONS = disk_store.options_for(8 * 8192, num_spare=3)
OTHER_USER = 12345
OLDER = FORMAT_VERSION - 1
"""Version of keys and chunks of an older build, which orders the bytes of chunks differently."""


def opened(path: Path, options: DiskOptions = OPTIONS, io: FileIO | None = None, **changes: object) -> DiskIndex:
    return disk_store.make_index(path, options, io, **changes)


def filled(path: Path, options: DiskOptions = OPTIONS, **changes: object) -> None:
    """Cache that was used and closed."""
    index = opened(path, options, **changes)
    medium = disk_store.make_medium(path, options, **changes)
    for number in range(40):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 4000)
    medium.close()
    index.close()


def namespace_of(path: Path, **changes: object) -> Path:
    return path / disk_store.fingerprint(**changes).digest().hex()


def test_a_chunk_of_another_cache_is_a_miss(tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, capacity_bytes=2 * OPTIONS.capacity_bytes)
    filled(tmp_path / "store", options)
    index = opened(tmp_path / "store", options, dtype="float16")
    assert index.lookup(b"39") is LookupResult.MISS
    index.close()
    index = opened(tmp_path / "store", options)
    assert index.lookup(b"39") is LookupResult.HIT
    index.close()


def test_chunks_of_an_older_format_are_misses_and_make_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    filled(path, format_version=OLDER)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        index = opened(path)
    [line] = [record.getMessage() for record in caplog.records if "nearest" in record.getMessage()]
    assert line.endswith(f"format_version (the version of keys and chunks): {FORMAT_VERSION} is not {OLDER}")
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
    assert all(index.lookup(b"%d" % number) is LookupResult.MISS for number in range(40))
    medium = disk_store.make_medium(path, OPTIONS)
    for number in range(40):
        assert disk_store.store(index, medium, b"%d" % number, b"y" * 4000)
        assert disk_store.disk_bytes(path) <= OPTIONS.capacity_bytes
    assert not namespace_of(path, format_version=OLDER).exists()
    counts = index.take_disk_counts()
    assert (counts.namespaces_deleted, dict(counts.failures)) == (1, {})
    loaded = disk_store.load(index, medium, b"39")
    assert loaded is not None and loaded[1] == b"y" * 4000
    medium.close()
    index.close()


def test_each_record_carries_its_format_version(tmp_path: Path) -> None:
    """The name of a directory is not the only separation of formats."""
    path = tmp_path / "store"
    options = msgspec.structs.replace(OPTIONS, capacity_bytes=4 * OPTIONS.capacity_bytes)
    filled(path, options, format_version=OLDER)
    shutil.copytree(namespace_of(path, format_version=OLDER), namespace_of(path))
    for version, expected in ((FORMAT_VERSION, LookupResult.MISS), (OLDER, LookupResult.HIT)):
        index = opened(path, options, format_version=version)
        assert index.lookup(b"39") is expected
        index.close()


def test_a_cache_is_found_with_its_groups_in_another_order(tmp_path: Path) -> None:
    [full] = disk_store.FINGERPRINT.groups
    window = msgspec.structs.replace(full, kind="window", window_tokens=32)
    filled(tmp_path / "store", groups=(full, window))
    index = opened(tmp_path / "store", groups=(window, full))
    assert index.lookup(b"39") is LookupResult.HIT
    index.close()


def test_a_new_cache_logs_the_differences_to_the_nearest_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = msgspec.structs.replace(OPTIONS, capacity_bytes=4 * OPTIONS.capacity_bytes)
    filled(tmp_path / "store", options)
    filled(tmp_path / "store", options, model="another", dtype="float32")
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        opened(tmp_path / "store", options, dtype="float16").close()
    [line] = [record.getMessage() for record in caplog.records if "nearest" in record.getMessage()]
    assert line.endswith("the nearest differs: dtype: float16 is not bfloat16")


def test_a_second_opener_is_refused_with_the_holder(tmp_path: Path) -> None:
    index = opened(tmp_path / "store")
    with pytest.raises(TierConfigurationError) as caught:
        opened(tmp_path / "store")
    assert str(namespace_of(tmp_path / "store")) in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    index.close()
    opened(tmp_path / "store").close()


def test_the_cache_opened_longest_ago_makes_room_first(tmp_path: Path) -> None:
    path = tmp_path / "store"
    options = msgspec.structs.replace(OPTIONS, capacity_bytes=4 * OPTIONS.capacity_bytes, spare_share=0.1)
    for number, model in enumerate(["oldest", "older"]):
        filled(path, options, model=model)
        os.utime(namespace_of(path, model=model) / "LOCK", ns=(number, number))
    index = opened(path, options)
    medium = disk_store.make_medium(path, options)
    models = ["oldest", "older"]
    seen = [models]
    for number in range(200):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 4000)
        assert disk_store.disk_bytes(path) <= options.capacity_bytes
        present = [model for model in models if namespace_of(path, model=model).exists()]
        seen += [present] if present != seen[-1] else []
    assert seen == [models, ["older"], []]
    assert index.take_disk_counts().namespaces_deleted == 2
    medium.close()
    index.close()


def test_an_open_cache_is_never_deleted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    filled(path, model="living")
    living = opened(path, model="living")
    index = opened(path)
    medium = disk_store.make_medium(path, OPTIONS)
    taken = sum(disk_store.store(index, medium, b"%d" % number, b"x" * 4000) for number in range(60))
    assert taken < 60, "the open cache takes the capacity"
    assert "create: EDQUOT" in index.take_disk_counts().failures
    # Except for the small files of the cache that found no room.
    assert disk_store.disk_bytes(path) <= OPTIONS.capacity_bytes + 15 * 4096
    assert living.lookup(b"39") is LookupResult.HIT
    for each in (medium, index, living):
        each.close()


def test_files_are_accessible_only_to_their_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        filled(tmp_path / "store")
    finally:
        os.umask(before)
    for found in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        expected = 0o700 if found.is_dir() else 0o600
        assert stat.S_IMODE(found.stat().st_mode) == expected, found


def test_only_the_configured_path_is_written(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "store" / "of somebody else").write_text("kept")
    filled(tmp_path / "store")
    assert [found.name for found in tmp_path.iterdir()] == ["store"]
    assert (tmp_path / "store" / "of somebody else").read_text() == "kept"
    names = sorted(found.name for found in (tmp_path / "store").iterdir())
    assert names == sorted(["of somebody else", disk_store.FINGERPRINT.digest().hex()])


def refusal(path: Path) -> str:
    with pytest.raises(TierConfigurationError) as caught:
        opened(path)
    assert caught.value.field == "path"
    return str(caught.value)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "real")
    assert "symbolic link" in refusal(tmp_path / "store")
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("behind", ["/", "/.", "//", "/./", "/sub/.."])
def test_a_link_is_refused_with_any_end_of_its_path(tmp_path: Path, behind: str) -> None:
    (tmp_path / "real" / "sub").mkdir(parents=True, mode=0o700)
    (tmp_path / "real").chmod(0o700)
    (tmp_path / "store").symlink_to(tmp_path / "real")
    with pytest.raises(TierConfigurationError, match="symbolic link"):
        DiskIndex(f"{tmp_path}/store{behind}", disk_store.FINGERPRINT, OPTIONS, InlineJanitor())
    assert [found.name for found in (tmp_path / "real").iterdir()] == ["sub"]


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/\ud800", "relative", ""])
def test_an_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(TierConfigurationError) as caught:
        DiskIndex(path, disk_store.FINGERPRINT, OPTIONS, InlineJanitor())
    assert caught.value.field == "path"
    with pytest.raises(TierConfigurationError):
        DiskMedium(path, disk_store.FINGERPRINT.digest(), 0, OPTIONS)


def test_index_and_medium_find_the_same_directory(tmp_path: Path) -> None:
    index = opened(tmp_path / "store")
    medium = DiskMedium(f"{tmp_path}/./store//", index.namespace, 0, OPTIONS)
    assert disk_store.store(index, medium, b"key", b"x" * 100)
    medium.close()
    index.close()


@pytest.mark.parametrize("name", ["", "rank-0", "LOCK", "epoch", "snapshot", "changes", "namespace.json", "a segment"])
def test_a_link_anywhere_in_the_store_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store"
    filled(path)
    target = namespace_of(path) / name
    segments = sorted((namespace_of(path) / "rank-0").iterdir())
    if name == "a segment":
        target = segments[0]
    target.rename(tmp_path / "moved away")
    target.symlink_to(tmp_path / "moved away")
    assert "symbolic link" in refusal(path)
    assert target.is_symlink()


@pytest.mark.parametrize("name", ["", "namespace", "namespace/rank-0", "namespace/LOCK", "namespace/epoch"])
def test_files_of_another_user_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store"
    filled(path)
    try:
        os.chown(path / name.replace("namespace", namespace_of(path).name), OTHER_USER, OTHER_USER)
    except OSError as error:
        pytest.skip(f"this process cannot give files away: {error.strerror}")
    assert f"belongs to user {OTHER_USER}" in refusal(path)


@pytest.mark.parametrize("name", ["", "namespace", "namespace/rank-0", "namespace/LOCK"])
def test_files_that_others_may_write_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store"
    filled(path)
    (path / name.replace("namespace", namespace_of(path).name)).chmod(0o770)
    assert "others may write" in refusal(path)


def test_a_file_instead_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    assert "Not a directory" in refusal(tmp_path / "store")


def test_a_path_without_a_parent_is_refused(tmp_path: Path) -> None:
    assert "its parent must exist" in refusal(tmp_path / "no" / "store")


@pytest.mark.parametrize("end", ["/.", "/", "/../store"])
def test_a_path_that_can_be_created_passes_the_check(tmp_path: Path, end: str) -> None:
    path = f"{tmp_path}/store{end}"
    require_directory(path)
    assert not (tmp_path / "store").exists()
    open_or_create_root(FileIO(), path).close()
    assert (tmp_path / "store").is_dir()


def test_a_relative_path_is_refused() -> None:
    assert "an absolute path" in refusal(Path("store"))


def test_a_link_that_appears_later_is_not_followed(tmp_path: Path) -> None:
    """A medium opens files long after the index checked them."""
    path = tmp_path / "store"
    index = opened(path)
    slot = index.reserve(b"key", 100)
    assert isinstance(slot, Slot)
    file = disk_store.segment_path(path, slot)
    file.rename(tmp_path / "moved away")
    file.symlink_to(tmp_path / "moved away")
    medium = disk_store.make_medium(path, OPTIONS)
    before = (tmp_path / "moved away").read_bytes()
    medium.store(disk_store.Ticket(1), b"key", slot, [b"x" * 100])
    [completion] = disk_store.finish(medium)
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO
    assert (tmp_path / "moved away").read_bytes() == before
    medium.close()
    index.abort(b"key")
    index.close()


def test_a_directory_reports_its_disk_usage(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    directory = Directory.root(FileIO(), str(tmp_path / "store"), create=False)
    assert directory.disk_bytes() == disk_store.disk_bytes(tmp_path / "store")
    directory.close()


def test_a_closed_index_releases_the_lock_while_still_referenced(tmp_path: Path) -> None:
    first = DiskIndex(str(tmp_path / "store"), disk_store.FINGERPRINT, OPTIONS, InlineJanitor())
    first.close()
    first.close()
    second = opened(tmp_path / "store")
    assert first.lookup(b"key") is LookupResult.MISS
    second.close()
