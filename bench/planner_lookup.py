"""`longest_hit` and `plan_load` as in the connector, compared with vLLM's own offloading lookup, in one process.

vLLM's side runs the real `OffloadingConnectorScheduler` over the real `CPUOffloadingManager` (LRU), with its default of
one block in a chunk: `get_num_new_matched_tokens`, and `update_state_after_alloc` for the whole hit (`load`).

Our side runs `longest_hit` over the connector's `TierLookup`, with the keys of `ChunkKeys`, in a `TierStack` of one
`RamIndex`, with the connector's own choice of the chunk ("auto"); `plan_load` with a pin of every key (`load`); and,
for `connector first` and `again`, the connector's `OffloadScheduler.matched_tokens`, which contains the search.

- `first`: the first lookup of a request, with the derivation of its keys. `connector first` is `matched_tokens` of a
  new request; vLLM's `on_new_request` was called before, and is not measured.
- `again`: a second `matched_tokens`, for a waiting request, without a change in the tier. vLLM looks up again; the
  connector checks for changes and repeats its answer.
- `search again`: a second search, as after a change in the tier. It reuses only the request's keys. Its ratio uses the
  same lookup of vLLM as the ratio of `again`.
- `step`: the first lookup of a request if the engine holds all but its last 16 chunks; and, only for ours, `grow`: the
  keys of all groups for one more chunk. Our time must not depend on the number of earlier tokens.
- `clock`: an empty measurement. Every result includes this time.

The goal is for `first` and `again`.

Not measured on either side: token hashes and metrics. Requests are plain objects with the attributes that are read, and
block hashes are random bytes, which neither side interprets. Times are CPU time of the thread, medians of `--rounds`,
with alternating variants. Each side does one lookup before it is measured, so that no side pays for caches that the
other has filled.

    python bench/planner_lookup.py --json planner_lookup.json
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

from planner_upstream import Upstream, allocated_blocks

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.layout import AUTO_CHUNK_TOKENS, CacheLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys, TierLookup
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines
from hybridkv.connectors.vllm.offload.scheduler import Identity, OffloadScheduler
from hybridkv.hashing import ChunkKeys, GroupFingerprint, LayerFingerprint
from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    LoadAdmission,
    LookupResult,
    chunk_unit,
    longest_hit,
    plan_load,
)
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import TierStack

GRANULE_BYTES = 64
PAGE_BYTES = 32768
"""Page bytes of each group's block. No page exists: the size only gives the number of granules of a chunk."""
STEP_CHUNKS = 16
GOAL = 10
GOAL_TOKENS = 131072


def window(block: int, tokens: int) -> GroupSpec:
    return GroupSpec(GroupKind.WINDOW, block, window_tokens=tokens)


PRESETS = {
    "llama": (GroupSpec(GroupKind.FULL, 16),),
    "gptoss": (GroupSpec(GroupKind.FULL, 16), window(16, 128)),
    "gemma3": (GroupSpec(GroupKind.FULL, 16), *(window(16, 1024) for _ in range(5))),
    "qwen3next": (GroupSpec(GroupKind.FULL, 544), *(GroupSpec(GroupKind.RECURRENT, 544) for _ in range(3))),
    "dsv4": (GroupSpec(GroupKind.FULL, 256), window(64, 128), window(64, 128), window(4, 8), window(8, 128)),
}
HASH_TOKENS = {"llama": 16, "gptoss": 16, "gemma3": 16, "qwen3next": 544, "dsv4": 4}
SCENARIOS = ("miss", "full", "no_state")
"""Stored chunks: none; all; only those of the full group, without states and windows."""


def is_stored(scenario: str, group: GroupSpec) -> bool:
    return scenario == "full" or (scenario == "no_state" and group.kind is GroupKind.FULL)


def make_layout(preset: str) -> CacheLayout:
    """The result of `resolve_layout` for such a model, with invented layers."""
    groups = PRESETS[preset]
    unit = chunk_unit(groups)
    recurrent = any(group.kind is GroupKind.RECURRENT for group in groups)
    spec = CacheSpec(groups, unit if recurrent else -(-AUTO_CHUNK_TOKENS // unit) * unit)
    prints = tuple(
        GroupFingerprint(
            kind=group.kind,
            block_tokens=group.block_tokens,
            layers=(LayerFingerprint(name=f"layers.{i}", page_bytes=PAGE_BYTES),),
            window_tokens=group.window_tokens,
        )
        for i, group in enumerate(groups)
    )
    layers = tuple((LayerLayout(f"layers.{i}", PAGE_BYTES),) for i in range(len(groups)))
    return CacheLayout(spec, layers, prints, HASH_TOKENS[preset], "sha256", 1)


def open_scheduler(
    layout: CacheLayout, keys: ChunkKeys, stack: TierStack, metrics: ConnectorMetrics
) -> OffloadScheduler:
    """Creates the connector's scheduler half over these tiers."""
    deadlines = Deadlines(lookup_s=10.0, load_s=30.0, clock=time.monotonic)
    identity = Identity(keys, Adapters(keys, 0))
    return OffloadScheduler(layout, identity, stack, LoadAdmission(layout.spec, 2048), deadlines, metrics)


class Ours:
    """The connector's lookup over a tier with the chunks of one scenario."""

    def __init__(self, preset: str, num_tokens: int, hashes: list[bytes], scenario: str) -> None:
        self.layout = make_layout(preset)
        self.spec = self.layout.spec
        self.keys = ChunkKeys(self.layout.fingerprint({}), self.layout.hash_block_tokens)
        self.num_tokens, self.hashes = num_tokens, hashes
        self.num_chunks = num_tokens // self.spec.chunk_tokens
        self.step_start = (self.num_chunks - STEP_CHUNKS) * self.spec.chunk_tokens
        self.index = RamIndex((self.num_chunks * len(self.spec.groups) + 1) * GRANULE_BYTES, GRANULE_BYTES)
        for group_index, group in enumerate(self.spec.groups):
            for chunk in range(self.num_chunks) if is_stored(scenario, group) else ():
                key = self.keys.key(group_index, hashes, (chunk + 1) * self.spec.chunk_tokens)
                self.index.reserve(key, GRANULE_BYTES)
                self.index.commit(key)
        self.stack = TierStack(self.index, (), 1, time.monotonic)
        self.scheduler = open_scheduler(self.layout, self.keys, self.stack, ConnectorMetrics())
        self._ids = count()

    def new_request(self) -> Any:
        return SimpleNamespace(request_id=str(next(self._ids)), num_tokens=self.num_tokens, block_hashes=self.hashes)

    def match(self, request: Any) -> int:
        """The connector's answer to the engine."""
        return self.scheduler.matched_tokens(request, 0) or 0

    def end(self, request: Any) -> None:
        self.scheduler._requests.forget(request.request_id)

    def new_keys(self) -> RequestKeys:
        return RequestKeys(self.spec, self.keys)

    def first(self) -> tuple[RequestKeys, int]:
        keys = self.new_keys()
        return keys, self.search(keys)

    def search(self, keys: RequestKeys, computed_tokens: int = 0) -> int:
        ranges = TierLookup(keys.follow(self.hashes), self.stack)
        found = longest_hit(self.spec, self.num_tokens, computed_tokens, ranges, ranges)
        return found.num_tokens - computed_tokens if isinstance(found, Hit) else 0

    def grow(self, keys: RequestKeys) -> None:
        """Derives the keys of the last chunk, for a request that has all earlier keys."""
        last = self.num_chunks * self.spec.chunk_tokens
        keys.follow(self.hashes)
        for group_index in range(len(self.spec.groups)):
            keys.key(group_index, last)

    def load(self, keys: RequestKeys, blocks: Any, num_tokens: int) -> list[bytes]:
        """Plans the load and pins its keys. Returns them."""
        table = [[0 if b.is_null else b.block_id for b in group] for group in blocks.blocks]
        pinned = []
        for transfer in plan_load(self.spec, num_tokens, 0, table):
            key = keys.key(transfer.group_index, transfer.end_token)
            assert self.index.pin(key) is not None
            pinned.append(key)
        return pinned


class Everything:
    """A tier that holds all chunks and answers at once, so only the planner's time is measured."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens

    def __call__(self, group_index: int, end_token: int) -> LookupResult:
        return LookupResult.HIT

    def num_leading_held(self, group_index: int, first_end: int, last_end: int) -> int:
        return (last_end - first_end) // self._chunk_tokens + 1

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        return last_end

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        return False


class Clock:
    """Thread CPU times of each name, in microseconds."""

    def __init__(self) -> None:
        self._times_us: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.thread_time_ns()
        result = call(*arguments)
        self._times_us[name].append((time.thread_time_ns() - start) / 1000)
        return result

    def medians_us(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self._times_us.items()}


def measure(preset: str, num_tokens: int, scenario: str, rounds: int) -> dict[str, Any]:
    hashes = [os.urandom(32) for _ in range(num_tokens // HASH_TOKENS[preset])]
    stored = [is_stored(scenario, group) for group in PRESETS[preset]]
    upstream = Upstream(PRESETS[preset], stored, num_tokens, hashes, HASH_TOKENS[preset])
    ours = Ours(preset, num_tokens, hashes, scenario)
    clock = Clock()
    hits: dict[str, int] = {}
    gc.disable()
    for number in range(rounds):
        # The order alternates, so that the caches are equally warm for both sides.
        sides = [lambda: run_upstream(upstream, clock, hits, ours.step_start), lambda: run_ours(ours, clock, hits)]
        for side in sides if number % 2 else reversed(sides):
            side()
    gc.enable()
    gc.collect()
    assert bool(hits["vllm"]) == bool(hits["ours"]) == (scenario == "full")
    return {"preset": preset, "tokens": num_tokens, "scenario": scenario, "hit_tokens": hits, "us": clock.medians_us()}


def run_upstream(upstream: Upstream, clock: Clock, hits: dict[str, int], computed_tokens: int) -> None:
    warming = upstream.new_request()
    upstream.lookup(warming)
    upstream.end(warming)
    request = upstream.new_request()
    found = hits["vllm"] = clock.time("vllm first", upstream.lookup, request)
    assert clock.time("vllm again", upstream.lookup, request) == found
    if found:
        clock.time("vllm load", upstream.allocate, request, allocated_blocks(upstream.groups, found), found)
        assert upstream.num_loading(request) > 0
    upstream.end(request)
    stepping = upstream.new_request()
    clock.time("vllm step", upstream.lookup, stepping, computed_tokens)
    upstream.end(stepping)


def run_ours(ours: Ours, clock: Clock, hits: dict[str, int]) -> None:
    warming = ours.new_request()
    for _ in range(2):
        ours.match(warming)
    ours.end(warming)
    ours.search(ours.first()[0])
    keys, found = clock.time("first", ours.first)
    hits["ours"] = found
    assert clock.time("search again", ours.search, keys) == found
    request = ours.new_request()
    assert clock.time("connector first", ours.match, request) == found
    assert clock.time("again", ours.match, request) == found
    ours.end(request)
    if found:
        for key in clock.time("load", ours.load, keys, allocated_blocks(ours.spec.groups, found), found):
            ours.index.unpin(key)
        clock.time("of which planning", longest_hit, ours.spec, ours.num_tokens, 0, *[Everything(1)] * 2)
    chunk = ours.spec.chunk_tokens
    clock.time("step", ours.search, ours.new_keys(), ours.step_start)
    before = ours.hashes[: -(chunk // ours.layout.hash_block_tokens)]
    growing = ours.new_keys().follow(before)
    for group_index in range(len(ours.spec.groups)):
        growing.between(group_index, ours.num_chunks - STEP_CHUNKS, ours.num_chunks - 1)
    clock.time("grow", ours.grow, growing)
    clock.time("clock", int)
    # Lower limits of `first` and `search again` for a full prefix: only its keys and the tier's answers.
    full = next(i for i, group in enumerate(ours.spec.groups) if group.kind is GroupKind.FULL)
    ends = range(chunk, ours.num_chunks * chunk + 1, chunk)
    made = clock.time("of which keys", ours.keys.keys, full, ours.hashes, ends)
    clock.time("of which tier", ours.index.leading, made)


def ratios(us: dict[str, float]) -> dict[str, float]:
    peers = {
        "first": "first",
        "connector first": "first",
        "again": "again",
        "search again": "again",
        "step": "step",
        "load": "load",
    }
    return {name: us[f"vllm {peer}"] / us[name] for name, peer in peers.items() if name in us}


def main() -> None:
    parser = argparse.ArgumentParser(description="longest_hit and plan_load compared with vLLM's lookup")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, GOAL_TOKENS, 1048576])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="planner_lookup.json", help="file for the figures")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = []
    for preset in arguments.presets:
        for asked_tokens in arguments.tokens:
            for scenario in SCENARIOS:
                if scenario == "no_state" and len(PRESETS[preset]) == 1:
                    continue
                # Whole chunks plus one token, so that the last chunk can be part of the hit on both sides.
                chunk = make_layout(preset).spec.chunk_tokens
                num_tokens = max(asked_tokens // chunk, STEP_CHUNKS + 1) * chunk + 1
                result = measure(preset, num_tokens, scenario, arguments.rounds)
                result |= {"asked_tokens": asked_tokens, "ratios": ratios(result["us"])}
                results.append(result)
                print(f"{preset} {num_tokens} tokens, {scenario}: hit {result['hit_tokens']}")
                print("   us      " + "  ".join(f"{name} {value:.1f}" for name, value in result["us"].items()))
                print("   vllm/us " + "  ".join(f"{name} {value:.1f}x" for name, value in result["ratios"].items()))
    summary = summarise(results)
    about = {"python": platform.python_version(), "rounds": arguments.rounds, "chunk": "auto"}
    with open(arguments.json, "w") as out:
        json.dump({"about": about, "summary": summary, "results": results}, out, indent=1)


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the lookups that miss the goal, and the time of a step at each length."""
    under = {}
    for result in results:
        for name in ("first", "again"):
            if result["asked_tokens"] == GOAL_TOKENS and result["ratios"][name] < GOAL:
                under[f"{result['preset']} {result['scenario']} {name}"] = result["ratios"][name]
    print(f"\nunder {GOAL}x at {GOAL_TOKENS} tokens: ", under or "none")
    print(f"\nus for the last {STEP_CHUNKS} chunks of a full hit (step), and for the keys of one more chunk (grow):")
    steps: dict[str, dict[int, dict[str, float]]] = {}
    for result in results:
        if result["scenario"] == "full":
            us = {name: result["us"][name] for name in ("step", "grow", "vllm step")}
            steps.setdefault(result["preset"], {})[result["tokens"]] = us
    for preset, by_tokens in steps.items():
        for num_tokens, us in by_tokens.items():
            print(f"   {preset:10} {num_tokens:8} tokens  " + "  ".join(f"{k} {v:.1f}" for k, v in us.items()))
    return {"under_goal": under, "steps_us": steps}


if __name__ == "__main__":
    main()
