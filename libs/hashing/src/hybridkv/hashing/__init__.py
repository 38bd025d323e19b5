"""The identity of hybrid KV content: fingerprints of caches, keys of chunks. No tensors, no engine, no I/O."""

from hybridkv.hashing.block_hashes import HashedRequest, HybridChunkBlockHashList, RequestBlockHashList
from hybridkv.hashing.fingerprint import FORMAT_VERSION, Fingerprint, GroupFingerprint, LayerFingerprint, diff
from hybridkv.hashing.keys import KEY_BYTES, ChunkKeys, group_digest
from hybridkv.hashing.runs import RUN_CHUNKS, KeyRuns
from hybridkv.hashing.tokens import TokenHashes

__all__ = [
    "FORMAT_VERSION",
    "KEY_BYTES",
    "RUN_CHUNKS",
    "ChunkKeys",
    "Fingerprint",
    "GroupFingerprint",
    "HashedRequest",
    "HybridChunkBlockHashList",
    "KeyRuns",
    "LayerFingerprint",
    "RequestBlockHashList",
    "TokenHashes",
    "diff",
    "group_digest",
]
