"""KV events: announce the chunks in host memory and on disk to routers, as events of the engine's own types.

Chunks are recorded when a request hits or stores them. The tiers report changes; `planner.Announcer` decides which
chunks are announced; this module makes the events. Tiers that other engines change too are not announced.
`AnnouncedBlocks` counts the announcements of each block hash: a subscriber gets one event for each hash, and the
removal only after the last announcement has ended.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import DISK, RAM, ConnectorMetrics
from hybridkv.planner import Announcement, Announcer, ChunkNode, GroupKind, chunk_span
from hybridkv.planner.coverage import Part
from hybridkv.tiers import ReportsChanges, TierIndex
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_BlockKey: TypeAlias = tuple[Any, Any, Any]
"""Medium, group and hash."""


class AnnouncedBlocks:
    """Announcement counts by (medium, group, hash). Has one entry for each announced hash."""

    def __init__(self) -> None:
        self._counts: dict[_BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count_and_filter(self, events: Iterable[Any]) -> list[Any]:
        """Counts the announcements in the events of a step, and returns the part that is new to a subscriber. Events of
        other types pass unchanged. An event with tokens that cannot be split by block passes whole if a part is new.

        If a hash is removed and stored again in one step while another chunk still announces it, the subscriber gets
        one removal and one new store. `RouterEvents.take` makes such events after the engine has reset its cache,
        because subscribers have then dropped all hashes.
        """
        new_events: list[Any] = []
        removed_before: set[_BlockKey] = set()
        sent_again: set[_BlockKey] = set()
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    new_events += self._stored(event, removed_before, sent_again)
                case "BlockRemoved":
                    new_events += self._removed(event, removed_before)
                case _:
                    new_events.append(event)
        return new_events

    def _stored(self, event: Any, removed_before: set[_BlockKey], sent_again: set[_BlockKey]) -> Iterator[Any]:
        is_new, again = [], []
        for block_hash, place in zip(event.block_hashes, _block_keys(event), strict=True):
            count = self._counts.get(place, 0)
            self._counts[place] = count + 1
            is_again = place in removed_before and place not in sent_again
            is_new.append(count == 0 or is_again)
            if is_again:
                sent_again.add(place)
                again.append(block_hash)
        if again:
            yield compat.block_removed(
                block_hashes=again, medium=event.medium, group_idx=getattr(event, "group_idx", None)
            )
        if all(is_new):
            yield event
        elif any(is_new):
            yield from _runs(event, is_new)

    def _removed(self, event: Any, removed_before: set[_BlockKey]) -> Iterator[Any]:
        gone = []
        for block_hash, place in zip(event.block_hashes, _block_keys(event), strict=True):
            count = self._counts.pop(place, 1) - 1
            if count:
                self._counts[place] = count
                removed_before.add(place)
            else:
                gone.append(block_hash)
                removed_before.discard(place)
        if len(gone) == len(event.block_hashes):
            yield event
        elif gone:
            yield msgspec.structs.replace(event, block_hashes=gone)


def _block_keys(event: Any) -> list[_BlockKey]:
    group = getattr(event, "group_idx", None)
    return [(event.medium, group, block_hash) for block_hash in event.block_hashes]


def _runs(event: Any, is_new: list[bool]) -> Iterator[Any]:
    """Events for the runs of new blocks of an event, each with the tokens of its blocks."""
    hashes, size = event.block_hashes, event.block_size
    extra_keys = getattr(event, "extra_keys", None)
    if not size or len(event.token_ids) != len(hashes) * size:
        yield event  # its tokens cannot be split by block
        return
    first = 0
    while first < len(hashes):
        if not is_new[first]:
            first += 1
            continue
        end = first
        while end < len(hashes) and is_new[end]:
            end += 1
        fields = {
            "block_hashes": hashes[first:end],
            "parent_block_hash": hashes[first - 1] if first else event.parent_block_hash,
            "token_ids": event.token_ids[first * size : end * size],
        }
        if extra_keys is not None and len(extra_keys) == len(hashes):
            fields["extra_keys"] = extra_keys[first:end]
        yield msgspec.structs.replace(event, **fields)
        first = end


logger = logging.getLogger("vllm.hybridkv.scheduler")

MEDIA = {RAM: "CPU", DISK: "STORAGE"}
"""Medium in events of each announced tier. Engines share the other tiers, which are not announced."""


@dataclass(frozen=True, slots=True)
class _ChunkContent:
    """Content of a chunk in the engine's terms.

    Args:
        parent: hash of the block before the chunk; None for the first chunk.
        hashes: hashes of all hash blocks of the chunk.
        tokens: all tokens of the chunk.
        extra_keys: one entry for each hash block, or None.
        lora: number and name of the adapter; (None, None) without an adapter.
    """

    parent: bytes | None
    hashes: tuple[bytes, ...]
    tokens: array[int]
    extra_keys: list[Any] | None
    lora: tuple[int | None, str | None]


@dataclass(frozen=True, slots=True)
class _Watched:
    index: TierIndex
    changes: ReportsChanges
    medium: str


class RouterEvents:
    """KV events of one store.

    Args:
        layout: the model's groups.
        stack: the tiers.
        groups: event fields of each group; see `compat.event_groups`.
        metrics: counts events.
    """

    def __init__(
        self, layout: CacheLayout, stack: TierStack, groups: Sequence[Mapping[str, Any]], metrics: ConnectorMetrics
    ) -> None:
        self._layout, self._groups, self._metrics = layout, groups, metrics
        spec = layout.spec
        self._tiers: list[_Watched] = []
        for name, index in {RAM: stack.primary, **stack.secondary}.items():
            if name in MEDIA and isinstance(index, ReportsChanges):
                index.watch()
                self._tiers.append(_Watched(index, index, MEDIA[name]))
        self._announcer: Announcer[_ChunkContent] = Announcer(spec, len(self._tiers))
        self._announced_blocks = AnnouncedBlocks()
        # The key of this group identifies a chunk. The group has the largest lookahead, because its keys distinguish
        # the most chunks.
        self._naming_group = max(spec.stored_groups, key=lambda index: spec.groups[index].lookahead_tokens)
        self._lookahead = spec.groups[self._naming_group].lookahead_tokens
        self._pool: BlockPool | None = None
        self._last_engine_cache: object = None
        self._has_warned = False

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the engine's pool. After a reset of the whole pool, subscribers drop all blocks, also the blocks of
        tiers, so `take` announces all chunks again."""
        self._pool, self._last_engine_cache = pool, compat.cached_blocks(pool)

    # Chunks of requests.

    def on_admitted(self, tracked: TrackedRequest) -> None:
        """Records the whole chunks of an admitted request, up to the last chunk that a tier holds."""
        num_chunks = self._num_identified_chunks(tracked)
        if num_chunks == 0:
            return
        keys, last = tracked.keys(), 0
        for group in self._layout.spec.stored_groups:
            of_group = keys.between(group, 0, num_chunks)
            for tier in self._tiers:
                place = tier.index.last_held(of_group)
                last = max(last, 0 if place is None else place + 1)
        chunk = self._layout.spec.chunk_tokens
        for number in range(1, last + 1):
            self._describe(tracked, number * chunk)

    def on_store_planned(self, tracked: TrackedRequest, parts: Iterable[Part]) -> None:
        """Records whole chunks that a request stores, or that were stored already. Tails are not announced."""
        last = self._num_identified_chunks(tracked) * self._layout.spec.chunk_tokens
        for end in sorted({end for _, end in parts}):
            if end <= last and end % self._layout.spec.chunk_tokens == 0:
                self._describe(tracked, end)

    def _num_identified_chunks(self, tracked: TrackedRequest) -> int:
        """Number of the request's first chunks with keys for all parts and with hashes of the engine for all blocks."""
        num_hashed = min(len(tracked.request.block_hashes), len(tracked.prefix_hashes()))
        is_hashed = bool(tracked.request.block_hashes) or tracked.request.num_tokens < self._layout.hash_block_tokens
        if not is_hashed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no KV events for stored chunks: this engine makes no block hashes, by which routers identify blocks"
            )
        known = num_hashed * self._layout.hash_block_tokens - self._lookahead
        return max(0, known) // self._layout.spec.chunk_tokens

    def _describe(self, tracked: TrackedRequest, end: int) -> None:
        keys, spec = tracked.keys(), self._layout.spec
        name = keys.key(self._naming_group, end)
        if self._announcer.knows(name):
            return
        of_parts = tuple(keys.key(group, end) for group in spec.stored_groups)
        answers = [(number, key, tier.index.lookup(key)) for number, tier in enumerate(self._tiers) for key in of_parts]
        start = end - spec.chunk_tokens
        parent = keys.key(self._naming_group, start) if start else None
        self._announcer.describe(ChunkNode(name, parent, end, of_parts, self._content_of(tracked, start, end)))
        for answer in answers:
            self._announcer.note(*answer)

    def _content_of(self, tracked: TrackedRequest, start: int, end: int) -> _ChunkContent:
        request, size = tracked.request, self._layout.hash_block_tokens
        hashes, first = request.block_hashes, start // size
        lora = tracked.lora
        return _ChunkContent(
            parent=hashes[first - 1] if first else None,
            hashes=tuple(hashes[first : end // size]),
            tokens=array("i", request.all_token_ids[start:end]),
            extra_keys=compat.event_extra_keys(request, [(at, at + size) for at in range(start, end, size)]),
            lora=(None, None) if lora is None else (lora.adapter_id, lora.name),
        )

    # Events.

    def take(self) -> list[Any]:
        """Events since the last call: first stores, a prefix before its extensions; then removals, in reverse order.

        After a reset of the engine's whole cache, removals and then stores of all announced chunks follow.
        """
        self._read_changes()
        stored, removed = self._announcer.take()
        events = [self._stored(each) for each in stored] + [self._removed(each) for each in removed]
        if self._pool is not None and self._last_engine_cache is not (now := compat.cached_blocks(self._pool)):
            self._last_engine_cache = now
            everything = self._announcer.announced()
            events += [self._removed(each) for each in reversed(everything)]
            events += [self._stored(each) for each in everything]
        new_events = self._announced_blocks.count_and_filter(events)
        for event in new_events:
            self._metrics.announced(type(event).__name__, event.medium)
        announcer = self._announcer
        num_tokens = announcer.num_on_paths * self._layout.spec.chunk_tokens
        self._metrics.announcements(num_tokens, announcer.num_held - announcer.num_announced)
        return new_events

    def _read_changes(self) -> None:
        """Reads changes from the tiers."""
        for number, tier in enumerate(self._tiers):
            changes = tier.changes.take_changes()
            lookup = tier.index.lookup
            for key in self._announcer.known_keys() if changes.is_any else changes.keys:
                self._announcer.note(number, key, lookup(key))

    def _stored(self, each: Announcement[_ChunkContent]) -> Any:
        content, size = each.payload, self._layout.hash_block_tokens
        first, last = self._blocks(each)
        hashes = content.hashes[first:last]
        before = content.hashes[first - 1] if first else content.parent
        return compat.block_stored(
            block_hashes=[compat.event_hash(each) for each in hashes],
            parent_block_hash=None if before is None else compat.event_hash(before),
            token_ids=content.tokens[first * size : last * size].tolist(),
            block_size=size,
            lora_id=content.lora[0],
            medium=self._tiers[each.tier].medium,
            lora_name=content.lora[1],
            extra_keys=None if content.extra_keys is None else content.extra_keys[first:last],
            **self._groups[each.group_index],
        )

    def _removed(self, each: Announcement[_ChunkContent]) -> Any:
        first, last = self._blocks(each)
        return compat.block_removed(
            block_hashes=[compat.event_hash(block_hash) for block_hash in each.payload.hashes[first:last]],
            medium=self._tiers[each.tier].medium,
            group_idx=each.group_index,
        )

    def _blocks(self, each: Announcement[_ChunkContent]) -> tuple[int, int]:
        """Range of the hash blocks that a part covers. For a state only the last block, because the state is the one
        after this block."""
        spec, size = self._layout.spec, self._layout.hash_block_tokens
        last = len(each.payload.hashes)
        if spec.groups[each.group_index].kind is GroupKind.RECURRENT:
            return last - 1, last
        start = each.end_token - last * size
        return -(-(chunk_span(spec, each.group_index, each.end_token).start - start) // size), last
