"""Manifest of one prefix: all stored chunks of all groups on its path, from the first token, with their places.

The name of a manifest is derived from its last prefix, so a reader can compute the name from the prompt. A manifest is
written after all chunks that it lists, and replaced only if it is bad, or lists fewer chunks than the new manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from hybridkv.tiers.object.format.seals import SEAL_BYTES, Seals

VERSION = 1
_NUMBERS = 4
"""Number of integers for a part: tag, pack, offset, size."""
MAX_PARTS = 32_768
"""Limit of parts, of prefixes and of packs in one manifest. The decoder checks lengths before it allocates, since the
bytes are untrusted."""
MAX_TAGS = 256
_LARGEST_TAG = 64
_LARGEST_PREFIX = 64
_LARGEST_PACK = 128
_LARGEST_NUMBER = (1 << 63) - 1


class ManifestPart(NamedTuple):
    """A chunk of one group.

    Args:
        tag: tag of its key, which names the group.
        pack: name of the pack, without the rank.
        offset: offset of the header in the pack, in bytes.
        num_bytes: size of the chunk on each rank.

    """

    tag: bytes
    pack: str
    offset: int
    num_bytes: int


class ManifestNode(NamedTuple):
    """A prefix, and the stored chunks that end there.

    Args:
        prefix: prefix hash. The tag of a part and this hash together are the key.
        parts: one part for each group with a chunk that ends here.

    """

    prefix: bytes
    parts: Sequence[ManifestPart]


_Number = Annotated[int, Meta(ge=0, le=_LARGEST_NUMBER)]


class _ManifestBody(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    version: int
    world_size: int
    tags: Annotated[list[Annotated[bytes, Meta(max_length=_LARGEST_TAG)]], Meta(max_length=MAX_TAGS)]
    packs: Annotated[list[Annotated[str, Meta(max_length=_LARGEST_PACK)]], Meta(max_length=MAX_PARTS)]
    prefixes: Annotated[list[Annotated[bytes, Meta(max_length=_LARGEST_PREFIX)]], Meta(max_length=MAX_PARTS)]
    counts: Annotated[list[_Number], Meta(max_length=MAX_PARTS)]
    """Number of parts of each prefix."""
    numbers: Annotated[list[_Number], Meta(max_length=_NUMBERS * MAX_PARTS)]
    """Numbers of all parts, concatenated."""


class _AnyVersion(msgspec.Struct, array_like=True, gc=False):
    """Beginning of a manifest of any version."""

    version: int


class ManifestVersionError(Exception):
    """A manifest has another version. Engines of that version can read it."""


_any_version_decoder = msgspec.msgpack.Decoder(_AnyVersion)
_decoder = msgspec.msgpack.Decoder(_ManifestBody)
_encoder = msgspec.msgpack.Encoder()


def encode_manifest(seals: Seals, name: str, world_size: int, path: Sequence[ManifestNode]) -> bytes:
    """Encode a manifest. Readers reject a manifest with more than `MAX_PARTS` parts.

    Args:
        seals: seals of the fleet.
        name: name of the object; the manifest is valid only under it.
        world_size: number of ranks.
        path: the path from its first prefix.

    """
    tags: dict[bytes, int] = {}
    packs: dict[str, int] = {}
    numbers: list[int] = []
    for node in path:
        for part in node.parts:
            tag = tags.setdefault(part.tag, len(tags))
            numbers += (tag, packs.setdefault(part.pack, len(packs)), part.offset, part.num_bytes)
    counts = [len(node.parts) for node in path]
    body = _encoder.encode(
        _ManifestBody(VERSION, world_size, list(tags), list(packs), [node.prefix for node in path], counts, numbers)
    )
    return seals.of(name.encode(), body) + body


def is_sealed(seals: Seals, name: str, data: bytes) -> bool:
    """True if this fleet wrote these bytes under this name. Does not decode them."""
    view = memoryview(data)
    return len(data) >= SEAL_BYTES and seals.is_valid(data[:SEAL_BYTES], name.encode(), view[SEAL_BYTES:])


def decode_manifest(seals: Seals, name: str, world_size: int, data: bytes) -> list[ManifestNode] | None:
    """Decode the path of a manifest. None unless this fleet wrote it under this name, in this version, for this number
    of ranks."""
    if not is_sealed(seals, name, data):
        return None
    try:
        found = _decoder.decode(memoryview(data)[SEAL_BYTES:])
    except (msgspec.DecodeError, RecursionError):
        return None
    if (found.version, found.world_size) != (VERSION, world_size) or len(found.counts) != len(found.prefixes):
        return None
    if len(found.numbers) != _NUMBERS * sum(found.counts):
        return None
    each = iter(found.numbers)
    path: list[ManifestNode] = []
    for prefix, count in zip(found.prefixes, found.counts, strict=True):
        parts = []
        for _ in range(count):
            tag, pack, offset, num_bytes = next(each), next(each), next(each), next(each)
            if tag >= len(found.tags) or pack >= len(found.packs) or not num_bytes:
                return None
            parts.append(ManifestPart(found.tags[tag], found.packs[pack], offset, num_bytes))
        path.append(ManifestNode(prefix, parts))
    return path


def is_of_another_version(data: bytes) -> bool:
    """True if a manifest has another version, so that other engines may read it."""
    try:
        packs_of(data)
    except ManifestVersionError:
        return True
    return False


class ListedPacks(NamedTuple):
    """Packs that a manifest lists.

    Args:
        packs: names, without the rank.
        world_size: number of ranks with an object in each pack, unchecked.
    """

    packs: list[str]
    world_size: int


def packs_of(data: bytes) -> ListedPacks | None:
    """Packs that a manifest lists, without a check of its seal. None if it cannot be decoded.

    Raises:
        ManifestVersionError: the manifest has another version.
    """
    body = memoryview(data)[SEAL_BYTES:]
    try:
        version = _any_version_decoder.decode(body).version
        if version != VERSION:
            raise ManifestVersionError(f"version {version}, expected {VERSION}")
        found = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return ListedPacks(found.packs, found.world_size)
