"""Recorded explain lines and counters of the connectors of a test."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest

from hybridkv.connectors.vllm.common.explain import Explanation
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics, OffloadStats
from hybridkv.metrics import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = logging.getLogger("vllm.hybridkv.explain")
PREFIX = "vllm:hybridkv_"


class Heard(logging.Handler):
    """Records every explanation and all counts."""

    def __init__(self) -> None:
        super().__init__()
        self.explanations: list[Explanation] = []
        self.counts = Counts()

    def emit(self, record: logging.LogRecord) -> None:
        self.explanations.append(msgspec.json.decode(record.getMessage(), type=Explanation))

    def add(self, stats: OffloadStats | None) -> None:
        if stats is not None:
            self.counts.merge(Counts.from_dict(stats.data))

    def forget(self) -> None:
        self.explanations.clear()
        self.counts = Counts()

    def counted(self, name: str) -> Counter[tuple[str, ...]]:
        """Values of a counter by its label values."""
        return Counter(
            {labels: value for found, labels, value in self.counts.data().counters if found == PREFIX + name}
        )


def _counting(monkeypatch: pytest.MonkeyPatch) -> Heard:
    handler = Heard()
    take = ConnectorMetrics.take

    def taking(metrics: ConnectorMetrics) -> OffloadStats | None:
        stats = take(metrics)
        handler.add(stats)
        return stats

    monkeypatch.setattr(ConnectorMetrics, "take", taking)
    return handler


@pytest.fixture
def heard_counts(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Counts alone: an explain line per request costs as much as the request."""
    return _counting(monkeypatch)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    handler = _counting(monkeypatch)
    level, propagates = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False
    LOGGER.addHandler(handler)
    yield handler
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(level)
    LOGGER.propagate = propagates
