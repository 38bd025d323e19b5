"""Block hashing compared with vLLM's own, on one prompt of 128k tokens.

    PYTHONPATH=libs/hashing/src python bench/hashing.py [--tokens N] [--rounds N] [--json FILE]

Measures thread CPU time, the best of N rounds in which all variants alternate in one process:

- cold: the hashes of every full block of the prompt, from a list of token ids;
- grow: one more block after all others. `TokenHashes` gets the number of hashed tokens, as from the connector;
  `RequestBlockHashList` finds this number itself.

Variants: vLLM's `get_request_block_hasher` with sha256 (its default) and sha256_cbor; `RequestBlockHashList` with the
same functions, which must give equal hashes; `TokenHashes`, our chain for engines without stable hashes; and
`ChunkKeys.keys` over vLLM's hashes: the whole cost for the connector if these hashes are stable. No token is hashed. A
ratio is the time of vLLM's sha256 over that of the variant: larger is faster.
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core import kv_cache_utils

from hybridkv.hashing import ChunkKeys, Fingerprint, GroupFingerprint, RequestBlockHashList, TokenHashes

BLOCKS = (4, 16, 64, 128, 544)
CHUNK_BLOCKS = 8
"""Blocks in a chunk, for keys derived from the engine's hashes."""


def fingerprint(block: int) -> Fingerprint:
    return Fingerprint(
        facts={"model": "bench", "cache_config.cache_dtype": ""},
        chunk_tokens=block * CHUNK_BLOCKS,
        hash_algorithm="sha256",
        tensor_parallel_size=1,
        groups=(GroupFingerprint(kind="full", block_tokens=block, layers=()),),
    )


def request(tokens: list[int], hashes: list[bytes]) -> Any:
    """A request with the attributes that vLLM's hasher reads."""
    return SimpleNamespace(
        num_tokens=len(tokens),
        all_token_ids=tokens,
        block_hashes=hashes,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
    )


class Vllm:
    def __init__(self, function: Callable[[Any], bytes]) -> None:
        self.function = function

    def start(self, block: int) -> None:
        kv_cache_utils.init_none_hash(self.function)
        self._hasher = kv_cache_utils.get_request_block_hasher(block, self.function)
        self._hashes: list[bytes] = []

    def run(self, tokens: list[int]) -> list[bytes]:
        self._hashes += self._hasher(request(tokens, self._hashes))
        return self._hashes


class Ours:
    def __init__(self, function: Callable[[Any], bytes]) -> None:
        self.function = function

    def start(self, block: int) -> None:
        kv_cache_utils.init_none_hash(self.function)
        self._request = request([], [])
        self._hashes = RequestBlockHashList(self._request, block, self.function, kv_cache_utils.NONE_HASH)
        self._seen: list[bytes] = []

    def run(self, tokens: list[int]) -> list[bytes]:
        self._request.all_token_ids, self._request.num_tokens = tokens, len(tokens)
        self._seen += self._hashes[len(self._seen) :]
        return self._seen


class Chain:
    def start(self, block: int) -> None:
        self._hashes = TokenHashes(block)
        self._known_tokens = 0

    def run(self, tokens: list[int]) -> list[bytes]:
        known_tokens, self._known_tokens = self._known_tokens, len(tokens)
        return self._hashes.prefix_hashes(tokens, known_tokens)


class Keys:
    """Chunk keys from hashes of the engine."""

    def __init__(self, engine_hashes: dict[int, list[bytes]]) -> None:
        self._engine_hashes = engine_hashes

    def start(self, block: int) -> None:
        self._keys = ChunkKeys(fingerprint(block), block)
        self._chunk = block * CHUNK_BLOCKS
        self._hashes = self._engine_hashes[block]
        self._made: list[bytes] = []

    def run(self, tokens: list[int]) -> list[bytes]:
        first = (len(self._made) + 1) * self._chunk
        self._made += self._keys.keys(0, self._hashes, range(first, len(tokens) + 1, self._chunk))
        return self._made


def spent(action: Callable[[list[int]], list[bytes]], tokens: list[int]) -> int:
    begin = time.thread_time_ns()
    action(tokens)
    return time.thread_time_ns() - begin


def measure(variants: dict[str, Any], block: int, tokens: list[int], rounds: int) -> dict[str, dict[str, float]]:
    whole = tokens[: len(tokens) // block * block]
    # The next block ends a chunk, so that the keys variant has a key to derive.
    part = whole[: len(whole) // (block * CHUNK_BLOCKS) * block * CHUNK_BLOCKS - block]
    grown = tokens[: len(part) + block]
    best = {name: {"cold_us": float("inf"), "grow_us": float("inf")} for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            variant.start(block)
            cold = spent(variant.run, part) / 1000
            best[name]["cold_us"] = min(best[name]["cold_us"], cold)
            best[name]["grow_us"] = min(best[name]["grow_us"], spent(variant.run, grown) / 1000)
    for name, times in best.items():
        times["cold_ns_per_token"] = times["cold_us"] * 1000 / len(part)
        for phase in ("cold", "grow"):
            times[f"{phase}_ratio"] = best["vllm sha256"][f"{phase}_us"] / times[f"{phase}_us"]
            if name.endswith("cbor"):
                times[f"{phase}_ratio_to_vllm_cbor"] = best["vllm sha256_cbor"][f"{phase}_us"] / times[f"{phase}_us"]
    return best


def check_equal(tokens: list[int], block: int) -> None:
    for function in (sha256, sha256_cbor):
        hashes = []
        for kind in (Vllm, Ours):
            variant = kind(function)
            variant.start(block)
            hashes.append(list(variant.run(tokens)))
        if hashes[0] != hashes[1]:
            raise SystemExit(f"block hashes differ from vLLM's: {function.__name__}, block {block}")


def engine_hashes(tokens: list[int], block: int) -> list[bytes]:
    variant = Vllm(sha256)
    variant.start(block)
    return variant.run(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generator = random.Random(0)
    tokens = [generator.randrange(150_000) for _ in range(options.tokens)]
    made = {block: engine_hashes(tokens, block) for block in options.blocks}
    variants = {
        "vllm sha256": Vllm(sha256),
        "vllm sha256_cbor": Vllm(sha256_cbor),
        "RequestBlockHashList sha256": Ours(sha256),
        "RequestBlockHashList sha256_cbor": Ours(sha256_cbor),
        "TokenHashes": Chain(),
        "ChunkKeys over engine hashes": Keys(made),
    }
    results: dict[int, dict[str, dict[str, float]]] = {}
    for block in options.blocks:
        check_equal(tokens[: 64 * block], block)
        results[block] = measure(variants, block, tokens, options.rounds)
        print(f"\nblock {block}, {options.tokens} tokens")
        print(f"  {'':34}{'cold us':>12}{'ns/token':>10}{'x':>7}{'+1 block us':>13}{'x':>7}")
        for name, times in results[block].items():
            print(
                f"  {name:34}{times['cold_us']:12.0f}{times['cold_ns_per_token']:10.1f}{times['cold_ratio']:7.1f}"
                f"{times['grow_us']:13.1f}{times['grow_ratio']:7.1f}"
            )
    if options.json:
        about = {"tokens": options.tokens, "rounds": options.rounds, "python": platform.python_version()}
        options.json.write_text(json.dumps({"about": about, "blocks": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
