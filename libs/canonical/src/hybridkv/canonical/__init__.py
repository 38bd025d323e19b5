"""The shape of hybrid KV bytes: which pages a block has and where they lie, whatever the engine's layout.

`hybridkv.canonical` itself needs no torch; `hybridkv.canonical.torch_view` builds the views from an engine's tensors.
"""

from hybridkv.canonical.pages import GroupPages, LayerLayout, PageRegion
from hybridkv.canonical.strides import LayoutError, Strides, page_regions

__all__ = ["GroupPages", "LayerLayout", "LayoutError", "PageRegion", "Strides", "page_regions"]
