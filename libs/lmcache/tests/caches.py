"""Caches that the tests store: groups of real models, with small pages."""

import hashlib
import random
from collections.abc import Sequence

from hybridkv.lmcache.geometry import Geometry, PageGroup
from hybridkv.planner import GroupKind, GroupSpec
from kits.lmcache.rig import Blocks

FULL, WINDOW, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.RECURRENT

DEEPSEEK_V4 = (
    PageGroup(GroupSpec(FULL, 256), 4096),
    PageGroup(GroupSpec(WINDOW, 64, window_tokens=128), 1000),
    PageGroup(GroupSpec(WINDOW, 64, window_tokens=128), 1000),
    PageGroup(GroupSpec(FULL, 4), 72),
    PageGroup(GroupSpec(FULL, 8), 136),
)
"""Five groups; two of them differ only in their blocks."""
QWEN3_NEXT = (
    PageGroup(GroupSpec(RECURRENT, 256), 3000),
    PageGroup(GroupSpec(RECURRENT, 256), 3000),
    PageGroup(GroupSpec(RECURRENT, 256), 3000),
    PageGroup(GroupSpec(FULL, 256), 5000),
)
INTERLEAVED = (
    PageGroup(GroupSpec(FULL, 64), 500),
    PageGroup(GroupSpec(WINDOW, 64, window_tokens=64), 500),
    PageGroup(GroupSpec(WINDOW, 64, window_tokens=500), 400),
    PageGroup(GroupSpec(FULL, 128), 900),
    PageGroup(GroupSpec(FULL, 64), 500),
)
"""Alternating retention rules, which 0.5.6 stores wrongly in this order."""


def digests_of(seed: object, num_chunks: int) -> list[bytes]:
    """One digest per chunk, each covering all chunks before it."""
    chain, digest = [], repr(seed).encode()
    for _ in range(num_chunks):
        digest = hashlib.blake2b(digest, digest_size=32).digest()
        chain.append(digest)
    return chain


def content_of(seed: object, geometry: Geometry, num_chunks: int, states_at: Sequence[int] | None = None) -> Blocks:
    """Bytes of every block; states only after these numbers of chunks, or after every chunk."""
    chance = random.Random(repr(seed))
    content: Blocks = {}
    for index, group in enumerate(geometry.groups):
        blocks = range(num_chunks * geometry.blocks_per_chunk[index])
        if group.spec.kind is RECURRENT and states_at is not None:
            blocks_of_states = {chunks * geometry.blocks_per_chunk[index] - 1 for chunks in states_at}
            content[index] = {at: chance.randbytes(group.payload_bytes) for at in blocks if at in blocks_of_states}
        else:
            content[index] = {at: chance.randbytes(group.payload_bytes) for at in blocks}
    return content
