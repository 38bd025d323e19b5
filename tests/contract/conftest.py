"""Fixtures of the connector tests: the connectors are registered with vLLM and shut down after each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hybridkv.connectors.vllm import register


@pytest.fixture(autouse=True, scope="session")
def registered() -> None:
    register()


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """Connectors that a test started."""
    connectors: list[Any] = []
    yield connectors
    for connector in connectors:
        connector.shutdown()
