"""Lists of block hashes of a growing request, at any granularity and joined over groups, without an engine.

Nothing in the product uses them yet, whose keys come from the engine's hashes or from `TokenHashes`: they are for
stores that name blocks of their own size.
"""

from hybridkv.hashing.lists.block_hashes import HashedRequest, HybridChunkBlockHashList, RequestBlockHashList

__all__ = ["HashedRequest", "HybridChunkBlockHashList", "RequestBlockHashList"]
