"""The shape and the bytes of hybrid KV: where a block's pages lie, whatever the engine's layout, and a stored chunk.

`hybridkv.canonical` itself needs no torch; `hybridkv.canonical.torch_view` builds the views from an engine's tensors.
"""

from hybridkv.canonical.chunk_dump import dump, undump
from hybridkv.canonical.chunk_format import (
    Chunk,
    ChunkError,
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
from hybridkv.canonical.pages import GroupPages, LayerLayout, PageRegion
from hybridkv.canonical.strides import LayoutError, Strides, page_regions

__all__ = [
    "Chunk",
    "ChunkError",
    "ChunkHeader",
    "ChunkIdentity",
    "DamagedChunkError",
    "GroupPages",
    "LayerLayout",
    "LayoutError",
    "NotAChunkError",
    "PageRegion",
    "Strides",
    "TruncatedChunkError",
    "UnknownVersionError",
    "WrongChunkError",
    "decode",
    "decode_header",
    "dump",
    "encode",
    "encode_header",
    "header_for",
    "page_regions",
    "undump",
]
