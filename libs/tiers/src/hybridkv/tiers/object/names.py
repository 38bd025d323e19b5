"""Names of objects. If the fleet has a secret, the name of a cache or of a namespace cannot be computed without it. The
last part of a manifest's name is a digest of the prefix hash, and does not depend on the secret.

<namespace>/p/<pack>/<rank>      chunks of one group, back to back
<namespace>/m/<prefix>           manifest of a prefix
<cache>/epoch                    mark of the current epoch
<cache>/proof/<number>           short-lived: written to check the store's features or its clock
<cache>/renewal/<number>         short-lived: copy of an object that is being renewed
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from blake3 import blake3

from hybridkv.hashing import TAG_BYTES
from hybridkv.tiers.contract import Key

_CACHE_CONTEXT = "hybridkv 2026 cache in an object store v2"
_NAMESPACE_CONTEXT = "hybridkv 2026 epoch of a cache in an object store v1"
_PREFIX_CONTEXT = "hybridkv 2026 prefix in an object store v1"
_NAME_BYTES = 20
MANIFEST_EVERY = 8
"""Average number of prefixes for one manifest point, see `is_manifest_point`. Equal in all engines of a fleet, because
the name of the cache depends on it."""

MAX_RANKS = 1024
"""Limit of the ranks whose objects are checked."""


def cache_name(secret: bytes, fingerprint: bytes, manifest_every: int) -> str:
    """Name of a cache: the same in all its epochs.

    Args:
        secret: secret of the fleet, may be empty.
        fingerprint: digest of the fingerprint, 32 bytes.
        manifest_every: spacing of manifest points, see `is_manifest_point`.
    """
    digest = blake3(derive_key_context=_CACHE_CONTEXT)
    digest.update(len(secret).to_bytes(8, "little") + secret + fingerprint + manifest_every.to_bytes(8, "little"))
    return digest.hexdigest(_NAME_BYTES)


def namespace_of(cache: str, epoch: int) -> str:
    """Name prefix of the objects of one epoch."""
    name = f"{cache} {epoch}".encode()
    return blake3(name, derive_key_context=_NAMESPACE_CONTEXT).hexdigest(_NAME_BYTES)


def prefix_of(key: Key) -> bytes:
    """Prefix hash of a key. A key of at most `TAG_BYTES` bytes has no tag: returns the whole key."""
    return key[TAG_BYTES:] or key


def tag_of(key: Key) -> bytes:
    """Tag of a key: its cache and group."""
    return key[: len(key) - len(prefix_of(key))]


def is_manifest_point(prefix: bytes, every: int) -> bool:
    """True if a stored prefix has a manifest although a longer stored prefix extends it. Prefixes without a stored
    extension always have a manifest. On average, one of `every` prefixes is a manifest point.

    The result depends only on the prefix hash, so all engines get the same result.
    """
    return int.from_bytes(prefix[-8:], "little") % every == 0


def pack_name(namespace: str, pack: str) -> str:
    """Name of a pack, without the rank."""
    return f"{namespace}/p/{pack}"


def rank_name(pack: str, rank: int) -> str:
    """Name of one rank's object of a pack."""
    return f"{pack}/{rank}"


def rank_names(pack: str, world_size: int) -> list[str]:
    """Names of all ranks' objects of a pack. At most `MAX_RANKS`: a manifest that lists the pack may be crafted."""
    return [rank_name(pack, rank) for rank in range(min(max(1, world_size), MAX_RANKS))]


def manifest_name(namespace: str, prefix: bytes) -> str:
    """Name of the manifest of a prefix."""
    return f"{namespace}/m/{blake3(prefix, derive_key_context=_PREFIX_CONTEXT).hexdigest(_NAME_BYTES)}"


def epoch_name(cache: str) -> str:
    """Name of the mark of the current epoch."""
    return f"{cache}/epoch"


class ObjectKind(enum.StrEnum):
    """Kinds of objects, by their names."""

    PACK = "pack"
    MANIFEST = "manifest"
    EPOCH = "epoch"
    SHORT_LIVED = "short_lived"
    """Written to check the store, or the copy of an object that is being renewed."""
    TEMPORARY = "temporary"
    """Unfinished file of a store in a directory."""
    OTHER = "other"
    """Not an object of hybridkv."""


class ParsedName(NamedTuple):
    """Parts of an object's name.

    Args:
        kind: kind of the object.
        owner: first part of the name: the namespace for packs and manifests, the cache for epoch marks and short-lived
            objects; empty for OTHER.
        pack: name of a pack without the rank, else empty.
    """

    kind: ObjectKind
    owner: str = ""
    pack: str = ""


_DIGEST = f"[0-9a-f]{{{2 * _NAME_BYTES}}}"
_NAME = re.compile(
    rf"(?P<owner>{_DIGEST}|doctor)/"
    rf"(?:p/(?P<pack>[0-9a-f]{{32}}-\d{{1,19}})/\d{{1,9}}|(?P<manifest>m/{_DIGEST})|(?P<epoch>epoch)"
    rf"|(?P<short>(?:proof|renewal)/[0-9a-f]{{32}}))(?P<temporary>\.[0-9a-f]{{32}}\.new)?"
)


_OWNER = re.compile(rf"{_DIGEST}|doctor")


def is_owner(name: str) -> bool:
    """True if this can be the name of a namespace or a cache."""
    return _OWNER.fullmatch(name) is not None


def parse_name(name: str) -> ParsedName:
    """Parts of an object's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return ParsedName(ObjectKind.OTHER)
    owner = found["owner"]
    if found["temporary"]:
        return ParsedName(ObjectKind.TEMPORARY, owner)
    if found["pack"]:
        return ParsedName(ObjectKind.PACK, owner, pack_name(owner, found["pack"]))
    if found["manifest"]:
        return ParsedName(ObjectKind.MANIFEST, owner)
    return ParsedName(ObjectKind.EPOCH if found["epoch"] else ObjectKind.SHORT_LIVED, owner)
