"""Manifest writer: writes manifests of stored paths, and replaces bad ones.

The writer deletes no manifest: another host may be able to read a manifest that this host cannot read. An engine
replaces a bad manifest after it has stored all chunks that the manifest lists.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.format.manifest import MAX_PARTS, ManifestNode, encode_manifest, is_of_another_version
from hybridkv.tiers.object.manifests.epochs import EpochTracker
from hybridkv.tiers.object.manifests.loop import StoreLoop
from hybridkv.tiers.object.manifests.paths import MAX_NODES, Paths
from hybridkv.tiers.object.manifests.reader import ManifestReader, StoredCache, is_all_in, is_in, packs_in
from hybridkv.tiers.object.manifests.renewer import ManifestRenewer
from hybridkv.tiers.object.names import MANIFEST_EVERY, manifest_name, prefix_of
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import PackPlace, Stored

logger = logging.getLogger(__name__)

MAX_UNPUBLISHED = 1024
"""Limit of path ends whose manifest is not written yet."""
MAX_AGAIN = 256
"""Limit of these path ends that one store tries again."""


class ManifestWriter:
    """Writes manifests. Used on one event loop.

    Args:
        stored_cache: the cache in the store.
        options: limits.
        reader: reads existing manifests.
        renewer: renews the written manifests.
        epochs: namespace of the manifests.
        loop: event loop of the requests.
    """

    def __init__(
        self,
        stored_cache: StoredCache,
        options: ObjectOptions,
        reader: ManifestReader,
        renewer: ManifestRenewer,
        epochs: EpochTracker,
        loop: StoreLoop,
    ) -> None:
        self._store = stored_cache.store
        self._seals = stored_cache.seals
        self._world_size = stored_cache.world_size
        self._options = options
        self._reader = reader
        self._renewer = renewer
        self._epochs = epochs
        self._loop = loop
        self._paths = Paths(MAX_NODES)
        self._unpublished: dict[bytes, None] = {}
        """Ends of paths to write a manifest for: an earlier part is unknown, the write failed, or the manifest lists a
        bad place. The oldest first."""
        self._lost: dict[bytes, None] = {}
        """Prefixes of lost chunks that this engine stored. Their manifests are replaced after the next store."""
        self.num_duplicates = 0
        """Number of chunks that this engine stored although another engine had stored them, since the start."""

    def learn(self, path: Iterable[ManifestNode]) -> None:
        """Add the path of a manifest that was read."""
        self._paths.learn(path, self._reader.is_bad, self._reader.packs.was_seen)

    def publish(self, stored: Sequence[Stored]) -> None:
        """Write manifests. Chunks of an epoch that ended are left out: a store may end after a reset."""
        namespace = self._epochs.manifest_namespace
        if namespace is None:
            return
        stored = [each for each in stored if is_in(each.place.pack, namespace)]
        packs = {each.place.pack for each in stored}
        self._reader.packs.seen(packs)
        self._renewer.on_stored(packs)
        own = {each.key: each.place.pack for each in stored}
        prefixes = self._paths.add(stored)
        ends = self._paths.manifest_prefixes(prefixes, MANIFEST_EVERY)
        if again := self._lost.keys() & set(prefixes):
            for prefix in again:
                del self._lost[prefix]
            through = self._paths.manifest_prefixes_through(again, MANIFEST_EVERY)
            newest = through[-MAX_UNPUBLISHED:]
            self._unpublished.update(dict.fromkeys(prefix for prefix in newest if prefix not in ends))
        waiting = list(islice(self._unpublished, MAX_AGAIN))
        for prefix in waiting:
            del self._unpublished[prefix]
        for prefix in (*waiting, *ends):
            path = self._paths.up_to(prefix)
            if path is None:
                self._unpublished[prefix] = None
            elif is_all_in(path, namespace):
                self._loop.spawn(self._put(prefix, manifest_name(namespace, prefix), path, own), is_write=True)
        while len(self._unpublished) > MAX_UNPUBLISHED:
            del self._unpublished[next(iter(self._unpublished))]

    def retract(self, key: Key, place: PackPlace) -> None:
        """Stop offering a place. Manifests that list it are replaced when the chunk is stored again."""
        self._reader.distrust_place(place.pack, place.offset)
        self._reader.packs.forget([place.pack])
        self._paths.forget(key, place.pack)
        if not place.source:
            self._lost[prefix_of(key)] = None
            if len(self._lost) > MAX_UNPUBLISHED:
                del self._lost[next(iter(self._lost))]
            return
        for end in self._paths.manifest_prefixes_between(prefix_of(key), place.source, MANIFEST_EVERY):
            self._unpublished[end] = None

    def clear(self) -> None:
        """Forget all paths."""
        self._paths.clear()
        self._unpublished.clear()
        self._lost.clear()

    async def _put(self, prefix: bytes, name: str, path: list[ManifestNode], own: dict[Key, str]) -> None:
        """Write a manifest, if the packs of its path exist. An existing manifest is kept, unless it is worse
        (`_is_worse`).

        Args:
            prefix: the last prefix of the path.
            name: name of the object.
            path: the path.
            own: packs of the chunks that were stored now. Chunks that others had stored are counted and removed.
        """
        from obstore.exceptions import AlreadyExistsError

        try:
            if await self._missing(path, packs_in(path)):
                self._unpublished[prefix] = None  # until the missing chunks are stored again
                return
            data = encode_manifest(self._seals, name, self._world_size, path)
            if len(data) > self._options.manifest_bytes or sum(len(node.parts) for node in path) > MAX_PARTS:
                logger.debug("a path of %d prefixes is too long for a manifest", len(path))
                return
            try:
                async with self._reader.requests:
                    await self._store.put_async(name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if not await self._is_worse(prefix, name, path, own):
                    self._renewer.on_read([prefix])
                    return
                async with self._reader.requests:
                    await self._store.put_async(name, data, use_multipart=False)
            self._reader.trust(name)
            self._renewer.on_written(prefix, name)
        except Exception as error:
            self._loop.log_failure("written to", error)
            self._unpublished[prefix] = None  # retried with the next store

    async def _is_worse(self, prefix: bytes, name: str, path: list[ManifestNode], own: dict[Key, str]) -> bool:
        """True if this path should replace the existing manifest: the manifest is invalid; or it lists no chunk that
        this path lacks, and lists a bad place or fewer chunks. A chunk in a missing pack counts as not listed. A
        manifest of another version is kept.

        Counts the chunks of `own` that another engine had stored, and removes them from `own`.
        """
        body = await self._reader.read(name, is_again=True)
        standing = None if body is None else self._reader.decoded(name, prefix, body)
        if standing is None:
            return body is None or not is_of_another_version(body.data or b"")
        listed = {(node.prefix, part.tag) for node in path for part in node.parts}
        standing_listed = {(node.prefix, part.tag) for node in standing for part in node.parts}
        if not standing_listed < listed:  # else it is replaced anyway
            missing = await self._missing(standing, set(packs_in(standing)) - set(packs_in(path)))
            standing_listed = {
                (node.prefix, part.tag) for node in standing for part in node.parts if part.pack not in missing
            }
        if any(self._reader.is_bad(part) for node in standing for part in node.parts):
            return standing_listed <= listed
        for node in standing:
            for part in node.parts:
                if own.get(part.tag + node.prefix, part.pack) != part.pack:
                    del own[part.tag + node.prefix]
                    self.num_duplicates += 1
        return standing_listed < listed

    async def _missing(self, path: Sequence[ManifestNode], packs: Iterable[str]) -> set[str]:
        """Those of these packs that are missing. Stops offering the chunks of the path in them."""
        missing = await self._reader.packs.missing(packs)
        for pack in missing:
            for key in self._reader.distrust_pack(path, pack):
                self._paths.forget(key, pack)
        return missing
