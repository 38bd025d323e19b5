"""Which setting of the engine kills it before it can end, and how a worker ends with a scheduler beside it."""

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
def test_without_a_shutdown_timeout_a_server_kills_its_engine(timeout_s: int, is_killed: bool) -> None:
    assert compat.is_killed_on_shutdown(configuration(shutdown_timeout=timeout_s)) is is_killed


def test_vllm_has_no_shutdown_timeout_unless_somebody_sets_one() -> None:
    """The field that the answer is read from, and the default that the documentation names."""
    from vllm.config import VllmConfig

    assert VllmConfig.__dataclass_fields__["shutdown_timeout"].default.default == 0


def test_a_platform_that_takes_its_time_anyway_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import utils

    monkeypatch.setattr(utils.current_platform, "is_rocm", lambda: True)
    assert not compat.is_killed_on_shutdown(configuration(shutdown_timeout=0))


def test_an_engine_that_knows_no_such_setting_is_not_spoken_of() -> None:
    assert not compat.is_killed_on_shutdown(configuration())


class Ending:
    """Both halves of an engine whose slow tier stands still, and a clock that goes on when it is looked at."""

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


def test_a_flush_leaves_time_to_close_in() -> None:
    end = Ending()
    flush_and_close(cast(Any, end), cast(Any, end), end)
    assert end.closed_within_s == [CLOSE_RESERVE_S]
    assert end.now_s <= DRAIN_S - CLOSE_RESERVE_S + 3.0, "each look takes a second, and the last is after the end"


def test_a_flush_that_fails_closes_the_worker_all_the_same() -> None:
    end = Ending(fails=True)
    with pytest.raises(OSError, match="cannot be made"):
        flush_and_close(cast(Any, end), cast(Any, end), end)
    assert end.closed_within_s == [CLOSE_RESERVE_S]


def test_a_worker_without_a_scheduler_beside_it_has_all_the_time() -> None:
    end = Ending()
    flush_and_close(None, cast(Any, end), end)
    assert end.closed_within_s == [DRAIN_S]
