"""The chunks that the golden files hold."""

from hybridkv.canonical import ChunkIdentity

IDENTITY = ChunkIdentity(
    fingerprint=bytes(range(32)), group=bytes(range(32, 64)), key=bytes(range(64, 96)), start_token=128, end_token=256
)
SMALL = (b"keys and values", b"", bytes(range(256)))
WIDE = (b"state" * 20,)

GOLDEN = {"chunk_v1_small": (IDENTITY, SMALL, 64), "chunk_v1_direct_io": (IDENTITY, WIDE, 4096)}
"""Name of the file without its ending, identity, sections, alignment."""
