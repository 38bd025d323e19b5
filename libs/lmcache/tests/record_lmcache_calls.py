"""Records which tokens and blocks LMCache's own vLLM connector stores and retrieves for generated requests.

Run by hand, with the interpreter of an environment that has LMCache and not vLLM:

    python libs/lmcache/tests/record_lmcache_calls.py > libs/lmcache/tests/golden/lmcache_calls_VERSION.json

Only names of base classes are used of vLLM; they are faked here.
"""

import importlib.abc
import importlib.machinery
import json
import random
import sys
import types


class _Names(types.ModuleType):
    """A module in which every name is a class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".", maxsplit=1)[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


GROUPS = {
    "deepseek_v4": [256, 64, 64, 4, 8],
    "qwen3_next": [256, 256, 256, 256],
    "gemma3": [32, 32, 32, 32, 32, 32],
    "single": [16],
}
CHUNK = 256


def _case(meta: types.ModuleType, name: str, blocks: list[int], chance: random.Random) -> dict[str, object]:
    tokens = chance.randrange(1, 4200)
    local = chance.choice([0, 0, chance.randrange(0, tokens) // 256 * 256])
    found = chance.choice([0, local, min(tokens // 256 * 256, local // 256 * 256 + 256 * chance.randrange(4))])
    tracker = meta.LMCacheMPRequestTracker.__new__(meta.LMCacheMPRequestTracker)
    tracker.request_id, tracker.cache_salt, tracker.request_configs = "request", "", None
    tracker.max_offload_tokens, tracker.mm_adjusted_prompt_ids = None, []
    tracker.packed_tokens = b""  # newer versions only
    tracker.all_token_ids, tracker.num_prompt_tokens = list(range(tokens)), tokens
    tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens = local, found
    tracker.num_stored_tokens, tracker.num_scheduled_tokens = found, 0
    tracker.state = meta.LMCacheMPRequestState.WAITING_FOR_LOAD
    tables = {group: list(range(1, 1 + -(-tokens // size))) for group, size in enumerate(blocks)}
    tracker.allocated_block_ids = tables
    calls = [_call(meta.LMCacheMPRequestMetadata.GetRetrieveMetadata(tracker, CHUNK, blocks))]
    tracker.state = meta.LMCacheMPRequestState.READY
    steps = []
    computed = max(local, found)
    while computed < tokens:
        step = min(chance.randrange(1, 1500), tokens - computed)
        computed += step
        tracker.num_scheduled_tokens += step
        short = chance.choice([None, chance.randrange(len(blocks))])
        tracker.allocated_block_ids = {
            group: table[: -(-computed // blocks[group]) - (group == short)] for group, table in tables.items()
        }
        lengths = [len(tracker.allocated_block_ids[group]) for group in range(len(blocks))]
        before = tracker.num_stored_tokens
        call = _call(meta.LMCacheMPRequestMetadata.GetStoreMetadata(tracker, CHUNK, blocks))
        steps.append({"computed": computed, "lengths": lengths, "stored": before, "call": call})
    return {"groups": name, "tokens": tokens, "local": local, "found": found, "retrieve": calls[0], "steps": steps}


def _call(metadata: object) -> dict[str, object] | None:
    if metadata is None:
        return None
    op = metadata.op  # type: ignore[attr-defined]
    # Block ids are runs, so first and last describe them.
    runs = [[ids[0], ids[-1], len(ids)] if ids else [] for ids in op.block_ids]
    return {"start": op.start, "end": op.end, "blocks": runs}


def main() -> None:
    sys.meta_path.insert(0, _Finder())
    import lmcache.integration.vllm.lmcache_mp_metadata as meta
    from lmcache import __version__

    chance = random.Random(0)
    cases = [_case(meta, name, blocks, chance) for name, blocks in GROUPS.items() for _ in range(25)]
    print(json.dumps({"lmcache": __version__, "chunk": CHUNK, "groups": GROUPS, "cases": cases}))


if __name__ == "__main__":
    main()
