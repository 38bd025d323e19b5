"""The shape and the bytes of hybrid KV: where a block's pages lie, whatever the engine's layout, and a stored chunk.

Importing `hybridkv.canonical` needs no torch. Its views of an engine's tensors do; torch is loaded when one of their
names is first asked for, which `from hybridkv.canonical import *` does.
"""

from typing import TYPE_CHECKING, Any

from hybridkv.canonical.chunk import (
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
    dump,
    encode,
    encode_header,
    header_for,
    undump,
)
from hybridkv.canonical.pages import PAGE_ALIGN_BYTES, GroupPages, LayerLayout, PageRegion, aligned_page_bytes
from hybridkv.canonical.strides import LayoutError, Strides, TokenRange, page_regions, token_regions

if TYPE_CHECKING:
    from hybridkv.canonical.torch_view import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        canonical_kv_caches,
        token_pages,
    )

__all__ = [
    "PAGE_ALIGN_BYTES",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "ChunkError",
    "ChunkFile",
    "ChunkHeader",
    "ChunkIdentity",
    "DamagedChunkError",
    "GroupPages",
    "LayerLayout",
    "LayoutError",
    "NotAChunkError",
    "PageRegion",
    "Strides",
    "TokenRange",
    "TruncatedChunkError",
    "UnknownVersionError",
    "WrongChunkError",
    "aligned_page_bytes",
    "canonical_kv_caches",
    "decode",
    "decode_header",
    "dump",
    "encode",
    "encode_header",
    "header_for",
    "page_regions",
    "token_pages",
    "token_regions",
    "undump",
]

_VIEWS = {"CanonicalKVCacheRef", "CanonicalKVCacheTensor", "CanonicalKVCaches", "canonical_kv_caches", "token_pages"}


def __getattr__(name: str) -> Any:
    if name not in _VIEWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridkv.canonical import torch_view

    return getattr(torch_view, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
