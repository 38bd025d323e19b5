"""Stored prefixes found at once leave tiers, eviction orders and moves as if each chunk had been looked up."""

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


FIND_STORED_PREFIX = find_stored_prefix


class StoreBench:
    """Stores of requests over a primary tier and perhaps a secondary one. Stores and moves end only when a test says
    so.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], primary_chunks: int, secondary_chunks: int, *, looks_at_each: bool
    ) -> None:
        made = make_layout(groups)
        layers = tuple((LayerLayout(f"layer{index}", GRANULE_BYTES),) for index in range(len(groups)))
        self.layout = dataclasses.replace(made.layout, layers=layers)
        self._keys, self._looks_at_each = made.keys, looks_at_each
        self.primary = RamIndex(primary_chunks * 2 * GRANULE_BYTES, GRANULE_BYTES)
        self.secondary = RamIndex(max(1, secondary_chunks) * 2 * GRANULE_BYTES, GRANULE_BYTES)
        slower = [SecondaryTier("disk", self.secondary)] if secondary_chunks else []
        self.stack = TierStack(self.primary, slower, 1, lambda: 0.0)
        self.recorder = ConnectorMetrics()
        self.planner = StorePlanner(self.layout, self.stack, Adapters(made.keys, 0), self.recorder)
        self.planner.bind_block_pool(cast(Any, Pool()))
        self.tracked: dict[int, TrackedRequest] = {}
        self.stored: list[Store] = []
        self.moves: list[TierMove] = []
        self.outputs: list[object] = []

    def begin(self, number: int, prompt: int, num_chunks: int) -> None:
        """Start a request that resumes after `num_chunks` chunks; its table has only the last window."""
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
        """Run one step."""
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
        prefix = no_prefix if self._looks_at_each else find_stored_prefix
        with mock.patch.object(store_planner, "find_stored_prefix", prefix):
            store = self.planner.plan(tracked, end - computed, states, lambda _: tables)
        request.num_computed_tokens = end
        self.outputs.append(store)
        if store is not None:
            self.stored.append(store)

    def end_store(self) -> None:
        if self.stored:
            self.planner.on_ended({self.stored.pop(0).store_id: StoreOutcome(1)})

    def end_move(self) -> None:
        self.moves += self.stack.take_moves()
        if self.moves:
            move = self.moves.pop(0)
            self.outputs.append(move)
            self.stack.on_move(move.move_id, MoveOutcome(1))

    def finish(self, number: int) -> None:
        if tracked := self.tracked.pop(number, None):
            self.planner.on_request_finished(tracked)

    def state(self) -> object:
        """Observable state: eviction orders, prefixes, stores, moves and queues."""
        paths = [(number, each.chain.keys) for number, each in self.tracked.items()]
        orders = [index.eviction_order() for index in (self.primary, self.secondary)]
        waiting = {name: self.stack.num_waiting(name) for name in self.stack.secondary}
        return orders, paths, self.outputs, self.moves, waiting


def shortened(*arguments: Any) -> StoredPrefix:
    """Stored prefix without its last part."""
    prefix = FIND_STORED_PREFIX(*arguments)
    return prefix._replace(parts=prefix.parts[:-1], keys=prefix.keys[:-1])


def no_prefix(spec: object, stack: object, keys: object, first_token: int, *rest: object) -> StoredPrefix:
    return StoredPrefix(first_token, [], [], {}, frozenset())


def steps() -> st.SearchStrategy[list[tuple[str, int, int, int]]]:
    """Events with a request, its prompt, and a size."""
    verbs = ["begin"] * 2 + ["compute"] * 4 + ["end_store"] * 3 + ["end_move"] * 3 + ["finish"]
    step = st.tuples(st.sampled_from(verbs), st.integers(0, 2), st.integers(0, 2), st.integers(0, MOST_CHUNKS))
    return st.lists(step, min_size=10, max_size=60)


@given(st.sampled_from(MIXES), st.integers(3, 40), st.sampled_from([0, 0, 6, 60]), steps())
def test_a_prefix_found_at_once_equals_lookups_of_each_chunk(
    groups: list[GroupSpec], primary_chunks: int, secondary_chunks: int, happened: list[tuple[str, int, int, int]]
) -> None:
    benches = [StoreBench(groups, primary_chunks, secondary_chunks, looks_at_each=each) for each in (False, True)]
    for verb, number, prompt, size in happened:
        for bench in benches:
            match verb:
                case "begin" if number not in bench.tracked:
                    bench.begin(number, prompt, size)
                case "compute" if number in bench.tracked:
                    bench.compute(number, 1 + size * 5)
                case "end_store":
                    bench.end_store()
                case "end_move":
                    bench.end_move()
                case "finish":
                    bench.finish(number)
        assert benches[0].state() == benches[1].state()
    counts = [stats.data["counters"] if (stats := bench.recorder.take()) else [] for bench in benches]
    assert sorted(counts[0]) == sorted(counts[1])


def test_the_comparison_detects_a_missing_part() -> None:
    benches = [StoreBench([FULL], 40, 0, looks_at_each=each) for each in (False, True)]
    with mock.patch(f"{__name__}.find_stored_prefix", shortened):
        for bench in benches:
            bench.begin(0, 0, 0)
            bench.compute(0, 8 * CHUNK)
            bench.end_store()
            bench.begin(1, 0, 8)
            bench.compute(1, 1)
    assert benches[0].state() != benches[1].state()


def test_a_resumed_request_looks_up_each_group_once_and_touches_the_prefix() -> None:
    bench = StoreBench([FULL, WINDOW], 40, 0, looks_at_each=False)
    bench.begin(0, 0, 0)
    bench.compute(0, 8 * CHUNK)
    bench.end_store()
    bench.finish(0)
    bench.begin(1, 0, 8)
    with mock.patch.object(bench.primary, "lookup", side_effect=AssertionError("a single chunk was looked up")):
        bench.compute(1, 1)
    assert bench.outputs[-1] is None
    spec, keys = bench.layout.spec, bench.tracked[1].keys()
    path = [keys.key(group, end) for end in range(CHUNK, 8 * CHUNK + 1, CHUNK) for group in (0, 1)]
    assert bench.primary.eviction_order() == path[::-1]
    assert bench.tracked[1].chain.keys.keys() == {(0, end) for end in range(CHUNK, 8 * CHUNK + 1, CHUNK)} | {
        (1, 8 * CHUNK)
    }
    assert spec.stored_groups == (0, 1)


@given(st.sampled_from(MIXES), st.data())
def test_a_stored_prefix_ends_before_the_first_missing_storable_chunk(
    groups: list[GroupSpec], data: st.DataObject
) -> None:
    bench = StoreBench(groups, 100, 0, looks_at_each=False)
    resumed = data.draw(st.integers(0, MOST_CHUNKS))
    bench.begin(0, 0, resumed)
    spec, keys = bench.layout.spec, bench.tracked[0].keys()
    answers = st.sampled_from([LookupResult.HIT] * 8 + [LookupResult.PENDING, LookupResult.MISS])
    ends = range(CHUNK, MOST_CHUNKS * CHUNK + 1, CHUNK)
    outputs = {(index, end): data.draw(answers) for index in spec.stored_groups for end in ends}
    for part, answer in outputs.items():
        hold(bench.primary, keys.key(*part), answer)
    tables = []
    for group in groups:
        first = read_blocks(group, resumed * CHUNK).start
        tables.append([0] * first + list(range(1 + first, 1 + MOST_CHUNKS * CHUNK // group.block_tokens)))
    first, last = (data.draw(st.integers(0, MOST_CHUNKS)) * CHUNK for _ in range(2))
    prefix = find_stored_prefix(spec, bench.stack, keys, first, last, tables)
    storable = {
        (index, end)
        for index in spec.stored_groups
        if groups[index].kind is not GroupKind.RECURRENT
        for end in storable_ends(spec, index, first, last, tables)
    }
    lacked = [end for part in storable if outputs[part] is LookupResult.MISS for end in part[1:]]
    expected = {part for part in storable if part[1] < min(lacked, default=last + 1)}
    assert set(prefix.parts) == expected and len(prefix.parts) == len(expected)
    assert prefix.keys == [keys.key(*part) for part in prefix.parts]
    assert prefix.stop_tokens >= first and not [end for end in lacked if end <= prefix.stop_tokens]
    assert {part for part in storable if part[1] <= prefix.stop_tokens} == expected
    behind = {part for part in storable if part[1] > prefix.stop_tokens}
    present = {part[0] for part in behind if outputs[part] is not LookupResult.MISS}
    assert prefix.absent_groups == {part[0] for part in behind} - present
    assert prefix.later_keys == {part: keys.key(*part) for part in behind if part[0] in present}
