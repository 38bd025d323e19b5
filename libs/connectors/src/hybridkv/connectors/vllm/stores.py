"""What is stored after a step, and what becomes of it.

A source block stays pinned in the engine's pool until every rank has read it; a key is offered only after every rank
has committed it. What depends on other chunks is made to leave the tiers before them.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.chunk_copies import copy_bytes, copy_of
from hybridkv.connectors.vllm.identity.adapters import Adapters, Sworn
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.messages import ChunkCopy, Store, StoreOutcome
from hybridkv.connectors.vllm.pins import BlockPins, frees_on_end
from hybridkv.connectors.vllm.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.connectors.vllm.stored_path import StoredPart, StoredPath, add
from hybridkv.planner import GroupKind, LookupResult, State, Transfer, needed_before, path_order, plan_store
from hybridkv.planner.paths import Part
from hybridkv.tiers import Refusal
from hybridkv.tiers.stack import PathPosition, TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger("vllm.hybridkv.scheduler")

_OUTCOMES = {Refusal.PRESENT: "present", Refusal.TOO_LARGE: "dropped_too_large"}
"""What becomes of a chunk that the fast tier refuses; otherwise there is no room for it."""


@dataclass(slots=True)
class _StoreInFlight:
    path: StoredPath
    chunks: list[StoredPart]
    """In the order in which each is worth something."""
    blocks: list[KVCacheBlock]
    num_bytes: int
    ranks_left: int
    sworn: Sworn | None
    failure: str | None = None
    reason: str | None = None


class StorePlanner:
    """Plans stores, and follows those that are on their way.

    Args:
        layout: the model's groups.
        stack: the tiers.
        adapters: whether what an adapter had a part in is what it was stored for.
        recorder: counts what happens.
    """

    def __init__(self, layout: CacheLayout, stack: TierStack, adapters: Adapters, recorder: Recorder) -> None:
        self._layout = layout
        self._stack = stack
        self._adapters = adapters
        self._recorder = recorder
        self._pins = BlockPins()
        self._stores: dict[int, _StoreInFlight] = {}
        self._store_ids = itertools.count(1)
        self._used_bytes: tuple[int, ...] = ()
        """Of each slower tier, by all requests, each time that they stored or met a chunk."""

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool whose blocks are pinned while they are read."""
        self._pins.bind(pool)

    def plan(
        self, tracked: TrackedRequest, num_scheduled: int, states: list[State], tables: compat.BlockTables
    ) -> Store | None:
        """What becomes storable of a request after the forward pass of this step. It has keys."""
        spec, request = self._layout.spec, tracked.request
        hashes = tracked.prefix_hashes()
        # Content is final where the token is known: drafts that may be rejected, and tokens that an asynchronous
        # scheduler has not seen yet, are not.
        hashed = len(hashes) * self._layout.hash_block_tokens
        final = min(request.num_computed_tokens + num_scheduled, request.num_tokens, hashed)
        states = [s for s in states if s.group_index in spec.stored_groups and s.num_tokens <= hashed]
        complete = (final // spec.chunk_tokens, max(0, final - spec.lookahead_tokens) // spec.chunk_tokens)
        if not states and complete == tracked.seen:
            return None
        tracked.seen = complete
        derived = tracked.keys()
        keys: dict[Part, bytes] = {}
        present: list[Part] = []

        def wanted(group_index: int, end_token: int) -> bool:
            key = keys[group_index, end_token] = derived.key(group_index, end_token)
            # A chunk that only a slower tier holds is stored again: this costs no read, and the fast tier gets it.
            stored = self._stack.lookup_near(key)
            if stored is not LookupResult.MISS:
                present.append((group_index, end_token))
                self._recorder.store(spec.groups[group_index].kind, "present")
            return stored is LookupResult.MISS

        table = tables(request.request_id)
        plan = plan_store(spec, tracked.stored_tokens, final, table, states, wanted, NULL_BLOCK)
        # A drafter's chunk comes later than the others, which are then looked at again.
        tracked.stored_tokens = max(complete[1] * spec.chunk_tokens, tracked.stored_tokens)
        for _ in range(plan.unaligned_states):
            self._recorder.store("recurrent", "dropped_not_aligned")
        # What is stored already has been of use, and must not make room for what follows it.
        self._stack.touch_near([keys[part] for part in reversed(path_order(spec, present))])
        in_flight = _StoreInFlight(tracked.path, [], [], 0, self._layout.world_size, tracked.sworn)
        copies, stored = self._reserve(in_flight, plan.transfers, keys)
        in_flight.chunks = self._placed(tracked, [*present, *stored], set(stored))
        if not copies:
            self._settle(in_flight.path, in_flight.chunks)
            return None
        store_id = next(self._store_ids)
        self._stores[store_id] = in_flight
        in_flight.path.num_storing += 1
        return Store(store_id, tuple(copies))

    def _reserve(
        self, in_flight: _StoreInFlight, transfers: Sequence[Transfer], keys: Mapping[Part, bytes]
    ) -> tuple[list[ChunkCopy], list[Part]]:
        copies, parts = [], []
        wanted = [(transfer.group_index, transfer.end_token) for transfer in transfers]
        sizes = [self._layout.chunk_bytes(*part) for part in wanted]
        slots = self._stack.reserve_all([(keys[part], size) for part, size in zip(wanted, sizes, strict=True)])
        for transfer, part, slot in zip(transfers, wanted, slots, strict=True):
            if isinstance(slot, Refusal):
                kind = self._layout.spec.groups[part[0]].kind
                self._recorder.store(kind, _OUTCOMES.get(slot, "dropped_no_room"))
                continue
            copies.append(copy_of(self._layout.spec, transfer, keys[part], slot))
            parts.append(part)
            in_flight.num_bytes += copy_bytes(self._layout, copies[-1])
            in_flight.blocks += self._pins.pin(transfer.block_ids)
        return copies, parts

    def _placed(self, tracked: TrackedRequest, parts: Iterable[Part], new: Container[Part]) -> list[StoredPart]:
        """Chunks of a request, from its beginning on, each with what it needs to be worth anything."""
        spec, keys, path = self._layout.spec, tracked.keys(), tracked.path
        chunks = []
        for part in path_order(spec, parts):
            key = keys.key(*part)
            costs = self._stack.costs(self._layout.chunk_bytes(*part))
            self._used_bytes = add(self._used_bytes, costs)
            path_bytes = path.add(part, key, costs)
            on_path = PathPosition(tuple(keys.key(*need) for need in needed_before(spec, *part)), path_bytes)
            chunks.append(StoredPart(part, key, on_path, part in new))
        return chunks

    def _settle(self, path: StoredPath, chunks: Sequence[StoredPart], is_stored: bool = True) -> None:
        """Offers what was stored, lets it cascade from the beginning on, and puts the order of use right."""
        spec = self._layout.spec
        is_overdue = bool(chunks) and path.is_overdue(self._used_bytes, self._stack.capacities)
        met = [chunk.key for chunk in reversed(chunks) if not chunk.is_new or self._stack.is_below(chunk.key)]
        if met and not is_overdue:
            # What was there already must not make room for what follows it.
            self._stack.touch(met)
        for chunk in self._checked(path, chunks) if is_overdue else chunks:
            if not chunk.is_new:
                # What another store still brings, that one lets cascade.
                if self._stack.in_near(chunk.key):
                    self._stack.cascade(chunk.key, chunk.on_path)
                continue
            is_offered = is_stored and self._stack.commit(chunk.key, chunk.on_path)
            if not is_stored:
                self._stack.abort(chunk.key)
            self._recorder.store(spec.groups[chunk.part[0]].kind, "stored" if is_offered else "failed")
        if path.is_complete:
            self._offer_again(path)
        renewed = path.take_renewal(spec, self._used_bytes, is_overdue)
        if renewed is None:
            renewed = [chunk.key for chunk in reversed(chunks)]
        if renewed:
            self._stack.touch(renewed)

    def _checked(self, path: StoredPath, chunks: Sequence[StoredPart]) -> Sequence[StoredPart]:
        """Chunks that follow a path of long ago: it is made recent first, and must be whole, not only at its end.

        Whatever a slower tier lacks asks for the whole prefix, unless it needs another such chunk, which does.
        """
        spec = self._layout.spec
        self._stack.touch(path.order(spec))
        missing: set[bytes] = set()
        checked = []
        for chunk in chunks:
            if self._stack.lacks_below(chunk.key):
                if missing.isdisjoint(chunk.on_path.needs):
                    on_path = chunk.on_path._replace(prefix=path.prefix(spec, chunk.part[1]))
                    checked.append(chunk._replace(on_path=on_path))
                else:
                    checked.append(chunk)
                missing.add(chunk.key)
            else:
                checked.append(chunk)
        return checked

    def _offer_again(self, path: StoredPath) -> None:
        """What a slower tier lacks of a path by now, up to the first chunk without which the rest is worth nothing and
        which the fast tier has not either, or for which there can be no room in any. What waits already is not asked
        for twice."""
        spec, stack = self._layout.spec, self._stack
        if stack.has_all_below(list(path.keys.values())):
            return
        path_bytes: tuple[int, ...] = ()
        for part in path_order(spec, path.keys):
            key = path.keys[part]
            path_bytes = add(path_bytes, stack.costs(self._layout.chunk_bytes(*part)))
            if all(num_bytes > capacity for num_bytes, capacity in zip(path_bytes, stack.capacities, strict=True)):
                return
            if not stack.lacks_below(key):
                continue
            needs = needed_before(spec, *part)
            if stack.in_near(key) and path.keys.keys() >= set(needs):
                stack.cascade(key, PathPosition(tuple(path.keys[need] for need in needs), path_bytes))
            elif spec.groups[part[0]].kind is GroupKind.FULL:
                return

    def on_gone(self, tracked: TrackedRequest) -> None:
        """The request has ended: what it leaves is made recent as a whole, now or when its last store has ended."""
        tracked.path.is_over = True
        self._settle(tracked.path, ())

    def holds_freed_blocks(self) -> bool:
        """Whether a store that ends will give blocks back to the engine's pool."""
        return any(frees_on_end(in_flight.blocks) for in_flight in self._stores.values())

    def has_work(self) -> bool:
        return bool(self._stores)

    def on_ended(self, outcomes: Mapping[int, StoreOutcome]) -> None:
        """Ranks are done with stores; the last of them commits or aborts each."""

        @functools.cache
        def holds(sworn: Sworn | None) -> bool:
            """One look at an adapter's files is good for all stores that ended before it."""
            return self._adapters.holds(sworn)

        for store_id, ended in outcomes.items():
            self._on_ended(store_id, ended, holds)

    def _on_ended(self, store_id: int, ended: StoreOutcome, holds: Callable[[Sworn | None], bool]) -> None:
        in_flight = self._stores[store_id]
        in_flight.ranks_left -= ended.num_ranks
        in_flight.failure = in_flight.failure or ended.failure
        in_flight.reason = in_flight.reason or ended.reason
        if in_flight.ranks_left > 0:
            return
        del self._stores[store_id]
        if in_flight.failure is None and not holds(in_flight.sworn):
            in_flight.failure, in_flight.reason = "the adapter's files changed meanwhile", "adapter"
        if in_flight.failure is not None:
            num_lost = sum(chunk.is_new for chunk in in_flight.chunks)
            logger.warning("%d chunks were not stored: %s", num_lost, in_flight.failure)
            self._recorder.store_failed(in_flight.reason or "io")
        in_flight.path.num_storing -= 1
        self._settle(in_flight.path, in_flight.chunks, is_stored=in_flight.failure is None)
        if in_flight.failure is None:
            self._recorder.stored_bytes(in_flight.num_bytes * self._layout.world_size)
        self._pins.free(in_flight.blocks)

    def close(self) -> None:
        """Gives back what is still pinned in the engine's pool."""
        for in_flight in self._stores.values():
            self._pins.free(in_flight.blocks)
        self._stores.clear()
