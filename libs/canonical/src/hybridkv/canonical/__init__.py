"""Layout of KV cache content: addresses of a block's pages in the engine's memory, and their offsets in a chunk.

Importing `hybridkv.canonical` does not load torch. The first use of a name of `torch_view` does, and so does
`from hybridkv.canonical import *`.
"""

from typing import TYPE_CHECKING, Any

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
    "GroupPages",
    "LayerLayout",
    "LayoutError",
    "PageRegion",
    "Strides",
    "TokenRange",
    "aligned_page_bytes",
    "canonical_kv_caches",
    "page_regions",
    "token_pages",
    "token_regions",
]

_VIEWS = {"CanonicalKVCacheRef", "CanonicalKVCacheTensor", "CanonicalKVCaches", "canonical_kv_caches", "token_pages"}


def __getattr__(name: str) -> Any:
    if name not in _VIEWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridkv.canonical import torch_view

    return getattr(torch_view, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
