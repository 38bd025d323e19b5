"""What a request meets as a whole: the tiers, their orders and what moves are as if each chunk had been looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from test_lookups import BLOCK, DRAFTER, FULL, STATE, chain, hold, make_layout
from test_store_bursts import Pool

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.messages import Store, StoreOutcome
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.stores import store_planner
from hybridkv.connectors.vllm.offload.stores.prefix_chain import StoredPrefix, find_stored_prefix
from hybridkv.connectors.vllm.offload.stores.store_planner import StorePlanner
from hybridkv.planner import GroupKind, GroupSpec, LookupResult, State, read_blocks, storable_ends
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import MoveOutcome, SecondaryTier, TierMove, TierStack

GRANULE_BYTES = 16
CHUNK = 2 * BLOCK
MOST_CHUNKS = 12
WINDOW = GroupSpec(GroupKind.WINDOW, BLOCK, window_tokens=3 * BLOCK)
MIXES = ([FULL], [FULL, WINDOW], [WINDOW, FULL], [FULL, STATE], [FULL, DRAFTER], [FULL, WINDOW, STATE])
PROMPTS = [chain(2 * MOST_CHUNKS + 2, prompt) for prompt in (b"a", b"b")]
PROMPTS.append([*PROMPTS[0][:9], *chain(2 * MOST_CHUNKS + 2, b"c")[9:]])


MEETS = find_stored_prefix


class World:
    """Stores of requests over a fast tier and perhaps a slower one, whose copies end when they are told to."""

    def __init__(self, groups: Sequence[GroupSpec], near_chunks: int, far_chunks: int, *, looks_at_each: bool) -> None:
        made = make_layout(groups)
        layers = tuple((LayerLayout(f"layer{index}", GRANULE_BYTES),) for index in range(len(groups)))
        self.layout = dataclasses.replace(made.layout, layers=layers)
        self._keys, self._looks_at_each = made.keys, looks_at_each
        self.primary = RamIndex(near_chunks * 2 * GRANULE_BYTES, GRANULE_BYTES)
        self.far = RamIndex(max(1, far_chunks) * 2 * GRANULE_BYTES, GRANULE_BYTES)
        slower = [SecondaryTier("disk", self.far)] if far_chunks else []
        self.stack = TierStack(self.primary, slower, 1, lambda: 0.0)
        self.recorder = ConnectorMetrics()
        self.planner = StorePlanner(self.layout, self.stack, Adapters(made.keys, 0), self.recorder)
        self.planner.bind_block_pool(cast(Any, Pool()))
        self.tracked: dict[int, TrackedRequest] = {}
        self.stored: list[Store] = []
        self.moves: list[TierMove] = []
        self.said: list[object] = []

    def begin(self, number: int, prompt: int, num_chunks: int) -> None:
        """A request that resumes behind so many chunks, of whose windows only the last one is in its table."""
        hashes, end = PROMPTS[prompt], num_chunks * CHUNK
        request = SimpleNamespace(
            request_id=str(number),
            num_tokens=MOST_CHUNKS * CHUNK + 1,
            num_prompt_tokens=MOST_CHUNKS * CHUNK + 1,
            num_computed_tokens=end,
            block_hashes=hashes,
        )
        self.tracked[number] = TrackedRequest(cast(Any, request), None, RequestKeys(self.layout.spec, self._keys))

    def compute(self, number: int, num_tokens: int) -> None:
        """One step."""
        tracked = self.tracked[number]
        request = cast(Any, tracked.request)
        computed, groups = request.num_computed_tokens, self.layout.spec.groups
        end = min(computed + num_tokens, MOST_CHUNKS * CHUNK + 1)
        tables = []
        for group in groups:
            first = read_blocks(group, computed).start
            tables.append([0] * first + list(range(1 + first, 1 - (-end // group.block_tokens))))
        states = [
            State(index, 7, end // CHUNK * CHUNK)
            for index, group in enumerate(groups)
            if group.kind is GroupKind.RECURRENT and end // CHUNK > computed // CHUNK
        ]
        met = nothing_met if self._looks_at_each else find_stored_prefix
        with mock.patch.object(store_planner, "find_stored_prefix", met):
            store = self.planner.plan(tracked, end - computed, states, lambda _: tables)
        request.num_computed_tokens = end
        self.said.append(store)
        if store is not None:
            self.stored.append(store)

    def end_store(self) -> None:
        if self.stored:
            self.planner.on_ended({self.stored.pop(0).store_id: StoreOutcome(1)})

    def end_move(self) -> None:
        self.moves += self.stack.take_moves()
        if self.moves:
            move = self.moves.pop(0)
            self.said.append(move)
            self.stack.on_move(move.move_id, MoveOutcome(1))

    def finish(self, number: int) -> None:
        if tracked := self.tracked.pop(number, None):
            self.planner.on_request_finished(tracked)

    def seen(self) -> object:
        """All that anybody could see of it."""
        paths = [(number, each.path.keys) for number, each in self.tracked.items()]
        orders = [index.eviction_order() for index in (self.primary, self.far)]
        waiting = {name: self.stack.num_waiting(name) for name in self.stack.secondary}
        return orders, paths, self.said, self.moves, waiting


def shorter(*arguments: Any) -> StoredPrefix:
    """What was met, but for its end."""
    met = MEETS(*arguments)
    return met._replace(parts=met.parts[:-1], keys=met.keys[:-1])


def nothing_met(spec: object, stack: object, keys: object, first_token: int, *rest: object) -> StoredPrefix:
    return StoredPrefix(first_token, [], [], {}, frozenset())


def steps() -> st.SearchStrategy[list[tuple[str, int, int, int]]]:
    """What happens, with which request, of which prompt, and how much."""
    verbs = ["begin"] * 2 + ["compute"] * 4 + ["end_store"] * 3 + ["end_move"] * 3 + ["finish"]
    step = st.tuples(st.sampled_from(verbs), st.integers(0, 2), st.integers(0, 2), st.integers(0, MOST_CHUNKS))
    return st.lists(step, min_size=10, max_size=60)


@given(st.sampled_from(MIXES), st.integers(3, 40), st.sampled_from([0, 0, 6, 60]), steps())
def test_what_is_met_as_a_whole_leaves_what_looking_at_each_chunk_leaves(
    groups: list[GroupSpec], near_chunks: int, far_chunks: int, happened: list[tuple[str, int, int, int]]
) -> None:
    worlds = [World(groups, near_chunks, far_chunks, looks_at_each=each) for each in (False, True)]
    for verb, number, prompt, size in happened:
        for world in worlds:
            match verb:
                case "begin" if number not in world.tracked:
                    world.begin(number, prompt, size)
                case "compute" if number in world.tracked:
                    world.compute(number, 1 + size * 5)
                case "end_store":
                    world.end_store()
                case "end_move":
                    world.end_move()
                case "finish":
                    world.finish(number)
        assert worlds[0].seen() == worlds[1].seen()
    counts = [stats.data["counters"] if (stats := world.recorder.take()) else [] for world in worlds]
    assert sorted(counts[0]) == sorted(counts[1])


def test_the_comparison_sees_what_is_left_out() -> None:
    worlds = [World([FULL], 40, 0, looks_at_each=each) for each in (False, True)]
    with mock.patch(f"{__name__}.find_stored_prefix", shorter):
        for world in worlds:
            world.begin(0, 0, 0)
            world.compute(0, 8 * CHUNK)
            world.end_store()
            world.begin(1, 0, 8)
            world.compute(1, 1)
    assert worlds[0].seen() != worlds[1].seen()


def test_a_request_that_resumes_asks_once_for_each_group_and_touches_what_it_met() -> None:
    world = World([FULL, WINDOW], 40, 0, looks_at_each=False)
    world.begin(0, 0, 0)
    world.compute(0, 8 * CHUNK)
    world.end_store()
    world.finish(0)
    world.begin(1, 0, 8)
    with mock.patch.object(world.primary, "lookup", side_effect=AssertionError("a chunk was looked at by itself")):
        world.compute(1, 1)
    assert world.said[-1] is None
    spec, keys = world.layout.spec, world.tracked[1].keys()
    path = [keys.key(group, end) for end in range(CHUNK, 8 * CHUNK + 1, CHUNK) for group in (0, 1)]
    assert world.primary.eviction_order() == path[::-1]
    assert world.tracked[1].path.keys.keys() == {(0, end) for end in range(CHUNK, 8 * CHUNK + 1, CHUNK)} | {
        (1, 8 * CHUNK)
    }
    assert spec.stored_groups == (0, 1)


@given(st.sampled_from(MIXES), st.data())
def test_what_is_met_ends_before_the_first_chunk_that_a_group_could_store_and_lacks(
    groups: list[GroupSpec], data: st.DataObject
) -> None:
    world = World(groups, 100, 0, looks_at_each=False)
    resumed = data.draw(st.integers(0, MOST_CHUNKS))
    world.begin(0, 0, resumed)
    spec, keys = world.layout.spec, world.tracked[0].keys()
    answers = st.sampled_from([LookupResult.HIT] * 8 + [LookupResult.PENDING, LookupResult.MISS])
    ends = range(CHUNK, MOST_CHUNKS * CHUNK + 1, CHUNK)
    said = {(index, end): data.draw(answers) for index in spec.stored_groups for end in ends}
    for part, answer in said.items():
        hold(world.primary, keys.key(*part), answer)
    tables = []
    for group in groups:
        first = read_blocks(group, resumed * CHUNK).start
        tables.append([0] * first + list(range(1 + first, 1 + MOST_CHUNKS * CHUNK // group.block_tokens)))
    first, last = (data.draw(st.integers(0, MOST_CHUNKS)) * CHUNK for _ in range(2))
    met = find_stored_prefix(spec, world.stack, keys, first, last, tables)
    storable = {
        (index, end)
        for index in spec.stored_groups
        if groups[index].kind is not GroupKind.RECURRENT
        for end in storable_ends(spec, index, first, last, tables)
    }
    lacked = [end for part in storable if said[part] is LookupResult.MISS for end in part[1:]]
    expected = {part for part in storable if part[1] < min(lacked, default=last + 1)}
    assert set(met.parts) == expected and len(met.parts) == len(expected)
    assert met.keys == [keys.key(*part) for part in met.parts]
    assert met.stop_tokens >= first and not [end for end in lacked if end <= met.stop_tokens]
    assert {part for part in storable if part[1] <= met.stop_tokens} == expected
    behind = {part for part in storable if part[1] > met.stop_tokens}
    present = {part[0] for part in behind if said[part] is not LookupResult.MISS}
    assert met.absent_groups == {part[0] for part in behind} - present
    assert met.later_keys == {part: keys.key(*part) for part in behind if part[0] in present}
