"""`kv_load_failure_policy: fail` does as asked: the request whose load fails ends with an error, and only that one."""

from __future__ import annotations

from typing import Any

import pytest
from audit import Audit
from harness import Engine, exact_prompt_lengths, make_prompt


@pytest.fixture(scope="module")
def kv_transfer_config() -> dict[str, Any]:
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "512MiB"}]},
    }


def test_a_failed_load_ends_its_request_with_an_error_and_no_other(engine: Engine, audit: Audit, kind: str) -> None:
    damaged, sound = (make_prompt(exact_prompt_lengths(kind, 1)[0], seed=seed) for seed in (1, 2))
    cold = [engine.generate([prompt])[0] for prompt in (damaged, sound)]
    first_keys = len(audit.stored) // 2
    engine.reset_prefix_cache()
    arena = engine.worker_connector._worker._arena
    near = engine.connector._scheduler._stack.near
    for key in list(audit.stored)[:first_keys]:
        slot = near.pin(key)
        arena.views(slot)[-1][-1] ^= 1
        near.unpin(key)
    warm = [engine.generate([prompt])[0] for prompt in (damaged, sound)]
    assert warm[0].finish_reason == "error" and warm[0].token_ids == ()
    assert warm[1].same_output(cold[1]) and warm[1].num_cached_tokens > 0
    # What was to blame is gone, so the same request again is computed or restored, and right.
    again = engine.generate([damaged])[0]
    assert again.same_output(cold[0])
