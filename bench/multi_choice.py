"""One choice between children: HybridMultiConnector compared with vLLM's MultiConnector, with the same children.

Both sides run `get_num_new_matched_tokens` of the real class, for new requests, with 1, 2, 4 and 8 children:
- `offload`: children are scheduler halves of HybridOffloadConnector (the real lookup: keys, a `RamIndex`, the planner)
  that all hold the whole prompt of `--tokens`; vLLM chooses the first child, ours the child with the best score.
- `idle`: children answer a constant at once, so only the choice is measured. Our choice catches exceptions of children,
  computes scores, and stores each answer for its counts.

Not measured: the work after a choice (blocks, loads, the counts of an admitted request). The connectors are created
without an engine: their constructors are not called, and the fields that the method reads are set. Times are CPU time
of the thread for a batch of requests, the best of `--rounds`, in which the two sides alternate.

    python bench/multi_choice.py --json multi_choice.json
"""

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CHILDREN = (1, 2, 4, 8)
BLOCK_TOKENS = 16
CHUNK_TOKENS = 128
GRANULE_BYTES = 64
BATCH = 100


class Idle:
    """Child that answers a constant."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._num_tokens, True


class Offload:
    """The scheduler's half of HybridOffloadConnector over a tier that holds one whole prompt."""

    def __init__(self, hashes: list[bytes]) -> None:
        from hybridkv.connectors.vllm.common.identity.adapters import Adapters
        from hybridkv.connectors.vllm.common.layout import CacheLayout
        from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
        from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines
        from hybridkv.connectors.vllm.offload.scheduler import Identity, OffloadScheduler
        from hybridkv.hashing import ChunkKeys, GroupFingerprint
        from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LoadAdmission
        from hybridkv.tiers.ram import RamIndex
        from hybridkv.tiers.stack import TierStack

        group = GroupSpec(GroupKind.FULL, BLOCK_TOKENS)
        spec = CacheSpec((group,), CHUNK_TOKENS)
        group_print = GroupFingerprint(kind=group.kind, block_tokens=BLOCK_TOKENS, layers=())
        layout = CacheLayout(spec, ((),), (group_print,), BLOCK_TOKENS, "sha256", 1)
        keys = ChunkKeys(layout.fingerprint({}), BLOCK_TOKENS)
        num_tokens = len(hashes) * BLOCK_TOKENS
        index = RamIndex((num_tokens // CHUNK_TOKENS + 1) * GRANULE_BYTES, GRANULE_BYTES)
        for end in range(CHUNK_TOKENS, num_tokens + 1, CHUNK_TOKENS):
            key = keys.key(0, hashes, end)
            index.reserve(key, GRANULE_BYTES)
            index.commit(key)
        stack = TierStack(index, (), 1, time.monotonic)
        deadlines = Deadlines(lookup_s=10.0, load_s=30.0, clock=time.monotonic)
        self._scheduler = OffloadScheduler(
            layout, Identity(keys, Adapters(keys, 0)), stack, LoadAdmission(spec, 2048), deadlines, ConnectorMetrics()
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def forget(self) -> None:
        self._scheduler._requests.clear()


def upstream(children: list[Any]) -> tuple[Any, Callable[[], None]]:
    """vLLM's connector, and a function that removes its requests."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    connector = MultiConnector.__new__(MultiConnector)
    connector._connectors = children
    connector._requests_to_connector = {}
    return connector, connector._requests_to_connector.clear


def ours(children: list[Any]) -> tuple[Any, Callable[[], None]]:
    """Our connector, and a function that removes its requests."""
    from hybridkv.connectors.vllm.multi.children import Child
    from hybridkv.connectors.vllm.multi.config import ChildConfig
    from hybridkv.connectors.vllm.multi.connector import HybridMultiConnector
    from hybridkv.connectors.vllm.multi.selection import Selector
    from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LoadAdmission

    named = [Child(ChildConfig(f"child-{i}", "", 1.0, {}), child, True) for i, child in enumerate(children)]
    admission = LoadAdmission(CacheSpec((GroupSpec(GroupKind.FULL, BLOCK_TOKENS),), CHUNK_TOKENS), 2048)
    selector = Selector(named, 1.0, None, admission, time.monotonic)
    selector.bind_block_pool(SimpleNamespace(num_gpu_blocks=1 << 20, get_num_free_blocks=lambda: 1 << 20))
    connector = HybridMultiConnector.__new__(HybridMultiConnector)
    connector._scheduler = selector
    return connector, selector._requests.clear


def measure(kind: str, num_children: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    hashes = [os.urandom(32) for _ in range(num_tokens // BLOCK_TOKENS)]
    children = [Offload(hashes) if kind == "offload" else Idle(1024) for _ in range(num_children)]
    sides = {"vllm": upstream(children), "hybridkv": ours(children)}
    best_us: dict[str, float] = {}
    hits: dict[str, set[int]] = {name: set() for name in sides}
    ids = itertools.count()
    gc.disable()
    for _ in range(rounds):
        for name, (connector, forget) in sides.items():
            requests = [
                SimpleNamespace(request_id=str(next(ids)), num_tokens=num_tokens + 1, block_hashes=hashes)
                for _ in range(BATCH)
            ]
            ask = connector.get_num_new_matched_tokens
            start = time.thread_time_ns()
            answers = [ask(request, 0)[0] for request in requests]
            took_us = (time.thread_time_ns() - start) / 1000 / BATCH
            best_us[name] = min(took_us, best_us.get(name, took_us))
            hits[name].update(answers)
            forget()
            for child in children:
                if isinstance(child, Offload):
                    child.forget()
        # The order alternates, so that the caches are equally warm for both sides.
        sides = dict(reversed(sides.items()))
        gc.collect()
    gc.enable()
    assert hits["vllm"] == hits["hybridkv"] and len(hits["vllm"]) == 1
    return {
        "children": kind,
        "tokens": num_tokens,
        "num_children": num_children,
        "hit_tokens": hits["vllm"].pop(),
        "us": best_us,
        "hybridkv_over_vllm": best_us["hybridkv"] / best_us["vllm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="one choice between children, compared with vLLM's MultiConnector")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192], help="tokens in a prompt")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", default="multi_choice.json", help="file for the figures")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = []
    cases = [("idle", arguments.tokens[0]), *(("offload", tokens) for tokens in arguments.tokens)]
    for (kind, tokens), num_children in itertools.product(cases, CHILDREN):
        result = measure(kind, num_children, tokens, arguments.rounds)
        results.append(result)
        us = result["us"]
        print(
            f"{kind:8} {tokens} tokens, {num_children} children: vllm {us['vllm']:8.2f} us, "
            f"hybridkv {us['hybridkv']:8.2f} us, {result['hybridkv_over_vllm']:.2f}x"
        )
    with open(arguments.json, "w") as out:
        json.dump(results, out, indent=1)


if __name__ == "__main__":
    main()
