"""RAM tier: `RamIndex`, an LRU index over granules of host memory, and `RamArena`, the memory with the bytes."""

from hybridkv.tiers.ram.arena import DEFAULT_GRANULE_BYTES, RamArena
from hybridkv.tiers.ram.index import RamIndex
from hybridkv.tiers.ram.sizes import choose_granule_bytes

__all__ = ["DEFAULT_GRANULE_BYTES", "RamArena", "RamIndex", "choose_granule_bytes"]
