"""Observes and changes the planned transfers of loads between planner and connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridkv.planner import CacheSpec, Transfer, TransferRun, plan_load_runs, transfers_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def change_loads(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[CacheSpec, int, list[Transfer]], list[Transfer] | None]
) -> None:
    """Replaces the transfers of every load by the result of `change`, unless that is None."""

    def planned(spec: CacheSpec, num_tokens: int, *arguments: Any) -> tuple[TransferRun, ...]:
        runs = plan_load_runs(spec, num_tokens, *arguments)
        changed = change(spec, num_tokens, list(transfers_of(runs, spec.chunk_tokens)))
        if changed is None:
            return runs
        return tuple(TransferRun(one.group_index, one.end_token, 1, one.first_block, one.block_ids) for one in changed)

    monkeypatch.setattr("hybridkv.connectors.vllm.offload.loads.loads_in_flight.plan_load_runs", planned)
