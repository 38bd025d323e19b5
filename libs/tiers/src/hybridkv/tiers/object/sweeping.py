"""Sweeps: delete the least recently used objects of a store that is too large, and the leftovers of killed engines.

Engines may read and write the store during a sweep. A sweep deletes a manifest before the packs that it lists. An
object younger than one hour is no leftover, because its writer may not be done. An engine that finds a manifest without
its pack computes the chunks. A sweep lists the objects several times and keeps no list, so its memory is limited.

Ages are measured by the store's clock.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import xxhash

from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.format.manifest import ListedPacks, packs_of
from hybridkv.tiers.object.names import ObjectKind, parse_name, rank_names
from hybridkv.tiers.object.store import describe

if TYPE_CHECKING:
    from obstore import ObjectMeta

    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
"""Younger objects are no leftovers: their writer may not be done."""
KEPT_SHARE = 0.9
"""A store above its limit is swept to this share of the limit."""
MAX_MANIFEST_BYTES = 16 << 20
"""A larger object is no manifest."""
_LATE_USE_S = 600.0
"""A manifest that was last written less than this after the age limit of the sweep may list older packs. So its packs
are checked."""
_MAX_EXACT = 200_000
"""Limit of the objects of the last bucket that are sorted by their exact age."""
_DELETE_BATCH = 256
"""Number of objects that are deleted in one request."""
# (age from which a bucket has this width, width), in seconds
_WIDTHS = ((0.0, 1.0), (3600.0, 10.0), (86_400.0, 60.0), (30 * 86_400.0, 3600.0))
_MAX_AGE_S = 10 * 365 * 86_400.0


class SweepReason(StrEnum):
    """Why an object is deleted."""

    LEAST_RECENTLY_USED = "least_recently_used"
    """The store is above its limit, or the object was not used for longer than `SweepRules.unused_s`."""
    UNLISTED = "unlisted"
    """A pack that no manifest lists: its writer was killed, or its manifest is gone."""
    BROKEN = "broken"
    """A manifest that lists a pack that is gone."""
    UNREADABLE = "unreadable"
    """A manifest that no engine can read."""
    SHORT_LIVED = "short_lived"
    """An object of a check of the store, or of an unfinished copy, left by a killed engine."""
    TEMPORARY = "temporary"
    """An unfinished file, left by a killed engine."""


@dataclass(slots=True)
class SweepReport:
    """Result of a sweep.

    Args:
        num_objects: objects of hybridkv in the store before the sweep.
        num_bytes: size of these objects.
        num_other: objects that are not hybridkv's; they are never deleted, and do not count in the limit.
        reasons: number and bytes of deleted objects by reason, or in a dry run of objects that would be deleted.
        num_failed: objects in `reasons` that could not be deleted.
        num_directories: empty directories that were removed.
        is_complete: False if the sweep was stopped, or unlisted packs were kept because a manifest could not be read or
            a directory could not be opened.
    """

    num_objects: int = 0
    num_bytes: int = 0
    num_other: int = 0
    reasons: dict[SweepReason, tuple[int, int]] = field(default_factory=dict)
    num_failed: int = 0
    num_directories: int = 0
    is_complete: bool = True

    @property
    def num_deleted(self) -> int:
        """Number of objects in `reasons`, also those of `num_failed`."""
        return sum(number for number, _ in self.reasons.values())

    @property
    def deleted_bytes(self) -> int:
        """Bytes of the objects in `reasons`."""
        return sum(num_bytes for _, num_bytes in self.reasons.values())


@dataclass(frozen=True, slots=True)
class SweepRules:
    """Rules of a sweep.

    Args:
        capacity_bytes: limit of all objects together; None: no limit.
        unused_s: delete packs and manifests that were not written or renewed for this time; None: no time limit.
        with_leftovers: delete leftovers of killed engines. Reads every manifest.
        is_dry: delete nothing.
    """

    capacity_bytes: int | None = None
    unused_s: float | None = None
    with_leftovers: bool = True
    is_dry: bool = True


class NameFilter:
    """Set of names in fixed memory. It never misses a name, and rarely finds one that was not added.

    Args:
        num_bits: size, a power of two. With a million names, one in 400 other names is found wrongly at 2^24 bits, and
            almost none at 2^27.
    """

    def __init__(self, num_bits: int = 1 << 27) -> None:
        self._bits = bytearray(num_bits // 8)
        self._mask = num_bits - 1

    def _places(self, name: str) -> Iterator[int]:
        digest = xxhash.xxh3_128_intdigest(name.encode())
        for _ in range(4):
            yield digest & self._mask
            digest >>= 32

    def add(self, name: str) -> None:
        for place in self._places(name):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, name: str) -> bool:
        return all(self._bits[place >> 3] >> (place & 7) & 1 for place in self._places(name))


def _bucket(age_s: float) -> int:
    """Number of the bucket of an age. Old buckets are wider."""
    age_s = min(max(age_s, 0.0), _MAX_AGE_S)
    number = 0
    for place, (start_s, width_s) in enumerate(_WIDTHS):
        end_s = _WIDTHS[place + 1][0] if place + 1 < len(_WIDTHS) else _MAX_AGE_S
        if age_s < end_s or end_s == _MAX_AGE_S:
            return number + int((age_s - start_s) / width_s)
        number += int((end_s - start_s) / width_s)
    return number


class Sweep:
    """One sweep.

    Args:
        store: the store.
        rules: objects to delete.
        now_s: the store's clock, in seconds since 1970.
        on_progress: called after each piece of a list, with the number of objects so far in this pass.
        should_stop: returns True to stop the sweep soon.
    """

    def __init__(
        self,
        store: Store,
        rules: SweepRules,
        now_s: float,
        on_progress: Callable[[int], None] = lambda number: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._rules = rules
        self._now_s = now_s
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._report = SweepReport()
        self._queued: list[str] = []

    def run(self) -> SweepReport:
        """Sweep.

        Raises:
            Exception: (obstore or the system) the store cannot be listed.
        """
        rules, report = self._rules, self._report
        present = NameFilter() if rules.with_leftovers else None
        sizes: dict[int, int] = {}
        for meta in self._list():
            kind, _, pack = parse_name(meta["path"])
            if kind is ObjectKind.OTHER:
                report.num_other += 1
                continue
            report.num_objects += 1
            report.num_bytes += meta["size"]
            age_s = self._age_s(meta)
            if kind in (ObjectKind.PACK, ObjectKind.MANIFEST):
                sizes[_bucket(age_s)] = sizes.get(_bucket(age_s), 0) + meta["size"]
                if pack and present is not None:
                    present.add(meta["path"])
            elif rules.with_leftovers and age_s > GRACE_S and kind is not ObjectKind.EPOCH:
                is_file = kind is ObjectKind.TEMPORARY
                self._delete(meta, SweepReason.TEMPORARY if is_file else SweepReason.SHORT_LIVED)
        kept_from_s = self._kept_from_s(sizes)
        if rules.with_leftovers or kept_from_s > 0:
            listed = self._sweep_manifests(kept_from_s, present)
            self._flush()
            self._sweep_packs(kept_from_s, listed)
            self._flush()
        if isinstance(self._store, DirectoryStore) and rules.with_leftovers and not rules.is_dry:
            report.num_directories = self._store.remove_empty_directories(self._now_s - GRACE_S)
        return report

    def _list(self) -> Iterator[ObjectMeta]:
        done = 0
        for metas in self._store.list():
            if self._should_stop():
                self._report.is_complete = False
                return
            yield from metas
            done += len(metas)
            self._on_progress(done)

    def _age_s(self, meta: ObjectMeta) -> float:
        return self._now_s - meta["last_modified"].timestamp()

    def _kept_from_s(self, sizes: dict[int, int]) -> float:
        """Age limit, as a time: packs and manifests that were last written before it are deleted. 0: no limit."""
        from_s = 0.0 if self._rules.unused_s is None else self._now_s - self._rules.unused_s
        capacity_bytes = self._rules.capacity_bytes
        surplus_bytes = 0
        if capacity_bytes is not None and self._report.num_bytes > capacity_bytes:
            surplus_bytes = self._report.num_bytes - int(KEPT_SHARE * capacity_bytes)
        if surplus_bytes <= 0:
            return from_s
        last = 0
        for last in sorted(sizes, reverse=True):
            if sizes[last] >= surplus_bytes:
                break
            surplus_bytes -= sizes[last]
        exact: list[tuple[float, int]] = []
        for meta in self._list():
            is_ours = parse_name(meta["path"]).kind in (ObjectKind.PACK, ObjectKind.MANIFEST)
            if is_ours and _bucket(self._age_s(meta)) == last and len(exact) < _MAX_EXACT:
                exact.append((meta["last_modified"].timestamp(), meta["size"]))
        kept_s = from_s
        for modified_s, size in sorted(exact):
            if surplus_bytes <= 0:
                break
            surplus_bytes -= size
            kept_s = modified_s + 1e-6  # also objects with an equal time
        return max(from_s, kept_s)

    def _sweep_manifests(self, kept_from_s: float, present: NameFilter | None) -> NameFilter | None:
        """Delete manifests. Returns the packs that the kept manifests list; None if not all of them are known."""
        listed = NameFilter() if present is not None else None
        num_left_out = self._num_left_out()
        for meta in self._list():
            name = meta["path"]
            kind, owner, _ = parse_name(name)
            if kind is not ObjectKind.MANIFEST:
                continue
            modified_s = meta["last_modified"].timestamp()
            if modified_s < kept_from_s:
                self._delete(meta, SweepReason.LEAST_RECENTLY_USED)
                continue
            may_list_deleted = kept_from_s > 0 and modified_s < kept_from_s + _LATE_USE_S
            if listed is None and not may_list_deleted:
                continue
            try:
                reason, packs = self._deletion_reason(meta, owner, kept_from_s if may_list_deleted else 0.0, present)
            except FileNotFoundError:
                continue
            except Exception as error:  # also the `ValueError` of obstore for a name that it refuses
                logger.debug("%s cannot be read, so unlisted packs are kept: %s", name, describe(error))
                listed, self._report.is_complete = None, False
                continue
            if reason is not None:
                self._delete(meta, reason)
            elif listed is not None:
                for pack in packs:
                    listed.add(pack)
        if self._num_left_out() != num_left_out:
            listed, self._report.is_complete = None, False
        return listed

    def _deletion_reason(
        self, meta: ObjectMeta, owner: str, kept_from_s: float, present: NameFilter | None
    ) -> tuple[SweepReason | None, Sequence[str]]:
        """Reason to delete a manifest, else None, and the packs that it lists.

        Raises:
            Exception: (obstore or the system) the manifest, or one of its packs, cannot be read now.
        """
        listed = self._packs_of(meta["path"], owner)
        is_leftover = present is not None and self._age_s(meta) > GRACE_S
        if listed is None:
            return SweepReason.UNREADABLE if is_leftover else None, []
        if kept_from_s and any(self._is_deleted_by_age(name, kept_from_s) for name in _objects_of(listed)):
            return SweepReason.LEAST_RECENTLY_USED, []
        if (
            is_leftover
            and present is not None
            and any(name not in present and self._is_gone(name) for name in _objects_of(listed))
        ):
            return SweepReason.BROKEN, []
        return None, listed.packs

    def _num_left_out(self) -> int:
        return self._store.num_left_out if isinstance(self._store, DirectoryStore) else 0

    def _sweep_packs(self, kept_from_s: float, listed: NameFilter | None) -> None:
        if self._should_stop() or not self._report.is_complete:
            listed = None
        for meta in self._list():
            kind, _, pack = parse_name(meta["path"])
            if kind is not ObjectKind.PACK:
                continue
            if meta["last_modified"].timestamp() < kept_from_s:
                self._delete(meta, SweepReason.LEAST_RECENTLY_USED)
            elif listed is not None and self._age_s(meta) > GRACE_S and pack not in listed:
                self._delete(meta, SweepReason.UNLISTED)

    def _packs_of(self, name: str, owner: str) -> ListedPacks | None:
        """Packs of its own namespace that a manifest lists. None if it is too large, or cannot be decoded in two reads:
        then no engine can read it.

        Raises:
            ManifestVersionError: the manifest has another version.
            Exception: (obstore or the system) the manifest cannot be read now.
        """
        for _ in range(2):
            found = self._store.get(name)
            if found.meta["size"] > MAX_MANIFEST_BYTES:
                return None
            listed = packs_of(b"".join(map(bytes, found.stream())))
            if listed is not None:
                return listed._replace(packs=[pack for pack in listed.packs if pack.startswith(f"{owner}/")])
        return None

    def _is_deleted_by_age(self, name: str, kept_from_s: float) -> bool:
        """True if an object of a pack is gone, or is deleted because of its age."""
        try:
            return self._store.head(name)["last_modified"].timestamp() < kept_from_s
        except FileNotFoundError:
            return True

    def _is_gone(self, name: str) -> bool:
        try:
            self._store.head(name)
        except FileNotFoundError:
            return True
        return False

    def _delete(self, meta: ObjectMeta, reason: SweepReason) -> None:
        number, num_bytes = self._report.reasons.get(reason, (0, 0))
        self._report.reasons[reason] = (number + 1, num_bytes + meta["size"])
        if not self._rules.is_dry:
            self._queued.append(meta["path"])
            if len(self._queued) >= _DELETE_BATCH:
                self._flush()

    def _flush(self) -> None:
        """Delete the queued objects. If one object cannot be deleted, the others are still deleted."""
        queued, self._queued = self._queued, []
        if not queued:
            return
        try:
            self._store.delete(queued)
        except Exception as first:
            logger.debug("objects are deleted one by one: %s", describe(first))
            for path in queued:
                try:
                    self._store.delete([path])
                except FileNotFoundError:
                    pass
                except Exception as error:
                    logger.debug("%s could not be deleted: %s", path, describe(error))
                    self._report.num_failed += 1


def _objects_of(listed: ListedPacks) -> Iterator[str]:
    """Names of the packs' objects of all ranks."""
    for pack in listed.packs:
        yield from rank_names(pack, listed.world_size)


@contextlib.contextmanager
def sweep_lock(store: Store) -> Iterator[bool]:
    """Lock against other sweepers of the same directory. False if another process sweeps now. Stores that are not
    directories have no lock: two sweeps at the same time delete the same objects."""
    if isinstance(store, DirectoryStore):
        with store.locked() as is_locked:
            yield is_locked
    else:
        yield True


class CapacitySweeper:
    """Keeps a directory below a limit, and deletes leftovers of killed engines once an hour. Runs on one thread.

    Args:
        store: the directory.
        capacity_bytes: limit of all objects in the directory.
        clock_ahead: returns the seconds by which the clock of the file system is ahead of this host's clock.
        should_stop: returns True to stop a sweep soon.
    """

    def __init__(
        self,
        store: DirectoryStore,
        capacity_bytes: int,
        clock_ahead: Callable[[], float],
        should_stop: Callable[[], bool],
    ) -> None:
        self._store = store
        self._capacity_bytes = capacity_bytes
        self._clock_ahead = clock_ahead
        self._should_stop = should_stop
        self._leftovers_s = -float("inf")
        """Time of the last deletion of leftovers."""
        self.num_swept = self.num_failed = 0
        """Number of objects that were deleted, and of objects that could not be deleted, since the start."""

    def sweep(self) -> SweepReport | None:
        """Sweep once. None if another process sweeps now.

        Raises:
            OSError: the directory cannot be read.
        """
        with sweep_lock(self._store) as is_locked:
            if not is_locked:
                return None
            began_s = time.monotonic()
            with_leftovers = began_s - self._leftovers_s >= GRACE_S
            rules = SweepRules(self._capacity_bytes, with_leftovers=with_leftovers, is_dry=False)
            now_s = time.time() + self._clock_ahead()
            report = Sweep(self._store, rules, now_s, self._yield, self._should_stop).run()
        if with_leftovers:
            self._leftovers_s = began_s
        self.num_swept += report.num_deleted - report.num_failed
        self.num_failed += report.num_failed
        if report.num_deleted:
            logger.info(
                "%d of %d objects were deleted, %.1f of %.1f MiB: %s",
                report.num_deleted - report.num_failed,
                report.num_objects,
                report.deleted_bytes / 2**20,
                report.num_bytes / 2**20,
                ", ".join(f"{reason} {number}" for reason, (number, _) in report.reasons.items()),
            )
        return report

    def _yield(self, number: int) -> None:
        """Pause, so that the engine's threads can run: a sweep is never urgent."""
        time.sleep(0.001)
