"""Inspects and verifies an object store without an engine. Changes nothing.

The list of objects is read in pieces, and one chunk is in memory at a time. Engines may use the store meanwhile;
objects that they delete count as gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.digests import view_digest
from hybridkv.tiers.object.format.epoch import EPOCH_MARK_BYTES, parse_epoch
from hybridkv.tiers.object.format.manifest import is_sealed, packs_of
from hybridkv.tiers.object.format.record import HEADER_BYTES, PartPlace, check_seal, parse_header
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.medium import RangeStream
from hybridkv.tiers.object.names import ObjectKind, namespace_of, parse_name, rank_names
from hybridkv.tiers.object.store import describe
from hybridkv.tiers.object.sweeping import MAX_MANIFEST_BYTES

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

MAX_DAMAGES = 1000
"""Limit of listed damages. All damages are counted."""


class ObjectCacheReport(msgspec.Struct):
    """One cache in one epoch.

    Args:
        name: namespace, in hexadecimal; for an entry with short-lived objects alone, the name of a cache.
        cache: name of the cache, if a mark in the store names this epoch as the current one. Else empty: the first
            epoch of a cache without a mark, or an epoch that a reset ended.
        epoch: the current epoch; 0 if unknown.
        num_packs: objects with chunks, over all ranks.
        pack_bytes: size of these objects.
        num_manifests: manifests.
        manifest_bytes: size of the manifests.
        oldest_s: earliest last write of packs and manifests, in seconds since 1970.
        newest_s: latest last write.
        num_leftovers: objects of checks, unfinished copies and unfinished files, also those of running engines.
    """

    name: str
    cache: str = ""
    epoch: int = 0
    num_packs: int = 0
    pack_bytes: int = 0
    num_manifests: int = 0
    manifest_bytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = 0.0
    num_leftovers: int = 0


class ObjectStoreReport(msgspec.Struct):
    """Contents of a store.

    Args:
        caches: caches by epoch, the last written first.
        num_other: objects that are not hybridkv's.
        other_bytes: size of these objects.
    """

    caches: list[ObjectCacheReport]
    num_other: int = 0
    other_bytes: int = 0


class ObjectDamage(msgspec.Struct, frozen=True):
    """A chunk or a manifest that an engine would refuse.

    Args:
        name: name of the object.
        offset: offset of the chunk in the object; -1 for the whole object.
        reason: `FailureReason`, as of a load.
        detail: description.
    """

    name: str
    offset: int
    reason: str
    detail: str


class ObjectVerifyReport(msgspec.Struct):
    """Result of reading all packs and manifests.

    Args:
        num_records: chunks that were read, each rank's part counted.
        num_manifests: manifests that were read.
        num_damaged: chunks and manifests that an engine would refuse.
        num_incomplete: manifests that list a pack that is gone. An engine finds the prefix, fails to load it, and
            computes it.
        num_other_secret: if no secret was passed, chunks with the right checksum, and readable manifests, with a seal
            that does not fit: probably sealed with a secret.
        num_unread: objects that could not be read.
        damages: damages, and incomplete and unread objects, at most `MAX_DAMAGES`.
    """

    num_records: int = 0
    num_manifests: int = 0
    num_damaged: int = 0
    num_incomplete: int = 0
    num_other_secret: int = 0
    num_unread: int = 0
    damages: list[ObjectDamage] = []

    @property
    def is_intact(self) -> bool:
        return not (self.num_damaged or self.num_incomplete or self.num_unread)


def inspect_objects(store: Store, on_progress: Callable[[int], None] = lambda number: None) -> ObjectStoreReport:
    """Contents of a store, from its list of objects.

    Args:
        store: the store.
        on_progress: called with the number of objects so far.

    Raises:
        Exception: (obstore or the system) the store cannot be listed.
    """
    report = ObjectStoreReport([])
    caches: dict[str, ObjectCacheReport] = {}
    marks: list[str] = []
    done = 0
    for metas in store.list():
        for meta in metas:
            kind, owner, _ = parse_name(meta["path"])
            if kind is ObjectKind.OTHER:
                report.num_other += 1
                report.other_bytes += meta["size"]
                continue
            if kind is ObjectKind.EPOCH:
                marks.append(owner)
                continue
            cache = caches.setdefault(owner, ObjectCacheReport(owner))
            if kind not in (ObjectKind.PACK, ObjectKind.MANIFEST):
                cache.num_leftovers += 1
                continue
            at_s = meta["last_modified"].timestamp()
            cache.oldest_s = min(cache.oldest_s or at_s, at_s)
            cache.newest_s = max(cache.newest_s, at_s)
            if kind is ObjectKind.PACK:
                cache.num_packs += 1
                cache.pack_bytes += meta["size"]
            else:
                cache.num_manifests += 1
                cache.manifest_bytes += meta["size"]
        done += len(metas)
        on_progress(done)
    for owner in marks:
        epoch = _epoch(store, owner)
        current = caches.get(namespace_of(owner, epoch)) if epoch is not None else None
        if current is not None and epoch is not None:
            current.cache, current.epoch = owner, epoch
    report.caches = sorted(caches.values(), key=lambda cache: (-cache.newest_s, cache.name))
    return report


def _epoch(store: Store, cache: str) -> int | None:
    try:
        found = store.get(f"{cache}/epoch")
    except FileNotFoundError:
        return None
    if found.meta["size"] != EPOCH_MARK_BYTES:
        return None
    return parse_epoch(b"".join(map(bytes, found.stream())))


class ObjectVerifier:
    """Reads every pack and every manifest of a store.

    Args:
        store: the store.
        seals: seals of the fleet. Without a secret, keyed seals are not checked, only checksums.
        on_progress: called with the number of objects so far.
    """

    def __init__(self, store: Store, seals: Seals, on_progress: Callable[[int], None] = lambda number: None) -> None:
        self._store = store
        self._seals = seals
        self._on_progress = on_progress
        self._report = ObjectVerifyReport()

    def run(self) -> ObjectVerifyReport:
        """Read all packs and manifests.

        Raises:
            Exception: (obstore or the system) the store cannot be listed.
        """
        done, report = 0, self._report
        for metas in self._store.list():
            for meta in metas:
                kind, _, _ = parse_name(meta["path"])
                try:
                    if kind is ObjectKind.PACK:
                        self._verify_pack(meta["path"], meta["size"])
                    elif kind is ObjectKind.MANIFEST:
                        self._verify_manifest(meta["path"], meta["size"])
                except FileNotFoundError:
                    pass  # deleted meanwhile
                except Exception as error:
                    report.num_unread += 1
                    self._add_damage(ObjectDamage(meta["path"], -1, FailureReason.IO, describe(error)))
                done += 1
                self._on_progress(done)
        return report

    def _add_damage(self, damage: ObjectDamage) -> None:
        if len(self._report.damages) < MAX_DAMAGES:
            self._report.damages.append(damage)

    def _damaged(self, name: str, offset: int, failure: Failure) -> None:
        self._report.num_damaged += 1
        self._add_damage(ObjectDamage(name, offset, failure.reason, failure.detail))

    def _verify_pack(self, name: str, size: int) -> None:
        for offset, failure in self._records(name, size):
            self._report.num_records += 1
            if failure is not None:
                self._damaged(name, offset, failure)

    def _records(self, name: str, size: int) -> Iterator[tuple[int, Failure | None]]:
        """Offset of each record, and the failure of its load, else None. Ends at the first place where no record
        begins."""
        stream = RangeStream(self._store.get(name).stream(min_chunk_size=1), 0)
        rank = int(name.rpartition("/")[2])
        while True:
            stream.skip_zeros()
            offset = stream.offset
            header = stream.read(HEADER_BYTES)
            if not header:
                return
            head = parse_header(header)
            if head is None or head.num_bytes > size - offset:
                yield offset, Failure(FailureReason.CHECKSUM, "no chunk begins here, and the rest is not read")
                return
            data = memoryview(bytearray(head.num_bytes))
            if stream.read_into([data]) < len(data):
                yield offset, Failure(FailureReason.MISSING, "the object ends too early")
                return
            place = PartPlace(name, rank, offset)
            if head.rank != rank or view_digest([data]) != head.checksum:
                yield offset, Failure(FailureReason.CHECKSUM, "the bytes are not those that were stored")
                continue
            failure = check_seal(self._seals, header, place, [data])
            if failure is not None and not self._seals.is_keyed:
                self._report.num_other_secret += 1
                failure = None
            yield offset, failure

    def _verify_manifest(self, name: str, size: int) -> None:
        report = self._report
        report.num_manifests += 1
        data = b""
        if size <= MAX_MANIFEST_BYTES:
            data = b"".join(map(bytes, self._store.get(name).stream()))
        listed = packs_of(data)
        if listed is None:
            self._damaged(name, -1, Failure(FailureReason.CHECKSUM, "it cannot be decoded"))
            return
        if not is_sealed(self._seals, name, data):
            if self._seals.is_keyed:
                self._damaged(name, -1, Failure(FailureReason.CHECKSUM, "it has another seal"))
                return
            report.num_other_secret += 1
        for pack in listed.packs:
            try:
                for part in rank_names(pack, listed.world_size):
                    self._store.head(part)
            except FileNotFoundError:
                report.num_incomplete += 1
                self._add_damage(ObjectDamage(name, -1, FailureReason.MISSING, f"{pack} is gone"))
                return
