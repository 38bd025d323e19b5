"""What the planner asks while it searches for one request, answered by a tier's index.

Keys are derived in batches that grow while a search goes on, so that a miss costs a few, and are kept for the next
search and the stores of the same request. It decides nothing and changes nothing in the tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hybridkv.hashing import RUN_CHUNKS, ChunkKeys, KeyRuns
from hybridkv.planner import CacheSpec, LookupResult

_GROWTH = 8
"""How many times as many chunks the next batch of a search may have as all before it."""
_MAX_LONE_KEYS = 64
"""Keys that are kept beside a stretch: what a search by halves asks for, and the next one again."""


class RequestKeys:
    """The keys of one request, derived where they are asked for and kept for as long as its hashes only grow.

    For each group one stretch of neighbouring chunks is kept: 32 bytes a key (73 as Python holds them), never more keys
    than the request has chunks. Chunks are numbered from 0 here.

    Args:
        spec: the model's groups; `keys` is of the stored ones, in order.
        keys: derives what is not kept.
        runs: keys that other requests have derived.
    """

    __slots__ = ("_chunk", "_first", "_group", "_hashes", "_kept", "_keys", "_lone", "_runs", "_seen", "_step")

    def __init__(self, spec: CacheSpec, keys: ChunkKeys, runs: KeyRuns) -> None:
        self._chunk, self._step = spec.chunk_tokens, spec.boundary_tokens
        self._keys, self._runs = keys, runs
        self._group = {group_index: place for place, group_index in enumerate(spec.stored_groups)}
        self._hashes: Sequence[bytes] = ()
        self._seen: tuple[int, bytes] = (0, b"")
        """How many hashes there were, and the last of them, which stands for all before it."""
        self._first = [0] * len(spec.groups)
        self._kept: list[list[bytes]] = [[] for _ in spec.groups]
        self._lone: dict[tuple[int, int], bytes] = {}

    @property
    def chunk_tokens(self) -> int:
        return self._chunk

    @property
    def boundary_tokens(self) -> int:
        return self._step

    def follow(self, prefix_hashes: Sequence[bytes]) -> RequestKeys:
        """These keys over the request's hashes as they are now, until the next call.

        Hashes that are not those before and more drop what is kept. To be called before the others.
        """
        num_seen, last_seen = self._seen
        num_hashes = len(prefix_hashes)
        if num_seen and (num_hashes < num_seen or prefix_hashes[num_seen - 1] != last_seen):
            self._kept = [[] for _ in self._kept]
            self._lone.clear()
        self._hashes = prefix_hashes
        self._seen = (num_hashes, prefix_hashes[-1]) if num_hashes else (0, b"")
        return self

    def kept(self, group_index: int) -> tuple[int, int]:
        """The first chunk whose key is kept, and the one after the last."""
        first = self._first[group_index]
        return first, first + len(self._kept[group_index])

    def key(self, group_index: int, end_token: int) -> bytes:
        """The key of a chunk or tail by its end.

        One that follows those that are kept brings the rest of its run; one that lies apart takes their place.
        """
        if end_token % self._chunk:
            return self._keys.key(self._group[group_index], self._hashes, end_token)
        chunk = end_token // self._chunk - 1
        place = chunk - self._first[group_index]
        kept = self._kept[group_index]
        if 0 <= place < len(kept):
            return kept[place]
        stop = chunk + 1
        if not -1 <= place <= len(kept):
            kept.clear()
        elif place > 0:
            run_stop = (chunk // RUN_CHUNKS + 1) * RUN_CHUNKS
            if self._keys.last_hash(self._group[group_index], self._hashes, run_stop * self._chunk) is not None:
                stop = run_stop
        return self.between(group_index, chunk, stop)[0]

    def between(self, group_index: int, first: int, stop: int) -> Sequence[bytes]:
        """The keys of chunks [first, stop), of which there is at least one.

        They are kept in place of the stretch that is kept, unless they are next to it or only one.

        Raises:
            ValueError: the prefix of one of them is not hashed yet.
        """
        kept, low = self._kept[group_index], self._first[group_index]
        high = low + len(kept)
        if first < low or stop > high:
            if not kept or first > high or stop < low:
                if kept and stop == first + 1:
                    return (self._lone_key(group_index, first),)
                kept.clear()
                self._first[group_index] = low = high = first
            if stop > high:
                self._extend_up(group_index, high, stop)
            if first < low:
                self._extend_down(group_index, first, low)
                low = first
        return kept if first == low and stop - low == len(kept) else kept[first - low : stop - low]

    def _extend_up(self, group_index: int, first: int, stop: int) -> None:
        keys, num_found = self._make(group_index, first, stop)
        self._kept[group_index] += keys
        if num_found < len(keys):
            self._remember(group_index, first + num_found, stop)

    def _extend_down(self, group_index: int, first: int, stop: int) -> None:
        keys, num_found = self._make(group_index, first, stop)
        self._kept[group_index][:0] = keys
        self._first[group_index] = first
        if num_found < len(keys):
            self._remember(group_index, first + num_found, stop)

    def _lone_key(self, group_index: int, chunk: int) -> bytes:
        key = self._lone.get((group_index, chunk))
        if key is None:
            if len(self._lone) == _MAX_LONE_KEYS:
                self._lone.clear()
            key = self._lone[group_index, chunk] = self._make(group_index, chunk, chunk + 1)[0][0]
        return key

    def _make(self, group_index: int, first: int, stop: int) -> tuple[list[bytes], int]:
        """The keys of chunks [first, stop), and how many of them, from the first, other requests have derived."""
        group, chunk, runs, hashes = self._group[group_index], self._chunk, self._runs, self._hashes
        keys: list[bytes] = []
        place = first
        while place < stop:
            run_stop = (place // RUN_CHUNKS + 1) * RUN_CHUNKS
            last_hash = self._keys.last_hash(group, hashes, run_stop * chunk)
            run = None if last_hash is None else runs.find(group, last_hash)
            if run is None:
                break
            if place % RUN_CHUNKS or run_stop > stop:
                run = run[place % RUN_CHUNKS : RUN_CHUNKS - max(0, run_stop - stop)]
            keys += run
            place += len(run)
        num_found = len(keys)
        if place == stop - 1:
            keys.append(self._keys.key(group, hashes, stop * chunk))
        elif place < stop:
            keys += self._keys.keys(group, hashes, range((place + 1) * chunk, stop * chunk + 1, chunk))
        return keys, num_found

    def _remember(self, group_index: int, first: int, stop: int) -> None:
        """Leaves to other requests the runs that chunks [first, stop) have completed."""
        group, low, kept = self._group[group_index], self._first[group_index], self._kept[group_index]
        begin = max(-(-low // RUN_CHUNKS), first // RUN_CHUNKS) * RUN_CHUNKS
        end = min(low + len(kept), -(-stop // RUN_CHUNKS) * RUN_CHUNKS)
        for run_start in range(begin, end - RUN_CHUNKS + 1, RUN_CHUNKS):
            run_stop = run_start + RUN_CHUNKS
            last_hash = self._keys.last_hash(group, self._hashes, run_stop * self._chunk)
            if last_hash is not None:
                self._runs.remember(group, last_hash, kept[run_start - low : run_stop - low])


class TierQuestions(Protocol):
    """What is asked of an index, or of several behind one face; see `TierIndex`."""

    def lookup(self, key: bytes) -> LookupResult: ...

    def leading(self, keys: Sequence[bytes]) -> int: ...

    def last_held(self, keys: Sequence[bytes]) -> int | None: ...

    def any_pending(self, keys: Sequence[bytes]) -> bool: ...


class TierLookup:
    """The planner's `Lookup` and `RangeLookup` for one search of one request.

    Args:
        keys: of the request.
        index: what is asked.
        pending_is_miss: what is not readable yet counts as not stored.
    """

    __slots__ = ("_chunk", "_index", "_keys", "_pending_is_miss", "_step")

    def __init__(self, keys: RequestKeys, index: TierQuestions, pending_is_miss: bool = False) -> None:
        self._keys, self._index = keys, index
        self._chunk, self._step = keys.chunk_tokens, keys.boundary_tokens
        self._pending_is_miss = pending_is_miss

    def __call__(self, group_index: int, end_token: int) -> LookupResult:
        result = self._index.lookup(self._keys.key(group_index, end_token))
        if self._pending_is_miss and result is LookupResult.PENDING:
            return LookupResult.MISS
        return result

    def held(self, group_index: int, first_end: int, last_end: int) -> int:
        chunk = self._chunk
        first, stop = first_end // chunk - 1, last_end // chunk
        place = first
        low, high = self._keys.kept(group_index)
        batch_stop = min(stop, high if low <= first < high else first + 1)
        while place < stop:
            keys = self._keys.between(group_index, place, batch_stop)
            num_held = self._leading(keys)
            place += num_held
            if num_held < len(keys):
                break
            batch_stop = min(stop, -(-first // RUN_CHUNKS) * RUN_CHUNKS + self._grown(batch_stop - first))
        return max(0, place - first)

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        if self._step != self._chunk:
            return self._last_held_tail(group_index, first_end, last_end)
        chunk = self._chunk
        first, stop = first_end // chunk - 1, last_end // chunk
        low, high = self._keys.kept(group_index)
        batch_first = low if low < stop <= high else stop - 1
        end = stop
        while end > first:
            batch_first = max(first, batch_first)
            place = self._last(self._keys.between(group_index, batch_first, end))
            if place is not None:
                return (batch_first + place + 1) * chunk
            end = batch_first
            batch_first = (stop - self._grown(stop - batch_first)) // RUN_CHUNKS * RUN_CHUNKS
        return 0

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        if self._pending_is_miss:
            return False
        chunk = self._chunk
        return self._index.any_pending(self._keys.between(group_index, first_end // chunk - 1, last_end // chunk))

    @staticmethod
    def _grown(num_chunks: int) -> int:
        """Chunks that a search has seen after its next batch, when it has seen `num_chunks`: whole runs."""
        return -(-_GROWTH * num_chunks // RUN_CHUNKS) * RUN_CHUNKS

    def _last_held_tail(self, group_index: int, first_end: int, last_end: int) -> int:
        """`last_held` where tails are stored, whose keys are not kept: asked for from the end, mostly found there."""
        for end_token in range(last_end, first_end - 1, -self._step):
            if self(group_index, end_token) is not LookupResult.MISS:
                return end_token
        return 0

    def _leading(self, keys: Sequence[bytes]) -> int:
        num_held = self._index.leading(keys)
        if self._pending_is_miss and self._index.any_pending(keys[:num_held]):
            pending = LookupResult.PENDING
            return next(i for i, key in enumerate(keys) if self._index.lookup(key) is pending)
        return num_held

    def _last(self, keys: Sequence[bytes]) -> int | None:
        place = self._index.last_held(keys)
        while self._pending_is_miss and place is not None and self._index.lookup(keys[place]) is LookupResult.PENDING:
            place = self._index.last_held(keys[:place])
        return place
