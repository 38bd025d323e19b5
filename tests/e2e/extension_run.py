"""One engine's answers, cold and after a load from the tier, as JSON: with hybridkv.native, or without.

A process of its own, because who copies is chosen once for a process:

    python extension_run.py KIND with|without DIRECTORY OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import harness
from harness import Result, exact_prompt_lengths, make_prompt

CONNECTOR: dict[str, Any] = {
    "kv_connector": "HybridOffloadConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "512MiB"}]},
}


def answers(results: list[Result]) -> list[dict[str, Any]]:
    return [
        {
            "tokens": list(result.token_ids),
            "logprobs": [sorted((token, value.hex()) for token, value in step.items()) for step in result.logprobs],
            "cached_tokens": result.num_cached_tokens,
        }
        for result in results
    ]


def main(kind: str, choice: str, directory: str, output: str) -> None:
    if choice == "without":
        sys.modules["hybridkv.native"] = None  # type: ignore[assignment]
    prompts = [make_prompt(length, seed=i) for i, length in enumerate(exact_prompt_lengths(kind, 3))]
    scratch = harness.scratch_directory(Path(directory))
    with harness.running_engine(kind, scratch, kv_transfer_config=CONNECTOR) as engine:
        cold = [engine.generate([prompt])[0] for prompt in prompts]
        engine.reset_prefix_cache()
        warm = [engine.generate([prompt])[0] for prompt in prompts]

    from hybridkv.tiers.digests import digest_by_xxhash, view_digest
    from hybridkv.transfer.native import copy_one_by_one, runs_copier

    was_used = runs_copier.cache_info().currsize == view_digest.cache_info().currsize == 1
    used = {
        "was_used": was_used,
        "copies": runs_copier() is not copy_one_by_one,
        "checksums": view_digest() is not digest_by_xxhash,
    }
    Path(output).write_text(json.dumps({"extension": used, "cold": answers(cold), "warm": answers(warm)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
