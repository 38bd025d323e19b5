"""Lazy chained block hashes of a growing request, for any block size.

With the engine's hash function and root hash, the values equal those that the engine computes, or would compute, for
the same block size. `RequestBlockHashList` has one block size; `HybridChunkBlockHashList` combines several.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, overload

from hybridkv.hashing.hashed_tokens import HashedTokens

HashFunction = Callable[[Any], bytes]
_Hash_co = TypeVar("_Hash_co", covariant=True)


class HashedRequest(Protocol):
    """Protocol of a request.

    A request may also have `extra_keys(start, end)`. It returns the other inputs of these tokens (LoRA, cache salt,
    multimodal input), in any form that the hash function accepts, or None.
    """

    @property
    def num_tokens(self) -> int: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


class _LazyHashes(Sequence[_Hash_co]):
    """Sequence over `__len__`, `_sync()` and `_at(index)`. A slice calls `_sync` once."""

    def _sync(self) -> None:
        """Drop hashes of tokens that the request no longer has."""
        raise NotImplementedError

    def _at(self, index: int) -> _Hash_co:
        """The hash at an index below the length. Called after `_sync`."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> _Hash_co: ...

    @overload
    def __getitem__(self, index: slice) -> list[_Hash_co]: ...

    def __getitem__(self, index: int | slice) -> _Hash_co | list[_Hash_co]:
        length = len(self)
        self._sync()
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(length))]
        if not -length <= index < length:
            raise IndexError(f"hash {index} of {length}")
        return self._at(index + length if index < 0 else index)

    def __iter__(self) -> Iterator[_Hash_co]:
        return iter(self[:])

    def __reversed__(self) -> Iterator[_Hash_co]:
        return iter(self[::-1])

    def index(self, value: Any, start: int = 0, stop: int = sys.maxsize) -> int:
        return self[:].index(value, start, stop)


class RequestBlockHashList(_LazyHashes[bytes]):
    """Chained hashes of the full blocks of a request, computed lazily.

    Hash i is `hash_function((parent, token_ids, extra_keys))` of tokens [i * block_size, (i + 1) * block_size), the
    tuple that vLLM hashes. Reading an index hashes all blocks up to it. The length follows the request.

    The request may lose tokens and get other tokens. So every read compares the hashed tokens with the current ones,
    which takes some nanoseconds per token: read many hashes with one slice. `extra_keys` of an unchanged token must not
    change.

    Args:
        request: see `HashedRequest`.
        block_size: tokens per block.
        hash_function: digest of the tuple.
        root_hash: parent of the first block.

    Raises:
        ValueError: `block_size` is not positive.
    """

    def __init__(
        self, request: HashedRequest, block_size: int, hash_function: HashFunction, root_hash: bytes = bytes(32)
    ) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.block_size = block_size
        self._request = request
        self._hash = hash_function
        self._root = root_hash
        self._hashes: list[bytes] = []
        self._hashed = HashedTokens(block_size)

    def __len__(self) -> int:
        return self._request.num_tokens // self.block_size

    @property
    def num_hashed(self) -> int:
        """Number of blocks that are hashed."""
        return len(self._hashes)

    def _sync(self) -> None:
        full = min(len(self), self._hashed.unchanged_blocks(self._request.all_token_ids))
        if full < len(self._hashes):
            del self._hashes[full:]
            self._hashed.truncate(full)

    def _at(self, index: int) -> bytes:
        hashes = self._hashes
        if index >= len(hashes):
            self._extend(index + 1)
        return hashes[index]

    def _extend(self, length: int) -> None:
        hashes, size, hash_function = self._hashes, self.block_size, self._hash
        token_ids = self._request.all_token_ids
        extra_keys = getattr(self._request, "extra_keys", None)
        parent = hashes[-1] if hashes else self._root
        for start in range(len(hashes) * size, length * size, size):
            end = start + size
            extra = None if extra_keys is None else extra_keys(start, end)
            block = tuple(token_ids[start:end])
            parent = hash_function((parent, block, extra))
            hashes.append(parent)
            self._hashed.add(block)


class HybridChunkBlockHashList(_LazyHashes[bytes | None]):
    """One hash per logical chunk of a request, for groups of any block sizes (they need not divide the chunk).

    The hash of chunk i is `hash_function` of a tuple with, for each group in order, the hash of its last full block at
    or before token (i + 1) * logical_chunk_size. Chunks before `first_hashable_chunk_idx` are None, because a group has
    no full block there that would distinguish two prompts. `chunks[chunks.first_hashable_chunk_idx:]` has only hashes.

    Chunks that end within the same block of every group have the same hash, because both hashes cover the same full
    blocks. Nothing is hashed twice, in any order of reads; groups with the same block size share block hashes. Tokens
    may be replaced, as with `RequestBlockHashList`.

    Args:
        request: see `HashedRequest`.
        group_block_sizes: tokens per block of each group.
        logical_chunk_size: tokens per chunk.
        hash_function: digest of the tuples of blocks and chunks.
        root_hash: parent of the first block of every group.

    Raises:
        ValueError: there is no group, or a size is not positive.
    """

    def __init__(
        self,
        request: HashedRequest,
        group_block_sizes: Sequence[int],
        logical_chunk_size: int,
        hash_function: HashFunction,
        root_hash: bytes = bytes(32),
    ) -> None:
        if not group_block_sizes:
            raise ValueError("group_block_sizes must name at least one group, got none")
        if logical_chunk_size <= 0:
            raise ValueError(f"logical_chunk_size must be positive, got {logical_chunk_size}")
        self.logical_chunk_size = logical_chunk_size
        self.first_hashable_chunk_idx = -(-max(group_block_sizes) // logical_chunk_size) - 1
        self._request = request
        self._hash = hash_function
        by_size = {
            size: RequestBlockHashList(request, size, hash_function, root_hash) for size in set(group_block_sizes)
        }
        self._groups = [by_size[size] for size in group_block_sizes]
        self._dense: list[bytes] = []
        """Hashes of the chunks from the first hashable one, without gaps."""
        self._ahead: dict[int, bytes] = {}
        """Hashes of later chunks that were read out of order. Only chunks that complete a block are here."""

    def __len__(self) -> int:
        return self._request.num_tokens // self.logical_chunk_size

    def _sync(self) -> None:
        for group in self._groups:
            group._sync()
        # The hash of a chunk uses the blocks that are full at its end. Up to `last_end`, all these blocks are hashed.
        last_end = min((group.num_hashed + 1) * group.block_size for group in self._groups) - 1
        kept = last_end // self.logical_chunk_size
        del self._dense[max(0, kept - self.first_hashable_chunk_idx) :]
        self._ahead = {ahead: value for ahead, value in self._ahead.items() if ahead < kept}

    def _at(self, index: int) -> bytes | None:
        return None if index < self.first_hashable_chunk_idx else self._hash_of(index)

    def _hash_of(self, index: int) -> bytes:
        place, dense = index - self.first_hashable_chunk_idx, self._dense
        if place < len(dense):
            return dense[place]
        end = (index + 1) * self.logical_chunk_size
        # The first chunk that ends in the same blocks: the chunk in which the last of these blocks became full.
        full = max(end // group.block_size * group.block_size for group in self._groups)
        first = -(-full // self.logical_chunk_size) - 1
        if first < index:
            value = self._hash_of(first)
        else:
            ahead = self._ahead.get(index)
            value = self._compute(end) if ahead is None else ahead
            if place > len(dense):
                self._ahead[index] = value
        if place == len(dense):
            dense.append(value)
            self._ahead.pop(index, None)
        return value

    def _compute(self, end: int) -> bytes:
        return self._hash(tuple(group._at(end // group.block_size - 1) for group in self._groups))
