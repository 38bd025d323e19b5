"""The identity of a cache: everything that must agree before stored bytes may be read back.

A fingerprint is written out canonically and digested; two engines share chunks exactly when their digests are equal.
`hybridkv.hashing.differences` says in words where they are not.
"""

import msgspec
from blake3 import blake3

FORMAT_VERSION = 6
"""Changes whenever the meaning of a key or the order of bytes in a chunk changes."""

_CONTEXT = "hybridkv 2026 cache fingerprint v3"
_GROUP_CONTEXT = "hybridkv 2026 group v2"


class LayerFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's page.

    Args:
        name: of the layer in the model.
        page_bytes: without padding.
        facts: what else its bytes depend on, by name: element types, heads, state shapes.
    """

    name: str
    page_bytes: int
    facts: dict[str, str] = {}


class GroupFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: what it is and what its pages hold. Its index in the engine is not part of it."""

    kind: str
    block_tokens: int
    layers: tuple[LayerFingerprint, ...]
    window_tokens: int | None = None
    align_tokens: int | None = None
    lookahead_tokens: int = 0


def group_digest(group: GroupFingerprint) -> bytes:
    """32 bytes that stand for a group's kind, block and layers, wherever the group stands in an engine."""
    return blake3(msgspec.msgpack.encode(group, order="sorted"), derive_key_context=_GROUP_CONTEXT).digest()


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its KV cache sees it.

    Args:
        facts: what the stored bytes depend on, dotted name to canonical text. What is long or secret stands there as a
            digest: facts are written beside the chunks, and into logs.
        chunk_tokens: tokens in one chunk.
        hash_algorithm: of the block hashes that keys are derived from.
        tensor_parallel_size: how many ranks share a layer.
        tensor_parallel_rank: which of them, or None for "this part on every rank".
        groups: the stored groups, in any order: it is no part of the identity.
        format_version: of this library's keys and chunks.
    """

    facts: dict[str, str]
    chunk_tokens: int
    hash_algorithm: str
    tensor_parallel_size: int
    groups: tuple[GroupFingerprint, ...]
    tensor_parallel_rank: int | None = None
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """The canonical bytes: MessagePack with sorted field names, and the groups in the order of their digests."""
        groups = tuple(sorted(self.groups, key=group_digest))
        return msgspec.msgpack.encode(msgspec.structs.replace(self, groups=groups), order="sorted")

    @staticmethod
    def decode(data: bytes) -> "Fingerprint":
        """What `encode` wrote, for instance beside chunks on a disk. Groups are in the order of their digests.

        Raises:
            ValueError: the bytes are not a fingerprint, or one with fields that this release does not know.
        """
        try:
            found = msgspec.msgpack.decode(data, type=Fingerprint)
        except msgspec.DecodeError as error:
            raise ValueError(f"not the encoding of a fingerprint: {error}") from error
        if found.encode() != data:
            raise ValueError(
                "not the encoding of a fingerprint: fields are unknown, missing or out of order, or groups are"
            )
        return found

    def digest(self) -> bytes:
        """32 bytes that stand for all of it, the same on every process and host."""
        return blake3(self.encode(), derive_key_context=_CONTEXT).digest()

    def diff(self, other: "Fingerprint") -> tuple[str, ...]:
        """`hybridkv.hashing.diff` of this one and another."""
        # That module reads this one, so it cannot be imported above.
        from hybridkv.hashing.differences import diff

        return diff(self, other)
