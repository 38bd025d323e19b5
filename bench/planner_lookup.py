"""`longest_hit` and `plan_load` against the lookup of vLLM's own offloading connector, side by side in one process.

What runs on vLLM's side: the real `OffloadingConnectorScheduler` over the real `CPUOffloadingManager` (LRU), one block
a chunk, as it comes. `first` is the first `get_num_new_matched_tokens` of a request, which makes its keys; `again`
repeats it, as for a request that waits; `alloc` is `update_state_after_alloc` for the whole hit, which pins every key.

What runs on ours, for the same requests:
- `key by key`: `longest_hit` with a lookup that makes a key when it is asked for (block hash + group, the bytes that
  vLLM's key has) and looks it up in a `RamIndex`. Nothing is kept between calls, so no second one is cheaper.
- `ranges`: `longest_hit` over a tier that answers ranges: one dict of prefix hashes a group, walked by C code. It needs
  no keys. `RamIndex` has no such method yet: this is what the planner allows, not what the connector does.
- `load`: block ids read off the engine's objects, `plan_load`, and a pin of every key in the `RamIndex`. `plan` is
  `plan_load` alone.

Not measured on either side: hashing tokens, and the connector around it. hybridkv's connector makes keys with a keyed
BLAKE3, which costs more than the concatenation here. Requests are plain objects with the attributes that vLLM reads,
block hashes are random bytes: neither side looks into them. Ours is measured with the connector's automatic chunk
(`auto`: 128 tokens or the least common multiple of the blocks, so up to an eighth of vLLM's keys) and with the smallest
chunk (`unit`), where the full group has as many keys as vLLM's. Times are CPU time of the thread, best of `--rounds`,
variants interleaved.

    python bench/planner_lookup.py --json planner_lookup.json
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import compress, count
from operator import not_
from typing import Any

from planner_upstream import Upstream, allocated_blocks

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Hit, LookupResult, chunk_unit, longest_hit, plan_load
from hybridkv.tiers.ram import RamIndex

AUTO_CHUNK_TOKENS = 128
GRANULE_BYTES = 64


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
"""Nothing stored; everything; the full group alone, its states and windows missing."""


def is_stored(scenario: str, group: GroupSpec) -> bool:
    return scenario == "full" or (scenario == "no_state" and group.kind is GroupKind.FULL)


class Ours:
    """The planner over a tier with what one scenario stores."""

    def __init__(self, preset: str, num_tokens: int, hashes: list[bytes], scenario: str, chunk: str) -> None:
        groups = PRESETS[preset]
        unit = chunk_unit(groups)
        recurrent = any(group.kind is GroupKind.RECURRENT for group in groups)
        auto = unit if recurrent else -(-AUTO_CHUNK_TOKENS // unit) * unit
        self.spec = CacheSpec(groups, unit if chunk == "unit" else auto)
        self._num_tokens, self._hashes, self._hash_tokens = num_tokens, hashes, HASH_TOKENS[preset]
        self._suffixes = [index.to_bytes(4, "big") for index in range(len(groups))]
        step = self.spec.chunk_tokens // self._hash_tokens
        stored = [hashes[step - 1 :: step] if is_stored(scenario, group) else [] for group in groups]
        self.index = RamIndex((sum(map(len, stored)) + 1) * GRANULE_BYTES, GRANULE_BYTES)
        for suffix, group_hashes in zip(self._suffixes, stored, strict=True):
            for block_hash in group_hashes:
                self.index.reserve(block_hash + suffix, GRANULE_BYTES)
                self.index.commit(block_hash + suffix)
        self._dicts = [dict.fromkeys(group_hashes, True) for group_hashes in stored]
        self._step = step

    def key(self, group_index: int, end_token: int) -> bytes:
        return self._hashes[end_token // self._hash_tokens - 1] + self._suffixes[group_index]

    def by_key(self) -> int:
        hashes, hash_tokens, suffixes, find = self._hashes, self._hash_tokens, self._suffixes, self.index.lookup

        def lookup(group_index: int, end_token: int) -> LookupResult:
            return find(hashes[end_token // hash_tokens - 1] + suffixes[group_index])

        found = longest_hit(self.spec, self._num_tokens, 0, lookup)
        return found.num_tokens if isinstance(found, Hit) else 0

    def by_range(self) -> int:
        found = longest_hit(self.spec, self._num_tokens, 0, self._no_single_key, self)
        return found.num_tokens if isinstance(found, Hit) else 0

    def _no_single_key(self, group_index: int, end_token: int) -> LookupResult:
        raise AssertionError("asked for a single key")

    def held(self, group_index: int, first_end: int, last_end: int) -> int:
        hashes = self._hashes[first_end // self._hash_tokens - 1 : last_end // self._hash_tokens : self._step]
        absent = map(not_, map(self._dicts[group_index].__contains__, hashes))
        return next(compress(count(), absent), len(hashes))

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        stop = first_end // self._hash_tokens - 2
        hashes = self._hashes[last_end // self._hash_tokens - 1 : stop if stop >= 0 else None : -self._step]
        place = next(compress(count(), map(self._dicts[group_index].__contains__, hashes)), None)
        return 0 if place is None else last_end - place * self.spec.chunk_tokens

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        return False

    def load(self, blocks: Any, num_tokens: int) -> list[bytes]:
        """Keys that were pinned."""
        table = [[0 if b.is_null else b.block_id for b in group] for group in blocks.blocks]
        keys = [self.key(t.group_index, t.end_token) for t in plan_load(self.spec, num_tokens, 0, table)]
        for key in keys:
            assert self.index.pin(key) is not None
        return keys


class Clock:
    """Best thread CPU time of each name, in microseconds."""

    def __init__(self) -> None:
        self.best_us: dict[str, float] = {}

    def time(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.thread_time_ns()
        result = call(*arguments)
        took_us = (time.thread_time_ns() - start) / 1000
        self.best_us[name] = min(took_us, self.best_us.get(name, took_us))
        return result


def measure(preset: str, num_tokens: int, scenario: str, rounds: int) -> dict[str, Any]:
    hashes = [os.urandom(32) for _ in range(num_tokens // HASH_TOKENS[preset])]
    stored = [is_stored(scenario, group) for group in PRESETS[preset]]
    upstream = Upstream(PRESETS[preset], stored, num_tokens, hashes, HASH_TOKENS[preset])
    ours = {chunk: Ours(preset, num_tokens, hashes, scenario, chunk) for chunk in ("auto", "unit")}
    clock, hits = Clock(), {}
    blocks: dict[int, Any] = {}
    gc.disable()
    for _ in range(rounds):
        request = upstream.new_request()
        hits["vllm"] = clock.time("vllm first", upstream.lookup, request)
        assert clock.time("vllm again", upstream.lookup, request) == hits["vllm"]
        assert bool(hits["vllm"]) == (scenario == "full")
        if hits["vllm"]:
            boundary = hits["vllm"]
            blocks.setdefault(boundary, allocated_blocks(PRESETS[preset], boundary))
            clock.time("vllm alloc", upstream.allocate, request, blocks[boundary], boundary)
            assert upstream.num_loading(request) > 0
        upstream.end(request)
        # In turns, so that either finds the caches as warm as the other.
        ours = dict(reversed(ours.items()))
        for chunk, side in ours.items():
            hits[chunk] = clock.time(f"{chunk} key by key", side.by_key)
            assert clock.time(f"{chunk} ranges", side.by_range) == hits[chunk]
            if boundary := hits[chunk]:
                given = blocks.setdefault(boundary, allocated_blocks(PRESETS[preset], boundary))
                for key in clock.time(f"{chunk} load", side.load, given, boundary):
                    side.index.unpin(key)
                table = [[0 if b.is_null else b.block_id for b in group] for group in given.blocks]
                clock.time(f"{chunk} plan", plan_load, side.spec, boundary, 0, table)
        gc.collect()
    gc.enable()
    return {"preset": preset, "tokens": num_tokens, "scenario": scenario, "hit_tokens": hits, "us": clock.best_us}


def ratios(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    us = result["us"]
    for chunk in ("auto", "unit"):
        for way in ("key by key", "ranges"):
            yield f"{chunk} {way} / first", us["vllm first"] / us[f"{chunk} {way}"]
            yield f"{chunk} {way} / again", us["vllm again"] / us[f"{chunk} {way}"]
        if "vllm alloc" in us and f"{chunk} load" in us:
            yield f"{chunk} load / alloc", us["vllm alloc"] / us[f"{chunk} load"]


def main() -> None:
    parser = argparse.ArgumentParser(description="longest_hit and plan_load against vLLM's offloading lookup")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 131072, 1048576])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="planner_lookup.json", help="where the figures go")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = []
    for preset in arguments.presets:
        for num_tokens in arguments.tokens:
            for scenario in SCENARIOS:
                if scenario == "no_state" and len(PRESETS[preset]) == 1:
                    continue
                # One token more than whole blocks, so that the last one can be part of the hit on both sides.
                unit = chunk_unit(PRESETS[preset])
                result = measure(preset, num_tokens // unit * unit + 1, scenario, arguments.rounds)
                result["ratios"] = dict(ratios(result))
                results.append(result)
                print(f"{preset} {num_tokens} tokens, {scenario}: hit {result['hit_tokens']}")
                print("   us      " + "  ".join(f"{name} {value:.0f}" for name, value in result["us"].items()))
                print("   vllm/us " + "  ".join(f"{name} {value:.1f}x" for name, value in result["ratios"].items()))
    with open(arguments.json, "w") as out:
        json.dump(results, out, indent=1)


if __name__ == "__main__":
    main()
