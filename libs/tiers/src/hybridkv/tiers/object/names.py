"""Names of objects. A name reveals nothing about a prompt, and cannot be computed without the fleet's secret.

<namespace>/p/<pack>/<rank>      chunks of one group, back to back
<namespace>/m/<prefix>           manifest of a prefix
<cache>/epoch                    mark of the current epoch
<cache>/proof/<number>           short-lived: a check of the store
<cache>/renewal/<number>         short-lived: an object that is copied onto itself
"""

from __future__ import annotations

from blake3 import blake3

from hybridkv.hashing import TAG_BYTES
from hybridkv.tiers.contract import Key

_CACHE_CONTEXT = "hybridkv 2026 cache in an object store v2"
_NAMESPACE_CONTEXT = "hybridkv 2026 epoch of a cache in an object store v1"
_PREFIX_CONTEXT = "hybridkv 2026 prefix in an object store v1"
_NAME_BYTES = 20
BOUNDARY_EVERY = 8
"""On average one prefix of so many is a boundary, which always has a manifest. Equal in all engines of a fleet, since
it is part of the namespace."""


def cache_name(secret: bytes, fingerprint: bytes, boundary_every: int) -> str:
    """Name of a cache: the same in all its epochs.

    Args:
        secret: secret of the fleet, may be empty.
        fingerprint: digest of the fingerprint, 32 bytes.
        boundary_every: spacing of boundaries, see `is_boundary`.
    """
    digest = blake3(derive_key_context=_CACHE_CONTEXT)
    digest.update(len(secret).to_bytes(8, "little") + secret + fingerprint + boundary_every.to_bytes(8, "little"))
    return digest.hexdigest(_NAME_BYTES)


def namespace_of(cache: str, epoch: int) -> str:
    """Name prefix of the objects of one epoch."""
    name = f"{cache} {epoch}".encode()
    return blake3(name, derive_key_context=_NAMESPACE_CONTEXT).hexdigest(_NAME_BYTES)


def prefix_of(key: Key) -> bytes:
    """Prefix hash of a key. A key without a tag is its own prefix hash."""
    return key[TAG_BYTES:] or key


def tag_of(key: Key) -> bytes:
    """Tag of a key: its cache and group."""
    return key[: len(key) - len(prefix_of(key))]


def is_boundary(prefix: bytes, every: int) -> bool:
    """Whether a prefix has a manifest even in the middle of a path. On average one prefix of `every` is a boundary. The
    hash decides, so all engines agree without knowing the position of the prefix."""
    return int.from_bytes(prefix[-8:], "little") % every == 0


def pack_name(namespace: str, pack: str) -> str:
    """Name of a pack, without the rank."""
    return f"{namespace}/p/{pack}"


def rank_name(pack: str, rank: int) -> str:
    """Name of one rank's object of a pack."""
    return f"{pack}/{rank}"


def manifest_name(namespace: str, prefix: bytes) -> str:
    """Name of the manifest of a prefix."""
    return f"{namespace}/m/{blake3(prefix, derive_key_context=_PREFIX_CONTEXT).hexdigest(_NAME_BYTES)}"


def epoch_name(cache: str) -> str:
    """Name of the mark of the current epoch."""
    return f"{cache}/epoch"
