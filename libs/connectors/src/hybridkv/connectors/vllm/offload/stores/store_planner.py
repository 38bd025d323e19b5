"""Stores of requests: plans them in each step, and commits or aborts them when all ranks have ended them.

A source block stays pinned in the engine's pool until every rank has copied it. A key can be looked up only after every
rank has written its part of the chunk. Each chunk is stored with the keys that it extends: a tier evicts the chunk
before the chunks of these keys.
"""

from __future__ import annotations

import functools
import itertools
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple, cast

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.blocks import BlockPins, unpin_frees_any
from hybridkv.connectors.vllm.common.blocks.step_loads import STORE_FAILURE, STORE_FAILURE_REASON, StepLoad
from hybridkv.connectors.vllm.common.copies.table import CopyTable, copies_of_runs
from hybridkv.connectors.vllm.common.events import RouterEvents
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, AdapterVersion
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys, TierLookup
from hybridkv.connectors.vllm.common.messages import Store, StoreOutcome
from hybridkv.connectors.vllm.common.requests import (
    NULL_BLOCK,
    PrefixChain,
    StoredChunk,
    TrackedRequest,
    state_groups,
)
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.stores.keeping import Keeper
from hybridkv.connectors.vllm.offload.stores.prefix_chain import StoredPrefix, extended_keys, find_stored_prefix
from hybridkv.planner import (
    GroupKind,
    Hit,
    LookupResult,
    State,
    StorePlan,
    TransferRun,
    longest_hit,
    needed_parts,
    path_order,
    plan_store,
)
from hybridkv.planner.coverage import Part
from hybridkv.tiers import Extends, Refusal, Slot
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger("vllm.hybridkv.scheduler")

_OUTCOMES = {Refusal.PRESENT: "present", Refusal.TOO_LARGE: "dropped_too_large"}
"""Metric label for a chunk that the primary tier refuses, by reason; "dropped_no_room" for all other reasons."""


@dataclass(slots=True)
class _StoreInFlight:
    chain: PrefixChain
    chunks: list[StoredChunk]
    """New and stored chunks in `path_order`, without the leading chunks that every secondary tier held when the store
    was planned."""
    blocks: list[KVCacheBlock]
    num_bytes: int
    ranks_left: int
    adapter_version: AdapterVersion | None
    failure: str | None = None
    reason: str | None = None
    origins: dict[Part, str] = field(default_factory=dict)
    """Origin of each stored state of the first recurrent group."""
    reused_tokens: int = 0
    """Length of the prefix that was stored before this store was planned; 0 without one. New states and windows up to
    here make the prefix resumable."""
    step_load: StepLoad | None = None
    """`TrackedRequest.step_load` when the store was planned."""


class _Path(NamedTuple):
    """Chunks of one store, and the stored chunks of its prefix, in `path_order`."""

    parts: list[Part]
    keys: list[bytes]
    num_held: int
    """Number of leading chunks that every secondary tier with cascades holds or is storing."""
    extends: list[Extends]
    """For each chunk after these, the keys that it extends."""


def _add_chunks(chain: PrefixChain, chunks: _Path, refused: set[Part], new: set[Part]) -> list[StoredChunk]:
    """Adds chunks to a chain, except refused chunks. Returns the added chunks after the first `num_held`, in
    `path_order`."""
    chain.keys.update(zip(chunks.parts, chunks.keys, strict=True))
    chain.drop(list(refused))
    held = chunks.num_held
    rest = zip(chunks.parts[held:], chunks.keys[held:], chunks.extends, strict=True)
    return [StoredChunk(part, key, extends, part in new) for part, key, extends in rest if part not in refused]


class StorePlanner:
    """Plans stores, and tracks them until all ranks have ended them.

    Args:
        layout: the model's groups.
        stack: the tiers.
        adapters: checks that the files of an adapter did not change during a store.
        metrics: the connector's metrics.
        keeper: keeps the prefixes of requests with a keep hint; None: no prefix is kept.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        adapters: Adapters,
        metrics: ConnectorMetrics,
        keeper: Keeper | None = None,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._adapters = adapters
        self._metrics = metrics
        self._keeper = keeper
        self._first_state_group = next(iter(state_groups(layout.spec)), None)
        """First recurrent group; stored states are counted in it alone. None without recurrent groups."""
        self.events: RouterEvents | None = None
        """KV events for routers; None if not enabled."""
        self._pins = BlockPins()
        self._stores: dict[int, _StoreInFlight] = {}
        self._store_ids = count(1)
        self.num_planned_bytes = 0
        """Bytes of all stores planned so far, on one rank."""

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the pool of the blocks that are pinned while they are copied."""
        self._pins.bind(pool)

    def plan(
        self, tracked: TrackedRequest, num_scheduled: int, states: list[State], tables: compat.BlockTables
    ) -> Store | None:
        """Plans the store of the chunks that are final after this step's forward pass, and that the primary tier lacks.
        None if nothing is copied.

        Touches the chunks that are stored already, and cascades them: at the end of the store, or now if nothing is
        copied. The request must have keys.
        """
        spec, request = self._layout.spec, tracked.request
        hashes = tracked.prefix_hashes()
        # Only content of known tokens is final. Draft tokens may be rejected, and an asynchronous scheduler does not
        # have the newest tokens yet.
        hashed = len(hashes) * self._layout.hash_block_tokens
        final = min(request.num_computed_tokens + num_scheduled, request.num_tokens, hashed)
        states = [s for s in states if s.group_index in spec.stored_groups and s.num_tokens <= hashed]
        complete = (final // spec.chunk_tokens, max(0, final - spec.lookahead_tokens) // spec.chunk_tokens)
        chunk = spec.chunk_tokens
        tracked.idle_below_tokens = min((complete[0] + 1) * chunk, (complete[1] + 1) * chunk + spec.lookahead_tokens)
        if not states and complete == tracked.planned_chunks:
            return None
        tracked.planned_chunks = complete
        tracked.chain.set_prompt(request.num_prompt_tokens, tracked.hints.keep_seconds)
        table, request_keys = tables(request.request_id), tracked.keys()
        searched_tokens = complete[1] * spec.chunk_tokens
        prefix = find_stored_prefix(spec, self._stack, request_keys, tracked.stored_tokens, searched_tokens, table)
        keys, absent = prefix.later_keys, prefix.absent_groups
        resumed = self._resumed_parts(tracked, prefix.parts, keys)
        present = list(resumed)

        def is_wanted(part: Part) -> bool:
            key = keys.get(part)
            if key is None:
                key = keys[part] = request_keys.key(*part)
            # A chunk that only a secondary tier holds is stored again: the primary tier gets it without a read.
            is_stored = self._stack.primary.lookup(key) is not LookupResult.MISS
            if is_stored and part not in resumed:
                present.append(part)
            return not is_stored

        def wanted(group_index: int, ends: Sequence[int]) -> Sequence[int]:
            if group_index in absent and ends[-1] <= searched_tokens:
                return ends
            # Groups without lookahead may have final chunks after `searched_tokens`. `find_stored_prefix` has not
            # looked up these chunks.
            return [
                end
                for end in ends
                if (group_index in absent and end <= searched_tokens) or is_wanted((group_index, end))
            ]

        plan = plan_store(spec, prefix.stop_tokens, final, table, states, wanted, NULL_BLOCK)
        self._count(plan, [*prefix.parts, *present])
        parts, sizes = self._chunks(plan.runs, request_keys, keys)
        path = self._path(tracked, prefix, [*present, *parts], keys)
        if path.keys and (prefix.parts or present or self._stack.secondary):
            # The request reuses chunks that are stored already. They must not be evicted for the chunks that follow.
            # A tier may lack the order of its chunks: a promotion and a restart bring chunks without extended keys.
            self._stack.touch(path.keys[::-1], [*zip(path.keys[-2::-1], strict=True), ()])
        # A drafter's chunk is complete later than the other chunks with the same end; then all are looked up again.
        tracked.stored_tokens = max(searched_tokens, tracked.stored_tokens)
        in_flight = _StoreInFlight(tracked.chain, [], [], 0, self._layout.world_size, tracked.adapter_version)
        in_flight.step_load = tracked.step_load
        copies, stored = self._reserve(in_flight, plan.runs, dict(zip(parts, sizes, strict=True)), path)
        in_flight.chunks = _add_chunks(tracked.chain, path, set(parts).difference(stored), set(stored))
        in_flight.reused_tokens = prefix.stop_tokens if prefix.parts else 0
        if self.events is not None:
            self.events.on_store_planned(tracked, [*prefix.parts, *present, *stored])
        if not copies:
            self._publish(in_flight.chain, in_flight.chunks)
            return None
        self.num_planned_bytes += in_flight.num_bytes
        in_flight.origins = self._origins(tracked, stored)
        store_id = next(self._store_ids)
        self._stores[store_id] = in_flight
        in_flight.chain.num_storing += 1
        return Store(store_id, copies)

    def _resumed_parts(
        self, tracked: TrackedRequest, parts: Sequence[Part], keys: dict[Part, bytes]
    ) -> dict[Part, None]:
        """States and windows of the longest hit in the primary tier up to the token where the request resumed, without
        those in `parts`. Adds their keys to `keys`. Empty without secondary tiers, and after the first call since the
        request resumed.

        These chunks count as used, even if the engine's own cache served the request, and even if the request resumed
        between two boundaries. Otherwise the most used prefixes would never cascade as reused.
        """
        num_tokens, tracked.resumed_tokens = tracked.resumed_tokens, 0
        spec = self._layout.spec
        if not num_tokens or not self._stack.secondary or len(spec.full_groups) == len(spec.stored_groups):
            return {}
        lookup = TierLookup(tracked.keys(), self._stack.primary, pending_is_miss=True)
        hit = longest_hit(spec, num_tokens + max(1, spec.lookahead_tokens), 0, lookup, lookup)
        if not isinstance(hit, Hit):
            return {}
        needed = dict.fromkeys(
            part for part in needed_parts(spec, hit.num_tokens, 0) if part[0] not in spec.full_groups
        )
        for part in parts:
            needed.pop(part, None)
        keys.update((part, tracked.keys().key(*part)) for part in needed)
        return needed

    def _count(self, plan: StorePlan, present: Sequence[Part]) -> None:
        for group_index, number in Counter(map(itemgetter(0), present)).items():
            self._metrics.store(self._layout.spec.groups[group_index].kind, "present", number)
        if plan.unaligned_states:
            self._metrics.store("recurrent", "dropped_not_aligned", plan.unaligned_states)
        if plan.incomplete_tails:
            self._metrics.store("recurrent", "dropped_incomplete", plan.incomplete_tails)

    def _chunks(
        self, runs: Sequence[TransferRun], request_keys: RequestKeys, keys: dict[Part, bytes]
    ) -> tuple[list[Part], list[int]]:
        """Chunks of `runs` and their sizes. Adds their keys to `keys`."""
        chunk, size = self._layout.spec.chunk_tokens, self._layout.chunk_bytes
        parts: list[Part] = []
        wanted: list[bytes] = []
        sizes: list[int] = []
        for run in runs:
            ends = run.end_tokens(chunk)
            parts += zip(repeat(run.group_index), ends, strict=False)
            wanted += request_keys.ending_at(run.group_index, ends)
            sizes += [size(run.group_index, run.end_token)] * len(ends)
        keys.update(zip(parts, wanted, strict=True))
        return parts, sizes

    def _path(
        self, tracked: TrackedRequest, prefix: StoredPrefix, others: Sequence[Part], keys: Mapping[Part, bytes]
    ) -> _Path:
        """The chunks of `prefix` and others, in `path_order`. `keys` has the keys of the others."""
        spec, others = self._layout.spec, path_order(self._layout.spec, others)
        num_held = self._stack.leading_cascading(prefix.keys)
        if not others or not prefix.parts or others[0][1] > prefix.parts[-1][1]:
            order = [*prefix.parts, *others]
            ordered_keys = [*prefix.keys, *(keys[part] for part in others)]
        else:
            num_held = min(num_held, bisect_left(prefix.parts, others[0][1], key=itemgetter(1)))
            all_keys = dict(zip(prefix.parts, prefix.keys, strict=True)) | dict(keys)
            order = path_order(spec, [*prefix.parts, *others])
            ordered_keys = [all_keys[part] for part in order]
        rest, rest_keys = order[num_held:], ordered_keys[num_held:]
        before = ordered_keys[num_held - 1] if num_held else next(reversed(tracked.chain.keys.values()), None)
        trunk, chunk = None, spec.chunk_tokens
        if rest and spec.full_groups and (trunk_tokens := (rest[0][1] - 1) // chunk * chunk):
            trunk = tracked.keys().key(spec.full_groups[-1], trunk_tokens)
        extends = extended_keys(spec, rest, rest_keys, tracked.chain.keys, before, trunk)
        return _Path(order, ordered_keys, num_held, extends)

    def _reserve(
        self, in_flight: _StoreInFlight, runs: Sequence[TransferRun], sizes: Mapping[Part, int], path: _Path
    ) -> tuple[CopyTable, list[Part]]:
        """Reserves space and pins source blocks. Returns the copies and the chunks that have space.

        `sizes`: bytes of each chunk of `runs`, in the order of `runs`. Space is reserved in `path_order`.
        """
        held = path.num_held
        rest = zip(path.parts[held:], path.keys[held:], path.extends, strict=True)
        chunks = {part: (key, sizes[part], extends) for part, key, extends in rest if part in sizes}
        parts, slots = list(sizes), self._stack.reserve_all(list(chunks.values()))
        if len(runs) > 1:
            reserved = dict(zip(chunks, slots, strict=True))
            slots = [reserved[part] for part in parts]
        if Refusal in set(map(type, slots)):
            runs, parts, slots = self._drop_refused(runs, parts, slots)
        if not parts:
            return CopyTable(), []
        planned = copies_of_runs(self._layout, runs, [chunks[part][0] for part in parts], cast("list[Slot]", slots))
        in_flight.num_bytes = planned.tier_bytes
        in_flight.blocks = self._pins.pin(itertools.chain.from_iterable(run.block_ids for run in runs))
        return planned.copies, parts

    def _drop_refused(
        self, runs: Sequence[TransferRun], parts: Sequence[Part], slots: Sequence[Slot | Refusal]
    ) -> tuple[list[TransferRun], list[Part], list[Slot | Refusal]]:
        """The same lists without the chunks that the primary tier refused. Counts the refused chunks."""
        refused = Counter((part[0], slot) for part, slot in zip(parts, slots, strict=True) if isinstance(slot, Refusal))
        for (group_index, why), number in refused.items():
            kind = self._layout.spec.groups[group_index].kind
            self._metrics.store(kind, _OUTCOMES.get(why, "dropped_no_room"), number)
        each = [one for run in runs for one in run.single(self._layout.spec.chunk_tokens)]
        kept = [place for place, slot in enumerate(slots) if isinstance(slot, Slot)]
        return [each[place] for place in kept], [parts[place] for place in kept], [slots[place] for place in kept]

    def _origins(self, tracked: TrackedRequest, parts: Iterable[Part]) -> dict[Part, str]:
        if self._first_state_group is None:
            return {}
        num_prompt, boundary = tracked.request.num_prompt_tokens, self._layout.spec.boundary_tokens
        return {
            part: tracked.checkpoint_state.origin(part[1], num_prompt, boundary)
            for part in parts
            if part[0] == self._first_state_group
        }

    def _publish(
        self, chain: PrefixChain, chunks: Sequence[StoredChunk], is_stored: bool = True, reused_tokens: int = 0
    ) -> None:
        """Commits or aborts new chunks, and cascades the other chunks that the primary tier holds, in `path_order`. If
        the chain is complete, also keeps its prefix and cascades its missing chunks.

        Args:
            chain: chain of the request.
            chunks: chunks of the store, in `path_order`.
            is_stored: whether all ranks have written the new chunks.
            reused_tokens: length of the prefix that was stored before; see `_StoreInFlight`.
        """
        ended: Counter[tuple[int, str]] = Counter()
        for is_new, run in groupby(chunks, key=attrgetter("is_new")):
            if is_new:
                ended += self._commit(chain, list(run), is_stored, reused_tokens)
                continue
            for chunk in run:
                # If another store still writes the chunk, that store cascades it.
                if self._stack.in_primary(chunk.key):
                    self._stack.cascade(chunk.key, chunk.extends)
        for (group_index, outcome), number in ended.items():
            self._metrics.store(self._layout.spec.groups[group_index].kind, outcome, number)
        if chain.is_complete:
            if chain.keep_seconds and self._keeper is not None:
                self._keeper.keep(chain, chain.keep_seconds)
            self._cascade_missing(chain)

    def _commit(
        self, chain: PrefixChain, chunks: Sequence[StoredChunk], is_stored: bool, reused_tokens: int
    ) -> Counter[tuple[int, str]]:
        """Commits or aborts the new chunks of a store. Returns their numbers by group and outcome."""
        if is_stored:
            offered = self._stack.commit_all(
                [(chunk.key, chunk.extends) for chunk in chunks],
                [chunk.key for chunk in chunks if self._is_interim_state(chain, chunk.part)],
            )
            for chunk, is_offered in zip(chunks, offered, strict=True):
                # The reused prefix cascades now. Without this chunk, other engines could not resume the prefix.
                if is_offered and chunk.part[1] <= reused_tokens and not self._is_interim_state(chain, chunk.part):
                    self._stack.cascade(chunk.key, chunk.extends)
        else:
            for chunk in chunks:
                self._stack.abort(chunk.key)
            offered = [False] * len(chunks)
        groups = [chunk.part[0] for chunk in chunks]
        return Counter(zip(groups, ["stored" if each else "failed" for each in offered], strict=True))

    def _is_interim_state(self, chain: PrefixChain, part: Part) -> bool:
        """Whether a part is a state of an unfinished answer. Secondary tiers get only the last state of an answer."""
        group_index, end_token = part
        is_state = self._layout.spec.groups[group_index].kind is GroupKind.RECURRENT
        return is_state and end_token > chain.prompt_tokens and not chain.is_over

    def _cascade_missing(self, chain: PrefixChain) -> None:
        """Cascades the chunks of a chain that a secondary tier with the policy ALL lacks by now.

        Stops at a whole FULL chunk that host memory lacks too, because later chunks need it. Chunks that wait in a
        cascade queue are not queued twice.
        """
        spec, stack = self._layout.spec, self._stack
        if not stack.secondary or stack.in_all_eager_secondaries(list(chain.keys.values())):
            return
        order = path_order(spec, chain.keys)
        keys = [chain.keys[part] for part in order]
        for part, key, extends in zip(order, keys, extended_keys(spec, order, keys), strict=True):
            if not stack.missing_in_cascading(key):
                continue
            if stack.in_primary(key):
                stack.cascade(key, extends, is_reuse=False)
            elif spec.groups[part[0]].kind is GroupKind.FULL and part[1] % spec.chunk_tokens == 0:
                return

    def on_request_finished(self, tracked: TrackedRequest) -> None:
        """Called when a request has ended. Its chain is complete now if no store of the request is in flight, else when
        the last store has ended."""
        tracked.chain.is_over = True
        self._publish(tracked.chain, ())

    def holds_freed_blocks(self) -> bool:
        """Whether the end of a store will return blocks to the engine's pool."""
        return any(unpin_frees_any(in_flight.blocks) for in_flight in self._stores.values())

    def has_work(self) -> bool:
        return bool(self._stores)

    def drop_unconfirmed(self) -> None:
        """Drops the stores of requests with blocks that another connector may have loaded within a step in flight.
        Called when the engine reports no failed loads any more."""
        for in_flight in self._stores.values():
            if in_flight.step_load is not None and in_flight.step_load.is_open:
                in_flight.failure = "the engine ended before it reported the loads of another connector"
                in_flight.reason = "closed"

    def on_ended(self, outcomes: Mapping[int, StoreOutcome]) -> None:
        """Records the outcomes of ranks. When all ranks have ended a store, it is committed or aborted."""

        @functools.cache
        def is_valid(adapter_version: AdapterVersion | None) -> bool:
            """Cached: one check of an adapter's files covers all stores of this call."""
            return self._adapters.is_still_valid(adapter_version)

        for store_id, ended in outcomes.items():
            self._on_ended(store_id, ended, is_valid)

    def _on_ended(self, store_id: int, ended: StoreOutcome, is_valid: Callable[[AdapterVersion | None], bool]) -> None:
        in_flight = self._stores[store_id]
        in_flight.ranks_left -= ended.num_ranks
        in_flight.failure = in_flight.failure or ended.failure
        in_flight.reason = in_flight.reason or ended.reason
        if in_flight.ranks_left > 0:
            return
        del self._stores[store_id]
        if in_flight.step_load is not None and in_flight.step_load.has_failed:
            in_flight.failure, in_flight.reason = STORE_FAILURE, STORE_FAILURE_REASON
        if in_flight.failure is None and not is_valid(in_flight.adapter_version):
            in_flight.failure, in_flight.reason = "the adapter's files changed during the store", "adapter"
        if in_flight.failure is not None:
            num_lost = sum(chunk.is_new for chunk in in_flight.chunks)
            logger.warning("%d chunks were not stored: %s", num_lost, in_flight.failure)
            self._metrics.store_failed(in_flight.reason or "io")
        in_flight.chain.num_storing -= 1
        self._publish(
            in_flight.chain,
            in_flight.chunks,
            is_stored=in_flight.failure is None,
            reused_tokens=in_flight.reused_tokens,
        )
        if in_flight.failure is None:
            for origin in in_flight.origins.values():
                self._metrics.state_stored(origin)
            self._metrics.stored_bytes(in_flight.num_bytes * self._layout.world_size)
        self._pins.free(in_flight.blocks)

    def close(self) -> None:
        """Unpins the source blocks of all stores."""
        for in_flight in self._stores.values():
            self._pins.free(in_flight.blocks)
        self._stores.clear()
