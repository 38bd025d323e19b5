"""What is stored after a step, and what becomes of it.

A source block stays pinned in the engine's pool until every rank has read it; a key is offered only after every rank
has committed it. What depends on other chunks is made to leave the tiers before them.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, groupby, repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, cast

import msgspec

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks import BlockPins, frees_on_end
from hybridkv.connectors.vllm.common.copies.table import copies_of_runs
from hybridkv.connectors.vllm.common.events import RouterEvents
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, Sworn
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.messages import CopyTable, Store, StoreOutcome
from hybridkv.connectors.vllm.common.requests import (
    NULL_BLOCK,
    StoredPart,
    StoredPath,
    TrackedRequest,
    add,
    state_groups,
)
from hybridkv.connectors.vllm.common.stats import Recorder
from hybridkv.connectors.vllm.offload.keeping import Keeper
from hybridkv.connectors.vllm.offload.met import find_met
from hybridkv.connectors.vllm.offload.placing import NOTHING_MET, Placing, Whole
from hybridkv.connectors.vllm.offload.renewals import Renewals
from hybridkv.planner import (
    GroupKind,
    LookupResult,
    State,
    StorePlan,
    TransferRun,
    needed_before,
    path_order,
    plan_store,
)
from hybridkv.planner.paths import Part
from hybridkv.tiers import Refusal, Slot
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
    origins: dict[Part, str] = field(default_factory=dict)
    """Of states that it brings: where each comes from, told by the first group that has one."""
    whole: Whole = NOTHING_MET
    """What was there already in all tiers, before all chunks on the path."""


class StorePlanner:
    """Plans stores, and follows those that are on their way.

    Args:
        layout: the model's groups.
        stack: the tiers.
        adapters: whether what an adapter had a part in is what it was stored for.
        recorder: counts what happens.
        keeper: of prefixes that requests asked to be kept.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        adapters: Adapters,
        recorder: Recorder,
        keeper: Keeper | None = None,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._adapters = adapters
        self._recorder = recorder
        self._keeper = keeper
        self._placing = Placing(layout, stack)
        self._first_state = next(iter(state_groups(layout.spec)), None)
        """The group by which a boundary's states are counted, None where there are none."""
        self.events: RouterEvents | None = None
        """Whom to tell what a request's chunks are."""
        self._pins = BlockPins()
        self._renewals = Renewals(stack)
        self._stores: dict[int, _StoreInFlight] = {}
        self._store_ids = count(1)
        self.num_planned_bytes = 0
        """Of all stores ever planned, on one rank."""

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
        chunk = spec.chunk_tokens
        tracked.idle_below_tokens = min((complete[0] + 1) * chunk, (complete[1] + 1) * chunk + spec.lookahead_tokens)
        if not states and complete == tracked.seen:
            return None
        tracked.seen = complete
        tracked.path.begin(request.num_prompt_tokens, tracked.hints.keep_seconds)
        table, derived = tables(request.request_id), tracked.keys()
        asked_tokens = complete[1] * spec.chunk_tokens
        met = find_met(spec, self._stack, derived, tracked.stored_tokens, asked_tokens, table)
        keys, absent = met.behind, met.absent
        present: list[Part] = []

        def is_wanted(part: Part) -> bool:
            key = keys.get(part)
            if key is None:
                key = keys[part] = derived.key(*part)
            # A chunk that only a slower tier holds is stored again: this costs no read, and the fast tier gets it.
            is_stored = self._stack.lookup_near(key) is not LookupResult.MISS
            if is_stored:
                present.append(part)
            return not is_stored

        def wanted(group_index: int, ends: Sequence[int]) -> Sequence[int]:
            if group_index in absent and ends[-1] <= asked_tokens:
                return ends
            # Behind a drafter's chunks there may be some of other groups that nobody was asked about.
            return [
                end for end in ends if (group_index in absent and end <= asked_tokens) or is_wanted((group_index, end))
            ]

        plan = plan_store(spec, met.stop_tokens, final, table, states, wanted, NULL_BLOCK)
        # A drafter's chunk comes later than the others, which are then looked at again.
        tracked.stored_tokens = max(asked_tokens, tracked.stored_tokens)
        self._count(plan, [*met.parts, *present])
        # What is stored already has been of use, and must not make room for what follows it.
        self._stack.touch_near(met.keys_among(spec, present, keys)[::-1])
        in_flight = _StoreInFlight(tracked.path, [], [], 0, self._layout.world_size, tracked.sworn)
        copies, stored = self._reserve(in_flight, plan.runs, derived, keys)
        in_flight.whole, others = self._placing.meet(tracked.path, met, [*present, *stored])
        num_whole = len(in_flight.whole.parts)
        keys.update(zip(met.parts[num_whole:], met.keys[num_whole:], strict=True))
        in_flight.chunks = self._placing.place(tracked, others, set(stored), keys)
        if self.events is not None:
            self.events.storing(tracked, [*met.parts, *present, *stored])
        if not copies:
            self._settle(in_flight.path, in_flight.chunks, in_flight.whole)
            return None
        self.num_planned_bytes += in_flight.num_bytes
        in_flight.origins = self._origins(tracked, stored)
        store_id = next(self._store_ids)
        self._stores[store_id] = in_flight
        in_flight.path.num_storing += 1
        return Store(store_id, copies)

    def _count(self, plan: StorePlan, present: Sequence[Part]) -> None:
        for group_index, number in Counter(map(itemgetter(0), present)).items():
            self._recorder.store(self._layout.spec.groups[group_index].kind, "present", number)
        if plan.unaligned_states:
            self._recorder.store("recurrent", "dropped_not_aligned", plan.unaligned_states)
        if plan.incomplete_tails:
            self._recorder.store("recurrent", "dropped_incomplete", plan.incomplete_tails)

    def _reserve(
        self, in_flight: _StoreInFlight, runs: Sequence[TransferRun], derived: RequestKeys, keys: dict[Part, bytes]
    ) -> tuple[CopyTable, list[Part]]:
        """The copies of what finds room, whose blocks are pinned, and which parts these are. `keys` has theirs then."""
        chunk, size = self._layout.spec.chunk_tokens, self._layout.chunk_bytes
        parts: list[Part] = []
        wanted: list[bytes] = []
        sizes: list[int] = []
        for run in runs:
            ends = run.end_tokens(chunk)
            parts += zip(repeat(run.group_index), ends, strict=False)
            wanted += derived.ending_at(run.group_index, ends)
            sizes += [size(run.group_index, run.end_token)] * len(ends)
        keys.update(zip(parts, wanted, strict=True))
        slots = self._stack.reserve_all(list(zip(wanted, sizes, strict=True)))
        if Refusal in set(map(type, slots)):
            runs, parts, slots = self._without_refused(runs, parts, slots)
        if not parts:
            return CopyTable(), []
        planned = copies_of_runs(self._layout, runs, [keys[part] for part in parts], cast("list[Slot]", slots))
        in_flight.num_bytes = planned.tier_bytes
        in_flight.blocks = self._pins.pin(chain.from_iterable(run.block_ids for run in runs))
        return planned.copies, parts

    def _without_refused(
        self, runs: Sequence[TransferRun], parts: Sequence[Part], slots: Sequence[Slot | Refusal]
    ) -> tuple[list[TransferRun], list[Part], list[Slot | Refusal]]:
        """The same without the chunks that the fast tier has no place for, which are counted."""
        refused = Counter((part[0], slot) for part, slot in zip(parts, slots, strict=True) if isinstance(slot, Refusal))
        for (group_index, why), number in refused.items():
            kind = self._layout.spec.groups[group_index].kind
            self._recorder.store(kind, _OUTCOMES.get(why, "dropped_no_room"), number)
        each = [one for run in runs for one in run.single(self._layout.spec.chunk_tokens)]
        kept = [place for place, slot in enumerate(slots) if isinstance(slot, Slot)]
        return [each[place] for place in kept], [parts[place] for place in kept], [slots[place] for place in kept]

    def _origins(self, tracked: TrackedRequest, parts: Iterable[Part]) -> dict[Part, str]:
        if self._first_state is None:
            return {}
        num_prompt, boundary = tracked.request.num_prompt_tokens, self._layout.spec.boundary_tokens
        return {
            part: tracked.checkpointed.origin(part[1], num_prompt, boundary)
            for part in parts
            if part[0] == self._first_state
        }

    def _settle(
        self, path: StoredPath, chunks: Sequence[StoredPart], whole: Whole = NOTHING_MET, is_stored: bool = True
    ) -> None:
        """Offers what was stored, lets it cascade from the beginning on, and puts the order of use right.

        Args:
            path: of the request.
            chunks: of the store, in the order in which each is worth something.
            whole: what was met before all of these.
            is_stored: all ranks have what is new of the chunks.
        """
        spec, from_end = self._layout.spec, whole.keys[::-1]
        is_overdue = bool(chunks or from_end) and path.is_overdue(self._placing.used_bytes, self._stack.capacities)
        chunks = [*self._placing.lacking(path, whole), *chunks]
        if not (chunks or is_overdue or path.is_complete):
            # Nothing comes between a touch of what was met and one of the path that it is a part of.
            self._renew(path, from_end)
            return
        if not is_overdue:
            # What was there already must not make room for what follows it.
            is_below = self._stack.is_below if self._stack.slower else None
            used = [c.key for c in reversed(chunks) if not c.is_new or (is_below is not None and is_below(c.key))]
            self._stack.touch([*used, *from_end])
        ended: Counter[tuple[int, str]] = Counter()
        checked = self._checked(path, chunks) if is_overdue else chunks
        for is_new, run in groupby(checked, key=attrgetter("is_new")):
            if is_new:
                ended += self._end(path, list(run), is_stored)
                continue
            for chunk in run:
                # What another store still brings, that one lets cascade.
                if self._stack.in_near(chunk.key):
                    self._stack.cascade(chunk.key, chunk.on_path)
        for (group_index, outcome), number in ended.items():
            self._recorder.store(spec.groups[group_index].kind, outcome, number)
        if path.is_complete:
            if path.keep_seconds and self._keeper is not None:
                self._keeper.keep(path, path.keep_seconds)
            self._offer_again(path)
        self._renew(path, [*[chunk.key for chunk in reversed(chunks)], *from_end], is_overdue)

    def _renew(self, path: StoredPath, from_end: list[bytes], is_overdue: bool = False) -> None:
        """Makes what was stored or met recent, the end first, or all of its path where that is due."""
        if (renewed := path.take_renewal(self._layout.spec, self._placing.used_bytes, is_overdue)) is None:
            self._stack.touch(from_end)
        else:
            self._renewals.renew(path, renewed)

    def _end(self, path: StoredPath, chunks: Sequence[StoredPart], is_stored: bool) -> Counter[tuple[int, str]]:
        """Commits what a store brought, or gives it up. How many chunks of each group ended how."""
        if is_stored:
            offered = self._stack.commit_all(
                [(chunk.key, None if self._may_be_superseded(path, chunk.part) else chunk.on_path) for chunk in chunks]
            )
        else:
            for chunk in chunks:
                self._stack.abort(chunk.key)
            offered = [False] * len(chunks)
        of_groups = [chunk.part[0] for chunk in chunks]
        return Counter(zip(of_groups, ["stored" if each else "failed" for each in offered], strict=True))

    def _may_be_superseded(self, path: StoredPath, part: Part) -> bool:
        """Whether it is a state of an answer that goes on: slower tiers get the last of them, at the request's end."""
        group_index, end_token = part
        is_state = self._layout.spec.groups[group_index].kind is GroupKind.RECURRENT
        return is_state and end_token > path.prompt_tokens and not path.is_over

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
                    checked.append(msgspec.structs.replace(chunk, on_path=on_path))
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
        if not stack.slower or stack.has_all_below(list(path.keys.values())):
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
                on_path = PathPosition(tuple(path.keys[need] for need in needs), path_bytes)
                stack.cascade(key, on_path, is_met=False)
            elif spec.groups[part[0]].kind is GroupKind.FULL and part[1] % spec.chunk_tokens == 0:
                return

    def advance(self) -> None:
        """Does a step's part of what is spread over steps."""
        self._renewals.advance()

    def on_gone(self, tracked: TrackedRequest) -> None:
        """The request has ended: what it leaves is made recent as a whole, now or when its last store has ended."""
        tracked.path.is_over = True
        self._settle(tracked.path, ())

    def forget(self) -> None:
        """Nothing that was stored is there any more. Stores that are on their way end by themselves."""
        self._renewals.forget()

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
        self._settle(in_flight.path, in_flight.chunks, in_flight.whole, is_stored=in_flight.failure is None)
        if in_flight.failure is None:
            for origin in in_flight.origins.values():
                self._recorder.state_stored(origin)
            self._recorder.stored_bytes(in_flight.num_bytes * self._layout.world_size)
        self._pins.free(in_flight.blocks)

    def close(self) -> None:
        """Gives back what is still pinned in the engine's pool, and leaves the tiers' order of use as it is to be."""
        self._renewals.finish()
        for in_flight in self._stores.values():
            self._pins.free(in_flight.blocks)
        self._stores.clear()
