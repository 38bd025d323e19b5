"""Counts what a peer connector and its engine still hold for requests; all counts are zero when all requests are over.

It reads the connector's internal state, of both halves and of the control thread, and the engine's.
"""

from __future__ import annotations

from typing import Any

from harness import Engine

Held = dict[str, int]


def held_by(engine: Engine) -> Held:
    """The number of each resource, and the engine's free blocks."""
    scheduler = engine.connector._scheduler
    agent: Any = engine.worker_connector._worker._agent
    memory, serving, reading = agent._reads._tools.memory, agent._server, agent._reads
    held = {
        "free blocks": engine.num_free_blocks,
        "requests": len(engine.scheduler.requests),
        "plans under way": int(scheduler.has_plan()),
        "leases": len(serving._leases),
        "tables of leases": len(serving._tables),
        "leases before or after their plan": len(serving._opened)
        + len(serving._held_before_plan)
        + len(serving._ended_before_plan),
        "slots with a nonce": int(memory._table.any(axis=1).sum()),
        "questions": len(serving._pending_digests),
        "reads": len(reading._reads),
        "reads that were left": len(reading._leftovers),
        "digests asked for": len(reading._rank_by_request),
        "slots being read": int(len(memory._scratch) - len(memory._free)),
        "leases of others": agent._remote_leases.num_leases,
    }
    if scheduler._producer is not None:
        held |= {"offered": scheduler._producer.num_offered, "slots": len(scheduler._producer._slots)}
        held["shortened"] = len(scheduler._producer._shortened)
    if scheduler._consumer is not None:
        held["requests with a producer"] = len(scheduler._consumer._loads)
    return held
