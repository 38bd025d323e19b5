"""What a fleet holds of one prefix: every chunk of all groups on its path, from the first token on, and where each is.

A manifest is named by the prefix at whose end it stands, so who knows a prompt knows what to ask for; it is put when
all that it names is there. It is replaced only where it is bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from hybridkv.tiers.object.format.seals import SEAL_BYTES, Seals

VERSION = 1
_NUMBERS = 4
"""Of a part: its tag, its pack, its offset, its bytes."""
MAX_PARTS = 32_768
"""Of one manifest, and as many prefixes and packs. A stranger's bytes must not cost memory, so the decoder looks at
lengths before it makes anything."""
MAX_TAGS = 256
_LARGEST_TAG = 64
_LARGEST_PREFIX = 64
_LARGEST_PACK = 128
_LARGEST_NUMBER = (1 << 63) - 1


class Part(NamedTuple):
    """A chunk of one group.

    Args:
        tag: the beginning of its key, which is its group's.
        pack: the name of its object, without its rank.
        offset: of its header there.
        num_bytes: of the chunk, on each rank.
    """

    tag: bytes
    pack: str
    offset: int
    num_bytes: int


class Node(NamedTuple):
    """One end of a prefix, and what is stored that ends there.

    Args:
        prefix: its hash: the rest of the keys of these parts.
        parts: one for each group that has something there.
    """

    prefix: bytes
    parts: Sequence[Part]


_Number = Annotated[int, Meta(ge=0, le=_LARGEST_NUMBER)]


class _Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    version: int
    world_size: int
    tags: Annotated[list[Annotated[bytes, Meta(max_length=_LARGEST_TAG)]], Meta(max_length=MAX_TAGS)]
    packs: Annotated[list[Annotated[str, Meta(max_length=_LARGEST_PACK)]], Meta(max_length=MAX_PARTS)]
    prefixes: Annotated[list[Annotated[bytes, Meta(max_length=_LARGEST_PREFIX)]], Meta(max_length=MAX_PARTS)]
    counts: Annotated[list[_Number], Meta(max_length=MAX_PARTS)]
    """How many parts each prefix has."""
    numbers: Annotated[list[_Number], Meta(max_length=_NUMBERS * MAX_PARTS)]
    """Of all parts, one after the other."""


_decoder = msgspec.msgpack.Decoder(_Body)
_encoder = msgspec.msgpack.Encoder()


def encode_manifest(seals: Seals, name: str, world_size: int, path: Sequence[Node]) -> bytes:
    """The bytes of a manifest. One of more than `MAX_PARTS` is read by nobody.

    Args:
        seals: of the fleet.
        name: of the object, which it is good for alone.
        world_size: ranks that each have their part of every chunk.
        path: from its beginning on.
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
        _Body(VERSION, world_size, list(tags), list(packs), [node.prefix for node in path], counts, numbers)
    )
    return seals.of(name.encode(), body) + body


def is_sealed(seals: Seals, name: str, data: bytes) -> bool:
    """Whether this fleet wrote these bytes under this name. Looks at nothing that they say."""
    view = memoryview(data)
    return len(data) >= SEAL_BYTES and seals.holds(data[:SEAL_BYTES], name.encode(), view[SEAL_BYTES:])


def decode_manifest(seals: Seals, name: str, world_size: int, data: bytes) -> list[Node] | None:
    """The path of a manifest. None where it is not one that this fleet wrote under this name, for as many ranks."""
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
    path: list[Node] = []
    for prefix, count in zip(found.prefixes, found.counts, strict=True):
        parts = []
        for _ in range(count):
            tag, pack, offset, num_bytes = next(each), next(each), next(each), next(each)
            if tag >= len(found.tags) or pack >= len(found.packs) or not num_bytes:
                return None
            parts.append(Part(found.tags[tag], found.packs[pack], offset, num_bytes))
        path.append(Node(prefix, parts))
    return path
