"""Async lookups of a request: which keys are looked up, and whether the request waits."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_lookups import BLOCK, FULL, HASHES, STATE, make_layout

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines, LoadPlanner
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.connectors.vllm.offload.loads.lookup_costs import _bytes_of_hit
from hybridkv.planner import GroupKind, GroupSpec, LoadAdmission, LookupResult, needed_parts
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import SecondaryTier, SecondaryTierOptions, TierStack
from kits.tiers.reference import RemoteIndex, RemoteStore, remote

CHUNKS, CHUNK_TOKENS = 20, 8
GROUPS = 2


class Bench:
    """Host memory over a remote store that has not answered yet."""

    def __init__(self, lookup_wait_s: float = 0.001, tail_tokens: int | None = None, **deadlines: float) -> None:
        self.layout = make_layout([FULL, STATE], tail_tokens)
        self.now_s = 0.0
        self.world = RemoteStore(1, lambda: self.now_s, answer_s=0.01)
        self.peer = RemoteIndex(self.world, 1 << 22)
        options = SecondaryTierOptions(async_lookup_timeout_s=lookup_wait_s)
        peer = SecondaryTier("peer", self.peer, options)
        self.stack = TierStack(RamIndex(1 << 22, 4096), [peer], 1, lambda: self.now_s)
        waits = Deadlines(10.0, 30.0, lambda: self.now_s, **deadlines)
        admission = LoadAdmission(self.layout.spec, 64)
        layout, metrics = self.layout.layout, ConnectorMetrics()
        in_flight = LoadsInFlight(layout, self.stack, admission, metrics)
        self.planner = LoadPlanner(layout, self.stack, admission, waits, metrics, in_flight)

    def start_lookups(self, computed_tokens: int = 0, more_tokens: int = 1) -> bool:
        """Start the lookups of a request with `CHUNKS` chunks and some more tokens. Whether the request waits."""
        hashes = HASHES[: CHUNKS * 2 + more_tokens // 4]
        num_tokens = CHUNKS * CHUNK_TOKENS + more_tokens
        request = SimpleNamespace(request_id="a", num_tokens=num_tokens, block_hashes=hashes)
        tracked = TrackedRequest(cast(Any, request), None, RequestKeys(self.layout.spec, self.layout.keys))
        return self.planner.matched_tokens(tracked, computed_tokens) is None

    def measure_answers(self) -> None:
        """Let lookups of other keys be answered, so that the answer time is known."""
        self.peer.start_lookup([b"another key"], 1e9)
        self.now_s += 0.01
        assert self.peer.lookup(b"another key") is LookupResult.MISS and self.peer.answer_s == 0.01

    def pending_parts(self) -> list[tuple[int, int]]:
        """(group, chunk) of all pending lookups."""
        hashes = HASHES[: CHUNKS * 2]
        parts = [(group, chunk) for group in range(GROUPS) for chunk in range(CHUNKS)]
        key = self.layout.keys.key
        return [
            (group, chunk)
            for group, chunk in parts
            if self.stack.lookup(key(group, hashes, (chunk + 1) * CHUNK_TOKENS)) is LookupResult.PENDING
        ]


@pytest.mark.parametrize("first", [0, 3])
def test_limited_lookups_cover_the_same_beginning_of_all_groups(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_ASKED", 10)
    bench = Bench()
    assert bench.start_lookups(first * CHUNK_TOKENS)
    assert bench.pending_parts() == [(group, chunk) for group in range(GROUPS) for chunk in range(first, first + 5)]


def test_every_chunk_of_every_group_is_looked_up() -> None:
    bench = Bench()
    assert bench.start_lookups()
    assert bench.pending_parts() == [(group, chunk) for group in range(GROUPS) for chunk in range(CHUNKS)]


@pytest.mark.parametrize(("tokens_per_s", "waits"), [(15_000.0, True), (100_000.0, False)])
def test_a_request_waits_only_if_lookups_are_faster_than_compute(tokens_per_s: float, waits: bool) -> None:
    """An answer is known to take 0.01 s; 160 tokens take 0.011 s, or 0.0016."""
    bench = Bench(1.0, tokens_per_s=tokens_per_s)
    bench.measure_answers()
    assert bench.start_lookups() is waits and bench.pending_parts(), "lookups are sent in any case"


@pytest.mark.parametrize(("more_tokens", "is_asked"), [(4, False), (6, True)])
@pytest.mark.parametrize("computed_tokens", [0, CHUNKS * CHUNK_TOKENS])
def test_a_request_looks_up_the_tails_after_the_last_chunk_of_every_group(
    more_tokens: int, is_asked: bool, computed_tokens: int
) -> None:
    """The last tail must end before the last token of the request."""
    bench = Bench(tail_tokens=4, tokens_per_s=1.0)
    bench.start_lookups(computed_tokens, more_tokens)
    end = CHUNKS * CHUNK_TOKENS + 4
    keys = [bench.layout.keys.key(group, HASHES, end) for group in range(GROUPS)]
    answers = [bench.stack.lookup(key) for key in keys]
    assert answers == [LookupResult.PENDING if is_asked else LookupResult.MISS] * GROUPS
    assert len(bench.pending_parts()) == (0 if computed_tokens else GROUPS * CHUNKS)


WINDOW = GroupSpec(GroupKind.WINDOW, BLOCK, window_tokens=30)


@pytest.mark.parametrize(
    "groups", [[FULL], [FULL, STATE], [STATE, STATE, FULL], [FULL, WINDOW], [WINDOW, FULL, STATE], [FULL, FULL]]
)
def test_the_expected_bytes_of_a_hit_equal_the_loaded_bytes(groups: list[GroupSpec]) -> None:
    """These bytes decide whether a wait for a lookup is worthwhile. The groups have layers of different sizes."""
    made = make_layout(groups)
    layers = tuple(
        tuple(LayerLayout(f"layer{group}.{number}", 16 * (group + 2)) for number in range(group + 1))
        for group in range(len(groups))
    )
    layout = dataclasses.replace(made.layout, layers=layers)
    spec = layout.spec
    per_token, fixed = _bytes_of_hit(layout)
    for num_chunks in (10, 100):
        num_tokens = num_chunks * spec.chunk_tokens
        loaded = sum(layout.chunk_bytes(group, end) for group, end in needed_parts(spec, num_tokens, 0))
        assert loaded == per_token * num_tokens + fixed > 0
    resumed = sum(layout.chunk_bytes(group, end) for group, end in needed_parts(spec, num_tokens, num_tokens // 2))
    assert resumed == per_token * num_tokens / 2 + fixed, "windows and states are loaded again, attention is not"
