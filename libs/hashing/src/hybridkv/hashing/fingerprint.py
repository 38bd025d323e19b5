"""The identity of a cache: everything that must agree before stored bytes may be read back.

A fingerprint is written out canonically and digested; two engines share chunks exactly when their digests are equal.
`diff` says in words where they are not.
"""

import msgspec
from blake3 import blake3

FORMAT_VERSION = 3
"""Changes whenever the meaning of a key or the order of bytes in a chunk changes."""

_CONTEXT = "hybridkv 2026 cache fingerprint v1"


class LayerFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's page: its name, its element types and its bytes without padding."""

    name: str
    dtype: str
    page_bytes: int


class GroupFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: what it is and what its pages hold. Its index in the engine is not part of it."""

    kind: str
    block_tokens: int
    layers: tuple[LayerFingerprint, ...]
    window_tokens: int | None = None
    align_tokens: int | None = None
    lookahead_tokens: int = 0


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its KV cache sees it.

    Args:
        model: name or path, as the operator gave it.
        revision: the model's revision, "" where it has none.
        weights: a digest of the weights, "" where the revision stands for them.
        dtype: of the activations.
        cache_dtype: of the KV cache.
        kv_layout: how the engine lays out attention pages.
        state_layout: how it lays out recurrent states.
        chunk_tokens: tokens in one chunk.
        hash_algorithm: of the block hashes that keys are derived from.
        tensor_parallel_size: how many ranks share a layer.
        tensor_parallel_rank: which of them, or None for "this part on every rank".
        groups: the stored groups.
        format_version: of this library's keys and chunks.
    """

    model: str
    revision: str
    weights: str
    dtype: str
    cache_dtype: str
    kv_layout: str
    state_layout: str
    chunk_tokens: int
    hash_algorithm: str
    tensor_parallel_size: int
    groups: tuple[GroupFingerprint, ...]
    tensor_parallel_rank: int | None = None
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """The canonical bytes: MessagePack with sorted field names."""
        return msgspec.msgpack.encode(self, order="sorted")

    @staticmethod
    def decode(data: bytes) -> "Fingerprint":
        """What `encode` wrote, for instance beside chunks on a disk.

        Raises:
            ValueError: the bytes are not a fingerprint, or one with fields that this release does not know.
        """
        try:
            found = msgspec.msgpack.decode(data, type=Fingerprint)
        except msgspec.DecodeError as error:
            raise ValueError(f"not the encoding of a fingerprint: {error}") from error
        if found.encode() != data:
            raise ValueError("not the encoding of a fingerprint: fields are unknown, missing or out of order")
        return found

    def digest(self) -> bytes:
        """32 bytes that stand for all of it, the same on every process and host."""
        return blake3(self.encode(), derive_key_context=_CONTEXT).digest()

    def for_rank(self, rank: int) -> "Fingerprint":
        """The same cache as one tensor-parallel rank holds it."""
        return msgspec.structs.replace(self, tensor_parallel_rank=rank)

    def diff(self, other: "Fingerprint") -> tuple[str, ...]:
        """`diff` of this one and another."""
        return diff(self, other)


_MEANINGS = {
    "model": "the model",
    "revision": "the model's revision",
    "weights": "the weights' digest",
    "dtype": "the element type",
    "cache_dtype": "the KV cache's element type",
    "kv_layout": "the layout of attention pages",
    "state_layout": "the layout of recurrent states",
    "chunk_tokens": "tokens in a chunk",
    "hash_algorithm": "the block hash algorithm",
    "tensor_parallel_size": "the number of tensor-parallel ranks",
    "tensor_parallel_rank": "the tensor-parallel rank",
    "format_version": "the version of keys and chunks",
    "groups": "the stored groups",
    "kind": "what the group needs to resume",
    "block_tokens": "tokens in a block",
    "window_tokens": "tokens in the window",
    "align_tokens": "tokens between attention-chunk boundaries",
    "lookahead_tokens": "tokens read past a chunk's end",
    "layers": "the group's layers",
    "name": "the layer's name",
    "page_bytes": "bytes in a page",
}


def diff(mine: Fingerprint, other: Fingerprint) -> tuple[str, ...]:
    """Every field in which two fingerprints differ, in words.

    For example `groups[1].block_tokens (tokens in a block): 16 is not 32`. Layers go by their names; what only one of
    the two has is listed as such.
    """
    return tuple(_fields("", mine, other))


def _fields(path: str, mine: msgspec.Struct, other: msgspec.Struct) -> list[str]:
    found: list[str] = []
    for field in mine.__struct_fields__:
        a, b = getattr(mine, field), getattr(other, field)
        at = f"{path}.{field}" if path else field
        if field == "groups":
            found += _in_order(at, a, b)
        elif field == "layers":
            found += _by_name(at, a, b)
        elif a != b:
            found.append(f"{at} ({_MEANINGS[field]}): {a!r} is not {b!r}")
    return found


def _in_order(path: str, mine: tuple[GroupFingerprint, ...], other: tuple[GroupFingerprint, ...]) -> list[str]:
    found = []
    for i, (a, b) in enumerate(zip(mine, other, strict=False)):
        found += _fields(f"{path}[{i}]", a, b)
    if len(mine) != len(other):
        found.append(f"{path} ({_MEANINGS['groups']}): {len(mine)} groups are not {len(other)}")
    return found


def _by_name(path: str, mine: tuple[LayerFingerprint, ...], other: tuple[LayerFingerprint, ...]) -> list[str]:
    ours, theirs = {layer.name: layer for layer in mine}, {layer.name: layer for layer in other}
    found = []
    for name in ours.keys() & theirs.keys():
        found += _fields(f"{path}[{name}]", ours[name], theirs[name])
    found.sort()
    for side, here, there in (("mine", ours, theirs), ("the other's", theirs, ours)):
        if alone := sorted(here.keys() - there.keys()):
            found.append(f"{path} ({_MEANINGS['layers']}): only {side}: {', '.join(alone)}")
    if not found and mine != other:
        found.append(f"{path} ({_MEANINGS['layers']}): the same layers in another order")
    return found
