"""Identity of KV cache content: fingerprints of caches and keys of chunks. No tensors, no engine, no I/O."""

from hybridkv.hashing.block_hashes import HashedRequest, HybridChunkBlockHashList, RequestBlockHashList
from hybridkv.hashing.differences import diff
from hybridkv.hashing.fingerprint import (
    FORMAT_VERSION,
    Fingerprint,
    GroupFingerprint,
    LayerFingerprint,
    group_digest,
)
from hybridkv.hashing.keys import TAG_BYTES, ChunkKeys
from hybridkv.hashing.tokens import TokenHashes

__all__ = [
    "FORMAT_VERSION",
    "TAG_BYTES",
    "ChunkKeys",
    "Fingerprint",
    "GroupFingerprint",
    "HashedRequest",
    "HybridChunkBlockHashList",
    "LayerFingerprint",
    "RequestBlockHashList",
    "TokenHashes",
    "diff",
    "group_digest",
]
