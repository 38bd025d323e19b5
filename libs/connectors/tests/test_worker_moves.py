"""An unreachable secondary tier costs a worker only the moves that need it."""

from __future__ import annotations

from typing import Any, cast

from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.messages import StepPlan
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.worker import OPEN_AGAIN_S, OffloadWorker
from hybridkv.tiers import FailureReason, Slot
from hybridkv.tiers.ram import RamArena
from hybridkv.tiers.stack import Direction, TierMove
from hybridkv.transfer import InlineCopyEngine
from kits.tiers.reference import ReferenceMedium

SLOT = Slot(((0, 100),))


def test_moves_fail_while_the_secondary_tier_is_unreachable() -> None:
    engine = InlineCopyEngine()
    arena = RamArena(1 << 16)
    worker = OffloadWorker(cast(Any, None), arena, CopyPaths(engine, engine, 30.0, lambda: 0.0), ConnectorMetrics())
    num_tries = 0

    def open_medium(namespace: bytes) -> ReferenceMedium:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise RuntimeError("can't start new thread")
        return ReferenceMedium()

    worker.bind_secondary_tiers({"disk": open_medium})
    arena.views(SLOT)[0][:] = bytes(100)
    assert arena.seal_all([(b"key", SLOT)]) == [None]
    worker.start_loads(StepPlan(moves=(TierMove(1, Direction.CASCADE, "disk", b"key", SLOT, SLOT),), namespace=b"n"))
    outcome = worker.outcome()
    assert outcome is not None and outcome.moves[1].failure is not None
    assert outcome.moves[1].failure.reason is FailureReason.BUSY, "nothing was tried"
    assert "can't start new thread" in outcome.moves[1].failure.detail
    worker.start_loads(StepPlan(moves=(TierMove(2, Direction.CASCADE, "disk", b"key", SLOT, SLOT),), namespace=b"n"))
    worker.results()
    outcome = worker.outcome()
    assert outcome is not None and outcome.moves[2].failure is None
    worker.close()


def test_a_tier_that_cannot_be_opened_at_the_start_is_tried_again_without_moves() -> None:
    engine, now_s, attempts = InlineCopyEngine(), 0.0, list[tuple[bytes, float]]()
    paths = CopyPaths(engine, engine, 30.0, lambda: now_s)
    worker = OffloadWorker(cast(Any, None), RamArena(1 << 16), paths, ConnectorMetrics())

    def open_medium(namespace: bytes) -> ReferenceMedium:
        attempts.append((namespace, now_s))
        if len(attempts) < 4:
            raise OSError("address already in use")
        return ReferenceMedium()

    worker.bind_secondary_tiers({"peer": open_medium}, frozenset({"peer"}))
    worker.start_loads(StepPlan(namespace=b"n"))
    for _ in range(100):
        now_s += OPEN_AGAIN_S / 5
        worker.start_loads(StepPlan())
    assert attempts == [(b"n", pauses * OPEN_AGAIN_S) for pauses in (0, 1, 3, 7)]
    worker.close()
