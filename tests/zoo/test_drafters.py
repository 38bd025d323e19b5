"""Engines that draft tokens: n-grams of the prompt, and an EAGLE head, for models with full attention and with windows.

The environment names the model and the method; each needs a process of its own. On vLLM's CPU build no model with
recurrent layers can draft: the kernel that moves its states is written in Triton.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import trial as trials
from equality import require_close
from families import FAMILIES, HIT_TOKENS, PROMPT_TOKENS
from harness import Result, inspect_model_here, make_prompt
from trial import KV_TRANSFER_CONFIG, hits

NUM_DRAFTS: Final = 3
ANSWER_TOKENS: Final = 48
FAMILY, METHOD = os.environ.get("HYBRIDKV_DRAFTER", "llama,ngram").split(",")
_BY_NAME: Final = {family.name: family for family in FAMILIES}


def repeating_prompts() -> list[list[int]]:
    """Prompts with a part that occurs many times, so that n-grams of the prompt find drafts."""
    stems = [make_prompt(37, seed=length) for length in PROMPT_TOKENS]
    return [(stem * length)[:length] for stem, length in zip(stems, PROMPT_TOKENS, strict=True)]


def speculative_config(method: str, family: str, directory: Path) -> dict[str, Any]:
    """Argument of the engine. The EAGLE head has one layer with random weights."""
    common = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        return common | {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    head = directory / f"eagle-of-{family}"
    if not head.exists():
        target = directory / f"target-of-{family}"
        _BY_NAME[family].write(target)
        config = json.loads((target / "config.json").read_text())
        head.mkdir()
        changes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
        (head / "config.json").write_text(json.dumps(config | changes))
        inspect_model_here("EagleLlamaForCausalLM")
    return common | {"model": str(head), "draft_load_config": {"load_format": "dummy"}}


def kv_transfer_config() -> dict[str, Any]:
    extra = KV_TRANSFER_CONFIG["kv_connector_extra_config"] | {"weights_digest": "tiny"}  # the head has no files
    return KV_TRANSFER_CONFIG | {"kv_connector_extra_config": extra}


def lost_and_restored(family: str, directory: Path, arguments: Mapping[str, Any]) -> tuple[list[Result], list[Result]]:
    """Results of the engine's own hits and, after it lost its cache, of restored hits. Compares the restored bytes."""
    prompts = repeating_prompts()
    with trials.running(
        _BY_NAME[family], directory, kv_transfer_config=kv_transfer_config(), arguments=arguments
    ) as trial:
        trial.one_by_one(prompts, max_tokens=ANSWER_TOKENS)
        own = trial.one_by_one(prompts, max_tokens=ANSWER_TOKENS)
        trial.lose_cache()
        restored = trial.one_by_one(prompts, max_tokens=ANSWER_TOKENS)
        # Drafts are sometimes ready in other steps.
        require_close(trial.audit, own, restored, trial.noise)
        assert trial.audit.restored_tokens == sum(hits(restored))
        return own, restored


def test_a_drafter_changes_neither_hits_nor_output(directory: Path) -> None:
    plain, _ = lost_and_restored(FAMILY, directory, {})  # first, since no engine starts after numba is imported
    config = speculative_config(METHOD, FAMILY, directory)
    _, restored = lost_and_restored(FAMILY, directory, {"speculative_config": config})
    assert any(step.num_tokens > 1 for result in restored for step in result.steps[1:]), "no token was drafted"
    assert hits(restored) == hits(plain) == list(HIT_TOKENS)
    assert [result.token_ids for result in restored] == [result.token_ids for result in plain]
