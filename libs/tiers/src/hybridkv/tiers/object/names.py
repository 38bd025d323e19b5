"""What objects are called. Whoever reads a name learns nothing of a prompt, and without the fleet's secret cannot make
one.

    <namespace>/p/<pack>/<rank>      chunks of one group, one after the other
    <namespace>/m/<prefix>           manifest of a prefix
    <cache>/epoch                    which epoch is current
"""

from __future__ import annotations

from blake3 import blake3

from hybridkv.hashing import TAG_BYTES
from hybridkv.tiers.contract import Key

_CACHE_CONTEXT = "hybridkv 2026 cache in an object store v2"
_NAMESPACE_CONTEXT = "hybridkv 2026 epoch of a cache in an object store v1"
_PREFIX_CONTEXT = "hybridkv 2026 prefix in an object store v1"
_NAME_BYTES = 20


def cache_name(secret: bytes, fingerprint: bytes, boundary_every: int) -> str:
    """Of all that one cache of a fleet ever stores.

    Args:
        secret: of the fleet, may be empty.
        fingerprint: its digest, 32 bytes.
        boundary_every: where manifests stand.
    """
    digest = blake3(derive_key_context=_CACHE_CONTEXT)
    digest.update(len(secret).to_bytes(8, "little") + secret + fingerprint + boundary_every.to_bytes(8, "little"))
    return digest.hexdigest(_NAME_BYTES)


def namespace_of(cache: str, epoch: int) -> str:
    """Of what a cache stores in one epoch."""
    name = f"{cache} {epoch}".encode()
    return blake3(name, derive_key_context=_NAMESPACE_CONTEXT).hexdigest(_NAME_BYTES)


def prefix_of(key: Key) -> bytes:
    """The hash of the prefix that a chunk ends. A key that has no tag is its own."""
    return key[TAG_BYTES:] or key


def tag_of(key: Key) -> bytes:
    """The rest of it: which group of which cache."""
    return key[: len(key) - len(prefix_of(key))]


def is_boundary(prefix: bytes, every: int) -> bool:
    """Whether every path that passes this prefix has a manifest here: one of `every`, by chance, and the same for all
    engines, which need not know how far from its beginning a path is."""
    return int.from_bytes(prefix[-8:], "little") % every == 0


def pack_name(namespace: str, pack: str) -> str:
    """Of a pack, without its rank."""
    return f"{namespace}/p/{pack}"


def rank_name(pack: str, rank: int) -> str:
    """Of one rank's part of a pack."""
    return f"{pack}/{rank}"


def manifest_name(namespace: str, prefix: bytes) -> str:
    """Of the manifest of a prefix."""
    return f"{namespace}/m/{blake3(prefix, derive_key_context=_PREFIX_CONTEXT).hexdigest(_NAME_BYTES)}"


def epoch_name(cache: str) -> str:
    """Of the mark that says which epoch of a cache is current."""
    return f"{cache}/epoch"
