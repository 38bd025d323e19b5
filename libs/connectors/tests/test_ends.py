"""Shutdown: the engine setting that kills it early, and the end of a worker with a scheduler in its process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.offload.connector import CLOSE_RESERVE_S, flush_and_close
from hybridkv.connectors.vllm.offload.worker import DRAIN_S


def configuration(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


@pytest.mark.parametrize(("timeout_s", "is_killed"), [(0, True), (1, False), (300, False)])
def test_an_engine_without_a_shutdown_timeout_is_killed(timeout_s: int, is_killed: bool) -> None:
    assert compat.is_killed_on_shutdown(configuration(shutdown_timeout=timeout_s)) is is_killed


def test_the_default_shutdown_timeout_of_vllm_is_0() -> None:
    """Checks the field that the product reads and the default in the documentation."""
    from vllm.config import VllmConfig

    assert VllmConfig.__dataclass_fields__["shutdown_timeout"].default.default == 0


def test_a_platform_with_its_own_grace_period_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import utils

    monkeypatch.setattr(utils.current_platform, "is_rocm", lambda: True)
    assert not compat.is_killed_on_shutdown(configuration(shutdown_timeout=0))


def test_an_engine_without_the_setting_counts_as_not_killed() -> None:
    assert not compat.is_killed_on_shutdown(configuration())


class Ending:
    """Both halves of an engine with a blocked secondary tier, and a clock that advances with each read."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.now_s = 0.0
        self.closed_within_s: list[float] = []

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def has_stores_in_flight(self) -> bool:
        return True

    def plan_moves(self) -> None:
        if self.fails:
            raise OSError("the plan cannot be made")

    def start_stores(self, plan: None) -> None: ...

    def start_moves(self, plan: None) -> None: ...

    def results(self) -> None: ...

    def outcome(self) -> None: ...

    def close(self, drain_s: float) -> None:
        self.closed_within_s.append(drain_s)


def test_a_flush_leaves_time_for_the_close() -> None:
    end = Ending()
    flush_and_close(cast(Any, end), cast(Any, end), end)
    assert end.closed_within_s == [CLOSE_RESERVE_S]
    assert end.now_s <= DRAIN_S - CLOSE_RESERVE_S + 3.0, "each read takes a second, and the last one is after the end"


def test_a_failed_flush_still_closes_the_worker() -> None:
    end = Ending(fails=True)
    with pytest.raises(OSError, match="cannot be made"):
        flush_and_close(cast(Any, end), cast(Any, end), end)
    assert end.closed_within_s == [CLOSE_RESERVE_S]


def test_a_worker_without_a_scheduler_gets_all_the_time() -> None:
    end = Ending()
    flush_and_close(None, cast(Any, end), end)
    assert end.closed_within_s == [DRAIN_S]
