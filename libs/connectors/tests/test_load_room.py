"""Waits of requests for room beside other loads, in connectors that do not plan with `hybridkv.planner.life`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, LoadAdmission, Verdict
from hybridkv.planner.admission import MAX_GATE_S

NUM_TOKENS = 64


@pytest.mark.parametrize("is_idle", [True, False])
def test_an_offer_ends_the_wait_for_room(is_idle: bool) -> None:
    """The engine had no room for the offered load. Short waits behind several failed loads do not add up."""
    now = SimpleNamespace(s=0.0)
    admission = LoadAdmission(CacheSpec((GroupSpec(GroupKind.FULL, 8),), 8), 64)
    room = LoadRoom(admission, lambda: now.s)
    room.pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 100)  # type: ignore[assignment]
    admission.fail("first", NUM_TOKENS)
    assert room.verdict("r", NUM_TOKENS) is Verdict.WAIT
    admission.give_back("first")
    if not is_idle:
        admission.take("other", NUM_TOKENS)
    assert room.verdict("r", NUM_TOKENS) is Verdict.ADMIT
    now.s = MAX_GATE_S
    admission.fail("second", NUM_TOKENS)
    assert room.verdict("r", NUM_TOKENS) is Verdict.WAIT
    now.s = 2 * MAX_GATE_S
    assert room.verdict("r", NUM_TOKENS) is Verdict.REFUSE
