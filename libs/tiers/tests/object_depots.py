"""Directories as object stores, and direct changes to their files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import patience

from hybridkv.planner import LookupResult
from hybridkv.tiers import Key, Slot, TierIndex
from hybridkv.tiers.object import (
    ObjectIndex,
    ObjectMedium,
    ObjectOptions,
    ObjectSlot,
    StoreLocation,
    open_index,
    open_medium,
)
from hybridkv.tiers.object.format.record import HEADER_BYTES

FINGERPRINT = bytes(range(32))
TIMEOUT_S = patience.seconds(12.0)
"""Only a broken tier waits this long."""


def patient(**chosen: Any) -> ObjectOptions:
    """Options with timeouts that a busy machine does not exceed."""
    names = ("request_timeout_s", "connect_timeout_s", "opening_timeout_s", "close_timeout_s", "check_timeout_s")
    return ObjectOptions(**dict.fromkeys(names, TIMEOUT_S) | chosen)


def depot_at(directory: Path, secret: bytes = b"") -> StoreLocation:
    return StoreLocation(f"file://{directory}", secret=secret)


def index_at(directory: Path, options: ObjectOptions | None = None, world_size: int = 1) -> ObjectIndex:
    return open_index(depot_at(directory), FINGERPRINT, world_size, options or patient(), time.monotonic)


def medium_at(directory: Path, options: ObjectOptions | None = None, rank: int = 0) -> ObjectMedium:
    return open_medium(depot_at(directory), rank, options or patient())


def pack_path(directory: Path, slot: Slot, rank: int = 0) -> Path:
    assert isinstance(slot, ObjectSlot)
    return directory / slot.pack / str(rank)


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def flip_payload(directory: Path, slot: Slot, at: int = -1, rank: int = 0) -> None:
    """Flip one bit in the payload of a chunk."""
    assert isinstance(slot, ObjectSlot)
    flip(pack_path(directory, slot, rank), slot.offset + HEADER_BYTES + at % slot.num_bytes)


def manifests(directory: Path) -> list[Path]:
    return [path for path in _files(directory) if path.parent.name == "m"]


def packs(directory: Path) -> list[Path]:
    return [path for path in _files(directory) if path.parents[1].name == "p"]


def num_bytes_of(paths: Iterable[Path]) -> int:
    """Size of the files that still exist: a sweeper may delete some meanwhile."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _files(directory: Path) -> list[Path]:
    """All files. Unlike `glob`, `os.walk` skips a directory that a sweeper deletes meanwhile."""
    return sorted(Path(root, name) for root, _, names in os.walk(directory) for name in names)


def look_up(index: TierIndex, keys: Iterable[Key]) -> list[LookupResult]:
    """Look keys up and wait for the results."""
    keys = list(keys)
    index.start_lookup(keys, time.monotonic() + TIMEOUT_S)
    patience.wait_until(lambda: not index.any_pending(keys), "every lookup has a result")
    return [index.lookup(key) for key in keys]
