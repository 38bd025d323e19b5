"""Stores of an engine can be resumed from both tiers, in bursts or one by one.

The store planner is the connector's, over real tiers; only the engine and its copies are fakes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import pytest
from test_lookups import FULL, STATE, chain, make_layout

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.messages import StoreOutcome
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.stores.store_planner import StorePlanner
from hybridkv.planner import Hit, LookupResult, State, longest_hit
from hybridkv.tiers import Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import MoveOutcome, SecondaryTier, SecondaryTierOptions, TierMover, TierStack
from kits.tiers.copying import CopyingMedium
from kits.tiers.inline_janitor import InlineJanitor

KIB, MIB = 1 << 10, 1 << 20
GRANULE_BYTES = 4096
CHUNK_TOKENS = 8
NEVER_S = 1e6
PAUSE_S = 1e-4
"""Between two steps. A busy loop would keep the writing threads waiting for the interpreter."""
OPTIONS = DiskOptions(capacity_bytes=64 * MIB, fsync=Fsync.NONE, max_in_flight=2)
NUM_FITTING = 288
"""Chunks, with a state each, that the disk has room for."""
PAIR_BYTES = (2 * 64 + 40) * KIB
"""Bytes of a chunk with its state in host memory."""
TURNS = [pytest.param(4, 3, marks=pytest.mark.full), pytest.param(4, 24, marks=pytest.mark.full), (2, 6)]
"""Prompts, and turns in which each of them grows."""


class Pool:
    """Block pool that counts no references."""

    blocks = tuple(SimpleNamespace(ref_cnt=2) for _ in range(4096))

    def touch(self, blocks: object) -> None: ...

    def free_blocks(self, blocks: object) -> None: ...


class Engine:
    """Requests that store every chunk, with a state each, through both tiers."""

    def __init__(self, path: Path, primary_bytes: int, tail_tokens: int | None = None) -> None:
        made = make_layout([FULL, STATE], tail_tokens)
        layers = tuple((LayerLayout(f"layer{index}", size),) for index, size in enumerate((64 * KIB, 40 * KIB)))
        layout = dataclasses.replace(made.layout, layers=layers)
        self.spec, self._keys = made.spec, made.keys
        self.secondary = DiskIndex(str(path), layout.fingerprint({"model": "m"}), OPTIONS, InlineJanitor())
        self.primary = RamIndex(primary_bytes, GRANULE_BYTES)
        self._arena = RamArena(primary_bytes, GRANULE_BYTES)
        self._copies = CopyingMedium(self._arena)
        self.stack = TierStack(
            self.primary,
            [SecondaryTier("disk", self.secondary, SecondaryTierOptions(load_timeout_s=NEVER_S))],
            1,
            lambda: 0.0,
        )
        self._mover = TierMover(
            self._arena, {"disk": DiskMedium(str(path), self.secondary.namespace, 0, OPTIONS)}, lambda: 0.0
        )
        later_ns = time.time_ns()
        adapters = Adapters(made.keys, later_ns, lambda: later_ns)
        self.planner = StorePlanner(layout, self.stack, adapters, ConnectorMetrics())
        self.planner.bind_block_pool(cast(Any, Pool()))
        self._pool = bytes(range(256)) * 1024
        self._tickets = itertools.count(1)
        self.states: dict[str, TrackedRequest] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mover.close(30.0)
        self.stack.close()
        self._arena.close()

    def compute(self, name: str, num_chunks: int, *, has_states: bool = True) -> None:
        """Compute `num_chunks` more chunks of a request in one step. Its store ends at once."""
        tracked = self.states.get(name) or self._begin(name)
        request = cast(Any, tracked.request)
        first = request.num_computed_tokens // CHUNK_TOKENS
        ends = range((first + 1) * CHUNK_TOKENS, (first + num_chunks) * CHUNK_TOKENS + 1, CHUNK_TOKENS)
        blocks = list(range(1, 2 * (first + num_chunks) + 1))
        states = [State(1, end // CHUNK_TOKENS, end) for end in ends if has_states]
        self._store(tracked, ends[-1] - request.num_computed_tokens, states, blocks)

    def compute_tail(self, name: str, num_tokens: int) -> None:
        """Compute `num_tokens` more tokens of a request, with a state at their end, inside a chunk."""
        tracked = self.states[name]
        end = cast(Any, tracked.request).num_computed_tokens + num_tokens
        self._store(tracked, num_tokens, [State(1, 1, end)], list(range(1, 2 + end // 4)))

    def _store(self, tracked: TrackedRequest, num_tokens: int, states: list[State], blocks: list[int]) -> None:
        store = self.planner.plan(tracked, num_tokens, states, lambda _: (blocks, []))
        cast(Any, tracked.request).num_computed_tokens += num_tokens
        if store is None:
            return
        for copy in store.copies:
            start = next(self._tickets) % 256
            data = memoryview(self._pool)[start : start + copy.slot.num_bytes]
            self._copies.store(Ticket(start), copy.key, copy.slot, [data])
            assert self._copies.poll()[0].failure is None
        self.planner.on_ended({store.store_id: StoreOutcome(1)})

    def _begin(self, name: str) -> TrackedRequest:
        """Start a request. A name is a conversation, optionally with its turn after a `#`."""
        hashes = chain(2 * 1024, name.partition("#")[0].encode())
        request = SimpleNamespace(
            request_id=name,
            num_tokens=1024 * CHUNK_TOKENS,
            num_prompt_tokens=1024 * CHUNK_TOKENS,
            num_computed_tokens=0,
            block_hashes=hashes,
        )
        self.states[name] = TrackedRequest(cast(Any, request), None, RequestKeys(self.spec, self._keys))
        return self.states[name]

    def settle(self) -> None:
        """Run engine steps until no move is in flight."""
        while self.stack.has_live_moves():
            self.stack.tick()
            self._mover.start(self.stack.take_moves())
            for move, failure, _ in self._mover.poll():
                self.stack.on_move(move.move_id, MoveOutcome(1, failure))
            time.sleep(PAUSE_S)

    def end(self, name: str) -> None:
        self.planner.on_request_finished(self.states[name])

    def num_computed(self, name: str) -> int:
        return int(self.states[name].request.num_computed_tokens)

    def resumable(self, name: str, index: RamIndex | DiskIndex) -> int:
        """Tokens of a request that could be resumed from one tier alone."""
        keys = self.states[name].keys()

        def lookup(group_index: int, end_token: int) -> LookupResult:
            return index.lookup(keys.key(group_index, end_token))

        answer = longest_hit(self.spec, self.num_computed(name) + 1, 0, lookup)
        return answer.num_tokens if isinstance(answer, Hit) else 0

    def share(self, num_offered_chunks: int) -> float:
        """Share of the offered and fitting tokens that can be resumed from disk."""
        resumable = sum(self.resumable(name, self.secondary) for name in self.states)
        return resumable / (min(num_offered_chunks, NUM_FITTING) * CHUNK_TOKENS)


@pytest.mark.parametrize("is_paced", [False, True], ids=["burst", "paced"])
@pytest.mark.parametrize(
    ("num_requests", "num_steps", "over"),
    [
        pytest.param(6, 1, 1, marks=pytest.mark.full),
        (1, 6, 2),
        pytest.param(6, 1, 2, marks=pytest.mark.full),
        (3, 6, 1),
    ],
)
def test_requests_that_fit_the_disk_are_resumable(
    tmp_path: Path, num_requests: int, num_steps: int, over: int, is_paced: bool
) -> None:
    with Engine(tmp_path / "store", 256 * MIB) as engine:
        chunks = over * NUM_FITTING // num_requests // num_steps
        for number in range(num_requests):
            for _ in range(num_steps):
                engine.compute(str(number), chunks)
                if is_paced:
                    engine.settle()
            engine.end(str(number))
        engine.settle()
        assert engine.share(over * NUM_FITTING) >= 0.98, engine.stack.take_counts().moves.cascades


@pytest.mark.parametrize("is_paced", [False, True], ids=["burst", "paced"])
def test_host_memory_evicts_ends_and_keeps_beginnings(tmp_path: Path, is_paced: bool) -> None:
    with Engine(tmp_path / "store", 32 * MIB) as engine:
        for _ in range(8):
            engine.compute("first", 20)
            if is_paced:
                engine.settle()
        engine.end("first")
        engine.settle()
        assert engine.resumable("first", engine.primary) == engine.num_computed("first")
        engine.compute("second", 100)
        assert engine.resumable("second", engine.primary) == 100 * CHUNK_TOKENS
        assert engine.resumable("first", engine.primary) >= 80 * CHUNK_TOKENS


@pytest.mark.parametrize(
    ("is_anew", "is_paced"),
    [
        pytest.param(False, False, marks=pytest.mark.full, id="one request, burst"),
        pytest.param(False, True, id="one request, paced"),
        pytest.param(True, False, id="a request a turn, burst"),
        pytest.param(True, True, marks=pytest.mark.full, id="a request a turn, paced"),
    ],
)
@pytest.mark.parametrize(("num_prompts", "num_turns"), TURNS)
def test_conversations_that_grow_in_turns_fill_the_disk_with_resumable_chunks(
    tmp_path: Path, num_prompts: int, num_turns: int, is_anew: bool, is_paced: bool
) -> None:
    """Four times what fits. A conversation is one request that goes on, or each turn repeats the whole conversation."""
    with Engine(tmp_path / "store", 256 * MIB) as engine:
        chunks = 4 * NUM_FITTING // num_prompts // num_turns
        last = []
        for turn, number in itertools.product(range(num_turns), range(num_prompts)):
            name = f"{number}#{turn}" if is_anew else str(number)
            engine.compute(name, (turn + 1) * chunks if is_anew else chunks)
            if is_anew or turn == num_turns - 1:
                engine.end(name)
                last = [*last[1 - num_prompts :], name]
            if is_paced:
                engine.settle()
        engine.settle()
        resumable = sum(engine.resumable(name, engine.secondary) for name in last)
        assert resumable / (NUM_FITTING * CHUNK_TOKENS) >= 0.98, engine.stack.take_counts().moves.cascades


def test_the_last_stored_chunk_is_evicted_first(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 4 * MIB) as engine:
        engine.compute("first", 20)
        engine.compute("first", 1)
        engine.settle()
        # Just enough that one chunk of the first has to be evicted.
        engine.compute("second", 4 * MIB // PAIR_BYTES - 20)
        assert engine.resumable("first", engine.primary) == 20 * CHUNK_TOKENS


@pytest.mark.parametrize("is_in_host_memory", [True, False])
def test_a_finished_request_cascades_its_missing_chunks_again(tmp_path: Path, is_in_host_memory: bool) -> None:
    """Up to the first chunk that host memory lacks too."""
    with Engine(tmp_path / "store", 32 * MIB) as engine:
        engine.compute("r", 10)
        engine.settle()
        keys = engine.states["r"].keys()
        for number in (3, 4, 8):
            engine.secondary.invalidate(keys.key(0, CHUNK_TOKENS * number))
        if not is_in_host_memory:
            engine.primary.invalidate(keys.key(0, CHUNK_TOKENS * 4))
        assert engine.resumable("r", engine.secondary) == 2 * CHUNK_TOKENS
        engine.stack.take_counts()
        engine.end("r")
        engine.settle()
        assert engine.resumable("r", engine.secondary) == (10 if is_in_host_memory else 3) * CHUNK_TOKENS
        assert engine.stack.take_counts().moves.cascades == {"done": 3 if is_in_host_memory else 1}


def test_a_missing_tail_blocks_no_later_chunk(tmp_path: Path) -> None:
    """A chunk after a tail does not need it, unlike a chunk after a chunk."""
    with Engine(tmp_path / "store", 32 * MIB, tail_tokens=4) as engine:
        engine.compute("r", 2)
        engine.compute_tail("r", 4)
        assert engine.resumable("r", engine.primary) == 2 * CHUNK_TOKENS + 4
        engine.compute("r", 3)
        engine.settle()
        keys = engine.states["r"].keys()
        assert engine.resumable("r", engine.secondary) == 5 * CHUNK_TOKENS
        for group in (0, 1):
            tail = keys.key(group, 2 * CHUNK_TOKENS + 4)
            engine.secondary.invalidate(tail)
            engine.primary.invalidate(tail)
        engine.secondary.invalidate(keys.key(0, 4 * CHUNK_TOKENS))
        engine.end("r")
        engine.settle()
        assert engine.resumable("r", engine.secondary) == 5 * CHUNK_TOKENS


def test_a_tail_cascades_between_the_chunks_around_it(
    tmp_path: Path,
) -> None:
    with Engine(tmp_path / "store", 32 * MIB, tail_tokens=4) as engine:
        engine.compute("r", 1)
        engine.compute_tail("r", 4)
        engine.compute("r", 1)
        chain = engine.states["r"].chain
        assert list(chain.keys) == [(0, 8), (1, 8), (0, 12), (1, 12), (0, 16), (1, 16)]
        moved = [move.key for move in engine.stack.take_moves()]
        assert moved == list(chain.keys.values())[: len(moved)] and moved


def test_a_prefix_only_on_disk_leaves_room_for_its_continuation(tmp_path: Path) -> None:
    """It is computed again, so that it is new for host memory."""
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        engine.compute("a", 20)
        engine.settle()
        for key in engine.states["a"].chain.keys.values():
            engine.primary.invalidate(key)
        engine.compute("b", NUM_FITTING - 20)
        engine.settle()
        engine.compute("a#1", 60)
        engine.settle()
        assert engine.resumable("a#1", engine.secondary) == 60 * CHUNK_TOKENS


def test_a_finished_request_does_not_overfill_the_disk(tmp_path: Path) -> None:
    with Engine(tmp_path / "store", 128 * MIB) as engine:
        engine.compute("r", NUM_FITTING + 60)
        engine.settle()
        counts = engine.stack.take_counts().moves.cascades
        assert sum(counts.values()) == 2 * (NUM_FITTING + 60) > counts["done"]
        engine.end("r")
        engine.settle()
        assert "done" not in engine.stack.take_counts().moves.cascades


def test_a_step_without_new_chunks_stores_nothing(tmp_path: Path) -> None:
    """As after a preemption: its progress is reset, and all its chunks are stored already."""
    with Engine(tmp_path / "cache", 4 * MIB) as engine:
        engine.compute("a", 2)
        tracked = engine.states["a"]
        tracked.planned_chunks = (0, 0)
        assert engine.planner.plan(tracked, 0, [], lambda _: (list(range(1, 5)), [])) is None
