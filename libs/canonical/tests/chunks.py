"""The chunks that the golden files hold."""

import msgspec
from hypothesis import strategies as st

from hybridkv.canonical import ChunkIdentity

IDENTITY = ChunkIdentity(
    fingerprint=bytes(range(32)), group=bytes(range(32, 64)), key=bytes(range(64, 112)), start_token=128, end_token=256
)
ODD = msgspec.structs.replace(IDENTITY, key=bytes(range(64, 101)))
"""A key that does not end on a multiple of 8."""
SMALL = (b"keys and values\0", b"", bytes(range(256)))
WIDE = (b"state" * 20 + bytes(12),)
"""Blocks: pages, and zeros up to a multiple of 16 bytes."""

GOLDEN = {"chunk_v3_small": (IDENTITY, SMALL, 64), "chunk_v3_direct_io": (ODD, WIDE, 4096)}
"""Name of the file without its ending, identity, sections, alignment."""
OLD = {"chunk_v1_small": 1, "chunk_v1_direct_io": 1, "chunk_v2_small": 2, "chunk_v2_direct_io": 2}
"""Name of the file without its ending, version."""

BLOCKS = st.binary(max_size=50).map(lambda page: page + bytes(-len(page) % 16))
ALIGNMENTS = st.integers(1, 300).map(lambda number: 16 * number)
