"""A simulated loss of power keeps everything that was synced, and any part of the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from soak.power import VolatileIO

SEEDS = range(40)
PAGE = bytes([7]) * 4096


def images(tmp_path: Path, change: Callable[[VolatileIO, Path], None]) -> list[Path]:
    """The directory after `change` and a loss of power, for every seed."""
    found = []
    for seed in SEEDS:
        base, image = tmp_path / f"base {seed}", tmp_path / f"image {seed}"
        base.mkdir()
        io = VolatileIO(base, str(seed), 0, lambda: None)
        change(io, base)
        io.write_image(image)
        found.append(image)
    return found


def write(io: VolatileIO, path: Path, data: bytes = PAGE) -> int:
    fd = io.open(str(path), os.O_RDWR | os.O_CREAT)
    io.pwritev(fd, [data], 0)
    return fd


def sync_directory(io: VolatileIO, path: Path) -> None:
    fd = io.open(str(path), os.O_RDONLY | os.O_DIRECTORY)
    io.fsync(fd)
    io.close(fd)


def write_synced(io: VolatileIO, path: Path) -> None:
    fd = write(io, path)
    io.fdatasync(fd)
    io.close(fd)
    sync_directory(io, path.parent)


def test_synced_data_survives(tmp_path: Path) -> None:
    for image in images(tmp_path, lambda io, base: write_synced(io, base / "file")):
        assert (image / "file").read_bytes() == PAGE


def test_synced_data_survives_later_writes_without_sync(tmp_path: Path) -> None:
    def change(io: VolatileIO, base: Path) -> None:
        write_synced(io, base / "file")
        fd = io.open(str(base / "file"), os.O_RDWR)
        io.pwritev(fd, [PAGE], 4096)

    for image in images(tmp_path, change):
        assert (image / "file").read_bytes()[:4096] == PAGE


def test_unsynced_data_may_be_missing_torn_or_whole(tmp_path: Path) -> None:
    found = set()
    for image in images(tmp_path, lambda io, base: io.close(write(io, base / "file"))):
        path = image / "file"
        data = path.read_bytes() if path.exists() else None
        found.add("missing" if data is None else "whole" if data == PAGE else "torn")
    assert found == {"missing", "torn", "whole"}


def test_a_file_may_be_missing_if_its_directory_was_not_synced(tmp_path: Path) -> None:
    def change(io: VolatileIO, base: Path) -> None:
        fd = write(io, base / "file")
        io.fdatasync(fd)
        io.close(fd)

    there = [(image / "file").exists() for image in images(tmp_path, change)]
    # A file system with a journal keeps it; the other kind may lose it.
    assert any(there) and not all(there)


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path, is_synced: bool) -> None:
    def change(io: VolatileIO, base: Path) -> None:
        write_synced(io, base / "file")
        fd = write(io, base / "file.new", b"new")
        io.fdatasync(fd)
        io.close(fd)
        directory = io.open(str(base), os.O_RDONLY | os.O_DIRECTORY)
        io.rename("file.new", "file", directory)
        if is_synced:
            io.fsync(directory)

    found = {(image / "file").read_bytes() for image in images(tmp_path, change)}
    assert found == ({b"new"} if is_synced else {b"new", PAGE})


def test_a_removed_file_may_be_back_until_its_directory_is_synced(tmp_path: Path) -> None:
    def change(io: VolatileIO, base: Path) -> None:
        for name in ("one", "other"):
            write_synced(io, base / name)
        directory = io.open(str(base), os.O_RDONLY | os.O_DIRECTORY)
        io.remove("one", directory)
        io.fsync(directory)
        io.remove("other", directory)

    found = {tuple(sorted(os.listdir(image))) for image in images(tmp_path, change)}
    assert found == {(), ("other",)}


def test_ignored_syncs_keep_no_data(tmp_path: Path) -> None:
    kept = []
    for seed in SEEDS:
        base, image = tmp_path / f"base {seed}", tmp_path / f"image {seed}"
        base.mkdir()
        io = VolatileIO(base, str(seed), 0, lambda: None, ignores_syncs=True)
        write_synced(io, base / "file")
        io.write_image(image)
        kept.append((image / "file").exists() and (image / "file").read_bytes() == PAGE)
    assert not all(kept)
