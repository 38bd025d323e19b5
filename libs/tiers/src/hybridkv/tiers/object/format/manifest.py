"""What a fleet holds of one prefix: every chunk of all groups on its path, from the first token on, and where each is.

A manifest is named by the prefix at whose end it stands, so who knows a prompt knows what to ask for; it is put when
all that it names is there, and never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hybridkv.tiers.object.format.seals import SEAL_BYTES, Seals

VERSION = 1
_NUMBERS = 4
"""Of a part: its tag, its pack, its offset, its bytes."""


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


class _Body(msgspec.Struct, array_like=True):
    version: int
    world_size: int
    tags: list[bytes]
    packs: list[str]
    prefixes: list[bytes]
    counts: list[int]
    """How many parts each prefix has."""
    numbers: list[int]
    """Of all parts, one after the other."""


_decoder = msgspec.msgpack.Decoder(_Body)
_encoder = msgspec.msgpack.Encoder()


def encode_manifest(seals: Seals, name: str, world_size: int, path: Sequence[Node]) -> bytes:
    """The bytes of a manifest.

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


def decode_manifest(seals: Seals, name: str, world_size: int, data: bytes) -> list[Node] | None:
    """The path of a manifest. None where it is not one that this fleet wrote under this name, for as many ranks."""
    seal, body = data[:SEAL_BYTES], data[SEAL_BYTES:]
    if len(seal) < SEAL_BYTES or not seals.holds(seal, name.encode(), body):
        return None
    try:
        found = _decoder.decode(body)
    except msgspec.DecodeError:
        return None
    if (found.version, found.world_size) != (VERSION, world_size) or len(found.counts) != len(found.prefixes):
        return None
    if min(found.counts, default=0) < 0 or len(found.numbers) != _NUMBERS * sum(found.counts):
        return None
    each = iter(found.numbers)
    path: list[Node] = []
    for prefix, count in zip(found.prefixes, found.counts, strict=True):
        parts = []
        for _ in range(count):
            tag, pack, offset, num_bytes = next(each), next(each), next(each), next(each)
            if not (0 <= tag < len(found.tags) and 0 <= pack < len(found.packs) and offset >= 0 and num_bytes > 0):
                return None
            parts.append(Part(found.tags[tag], found.packs[pack], offset, num_bytes))
        path.append(Node(prefix, parts))
    return path
