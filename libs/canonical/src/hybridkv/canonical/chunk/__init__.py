"""The portable byte format of one chunk: encoded, decoded, and shown as JSON. `FORMAT.md` has it field by field.

Nothing in the product writes it yet: the disk tier has records of its own. It is for stores that others read too.
"""

from hybridkv.canonical.chunk.dump import dump, undump
from hybridkv.canonical.chunk.format import (
    ChunkError,
    ChunkFile,
    ChunkHeader,
    ChunkIdentity,
    DamagedChunkError,
    NotAChunkError,
    TruncatedChunkError,
    UnknownVersionError,
    WrongChunkError,
    decode,
    decode_header,
    encode,
    encode_header,
    header_for,
)

__all__ = [
    "ChunkError",
    "ChunkFile",
    "ChunkHeader",
    "ChunkIdentity",
    "DamagedChunkError",
    "NotAChunkError",
    "TruncatedChunkError",
    "UnknownVersionError",
    "WrongChunkError",
    "decode",
    "decode_header",
    "dump",
    "encode",
    "encode_header",
    "header_for",
    "undump",
]
