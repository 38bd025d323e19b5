"""Fingerprint of a cache: all facts that must be equal before stored bytes are read back.

A fingerprint has a canonical encoding and a digest. Two engines share chunks exactly if their digests are equal.
`hybridkv.hashing.differences` explains differences in words.
"""

import msgspec
from blake3 import blake3

FORMAT_VERSION = 6
"""Increases when the meaning of a key or the order of bytes in a chunk changes."""

_CONTEXT = "hybridkv 2026 cache fingerprint v3"
_GROUP_CONTEXT = "hybridkv 2026 group v2"


class LayerFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Page of one layer.

    Args:
        name: name of the layer in the model.
        page_bytes: bytes of the page without padding.
        facts: other facts that determine its bytes, by name: element types, heads, state shapes.
    """

    name: str
    page_bytes: int
    facts: dict[str, str] = {}


class GroupFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Kind, block size, window, alignment, lookahead and layers of one KV cache group, without its index in the
    engine."""

    kind: str
    block_tokens: int
    layers: tuple[LayerFingerprint, ...]
    window_tokens: int | None = None
    align_tokens: int | None = None
    lookahead_tokens: int = 0


def group_digest(group: GroupFingerprint) -> bytes:
    """Digest of a group, 32 bytes. It does not depend on the group's index."""
    return blake3(msgspec.msgpack.encode(group, order="sorted"), derive_key_context=_GROUP_CONTEXT).digest()


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of a model and its engine that determine the stored bytes.

    Args:
        facts: dotted name to canonical text. The caller replaces long or secret texts by digests, because facts are
            written beside the chunks and into logs.
        chunk_tokens: tokens per chunk.
        hash_algorithm: algorithm of the block hashes from which keys are derived.
        tensor_parallel_size: number of ranks that share a layer.
        tensor_parallel_rank: the rank, or None if the bytes are the same on every rank.
        groups: the stored groups. Their order is not part of the identity.
        format_version: version of keys and chunks.
    """

    facts: dict[str, str]
    chunk_tokens: int
    hash_algorithm: str
    tensor_parallel_size: int
    groups: tuple[GroupFingerprint, ...]
    tensor_parallel_rank: int | None = None
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """Canonical encoding: MessagePack with sorted field names, and with groups sorted by digest."""
        groups = tuple(sorted(self.groups, key=group_digest))
        return msgspec.msgpack.encode(msgspec.structs.replace(self, groups=groups), order="sorted")

    @staticmethod
    def decode(data: bytes) -> "Fingerprint":
        """Inverse of `encode`. Groups are sorted by digest.

        Raises:
            ValueError: the bytes are not the canonical encoding of a fingerprint by this release. Unknown or missing
                fields, or another order, are errors.
        """
        try:
            found = msgspec.msgpack.decode(data, type=Fingerprint)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not the encoding of a fingerprint: {error}") from error
        if found.encode() != data:
            raise ValueError(
                "not the encoding of a fingerprint: fields are unknown, missing or out of order, or groups are"
            )
        return found

    def digest(self) -> bytes:
        """Digest of the fingerprint, 32 bytes. Equal on all processes and hosts."""
        return blake3(self.encode(), derive_key_context=_CONTEXT).digest()

    def diff(self, other: "Fingerprint") -> tuple[str, ...]:
        """Same as `hybridkv.hashing.diff(self, other)`."""
        # Not at the top: that module imports this one.
        from hybridkv.hashing.differences import diff

        return diff(self, other)
