"""The identity of a cache: everything that must agree before stored bytes may be read back.

A fingerprint is written out canonically and digested; two engines share chunks exactly when their digests are equal.
`diff` says in words where they are not.
"""

import msgspec
from blake3 import blake3

FORMAT_VERSION = 1
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

    def digest(self) -> bytes:
        """32 bytes that stand for all of it, the same on every process and host."""
        return blake3(self.encode(), derive_key_context=_CONTEXT).digest()

    def for_rank(self, rank: int) -> "Fingerprint":
        """The same cache as one tensor-parallel rank holds it."""
        return msgspec.structs.replace(self, tensor_parallel_rank=rank)


def diff(mine: Fingerprint, other: Fingerprint) -> tuple[str, ...]:
    """Every field in which two fingerprints differ, in words: `groups[1].block_tokens: 16 is not 32`."""
    return tuple(_differences("", msgspec.to_builtins(mine), msgspec.to_builtins(other)))


def _differences(path: str, mine: object, other: object) -> list[str]:
    if isinstance(mine, dict) and isinstance(other, dict):
        found: list[str] = []
        for name in sorted(mine.keys() | other.keys()):
            found += _differences(f"{path}.{name}" if path else name, mine.get(name), other.get(name))
        return found
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple) and len(mine) == len(other):
        found = []
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            found += _differences(f"{path}[{i}]", a, b)
        return found
    return [] if mine == other else [f"{path}: {_short(mine)} is not {_short(other)}"]


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} entries"
    return repr(value)
