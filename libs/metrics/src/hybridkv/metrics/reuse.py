"""Estimator of prompt tokens that a tier of another size would restore: sampled reuse distances, in fixed memory.

The reuse distance of a chunk is the size of all distinct chunks that were used since its last use, including the chunk.
An LRU tier holds the chunk if the tier is at least as large. So one histogram of distances gives the restored tokens
for every size. Method: SHARDS (Waldspurger et al., FAST 2015), which samples chunks by their hash. Recurrent states are
not sampled, because a request has few of them. Reads no clock. For one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

MAX_CHUNKS: Final = 1 << 14
"""Limit for sampled chunks. With more, the estimator halves the share of chunks that it samples."""
MAX_STATES: Final = 1 << 13
"""Limit for states. With more, it forgets the least recently used one."""
UNITS_PER_CAPACITY: Final = 64
"""Resolution of distances: one unit is the tier's capacity divided by this number."""
MAX_MULTIPLE: Final = 16
"""Distances above this multiple of the capacity count as unbounded."""
EPOCHS_PER_DISTANCE: Final = 32
"""A merged epoch has at most the bytes of all newer epochs divided by this number, or one unit if that is more."""
MAX_EPOCHS: Final = 384
"""With more epochs after a request, neighbours are merged."""
MAX_EPOCHS_PER_REQUEST: Final = UNITS_PER_CAPACITY
"""Limit for the epochs that one request begins, so that a long prompt costs a bounded time."""


class _ReuseEpoch:
    """Chunks used at about the same time. `merged_into` is the older epoch into which it was merged, or None."""

    __slots__ = ("merged_into", "newer_bytes", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        """Estimated size of all chunks and states that were last used in this epoch."""
        self.newer_bytes = 0
        """Sum of `num_bytes` of all newer epochs, after the last request that began an epoch."""
        self.merged_into: _ReuseEpoch | None = None


def _root(epoch: _ReuseEpoch) -> _ReuseEpoch:
    while epoch.merged_into is not None:
        epoch = epoch.merged_into
    return epoch


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """Number of prompt tokens, and number of tokens that a tier of a given size would have restored.

    Args:
        prompt_tokens: tokens of all prompts.
        unit_bytes: resolution of sizes, in bytes.
        by_units: restored tokens that need a tier of (index + 1) units; the last entry needs a larger tier than all
            others.
    """

    prompt_tokens: float
    unit_bytes: float
    by_units: tuple[float, ...]

    @property
    def reused_tokens(self) -> float:
        """Tokens that an unbounded tier would have restored."""
        return sum(self.by_units)

    def restored_tokens(self, capacity_bytes: float) -> float:
        """Tokens that a tier of `capacity_bytes` would have restored.

        Larger sizes than `MAX_MULTIPLE` times the capacity of the estimator count as that size.
        """
        num_units = min(int(capacity_bytes / self.unit_bytes), len(self.by_units) - 1)
        return sum(self.by_units[:num_units])

    def bytes_for(self, share: float) -> float | None:
        """Size in bytes of the smallest tier that would have restored this share of `reused_tokens`.

        None if nothing was reused, or if the tier would be larger than all measured sizes.
        """
        wanted = share * self.reused_tokens
        if not wanted:
            return None
        for num_units, tokens in enumerate(accumulate(self.by_units[:-1]), 1):
            if tokens >= wanted:
                return num_units * self.unit_bytes
        return None


class ReuseEstimator:
    """Reuse distances of the requests of one engine.

    Call `count_prompt` with each new prompt, and `record_use` with its chunks when the request ends.

    Args:
        capacity_bytes: size of the tier.
        chunk_bytes: size of a chunk of attention, of all groups together.
        chunk_tokens: tokens of a chunk.
        state_bytes: size of the states of one boundary; 0: the model has none.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: int, chunk_tokens: int, state_bytes: int = 0) -> None:
        self._unit_bytes = max(1.0, capacity_bytes / UNITS_PER_CAPACITY)
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._state_bytes = state_bytes
        self._chunks: dict[bytes, _ReuseEpoch] = {}
        self._states: OrderedDict[bytes, _ReuseEpoch] = OrderedDict()
        self._mask = 0
        self._num_request_epochs = 0
        self._epochs: list[_ReuseEpoch] = [_ReuseEpoch()]
        num_buckets = UNITS_PER_CAPACITY * MAX_MULTIPLE + 1
        self._chunk_tokens_by_distance = [0.0] * num_buckets
        self._state_tokens_by_distance = [0.0] * num_buckets
        self._prompt_tokens = 0.0
        self._requested_chunks = 0.0
        self._sampled_chunks = 0.0

    def count_prompt(self, prompt_tokens: int, chunks: Sequence[bytes], states: Sequence[bytes] = ()) -> None:
        """Measures the distances of a new prompt.

        Args:
            prompt_tokens: length of the prompt.
            chunks: keys of the prompt's attention chunks, from the first on, up to the last possible boundary.
            states: keys of the states at the same boundaries; empty if the model has none.
        """
        self._prompt_tokens += prompt_tokens
        self._requested_chunks += len(chunks)
        self._measure_chunks(chunks)
        if self._state_bytes:
            self._measure_states(states)

    def record_use(self, chunks: Sequence[bytes], states: Iterable[bytes] = ()) -> None:
        """Records the last use of a request's chunks and states. The first chunk becomes the most recently used one.

        Args:
            chunks: keys of the request's stored attention chunks, from the first on.
            states: keys of the request's stored states.
        """
        self._num_request_epochs = 0
        for key in states:
            self._use_state(key)
        kept, num_bytes = self._chunks, self._chunk_bytes * (self._mask + 1)
        for key in reversed(self._sample(chunks)):
            epoch = kept.get(key)
            if epoch is not None:
                _root(epoch).num_bytes -= num_bytes
            kept[key] = self._add_to_newest(num_bytes)
        if self._num_request_epochs:
            self._measure_epochs()
        if len(self._chunks) > MAX_CHUNKS:
            self._drop_old()
        while len(self._chunks) > MAX_CHUNKS * 3 // 4 and len(self._chunks) + len(chunks) > MAX_CHUNKS:
            self._sample_fewer()

    def report(self) -> ReuseReport:
        """Report over all prompts. For a model with states, tokens are restored only up to a state."""
        return self._report(self._state_tokens_by_distance if self._state_bytes else self._chunk_tokens_by_distance)

    def forget_chunks(self) -> None:
        """Forgets all chunks and states, after the tiers were cleared. Keeps the counts."""
        self._chunks.clear()
        self._states.clear()
        self._epochs = [_ReuseEpoch()]
        self._mask = 0

    def fade(self) -> None:
        """Halves all counts, so that newer requests count more."""
        self._chunk_tokens_by_distance = [tokens / 2 for tokens in self._chunk_tokens_by_distance]
        self._state_tokens_by_distance = [tokens / 2 for tokens in self._state_tokens_by_distance]
        self._prompt_tokens /= 2
        self._requested_chunks /= 2
        self._sampled_chunks /= 2

    def _measure_chunks(self, chunks: Sequence[bytes]) -> None:
        sampled, weight = self._sample(chunks), self._mask + 1
        self._sampled_chunks += len(sampled) * weight
        tokens, counts, find = self._chunk_tokens * weight, self._chunk_tokens_by_distance, self._chunks.get
        needed, bucket, previous = 0.0, 0, None
        for key in sampled:
            epoch = find(key)
            if epoch is None:
                break
            if epoch is not previous:  # neighbours are often of the same epoch
                previous = epoch
                distance = self._distance(epoch, self._chunk_bytes)
                if distance > needed:  # a prefix also needs all chunks before this one
                    needed, bucket = distance, self._bucket(distance)
            counts[bucket] += tokens

    def _measure_states(self, states: Sequence[bytes]) -> None:
        find = self._states.get
        known = [(place, epoch) for place, key in enumerate(states, 1) if (epoch := find(key)) is not None]
        needed = float("inf")
        for number in range(len(known) - 1, -1, -1):
            place, epoch = known[number]
            # The chunks before a state are used with it, so they are at least as recent.
            needed = min(needed, self._distance(epoch, self._state_bytes))
            previous = known[number - 1][0] if number else 0
            self._state_tokens_by_distance[self._bucket(needed)] += (place - previous) * self._chunk_tokens

    def _sample(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        mask = self._mask
        return [key for key in keys if not hash(key) & mask] if mask else keys

    def _use_state(self, key: bytes) -> None:
        epoch = self._states.pop(key, None)
        if epoch is None and len(self._states) >= MAX_STATES:
            _, epoch = self._states.popitem(last=False)
        if epoch is not None:
            _root(epoch).num_bytes -= self._state_bytes
        self._states[key] = self._add_to_newest(self._state_bytes)

    def _add_to_newest(self, num_bytes: int) -> _ReuseEpoch:
        newest = self._epochs[-1]
        newest.num_bytes += num_bytes
        if newest.num_bytes >= self._unit_bytes and self._num_request_epochs < MAX_EPOCHS_PER_REQUEST:
            self._num_request_epochs += 1
            self._epochs.append(_ReuseEpoch())
        return newest

    def _distance(self, epoch: _ReuseEpoch, own_bytes: int) -> float:
        """Bytes used since the middle of an epoch."""
        root = _root(epoch)
        return root.newer_bytes + max(own_bytes, root.num_bytes / 2)

    def _bucket(self, distance: float) -> int:
        return min(int(distance / self._unit_bytes), len(self._chunk_tokens_by_distance) - 1)

    def _measure_epochs(self) -> None:
        """Measures the distances of all epochs, after a request has begun new ones."""
        newer = 0
        for epoch in reversed(self._epochs):
            epoch.newer_bytes = newer
            newer += epoch.num_bytes
        if len(self._epochs) > MAX_EPOCHS:
            self._merge_epochs()

    def _merge_epochs(self) -> None:
        """Merges adjacent epochs. The older they are, the larger a merged epoch can be."""
        merged: list[_ReuseEpoch] = []
        for epoch in self._epochs:
            limit = max(self._unit_bytes, epoch.newer_bytes / EPOCHS_PER_DISTANCE)
            if merged and merged[-1].num_bytes + epoch.num_bytes <= limit:
                into = merged[-1]
                into.num_bytes += epoch.num_bytes
                into.newer_bytes = epoch.newer_bytes
                epoch.merged_into = into
            else:
                merged.append(epoch)
        self._epochs = merged
        for table in (self._chunks, self._states):
            for key, epoch in table.items():
                table[key] = _root(epoch)

    def _drop_old(self) -> None:
        """Drops chunks at distances above all sizes. A later use of such a chunk does not count as reuse."""
        limit, num_bytes = self._unit_bytes * UNITS_PER_CAPACITY * MAX_MULTIPLE, self._chunk_bytes * (self._mask + 1)
        kept: dict[bytes, _ReuseEpoch] = {}
        for key, epoch in self._chunks.items():
            root = _root(epoch)
            if root.newer_bytes > limit:
                root.num_bytes -= num_bytes
            else:
                kept[key] = root
        self._chunks = kept

    def _sample_fewer(self) -> None:
        """Halves the share of sampled chunks. Each remaining chunk counts for twice as many chunks."""
        num_bytes, mask = self._chunk_bytes * (self._mask + 1), 2 * self._mask + 1
        kept: dict[bytes, _ReuseEpoch] = {}
        for key, epoch in self._chunks.items():
            root = _root(epoch)
            if hash(key) & mask:
                root.num_bytes -= num_bytes
            else:
                root.num_bytes += num_bytes
                kept[key] = root
        self._chunks, self._mask = kept, mask

    def _report(self, counts: Collection[float]) -> ReuseReport:
        by_units = list(counts)
        if counts is self._chunk_tokens_by_distance:
            # A few chunks are used by most requests. By chance the sample has too many or too few of these chunks.
            # Their distances are the shortest, so the difference is corrected there.
            missing = (self._requested_chunks - self._sampled_chunks) * self._chunk_tokens
            for place, tokens in enumerate(by_units):
                by_units[place] = max(0.0, tokens + missing)
                missing = min(0.0, tokens + missing)
        return ReuseReport(self._prompt_tokens, self._unit_bytes, tuple(by_units))
