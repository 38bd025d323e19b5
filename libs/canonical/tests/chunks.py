"""The chunks that the golden files hold."""

import msgspec

from hybridkv.canonical import ChunkIdentity

IDENTITY = ChunkIdentity(
    fingerprint=bytes(range(32)), group=bytes(range(32, 64)), key=bytes(range(64, 112)), start_token=128, end_token=256
)
ODD = msgspec.structs.replace(IDENTITY, key=bytes(range(64, 101)))
"""A key that does not end on a multiple of 8."""
SMALL = (b"keys and values", b"", bytes(range(256)))
WIDE = (b"state" * 20,)

GOLDEN = {"chunk_v2_small": (IDENTITY, SMALL, 64), "chunk_v2_direct_io": (ODD, WIDE, 4096)}
"""Name of the file without its ending, identity, sections, alignment."""
OLD = {"chunk_v1_small": 1, "chunk_v1_direct_io": 1}
"""Name of the file without its ending, version."""
