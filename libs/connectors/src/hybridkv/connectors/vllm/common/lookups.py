"""Lookup of one request in the tiers, in the form that the planner needs.

Keys are derived in batches that grow during a search, so that a miss derives only a few keys. This module decides
nothing and changes nothing in the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hybridkv.hashing import ChunkKeys
from hybridkv.planner import CacheSpec, LookupResult

_SECOND_BATCH = 256
"""Chunks in the second batch of a search. To derive so many keys takes some 15 microseconds."""
_GROWTH = 8
"""Size of a later batch, as a multiple of all chunks before it."""
_NO_RUN: tuple[int, list[bytes]] = (0, [])
"""An empty run of keys. It is never extended."""


class RequestKeys:
    """Keys of one request. For each group, the keys of one run of consecutive chunks are cached for the next search.

    A cached key also keeps its Python hash, which an index needs. A run never has more keys than the request has
    chunks. Chunks are numbered from 0.

    Args:
        spec: groups of the model.
        keys: derives keys that are not cached. Its groups are the stored groups of `spec`, in the same order.
    """

    __slots__ = ("_cached", "_groups", "_hashes", "_keys", "_seen", "boundary_tokens", "chunk_tokens")

    def __init__(self, spec: CacheSpec, keys: ChunkKeys) -> None:
        self.chunk_tokens, self.boundary_tokens = spec.chunk_tokens, spec.boundary_tokens
        self._keys = keys
        self._groups = spec.stored_groups
        self._hashes: Sequence[bytes] = ()
        self._seen: tuple[int, bytes] = (0, b"")
        """Number of hashes in the last call of `follow`, and the last hash, which depends on all earlier hashes."""
        self._cached: dict[int, tuple[int, list[bytes]]] = {}
        """For each group: the first chunk of its cached run, and the keys."""

    def follow(self, prefix_hashes: Sequence[bytes]) -> RequestKeys:
        """Binds the keys to the request's current hashes, until the next call. Must be called before other methods.

        If the hashes do not extend the former ones, the cached keys are dropped.
        """
        num_seen, last_seen = self._seen
        num_hashes = len(prefix_hashes)
        if num_seen and (num_hashes < num_seen or prefix_hashes[num_seen - 1] != last_seen):
            self._cached.clear()
        self._hashes = prefix_hashes
        self._seen = (num_hashes, prefix_hashes[-1]) if num_hashes else (0, b"")
        return self

    def cached_range(self, group_index: int) -> tuple[int, int]:
        """Range [first, stop) of chunks with cached keys."""
        first, keys = self._cached.get(group_index, _NO_RUN)
        return first, first + len(keys)

    def key(self, group_index: int, end_token: int) -> bytes:
        """Key of the chunk, or of the tail (the first part of a chunk), that ends at `end_token`. Does not change the
        cached run.

        Raises:
            ValueError: the prefix up to `end_token` is not hashed yet.
        """
        first, cached = self._cached.get(group_index, _NO_RUN)
        place = end_token // self.chunk_tokens - 1 - first
        if 0 <= place < len(cached) and end_token % self.chunk_tokens == 0:
            return cached[place]
        return self._keys.key(self._groups.index(group_index), self._hashes, end_token)

    def ending_at(self, group_index: int, end_tokens: Sequence[int]) -> Sequence[bytes]:
        """Keys of a group's chunks and tails by their ends, in the given order. Fast for consecutive chunks.

        Raises:
            ValueError: the prefix up to an end is not hashed yet.
        """
        chunk = self.chunk_tokens
        if len(end_tokens) > 1 and end_tokens[0] % chunk == 0:
            in_a_row = range(end_tokens[0], end_tokens[-1] + 1, chunk)
            if in_a_row == end_tokens or (len(in_a_row) == len(end_tokens) and list(in_a_row) == end_tokens):
                return self.between(group_index, end_tokens[0] // chunk - 1, end_tokens[-1] // chunk)
        return [self.key(group_index, end_token) for end_token in end_tokens]

    def between(self, group_index: int, first: int, stop: int) -> Sequence[bytes]:
        """Keys of chunks [first, stop), at least one; the caller must not change the list.

        Keys that adjoin or overlap the cached run extend the run. Other keys replace it, but a single key replaces only
        an empty run.

        Raises:
            ValueError: the prefix of a chunk is not hashed yet.
        """
        low, cached = self._cached.get(group_index, _NO_RUN)
        high = low + len(cached)
        if first == low and stop == high:
            return cached
        if first > high or stop < low or not cached:
            made = self._derive(group_index, first, stop)
            if not cached or stop - first > 1:
                self._cached[group_index] = first, made
            return made
        if stop > high:
            made = self._derive(group_index, high, stop)
            cached += made
            if first == high:
                return made
        if first < low:
            cached[:0] = self._derive(group_index, first, low)
            self._cached[group_index] = first, cached
            low = first
        return cached[first - low : stop - low]

    def _derive(self, group_index: int, first: int, stop: int) -> list[bytes]:
        group, chunk = self._groups.index(group_index), self.chunk_tokens
        if stop - first == 1:
            return [self._keys.key(group, self._hashes, stop * chunk)]
        return self._keys.keys(group, self._hashes, range((first + 1) * chunk, stop * chunk + 1, chunk))


class LookupIndex(Protocol):
    """Lookups in one tier's index, or in several tiers combined; see `TierIndex`."""

    def lookup(self, key: bytes) -> LookupResult: ...

    def leading(self, keys: Sequence[bytes]) -> int: ...

    def last_held(self, keys: Sequence[bytes]) -> int | None: ...

    def any_pending(self, keys: Sequence[bytes]) -> bool: ...


class PendingIsMiss:
    """View of an index in which pending keys count as misses.

    Args:
        index: index to look up in.
        is_miss: whether a pending key counts as a miss. By default every pending key does.
    """

    def __init__(self, index: LookupIndex, is_miss: Callable[[bytes], bool] = lambda key: True) -> None:
        self._index = index
        self._is_miss = is_miss

    def lookup(self, key: bytes) -> LookupResult:
        answer = self._index.lookup(key)
        return LookupResult.MISS if answer is LookupResult.PENDING and self._is_miss(key) else answer

    def leading(self, keys: Sequence[bytes]) -> int:
        num_held = self._index.leading(keys)
        if not self._index.any_pending(keys[:num_held]):
            return num_held
        return next((i for i, key in enumerate(keys[:num_held]) if self.lookup(key) is LookupResult.MISS), num_held)

    def last_held(self, keys: Sequence[bytes]) -> int | None:
        place = self._index.last_held(keys)
        while place is not None and self.lookup(keys[place]) is LookupResult.MISS:
            place = self._index.last_held(keys[:place])
        return place

    def any_pending(self, keys: Sequence[bytes]) -> bool:
        return self._index.any_pending(keys) and any(self.lookup(key) is LookupResult.PENDING for key in keys)


class TierLookup:
    """The planner's `Lookup` and `RangeLookup` for one search of one request.

    Args:
        keys: keys of the request.
        index: index to look up in.
        pending_is_miss: pending chunks count as misses.
    """

    __slots__ = ("_chunk", "_index", "_keys", "_step")

    def __init__(self, keys: RequestKeys, index: LookupIndex, pending_is_miss: bool = False) -> None:
        self._keys = keys
        self._index = PendingIsMiss(index) if pending_is_miss else index
        self._chunk, self._step = keys.chunk_tokens, keys.boundary_tokens

    def __call__(self, group_index: int, end_token: int) -> LookupResult:
        return self._index.lookup(self._keys.key(group_index, end_token))

    def num_leading_held(self, group_index: int, first_end: int, last_end: int) -> int:
        first, stop = first_end // self._chunk - 1, last_end // self._chunk
        low, high = self._keys.cached_range(group_index)
        if low <= first < high:
            batch_stop = high
        else:
            batch_stop = first + (_next_batch(high - low) if first == high > low else 1)
        place = first
        while place < stop:
            batch_stop = min(batch_stop, stop)
            place += self._index.leading(self._keys.between(group_index, place, batch_stop))
            if place < batch_stop:
                break
            batch_stop = place + _next_batch(place - first)
        return max(0, place - first)

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        if self._step != self._chunk:
            return self._last_held_boundary(group_index, first_end, last_end)
        first, stop = first_end // self._chunk - 1, last_end // self._chunk
        low, high = self._keys.cached_range(group_index)
        if low < stop <= high:
            batch_first = low
        else:
            batch_first = stop - (_next_batch(high - low) if stop == low < high else 1)
        end = stop
        while end > first:
            batch_first = max(batch_first, first)
            place = self._index.last_held(self._keys.between(group_index, batch_first, end))
            if place is not None:
                return (batch_first + place + 1) * self._chunk
            end, batch_first = batch_first, batch_first - _next_batch(stop - batch_first)
        return 0

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        first, stop = first_end // self._chunk - 1, last_end // self._chunk
        return self._index.any_pending(self._keys.between(group_index, first, stop))

    def _last_held_boundary(self, group_index: int, first_end: int, last_end: int) -> int:
        """`last_held` if the cache stores tails. Looks up every boundary, of chunks and of tails, from the end, because
        most hits are near the end. Tails have no cached keys."""
        for end_token in range(last_end, first_end - 1, -self._step):
            if self(group_index, end_token) is not LookupResult.MISS:
                return end_token
        return 0


def _next_batch(num_seen: int) -> int:
    """Number of chunks in the next batch of a search that has seen `num_seen` chunks."""
    return max(_SECOND_BATCH, _GROWTH * num_seen)
