"""Which setting of the engine kills it before it can end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridkv.connectors.vllm import compat


def configuration(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


@pytest.mark.parametrize(("timeout_s", "is_killed"), [(0, True), (1, False), (300, False)])
def test_without_a_shutdown_timeout_a_server_kills_its_engine(timeout_s: int, is_killed: bool) -> None:
    assert compat.is_killed_at_its_end(configuration(shutdown_timeout=timeout_s)) is is_killed


def test_vllm_has_no_shutdown_timeout_unless_somebody_sets_one() -> None:
    """The field that the answer is read from, and the default that the documentation names."""
    from vllm.config import VllmConfig

    assert VllmConfig.__dataclass_fields__["shutdown_timeout"].default.default == 0


def test_a_platform_that_takes_its_time_anyway_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import utils

    monkeypatch.setattr(utils.current_platform, "is_rocm", lambda: True)
    assert not compat.is_killed_at_its_end(configuration(shutdown_timeout=0))


def test_an_engine_that_knows_no_such_setting_is_not_spoken_of() -> None:
    assert not compat.is_killed_at_its_end(configuration())
